// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu_engine.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"
#include "engine/chunk_rows.h"
#include "engine/rules.h"

namespace kascade {
namespace {

constexpr int32_t kDefaultChunk = 512;
// The decode path of linear() takes this many rows; more are multiplied in turns, which changes no bit.
constexpr int64_t kDecodePathRows = 8;
// Scratch of a prompt's chunk: a chunk that would take more is cut into smaller ones. The rest of the 512 MiB
// that the engine may take besides weights and KV is for logits, rotary tables and the scratch of matrix
// products.
constexpr uint64_t kChunkScratchBytes = uint64_t{320} << 20;

}  // namespace

CpuEngine::CpuEngine(std::shared_ptr<const CpuModel> model, const EngineOptions& options)
    : CachedEngine(model, options, kDefaultChunk),
      prepared_(std::move(model)),
      threads_(options_.threads),
      cache_(std::make_shared<KvCache>(cache_shape(config_, options_, prepared_->kv_dtype()))),
      attention_(config_, cache_, options_.attention_kernel, threads_),
      rope_(rope_frequencies(), config_.rope_layout == RopeLayout::kAdjacent) {
  pool_ = cache_;
}

std::span<const float> CpuEngine::run_layers(const ForwardOptions& options, HiddenRows wanted,
                                             const NextTokens& next) {
  const int64_t rows = batch_.rows(), hidden = config_.hidden;
  attention_.begin(batch_, options.policy, options.phase, options.first_layer);
  rope_positions_ = std::max(rope_positions_, int64_t{batch_.items.max_kv_len});
  rope_.prepare(rope_positions_);
  const int64_t q_width = int64_t{config_.query_heads} * config_.head_dim;
  const int64_t kv_width = int64_t{config_.kv_heads} * config_.head_dim;
  residual_.grow(rows * hidden);
  normed_.grow(rows * hidden);
  queries_.grow(rows * q_width);
  attended_.grow(rows * q_width);
  keys_.grow(rows * kv_width);
  values_.grow(rows * kv_width);
  gate_.grow(rows * config_.ffn);
  up_.grow(rows * config_.ffn);
  if (options.observer != nullptr) observed_.grow(rows * hidden);

  if (options.first_layer == 0)
    embed_rows(prepared_->model().weights().embedding, batch_.tokens, residual_.data(), hidden, threads_);
  else
    std::copy_n(options.hidden_in, rows * hidden, residual_.data());
  for (int layer = options.first_layer; layer < config_.layers; ++layer)
    run_layer(layer, options, wanted != HiddenRows::kNone);
  if (wanted == HiddenRows::kNone) return {};
  const std::span<const float> all(residual_.data(), static_cast<size_t>(rows * hidden));
  if (wanted == HiddenRows::kAll) return all;
  const int64_t sequences = batch_.items.size();
  for (int64_t i = 0; i < sequences; ++i)
    std::copy_n(all.data() + (batch_.items.cu_seqlens_q[i + 1] - 1) * hidden, hidden,
                last_.grow(sequences * hidden) + i * hidden);
  const std::span<const float> last(last_.data(), static_cast<size_t>(sequences * hidden));
  if (next.tokens.empty()) return last;
  const std::span<const float> scores = logits(last);
  for (int64_t i = 0; i < sequences; ++i) {
    const std::span<const float> row = scores.subspan(i * config_.vocabulary, config_.vocabulary);
    const TokenSampling how = next.sampling.empty() ? TokenSampling{} : next.sampling[i];
    const bool drawable = std::none_of(row.begin(), row.end(), [](float x) { return std::isnan(x); }) &&
                          std::isfinite(*std::max_element(row.begin(), row.end()));
    const SamplingSettings settings{.temperature = how.temperature, .top_k = how.top_k, .top_p = how.top_p};
    next.tokens[i] = drawable ? sampler_.sample(row, settings, how.random) : -1;
  }
  return last;
}

void CpuEngine::multiply(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
                         MatmulPath path) {
  if (path == MatmulPath::kPrefill || rows <= kDecodePathRows)
    return linear(tasks, x, rows, x_stride, path, linear_scratch_, threads_);
  std::array<LinearTask, 3> part{};
  std::copy(tasks.begin(), tasks.end(), part.begin());
  for (int64_t row = 0; row < rows; row += kDecodePathRows) {
    linear(std::span(part).first(tasks.size()), x + row * x_stride, std::min(kDecodePathRows, rows - row),
           x_stride, path, linear_scratch_, threads_);
    for (LinearTask& task : part)
      if (task.linear != nullptr) task.out += kDecodePathRows * task.out_stride;
  }
}

void CpuEngine::run_layer(int layer, const ForwardOptions& options, bool hidden_wanted) {
  const PreparedLayer& weights = prepared_->layers()[layer];
  const int64_t rows = batch_.rows(), hidden = config_.hidden, ffn = config_.ffn, head_dim = config_.head_dim;
  const int64_t q_width = config_.query_heads * head_dim, kv_width = config_.kv_heads * head_dim;
  const float epsilon = config_.norm_epsilon;
  const MatmulPath path = options.phase == Phase::kDecode ? MatmulPath::kDecode : MatmulPath::kPrefill;
  float* x = residual_.data();

  rms_norm(x, rows, hidden, hidden, weights.attention_norm.data(), epsilon, normed_.data(), hidden, threads_);
  const std::array<LinearTask, 3> qkv = {LinearTask{&weights.q, queries_.data(), q_width, false},
                                         LinearTask{&weights.k, keys_.data(), kv_width, false},
                                         LinearTask{&weights.v, values_.data(), kv_width, false}};
  multiply(qkv, normed_.data(), rows, hidden, path);
  if (config_.qk_norm) {
    rms_norm(queries_.data(), rows * config_.query_heads, head_dim, head_dim, weights.q_norm.data(), epsilon,
             queries_.data(), head_dim, threads_);
    rms_norm(keys_.data(), rows * config_.kv_heads, head_dim, head_dim, weights.k_norm.data(), epsilon,
             keys_.data(), head_dim, threads_);
  }
  rope_.apply(queries_.data(), batch_.positions, config_.query_heads, q_width, threads_);
  rope_.apply(keys_.data(), batch_.positions, config_.kv_heads, kv_width, threads_);
  cache_->append(layer, keys_.data(), values_.data(), batch_.slots, threads_);
  // The last layer's keys are all that later chunks need of it.
  if (!hidden_wanted && layer == config_.layers - 1 && !attention_.has_states()) return;

  if (options.observer != nullptr) std::copy_n(x, rows * hidden, observed_.data());
  const AttentionParams& ran = attention_.run(layer, queries_.data(), attended_.data(), options.observer);
  const std::array<LinearTask, 1> output = {LinearTask{&weights.output, x, hidden, true}};
  multiply(output, attended_.data(), rows, q_width, path);
  if (options.observer != nullptr)
    options.observer->after_attention(LayerEvent{.layer = layer,
                                                 .phase = options.phase,
                                                 .attention = &ran,
                                                 .residual_in = observed_.data(),
                                                 .residual_out = x,
                                                 .rows = rows});

  rms_norm(x, rows, hidden, hidden, weights.ffn_norm.data(), epsilon, normed_.data(), hidden, threads_);
  const std::array<LinearTask, 2> gate_up = {LinearTask{&weights.gate, gate_.data(), ffn, false},
                                             LinearTask{&weights.up, up_.data(), ffn, false}};
  multiply(gate_up, normed_.data(), rows, hidden, path);
  silu_multiply(gate_.data(), up_.data(), rows, ffn, ffn, threads_);
  const std::array<LinearTask, 1> down = {LinearTask{&weights.down, x, hidden, true}};
  multiply(down, gate_.data(), rows, ffn, path);
  if (options.observer != nullptr) options.observer->after_layer(layer, x, rows);
}

int64_t CpuEngine::prefill_rows(const Policy* policy, int64_t length) {
  const uint64_t row_bytes =
      sizeof(float) * (static_cast<uint64_t>(config_.hidden) * 2 + static_cast<uint64_t>(config_.ffn) * 2 +
                       static_cast<uint64_t>(config_.query_heads + config_.kv_heads) * 2 * config_.head_dim);
  return chunk_rows(
      options_.prefill_chunk, prefill_granule(policy, config_.layers), kChunkScratchBytes, [&](int64_t rows) {
        return row_bytes * static_cast<uint64_t>(rows) + attention_.prefill_bytes(policy, rows, length);
      });
}

std::span<const float> CpuEngine::logits(std::span<const float> hidden) {
  const int64_t width = config_.hidden, vocabulary = config_.vocabulary;
  require<BadArgument>(hidden.size() % static_cast<size_t>(width) == 0,
                       "logits: {} values, expected whole rows of {}", hidden.size(), width);
  const auto rows = static_cast<int64_t>(hidden.size()) / width;
  if (rows == 0) return {};
  last_normed_.grow(rows * width);
  logits_.grow(rows * vocabulary);
  rms_norm(hidden.data(), rows, width, width, prepared_->final_norm().data(), config_.norm_epsilon,
           last_normed_.data(), width, threads_);
  const std::array<LinearTask, 1> head = {LinearTask{&prepared_->head(), logits_.data(), vocabulary, false}};
  // Always as decode does, eight rows at a time: a row's logits do not depend on the rows beside it.
  multiply(head, last_normed_.data(), rows, width, MatmulPath::kDecode);
  return {logits_.data(), static_cast<size_t>(rows * vocabulary)};
}

uint64_t CpuEngine::memory_bytes() const {
  uint64_t bytes =
      prepared_->owned_bytes() + cache_->live_bytes() + attention_.bytes() + linear_scratch_.bytes();
  bytes += static_cast<uint64_t>(rope_positions_) * static_cast<uint64_t>(config_.head_dim) * sizeof(float);
  for (const auto* buffer : {&residual_, &normed_, &queries_, &keys_, &values_, &attended_, &gate_, &up_,
                             &observed_, &last_, &last_normed_, &logits_})
    bytes += buffer->bytes();
  return bytes;
}

}  // namespace kascade
