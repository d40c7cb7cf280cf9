// SPDX-License-Identifier: Apache-2.0
// Probability that the rows of each selecting tile give to the tile's own keys: a by-product for calibration,
// so this kernel is plain. The rest of a row's probability lies on the tile's candidates.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/cuda/sm90/prefill_call.h"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/mma.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMostLaneElements = 8;  // of 256 in a row, by 32 lanes

template <class T>
__device__ float to_float(T x);
template <>
__device__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <>
__device__ float to_float(__half x) {
  return __half2float(x);
}

/// One block per tile and set; a warp per query row.
template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    prefill_own_mass_kernel(const __grid_constant__ PrefillCall call) {
  __shared__ float masses[kWarps];
  wait_for_previous_kernel();
  allow_next_kernel();
  const AttentionParams& p = call.params;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t index = static_cast<int32_t>(blockIdx.x) / call.sets;
  const int32_t set = static_cast<int32_t>(blockIdx.x) % call.sets;
  bool needed = false;
  for (int32_t i = 0; i < call.totals->needed_sets; ++i) needed |= call.needed_sets[i] == set;
  if (index >= call.totals->tiles || !needed) return;
  const TileEntry tile = call.tile_table[index];
  const int32_t heads = p.query_heads / call.sets, elements = p.head_dim / 32;
  const int64_t first_token = p.page_table == nullptr ? p.cu_seqlens_kv[tile.batch] : 0;
  float mass = 0;
  for (int32_t i = warp; i < tile.rows * heads; i += kWarps) {
    const int64_t row = tile.row + i / heads;
    const int32_t head = set * heads + i % heads, last = min(tile.position + i / heads, tile.keys - 1);
    const int32_t kv_head = head / (p.query_heads / p.kv_heads);
    const float lse = call.lse[row * p.query_heads + head];
    const T* q = static_cast<const T*>(p.q) + row * p.q_row_stride + head * p.q_head_stride;
    float query[kMostLaneElements];
#pragma unroll
    for (int e = 0; e < kMostLaneElements; ++e) query[e] = e < elements ? to_float(q[lane + 32 * e]) : 0;
    for (int32_t key = tile.candidates; key <= last; ++key) {
      int64_t offset = (first_token + key) * p.k_token_stride;
      if (p.page_table != nullptr)
        offset = p.page_table[tile.batch * p.page_table_stride + key / p.page_size] * p.k_page_stride +
                 key % p.page_size * p.k_token_stride;
      const T* k = static_cast<const T*>(p.k) + offset + kv_head * p.k_head_stride;
      float score = 0;
#pragma unroll
      for (int e = 0; e < kMostLaneElements; ++e)
        if (e < elements) score = fmaf(query[e], to_float(k[lane + 32 * e]), score);
      mass += exp2_fast(fmaf(warp_sum(score), call.scale_log2, -lse));
    }
  }
  if (lane == 0) masses[warp] = mass;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0;
  for (int w = 0; w < kWarps; ++w) all += masses[w];
  p.own_tile_mass[int64_t{tile.set} * call.sets + set] = all;
}

}  // namespace

void launch_prefill_own_mass(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.tile_capacity * call.sets;
  shape.threads = kWarps * 32;
  if (call.params.kv_dtype == DType::kBF16) {
    launch("prefill_own_mass", prefill_own_mass_kernel<__nv_bfloat16>, shape, stream, call);
  } else {
    launch("prefill_own_mass", prefill_own_mass_kernel<__half>, shape, stream, call);
  }
}

}  // namespace kascade::cuda
