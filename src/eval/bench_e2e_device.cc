// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_e2e_device.h"

#include "base/check.h"

#if defined(KASCADE_CUDA)
#include <algorithm>

#include "attention/cuda/bench/read_bandwidth.h"
#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/cuda_model.h"
#include "engine/cuda/part_timer.h"
#include "engine/page_pool.h"
#include "ops/cuda/ops.h"
#endif

namespace kascade {

#if defined(KASCADE_CUDA)

namespace {

using cuda::check_call;

// A product that fills the GPU, multiplied for long enough that clocks settle.
constexpr int64_t kPeakRows = 16384, kPeakWidth = 8192;
constexpr int kPeakCalls = 60;

static_assert(cuda::kParts == kE2eParts && static_cast<size_t>(cuda::Part::kProducts) == 0 &&
              static_cast<size_t>(cuda::Part::kDense) == 1 && static_cast<size_t>(cuda::Part::kLayer0) == 2 &&
              static_cast<size_t>(cuda::Part::kAnchor) == 3 && static_cast<size_t>(cuda::Part::kReuse) == 4 &&
              static_cast<size_t>(cuda::Part::kRest) == 5);

const CudaModel* on_gpu(const PreparedModel& model) { return dynamic_cast<const CudaModel*>(&model); }

class Event {
 public:
  Event() { check_call(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(const cuda::Stream& stream) const {
    check_call(cudaEventRecord(event_, stream.get()), "cudaEventRecord");
  }
  double milliseconds_since(const Event& begin) const {
    float milliseconds = 0;
    check_call(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

double bf16_tflop_per_s() {
  const cuda::Stream stream;
  cuda::DeviceBuffer<__nv_bfloat16> weight{"bench weights"}, x{"bench rows"}, out{"bench products"};
  weight.grow(kPeakWidth * kPeakWidth);
  x.grow(kPeakRows * kPeakWidth);
  out.grow(kPeakRows * kPeakWidth);
  cuda::fill_normal(weight.data(), kPeakWidth * kPeakWidth, 0.01f, 1, stream.get());
  cuda::fill_normal(x.data(), kPeakRows * kPeakWidth, 1, 2, stream.get());
  const cuda::DeviceMatrix matrix{weight.data(), kPeakWidth, kPeakWidth};
  cuda::MatrixProducts products(cuda::Products::kFast);
  products.prepare(matrix, kPeakRows, false, false, stream.get());
  const auto multiply = [&] {
    products.multiply(matrix, x.data(), kPeakRows, out.data(), false, false, stream.get());
  };
  const Event begin, end;
  for (int i = 0; i < kPeakCalls / 2; ++i) multiply();
  begin.record(stream);
  for (int i = 0; i < kPeakCalls; ++i) multiply();
  end.record(stream);
  stream.wait();
  const double flop = 2.0 * static_cast<double>(kPeakRows) * static_cast<double>(kPeakWidth) *
                      static_cast<double>(kPeakWidth) * kPeakCalls;
  return flop / end.milliseconds_since(begin) * 1e-9;
}

}  // namespace

std::shared_ptr<const PreparedModel> random_gpu_model(std::shared_ptr<const Model> model, uint64_t seed) {
  return std::make_shared<CudaModel>(std::move(model), seed);
}

E2eDevice e2e_device(const PreparedModel& model) {
  if (const CudaModel* gpu = on_gpu(model))
    return {gpu->device_info().name, gpu->device_info().total_bytes, gpu->bytes()};
  return {"", 0, model.model().weights().bytes};
}

E2eLimits measure_e2e_limits(const PreparedModel& model) {
  if (on_gpu(model) == nullptr) return {};
  return {measure_cuda_read_gb_per_s(), bf16_tflop_per_s()};
}

bool fill_random_keys(Engine& engine, Sequence& sequence, int64_t length, uint64_t seed) {
  auto* gpu = dynamic_cast<CudaEngine*>(&engine);
  if (gpu == nullptr) return false;
  gpu->fill_cache(sequence, length, seed);
  return true;
}

E2eParts time_e2e_parts(Engine& engine, const std::function<void()>& call) {
  auto* gpu = dynamic_cast<CudaEngine*>(&engine);
  if (gpu == nullptr) return {};
  cuda::PartTimer timer;
  gpu->time_parts(&timer);
  try {
    call();
  } catch (...) {
    gpu->time_parts(nullptr);
    throw;
  }
  gpu->time_parts(nullptr);
  return timer.take();
}

GpuMemoryPlan plan_gpu_memory(const ModelConfig& config, int64_t context, int64_t batch) {
  EngineOptions options;
  const int64_t pages = batch * ((context - 1) / options.page_size + 1);
  options.cache_tokens = pages * options.page_size;
  const KvCacheShape cache{.layers = config.layers,
                           .kv_heads = config.kv_heads,
                           .head_dim = config.head_dim,
                           .pages = pages,
                           .page_size = options.page_size};
  GpuMemoryPlan plan;
  plan.weight_bytes = CudaModel::weight_bytes(config);
  plan.kv_bytes = cache.total_bytes();
  plan.scratch_bytes = CudaEngine::planned_bytes(config, options, batch) - plan.kv_bytes;
  return plan;
}

GpuMemory gpu_memory() {
  const cuda::DeviceInfo device = cuda::usable_device();
  return {device.name, device.total_bytes, device.free_bytes};
}

#else

namespace {
constexpr const char* kNoCuda = "device: this build has no CUDA (cmake --preset cuda builds it)";
}

std::shared_ptr<const PreparedModel> random_gpu_model(std::shared_ptr<const Model>, uint64_t) {
  throw Unsupported(std::string(kNoCuda) + "; random weights are made on a GPU");
}

E2eDevice e2e_device(const PreparedModel& model) { return {"", 0, model.model().weights().bytes}; }

E2eLimits measure_e2e_limits(const PreparedModel&) { return {}; }

bool fill_random_keys(Engine&, Sequence&, int64_t, uint64_t) { return false; }

E2eParts time_e2e_parts(Engine&, const std::function<void()>&) { return {}; }

GpuMemoryPlan plan_gpu_memory(const ModelConfig&, int64_t, int64_t) { throw Unsupported(kNoCuda); }

GpuMemory gpu_memory() { throw Unsupported(kNoCuda); }

#endif

}  // namespace kascade
