// SPDX-License-Identifier: Apache-2.0
// What the fields of a call mean, for every implementation: sequences, tiles, sets and addresses, clamped to
// the maxima that the host stated (AttentionParams). Plain arithmetic on values, no allocation,
// no checks of the caller's fields (check.h does those).
#pragma once

#include <cstdint>

#include "kascade/attention.h"

namespace kascade {

constexpr int32_t kMaxTile = 128;
constexpr int32_t kMaxGroup = 16;

inline int32_t group_size(const AttentionParams& params) { return params.query_heads / params.kv_heads; }

/// S: index sets of one tile.
inline int32_t sets_per_tile(const AttentionParams& params) {
  switch (params.set_owner) {
    case SetOwner::kAllHeads:
      return 1;
    case SetOwner::kQueryHead:
      return params.query_heads;
    case SetOwner::kKvHead:
      break;
  }
  return params.kv_heads;
}

constexpr bool selects(Role role) { return role == Role::kLayer0 || role == Role::kAnchor; }

/// Roles whose output attends to a set instead of all keys.
constexpr bool attends_to_sets(Role role) { return role == Role::kAnchor || role == Role::kReuse; }

/// A row is a tile of its own, and its own key is a candidate: `step` calls unless the budget is kOnTop, and
/// kCandidate.
inline bool own_key_is_candidate(const AttentionParams& params) {
  if (params.tile_rule == TileRule::kStep) return params.budget.own_tile != OwnTile::kOnTop;
  return params.budget.own_tile == OwnTile::kCandidate;
}

/// The factor of q.k: softmax scale times the scale of stored keys.
float score_scale(const AttentionParams& params);

/// The stated maxima, or where 0 was stated what the arrays say.
struct Maxima {
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t total_q = 0;
  int64_t tiles = 0;  // 0 for dense calls
};
Maxima resolve_maxima(const AttentionParams& params);

/// One sequence of the batch, after clamping. Row r in [0, q_len) is row row_begin + r of q and out, at
/// position start + r; start is negative when there are more rows than keys, and rows at negative positions
/// see no key.
struct Sequence {
  int64_t row_begin = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t start = 0;
  int64_t budget_len = 0;    // L of the budget
  int64_t tiles = 0;         // tiles_of(params, q_len, kv_len)
  int64_t set_begin = 0;     // set of tile 0 of this call
  int64_t stored_tiles = 0;  // tiles [0, stored_tiles) have a place in positions and counts
};
Sequence sequence_at(const AttentionParams& params, const Maxima& maxima, int32_t sequence);

/// One tile. Row r of it, at position p, may attend the keys [0, p]; its own keys are [budget.candidates, p],
/// none when own_key_is_candidate.
struct Tile {
  int64_t row_begin = 0, row_end = 0;  // rows of the sequence
  int64_t set = -1;                    // index into [tiles, ...], -1 when the tile has no place there
  SetBudget budget;                    // members() <= capacity
};
Tile tile_at(const AttentionParams& params, const Sequence& sequence, int64_t tile);

/// AttentionStatus bits of a call: which lengths were clamped.
uint32_t clamp_status(const AttentionParams& params, const Maxima& maxima);

/// The set that KV head kv_head, or query head query_head of its group, reads in a reuse call. Entries of
/// head_map outside [0, G) are clamped into it.
int32_t set_read_by(const AttentionParams& params, int32_t kv_head, int32_t query_head);

/// Whether anyone reads set `set` of a tile (`needed`).
bool set_needed(const AttentionParams& params, int32_t set);

/// Element offset of key j of a sequence from k (or v), less the part of the head.
inline int64_t token_offset(const AttentionParams& params, int32_t sequence, int64_t j, int64_t page_stride,
                            int64_t token_stride) {
  if (params.page_table == nullptr) return (params.cu_seqlens_kv[sequence] + j) * token_stride;
  const int64_t page = params.page_table[sequence * params.page_table_stride + j / params.page_size];
  return page * page_stride + j % params.page_size * token_stride;
}

}  // namespace kascade
