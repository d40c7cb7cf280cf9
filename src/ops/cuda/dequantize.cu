// SPDX-License-Identifier: Apache-2.0
// Stored weights to bf16. A thread writes eight neighbours; each value is computed as base/dequantize.cc
// does, with every product and sum rounded, so both give the same bits.
#include <cuda_fp16.h>

#include <algorithm>
#include <string>

#include "base/cuda/launch.h"
#include "base/cuda/parts.h"
#include "ops/cuda/ops.h"

namespace kascade::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8;

__device__ float load_half(const uint8_t* bytes) {
  return __half2float(*reinterpret_cast<const __half*>(bytes));
}
__device__ uint32_t load_word(const uint8_t* bytes) {  // aligned to 2 only
  const auto* halves = reinterpret_cast<const uint16_t*>(bytes);
  return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}
__device__ float times(float scale, int quant) { return __fmul_rn(scale, static_cast<float>(quant)); }

struct F32Format {
  static constexpr int kElements = 1, kBytes = 4;
  __device__ static float at(const uint8_t* block, int) { return *reinterpret_cast<const float*>(block); }
};
struct F16Format {
  static constexpr int kElements = 1, kBytes = 2;
  __device__ static float at(const uint8_t* block, int) { return load_half(block); }
};
struct Q4_0Format {
  static constexpr int kElements = 32, kBytes = 18;
  __device__ static float at(const uint8_t* block, int i) {
    const int byte = block[2 + i % 16];
    return times(load_half(block), (i < 16 ? byte & 0xF : byte >> 4) - 8);
  }
};
struct Q4_1Format {
  static constexpr int kElements = 32, kBytes = 20;
  __device__ static float at(const uint8_t* block, int i) {
    const int byte = block[4 + i % 16];
    return __fadd_rn(times(load_half(block), i < 16 ? byte & 0xF : byte >> 4), load_half(block + 2));
  }
};
struct Q5_0Format {
  static constexpr int kElements = 32, kBytes = 22;
  __device__ static float at(const uint8_t* block, int i) {
    const int byte = block[6 + i % 16];
    const int fifth = static_cast<int>(load_word(block + 2) >> i & 1) << 4;
    return times(load_half(block), ((i < 16 ? byte & 0xF : byte >> 4) | fifth) - 16);
  }
};
struct Q5_1Format {
  static constexpr int kElements = 32, kBytes = 24;
  __device__ static float at(const uint8_t* block, int i) {
    const int byte = block[8 + i % 16];
    const int fifth = static_cast<int>(load_word(block + 4) >> i & 1) << 4;
    return __fadd_rn(times(load_half(block), (i < 16 ? byte & 0xF : byte >> 4) | fifth),
                     load_half(block + 2));
  }
};
struct Q8_0Format {
  static constexpr int kElements = 32, kBytes = 34;
  __device__ static float at(const uint8_t* block, int i) {
    return times(load_half(block), static_cast<int8_t>(block[2 + i]));
  }
};

/// Q4_K and Q5_K: kFifth is the offset of the fifth bits, or 0.
template <int kFifth, int kQuants>
struct KFormat {
  static constexpr int kElements = 256, kBytes = kQuants + 128;
  __device__ static float at(const uint8_t* block, int i) {
    const int group = i / 32;
    const uint8_t* packed = block + 4;
    int scale, minimum;
    if (group < 4) {
      scale = packed[group] & 63;
      minimum = packed[group + 4] & 63;
    } else {
      scale = (packed[group + 4] & 0xF) | (packed[group - 4] >> 6) << 4;
      minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4;
    }
    const int byte = block[kQuants + group / 2 * 32 + i % 32];
    int quant = group % 2 == 0 ? byte & 0xF : byte >> 4;
    if (kFifth != 0) quant |= (block[kFifth + i % 32] >> group & 1) << 4;
    return __fsub_rn(times(times(load_half(block), scale), quant), times(load_half(block + 2), minimum));
  }
};
using Q4_KFormat = KFormat<0, 16>;
using Q5_KFormat = KFormat<16, 48>;

