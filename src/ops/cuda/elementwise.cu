// SPDX-License-Identifier: Apache-2.0
// Small operators on rows. They move bytes and little else, so each thread keeps several 16-byte accesses in
// flight; where widths or addresses forbid 16-byte accesses, elements move one by one.
#include <algorithm>

#include "base/cuda/launch.h"
#include "base/cuda/mix.cuh"
#include "base/cuda/parts.h"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/warp.cuh"
#include "ops/cuda/logit_key.cuh"
#include "ops/cuda/ops.h"

namespace kascade::cuda {
namespace {

constexpr int kThreads = 256;

// ---- seeded weights

/// Elements 2 pair and 2 pair + 1 by Box and Muller's transform.
__device__ float2 normal_pair(uint64_t seed, uint64_t pair) {
  const uint64_t bits = mix(mix(seed) + (pair + 1) * kMixStep);
  const float u = (static_cast<float>(static_cast<uint32_t>(bits >> 40)) + 1) * 0x1p-24f;  // (0, 1]
  const float turn = static_cast<float>(static_cast<uint32_t>(bits) >> 8) * 0x1p-24f;      // [0, 1)
  float sine, cosine;
  sincospif(2 * turn, &sine, &cosine);
  const float radius = sqrtf(-2 * logf(u));
  return {radius * cosine, radius * sine};
}

__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(__nv_bfloat16* out, int64_t count, float deviation, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x; pair * 2 < count; pair += stride) {
    const float2 values = normal_pair(seed, static_cast<uint64_t>(pair));
    out[pair * 2] = __float2bfloat16_rn(values.x * deviation);
    if (pair * 2 + 1 < count) out[pair * 2 + 1] = __float2bfloat16_rn(values.y * deviation);
  }
}

// ---- rows by index

template <int kWidth>
struct alignas(2 * kWidth) Bf16s {
  __nv_bfloat16 values[kWidth];
};

/// kEach = 8: width and addresses allow 16-byte reads of the table.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const __nv_bfloat16* table, const int32_t* tokens, int64_t hidden, float* residual) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const __nv_bfloat16* from = table + int64_t{tokens[row]} * hidden;
  float* to = residual + row * hidden;
  for (int64_t i = int64_t{threadIdx.x} * kEach; i < hidden; i += kThreads * kEach) {
    const auto read = *reinterpret_cast<const Bf16s<kEach>*>(from + i);
    if constexpr (kEach == 8) {
#pragma unroll
      for (int j = 0; j < 8; j += 4)
        *reinterpret_cast<float4*>(to + i + j) =
            make_float4(__bfloat162float(read.values[j]), __bfloat162float(read.values[j + 1]),
                        __bfloat162float(read.values[j + 2]), __bfloat162float(read.values[j + 3]));
    } else {
      to[i] = __bfloat162float(read.values[0]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const T* x, const int32_t* indices, int64_t width, T* out) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const T* from = x + int64_t{indices[row]} * width;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) out[row * width + i] = from[i];
}

// ---- norm

__device__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  const float part = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : 0;
  return warp_sum(part);
}

