// SPDX-License-Identifier: Apache-2.0
#include "eval/region_score.h"

#include <algorithm>

#include "base/check.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Rows of logits made at once: 32 rows of a 50K vocabulary are 6 MB, of a 150K one 20 MB.
constexpr int64_t kLogitRows = 32;

void score_row(std::span<const float> dense, std::span<const float> policy, const int32_t* target,
               RegionScore& region, size_t position) {
  const bool paired = dense.data() != policy.data();
  if (target != nullptr) {
    const auto nll = [target](std::span<const float> logits) {
      return log_sum_exp(logits) - static_cast<double>(logits[*target]);
    };
    region.dense_nlls[position] = nll(dense);
    region.nlls[position] = paired ? nll(policy) : region.dense_nlls[position];
  }
  region.kls[position] = paired ? kl_divergence(dense, policy) : 0.0;
  region.agree[position] = !paired || arg_max(dense) == arg_max(policy);
}

}  // namespace

void score_rows(Engine& engine, std::span<const float> dense, std::span<const float> policy,
                std::span<const int32_t> targets, RegionScore& region) {
  const int64_t hidden = engine.model().config().hidden;
  const int64_t vocabulary = engine.model().config().vocabulary;
  const int64_t rows = targets.empty() ? static_cast<int64_t>(dense.size()) / hidden : std::ssize(targets);
  require<BadArgument>(
      std::ssize(dense) == rows * hidden && (policy.empty() || policy.size() == dense.size()),
      "score_rows: expected {} rows of {} numbers, got {} and {} numbers", rows, hidden, dense.size(),
      policy.size());
  if (rows == 0) return;
  const size_t first = region.kls.size(), end = first + static_cast<size_t>(rows);
  if (!targets.empty()) {
    region.dense_nlls.resize(end);
    region.nlls.resize(end);
  }
  region.kls.resize(end);
  region.agree.resize(end);
  ThreadPool pool(static_cast<int>(std::min(int64_t{engine.threads()}, rows)));
  std::vector<float> reference;
  for (int64_t begin = 0; begin < rows; begin += kLogitRows) {
    const int64_t count = std::min(kLogitRows, rows - begin);
    std::span<const float> dense_logits = engine.logits(dense.subspan(begin * hidden, count * hidden));
    std::span<const float> policy_logits = dense_logits;
    if (!policy.empty()) {
      reference.assign(dense_logits.begin(), dense_logits.end());
      dense_logits = reference;
      policy_logits = engine.logits(policy.subspan(begin * hidden, count * hidden));
    }
    pool.parallel_for(count, [&](int64_t r, int) {
      score_row(
          dense_logits.subspan(r * vocabulary, vocabulary), policy_logits.subspan(r * vocabulary, vocabulary),
          targets.empty() ? nullptr : &targets[begin + r], region, first + static_cast<size_t>(begin + r));
    });
  }
}

void summarise(RegionScore& region) {
  region.positions = static_cast<int64_t>(region.nlls.size());
  region.nll = bootstrap_mean(region.nlls);
  region.dense_nll = bootstrap_mean(region.dense_nlls);
  region.kl = bootstrap_mean(region.kls);
  region.top1 = wilson_share(std::count(region.agree.begin(), region.agree.end(), 1), region.positions);
}

}  // namespace kascade
