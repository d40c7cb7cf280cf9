// SPDX-License-Identifier: Apache-2.0
#include "eval/plan_validator.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "base/check.h"
#include "eval/region_score.h"
#include "kascade/thread_pool.h"

namespace kascade {
namespace {

// Last tokens of a prompt that come after the prefill, one decode step each, and last rows of the prefill:
// both are scored, for sparse prefill and sparse decode lose in different places. With 64 decode rows a
// prompt alone, the share of equal arg-max of a few prompts would be known to +-4 % only.
constexpr int64_t kDecodeRows = 64;
constexpr int64_t kPrefillRows = 192;

struct ScoredRows {
  int64_t prefill = 0;  // tokens that go through prefill
  int64_t last = 0;     // of its rows, those that are scored
  int64_t steps = 0;    // tokens after it
};

ScoredRows scored_rows(std::span<const int32_t> ids) {
  const auto n = static_cast<int64_t>(ids.size());
  ScoredRows rows;
  rows.steps = std::min(kDecodeRows, n / 2);
  rows.prefill = n - rows.steps;
  rows.last = rows.steps > 0 ? std::min(kPrefillRows, rows.prefill) : 0;
  return rows;
}

// Residual rows of the end of the prefill and after every decode step but the last: [rows, hidden].
std::vector<float> run_prompt(Engine& engine, std::span<const int32_t> ids, const Policy* policy,
                              const std::atomic<bool>* cancel) {
  const ScoredRows scored = scored_rows(ids);
  const int64_t hidden = engine.model().config().hidden;
  std::vector<float> rows;
  if (scored.steps == 0) return rows;
  const std::unique_ptr<Sequence> sequence = engine.make_sequence();
  const auto keep = [&](int64_t first, std::span<const float> chunk) {
    const int64_t skipped = std::clamp<int64_t>(scored.prefill - scored.last - first, 0,
                                                static_cast<int64_t>(chunk.size()) / hidden);
    const std::span<const float> kept = chunk.subspan(static_cast<size_t>(skipped * hidden));
    rows.insert(rows.end(), kept.begin(), kept.end());
  };
  engine.prefill(*sequence, ids.first(static_cast<size_t>(scored.prefill)), policy, nullptr, keep, cancel);
  for (int64_t step = 0; step + 1 < scored.steps; ++step) {
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed))
      throw Cancelled("validation: cancelled");
    const ForwardItem item{sequence.get(), ids.subspan(static_cast<size_t>(scored.prefill + step), 1), 0};
    keep(scored.prefill,
         engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kDecode, .policy = policy}));
  }
  return rows;
}

// The tokens after those rows; what follows the prompt is unknown, so the last row has none.
std::span<const int32_t> targets_of(std::span<const int32_t> ids) {
  const ScoredRows scored = scored_rows(ids);
  return ids.last(static_cast<size_t>(scored.steps > 0 ? scored.last - 1 + scored.steps : 0));
}

}  // namespace

bool within(const QualityThresholds& thresholds, const PlanValidation& validation) {
  return within(thresholds, AnchorEvaluation{.kl = validation.kl,
                                             .top1 = validation.top1,
                                             .passkey = validation.passkey,
                                             .passkey_dense = validation.passkey_dense});
}

PlanValidator::PlanValidator(std::span<const std::unique_ptr<Engine>> engines,
                             std::span<const CalibrationPrompt> prompts,
                             std::span<const PasskeyPrompt> passkeys, const std::atomic<bool>* cancel)
    : engines_(engines), prompts_(prompts), passkeys_(passkeys), cancel_(cancel) {
  require<BadArgument>(!engines.empty(), "validation: expected at least one engine, got none");
  for (const CalibrationPrompt& prompt : prompts)
    require<BadArgument>(!prompt.ids.empty(),
                         "validation: expected prompts of at least one token, got an empty one");
}

ValidationResult PlanValidator::validate(const Policy& policy, const QualityThresholds& thresholds,
                                         const std::function<void()>& on_item) {
  const auto prompts = static_cast<int64_t>(prompts_.size());
  const auto passkeys = static_cast<int64_t>(passkeys_.size());
  dense_hidden_.resize(prompts);
  dense_passkeys_.resize(passkeys);
  std::vector<RegionScore> scores(prompts);
  std::vector<PasskeyResult> results(passkeys);
  std::mutex reporting;
  ThreadPool pool(static_cast<int>(engines_.size()));
  pool.parallel_for(items(), [&](int64_t item, int worker) {
    Engine& engine = *engines_[worker];
    // Longest work first keeps the workers busy to the end: passkeys come last to first, then the prompts.
    if (item < passkeys) {
      const int64_t p = passkeys - 1 - item;
      if (!has_dense_) dense_passkeys_[p] = run_passkey(engine, passkeys_[p], nullptr, cancel_);
      results[p] = run_passkey(engine, passkeys_[p], &policy, cancel_);
    } else {
      const int64_t p = item - passkeys;
      const std::span<const int32_t> ids = prompts_[p].ids;
      if (!has_dense_) dense_hidden_[p] = run_prompt(engine, ids, nullptr, cancel_);
      score_rows(engine, dense_hidden_[p], run_prompt(engine, ids, &policy, cancel_), targets_of(ids),
                 scores[p]);
    }
    const std::lock_guard lock(reporting);
    if (on_item) on_item();
  });
  has_dense_ = true;

  RegionScore all;
  for (const RegionScore& part : scores) {
    all.kls.insert(all.kls.end(), part.kls.begin(), part.kls.end());
    all.agree.insert(all.agree.end(), part.agree.begin(), part.agree.end());
  }
  const auto rows = static_cast<double>(all.kls.size());
  ValidationResult result;
  PlanValidation& figures = result.figures;
  figures.prompts = items();
  if (!all.kls.empty()) {
    figures.kl = std::accumulate(all.kls.begin(), all.kls.end(), 0.0) / rows;
    figures.top1 = static_cast<double>(std::count(all.agree.begin(), all.agree.end(), 1)) / rows;
  } else {
    figures.top1 = 1;
  }
  figures.passkey = passkeys > 0 ? passkey_share(results) : 1;
  figures.passkey_dense = passkeys > 0 ? passkey_share(dense_passkeys_) : 1;
  figures.passed = within(thresholds, figures);
  result.passkeys = tally_passkeys(dense_passkeys_, results);
  return result;
}

}  // namespace kascade
