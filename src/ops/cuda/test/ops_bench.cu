// SPDX-License-Identifier: Apache-2.0
// Times of the GPU's operators at the shapes of llama-3.1-8b, beside the bandwidth and the rate of products
// measured in the same run: kascade_cuda_test --suite bench_ops.
#include <cuda_bf16.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "base/cuda/launch.h"
#include "base/cuda/test/device_test.h"
#include "ops/cuda/ops.h"

namespace kascade::cuda_test {
namespace {

using cuda::check_cuda;
using cuda::DeviceMatrix;
using cuda::MatrixProducts;
using Bf16 = __nv_bfloat16;

__global__ void __launch_bounds__(512) read_kernel(const uint4* data, int64_t count, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * 512;
  uint32_t seen = 0;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * 512 + threadIdx.x; i < count; i += stride) {
    const uint4 v = __ldcs(data + i);
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (seen == 0x9E3779B9u) *sink = seen;
}

class Stream {
 public:
  Stream() {
    check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate", "bench");
    check_cuda(cudaEventCreate(&start_), "cudaEventCreate", "bench");
    check_cuda(cudaEventCreate(&stop_), "cudaEventCreate", "bench");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

  /// Median milliseconds of a graph of the work.
  double milliseconds(const std::function<void()>& work, int repetitions = 7) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture",
               "bench");
    work();
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture", "bench");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate", "bench");
    std::vector<float> times;
    for (int i = 0; i <= repetitions; ++i) {
      check_cuda(cudaEventRecord(start_, stream_), "cudaEventRecord", "bench");
      check_cuda(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch", "bench");
      check_cuda(cudaEventRecord(stop_, stream_), "cudaEventRecord", "bench");
      check_cuda(cudaEventSynchronize(stop_), "cudaEventSynchronize", "bench");
      float time = 0;
      check_cuda(cudaEventElapsedTime(&time, start_, stop_), "cudaEventElapsedTime", "bench");
      if (i > 0) times.push_back(time);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
    return times[static_cast<size_t>(repetitions / 2)];
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

struct Shape {
  const char* name;
  int64_t outputs, inputs;
  bool float_out, accumulate;
};
constexpr Shape kShapes[] = {{"qkv", 6144, 4096, false, false},
                             {"o", 4096, 4096, true, true},
                             {"gate_up", 28672, 4096, false, false},
                             {"down", 4096, 14336, true, true},
                             {"head", 128256, 4096, true, false}};

constexpr int64_t kWeightBytes = int64_t{4} << 30;
constexpr int64_t kActivationBytes = int64_t{1} << 30;

/// Weights, activations, and the bandwidth of reading.
struct Setting {
  Stream stream;
  DeviceBuffer weights{size_t{kWeightBytes}}, x{size_t{kActivationBytes}}, out{size_t{kActivationBytes} * 2};
  double bandwidth = 0;  // bytes a second

  Setting() {
    cuda::fill_normal(weights.as<Bf16>(), kWeightBytes / 2, 0.02f, 1, stream.get());
    cuda::fill_normal(x.as<Bf16>(), kActivationBytes / 2, 1, 2, stream.get());
    check_cuda(cudaMemsetAsync(out.as<void>(), 0, out.bytes(), stream.get()), "cudaMemsetAsync", "bench");
    for (const int blocks : {132 * 2, 132 * 4, 132 * 8, 132 * 16}) {
      const double ms = stream.milliseconds([&] {
        read_kernel<<<static_cast<unsigned>(blocks), 512, 0, stream.get()>>>(
            weights.as<uint4>(), kWeightBytes / 16, out.as<uint32_t>());
      });
      bandwidth = std::max(bandwidth, kWeightBytes / ms * 1e3);
    }
    std::printf("reading 4 GiB: %.0f GB/s\n", bandwidth * 1e-9);
  }

  /// Copies of a matrix one after another, so that none is found in the cache.
  template <class Multiply>
  double of_copies(const Shape& shape, const Multiply& multiply) {
    const int64_t elements = shape.outputs * shape.inputs;
    const int64_t copies = std::clamp<int64_t>((int64_t{1} << 30) / (elements * 2), 2, 24);
    const double ms = stream.milliseconds([&] {
      for (int64_t i = 0; i < copies; ++i)
        multiply(DeviceMatrix{weights.as<Bf16>() + i * elements, shape.outputs, shape.inputs});
    });
    return ms / static_cast<double>(copies);
  }
  void print(const Shape& shape, int64_t rows, double ms, const std::string& way) const {
    const double bytes = static_cast<double>(shape.outputs * shape.inputs * 2);
    std::printf("  %-8s %3d rows: %7.2f us, %5.0f GB/s, %5.1f %% of reading; %s\n", shape.name, int(rows),
                ms * 1e3, bytes / ms * 1e-6, bytes / ms * 1e3 / bandwidth * 100, way.c_str());
    std::fflush(stdout);
  }
};

void bench_decode_products() {
  Setting s;
  MatrixProducts own(cuda::Products::kFast), library(cuda::Products::kFast),
      invariant(cuda::Products::kInvariant), prepared(cuda::Products::kFast);
  library.use_library_alone();
  for (const int64_t rows : {1, 4, 8, 16, 32, 64})
    for (const Shape& shape : kShapes)
      for (MatrixProducts* products : {&own, &library, &invariant}) {
        if (products == &invariant && rows != 1 && rows != 32) continue;
        const DeviceMatrix first{s.weights.as<Bf16>(), shape.outputs, shape.inputs};
        if (products == &own) {  // not prepared: our own kernel
          products->multiply(first, s.x.as<Bf16>(), rows, s.out.as<void>(), shape.float_out, shape.accumulate,
                             s.stream.get());
          prepared.prepare(first, rows, shape.float_out, shape.accumulate, s.stream.get());
        } else {
          products->prepare(first, rows, shape.float_out, shape.accumulate, s.stream.get());
        }
        const double ms = s.of_copies(shape, [&](const DeviceMatrix& matrix) {
          products->multiply(matrix, s.x.as<Bf16>(), rows, s.out.as<void>(), shape.float_out,
                             shape.accumulate, s.stream.get());
        });
        if (products == &own)
          std::printf("  prepared: %s\n",
                      prepared.chosen(first, rows, shape.float_out, shape.accumulate).c_str());
        s.print(shape, rows, ms,
                (products == &invariant ? "invariant: " : "") +
                    products->chosen(first, rows, shape.float_out, shape.accumulate));
      }
}

void bench_prefill_products() {
  Setting s;
  const auto rate = [](int64_t rows, const Shape& shape, double ms) {
    return 2e-9 * static_cast<double>(rows) * static_cast<double>(shape.outputs * shape.inputs) / ms;
  };
  MatrixProducts fast(cuda::Products::kFast), invariant(cuda::Products::kInvariant);
  const Shape square{"square", 8192, 8192, false, false};
  double peak = 0;
  for (const int64_t rows : {int64_t{8192}, int64_t{2048}, int64_t{512}, int64_t{128}})
    for (const Shape& shape : {square, kShapes[0], kShapes[1], kShapes[2], kShapes[3]})
      for (MatrixProducts* products : {&fast, &invariant}) {
        if (products == &invariant && rows == 512) continue;
        const DeviceMatrix matrix{s.weights.as<Bf16>(), shape.outputs, shape.inputs};
        products->prepare(matrix, rows, shape.float_out, shape.accumulate, s.stream.get());
        const double ms = s.stream.milliseconds(
                              [&] {
                                for (int i = 0; i < 4; ++i)
                                  products->multiply(matrix, s.x.as<Bf16>(), rows, s.out.as<void>(),
                                                     shape.float_out, shape.accumulate, s.stream.get());
                              },
                              3) /
                          4;
        peak = std::max(peak, rate(rows, shape, ms));
        std::printf("  %-8s %4d rows: %8.1f us, %4.0f TFLOP/s, %3.0f %% of the best; %s%s\n", shape.name,
                    int(rows), ms * 1e3, rate(rows, shape, ms), rate(rows, shape, ms) / peak * 100,
                    products == &invariant ? "invariant: " : "",
                    products->chosen(matrix, rows, shape.float_out, shape.accumulate).c_str());
        std::fflush(stdout);
      }
}

/// Small operators: microseconds each in a graph of 64, and the bytes they move.
cuda::RopeAppend llama_rope(Bf16* qkv, const float2* table, const DeviceBuffer& positions,
                            const DeviceBuffer& slots, const DeviceBuffer& keys, const DeviceBuffer& values) {
  cuda::RopeAppend rope;
  rope.qkv = qkv;
  rope.row_stride = 6144;
  rope.rope_table = table;
  rope.positions = positions.as<int32_t>();
  rope.slots = slots.as<int64_t>();
  rope.k_pages = keys.as<Bf16>();
  rope.v_pages = values.as<Bf16>();
  rope.page_size = 64;
  rope.query_heads = 32;
  rope.kv_heads = 8;
  rope.head_dim = 128;
  return rope;
}

void bench_small_operators() {
  Setting s;
  constexpr int kTimes = 64;
  const auto print = [&](const char* name, int64_t rows, double bytes, const std::function<void()>& work) {
    const double ms = s.stream.milliseconds([&] {
      for (int i = 0; i < kTimes; ++i) work();
    }) / kTimes;
    std::printf("  %-14s %4d rows: %7.2f us, %5.0f GB/s\n", name, int(rows), ms * 1e3, bytes / ms * 1e-6);
    std::fflush(stdout);
  };
  std::vector<int32_t> positions(8192);
  std::vector<int64_t> slots(8192);
  for (size_t i = 0; i < slots.size(); ++i) {
    positions[i] = static_cast<int32_t>(i);
    slots[i] = static_cast<int64_t>(i);
  }
  const DeviceBuffer d_positions = DeviceBuffer::of(positions), d_slots = DeviceBuffer::of(slots);
  const DeviceBuffer keys(size_t{8192} * 1024 * 2), values(size_t{8192} * 1024 * 2), tokens(4096);
  const cuda::RopeAppend rope =
      llama_rope(s.x.as<Bf16>(), s.out.as<float2>(), d_positions, d_slots, keys, values);
  for (const int64_t rows : {int64_t{1}, int64_t{4}, int64_t{32}, int64_t{8192}}) {
    const auto r = static_cast<double>(rows);
    print("rms_norm", rows, r * 4096 * 6, [&] {
      cuda::rms_norm(s.out.as<float>(), s.x.as<float>(), 1e-5f, rows, 4096, s.x.as<Bf16>() + 8192 * 4096,
                     s.stream.get());
    });
    print("rope_append", rows, r * 6144 * 4, [&] { cuda::rope_append(rope, rows, s.stream.get()); });
    print("silu_multiply", rows, r * 14336 * 6,
          [&] { cuda::silu_multiply(s.x.as<Bf16>(), rows, 14336, s.out.as<Bf16>(), s.stream.get()); });
    print("embed", rows, r * 4096 * 6, [&] {
      cuda::embed(s.weights.as<Bf16>(), d_positions.as<int32_t>(), rows, 4096, s.out.as<float>(),
                  s.stream.get());
    });
    if (rows > 64) continue;
    print("arg_max", rows, r * 128256 * 4,
          [&] { cuda::arg_max(s.out.as<float>(), rows, 128256, tokens.as<int32_t>(), s.stream.get()); });
  }
}

/// A decode step of llama-3.1-8b without attention: 32 layers and the head.
void bench_decode_step() {
  Stream stream;
  constexpr int kLayers = 32;
  struct Layer {
    DeviceBuffer weights[4];
  };
  std::vector<Layer> layers(kLayers);
  int64_t bytes = 0;
  for (Layer& layer : layers)
    for (int i = 0; i < 4; ++i) {
      const int64_t elements = kShapes[i].outputs * kShapes[i].inputs;
      layer.weights[i] = DeviceBuffer(static_cast<size_t>(elements) * 2);
      cuda::fill_normal(layer.weights[i].as<Bf16>(), elements, 0.02f, 1, stream.get());
      bytes += elements * 2;
    }
  const DeviceBuffer head(size_t{128256} * 4096 * 2);
  cuda::fill_normal(head.as<Bf16>(), int64_t{128256} * 4096, 0.02f, 1, stream.get());
  bytes += int64_t{128256} * 4096 * 2;
  const std::vector<float> ones(4096, 1.0f), turns(size_t{1000} * 128, 0.7f);
  const std::vector<int32_t> positions(64, 5), tokens(64, 7);
  std::vector<int64_t> slots(64);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int64_t>(i);
  const DeviceBuffer norm = DeviceBuffer::of(ones), table = DeviceBuffer::of(turns),
                     d_positions = DeviceBuffer::of(positions), d_slots = DeviceBuffer::of(slots),
                     d_tokens = DeviceBuffer::of(tokens);
  const DeviceBuffer residual(64 * 4096 * 4), normed(64 * 4096 * 2), qkv(64 * 6144 * 2),
      gate_up(64 * 28672 * 2), gated(64 * 14336 * 2), logits(size_t{64} * 128256 * 4), keys(1 << 20),
      values(1 << 20), picked(256);
  enum class Way { kLibrary, kOwn, kPrepared };
  for (const Way way : {Way::kPrepared, Way::kOwn, Way::kLibrary})
    for (const int64_t rows : {int64_t{1}, int64_t{4}, int64_t{16}, int64_t{32}}) {
      const bool library = way == Way::kLibrary;
      MatrixProducts products(cuda::Products::kFast);
      if (library) products.use_library_alone();
      const auto matrix = [&](const DeviceBuffer& weight, const Shape& shape) {
        return DeviceMatrix{weight.as<Bf16>(), shape.outputs, shape.inputs};
      };
      const auto multiply = [&](const DeviceBuffer& weight, int i, const DeviceBuffer& x,
                                const DeviceBuffer& out) {
        products.multiply(matrix(weight, kShapes[i]), x.as<Bf16>(), rows, out.as<void>(),
                          kShapes[i].float_out, kShapes[i].accumulate, stream.get());
      };
      for (int i = 0; i < 5; ++i) {
        if (way != Way::kOwn)
          products.prepare(matrix(i < 4 ? layers[0].weights[i] : head, kShapes[i]), rows,
                           kShapes[i].float_out, kShapes[i].accumulate, stream.get());
        else
          multiply(i < 4 ? layers[0].weights[i] : head, i, gated, i == 4 ? logits : gate_up);
      }
      const cuda::RopeAppend rope =
          llama_rope(qkv.as<Bf16>(), table.as<float2>(), d_positions, d_slots, keys, values);
      const double ms = stream.milliseconds([&] {
        cuda::embed(head.as<Bf16>(), d_tokens.as<int32_t>(), rows, 4096, residual.as<float>(), stream.get());
        for (const Layer& layer : layers) {
          cuda::rms_norm(residual.as<float>(), norm.as<float>(), 1e-5f, rows, 4096, normed.as<Bf16>(),
                         stream.get());
          multiply(layer.weights[0], 0, normed, qkv);
          cuda::rope_append(rope, rows, stream.get());
          multiply(layer.weights[1], 1, normed, residual);
          cuda::rms_norm(residual.as<float>(), norm.as<float>(), 1e-5f, rows, 4096, normed.as<Bf16>(),
                         stream.get());
          multiply(layer.weights[2], 2, normed, gate_up);
          cuda::silu_multiply(gate_up.as<Bf16>(), rows, 14336, gated.as<Bf16>(), stream.get());
          multiply(layer.weights[3], 3, gated, residual);
        }
        cuda::rms_norm(residual.as<float>(), norm.as<float>(), 1e-5f, rows, 4096, normed.as<Bf16>(),
                       stream.get());
        multiply(head, 4, normed, logits);
        cuda::arg_max(logits.as<float>(), rows, 128256, picked.as<int32_t>(), stream.get());
      });
      std::printf("  step of %2d rows without attention, %s: %.3f ms, %.0f GB/s of weights\n", int(rows),
                  library            ? "cuBLASLt"
                  : way == Way::kOwn ? "own"
                                     : "prepared",
                  ms, static_cast<double>(bytes) / ms * 1e-6);
      std::fflush(stdout);
    }
}

const Registered kBenches[] = {{90, "bench: decode products", bench_decode_products, "bench_ops"},
                               {91, "bench: decode step", bench_decode_step, "bench_ops"},
                               {92, "bench: prefill products", bench_prefill_products, "bench_ops"},
                               {93, "bench: small operators", bench_small_operators, "bench_ops"}};

}  // namespace
}  // namespace kascade::cuda_test
