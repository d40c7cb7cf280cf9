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

// Last tokens of a prompt that come after the prefill, as decode steps would. Their rows are scored: they
// answer from a cache that sparse prefill filled, and select by themselves. The share of equal arg-max of
// six prompts is then known to about +-2 %.
constexpr int64_t kDecodeRows = 128;

int64_t decode_rows(std::span<const int32_t> ids) {
  return std::min(kDecodeRows, static_cast<int64_t>(ids.size()) / 2);
}

// Residual rows of the decode steps: [decode_rows, hidden]. The steps go through the layers together, each
// with index sets of its own, which is what one step after the other computes.
std::vector<float> run_prompt(Engine& engine, std::span<const int32_t> ids, const Policy* policy,
                              const std::atomic<bool>* cancel) {
  const auto steps = static_cast<size_t>(decode_rows(ids));
  if (steps == 0) return {};
  const std::unique_ptr<Sequence> sequence = engine.make_sequence();
  engine.prefill(*sequence, ids.first(ids.size() - steps), policy, nullptr, {}, cancel);
  const ForwardItem item{sequence.get(), ids.last(steps), 0};
  const std::span<const float> hidden =
      engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kRows, .policy = policy});
  return {hidden.begin(), hidden.end()};
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

void PlanValidator::for_each(int64_t count, const std::function<void(Engine& engine, int64_t index)>& body,
                             const std::function<void()>& on_item) {
  std::mutex reporting;
  ThreadPool pool(static_cast<int>(engines_.size()));
  pool.parallel_for(count, [&](int64_t index, int worker) {
    body(*engines_[worker], index);
    const std::lock_guard lock(reporting);
    if (on_item) on_item();
  });
}

void PlanValidator::run_prompts(const Policy& policy, const std::function<void()>& on_item,
                                PlanValidation& figures) {
  std::vector<RegionScore> scores(prompts_.size());
  const bool dense_known = !dense_hidden_.empty();
  dense_hidden_.resize(prompts_.size());
  for_each(
      static_cast<int64_t>(prompts_.size()),
      [&](Engine& engine, int64_t p) {
        const std::span<const int32_t> ids = prompts_[p].ids;
        if (!dense_known) dense_hidden_[p] = run_prompt(engine, ids, nullptr, cancel_);
        score_rows(engine, dense_hidden_[p], run_prompt(engine, ids, &policy, cancel_), {}, scores[p]);
      },
      on_item);
  // In the order of the prompts, whoever ran them: sums have the same bits for any number of workers.
  double kl = 0;
  int64_t rows = 0, agree = 0;
  for (const RegionScore& part : scores) {
    kl = std::accumulate(part.kls.begin(), part.kls.end(), kl);
    agree += std::count(part.agree.begin(), part.agree.end(), 1);
    rows += static_cast<int64_t>(part.kls.size());
  }
  figures.kl = rows > 0 ? kl / static_cast<double>(rows) : 0;
  figures.top1 = rows > 0 ? static_cast<double>(agree) / static_cast<double>(rows) : 1;
}

std::vector<PasskeyTally> PlanValidator::run_passkeys(const Policy& policy,
                                                      const std::function<void()>& on_item,
                                                      PlanValidation& figures) {
  const auto count = static_cast<int64_t>(passkeys_.size());
  std::vector<PasskeyResult> results(passkeys_.size());
  const bool dense_known = !dense_passkeys_.empty();
  dense_passkeys_.resize(passkeys_.size());
  for_each(
      count,
      [&](Engine& engine, int64_t index) {
        const int64_t p = count - 1 - index;  // the longest come last and are run first: workers stay busy
        if (!dense_known) dense_passkeys_[p] = run_passkey(engine, passkeys_[p], nullptr, cancel_);
        results[p] = run_passkey(engine, passkeys_[p], &policy, cancel_);
      },
      on_item);
  figures.passkey = count > 0 ? passkey_share(results) : 1;
  figures.passkey_dense = count > 0 ? passkey_share(dense_passkeys_) : 1;
  return tally_passkeys(dense_passkeys_, results);
}

std::optional<ValidationResult> PlanValidator::validate(const Policy& policy,
                                                        const QualityThresholds& thresholds, bool whole,
                                                        const std::function<void()>& on_item) {
  ValidationResult result;
  PlanValidation& figures = result.figures;
  figures.prompts = items();
  figures.passkey = figures.passkey_dense = 1;
  run_prompts(policy, on_item, figures);
  if (!whole && !within(thresholds, figures)) return std::nullopt;
  result.passkeys = run_passkeys(policy, on_item, figures);
  figures.passed = within(thresholds, figures);
  return result;
}

}  // namespace kascade