__device__ float square_sum(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ uint2 scaled(float4 v, float scale, float4 w) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x * scale * w.x, v.y * scale * w.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(v.z * scale * w.z, v.w * scale * w.w);
  return {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
}

constexpr int kHeld = 4;  // groups of four elements that a thread keeps in registers

/// One row a block. The number of threads depends on the width alone, so a row's bits depend on the row
/// alone.
__global__ void __launch_bounds__(1024)
    rms_norm_kernel(const float* x, const float* weight, float epsilon, int64_t width, __nv_bfloat16* out) {
  __shared__ float scratch[32];
  allow_next_kernel();
  const auto quads = static_cast<int>(width / 4);
  const auto* w = reinterpret_cast<const float4*>(weight);
  float4 weights[kHeld], values[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    if (i < quads) weights[j] = __ldg(w + i);
  }
  wait_for_previous_kernel();
  const auto* row = reinterpret_cast<const float4*>(x + int64_t{blockIdx.x} * width);
  auto* to = reinterpret_cast<uint2*>(out + int64_t{blockIdx.x} * width);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    values[j] = i < quads ? row[i] : make_float4(0, 0, 0, 0);
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) sum += square_sum(values[j]);
  const int past = static_cast<int>(threadIdx.x + kHeld * blockDim.x);
  for (int i = past; i < quads; i += static_cast<int>(blockDim.x)) sum += square_sum(row[i]);
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(width) + epsilon);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = static_cast<int>(threadIdx.x + j * blockDim.x);
    if (i < quads) to[i] = scaled(values[j], scale, weights[j]);
  }
  for (int i = past; i < quads; i += static_cast<int>(blockDim.x))
    to[i] = scaled(row[i], scale, __ldg(w + i));
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_any_kernel(const float* x, const float* weight, float epsilon, int64_t width,
                        __nv_bfloat16* out) {
  __shared__ float scratch[32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const float* row = x + int64_t{blockIdx.x} * width;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) sum += row[i] * row[i];
  const float scale = rsqrtf(block_sum(sum, scratch) / static_cast<float>(width) + epsilon);
  for (int64_t i = threadIdx.x; i < width; i += kThreads)
    out[int64_t{blockIdx.x} * width + i] = __float2bfloat16_rn(row[i] * scale * weight[i]);
}

// ---- gated activation

__device__ float gated(__nv_bfloat16 gate, __nv_bfloat16 up) {
  const float x = __bfloat162float(gate);
  return __fdividef(x, 1 + __expf(-x)) * __bfloat162float(up);
}

/// `across` blocks a row.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    silu_kernel(const __nv_bfloat16* gate_up, uint32_t across, int64_t ffn, __nv_bfloat16* out) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / across;
  const int64_t column = (int64_t{blockIdx.x % across} * kThreads + threadIdx.x) * kEach;
  if (column >= ffn) return;
  const __nv_bfloat16* from = gate_up + row * 2 * ffn + column;
  const auto gate = *reinterpret_cast<const Bf16s<kEach>*>(from);
  const auto up = *reinterpret_cast<const Bf16s<kEach>*>(from + ffn);
  Bf16s<kEach> result;
#pragma unroll
  for (int i = 0; i < kEach; ++i) result.values[i] = __float2bfloat16_rn(gated(gate.values[i], up.values[i]));
  *reinterpret_cast<Bf16s<kEach>*>(out + row * ffn + column) = result;
}

// ---- largest logit

constexpr int kArgMaxCluster = 8;
constexpr int kArgMaxThreads = 512;

/// Larger logits first, then the smaller index.
__device__ uint64_t rank_key(float x, int64_t index) {
  return static_cast<uint64_t>(logit_key(x)) << 32 | ~static_cast<uint32_t>(index);
}

__device__ uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

/// A row for each cluster of blocks.
__global__ void __launch_bounds__(kArgMaxThreads)
    arg_max_kernel(const float* logits, int64_t vocabulary, bool by_fours, int32_t* tokens) {
  __shared__ uint64_t warps[kArgMaxThreads / 32];
  __shared__ uint64_t blocks[kArgMaxCluster];
  cluster_arrive();
  allow_next_kernel();
  wait_for_previous_kernel();
  const int rank = cluster_rank();
  const int64_t row = blockIdx.x / kArgMaxCluster;
  const float* x = logits + row * vocabulary;
  const int64_t first = rank * kArgMaxThreads + threadIdx.x, stride = kArgMaxCluster * kArgMaxThreads;
  uint64_t best = 0;
  if (by_fours) {
    const auto* quads = reinterpret_cast<const float4*>(x);
#pragma unroll 4
    for (int64_t i = first; i < vocabulary / 4; i += stride) {
      const float4 v = quads[i];
      best = max(max(max(best, rank_key(v.x, i * 4)), rank_key(v.y, i * 4 + 1)),
                 max(rank_key(v.z, i * 4 + 2), rank_key(v.w, i * 4 + 3)));
    }
  } else {
    for (int64_t i = first; i < vocabulary; i += stride) best = max(best, rank_key(x[i], i));
  }
  best = warp_max(best);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  cluster_wait();  // block 0 has begun, so its memory may be written
  if (threadIdx.x < 32) {
    best = warp_max(threadIdx.x < kArgMaxThreads / 32 ? warps[threadIdx.x] : 0);
    if (threadIdx.x == 0) *in_block(&blocks[rank], 0) = best;
  }
  cluster_sync();
  if (rank != 0 || threadIdx.x != 0) return;
  for (const uint64_t other : blocks) best = max(best, other);
  const auto value = static_cast<uint32_t>(best >> 32);
  constexpr uint32_t kInfinity = 0xFF800000u, kMinusInfinity = ~kInfinity;  // NaN is above kInfinity
  tokens[row] =
      value >= kInfinity || value <= kMinusInfinity ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(best));
}

}  // namespace