struct Q6_KFormat {
  static constexpr int kElements = 256, kBytes = 210;
  __device__ static float at(const uint8_t* block, int i) {
    const int half = i / 128, part = i % 128 / 32, j = i % 32;
    const int byte = block[half * 64 + part % 2 * 32 + j];
    const int high = block[128 + half * 32 + j] >> (2 * part) & 3;
    const auto scale = static_cast<int8_t>(block[192 + half * 8 + part * 2 + j / 16]);
    return times(times(load_half(block + 208), scale),
                 ((part < 2 ? byte & 0xF : byte >> 4) | high << 4) - 32);
  }
};

template <class Format>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const uint8_t* stored, int64_t count, __nv_bfloat16* out) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  if (first >= count) return;
  if (first + kEach <= count && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    __nv_bfloat162 values[kEach / 2];
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int64_t at = first + i + j;
        pair[j] = Format::at(stored + at / Format::kElements * Format::kBytes,
                             static_cast<int>(at % Format::kElements));
      }
      values[i / 2] = __floats2bfloat162_rn(pair[0], pair[1]);
    }
    *reinterpret_cast<uint4*>(out + first) = *reinterpret_cast<const uint4*>(values);
    return;
  }
  for (int64_t at = first; at < count && at < first + kEach; ++at)
    out[at] = __float2bfloat16_rn(Format::at(stored + at / Format::kElements * Format::kBytes,
                                             static_cast<int>(at % Format::kElements)));
}

template <class Format>
void run(const void* stored, int64_t count, __nv_bfloat16* out, cudaStream_t stream) {
  constexpr int64_t kBlock = int64_t{kThreads} * kEach;
  // A grid's blocks are at most 2^31 - 1.
  constexpr int64_t kMost = kBlock << 30;
  const auto* bytes = static_cast<const uint8_t*>(stored);
  for (int64_t done = 0; done < count; done += kMost) {
    const int64_t part = std::min(count - done, kMost);
    launch("dequantize", dequantize_kernel<Format>,
           LaunchShape{.blocks = parts_of(part, kBlock), .threads = kThreads, .chained = false}, stream,
           bytes + done / Format::kElements * Format::kBytes, part, out + done);
  }
}

}  // namespace

void dequantize(WeightType type, const void* stored, int64_t count, __nv_bfloat16* out, cudaStream_t stream) {
  const WeightTypeInfo& info = weight_type_info(type);
  if (count < 0 || count % info.block_elements != 0)
    throw BadArgument("dequantize: count: expected a multiple of " + std::to_string(info.block_elements) +
                      " for " + info.name + ", got " + std::to_string(count));
  if (count == 0) return;
  switch (type) {
    case WeightType::kF32:
      return run<F32Format>(stored, count, out, stream);
    case WeightType::kF16:
      return run<F16Format>(stored, count, out, stream);
    case WeightType::kBF16:
      return check_cuda(
          cudaMemcpyAsync(out, stored, static_cast<size_t>(count) * 2, cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync", "dequantize");
    case WeightType::kQ4_0:
      return run<Q4_0Format>(stored, count, out, stream);
    case WeightType::kQ4_1:
      return run<Q4_1Format>(stored, count, out, stream);
    case WeightType::kQ5_0:
      return run<Q5_0Format>(stored, count, out, stream);
    case WeightType::kQ5_1:
      return run<Q5_1Format>(stored, count, out, stream);
    case WeightType::kQ8_0:
      return run<Q8_0Format>(stored, count, out, stream);
    case WeightType::kQ4_K:
      return run<Q4_KFormat>(stored, count, out, stream);
    case WeightType::kQ5_K:
      return run<Q5_KFormat>(stored, count, out, stream);
    case WeightType::kQ6_K:
      return run<Q6_KFormat>(stored, count, out, stream);
  }
}

}  // namespace kascade::cuda
