// SPDX-License-Identifier: Apache-2.0
#include "engine/cached_engine.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "base/check.h"
#include "ops/ops.h"

namespace kascade {
namespace {

constexpr int32_t kChunkUnit = 128;
constexpr int32_t kMaxPageSize = 65536;
constexpr int64_t kMaxStepRows = 8;

int64_t total_rows(std::span<const ForwardItem> items) {
  int64_t rows = 0;
  for (const ForwardItem& item : items) rows += static_cast<int64_t>(item.tokens.size());
  return rows;
}

}  // namespace

std::unique_ptr<Engine> Engine::create(std::shared_ptr<const PreparedModel> model,
                                       const EngineOptions& options) {
  require<BadArgument>(model != nullptr, "model: expected one made by PreparedModel::create, got none");
  const PreparedModel& prepared = *model;
  return prepared.make_engine(std::move(model), options);
}

CachedEngine::CachedEngine(std::shared_ptr<const PreparedModel> model, const EngineOptions& options,
                           int32_t default_chunk)
    : config_(model->config()),
      options_(checked(options, config_, default_chunk)),
      model_(std::move(model)) {}

EngineOptions CachedEngine::checked(EngineOptions options, const ModelConfig& config, int32_t default_chunk) {
  if (options.prefill_chunk == 0) options.prefill_chunk = default_chunk;
  require<BadArgument>(options.prefill_chunk >= kChunkUnit && options.prefill_chunk % kChunkUnit == 0,
                       "prefill_chunk: expected a positive multiple of {}, got {}", kChunkUnit,
                       options.prefill_chunk);
  require<BadArgument>(options.page_size >= 1 && options.page_size <= kMaxPageSize,
                       "page_size: expected 1..{}, got {}", kMaxPageSize, options.page_size);
  require<BadArgument>(options.cache_tokens >= 0, "cache_tokens: expected 0 or more, got {}",
                       options.cache_tokens);
  if (options.cache_tokens == 0) options.cache_tokens = config.context;
  const int64_t pages = (options.cache_tokens - 1) / options.page_size + 1;
  require<BadArgument>(pages <= INT32_MAX, "cache_tokens: {} tokens are {} pages, expected at most {}",
                       options.cache_tokens, pages, INT32_MAX);
  return options;
}

KvCacheShape CachedEngine::cache_shape(const ModelConfig& config, const EngineOptions& options, DType dtype) {
  return KvCacheShape{.layers = config.layers,
                      .kv_heads = config.kv_heads,
                      .head_dim = config.head_dim,
                      .pages = (options.cache_tokens - 1) / options.page_size + 1,
                      .page_size = options.page_size,
                      .dtype = dtype};
}

std::vector<double> CachedEngine::rope_frequencies() const {
  using Kind = RopeFrequencyScaling::Kind;
  const RopeScaling& scaling = config_.rope_scaling;
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
      config_.head_dim, config_.rope_theta,
      RopeFrequencyScaling{.kind = kind,
                           .factor = scaling.factor,
                           .low_freq_factor = scaling.low_freq_factor,
                           .high_freq_factor = scaling.high_freq_factor,
                           .original_context = static_cast<double>(scaling.original_context)},
      config_.rope_frequency_factors);
}

std::unique_ptr<Sequence> CachedEngine::make_sequence() { return std::make_unique<CachedSequence>(pool_); }

std::unique_ptr<Sequence> CachedEngine::make_sequence(const Sequence& prefix, int64_t length) {
  const auto* cached = dynamic_cast<const CachedSequence*>(&prefix);
  require<BadArgument>(cached != nullptr && cached->pool() == pool_.get(),
                       "prefix: expected a sequence that this engine made");
  return std::make_unique<CachedSequence>(*cached, length);
}

CachedSequence& CachedEngine::own(Sequence* sequence) const {
  auto* cached = dynamic_cast<CachedSequence*>(sequence);
  require<BadArgument>(cached != nullptr && cached->pool() == pool_.get(),
                       "sequence: expected one that this engine made");
  return *cached;
}

