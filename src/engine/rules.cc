// SPDX-License-Identifier: Apache-2.0
#include "engine/rules.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace kascade {
namespace {

constexpr int64_t kLengthStep = 1024;

}  // namespace

LayerRule rule_of(const Policy* policy, int layer, Phase phase) {
  return policy != nullptr ? policy->rule(layer, phase) : LayerRule{};
}

AttentionParams params_of(const LayerRule& rule, const BatchView& view, const ModelConfig& config) {
  AttentionParams params;
  params.role = rule.role;
  params.tile_rule = rule.tile_rule;
  params.set_owner = rule.set_owner;
  params.tile = rule.tile;
  params.budget = rule.budget;
  params.head_map = rule.head_map;
  params.needed = rule.needed;
  params.batch = view.size();
  params.query_heads = config.query_heads;
  params.kv_heads = config.kv_heads;
  params.head_dim = config.head_dim;
  params.q_head_stride = params.out_head_stride = config.head_dim;
  params.q_row_stride = params.out_row_stride = int64_t{config.query_heads} * config.head_dim;
  params.cu_seqlens_q = view.cu_seqlens_q.data();
  params.seq_lens_kv = view.seq_lens_kv.data();
  params.budget_lens = view.budget_lens.data();
  params.page_table = view.page_table;
  params.page_table_stride = view.page_table_stride;
  params.max_q_len = view.max_q_len;
  params.max_kv_len = view.max_kv_len;
  params.max_total_q = view.cu_seqlens_q.back();
  return params;
}

int64_t sets_per_tile(SetOwner owner, const ModelConfig& config) {
  switch (owner) {
    case SetOwner::kKvHead:
      return config.kv_heads;
    case SetOwner::kAllHeads:
      return 1;
    case SetOwner::kQueryHead:
      return config.query_heads;
  }
  throw_error<BadArgument>("set_owner: unknown value {}", static_cast<int>(owner));
}

bool selects_sets(const LayerRule& rule) {
  return rule.role == Role::kLayer0 || rule.role == Role::kAnchor || rule.selects_itself;
}

AttentionParams shape_of_sets(AttentionParams params) {
  if (params.role == Role::kDense) params.role = Role::kLayer0;
  return params;
}

int64_t fill_tile_offsets(const AttentionParams& params, std::vector<int32_t>& offsets) {
  offsets.resize(static_cast<size_t>(params.batch) + 1);
  offsets[0] = 0;
  for (int32_t b = 0; b < params.batch; ++b) {
    const int64_t q_len = params.cu_seqlens_q[b + 1] - params.cu_seqlens_q[b];
    offsets[b + 1] = offsets[b] + static_cast<int32_t>(tiles_of(params, q_len, params.seq_lens_kv[b]));
  }
  return offsets[params.batch];
}

int64_t rounded_length(int64_t length) { return (length + kLengthStep - 1) / kLengthStep * kLengthStep; }

int64_t prefill_granule(const Policy* policy, int layers) {
  int64_t granule = 1;
  for (int layer = 0; layer < layers; ++layer) {
    const LayerRule rule = rule_of(policy, layer, Phase::kPrefill);
    if (rule.role != Role::kDense || rule.selects_itself) granule = std::lcm(granule, int64_t{rule.tile});
    if (granule > INT32_MAX) break;  // no chunk is a multiple of it
  }
  return granule;
}

uint64_t prefill_bytes(const ModelConfig& config, int64_t rows, int64_t kv_len,
                       FunctionRef<LayerRule(int layer)> rule_of_layer,
                       FunctionRef<AttentionParams(const LayerRule&, const BatchView&)> params_for,
                       FunctionRef<uint64_t(const AttentionParams&)> workspace_of) {
  BatchView view;
  view.cu_seqlens_q = {0, static_cast<int32_t>(rows)};
  view.max_q_len = static_cast<int32_t>(rows);
  view.seq_lens_kv = view.budget_lens = {static_cast<int32_t>(kv_len)};
  view.max_kv_len = static_cast<int32_t>(rounded_length(kv_len));
  const int32_t table = 0;  // of one page, which nobody reads
  view.page_table = &table;
  uint64_t set_bytes = 0, workspace = 0;
  std::vector<int32_t> offsets;
  int32_t capacity = 0;
  for (int layer = 0; layer < config.layers; ++layer) {
    const LayerRule rule = rule_of_layer(layer);
    AttentionParams params = params_for(rule, view);
    if (selects_sets(rule) || rule.role == Role::kReuse) {
      const AttentionParams shape = shape_of_sets(params);
      params.max_tiles = static_cast<int32_t>(fill_tile_offsets(shape, offsets));
      params.tile_offsets = offsets.data();
      if (selects_sets(rule)) capacity = static_cast<int32_t>(required_capacity(shape));
      params.capacity = capacity;
      const uint64_t sets = static_cast<uint64_t>(params.max_tiles) *
                            static_cast<uint64_t>(sets_per_tile(rule.set_owner, config));
      set_bytes = std::max(set_bytes, sets * (static_cast<uint64_t>(capacity) + 1) * sizeof(int32_t));
    }
    workspace = std::max(workspace, workspace_of(params));
  }
  return set_bytes + workspace;
}

void require_same_sets(const Policy& policy, int layer, const AttentionParams& reads,
                       const AttentionParams* made) {
  require<BadArgument>(
      made != nullptr && made->cu_seqlens_q == reads.cu_seqlens_q && made->set_owner == reads.set_owner &&
          made->tile_rule == reads.tile_rule && made->tile == reads.tile,
      "policy {}: layer {} reuses index sets of another owner or another kind of tile than were selected",
      policy.name(), layer);
}

}  // namespace kascade
