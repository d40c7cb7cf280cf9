// SPDX-License-Identifier: Apache-2.0
// The whole policy, sparse prefill and then decode, beside dense attention: on prompts and on passkeys.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "eval/calibration_prompts.h"
#include "kascade/calibrate.h"
#include "kascade/engine.h"

namespace kascade {

/// Whether a validation keeps the thresholds.
bool within(const QualityThresholds& thresholds, const PlanValidation& validation);

struct ValidationResult {
  PlanValidation figures;
  std::vector<PasskeyTally> passkeys;  // by length
};

class PlanValidator {
 public:
  /// engines: one a worker, as for OnePassEvaluator. prompts and passkeys outlive the validator. Scored are
  /// the last 128 tokens of every prompt, as decode steps.
  PlanValidator(std::span<const std::unique_ptr<Engine>> engines, std::span<const CalibrationPrompt> prompts,
                std::span<const PasskeyPrompt> passkeys, const std::atomic<bool>* cancel);

  /// Prompts and passkeys of one validation.
  int64_t items() const { return static_cast<int64_t>(prompts_.size() + passkeys_.size()); }

  /// Figures of policy, passed by thresholds. Prompts come first: unless the whole is asked for, those that
  /// miss the thresholds end it, without figures. The dense side runs at the first call only; on_item is
  /// called for every prompt and passkey that is done, one at a time. Does not depend on the number of
  /// engines.
  std::optional<ValidationResult> validate(const Policy& policy, const QualityThresholds& thresholds,
                                           bool whole, const std::function<void()>& on_item = {});

 private:
  void for_each(int64_t count, const std::function<void(Engine& engine, int64_t index)>& body,
                const std::function<void()>& on_item);
  void run_prompts(const Policy& policy, const std::function<void()>& on_item, PlanValidation& figures);
  std::vector<PasskeyTally> run_passkeys(const Policy& policy, const std::function<void()>& on_item,
                                         PlanValidation& figures);

  std::span<const std::unique_ptr<Engine>> engines_;
  std::span<const CalibrationPrompt> prompts_;
  std::span<const PasskeyPrompt> passkeys_;
  const std::atomic<bool>* cancel_;
  std::vector<std::vector<float>> dense_hidden_;  // [prompts] of [rows, hidden]; empty before they ran
  std::vector<PasskeyResult> dense_passkeys_;     // [passkeys]; likewise
};

}  // namespace kascade
