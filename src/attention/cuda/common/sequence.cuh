// SPDX-License-Identifier: Apache-2.0
// The meaning of a step call's fields on the device: sequences, tiles, lists. The same rules as
// attention/params.cc.
#pragma once

#include <cfloat>
#include <cstdint>

#include "attention/cuda/common/call.h"
#include "base/cuda/ptx/mma.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

/// SetBudget of a `step` call, whose lengths fit into 32 bits.
struct StepBudget {
  int32_t candidates = 0;
  int32_t sinks = 0;
  int32_t recent_begin = 0;
  int32_t ranked = 0;

  __host__ __device__ int32_t members() const { return sinks + ranked + (candidates - recent_begin); }
};

/// evaluate_budget() of a `step` call in little code: kernels of a few microseconds wait for every
/// instruction that they have not run before, and 64-bit divisions are long. A test compares the two.
__host__ __device__ inline uint32_t budget_count(const Budget& budget, uint32_t length) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(budget.percent_hundredths)} * length;
  uint32_t count = static_cast<uint32_t>((product + (budget.round_up ? 9999 : 0)) / 10000);
  count = max(count, static_cast<uint32_t>(budget.floor));
  const auto multiple = static_cast<uint32_t>(budget.round_to);
  return multiple == 1 ? count : (count + multiple - 1) / multiple * multiple;
}
__host__ __device__ inline StepBudget step_budget(const Budget& budget, int32_t candidates, int32_t x,
                                                  int32_t length) {
  const int32_t charged = budget.own_tile == OwnTile::kCharged && budget.tile > 1 ? budget.tile : 0;
  const bool rolling = budget.rolling && budget.rolling_min_rows < 1;
  int32_t count = 0;
  if (!rolling || budget.rolling_capped)
    count = max(
        static_cast<int32_t>(min(budget_count(budget, length), static_cast<uint32_t>(length))) - charged, 1);
  if (rolling) {
    const int32_t fixed = count;
    count = static_cast<int32_t>(min(budget_count(budget, x), uint32_t{INT32_MAX}));
    if (budget.rolling_capped) count = min(count, fixed);
  }
  StepBudget set;
  set.candidates = candidates;
  set.sinks = min(budget.sinks, candidates);
  set.recent_begin = max(set.candidates - budget.recent, set.sinks);
  if (budget.forced_charged) count = max(count - set.sinks - (set.candidates - set.recent_begin), 0);
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
  int32_t set;  // index of its sets, -1 without a place
  StepBudget budget;
  bool clamped;  // the budget did not fit into capacity
};

/// A row is a tile of its own, and its own key is a candidate.
__device__ inline bool rows_are_tiles(const DecodeCall& call) {
  return call.params.budget.own_tile != OwnTile::kOnTop;
}

__device__ inline StepSequence load_sequence(const DecodeCall& call, int32_t b) {
  const AttentionParams& p = call.params;
  // Maxima fit into 32 bits.
  const auto most_rows = static_cast<int32_t>(call.maxima.total_q);
  StepSequence s;
  s.row_begin = min(max(p.cu_seqlens_q[b], 0), most_rows);
  const int32_t row_end = min(max(p.cu_seqlens_q[b + 1], 0), most_rows);
  s.q_len = min(max(row_end - s.row_begin, 0), static_cast<int32_t>(call.maxima.q_len));
  s.kv_len = min(max(p.seq_lens_kv[b], 0), static_cast<int32_t>(call.maxima.kv_len));
  s.start = s.kv_len - s.q_len;
  s.tiles = s.set_begin = s.stored_tiles = 0;
  if (p.role == Role::kDense) return s;
  s.tiles = s.q_len == 0 ? 0 : rows_are_tiles(call) ? s.q_len : 1;
  s.set_begin = p.tile_offsets[b];
  const int32_t set_end = min(max(p.tile_offsets[b + 1], 0), static_cast<int32_t>(call.maxima.tiles));
  s.stored_tiles = s.set_begin < 0 ? 0 : min(max(set_end - s.set_begin, 0), s.tiles);
  return s;
}

