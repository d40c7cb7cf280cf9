// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_layer_attention.h"

#include <algorithm>
#include <utility>

#include "attention/cuda/cuda_attention.h"
#include "base/check.h"
#include "engine/rules.h"

namespace kascade {
namespace {

using cuda::copy_to_host;

/// Decode graphs are captured for a length that they serve for a while: a multiple of 1024, from 4096 on up
/// to a quarter more than is there. What a kernel costs on top at a shorter length than stated:
/// docs/kernels/decode.md.
int64_t decode_length(int64_t length) {
  int64_t step = 1024;
  while (step * 8 <= length) step *= 2;
  return (length + step - 1) / step * step;
}

std::string name_of(int layer, Role role) { return fmt::format("layer {} ({})", layer, role_name(role)); }

}  // namespace

CudaLayerAttention::CudaLayerAttention(const ModelConfig& config, std::shared_ptr<const PagePool> pool,
                                       int64_t q_row_stride)
    : config_(config), pool_(std::move(pool)), q_row_stride_(q_row_stride) {
  calls_.resize(static_cast<size_t>(config.layers));
}

LayerRule CudaLayerAttention::rule_of(const Policy* policy, int layer, Phase phase) const {
  LayerRule rule = kascade::rule_of(policy, layer, phase);
  require<Unsupported>(!rule.selects_itself && !rule.needs_lse,
                       "policy {}: layer {} selects by scores of its own, which needs the CPU",
                       policy != nullptr ? policy->name() : "dense", layer);
  // Dense layers do as they are asked in either kernel: a step's few rows share the keys that a warp reads, a
  // tile's fill the tensor cores.
  if (rule.role == Role::kDense)
    rule.tile_rule = phase == Phase::kDecode ? TileRule::kStep : TileRule::kAligned;
  return rule;
}

CudaLayerAttention::View& CudaLayerAttention::view_for(const LayerRule& rule, Phase phase) {
  return phase == Phase::kRows && rule.tile_rule == TileRule::kStep ? single_rows_ : items_;
}

AttentionParams CudaLayerAttention::params_for(const LayerRule& rule, const BatchView& view,
                                               int32_t max_kv_len) const {
  AttentionParams params = params_of(rule, view, config_);
  params.q_dtype = params.out_dtype = DType::kBF16;
  params.q_row_stride = q_row_stride_;
  params.max_kv_len = max_kv_len;
  pool_->describe(0, params);
  return params;
}

void CudaLayerAttention::add_view(View& view, const BatchView& host, int64_t page_table_stride,
                                  cuda::PackedUpload& upload) {
  view.host = &host;
  view.cu_seqlens_q = upload.add<int32_t>(host.cu_seqlens_q);
  view.seq_lens_kv = upload.add<int32_t>(host.seq_lens_kv);
  view.budget_lens = upload.add<int32_t>(host.budget_lens);
  if (page_table_stride == 0) {  // the batch's own: one row for all, or one a sequence
    const int64_t rows = host.page_table_stride == 0 ? 1 : host.size();
    const int64_t entries = host.page_table_stride == 0
                                ? static_cast<int64_t>(host.sequences[0]->page_table().size())
                                : rows * host.page_table_stride;
    view.page_table = upload.add<int32_t>(std::span(host.page_table, static_cast<size_t>(entries)));
    view.page_table_stride = host.page_table_stride;
    return;
  }
  padded_table_.assign(static_cast<size_t>(host.size() * page_table_stride), 0);
  for (int32_t b = 0; b < host.size(); ++b) {
    const std::vector<int32_t>& pages = host.sequences[b]->page_table();
    std::copy_n(pages.begin(), std::min<int64_t>(std::ssize(pages), page_table_stride),
                padded_table_.begin() + b * page_table_stride);
  }
  view.page_table = upload.add<int32_t>(padded_table_);
  view.page_table_stride = page_table_stride;
}

bool CudaLayerAttention::begin(const Batch& batch, const Policy* policy, Phase phase, int first_layer,
                               cuda::PackedUpload& upload) {
  phase_ = phase;
  first_layer_ = first_layer;
  for (CachedSequence* sequence : batch.items.sequences)
    require<Unsupported>(sequence->state_for(policy) == nullptr,
                         "policy {}: keeps a state of its own, which needs the CPU",
                         policy != nullptr ? policy->name() : "dense");
  const bool decode = phase == Phase::kDecode;
  const auto longest = [&](const BatchView& view) {
    return static_cast<int32_t>(decode ? decode_length(view.max_budget_len)
                                       : rounded_length(view.max_budget_len));
  };
  const int32_t page_size = pool_->shape().page_size;
  const int64_t stride = decode ? (longest(batch.items) - 1) / page_size + 1 : 0;
  add_view(items_, batch.items, stride, upload);
  if (phase == Phase::kRows) add_view(single_rows_, batch.single_rows, 0, upload);

  shape_.layers.resize(static_cast<size_t>(config_.layers));
  shape_.sequences = batch.items.size();
  shape_.rows = static_cast<int32_t>(batch.rows());
  shape_.max_q_len = batch.items.max_q_len;
  shape_.max_kv_len = longest(batch.items);
  shape_.page_table_stride = stride;
  int64_t positions = 0, counts = 0;
  size_t workspace = 0;
  int source = -1;
  for (int layer = first_layer; layer < config_.layers; ++layer) {
    const LayerRule rule = rule_of(policy, layer, phase);
    Call& call = calls_[layer];
    call.view = &view_for(rule, phase);
    const BatchView& view = *call.view->host;
    AttentionParams& params = call.params = params_for(rule, view, longest(view));
    if (selects_sets(rule)) {
      source = layer;
      params.capacity = static_cast<int32_t>(required_capacity(params));
      params.max_tiles = static_cast<int32_t>(fill_tile_offsets(params, call.tile_offsets));
      call.tile_offsets_at = upload.add<int32_t>(call.tile_offsets);
      const int64_t sets = int64_t{params.max_tiles} * sets_per_tile(params.set_owner, config_);
      positions = std::max(positions, sets * params.capacity);
      counts = std::max(counts, sets);
      params.tile_offsets = call.tile_offsets.data();
    } else if (rule.role == Role::kReuse) {
      require_same_sets(*policy, layer, params, source >= 0 ? &calls_[source].params : nullptr);
      const AttentionParams& made = calls_[source].params;
      params.capacity = made.capacity;
      params.max_tiles = made.max_tiles;
      params.tile_offsets = made.tile_offsets;
    }
    call.source = rule.role == Role::kDense ? -1 : source;
    shape_.layers[layer] = {.role = rule.role,
                            .tile_rule = rule.tile_rule,
                            .set_owner = rule.set_owner,
                            .tile = rule.tile,
                            .budget = rule.budget,
                            .mapped = rule.head_map != nullptr,
                            .masked = rule.needed != nullptr,
                            .capacity = params.capacity,
                            .max_tiles = params.max_tiles};
    const auto heads = static_cast<size_t>(config_.kv_heads);
    if (rule.head_map != nullptr) call.head_map_at = upload.add(std::span(rule.head_map, heads));
    if (rule.needed != nullptr) call.needed_at = upload.add(std::span(rule.needed, heads));
    try {
      workspace = std::max(workspace, cuda_attention_workspace_bytes(params));
    } catch (const Unsupported& error) {
      throw_error<Unsupported>("{} on a GPU: {}", name_of(layer, rule.role), error.what());
    }
  }
  bool moved = std::exchange(workspace_moved_, false);
  moved |= positions_.grow(positions);
  moved |= counts_.grow(counts);
  moved |= workspace_.grow(static_cast<int64_t>(workspace));
  return moved;
}

void CudaLayerAttention::place(const cuda::PackedUpload& upload) {
  for (int layer = first_layer_; layer < config_.layers; ++layer) {
    Call& call = calls_[layer];
    const View& view = *call.view;
    AttentionParams& params = call.params;
    params.cu_seqlens_q = upload.at<int32_t>(view.cu_seqlens_q);
    params.seq_lens_kv = upload.at<int32_t>(view.seq_lens_kv);
    params.budget_lens = upload.at<int32_t>(view.budget_lens);
    params.page_table = upload.at<int32_t>(view.page_table);
    params.page_table_stride = view.page_table_stride;
    if (params.head_map != nullptr) params.head_map = upload.at<int32_t>(call.head_map_at);
    if (params.needed != nullptr) params.needed = upload.at<uint8_t>(call.needed_at);
    if (call.source < 0) continue;
    params.positions = positions_.data();
    params.counts = counts_.data();
    params.tile_offsets = upload.at<int32_t>(calls_[call.source].tile_offsets_at);
  }
}

std::string CudaLayerAttention::layer_name(int layer) const {
  return name_of(layer, shape_.layers[layer].role);
}

void CudaLayerAttention::run(int layer, const void* q, void* out, const cuda::Stream& stream) {
  AttentionParams params = calls_[layer].params;
  pool_->describe(layer, params);
  params.q = q;
  params.out = out;
  try {
    cuda_attention(params, workspace_.data(), static_cast<size_t>(workspace_.bytes()), stream.get());
  } catch (const DeviceError& error) {
    throw_error<DeviceError>("{}: {}", layer_name(layer), error.what());
  }
}

const AttentionParams& CudaLayerAttention::run_observed(int layer, const void* q, void* out,
                                                        const cuda::Stream& stream, LayerObserver& observer) {
  Call& call = calls_[layer];
  const BatchView& view = *call.view->host;
  call.params.max_kv_len = view.max_kv_len;  // rows of pooled weights need not be longer
  // What the observer sees: the same call, its arrays on the host.
  observed_ = call.params;
  observed_.cu_seqlens_q = view.cu_seqlens_q.data();
  observed_.seq_lens_kv = view.seq_lens_kv.data();
  observed_.budget_lens = view.budget_lens.data();
  observed_.page_table = view.page_table;
  observed_.page_table_stride = view.page_table_stride;
  if (call.source >= 0) observed_.tile_offsets = calls_[call.source].tile_offsets.data();
  observed_.head_map = nullptr;
  observed_.needed = nullptr;
  observed_.positions = nullptr;
  observed_.counts = nullptr;
  observed_.k = observed_.v = observed_.q = nullptr;
  observed_.out = nullptr;
  observer.before_attention(layer, phase_, observed_);

  AttentionParams& params = call.params;
  const int64_t sets = int64_t{params.max_tiles} * sets_per_tile(params.set_owner, config_);
  const int64_t weights = int64_t{params.max_tiles} * observed_.pooled_tile_stride;
  if (observed_.pooled_weights != nullptr) {
    pooled_weights_.grow(weights);
    params.pooled_weights = pooled_weights_.data();
    params.pooled_tile_stride = observed_.pooled_tile_stride;
    params.pooled_head_stride = observed_.pooled_head_stride;
  }
  if (observed_.own_tile_mass != nullptr) {
    own_tile_mass_.grow(sets);
    params.own_tile_mass = own_tile_mass_.data();
  }
  // Graphs that hold its address are not of this call, so begin() tells of it.
  workspace_moved_ |= workspace_.grow(static_cast<int64_t>(cuda_attention_workspace_bytes(params)));
  run(layer, q, out, stream);
  if (params.pooled_weights != nullptr)
    copy_to_host(observed_.pooled_weights, pooled_weights_.data(), weights, stream);
  if (params.own_tile_mass != nullptr)
    copy_to_host(observed_.own_tile_mass, own_tile_mass_.data(), sets, stream);
  if (call.source >= 0) {
    host_positions_.resize(static_cast<size_t>(sets * params.capacity));
    host_counts_.resize(static_cast<size_t>(sets));
    copy_to_host(host_positions_.data(), positions_.data(), sets * params.capacity, stream);
    copy_to_host(host_counts_.data(), counts_.data(), sets, stream);
    observed_.positions = host_positions_.data();
    observed_.counts = host_counts_.data();
  }
  stream.wait();
  return observed_;
}

uint64_t CudaLayerAttention::prefill_bytes(const Policy* policy, int64_t rows, int64_t kv_len) {
  return kascade::prefill_bytes(
      config_, rows, kv_len, [&](int layer) { return rule_of(policy, layer, Phase::kPrefill); },
      [&](const LayerRule& rule, const BatchView& view) { return params_for(rule, view, view.max_kv_len); },
      [](const AttentionParams& params) { return uint64_t{cuda_attention_workspace_bytes(params)}; });
}

uint64_t CudaLayerAttention::bytes() const {
  return positions_.bytes() + counts_.bytes() + workspace_.bytes() + pooled_weights_.bytes() +
         own_tile_mass_.bytes();
}

}  // namespace kascade
