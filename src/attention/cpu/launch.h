// SPDX-License-Identifier: Apache-2.0
// From a call to work items: what the two launchers share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/work.h"
#include "attention/params.h"
#include "kascade/attention.h"
#include "kascade/thread_pool.h"

namespace kascade::cpu {

/// `aligned` calls: one item per tile and group, or per tile when all heads own its set.
size_t prefill_workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads);
void launch_prefill(const AttentionParams& params, const Kernels& kernels, void* workspace, ThreadPool* pool);

/// `step` calls: one item per group and split of its keys.
size_t decode_workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads);
void launch_decode(const AttentionParams& params, const Kernels& kernels, void* workspace, ThreadPool* pool);

/// Query heads that share one set (or, in dense calls, one KV head).
struct Groups {
  int32_t count = 0;  // of a sequence
  int32_t heads = 0;  // of a group
  bool by_query_head = false;

  explicit Groups(const AttentionParams& params);
  int32_t kv_head(int32_t group) const { return by_query_head ? group / per_kv_head : group; }
  int32_t first_head(int32_t group) const { return group * heads; }
  /// The set of a group that selects.
  int32_t set(const AttentionParams& params, int32_t group) const {
    return params.set_owner == SetOwner::kAllHeads ? 0 : group;
  }
  int32_t per_kv_head = 1;
};

Stored cache_type(DType dtype);
CacheView cache_view(const AttentionParams& params, int32_t sequence, int32_t kv_head);

/// Rows [row, row + tokens) of a sequence for one group.
RowBlock row_block(const AttentionParams& params, const Sequence& sequence, const Groups& groups,
                   int32_t group, int64_t row, int64_t tokens);

/// The keys that a group of a tile attends in a reuse call, or without a set of its own.
KeySource set_keys(const AttentionParams& params, const Groups& groups, int32_t group, const Tile& tile,
                   int64_t own_end);

SetWork set_work(const AttentionParams& params, const Tile& tile, int32_t set, int64_t own_end);

/// Writes the empty set of a head that nobody reads.
void clear_set(const SetWork& set);

inline int threads_of(const ThreadPool* pool) { return pool != nullptr ? pool->threads() : 1; }

/// f(index, worker) for every index in [0, count).
template <class F>
void for_each_item(ThreadPool* pool, int64_t count, const F& f) {
  if (pool != nullptr) return pool->parallel_for(count, f);
  for (int64_t i = 0; i < count; ++i) f(i, 0);
}

constexpr int64_t round_up_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace kascade::cpu