__device__ inline StepTile load_tile(const DecodeCall& call, const StepSequence& s, int32_t b, int32_t tile) {
  const AttentionParams& p = call.params;
  StepTile t;
  const bool own_row = rows_are_tiles(call);
  t.row_begin = own_row ? tile : 0;
  t.rows = own_row ? 1 : s.q_len;
  t.set = tile < s.stored_tiles ? s.set_begin + tile : -1;
  const int32_t x = max(own_row ? s.start + tile : s.start, 0);
  const int32_t candidates = own_row ? max(s.start + tile + 1, 0) : x;
  t.budget = {};
  t.budget.candidates = candidates;
  t.clamped = false;
  if (p.role == Role::kReuse) return t;  // the sets' counts decide
  const int32_t length = p.budget_lens != nullptr ? max(p.budget_lens[b], 0) : s.kv_len;
  StepBudget budget = step_budget(p.budget, candidates, x, length);
  t.clamped = budget.members() > p.capacity;
  const int32_t sinks = min(budget.sinks, p.capacity);
  const int32_t recent = min(budget.candidates - budget.recent_begin, p.capacity - sinks);
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
  if (call.params.role != Role::kReuse) return tile.budget.members();
  const int32_t count = call.params.counts[int64_t{tile.set} * call.sets + set_of_reader(call, reader)];
  return max(0, min(count, call.params.capacity));
}

/// Own keys that follow the members in a tile's list.
__device__ inline int32_t own_keys(const DecodeCall& call, const StepSequence& s, const StepTile& tile) {
  return rows_are_tiles(call) ? 0 : s.kv_len - tile.budget.candidates;
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
                         [](int32_t own) { return __reduce_max_sync(kFullWarp, own); });
}

/// A tile whose units are not cut yet; longest: keys of its longest list.
__device__ inline UnitTile sparse_tile(const DecodeCall& call, const StepSequence& s, const StepTile& tile,
                                       int32_t b, int32_t longest) {
  const int32_t candidates = tile.budget.candidates;
  return {b,
          s.row_begin + tile.row_begin,
          tile.rows,
          call.sparse_row_chunks(s.q_len),
          split_keys(call.sparse_rule, longest),
          1,
          GroupMerge::kNobody,
          tile.set < 0 ? 0 : tile.budget.members(),
          own_keys(call, s, tile),
          candidates,
          s.start + tile.row_begin + 1 - candidates,
          tile.set};
}

/// Cuts the units of a tile whose longest list has `splits` splits, and returns how many there are; in_call
/// as for cut_units().
__device__ inline int32_t cut_sparse_tile(const DecodeCall& call, UnitTile& tile, int32_t splits,
                                          int32_t in_call) {
  const UnitCut cut = cut_units(call.sparse_rule, splits, tile.sequence, call.params.batch, in_call);
  tile.unit_splits = cut.splits;
  tile.merge = cut.merge;
  return divide_up(splits, cut.splits) * tile.row_chunks * call.readers;
}

/// The whole of a sequence as the own keys of a list without members.
__device__ inline UnitTile dense_tile(const DecodeCall& call, const StepSequence& s, int32_t b) {
  const int32_t split = split_keys(call.dense_rule, s.kv_len);
  const UnitCut cut = cut_units(call.dense_rule, divide_up(s.kv_len, split), b, call.params.batch, 0);
  return {b,        s.row_begin, s.q_len,     divide_up(s.q_len * call.group, call.dense_rows),
          split,    cut.splits,  cut.merge,   0,
          s.kv_len, 0,           s.start + 1, -1};
}

/// Units of work in the pass over all keys, and splits of the longest list, of tile `entry` of the batch,
/// every sequence having call.tiles; lanes as for longest_list(). If `reports`, AttentionStatus bits are
/// added to status.
template <bool kDense, bool kSparse, int unroll, class Largest>
__device__ inline void schedule_tile(const DecodeCall& call, int32_t entry, int32_t first, int32_t step,
                                     Largest largest, UnitTile& dense, int32_t& dense_units, UnitTile& sparse,
                                     int32_t& splits, bool reports, uint32_t& status) {
  const AttentionParams& p = call.params;
  const int32_t b = call.tiles == 1 ? entry : entry / call.tiles, index = entry - b * call.tiles;
  const StepSequence s = load_sequence(call, b);
  if (reports) {
    if (s.q_len < int64_t{p.cu_seqlens_q[b + 1]} - p.cu_seqlens_q[b]) status |= kStatusQueryClamped;
    if (s.kv_len < p.seq_lens_kv[b]) status |= kStatusKvClamped;
    if (s.stored_tiles < s.tiles) status |= kStatusTilesClamped;
  }
  if (kDense && index == 0 && s.q_len > 0 && p.role != Role::kReuse) {
    const UnitTile tile = dense_tile(call, s, b);
    dense = tile;
    dense_units = divide_up(s.kv_len, tile.split * tile.unit_splits) * tile.row_chunks * p.kv_heads;
  }
  if (index >= s.tiles) return;
  const bool checks = reports && selects(p.role);
  if (!checks && !(kSparse && attends_to_sets(p.role))) return;
  const StepTile tile = load_tile(call, s, b, index);
  if (checks && tile.clamped) status |= kStatusCapacityClamped;
  if (!kSparse || !attends_to_sets(p.role)) return;
  const int32_t longest = longest_list<unroll>(call, s, tile, first, step, largest);
  const UnitTile units = sparse_tile(call, s, tile, b, longest);
  sparse = units;
  splits = divide_up(longest, units.split);
}

