// SPDX-License-Identifier: Apache-2.0
#include "engine/layer_attention.h"

#include <algorithm>

#include "base/check.h"
#include "engine/rules.h"

namespace kascade {
LayerAttention::LayerAttention(const ModelConfig& config, std::shared_ptr<const PagePool> cache,
                               const std::string& kernel_name, ThreadPool& pool)
    : config_(config), cache_(std::move(cache)), best_(select_attention_kernel(kernel_name)), pool_(pool) {
  require<BadArgument>(!best_.on_device,
                       "attention kernel '{}' takes pointers of a GPU, not those of this engine", best_.name);
  forced_ = !kernel_name.empty();
  rules_.resize(static_cast<size_t>(config.layers));
  capacities_.resize(static_cast<size_t>(config.layers));
}

const BatchView& LayerAttention::view_for(const LayerRule& rule) const {
  // Rows that decide for themselves are steps of one row. Plain dense layers do not care, and keep the rows
  // together.
  const bool row_by_row = has_states_ || (rule.tile_rule == TileRule::kStep &&
                                          (rule.role != Role::kDense || rule.selects_itself));
  return phase_ == Phase::kRows && row_by_row ? batch_->single_rows : batch_->items;
}

AttentionParams LayerAttention::params_for(const LayerRule& rule, const BatchView& view) const {
  AttentionParams params = params_of(rule, view, config_);
  params.lse_row_stride = config_.query_heads;
  params.kv_dtype = cache_->shape().dtype;
  params.page_size = cache_->shape().page_size;
  return params;
}

const AttentionKernel& LayerAttention::kernel_for(const AttentionParams& params) const {
  if (forced_ || best_.unsupported(params).empty()) return best_;
  for (const AttentionKernel& kernel : attention_kernels())
    if (!kernel.on_device && kernel.available() && kernel.unsupported(params).empty()) return kernel;
  return best_;  // which says what it does not support
}

void LayerAttention::begin(const Batch& batch, const Policy* policy, Phase phase, int first_layer) {
  batch_ = &batch;
  policy_ = policy;
  phase_ = phase;
  has_states_ = false;
  sets_.alive = false;
  for (CachedSequence* sequence : batch.items.sequences)
    if (sequence->state_for(policy) != nullptr) has_states_ = true;

  int64_t positions = 0, counts = 0;
  size_t workspace = 0;
  bool any_selected = false;
  int32_t capacity = 0;  // of the sets that are alive
  for (int layer = first_layer; layer < config_.layers; ++layer) {
    const LayerRule& rule = rules_[layer] = rule_of(policy, layer, phase);
    const BatchView& view = view_for(rule);
    AttentionParams params = params_for(rule, view);
    params.max_kv_len = static_cast<int32_t>(rounded_length(view.max_budget_len));
    if (selects_sets(rule)) {
      const AttentionParams shape = shape_of_sets(params);
      capacity = static_cast<int32_t>(required_capacity(shape));
      const int64_t sets = fill_tile_offsets(shape, tile_offsets_) * sets_per_tile(rule.set_owner, config_);
      positions = std::max(positions, sets * capacity);
      counts = std::max(counts, sets);
      any_selected = true;
    } else if (rule.role == Role::kReuse) {
      require<BadArgument>(
          any_selected,
          "policy {}: layer {} reuses index sets, but no layer from {} on selects any before it",
          policy->name(), layer, first_layer);
    }
    capacities_[layer] = capacity;
    if (rule.role != Role::kDense) {
      params.capacity = capacity;
      params.tile_offsets = tile_offsets_.data();
      params.max_tiles = tile_offsets_.back();
    }
    workspace = std::max(workspace, attention_workspace_bytes(params, kernel_for(params), pool_.threads()));
  }
  positions_.grow(positions);
  counts_.grow(counts);
  workspace_.grow(static_cast<int64_t>(workspace));
  if (std::any_of(rules_.begin() + first_layer, rules_.end(),
                  [](const LayerRule& rule) { return rule.needs_lse; }))
    lse_.grow(batch.rows() * config_.query_heads);
}

void LayerAttention::place_sets(const LayerRule& rule, int layer, AttentionParams& params) {
  if (selects_sets(rule)) {
    const int64_t tiles = fill_tile_offsets(shape_of_sets(params), tile_offsets_);
    params.positions = positions_.data();
    params.counts = counts_.data();
    params.tile_offsets = tile_offsets_.data();
    params.capacity = capacities_[layer];
    params.max_tiles = static_cast<int32_t>(tiles);
    return;
  }
  if (rule.role != Role::kReuse) return;
  const AttentionParams& made = sets_.params;
  require_same_sets(*policy_, layer, params, sets_.alive ? &made : nullptr);
  params.positions = made.positions;
  params.counts = made.counts;
  params.tile_offsets = made.tile_offsets;
  params.capacity = made.capacity;
  params.max_tiles = made.max_tiles;
}

void LayerAttention::call(const AttentionParams& params) {
  attention(params, kernel_for(params), workspace_.data(), workspace_.bytes(),
            AttentionContext{.pool = &pool_});
}

const AttentionParams& LayerAttention::run(int layer, const float* q, float* out, LayerObserver* observer) {
  const LayerRule& rule = rules_[layer];
  const BatchView& view = view_for(rule);
  params_ = params_for(rule, view);
  cache_->describe(layer, params_);
  params_.q = q;
  params_.out = out;
  if (rule.needs_lse) params_.lse = lse_.data();
  place_sets(rule, layer, params_);
  if (observer != nullptr) {
    observer->before_attention(layer, phase_, params_);
    workspace_.grow(
        static_cast<int64_t>(attention_workspace_bytes(params_, kernel_for(params_), pool_.threads())));
  }
  if (has_states_)
    run_with_states(layer, rule, view, params_);
  else
    call(params_);
  if (selects_sets(rule)) sets_ = Sets{true, params_};
  return params_;
}

void LayerAttention::run_with_states(int layer, const LayerRule& rule, const BatchView& view,
                                     AttentionParams& params) {
  const auto prepare = [&](PolicyState& state, int32_t b, const AttentionParams& one) {
    int64_t& heard = view.sequences[b]->heard(layer);
    state.appended(layer, one, heard, view.seq_lens_kv[b]);
    heard = view.seq_lens_kv[b];
    if (rule.selects_itself && rule.role == Role::kReuse) state.select(layer, phase_, one);
  };
  const auto finish = [&](PolicyState& state, const AttentionParams& one) {
    if (rule.selects_itself && rule.role == Role::kDense) state.select(layer, phase_, one);
    state.attended(layer, phase_, one);
  };
  const auto state_of = [&](int32_t b) -> PolicyState& { return *view.sequences[b]->state_for(policy_); };

  if (phase_ == Phase::kRows) {
    for (int32_t b = 0; b < view.size(); ++b) {
      const AttentionParams one = one_sequence(params, view, b);
      prepare(state_of(b), b, one);
      call(one);
      finish(state_of(b), one);
    }
    return;
  }
  for (int32_t b = 0; b < view.size(); ++b) prepare(state_of(b), b, one_sequence(params, view, b));
  call(params);
  for (int32_t b = 0; b < view.size(); ++b) finish(state_of(b), one_sequence(params, view, b));
}

AttentionParams LayerAttention::one_sequence(const AttentionParams& params, const BatchView& view,
                                             int32_t b) {
  AttentionParams one = params;
  one.batch = 1;
  const int64_t row = view.cu_seqlens_q[b];
  one_cu_seqlens_q_[1] = view.cu_seqlens_q[b + 1] - view.cu_seqlens_q[b];
  one.cu_seqlens_q = one_cu_seqlens_q_;
  one.q = static_cast<const float*>(params.q) + row * params.q_row_stride;
  one.out = static_cast<float*>(params.out) + row * params.out_row_stride;
  if (params.lse != nullptr) one.lse = params.lse + row * params.lse_row_stride;
  one.seq_lens_kv += b;
  one.budget_lens += b;
  one.page_table += b * params.page_table_stride;
  one.max_q_len = one.max_kv_len = one.max_total_q = one.max_tiles = 0;
  if (params.tile_offsets == nullptr) return one;
  const int64_t first = params.tile_offsets[b];
  const int64_t sets = sets_per_tile(params.set_owner, config_);
  one_tile_offsets_[1] = params.tile_offsets[b + 1] - static_cast<int32_t>(first);
  one.tile_offsets = one_tile_offsets_;
  one.positions += first * sets * params.capacity;
  one.counts += first * sets;
  if (params.pooled_weights != nullptr) one.pooled_weights += first * params.pooled_tile_stride;
  if (params.own_tile_mass != nullptr) one.own_tile_mass += first * sets;
  return one;
}

uint64_t LayerAttention::prefill_bytes(const Policy* policy, int64_t rows, int64_t kv_len) {
  return kascade::prefill_bytes(
      config_, rows, kv_len, [&](int layer) { return rule_of(policy, layer, Phase::kPrefill); },
      [&](const LayerRule& rule, const BatchView& view) { return params_for(rule, view); },
      [&](const AttentionParams& params) {
        return uint64_t{attention_workspace_bytes(params, kernel_for(params), pool_.threads())};
      });
}

}  // namespace kascade
