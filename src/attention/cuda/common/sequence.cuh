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

/// evaluate_budget() of a `step` call in little code: kernels of a few microseconds wait for every
/// instruction that they have not run before, and 64-bit divisions are long.
__device__ inline uint32_t budget_count(const Budget& budget, uint32_t length) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(budget.percent_hundredths)} * length;
  uint32_t count = static_cast<uint32_t>((product + (budget.round_up ? 9999 : 0)) / 10000);
  count = max(count, static_cast<uint32_t>(budget.floor));
  const auto multiple = static_cast<uint32_t>(budget.round_to);
  return multiple == 1 ? count : (count + multiple - 1) / multiple * multiple;
}
__device__ inline SetBudget step_budget(const Budget& budget, int32_t candidates, int32_t x, int32_t length) {
  const int64_t charged = budget.own_tile == OwnTile::kCharged && budget.tile > 1 ? budget.tile : 0;
  const bool rolling = budget.rolling && budget.rolling_min_rows < 1;
  int64_t count = 0;
  if (!rolling || budget.rolling_capped)
    count =
        max(int64_t{min(budget_count(budget, length), static_cast<uint32_t>(length))} - charged, int64_t{1});
  if (rolling) {
    const int64_t fixed = count;
    count = budget_count(budget, x);
    if (budget.rolling_capped) count = min(count, fixed);
  }
  SetBudget set;
  set.candidates = candidates;
  set.sinks = min(budget.sinks, candidates);
  set.recent_begin = max(set.candidates - budget.recent, set.sinks);
  if (budget.forced_charged) count = max(count - set.sinks - (set.candidates - set.recent_begin), int64_t{0});
  set.ranked = min(count, set.recent_begin - set.sinks);
  return set;
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
  const int32_t x = max(own_row ? s.start + tile : s.start, 0);
  const int32_t candidates = own_row ? max(s.start + tile + 1, 0) : x;
  const int32_t length = p.budget_lens != nullptr ? max(p.budget_lens[b], 0) : s.kv_len;
  SetBudget budget = step_budget(p.budget, candidates, x, length);
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
  if (p.set_owner == SetOwner::kKvHead) return max(0, min(p.head_map[reader], p.kv_heads - 1));
  const int32_t owner = max(0, min(p.head_map[reader / call.group], p.kv_heads - 1));
  return owner * call.group + reader % call.group;
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
  return p.needed[p.set_owner == SetOwner::kQueryHead ? set / call.group : set] != 0;
}

/// Members of a tile's set for a reader. What an anchor selects is known from the budget, before it has been
/// selected.
__device__ inline int32_t member_count(const DecodeCall& call, const StepTile& tile, int32_t reader) {
  if (tile.set < 0) return 0;
  if (call.params.role != Role::kReuse) return static_cast<int32_t>(tile.budget.members());
  const int32_t count = call.params.counts[tile.set * call.sets + set_of_reader(call, reader)];
  return max(0, min(count, call.params.capacity));
}

/// Own keys that follow the members in a tile's list.
__device__ inline int32_t own_keys(const DecodeCall& call, const StepSequence& s, const StepTile& tile) {
  return rows_are_tiles(call) ? 0 : static_cast<int32_t>(s.kv_len - tile.budget.candidates);
}

/// Keys of the longest of a tile's lists, which decides how all of them are cut. Lanes share the readers:
/// this one looks at reader `first` and every `step`-th after it; `largest` is the maximum over the lanes.
template <int unroll, class Largest>
__device__ inline int32_t longest_list(const DecodeCall& call, const StepSequence& s, const StepTile& tile,
                                       int32_t first, int32_t step, Largest largest) {
  if (call.params.role != Role::kReuse) return member_count(call, tile, 0) + own_keys(call, s, tile);
  int32_t longest = 0;
#pragma unroll unroll
  for (int32_t reader = first; reader < call.readers; reader += step)
    longest = max(longest, member_count(call, tile, reader));
  return largest(longest) + own_keys(call, s, tile);
}

/// The same for a warp.
__device__ inline int32_t longest_list(const DecodeCall& call, const StepSequence& s, const StepTile& tile) {
  return longest_list<1>(call, s, tile, static_cast<int32_t>(threadIdx.x) % 32, 32,
                         [](int32_t own) { return __reduce_max_sync(0xFFFFFFFFu, own); });
}

/// longest: keys of the tile's longest list.
__device__ inline SparseTile sparse_tile(const DecodeCall& call, const StepSequence& s, const StepTile& tile,
                                         int32_t longest) {
  const auto candidates = static_cast<int32_t>(tile.budget.candidates);
  return {s.row_begin + tile.row_begin,
          tile.rows,
          call.sparse_row_chunks(s.q_len),
          split_keys(call.sparse_rule, longest),
          tile.set < 0 ? 0 : static_cast<int32_t>(tile.budget.members()),
          own_keys(call, s, tile),
          candidates,
          s.start + tile.row_begin + 1 - candidates,
          tile.set};
}

struct Units {
  int32_t dense = 0, sparse = 0;
};

/// Units of work of one sequence, and its AttentionStatus bits; lanes as for longest_list().
template <int unroll, class Largest>
__device__ inline Units count_units(const DecodeCall& call, int32_t b, int32_t first, int32_t step,
                                    Largest largest, uint32_t* status) {
  const AttentionParams& p = call.params;
  const StepSequence s = load_sequence(call, b);
  if (s.q_len < int64_t{p.cu_seqlens_q[b + 1]} - p.cu_seqlens_q[b]) *status |= kStatusQueryClamped;
  if (s.kv_len < p.seq_lens_kv[b]) *status |= kStatusKvClamped;
  if (s.stored_tiles < s.tiles) *status |= kStatusTilesClamped;
  Units units;
  if (s.q_len == 0) return units;
  if (p.role != Role::kReuse) {
    const int32_t row_chunks = divide_up(s.q_len * call.group, call.dense_rows);
    units.dense = split_count(call.dense_rule, s.kv_len) * row_chunks * p.kv_heads;
  }
  int32_t splits = 0;
#pragma unroll 1
  for (int32_t i = 0; i < s.tiles; ++i) {
    const StepTile tile = load_tile(call, s, b, i);
    if (selects(p.role) && tile.clamped) *status |= kStatusCapacityClamped;
    if (!attends_to_sets(p.role)) continue;
    const int32_t longest = longest_list<unroll>(call, s, tile, first, step, largest);
    splits = max(splits, split_count(call.sparse_rule, longest));
    if (call.sparse_tiles != nullptr) call.sparse_tiles[b] = sparse_tile(call, s, tile, longest);
  }
  if (attends_to_sets(p.role))
    units.sparse = s.tiles * call.sparse_row_chunks(s.q_len) * call.readers * splits;
  return units;
}

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