/// Lanes of a warp that share a tile when the warp looks at all `entries` tiles at once, a power of two.
__device__ inline int32_t lanes_of_tile(int32_t entries) { return 32 >> (32 - __clz(entries - 1)); }

/// The lanes that share tile `entry` then.
__device__ inline unsigned tile_mask(int32_t lanes, int32_t entry) {
  return (lanes == 32 ? kFullWarp : (1u << lanes) - 1) << (entry * lanes);
}

/// Splits of all lists of a self-scheduled call, by a warp.
__device__ inline int32_t splits_in_call(const DecodeCall& call) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, entries = call.params.batch * call.tiles;
  const int32_t lanes = lanes_of_tile(entries), entry = lane / lanes, b = entry / call.tiles;
  int32_t splits = 0;
  if (entry < entries) {
    const unsigned together = tile_mask(lanes, entry);
    const StepSequence s = load_sequence(call, b);
    if (entry - b * call.tiles < s.tiles) {
      const StepTile tile = load_tile(call, s, b, entry - b * call.tiles);
      const int32_t longest = longest_list<1>(call, s, tile, lane % lanes, lanes,
                                              [&](int32_t own) { return __reduce_max_sync(together, own); });
      splits = split_count(call.sparse_rule, longest) * call.readers;
    }
  }
  return __reduce_add_sync(kFullWarp, lane % lanes == 0 ? splits : 0);
}

/// Adds what another part of a row's keys left to what came before: the largest score (finite once added) and
/// the sums of 2^(score - largest). Every merge of partial results is a chain of these, so results do not
/// depend on where they are added.
struct Merge {
  float top, old_factor, new_factor;
};
__device__ inline Merge merge_tops(float top, float other) {
  const float all = fmaxf(fmaxf(top, other), -FLT_MAX);
  return {all, exp2_fast(top - all), exp2_fast(other - all)};
}
__device__ inline float merge_sums(const Merge& merge, float sum, float other) {
  return __fmaf_rn(sum, merge.old_factor, __fmul_rn(other, merge.new_factor));
}

/// Largest score (finite) and sum of 2^(score - largest) of one row over what a pass over all keys left of
/// it, one partial result a split or one a group of splits; a warp's lanes share it.
struct RowStats {
  float top, total;
};
__device__ inline RowStats merge_stats(const float2* parts, int32_t splits, bool by_groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float top = -INFINITY, total = 0;
  const auto add = [](float& top, float& total, float2 part) {
    const Merge merge = merge_tops(top, part.x);
    top = merge.top;
    total = merge_sums(merge, total, part.y);
  };
#pragma unroll 1
  for (int32_t group = lane; group * kSplitGroup < splits; group += 32) {
    float2 all = make_float2(-INFINITY, 0);
    if (by_groups) {
      all = parts[group];
    } else {
      float2 of_split[kSplitGroup];
#pragma unroll
      for (int j = 0; j < kSplitGroup; ++j) {
        const int32_t i = group * kSplitGroup + j;
        of_split[j] = i < splits ? parts[i] : make_float2(-INFINITY, 0);
      }
#pragma unroll
      for (int j = 0; j < kSplitGroup; ++j)
        if (group * kSplitGroup + j < splits) add(all.x, all.y, of_split[j]);
    }
    add(top, total, all);
  }
  float all = fmaxf(top, -FLT_MAX);
  for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kFullWarp, all, step));
  total *= exp2_fast(top - all);
  return {all, warp_sum(total)};
}

/// find_sequence() by a whole warp: 32 probes at a time.
__device__ inline int32_t find_by_warp(const int32_t* begin, int32_t count, int32_t x) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t low = 0;
#pragma unroll 1
  while (count > 1) {
    const int32_t step = divide_up(count, 32), at = lane * step;
    const unsigned before = __ballot_sync(kFullWarp, at < count && begin[low + at] <= x);
    const int32_t skipped = (__popc(before) - 1) * step;
    low += skipped;
    count = min(step, count - skipped);
  }
  return low;
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
