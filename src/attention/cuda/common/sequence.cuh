// SPDX-License-Identifier: Apache-2.0
// The meaning of a step call's fields on the device: sequences, tiles, lists. The same rules as
// attention/params.cc.
#pragma once

#include <cfloat>
#include <cstdint>

#include "attention/cuda/common/call.h"
#include "attention/cuda/ptx/mma.cuh"

namespace kascade::cuda {

__device__ inline int64_t clamp64(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

struct StepSequence {
  int32_t row_begin, q_len, kv_len;
  int32_t start;  // position of row 0; negative with more rows than keys
  int32_t tiles;  // 0 in dense calls
  int32_t set_begin;
  int32_t stored_tiles;  // tiles that have a place in positions and counts
};

struct StepTile {
  int32_t row_begin, rows;
  int64_t set;  // index of its sets, -1 without a place
  SetBudget budget;
  bool clamped;  // the budget did not fit into capacity
};

/// A row is a tile of its own, and its own key is a candidate.
__device__ inline bool rows_are_tiles(const DecodeCall& call) {
  return call.params.budget.own_tile != OwnTile::kOnTop;
}

__device__ inline StepSequence load_sequence(const DecodeCall& call, int32_t b) {
  const AttentionParams& p = call.params;
  StepSequence s;
  s.row_begin = static_cast<int32_t>(clamp64(p.cu_seqlens_q[b], 0, call.maxima.total_q));
  const int64_t row_end = min(int64_t{p.cu_seqlens_q[b + 1]}, call.maxima.total_q);
  s.q_len = static_cast<int32_t>(clamp64(row_end - s.row_begin, 0, call.maxima.q_len));
  s.kv_len = static_cast<int32_t>(clamp64(p.seq_lens_kv[b], 0, call.maxima.kv_len));
  s.start = s.kv_len - s.q_len;
  s.tiles = s.set_begin = s.stored_tiles = 0;
  if (p.role == Role::kDense) return s;
  s.tiles = s.q_len == 0 ? 0 : rows_are_tiles(call) ? s.q_len : 1;
  s.set_begin = p.tile_offsets[b];
  const int64_t set_end = min(int64_t{p.tile_offsets[b + 1]}, call.maxima.tiles);
  s.stored_tiles = s.set_begin < 0 ? 0 : static_cast<int32_t>(clamp64(set_end - s.set_begin, 0, s.tiles));
  return s;
}

__device__ inline StepTile load_tile(const DecodeCall& call, const StepSequence& s, int32_t b, int32_t tile) {
  const AttentionParams& p = call.params;
  StepTile t;
  const bool own_row = rows_are_tiles(call);
  t.row_begin = own_row ? tile : 0;
  t.rows = own_row ? 1 : s.q_len;
  t.set = tile < s.stored_tiles ? int64_t{s.set_begin} + tile : -1;
  const int64_t x = own_row ? int64_t{s.start} + tile : max(s.start, 0);
  const int64_t length = p.budget_lens != nullptr ? max(p.budget_lens[b], 0) : s.kv_len;
  SetBudget budget =
      evaluate_budget(p.budget, max(x + (own_row ? 1 : 0), int64_t{0}), max(x, int64_t{0}), length, 1);
  t.clamped = budget.members() > p.capacity;
  const int64_t sinks = min(budget.sinks, int64_t{p.capacity});
  const int64_t recent = min(budget.candidates - budget.recent_begin, p.capacity - sinks);
  budget.ranked = min(budget.ranked, p.capacity - sinks - recent);
  budget.sinks = sinks;
  budget.recent_begin = budget.candidates - recent;
  t.budget = budget;
  return t;
}

/// The set that reader `reader` (a KV head, or a query head) attends to.
__device__ inline int32_t set_of_reader(const DecodeCall& call, int32_t reader) {
  const AttentionParams& p = call.params;
  if (p.set_owner == SetOwner::kAllHeads) return 0;
  if (p.role != Role::kReuse || p.head_map == nullptr) return reader;
  const int32_t group = p.query_heads / p.kv_heads;
  const int32_t kv_head = p.set_owner == SetOwner::kQueryHead ? reader / group : reader;
  const int32_t owner = max(0, min(p.head_map[kv_head], p.kv_heads - 1));
  return p.set_owner == SetOwner::kQueryHead ? owner * group + reader % group : owner;
}

/// Whether anyone reads set `set` (`needed`).
__device__ inline bool is_needed(const DecodeCall& call, int32_t set) {
  const AttentionParams& p = call.params;
  if (p.role != Role::kLayer0 || p.needed == nullptr) return true;
  if (p.set_owner == SetOwner::kAllHeads) {
    for (int32_t g = 0; g < p.kv_heads; ++g)
      if (p.needed[g] != 0) return true;
    return false;
  }
  return p.needed[p.set_owner == SetOwner::kQueryHead ? set / (p.query_heads / p.kv_heads) : set] != 0;
}

/// Members of a tile's set for a reader.
__device__ inline int32_t member_count(const DecodeCall& call, const StepTile& tile, int32_t reader) {
  if (tile.set < 0) return 0;
  const int32_t count = call.params.counts[tile.set * call.sets + set_of_reader(call, reader)];
  return max(0, min(count, call.params.capacity));
}

/// Own keys that follow the members in a tile's list.
__device__ inline int32_t own_keys(const DecodeCall& call, const StepSequence& s, const StepTile& tile) {
  return rows_are_tiles(call) ? 0 : static_cast<int32_t>(s.kv_len - tile.budget.candidates);
}

__host__ __device__ inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// Largest score (finite) and sum of 2^(score - largest) of one row over its partial results; a warp's lanes
/// share it.
struct RowStats {
  float top, total;
};
__device__ inline RowStats merge_stats(const float2* parts, int32_t count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = -FLT_MAX, total = 0;
#pragma unroll 4
  for (int32_t i = lane; i < count; i += 32) {
    const float2 part = parts[i];
    const float larger = fmaxf(top, part.x);
    total = total * exp2_fast(top - larger) + part.y * exp2_fast(part.x - larger);
    top = larger;
  }
  float all = top;
  for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
  total *= exp2_fast(top - all);
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
  return {all, total};
}

/// The sequence b in [0, batch) with begin[b] <= x < begin[b + 1].
__device__ inline int32_t find_sequence(const int32_t* begin, int32_t batch, int32_t x) {
  int32_t low = 0, high = batch - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (begin[middle] <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace kascade::cuda
