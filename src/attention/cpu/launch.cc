// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/launch.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

namespace kascade::cpu {

Groups::Groups(const AttentionParams& params) : per_kv_head(group_size(params)) {
  by_query_head = params.role != Role::kDense && params.set_owner == SetOwner::kQueryHead;
  count = by_query_head ? params.query_heads : params.kv_heads;
  heads = params.query_heads / count;
}

Stored cache_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Stored::kF16;
    case DType::kBF16:
      return Stored::kBF16;
    case DType::kF32:
      break;
  }
  return Stored::kF32;
}

CacheView cache_view(const AttentionParams& params, int32_t sequence, int32_t kv_head) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(params.kv_dtype));
  CacheView view;
  view.k = static_cast<const char*>(params.k) + kv_head * params.k_head_stride * bytes;
  view.v = static_cast<const char*>(params.v) + kv_head * params.v_head_stride * bytes;
  view.k_page_stride = params.k_page_stride * bytes;
  view.k_token_stride = params.k_token_stride * bytes;
  view.v_page_stride = params.v_page_stride * bytes;
  view.v_token_stride = params.v_token_stride * bytes;
  view.stored = cache_type(params.kv_dtype);
  if (params.page_table == nullptr) {
    view.k += params.cu_seqlens_kv[sequence] * view.k_token_stride;
    view.v += params.cu_seqlens_kv[sequence] * view.v_token_stride;
    return view;
  }
  view.page_table = params.page_table + sequence * params.page_table_stride;
  view.page_size = params.page_size;
  const auto size = static_cast<uint32_t>(params.page_size);
  view.page_shift = std::has_single_bit(size) ? std::countr_zero(size) : -1;
  return view;
}

RowBlock row_block(const AttentionParams& params, const Sequence& sequence, const Groups& groups,
                   int32_t group, int64_t row, int64_t tokens) {
  const int64_t first_row = sequence.row_begin + row;
  const int64_t head = groups.first_head(group);
  RowBlock block;
  block.q =
      static_cast<const float*>(params.q) + first_row * params.q_row_stride + head * params.q_head_stride;
  block.q_token_stride = params.q_row_stride;
  block.q_head_stride = params.q_head_stride;
  block.out =
      static_cast<float*>(params.out) + first_row * params.out_row_stride + head * params.out_head_stride;
  block.out_token_stride = params.out_row_stride;
  block.out_head_stride = params.out_head_stride;
  if (params.lse != nullptr) block.lse = params.lse + first_row * params.lse_row_stride + head;
  block.lse_token_stride = params.lse_row_stride;
  block.first_position = sequence.start + row;
  block.tokens = static_cast<int32_t>(tokens);
  block.heads = groups.heads;
  block.head_dim = params.head_dim;
  block.score_scale = score_scale(params) * std::numbers::log2e_v<float>;
  block.value_scale = params.v_scale;
  return block;
}

KeySource set_keys(const AttentionParams& params, const Groups& groups, int32_t group, const Tile& tile,
                   int64_t own_end) {
  static constexpr int32_t kNone = 0;
  KeySource keys;
  keys.list = &kNone;
  keys.own_begin = tile.budget.candidates;
  keys.own_end = std::max(own_end, keys.own_begin);
  if (params.role != Role::kReuse || tile.set < 0) return keys;
  const int32_t owner = set_read_by(params, groups.kv_head(group), groups.first_head(group));
  const int64_t set = tile.set * sets_per_tile(params) + owner;
  keys.list_count = std::clamp<int64_t>(params.counts[set], 0, params.capacity);
  if (keys.list_count > 0) keys.list = params.positions + set * params.capacity;
  return keys;
}

SetWork set_work(const AttentionParams& params, const Tile& tile, int32_t set, int64_t own_end) {
  const int64_t index = tile.set * sets_per_tile(params) + set;
  SetWork work;
  work.candidates = tile.budget.candidates;
  work.sinks = tile.budget.sinks;
  work.recent_begin = tile.budget.recent_begin;
  work.ranked = tile.budget.ranked;
  work.own_end = std::max(own_end, work.candidates);
  work.members = params.positions + index * params.capacity;
  work.count = params.counts + index;
  work.capacity = params.capacity;
  if (params.pooled_weights != nullptr)
    work.pooled =
        params.pooled_weights + tile.set * params.pooled_tile_stride + set * params.pooled_head_stride;
  if (params.own_tile_mass != nullptr) work.own_tile_mass = params.own_tile_mass + index;
  return work;
}

void clear_set(const SetWork& set) {
  std::fill_n(set.members, set.capacity, -1);
  *set.count = 0;
}

}  // namespace kascade::cpu
