// SPDX-License-Identifier: Apache-2.0
// The first and the last kernel of a decode call: how many units of work each sequence has, and the merge of
// the partial results in the order of their splits.
#include <algorithm>
#include <numbers>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/decode_partial.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/async_copy.cuh"
#include "base/cuda/ptx/mma.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {
namespace {

constexpr int kMostScheduleThreads = 1024;
// Groups of splits are added up in so many chains, group g in chain g % kChains; then the chains are merged
// in order.
constexpr int kChains = 8;
// Threads of merges that a multiprocessor has room for; one block then fits beside a pass over keys, and
// finds out what to do meanwhile.
constexpr int kMergeThreads = 1024;
// Rows and heads from which on a block has a warp for two chains: more blocks run at once.
constexpr int64_t kManyRows = 1024;

/// Inclusive sums over the block; carry is what came before and is advanced.
__device__ int32_t running_sum(int32_t value, int32_t* warp_sums, int32_t* carry) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  value = sum_up_to(value, lane);
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

__global__ void __launch_bounds__(kMostScheduleThreads, 1)
    schedule_kernel(const __grid_constant__ DecodeCall call) {
  __shared__ int32_t warp_sums[kMostScheduleThreads / 32];
  allow_next_kernel();
  int32_t dense_before = 0, sparse_before = 0;
  uint32_t status = 0;
  const int32_t entries = call.params.batch * call.tiles;
  // Where the counts of the sets probably are; they would be asked for only when the lengths are known.
  if (call.params.role == Role::kReuse &&
      static_cast<int32_t>(threadIdx.x) < min(entries, static_cast<int32_t>(call.maxima.tiles)))
    prefetch(call.params.counts + int64_t{threadIdx.x} * call.sets);
  for (int32_t first = 0; first < entries; first += static_cast<int32_t>(blockDim.x)) {
    const int32_t entry = first + static_cast<int32_t>(threadIdx.x);
    int32_t dense_units = 0, sparse_units = 0, splits = -1, in_call = 0;
    UnitTile tile;
    if (entry < entries)
      schedule_tile<true, true, 8>(
          call, entry, 0, 1, [](int32_t own) { return own; }, call.dense_tiles[entry], dense_units, tile,
          splits, true, status);
    if (call.sparse_rule.many_of_a_call && entries <= static_cast<int32_t>(blockDim.x))
      running_sum(max(splits, 0) * call.readers, warp_sums, &in_call);
    if (splits >= 0) {
      sparse_units = cut_sparse_tile(call, tile, splits, in_call);
      call.sparse_tiles[entry] = tile;
    }
    const int32_t dense = running_sum(dense_units, warp_sums, &dense_before);
    const int32_t sparse = running_sum(sparse_units, warp_sums, &sparse_before);
    if (entry >= entries) continue;
    call.dense_units[entry + 1] = dense;
    call.sparse_units[entry + 1] = sparse;
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

/// What the merge of one row and head has to know.
struct MergeRow {
  int32_t splits = 0;  // of its list; 0: nothing to merge
  bool by_groups = false;
  bool exists = false;
};

/// Row r of sequence b of a call that finds its units by itself.
__device__ inline MergeRow find_merge(const DecodeCall& call, int32_t b, int32_t row, int32_t reader,
                                      bool sparse) {
  const StepSequence s = load_sequence(call, b);
  const int32_t r = row - s.row_begin;
  MergeRow merge;
  merge.exists = r < s.q_len;
  if (!merge.exists) return merge;
  const SplitRule& rule = sparse ? call.sparse_rule : call.dense_rule;
  int32_t keys = s.kv_len, longest = s.kv_len;  // of the list, and of the one that decides on splits
  if (sparse) {
    const StepTile tile = load_tile(call, s, b, rows_are_tiles(call) ? r : 0);
    keys = member_count(call, tile, reader) + own_keys(call, s, tile);
    longest = call.params.role == Role::kReuse ? longest_list(call, s, tile) : keys;
  }
  const int32_t split = split_keys(rule, longest);
  merge.splits = divide_up(keys, split);
  const int32_t splits = divide_up(longest, split);
  const int32_t in_call = !rule.many_of_a_call                  ? 0
                          : call.params.batch * call.tiles == 1 ? splits * call.readers
                                                                : splits_in_call(call);
  merge.by_groups = cut_units(rule, splits, b, call.params.batch, in_call).merge != GroupMerge::kNobody;
  return merge;
}

/// The same from what the schedule has found.
__device__ inline MergeRow load_merge(const DecodeCall& call, int32_t b, int32_t row, int32_t reader,
                                      bool sparse) {
  const AttentionParams& p = call.params;
  const int32_t r = row - max(p.cu_seqlens_q[b], 0);
  const bool own_tile = sparse && rows_are_tiles(call);
  MergeRow merge;
  if (own_tile && r >= call.tiles) return merge;
  const int32_t entry = b * call.tiles + (own_tile ? r : 0);
  const UnitTile tile = (sparse ? call.sparse_tiles : call.dense_tiles)[entry];
  merge.exists = own_tile || r < tile.rows;
  if (!merge.exists) return merge;
  int32_t members = tile.members;
  if (sparse && p.role == Role::kReuse && tile.set >= 0)
    members = max(0, min(p.counts[int64_t{tile.set} * call.sets + set_of_reader(call, reader)], p.capacity));
  merge.splits = divide_up(members + tile.own, tile.split);
  merge.by_groups = tile.merge != GroupMerge::kNobody;
  return merge;
}

/// One block per query row and head. A warp adds up the groups of its chains, and the splits of each group
/// one after the other unless the group's unit has; then the chains are merged in order.
template <int D, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, (D == 256 ? 512 : kMergeThreads) / (kWarps * 32))
    merge_kernel(const __grid_constant__ DecodeCall call, bool sparse) {
  constexpr int kPerLane = D / 32;
  constexpr int kOwnChains = kChains / kWarps;
  constexpr int kAtOnce = 4;  // parts that are asked for before the first is added
  static_assert(kSplitGroup == kAtOnce && kAtOnce % kOwnChains == 0);
  __shared__ float sums[kChains][D];
  __shared__ float2 tops[kChains];
  const AttentionParams& p = call.params;
  const int32_t row = static_cast<int32_t>(blockIdx.x) / p.query_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) % p.query_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (row < p.cu_seqlens_q[0] || row >= p.cu_seqlens_q[p.batch]) return;
  // Mostly every sequence has one row; a search is a chain of loads.
  const bool in_order = row < p.batch && p.cu_seqlens_q[row] == row && p.cu_seqlens_q[row + 1] == row + 1;
  const int32_t b = in_order ? row : find_sequence(p.cu_seqlens_q, p.batch, row);
  const int32_t reader = call.reader_heads == call.group ? head / call.group : head;
  const MergeRow merge = call.self_scheduled ? find_merge(call, b, row, reader, sparse)
                                             : load_merge(call, b, row, reader, sparse);
  if (!merge.exists) return;
  const int32_t splits = merge.splits, groups = divide_up(splits, kSplitGroup);
  const int64_t first =
      (int64_t{row} * p.query_heads + head) * (sparse ? call.sparse_splits : call.dense_splits);
  const float2* stats = call.partial_stats + first;
  const float* out = call.partial_out + first * D;
  // All that is above comes from the caller's arrays, or from the schedule.
  wait_for_previous_kernel();
  RowPart<kPerLane> all[kOwnChains];
#pragma unroll
  for (int c = 0; c < kOwnChains; ++c) all[c] = {-INFINITY, 0, {}};
  if (merge.by_groups) {
#pragma unroll 1
    for (int32_t group = warp; group < groups; group += kWarps * kAtOnce) {
      RowPart<kPerLane> parts[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        load_part(stats, out, group + j * kWarps, group + j * kWarps < groups, lane, parts[j]);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (group + j * kWarps < groups) add_part(all[j % kOwnChains], parts[j]);
    }
  } else {
#pragma unroll 1
    for (int32_t round = warp; round < groups; round += kChains) {
#pragma unroll
      for (int c = 0; c < kOwnChains; ++c) {
        const int32_t i = (round + c * kWarps) * kSplitGroup;
        if (i >= splits) break;
        RowPart<kPerLane> of_group = {-INFINITY, 0, {}};
        RowPart<kPerLane> parts[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) load_part(stats, out, i + j, i + j < splits, lane, parts[j]);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (i + j < splits) add_part(of_group, parts[j]);
        add_part(all[c], of_group);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kOwnChains; ++c) {
    const int chain = warp + c * kWarps;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) sums[chain][stored_dimension(lane * kPerLane + e)] = all[c].out[e];
    if (lane == 0) tops[chain] = make_float2(all[c].top, all[c].sum);
  }
  __syncthreads();
  float top = -INFINITY, total = 0;
#pragma unroll
  for (int c = 0; c < kChains; ++c) {
    const Merge step = merge_tops(top, tops[c].x);
    top = step.top;
    total = merge_sums(step, total, tops[c].y);
  }
  for (int d = static_cast<int>(threadIdx.x); d < D; d += kWarps * 32) {
    float value = 0;
#pragma unroll
    for (int c = 0; c < kChains; ++c) value += exp2_fast(tops[c].x - top) * sums[c][d];
    // Rows that see no key have a total of 0; a NaN total stays one.
    value = total == 0 ? 0 : value / total * p.v_scale;
    store_out(p, row * p.out_row_stride + head * p.out_head_stride + d, value);
  }
  if (threadIdx.x == 0 && p.lse != nullptr)
    p.lse[row * p.lse_row_stride + head] =
        total == 0 ? -INFINITY : (top + log2f(total)) * std::numbers::ln2_v<float>;
}

template <int D, int kWarps>
void launch_merge_warps(const DecodeCall& call, bool sparse, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.maxima.total_q * call.params.query_heads;
  shape.threads = kWarps * 32;
  launch("decode_merge", merge_kernel<D, kWarps>, shape, stream, call, sparse);
}

template <int D>
void launch_merge_kernel(const DecodeCall& call, bool sparse, cudaStream_t stream) {
  if (call.maxima.total_q * call.params.query_heads >= kManyRows)
    return launch_merge_warps<D, 4>(call, sparse, stream);
  launch_merge_warps<D, 8>(call, sparse, stream);
}

}  // namespace

void launch_schedule(const DecodeCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = 1;
  shape.threads = std::min(kMostScheduleThreads, divide_up(call.params.batch * call.tiles, 32) * 32);
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
