// SPDX-License-Identifier: Apache-2.0
#include "eval/perplexity.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"

namespace kascade {
namespace {

bool is_dense(const Policy* policy) { return policy == nullptr || policy->name() == "dense"; }

void check_cancel(const std::atomic<bool>* cancel) {
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("perplexity: cancelled");
}

// One text under policy and dense attention, each over its own sequence.
class Run {
 public:
  Run(Engine& engine, std::span<const int32_t> tokens, const Policy* policy)
      : engine_(engine), tokens_(tokens), policy_(policy), paired_(!is_dense(policy)) {
    dense_ = engine.make_sequence();
    if (paired_) sparse_ = engine.make_sequence();
  }

  // Appends tokens [begin, end) to both sequences and keeps their residual rows. budget_length as in
  // ForwardItem.
  void forward(int64_t begin, int64_t end, Phase phase, int64_t budget_length) {
    first_row_ = begin;
    copy(step(*dense_, begin, end, phase, nullptr, budget_length), dense_hidden_);
    if (paired_) copy(step(*sparse_, begin, end, phase, policy_, budget_length), sparse_hidden_);
  }

  // Scores the token after each row in [begin, end), rows of the last forward.
  void score(int64_t begin, int64_t end, RegionScore& region) {
    if (begin >= end) return;
    const int64_t hidden = engine_.model().config().hidden;
    const auto rows_of = [&](const std::vector<float>& all) {
      return std::span<const float>(all).subspan((begin - first_row_) * hidden, (end - begin) * hidden);
    };
    score_rows(engine_, rows_of(dense_hidden_), paired_ ? rows_of(sparse_hidden_) : std::span<const float>(),
               tokens_.subspan(begin + 1, end - begin), region);
  }

 private:
  std::span<const float> step(Sequence& sequence, int64_t begin, int64_t end, Phase phase,
                              const Policy* policy, int64_t budget_length) {
    const ForwardItem item{&sequence, tokens_.subspan(begin, end - begin), budget_length};
    return engine_.forward({&item, 1}, ForwardOptions{.phase = phase, .policy = policy});
  }

  static void copy(std::span<const float> from, std::vector<float>& to) {
    to.assign(from.begin(), from.end());
  }

  Engine& engine_;
  std::span<const int32_t> tokens_;
  const Policy* policy_;
  bool paired_;
  std::unique_ptr<Sequence> dense_, sparse_;
  int64_t first_row_ = 0;
  std::vector<float> dense_hidden_, sparse_hidden_;
};

}  // namespace

PerplexityResult perplexity(Engine& engine, std::span<const int32_t> tokens, const Policy* policy,
                            const PerplexityOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(tokens.size());
  require<BadArgument>(n >= 2, "perplexity: expected a text of at least 2 tokens, got {}", n);
  require<BadArgument>(options.prefill_chunk >= 1, "prefill_chunk: expected at least 1 row, got {}",
                       options.prefill_chunk);
  const int64_t prefill = options.prefill.value_or(n);
  require<BadArgument>(prefill >= 1 && prefill <= n, "prefill: expected 1..{} (the text's tokens), got {}", n,
                       prefill);
  const int64_t score_last = options.score_last.value_or(prefill - 1);
  require<BadArgument>(score_last >= 0 && score_last <= prefill - 1,
                       "score-last: expected 0..{} (the prefill's tokens less the first), got {}",
                       prefill - 1, score_last);

  PerplexityResult result;
  result.tokens = n;
  result.prefill_tokens = prefill;
  Run run(engine, tokens, policy);
  const auto report = [&](int64_t done) {
    if (options.progress) options.progress(done, n);
  };

  // Row r gives the distribution of token r + 1.
  const int64_t first_scored_row = prefill - 1 - score_last;
  for (int64_t begin = 0; begin < prefill;) {
    check_cancel(options.cancel);
    const int64_t end = std::min(prefill, begin + options.prefill_chunk);
    run.forward(begin, end, Phase::kPrefill, prefill);
    run.score(std::max(begin, first_scored_row), std::min(end, prefill - 1), result.prefill);
    if (end == prefill && prefill < n) run.score(prefill - 1, prefill, result.first);
    begin = end;
    report(end);
  }
  // The last token is only ever a target: what follows it is unknown.
  for (int64_t row = prefill; row + 1 < n; ++row) {
    check_cancel(options.cancel);
    run.forward(row, row + 1, Phase::kDecode, 0);
    run.score(row, row + 1, result.decode);
    report(row + 1);
  }
  for (RegionScore* region : {&result.prefill, &result.first, &result.decode}) summarise(*region);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace kascade
