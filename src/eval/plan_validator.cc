// SPDX-License-Identifier: Apache-2.0
#include "eval/plan_validator.h"

#include <algorithm>
#include <mutex>

#include "base/check.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Last tokens of a prompt that are fed through decode steps, and scored together with the row before them.
constexpr int64_t kDecodeRows = 64;
// Rows of logits made at once.
constexpr int64_t kLogitRows = 32;

int64_t decode_rows(std::span<const int32_t> ids) {
  return std::min(kDecodeRows, static_cast<int64_t>(ids.size()) / 2);
}

// Residual rows after the prefill and after every decode step: [decode rows + 1, hidden].
std::vector<float> run_prompt(Engine& engine, std::span<const int32_t> ids, const Policy* policy,
                              const std::atomic<bool>* cancel) {
  const int64_t steps = decode_rows(ids);
  const std::unique_ptr<Sequence> sequence = engine.make_sequence();
  std::vector<float> rows;
  const auto keep = [&rows](std::span<const float> hidden) {
    rows.insert(rows.end(), hidden.begin(), hidden.end());
  };
  keep(engine.prefill(*sequence, ids.first(ids.size() - steps), policy, nullptr, {}, cancel));
  for (int64_t step = 0; step < steps; ++step) {
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed))
      throw Cancelled("validation: cancelled");
    const ForwardItem item{sequence.get(), ids.subspan(ids.size() - steps + step, 1), 0};
    keep(engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kDecode, .policy = policy}));
  }
  return rows;
}

struct Comparison {
  int64_t rows = 0;
  double kl_sum = 0;
  int64_t agree = 0;
};

Comparison compare(Engine& engine, std::span<const float> dense, std::span<const float> sparse) {
  const int64_t width = engine.model().config().hidden;
  const int64_t vocabulary = engine.model().config().vocabulary;
  Comparison sum;
  sum.rows = static_cast<int64_t>(dense.size()) / width;
  std::vector<float> reference;
  for (int64_t begin = 0; begin < sum.rows; begin += kLogitRows) {
    const int64_t rows = std::min(kLogitRows, sum.rows - begin);
    const std::span<const float> logits = engine.logits(dense.subspan(begin * width, rows * width));
    reference.assign(logits.begin(), logits.end());
    const std::span<const float> other = engine.logits(sparse.subspan(begin * width, rows * width));
    for (int64_t r = 0; r < rows; ++r) {
      const std::span<const float> p = std::span<const float>(reference).subspan(r * vocabulary, vocabulary);
      const std::span<const float> q = other.subspan(r * vocabulary, vocabulary);
      sum.kl_sum += kl_divergence(p, q);
      sum.agree += arg_max(p) == arg_max(q);
    }
  }
  return sum;
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

PlanValidation PlanValidator::validate(const Policy& policy, const QualityThresholds& thresholds,
                                       const std::function<void()>& on_item) {
  const auto prompts = static_cast<int64_t>(prompts_.size());
  const auto passkeys = static_cast<int64_t>(passkeys_.size());
  dense_hidden_.resize(prompts);
  dense_passkeys_.resize(passkeys);
  std::vector<Comparison> comparisons(prompts);
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
      if (!has_dense_) dense_hidden_[p] = run_prompt(engine, prompts_[p].ids, nullptr, cancel_);
      comparisons[p] =
          compare(engine, dense_hidden_[p], run_prompt(engine, prompts_[p].ids, &policy, cancel_));
    }
    const std::lock_guard lock(reporting);
    if (on_item) on_item();
  });
  has_dense_ = true;

  PlanValidation validation;
  Comparison sum;
  for (const Comparison& part : comparisons) {
    sum.rows += part.rows;
    sum.kl_sum += part.kl_sum;
    sum.agree += part.agree;
  }
  validation.prompts = items();
  validation.kl = sum.rows > 0 ? sum.kl_sum / static_cast<double>(sum.rows) : 0;
  validation.top1 = sum.rows > 0 ? static_cast<double>(sum.agree) / static_cast<double>(sum.rows) : 1;
  validation.passkey = passkeys > 0 ? passkey_share(results) : 1;
  validation.passkey_dense = passkeys > 0 ? passkey_share(dense_passkeys_) : 1;
  validation.passed = within(thresholds, validation);
  return validation;
}

}  // namespace kascade
