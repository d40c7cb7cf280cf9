// SPDX-License-Identifier: Apache-2.0
// The whole policy, sparse prefill and one-token decode steps, beside dense attention: on prompts and on
// passkeys.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
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
  /// engines: one a worker, as for OnePassEvaluator. prompts and passkeys outlive the validator.
  PlanValidator(std::span<const std::unique_ptr<Engine>> engines, std::span<const CalibrationPrompt> prompts,
                std::span<const PasskeyPrompt> passkeys, const std::atomic<bool>* cancel);

  /// Prompts and passkeys of one validation.
  int64_t items() const { return static_cast<int64_t>(prompts_.size() + passkeys_.size()); }

  /// Figures of policy, passed by thresholds. The dense side runs at the first call only; on_item is called
  /// for every prompt and passkey that is done, one at a time. Does not depend on the number of engines.
  ValidationResult validate(const Policy& policy, const QualityThresholds& thresholds,
                            const std::function<void()>& on_item = {});

 private:
  std::span<const std::unique_ptr<Engine>> engines_;
  std::span<const CalibrationPrompt> prompts_;
  std::span<const PasskeyPrompt> passkeys_;
  const std::atomic<bool>* cancel_;
  bool has_dense_ = false;
  std::vector<std::vector<float>> dense_hidden_;  // [prompts] of [scored rows, hidden]
  std::vector<PasskeyResult> dense_passkeys_;     // [passkeys]
};

}  // namespace kascade
