// SPDX-License-Identifier: Apache-2.0
#include "attention/params.h"

#include <algorithm>
#include <cmath>

namespace kascade {
namespace {

/// Index of the tile (by absolute position) that holds the first row with a key.
int64_t first_tile(const AttentionParams& params, int64_t start) {
  return std::max<int64_t>(start, 0) / params.tile;
}

/// The budget of a tile that starts at x.
SetBudget budget_at(const AttentionParams& params, int64_t x, int64_t budget_len) {
  const int64_t query_rows = params.tile_rule == TileRule::kAligned ? budget_len : 1;
  const int64_t candidates = x + (own_key_is_candidate(params) ? 1 : 0);
  return evaluate_budget(params.budget, std::max<int64_t>(candidates, 0), std::max<int64_t>(x, 0), budget_len,
                         query_rows);
}

/// Where tile `tile` of a call begins.
int64_t tile_start(const AttentionParams& params, int64_t start, int64_t tile) {
  if (params.tile_rule == TileRule::kAligned) return (first_tile(params, start) + tile) * params.tile;
  return own_key_is_candidate(params) ? start + tile : std::max<int64_t>(start, 0);
}

/// Drops ranked, then recent, then sink members until the set fits.
SetBudget fit(SetBudget budget, int64_t capacity) {
  const int64_t sinks = std::min(budget.sinks, capacity);
  const int64_t recent = std::min(budget.candidates - budget.recent_begin, capacity - sinks);
  budget.ranked = std::min(budget.ranked, capacity - sinks - recent);
  budget.sinks = sinks;
  budget.recent_begin = budget.candidates - recent;
  return budget;
}

}  // namespace

float score_scale(const AttentionParams& params) {
  const float scale =
      params.softmax_scale != 0 ? params.softmax_scale : 1 / std::sqrt(static_cast<float>(params.head_dim));
  return scale * params.k_scale;
}

int64_t tiles_of(const AttentionParams& params, int64_t q_len, int64_t kv_len) {
  if (q_len <= 0) return 0;
  if (params.tile_rule == TileRule::kStep) return own_key_is_candidate(params) ? q_len : 1;
  // Rows before the first key belong to no tile.
  if (kv_len <= 0) return 0;
  return (kv_len - 1) / params.tile - first_tile(params, kv_len - q_len) + 1;
}

Maxima resolve_maxima(const AttentionParams& params) {
  Maxima maxima{params.max_q_len, params.max_kv_len, params.max_total_q, params.max_tiles};
  for (int32_t b = 0; b < params.batch; ++b) {
    if (params.max_q_len == 0)
      maxima.q_len =
          std::max<int64_t>(maxima.q_len, int64_t{params.cu_seqlens_q[b + 1]} - params.cu_seqlens_q[b]);
    if (params.max_kv_len == 0) maxima.kv_len = std::max<int64_t>(maxima.kv_len, params.seq_lens_kv[b]);
  }
  if (params.batch > 0 && params.max_total_q == 0) maxima.total_q = params.cu_seqlens_q[params.batch];
  if (params.role == Role::kDense) {
    maxima.tiles = 0;
  } else if (params.batch > 0 && params.max_tiles == 0) {
    maxima.tiles = params.tile_offsets[params.batch];
  }
  return maxima;
}

Sequence sequence_at(const AttentionParams& params, const Maxima& maxima, int32_t sequence) {
  Sequence s;
  const int64_t row_begin = params.cu_seqlens_q[sequence], row_end = params.cu_seqlens_q[sequence + 1];
  s.row_begin = std::clamp<int64_t>(row_begin, 0, maxima.total_q);
  s.q_len = std::clamp<int64_t>(std::min(row_end, maxima.total_q) - s.row_begin, 0, maxima.q_len);
  s.kv_len = std::clamp<int64_t>(params.seq_lens_kv[sequence], 0, maxima.kv_len);
  s.start = s.kv_len - s.q_len;
  s.budget_len =
      params.budget_lens != nullptr ? std::max<int64_t>(params.budget_lens[sequence], 0) : s.kv_len;
  if (params.role == Role::kDense) return s;
  s.tiles = tiles_of(params, s.q_len, s.kv_len);
  s.set_begin = params.tile_offsets[sequence];
  // A sequence never reaches into the sets of the next one, whatever tile_offsets says.
  const int64_t set_end = std::min<int64_t>(params.tile_offsets[sequence + 1], maxima.tiles);
  s.stored_tiles = s.set_begin < 0 ? 0 : std::clamp<int64_t>(set_end - s.set_begin, 0, s.tiles);
  return s;
}

Tile tile_at(const AttentionParams& params, const Sequence& sequence, int64_t tile) {
  Tile t;
  const int64_t x = tile_start(params, sequence.start, tile);
  if (params.tile_rule == TileRule::kAligned) {
    t.row_begin = std::max<int64_t>(x - sequence.start, 0);
    t.row_end = std::min(x + params.tile - sequence.start, sequence.q_len);
  } else if (own_key_is_candidate(params)) {
    t.row_begin = tile;
    t.row_end = tile + 1;
  } else {
    t.row_end = sequence.q_len;
  }
  t.set = tile < sequence.stored_tiles ? sequence.set_begin + tile : -1;
  t.budget = fit(budget_at(params, x, sequence.budget_len), params.capacity);
  return t;
}

int64_t required_capacity(const AttentionParams& params) {
  const auto members_at_end = [&params](int64_t kv_len, int64_t budget_len) {
    // The last tile has the most: budgets grow with the tile's start. One row makes it start as late as it
    // can.
    if (kv_len <= 0) return int64_t{0};
    return budget_at(params, tile_start(params, kv_len - 1, 0), budget_len).members();
  };
  int64_t most = 0;
  if (params.max_kv_len != 0) {
    // At most rolling_min_rows rows use the fixed budget, which may be the larger one.
    const int64_t fixed_len = std::min(params.max_kv_len, params.budget.rolling_min_rows);
    return std::max(members_at_end(params.max_kv_len, params.max_kv_len),
                    members_at_end(fixed_len, fixed_len));
  }
  for (int32_t b = 0; b < params.batch; ++b) {
    const int64_t kv_len = params.seq_lens_kv[b];
    most = std::max(most,
                    members_at_end(kv_len, params.budget_lens != nullptr ? params.budget_lens[b] : kv_len));
  }
  return most;
}

uint32_t clamp_status(const AttentionParams& params, const Maxima& maxima) {
  uint32_t status = 0;
  for (int32_t b = 0; b < params.batch; ++b) {
    const Sequence s = sequence_at(params, maxima, b);
    if (s.q_len < int64_t{params.cu_seqlens_q[b + 1]} - params.cu_seqlens_q[b]) status |= kStatusQueryClamped;
    if (s.kv_len < params.seq_lens_kv[b]) status |= kStatusKvClamped;
    if (s.stored_tiles < s.tiles) status |= kStatusTilesClamped;
    if (!selects(params.role) || s.tiles == 0) continue;
    const int64_t last = tile_start(params, s.start, s.tiles - 1);
    if (budget_at(params, last, s.budget_len).members() > params.capacity) status |= kStatusCapacityClamped;
  }
  return status;
}

int32_t set_read_by(const AttentionParams& params, int32_t kv_head, int32_t query_head) {
  if (params.set_owner == SetOwner::kAllHeads) return 0;
  const int32_t owner =
      params.head_map != nullptr ? std::clamp(params.head_map[kv_head], 0, params.kv_heads - 1) : kv_head;
  if (params.set_owner == SetOwner::kKvHead) return owner;
  return owner * group_size(params) + query_head % group_size(params);
}

bool set_needed(const AttentionParams& params, int32_t set) {
  if (params.role != Role::kLayer0 || params.needed == nullptr) return true;
  if (params.set_owner == SetOwner::kAllHeads)
    return std::any_of(params.needed, params.needed + params.kv_heads,
                       [](uint8_t head) { return head != 0; });
  return params.needed[params.set_owner == SetOwner::kQueryHead ? set / group_size(params) : set] != 0;
}

}  // namespace kascade
