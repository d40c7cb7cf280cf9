// SPDX-License-Identifier: Apache-2.0
#include "kascade/engine.h"

#include <algorithm>
#include <array>
#include <new>

#include "base/check.h"
#include "engine/chunk_rows.h"
#include "engine/engine_impl.h"

namespace kascade {
namespace {

constexpr int32_t kChunkUnit = 128;
constexpr int32_t kMaxPageSize = 65536;
// The decode path of linear() takes this many rows; more are multiplied in turns, which changes no bit.
constexpr int64_t kDecodePathRows = 8;
constexpr int64_t kMaxStepRows = 8;
// Scratch of a prompt's chunk: a chunk that would take more is cut into smaller ones. The rest of the 512 MiB
// that the engine may take besides weights and KV is for logits, rotary tables and the scratch of matrix
// products.
constexpr uint64_t kChunkScratchBytes = uint64_t{320} << 20;

EngineOptions checked(const EngineOptions& options, const ModelConfig& config) {
  require<BadArgument>(options.prefill_chunk >= kChunkUnit && options.prefill_chunk % kChunkUnit == 0,
                       "prefill_chunk: expected a positive multiple of {}, got {}", kChunkUnit,
                       options.prefill_chunk);
  require<BadArgument>(options.page_size >= 1 && options.page_size <= kMaxPageSize,
                       "page_size: expected 1..{}, got {}", kMaxPageSize, options.page_size);
  require<BadArgument>(options.cache_tokens >= 0, "cache_tokens: expected 0 or more, got {}",
                       options.cache_tokens);
  EngineOptions result = options;
  if (result.cache_tokens == 0) result.cache_tokens = config.context;
  const int64_t pages = (result.cache_tokens - 1) / result.page_size + 1;
  require<BadArgument>(pages <= INT32_MAX, "cache_tokens: {} tokens are {} pages, expected at most {}",
                       result.cache_tokens, pages, INT32_MAX);
  return result;
}

KvCacheShape cache_shape(const PreparedModelImpl& model, const EngineOptions& options) {
  const ModelConfig& config = model.config();
  return KvCacheShape{.layers = config.layers,
                      .kv_heads = config.kv_heads,
                      .head_dim = config.head_dim,
                      .pages = (options.cache_tokens - 1) / options.page_size + 1,
                      .page_size = options.page_size,
                      .dtype = model.kv_dtype()};
}

std::vector<double> rope_frequencies(const ModelConfig& config) {
  using Kind = RopeFrequencyScaling::Kind;
  const RopeScaling& scaling = config.rope_scaling;
  const auto kind = [&] {
    switch (scaling.kind) {
      case RopeScaling::Kind::kNone:
        return Kind::kNone;
      case RopeScaling::Kind::kLinear:
        return Kind::kLinear;
      case RopeScaling::Kind::kLlama3:
        return Kind::kLlama3;
    }
    throw_error<BadArgument>("rope scaling: unknown kind {}", static_cast<int>(scaling.kind));
  }();
  return rope_inverse_frequencies(
      config.head_dim, config.rope_theta,
      RopeFrequencyScaling{.kind = kind,
                           .factor = scaling.factor,
                           .low_freq_factor = scaling.low_freq_factor,
                           .high_freq_factor = scaling.high_freq_factor,
                           .original_context = static_cast<double>(scaling.original_context)},
      config.rope_frequency_factors);
}

int64_t total_rows(std::span<const ForwardItem> items) {
  int64_t rows = 0;
  for (const ForwardItem& item : items) rows += static_cast<int64_t>(item.tokens.size());
  return rows;
}

}  // namespace

std::unique_ptr<Engine> Engine::create(std::shared_ptr<const PreparedModel> model,
                                       const EngineOptions& options) {
  auto prepared = std::dynamic_pointer_cast<const PreparedModelImpl>(std::move(model));
  require<BadArgument>(prepared != nullptr, "model: expected one made by PreparedModel::create, got none");
  return std::make_unique<EngineImpl>(std::move(prepared), options);
}

EngineImpl::EngineImpl(std::shared_ptr<const PreparedModelImpl> model, const EngineOptions& options)
    : model_(std::move(model)),
      config_(model_->config()),
      options_(checked(options, config_)),
      pool_(options_.threads),
      cache_(std::make_shared<KvCache>(cache_shape(*model_, options_))),
      attention_(config_, cache_, options_.attention_kernel, pool_),
      rope_(rope_frequencies(config_), config_.rope_layout == RopeLayout::kAdjacent) {}

std::unique_ptr<Sequence> EngineImpl::make_sequence() { return std::make_unique<CachedSequence>(cache_); }

CachedSequence& EngineImpl::own(Sequence* sequence) const {
  auto* cached = dynamic_cast<CachedSequence*>(sequence);
  require<BadArgument>(cached != nullptr && cached->cache() == cache_.get(),
                       "sequence: expected one that this engine made");
  return *cached;
}

void EngineImpl::check(std::span<const ForwardItem> items, const ForwardOptions& options) const {
  const int64_t rows = total_rows(items);
  require<BadArgument>(rows <= options_.prefill_chunk, "forward: {} rows, expected at most prefill_chunk, {}",
                       rows, options_.prefill_chunk);
  require<BadArgument>(options.first_layer >= 0 && options.first_layer <= config_.layers,
                       "first_layer: expected 0..{}, got {}", config_.layers, options.first_layer);
  require<BadArgument>((options.first_layer > 0) == (options.hidden_in != nullptr),
                       "hidden_in: expected with a first_layer above 0 and only then (first_layer {})",
                       options.first_layer);
  for (size_t i = 0; i < items.size(); ++i) {
    const ForwardItem& item = items[i];
    const CachedSequence& sequence = own(item.sequence);
    for (size_t j = 0; j < i; ++j)
      require<BadArgument>(items[j].sequence != item.sequence,
                           "forward: items {} and {} are the same sequence", j, i);
    const auto count = static_cast<int64_t>(item.tokens.size());
    const int64_t end = sequence.length() + count;
    require<Unsupported>(end <= config_.context, "context: {} tokens, but the model's context is {}", end,
                         config_.context);
    require<BadArgument>(options.phase != Phase::kDecode || count <= kMaxStepRows,
                         "forward: a decode step of {} rows, expected at most {}", count, kMaxStepRows);
    require<BadArgument>(
        item.budget_length == 0 || (item.budget_length >= end && item.budget_length <= config_.context),
        "budget_length: expected 0 or {}..{}, got {}", end, config_.context, item.budget_length);
    require<BadArgument>(
        options.first_layer == 0 || sequence.written() >= end,
        "first_layer: layers below {} hold the keys of {} rows of this sequence, expected {}",
        options.first_layer, sequence.written(), end);
    for (const int32_t token : item.tokens)
      require<BadArgument>(token >= 0 && token < config_.vocabulary,
                           "token {} is outside the vocabulary (0..{})", token, config_.vocabulary - 1);
  }
}

std::span<const float> EngineImpl::forward(std::span<const ForwardItem> items,
                                           const ForwardOptions& options) {
  return run(items, options, true);
}

std::span<const float> EngineImpl::run(std::span<const ForwardItem> items, const ForwardOptions& options,
                                       bool hidden_wanted) {
  check(items, options);
  const int64_t rows = total_rows(items), hidden = config_.hidden;
  if (rows == 0) return {};
  try {
    for (const ForwardItem& item : items) {
      CachedSequence& sequence = own(item.sequence);
      sequence.reserve(sequence.length() + static_cast<int64_t>(item.tokens.size()));
    }
    batch_.build(items, options.phase);
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
      embed_rows(model_->model().weights().embedding, batch_.tokens, residual_.data(), hidden, pool_);
    else
      std::copy_n(options.hidden_in, rows * hidden, residual_.data());
    for (int layer = options.first_layer; layer < config_.layers; ++layer)
      run_layer(layer, options, hidden_wanted);
  } catch (const std::bad_alloc&) {
    for (const ForwardItem& item : items) own(item.sequence).roll_back();
    throw_error<OutOfMemory>("forward: no memory for {} rows", rows);
  } catch (...) {
    for (const ForwardItem& item : items) own(item.sequence).roll_back();
    throw;
  }
  const std::span<const float> result(residual_.data(), static_cast<size_t>(rows * hidden));
  int64_t end_row = 0;
  for (const ForwardItem& item : items) {
    if (item.tokens.empty()) continue;
    CachedSequence& sequence = own(item.sequence);
    const auto count = static_cast<int64_t>(item.tokens.size());
    end_row += count;
    sequence.commit(sequence.length() + count, hidden_wanted ? result.subspan((end_row - 1) * hidden, hidden)
                                                             : std::span<const float>());
  }
  return result;
}

void EngineImpl::multiply(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
                          MatmulPath path) {
  if (path == MatmulPath::kPrefill || rows <= kDecodePathRows)
    return linear(tasks, x, rows, x_stride, path, linear_scratch_, pool_);
  std::array<LinearTask, 3> part{};
  std::copy(tasks.begin(), tasks.end(), part.begin());
  for (int64_t row = 0; row < rows; row += kDecodePathRows) {
    linear(std::span(part).first(tasks.size()), x + row * x_stride, std::min(kDecodePathRows, rows - row),
           x_stride, path, linear_scratch_, pool_);
    for (LinearTask& task : part)
      if (task.linear != nullptr) task.out += kDecodePathRows * task.out_stride;
  }
}

void EngineImpl::run_layer(int layer, const ForwardOptions& options, bool hidden_wanted) {
  const PreparedLayer& weights = model_->layers()[layer];
  const int64_t rows = batch_.rows(), hidden = config_.hidden, ffn = config_.ffn, head_dim = config_.head_dim;
  const int64_t q_width = config_.query_heads * head_dim, kv_width = config_.kv_heads * head_dim;
  const float epsilon = config_.norm_epsilon;
  const MatmulPath path = options.phase == Phase::kDecode ? MatmulPath::kDecode : MatmulPath::kPrefill;
  float* x = residual_.data();

  rms_norm(x, rows, hidden, hidden, weights.attention_norm.data(), epsilon, normed_.data(), hidden, pool_);
  const std::array<LinearTask, 3> qkv = {LinearTask{&weights.q, queries_.data(), q_width, false},
                                         LinearTask{&weights.k, keys_.data(), kv_width, false},
                                         LinearTask{&weights.v, values_.data(), kv_width, false}};
  multiply(qkv, normed_.data(), rows, hidden, path);
  if (config_.qk_norm) {
    rms_norm(queries_.data(), rows * config_.query_heads, head_dim, head_dim, weights.q_norm.data(), epsilon,
             queries_.data(), head_dim, pool_);
    rms_norm(keys_.data(), rows * config_.kv_heads, head_dim, head_dim, weights.k_norm.data(), epsilon,
             keys_.data(), head_dim, pool_);
  }
  rope_.apply(queries_.data(), batch_.positions, config_.query_heads, q_width, pool_);
  rope_.apply(keys_.data(), batch_.positions, config_.kv_heads, kv_width, pool_);
  cache_->append(layer, keys_.data(), values_.data(), batch_.slots, pool_);
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

  rms_norm(x, rows, hidden, hidden, weights.ffn_norm.data(), epsilon, normed_.data(), hidden, pool_);
  const std::array<LinearTask, 2> gate_up = {LinearTask{&weights.gate, gate_.data(), ffn, false},
                                             LinearTask{&weights.up, up_.data(), ffn, false}};
  multiply(gate_up, normed_.data(), rows, hidden, path);
  silu_multiply(gate_.data(), up_.data(), rows, ffn, ffn, pool_);
  const std::array<LinearTask, 1> down = {LinearTask{&weights.down, x, hidden, true}};
  multiply(down, gate_.data(), rows, ffn, path);
  if (options.observer != nullptr) options.observer->after_layer(layer, x, rows);
}

int64_t EngineImpl::prefill_rows(const Policy* policy, int64_t length) {
  const uint64_t row_bytes =
      sizeof(float) * (static_cast<uint64_t>(config_.hidden) * 2 + static_cast<uint64_t>(config_.ffn) * 2 +
                       static_cast<uint64_t>(config_.query_heads + config_.kv_heads) * 2 * config_.head_dim);
  return chunk_rows(
      options_.prefill_chunk, attention_.prefill_granule(policy), kChunkScratchBytes, [&](int64_t rows) {
        return row_bytes * static_cast<uint64_t>(rows) + attention_.prefill_bytes(policy, rows, length);
      });
}

std::span<const float> EngineImpl::prefill(Sequence& sequence, std::span<const int32_t> tokens,
                                           const Policy* policy, LayerObserver* observer,
                                           const std::function<void(int64_t, std::span<const float>)>& visit,
                                           const std::atomic<bool>* cancel) {
  CachedSequence& cached = own(&sequence);
  const int64_t start = cached.length(), end = start + static_cast<int64_t>(tokens.size());
  if (tokens.empty()) return {};
  require<Unsupported>(end <= config_.context,
                       "context: a prompt of {} tokens, but the model's context is {}", end, config_.context);
  const int64_t chunk = prefill_rows(policy, end);
  std::span<const float> hidden;
  try {
    // All pages now: a prompt that does not fit says so before the work, not in the middle of it.
    cached.reserve(end);
    for (int64_t begin = start; begin < end;) {
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed))
        throw_error<Cancelled>("prefill: cancelled after {} of {} tokens", begin - start, end - start);
      const int64_t next = std::min(end, (begin / chunk + 1) * chunk);
      const ForwardItem item{&sequence, tokens.subspan(begin - start, next - begin), end};
      const bool hidden_wanted = next == end || visit != nullptr || observer != nullptr;
      hidden =
          run({&item, 1}, ForwardOptions{.phase = Phase::kPrefill, .policy = policy, .observer = observer},
              hidden_wanted);
      if (visit) visit(begin - start, hidden);
      begin = next;
    }
  } catch (...) {
    cached.truncate(start);
    cached.roll_back();
    throw;
  }
  return hidden.last(static_cast<size_t>(config_.hidden));
}

