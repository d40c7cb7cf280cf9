// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <limits>

#include "attention/cpu/launch.h"

namespace kascade::cpu {
namespace {

/// Tokens of a dense item: 128 rows or a little more, in whole vectors. A row's result does not depend on it.
int64_t dense_tokens(int64_t heads) { return (128 + 16 * heads - 1) / (16 * heads) * 16; }

class PrefillCall {
 public:
  PrefillCall(const AttentionParams& params, const Kernels& kernels, void* workspace, ThreadPool* pool)
      : p_(params),
        kernels_(kernels),
        pool_(pool),
        maxima_(resolve_maxima(params)),
        groups_(params),
        joint_(selects(params.role) && params.set_owner == SetOwner::kAllHeads),
        sizes_(sizes(params, maxima_)),
        first_item_(static_cast<int64_t*>(workspace)),
        scratch_(static_cast<char*>(workspace) + table_bytes(params)),
        scratch_bytes_(round_up_bytes(static_cast<int64_t>(kernels.prefill_scratch_bytes(sizes_)))) {}

  static size_t workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads) {
    const auto scratch =
        static_cast<int64_t>(kernels.prefill_scratch_bytes(sizes(params, resolve_maxima(params))));
    return static_cast<size_t>(table_bytes(params) + threads * round_up_bytes(scratch));
  }

  void run() {
    int64_t items = 0;
    for (int32_t b = 0; b < p_.batch; ++b) {
      first_item_[b] = items;
      const Sequence sequence = sequence_at(p_, maxima_, b);
      clear_rows_without_tile(sequence);
      items += blocks_of(sequence) * (joint_ ? 1 : groups_.count);
    }
    first_item_[p_.batch] = items;
    for_each_item(pool_, items, [this](int64_t item, int worker) { run_item(item, worker); });
  }

 private:
  static int64_t table_bytes(const AttentionParams& params) {
    return round_up_bytes((int64_t{params.batch} + 1) * static_cast<int64_t>(sizeof(int64_t)));
  }

  static PrefillSizes sizes(const AttentionParams& params, const Maxima& maxima) {
    const Groups groups(params);
    const bool joint = selects(params.role) && params.set_owner == SetOwner::kAllHeads;
    PrefillSizes sizes;
    sizes.head_dim = params.head_dim;
    const int64_t tokens = params.role == Role::kDense ? dense_tokens(groups.heads) : params.tile;
    sizes.rows = std::min(tokens, maxima.q_len) * groups.heads;
    sizes.groups = joint ? groups.count : 1;
    sizes.keys = selects(params.role) ? maxima.kv_len : 0;
    sizes.list = params.role == Role::kReuse ? params.capacity : 0;
    sizes.stored = cache_type(params.kv_dtype);
    return sizes;
  }

  /// Rows before the first key see nothing and belong to no tile.
  void clear_rows_without_tile(const Sequence& sequence) {
    const int64_t end = std::clamp<int64_t>(-sequence.start, 0, sequence.q_len);
    for (int64_t row = sequence.row_begin; row < sequence.row_begin + end; ++row) {
      for (int64_t h = 0; h < p_.query_heads; ++h) {
        float* out = static_cast<float*>(p_.out) + row * p_.out_row_stride + h * p_.out_head_stride;
        std::fill_n(out, p_.head_dim, 0.0f);
        if (p_.lse != nullptr) p_.lse[row * p_.lse_row_stride + h] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  int64_t blocks_of(const Sequence& sequence) const {
    if (p_.role != Role::kDense) return sequence.tiles;
    if (sequence.q_len <= 0 || sequence.kv_len <= 0) return 0;
    const int64_t tokens = dense_tokens(groups_.heads);
    return (sequence.kv_len - 1) / tokens - std::max<int64_t>(sequence.start, 0) / tokens + 1;
  }

  Tile block_at(const Sequence& sequence, int64_t block) const {
    if (p_.role != Role::kDense) return tile_at(p_, sequence, block);
    const int64_t tokens = dense_tokens(groups_.heads);
    const int64_t start = (std::max<int64_t>(sequence.start, 0) / tokens + block) * tokens;
    Tile tile;
    tile.row_begin = std::max<int64_t>(start, std::max<int64_t>(sequence.start, 0)) - sequence.start;
    tile.row_end = std::min(start + tokens - sequence.start, sequence.q_len);
    return tile;
  }

  void run_item(int64_t item, int worker) {
    const int64_t* after = std::upper_bound(first_item_, first_item_ + p_.batch + 1, item);
    const auto b = static_cast<int32_t>(after - first_item_ - 1);
    const Sequence sequence = sequence_at(p_, maxima_, b);
    const int64_t blocks = blocks_of(sequence);
    item -= first_item_[b];
    // Of one head's blocks the last has the most keys: it goes first, and the short ones fill the end.
    const auto group = static_cast<int32_t>(item / blocks);
    const Tile tile = block_at(sequence, blocks - 1 - item % blocks);
    const int64_t tokens = tile.row_end - tile.row_begin;
    if (tokens <= 0) return;

    PrefillTile work;
    work.rows = row_block(p_, sequence, groups_, group, tile.row_begin, tokens);
    work.cache = cache_view(p_, b, groups_.kv_head(group));
    const int64_t end = work.rows.first_position + tokens;
    if (p_.role == Role::kDense || p_.role == Role::kLayer0) {
      work.keys.range_end = end;
    } else {
      work.keys = set_keys(p_, groups_, group, tile, end);
      work.attends_to_set = true;
    }
    if (selects(p_.role) && tile.set >= 0) prepare_selection(tile, group, end, &work);
    run_tile(work, worker);
  }

  void prepare_selection(const Tile& tile, int32_t group, int64_t end, PrefillTile* work) {
    const int32_t set = groups_.set(p_, group);
    work->set = set_work(p_, tile, set, end);
    work->selects = set_needed(p_, set);
    if (!work->selects) clear_set(work->set);
  }

  void run_tile(PrefillTile& work, int worker) {
    if (joint_) {
      const auto bytes = static_cast<int64_t>(dtype_bytes(p_.kv_dtype));
      work.groups = groups_.count;
      work.q_group_stride = groups_.heads * p_.q_head_stride;
      work.out_group_stride = groups_.heads * p_.out_head_stride;
      work.lse_group_stride = groups_.heads;
      work.k_group_stride = p_.k_head_stride * bytes;
      work.v_group_stride = p_.v_head_stride * bytes;
    }
    kernels_.prefill_tile(work, sizes_, scratch_ + worker * scratch_bytes_);
  }

  const AttentionParams& p_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const Maxima maxima_;
  const Groups groups_;
  const bool joint_;  // all heads own one set: a tile's groups are one item
  const PrefillSizes sizes_;
  int64_t* first_item_;  // [batch + 1]
  char* scratch_;
  const int64_t scratch_bytes_;
};

}  // namespace

size_t prefill_workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads) {
  return PrefillCall::workspace_bytes(params, kernels, threads);
}

void launch_prefill(const AttentionParams& params, const Kernels& kernels, void* workspace,
                    ThreadPool* pool) {
  PrefillCall(params, kernels, workspace, pool).run();
}

}  // namespace kascade::cpu
