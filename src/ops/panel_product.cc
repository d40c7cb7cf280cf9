// SPDX-License-Identifier: Apache-2.0
#include "ops/panel_product.h"

#include <omp.h>

#include <map>
#include <mutex>
#include <utility>

#include "base/check.h"

namespace kascade {
namespace {

// oneDNN parallelises inside with OpenMP; our own pool does that here, so each of its threads asks for one.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOpenMpThread() { omp_set_num_threads(threads_); }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  int threads_;
};

[[noreturn]] void rethrow(const dnnl::error& error, int64_t columns) {
  if (error.status == dnnl_out_of_memory) throw_error<OutOfMemory>("oneDNN: product of {} columns", columns);
  throw_error<Unsupported>("oneDNN: product of {} columns: {} (status {})", columns, error.what(),
                           static_cast<int>(error.status));
}

}  // namespace

std::shared_ptr<const PanelProduct> PanelProduct::get(bool bf16, int64_t columns) {
  static std::mutex mutex;
  static std::map<std::pair<bool, int64_t>, std::weak_ptr<const PanelProduct>> products;
  const std::lock_guard lock(mutex);
  std::weak_ptr<const PanelProduct>& known = products[{bf16, columns}];
  std::shared_ptr<const PanelProduct> product = known.lock();
  if (product == nullptr) known = product = std::make_shared<const PanelProduct>(bf16, columns);
  return product;
}

PanelProduct::PanelProduct(bool bf16, int64_t columns) {
  try {
    using Memory = dnnl::memory;
    const OneOpenMpThread one;
    engine_ = dnnl::engine(dnnl::engine::kind::cpu, 0);
    const auto type = bf16 ? Memory::data_type::bf16 : Memory::data_type::f32;
    const Memory::desc x({kPanelRows, columns}, type, Memory::format_tag::ab);
    const Memory::desc w({columns, kPanelOutputs}, type,
                         bf16 ? Memory::format_tag::BA16a64b2a : Memory::format_tag::ba);
    const Memory::desc y({kPanelRows, kPanelOutputs}, Memory::data_type::f32, Memory::format_tag::ab);
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    desc_ = dnnl::matmul::primitive_desc(dnnl::matmul::desc(x, w, y), attributes, engine_);
    product_ = dnnl::matmul(desc_);
    scratchpad_bytes_ = static_cast<int64_t>(desc_.scratchpad_desc().get_size());
  } catch (const dnnl::error& error) {
    rethrow(error, columns);
  }
}

PanelProduct::Binding PanelProduct::bind() const {
  const auto unbound = [this](const dnnl::memory::desc& desc) {
    return dnnl::memory(desc, engine_, DNNL_MEMORY_NONE);
  };
  return {dnnl::stream(engine_), unbound(desc_.src_desc()), unbound(desc_.weights_desc()),
          unbound(desc_.dst_desc()), unbound(desc_.scratchpad_desc())};
}

void PanelProduct::run(Binding& binding, const void* x, const void* w, float* y, void* scratchpad) const {
  try {
    const OneOpenMpThread one;
    binding.x.set_data_handle(const_cast<void*>(x));
    binding.w.set_data_handle(const_cast<void*>(w));
    binding.y.set_data_handle(y);
    binding.scratchpad.set_data_handle(scratchpad);
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, binding.x.get()},
                                    {DNNL_ARG_WEIGHTS, binding.w.get()},
                                    {DNNL_ARG_DST, binding.y.get()},
                                    {DNNL_ARG_SCRATCHPAD, binding.scratchpad.get()}};
    dnnl::error::wrap_c_api(dnnl_primitive_execute(product_.get(), binding.stream.get(), 4, args),
                            "could not execute the product");
  } catch (const dnnl::error& error) {
    rethrow(error, desc_.src_desc().dims()[1]);
  }
}

}  // namespace kascade