std::span<const float> EngineImpl::logits(std::span<const float> hidden) {
  const int64_t width = config_.hidden, vocabulary = config_.vocabulary;
  require<BadArgument>(hidden.size() % static_cast<size_t>(width) == 0,
                       "logits: {} values, expected whole rows of {}", hidden.size(), width);
  const auto rows = static_cast<int64_t>(hidden.size()) / width;
  if (rows == 0) return {};
  last_normed_.grow(rows * width);
  logits_.grow(rows * vocabulary);
  rms_norm(hidden.data(), rows, width, width, model_->final_norm().data(), config_.norm_epsilon,
           last_normed_.data(), width, pool_);
  const std::array<LinearTask, 1> head = {LinearTask{&model_->head(), logits_.data(), vocabulary, false}};
  // Always as decode does, eight rows at a time: a row's logits do not depend on the rows beside it.
  multiply(head, last_normed_.data(), rows, width, MatmulPath::kDecode);
  return {logits_.data(), static_cast<size_t>(rows * vocabulary)};
}

uint64_t EngineImpl::memory_bytes() const {
  uint64_t bytes =
      model_->owned_bytes() + cache_->live_bytes() + attention_.bytes() + linear_scratch_.bytes();
  bytes += static_cast<uint64_t>(rope_positions_) * static_cast<uint64_t>(config_.head_dim) * sizeof(float);
  for (const auto* buffer : {&residual_, &normed_, &queries_, &keys_, &values_, &attended_, &gate_, &up_,
                             &observed_, &last_normed_, &logits_})
    bytes += buffer->bytes();
  return bytes;
}

}  // namespace kascade
