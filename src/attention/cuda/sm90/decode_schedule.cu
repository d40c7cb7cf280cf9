// SPDX-License-Identifier: Apache-2.0
// The first and the last kernel of a decode call: how many units of work each sequence has, and the merge of
// the partial results in the order of their splits.
#include <algorithm>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/launch.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/ptx/mma.cuh"

namespace kascade::cuda {
namespace {

constexpr int kMostScheduleThreads = 1024;
constexpr int kMergeWarps = 8;
constexpr float kLn2 = 0.693147180559945f;

/// Inclusive sums over the block; carry is what came before and is advanced.
__device__ int32_t running_sum(int32_t value, int32_t* warp_sums, int32_t* carry) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (lane >= step) value += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int32_t before = *carry;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  int32_t total = *carry;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += warp_sums[w];
  *carry = total;
  return before + value;
}

__global__ void __launch_bounds__(kMostScheduleThreads)
    schedule_kernel(const __grid_constant__ DecodeCall call) {
  __shared__ int32_t warp_sums[kMostScheduleThreads / 32];
  allow_next_kernel();
  int32_t dense_before = 0, sparse_before = 0;
  uint32_t status = 0;
  for (int32_t first = 0; first < call.params.batch; first += static_cast<int32_t>(blockDim.x)) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x);
    Units units;
    if (b < call.params.batch)
      units = count_units<8>(
          call, b, 0, 1, [](int32_t own) { return own; }, &status);
    const int32_t dense = running_sum(units.dense, warp_sums, &dense_before);
    const int32_t sparse = running_sum(units.sparse, warp_sums, &sparse_before);
    if (b >= call.params.batch) continue;
    call.dense_units[b + 1] = dense;
    call.sparse_units[b + 1] = sparse;
  }
  if (threadIdx.x == 0) {
    call.dense_units[0] = call.sparse_units[0] = 0;
    call.counters[0] = call.counters[1] = 0;
  }
  if (call.params.status != nullptr && status != 0) atomicOr(call.params.status, status);
}

__device__ void store_out(const AttentionParams& p, int64_t offset, float value) {
  switch (p.out_dtype) {
    case DType::kF32:
      static_cast<float*>(p.out)[offset] = value;
      return;
    case DType::kF16:
      static_cast<__half*>(p.out)[offset] = __float2half_rn(value);
      return;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(p.out)[offset] = __float2bfloat16_rn(value);
      return;
  }
}

/// One block per query row and head. Warp w sums splits w, w + 8, ...; then the warps' sums are added in
/// order.
template <int D>
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_kernel(const __grid_constant__ DecodeCall call, bool sparse) {
  constexpr int kPerLane = D / 32;
  // Splits whose sums a warp asks for before it knows what they are worth.
  constexpr int kAhead = 4;
  __shared__ float sums[kMergeWarps][D];
  const AttentionParams& p = call.params;
  const int32_t row = static_cast<int32_t>(blockIdx.x) / p.query_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % p.query_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (row < p.cu_seqlens_q[0] || row >= p.cu_seqlens_q[p.batch]) return;
  // Mostly every sequence has one row; a search is a chain of loads.
  const bool in_order = row < p.batch && p.cu_seqlens_q[row] == row && p.cu_seqlens_q[row + 1] == row + 1;
  const int32_t b = in_order ? row : find_sequence(p.cu_seqlens_q, p.batch, row);
  const StepSequence s = load_sequence(call, b);
  const int32_t r = row - s.row_begin;
  if (r >= s.q_len) return;

  int32_t splits;
  if (sparse) {
    const StepTile tile = load_tile(call, s, b, rows_are_tiles(call) ? r : 0);
    const int32_t longest = longest_list(call, s, tile);
    const int32_t reader = call.reader_heads == call.group ? head / call.group : head;
    const int32_t keys = member_count(call, tile, reader) + own_keys(call, s, tile);
    splits = divide_up(keys, split_keys(call.sparse_rule, longest));
  } else {
    splits = split_count(call.dense_rule, s.kv_len);
  }
  const int64_t first =
      (int64_t{row} * p.query_heads + head) * (sparse ? call.sparse_splits : call.dense_splits);
  const float2* stats = call.partial_stats + first;
  const float* out = call.partial_out + first * D;
  // All that is above comes from the caller's arrays.
  wait_for_previous_kernel();
  float ahead[kAhead][kPerLane];
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (warp + j * kMergeWarps < splits) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e)
        ahead[j][e] = out[int64_t{warp + j * kMergeWarps} * D + e * 32 + lane];
    }
  const auto [top, total] = merge_stats(stats, splits);
  float sum[kPerLane] = {};
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (warp + j * kMergeWarps < splits) {
      const float factor = exp2_fast(stats[warp + j * kMergeWarps].x - top);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) sum[e] += factor * ahead[j][e];
    }
#pragma unroll 4
  for (int32_t i = warp + kAhead * kMergeWarps; i < splits; i += kMergeWarps) {
    const float factor = exp2_fast(stats[i].x - top);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) sum[e] += factor * out[int64_t{i} * D + e * 32 + lane];
  }
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) sums[warp][e * 32 + lane] = sum[e];
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < D; d += kMergeWarps * 32) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) value += sums[w][d];
    // Rows that see no key have a total of 0; a NaN total stays one.
    value = total == 0 ? 0 : value / total * p.v_scale;
    store_out(p, row * p.out_row_stride + head * p.out_head_stride + d, value);
  }
  if (threadIdx.x == 0 && p.lse != nullptr)
    p.lse[row * p.lse_row_stride + head] = total == 0 ? -INFINITY : (top + log2f(total)) * kLn2;
}

template <int D>
void launch_merge_kernel(const DecodeCall& call, bool sparse, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.maxima.total_q * call.params.query_heads;
  shape.threads = kMergeWarps * 32;
  launch("decode_merge", merge_kernel<D>, shape, stream, call, sparse);
}

}  // namespace

void launch_schedule(const DecodeCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = 1;
  shape.threads = std::min(kMostScheduleThreads, divide_up(call.params.batch, 32) * 32);
  shape.chained = false;
  launch("decode_schedule", schedule_kernel, shape, stream, call);
}

void launch_merge(const DecodeCall& call, bool sparse, cudaStream_t stream) {
  switch (call.params.head_dim) {
    case 64:
      return launch_merge_kernel<64>(call, sparse, stream);
    case 128:
      return launch_merge_kernel<128>(call, sparse, stream);
    default:
      return launch_merge_kernel<256>(call, sparse, stream);
  }
}

}  // namespace kascade::cuda