void CachedEngine::check(std::span<const ForwardItem> items, const ForwardOptions& options) const {
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

std::span<const float> CachedEngine::forward(std::span<const ForwardItem> items,
                                             const ForwardOptions& options) {
  return run(items, options, HiddenRows::kAll, {});
}

void CachedEngine::forward_next(std::span<const ForwardItem> items, const Policy* policy,
                                std::span<const TokenSampling> sampling, std::span<int32_t> tokens) {
  require<BadArgument>(tokens.size() == items.size() && (sampling.empty() || sampling.size() == items.size()),
                       "forward_next: {} items, but room for {} tokens and {} ways to draw them",
                       items.size(), tokens.size(), sampling.size());
  sampling_.clear();
  size_t count = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].tokens.empty()) continue;
    ++count;
    if (sampling.empty()) continue;
    const TokenSampling& how = sampling[i];
    require<BadArgument>(
        std::isfinite(how.temperature) && how.temperature >= 0 && how.top_k >= 0 && how.top_p > 0 &&
            how.top_p <= 1,
        "sampling: expected a temperature and a top_k of 0 or more and a top_p in (0, 1], got {}, {} and {}",
        how.temperature, how.top_k, how.top_p);
    sampling_.push_back(how);
  }
  if (std::all_of(sampling_.begin(), sampling_.end(),
                  [](const TokenSampling& how) { return how.temperature == 0; }))
    sampling_.clear();
  next_.resize(count);
  std::fill(tokens.begin(), tokens.end(), -1);
  run(items, ForwardOptions{.phase = Phase::kDecode, .policy = policy}, HiddenRows::kLast,
      {sampling_, next_});
  size_t next = 0;
  for (size_t i = 0; i < items.size(); ++i)
    if (!items[i].tokens.empty()) tokens[i] = next_[next++];
}

std::span<const float> CachedEngine::run(std::span<const ForwardItem> items, const ForwardOptions& options,
                                         HiddenRows wanted, const NextTokens& next) {
  check(items, options);
  const int64_t rows = total_rows(items), hidden = config_.hidden;
  if (rows == 0) return {};
  const auto for_each_growing = [&](auto&& visit) {
    for (const ForwardItem& item : items) {
      if (item.tokens.empty()) continue;
      CachedSequence& sequence = own(item.sequence);
      visit(sequence, sequence.length() + static_cast<int64_t>(item.tokens.size()));
    }
  };
  const auto roll_back = [&] {
    for_each_growing([](CachedSequence& sequence, int64_t) { sequence.roll_back(); });
  };
  std::span<const float> result;
  try {
    // All before any takes a page: what one sequence lacks is never taken from another of the call.
    for_each_growing([](CachedSequence& sequence, int64_t end) { sequence.protect(end); });
    for_each_growing([](CachedSequence& sequence, int64_t end) { sequence.reserve(end); });
    batch_.build(items, options.phase);
    result = run_layers(options, wanted, next);
  } catch (const std::bad_alloc&) {
    roll_back();
    throw_error<OutOfMemory>("forward: no memory for {} rows", rows);
  } catch (...) {
    roll_back();
    throw;
  }
  int64_t end_row = 0;
  for_each_growing([&](CachedSequence& sequence, int64_t end) {
    end_row += wanted == HiddenRows::kAll ? end - sequence.length() : 1;
    sequence.commit(end, wanted == HiddenRows::kNone ? std::span<const float>()
                                                     : result.subspan((end_row - 1) * hidden, hidden));
  });
  return result;
}

std::span<const float> CachedEngine::prefill(
    Sequence& sequence, std::span<const int32_t> tokens, const Policy* policy, LayerObserver* observer,
    const std::function<void(int64_t, std::span<const float>)>& visit, const std::atomic<bool>* cancel) {
  CachedSequence& cached = own(&sequence);
  const int64_t start = cached.length(), end = start + static_cast<int64_t>(tokens.size());
  if (tokens.empty()) return {};
  require<Unsupported>(end <= config_.context,
                       "context: a prompt of {} tokens, but the model's context is {}", end, config_.context);
  const int64_t chunk = prefill_rows(policy, end);
  const std::vector<float> last_hidden(cached.last_hidden().begin(), cached.last_hidden().end());
  std::span<const float> hidden;
  try {
    // All pages now: a prompt that does not fit says so before the work, not in the middle of it.
    cached.reserve(end);
    for (int64_t begin = start; begin < end;) {
      if (cancel != nullptr && cancel->load(std::memory_order_relaxed))
        throw_error<Cancelled>("prefill: cancelled after {} of {} tokens", begin - start, end - start);
      const int64_t next = std::min(end, (begin / chunk + 1) * chunk);
      const ForwardItem item{&sequence, tokens.subspan(begin - start, next - begin), end};
      const HiddenRows wanted = visit != nullptr || observer != nullptr ? HiddenRows::kAll
                                : next == end                           ? HiddenRows::kLast
                                                                        : HiddenRows::kNone;
      hidden =
          run({&item, 1}, ForwardOptions{.phase = Phase::kPrefill, .policy = policy, .observer = observer},
              wanted, {});
      if (visit) visit(begin - start, hidden);
      begin = next;
    }
  } catch (...) {
    cached.truncate(start);
    cached.roll_back();
    cached.commit(start, last_hidden);
    throw;
  }
  return hidden.last(static_cast<size_t>(config_.hidden));
}

}  // namespace kascade
