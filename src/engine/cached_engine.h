// SPDX-License-Identifier: Apache-2.0
// What engines have in common wherever they run: checks, sequences and their pages, chunks of a prompt.
#pragma once

#include <memory>
#include <span>

#include "engine/batch.h"
#include "engine/page_pool.h"
#include "kascade/engine.h"

namespace kascade {

/// The rows whose residual stream after the last layer the caller reads.
enum class HiddenRows : uint8_t { kNone, kLast, kAll };  // kLast: the last one of each sequence

/// Next tokens that a call draws, one a sequence of the batch; none wanted when tokens is empty.
struct NextTokens {
  std::span<const TokenSampling> sampling;  // empty: the most likely ones
  std::span<int32_t> tokens;
};

class CachedEngine : public Engine {
 public:
  const PreparedModel& model() const final { return *model_; }
  int64_t max_rows() const final { return options_.prefill_chunk; }
  std::unique_ptr<Sequence> make_sequence() final;
  std::unique_ptr<Sequence> make_sequence(const Sequence& prefix, int64_t length) final;
  std::span<const float> forward(std::span<const ForwardItem> items, const ForwardOptions& options) final;
  void forward_next(std::span<const ForwardItem> items, const Policy* policy,
                    std::span<const TokenSampling> sampling, std::span<int32_t> tokens) final;
  std::span<const float> prefill(Sequence& sequence, std::span<const int32_t> tokens, const Policy* policy,
                                 LayerObserver* observer,
                                 const std::function<void(int64_t, std::span<const float>)>& visit,
                                 const std::atomic<bool>* cancel) final;

 protected:
  /// Throws BadArgument for options out of range. default_chunk stands for prefill_chunk 0.
  CachedEngine(std::shared_ptr<const PreparedModel> model, const EngineOptions& options,
               int32_t default_chunk);

  /// Options without zeros that stand for something else. Throws BadArgument for those out of range.
  static EngineOptions checked(EngineOptions options, const ModelConfig& config, int32_t default_chunk);
  /// The shape of a pool that holds cache_tokens tokens, of checked options.
  static KvCacheShape cache_shape(const ModelConfig& config, const EngineOptions& options, DType dtype);
  std::vector<double> rope_frequencies() const;

  /// The rows of batch_ through the layers; returns residual rows, [rows, hidden] or [sequences, hidden] or
  /// empty, and fills next.
  virtual std::span<const float> run_layers(const ForwardOptions& options, HiddenRows wanted,
                                            const NextTokens& next) = 0;
  /// Rows of a prompt's chunk: a prompt of `length` tokens is prefilled under policy.
  virtual int64_t prefill_rows(const Policy* policy, int64_t length) = 0;

  const ModelConfig& config_;
  EngineOptions options_;
  std::shared_ptr<PagePool> pool_;  // set by the derived class
  Batch batch_;

 private:
  void check(std::span<const ForwardItem> items, const ForwardOptions& options) const;
  CachedSequence& own(Sequence* sequence) const;
  std::span<const float> run(std::span<const ForwardItem> items, const ForwardOptions& options,
                             HiddenRows wanted, const NextTokens& next);

  std::shared_ptr<const PreparedModel> model_;
  std::vector<int32_t> next_;            // of the items with rows
  std::vector<TokenSampling> sampling_;  // of the same
};

}  // namespace kascade
