// SPDX-License-Identifier: Apache-2.0
// One-pass evaluation of candidate plans: each prompt is prefilled densely once; per candidate,
// teacher-forced continuation rows go through the layers in one pass, each row deciding for itself over
// prompt and earlier rows, which equals sequential decoding. Candidates start at the first layer where they
// differ from a base plan.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kascade/engine.h"
#include "kascade/plan.h"
#include "kascade/policy.h"

namespace kascade {

/// A prompt as the evaluation sees it.
struct OnePassPrompt {
  std::vector<int32_t> prefix;   // prefilled densely, at least one token
  std::vector<int32_t> rows;     // fed teacher-forced after it, at least one token
  std::vector<int32_t> targets;  // passkeys: [rows] the token that follows each row; else empty
  std::vector<uint8_t> scored;   // [rows] rows that count
};

/// Sums over the scored rows of the prompts: ordinary ones (no targets) and passkeys apart.
struct OnePassFigures {
  int64_t rows = 0;
  double kl_sum = 0;  // KL(dense || candidate), nats
  int64_t agree = 0;  // rows whose arg-max equals dense's
  int64_t digits = 0;
  double digit_kl_sum = 0;
  int64_t digits_right = 0;

  double kl() const { return rows > 0 ? kl_sum / static_cast<double>(rows) : 0; }
  double top1() const { return rows > 0 ? static_cast<double>(agree) / static_cast<double>(rows) : 1; }
  double digit_kl() const { return digits > 0 ? digit_kl_sum / static_cast<double>(digits) : 0; }
  double passkey() const {
    return digits > 0 ? static_cast<double>(digits_right) / static_cast<double>(digits) : 1;
  }
};

/// The first layer that must run again when candidate replaces base: the source anchor, under candidate, of
/// the first layer whose rule differs; layers when none does. Both are valid plans of one model.
int first_changed_layer(const Plan& base, const Plan& candidate);

class OnePassEvaluator {
 public:
  /// Makes the policy that runs a plan.
  using PolicyOf = std::function<std::shared_ptr<const Policy>(const Plan&)>;

  /// A prompt's prefix in the cache of one of the engines, handed over by whoever ran it under dense
  /// attention, or null.
  struct Prefilled {
    size_t engine = 0;
    std::unique_ptr<Sequence> sequence;  // begins with the prefix; cut to it
  };

  /// engines: one a worker, each used by one thread at a time; they outlive the evaluator. prefilled:
  /// [prompts] or empty; what is missing is prefilled here, in parallel. A prompt's rows are at most
  /// max_rows, the most that one forward takes. on_tokens hears how many more tokens are done, one call at a
  /// time. Throws BadArgument for malformed prompts.
  OnePassEvaluator(std::span<const std::unique_ptr<Engine>> engines, std::vector<OnePassPrompt> prompts,
                   std::vector<Prefilled> prefilled, PolicyOf policy_of, int64_t max_rows,
                   const std::atomic<bool>* cancel, const std::function<void(int64_t tokens)>& on_tokens);
  ~OnePassEvaluator();

  /// Figures of every candidate, in order, over a share of the ordinary prompts and the same share of the
  /// passkeys (rounded up, spread evenly, always the same for one share). base: a plan whose layers
  /// candidates share up to the first that differs; null shares nothing. Figures depend on prompts, share and
  /// candidate alone.
  std::vector<OnePassFigures> evaluate(std::span<const Plan> candidates, double share = 1,
                                       const Plan* base = nullptr);

  /// Passkey digits that dense attention gets right, over the same share.
  OnePassFigures dense(double share = 1) const;

 private:
  struct Worker;
  std::vector<uint8_t> taken(double share) const;  // [prompts]
  const Policy* keep_policy(const Plan& plan);

  std::vector<OnePassPrompt> prompts_;
  PolicyOf policy_of_;
  int64_t max_rows_;
  const std::atomic<bool>* cancel_;
  std::vector<std::shared_ptr<const Policy>> policies_;  // sequences must not outlive what ran them
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<int64_t> dense_right_;  // [prompts]
};

}  // namespace kascade