void fill_normal(__nv_bfloat16* out, int64_t count, float deviation, uint64_t seed, cudaStream_t stream) {
  if (count <= 0) return;
  const int64_t blocks = std::min<int64_t>(parts_of(count, int64_t{kThreads} * 2), 1 << 16);
  launch("fill_normal", fill_normal_kernel,
         LaunchShape{.blocks = blocks, .threads = kThreads, .chained = false}, stream, out, count, deviation,
         seed);
}

void embed(const __nv_bfloat16* table, const int32_t* tokens, int64_t rows, int64_t hidden, float* residual,
           cudaStream_t stream) {
  const bool wide = hidden % 8 == 0 && aligned_16({table, residual});
  launch("embed", wide ? embed_kernel<8> : embed_kernel<1>, LaunchShape{.blocks = rows, .threads = kThreads},
         stream, table, tokens, hidden, residual);
}

void gather_rows(const float* x, const int32_t* indices, int64_t rows, int64_t width, float* out,
                 cudaStream_t stream) {
  const LaunchShape shape{.blocks = rows, .threads = kThreads};
  if (width % 4 == 0 && aligned_16({x, out}))
    launch("gather_rows", gather_kernel<float4>, shape, stream, reinterpret_cast<const float4*>(x), indices,
           width / 4, reinterpret_cast<float4*>(out));
  else
    launch("gather_rows", gather_kernel<float>, shape, stream, x, indices, width, out);
}

void rms_norm(const float* x, const float* weight, float epsilon, int64_t rows, int64_t width,
              __nv_bfloat16* out, cudaStream_t stream) {
  if (width % 4 == 0 && aligned_16({x, weight, out})) {
    const auto threads =
        static_cast<int>(std::clamp<int64_t>(parts_of(width / 4, 32 * kHeld) * 32, 32, 1024));
    launch("rms_norm", rms_norm_kernel, LaunchShape{.blocks = rows, .threads = threads}, stream, x, weight,
           epsilon, width, out);
  } else {
    launch("rms_norm", rms_norm_any_kernel, LaunchShape{.blocks = rows, .threads = kThreads}, stream, x,
           weight, epsilon, width, out);
  }
}

void silu_multiply(const __nv_bfloat16* gate_up, int64_t rows, int64_t ffn, __nv_bfloat16* out,
                   cudaStream_t stream) {
  const bool wide = ffn % 8 == 0 && aligned_16({gate_up, out});
  const int64_t across = parts_of(ffn, kThreads * (wide ? 8 : 1));
  launch("silu_multiply", wide ? silu_kernel<8> : silu_kernel<1>,
         LaunchShape{.blocks = rows * across, .threads = kThreads}, stream, gate_up,
         static_cast<uint32_t>(across), ffn, out);
}

void arg_max(const float* logits, int64_t rows, int64_t vocabulary, int32_t* tokens, cudaStream_t stream) {
  const bool by_fours = vocabulary % 4 == 0 && aligned_16({logits});
  launch("arg_max", arg_max_kernel,
         LaunchShape{.blocks = rows * kArgMaxCluster, .threads = kArgMaxThreads, .cluster = kArgMaxCluster},
         stream, logits, vocabulary, by_fours, tokens);
}

}  // namespace kascade::cuda
