// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_e2e_device.h"

#include "base/check.h"
#include "eval/processor.h"

#if defined(KASCADE_CUDA)
#include <algorithm>
#include <array>

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

// Products that fill the GPU: a square one, and one of the shape that chunks of a prompt have.
struct PeakShape {
  int64_t rows, outputs, inputs;
};
constexpr PeakShape kPeakShapes[] = {{16384, 8192, 8192}, {8192, 28672, 4096}};
// Calls that are timed together, and how often; the last ones, after some tenths of a second, are sustained.
constexpr int kPeakCalls = 5, kPeakGroups = 60, kSustainedGroups = 30;

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

void measure_products(E2eLimits* limits) {
  const cuda::Stream stream;
  cuda::MatrixProducts products(cuda::Products::kFast);
  products.use_library_alone();
  for (const PeakShape& shape : kPeakShapes) {
    cuda::DeviceBuffer<__nv_bfloat16> weight{"bench weights"}, x{"bench rows"}, out{"bench products"};
    weight.grow(shape.outputs * shape.inputs);
    x.grow(shape.rows * shape.inputs);
    out.grow(shape.rows * shape.outputs);
    cuda::fill_normal(weight.data(), shape.outputs * shape.inputs, 0.01f, 1, stream.get());
    cuda::fill_normal(x.data(), shape.rows * shape.inputs, 1, 2, stream.get());
    const cuda::DeviceMatrix matrix{weight.data(), shape.outputs, shape.inputs};
    products.prepare(matrix, shape.rows, false, false, stream.get());
    const double flop = 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.outputs) *
                        static_cast<double>(shape.inputs) * kPeakCalls;
    std::array<Event, kPeakGroups + 1> marks;
    marks[0].record(stream);
    for (int group = 1; group <= kPeakGroups; ++group) {
      for (int call = 0; call < kPeakCalls; ++call)
        products.multiply(matrix, x.data(), shape.rows, out.data(), false, false, stream.get());
      marks[group].record(stream);
    }
    stream.wait();
    for (int group = 1; group <= kPeakGroups; ++group)
      limits->bf16_tflop_per_s =
          std::max(limits->bf16_tflop_per_s, flop / marks[group].milliseconds_since(marks[group - 1]) * 1e-9);
    limits->bf16_sustained_tflop_per_s =
        std::max(limits->bf16_sustained_tflop_per_s,
                 flop * kSustainedGroups * 1e-9 /
                     marks[kPeakGroups].milliseconds_since(marks[kPeakGroups - kSustainedGroups]));
  }
}

}  // namespace

std::shared_ptr<const PreparedModel> random_gpu_model(std::shared_ptr<const Model> model, uint64_t seed) {
  return std::make_shared<CudaModel>(std::move(model), seed);
}

E2eDevice e2e_device(const PreparedModel& model) {
  if (const CudaModel* gpu = on_gpu(model))
    return {gpu->device_info().name, gpu->device_info().total_bytes, gpu->bytes()};
  return {processor_name(), 0, model.model().weights().bytes};
}

E2eLimits measure_e2e_limits(const PreparedModel& model) {
  if (on_gpu(model) == nullptr) return {};
  E2eLimits limits;
  limits.read_gb_per_s = measure_cuda_read_gb_per_s();
  measure_products(&limits);
  return limits;
}

bool fill_random_keys(Engine& engine, Sequence& sequence, int64_t length, uint64_t seed) {
  auto* gpu = dynamic_cast<CudaEngine*>(&engine);
  if (gpu == nullptr) return false;
  gpu->fill_cache(sequence, length, seed);
  return true;
}

PartTimes time_e2e_parts(Engine& engine, const std::function<void()>& call) {
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
  require<BadArgument>(context >= 1, "context: expected 1 or more, got {}", context);
  require<BadArgument>(batch >= 1, "batch: expected 1 or more, got {}", batch);
  require<Unsupported>(context <= config.context, "context: {} tokens, but the model's context is {}",
                       context, config.context);
  CudaModel::require_shape(config);
  const int64_t pages_each = (context - 1) / options.page_size + 1;
  require<BadArgument>(batch <= INT32_MAX / pages_each,
                       "context, batch: {} sequences of {} tokens need more than {} pages of {} tokens",
                       batch, context, INT32_MAX, options.page_size);
  const int64_t pages = batch * pages_each;
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

// By value, as in the build that keeps the model. NOLINTNEXTLINE(performance-unnecessary-value-param)
std::shared_ptr<const PreparedModel> random_gpu_model(std::shared_ptr<const Model>, uint64_t) {
  throw Unsupported(std::string(kNoCuda) + "; random weights are made on a GPU");
}

E2eDevice e2e_device(const PreparedModel& model) {
  return {processor_name(), 0, model.model().weights().bytes};
}

E2eLimits measure_e2e_limits(const PreparedModel&) { return {}; }

bool fill_random_keys(Engine&, Sequence&, int64_t, uint64_t) { return false; }

PartTimes time_e2e_parts(Engine&, const std::function<void()>&) { return {}; }

GpuMemoryPlan plan_gpu_memory(const ModelConfig&, int64_t, int64_t) { throw Unsupported(kNoCuda); }

GpuMemory gpu_memory() { throw Unsupported(kNoCuda); }

#endif

}  // namespace kascade
