// SPDX-License-Identifier: Apache-2.0
// What a calibration runs on: prompts for statistics and choice, others for validation, passkeys for both.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eval/calibration_run.h"
#include "eval/passkey.h"

namespace kascade {

/// A prompt as ids. Questions are judged on the tokens around the answer, running text on its own last
/// tokens.
struct CalibrationPrompt {
  std::vector<int32_t> ids;
  bool question = false;
};

struct CalibrationPrompts {
  std::string name;
  std::vector<CalibrationPrompt> choice;      // statistics and choice
  std::vector<CalibrationPrompt> validation;  // kept out of both
  std::vector<PasskeyPrompt> choice_passkeys, validation_passkeys;
  int64_t tokens = 0;  // of choice
  std::string hash;    // of choice
};

/// compares: whether candidates are compared by measurement, so that prompts must be kept out of the choice
/// and passkeys join it. Prompts of the caller that do not fit the model's context are an error; text that
/// the program carries is shortened to fit.
CalibrationPrompts make_calibration_prompts(const Model& model, const CalibrateOptions& options,
                                            bool compares, int64_t max_new_tokens);

}  // namespace kascade
