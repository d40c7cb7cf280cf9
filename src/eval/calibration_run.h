// SPDX-License-Identifier: Apache-2.0
// Calibration from end to end: statistics, choice of anchors, validation, plan.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eval/passkey.h"
#include "eval/prompts.h"
#include "kascade/budget.h"
#include "kascade/calibrate.h"
#include "kascade/engine.h"
#include "kascade/plan.h"

namespace kascade {

/// What a plan must keep to be called validated.
using CalibrationThresholds = QualityThresholds;

struct CalibrationProgress {
  std::string stage;  // "statistics", "choice", "validation"
  int64_t done = 0;   // of total: prompt tokens, candidates, prompts
  int64_t total = 0;
  double seconds = 0;        // since the stage began
  double seconds_left = -1;  // of the stage; negative while unknown
};

struct CalibrateOptions {
  // Empty: the text that the program carries. Otherwise, when candidates are compared by measurement, every
  // fourth record (of four or more) is kept out of statistics and choice and serves the validation.
  PromptSet prompts;
  std::string preset =
      "default";  // "default" | "paper": published method, min, sparse forward, importance, K_cal 32, M 5
  // Unset options keep what the preset says.
  std::optional<std::string> method;       // "published" | "budget" | "measured"
  std::optional<int> anchors;              // M, layer 0 counted; unset = auto (preset paper: 5)
  bool anchors_auto = false;               // --anchors auto given: overrides the preset's M
  std::optional<std::string> aggregation;  // "min" | "mean"
  std::optional<std::string> forward;      // "dense" | "sparse"
  std::optional<bool> importance;
  std::optional<int> similarity_k;  // >= 1
  std::optional<int> tile;          // 1..128
  CalibrationThresholds thresholds;
  int tensor_parallel = 1;
  bool quick = false;    // 6 prompts of about 2,200 tokens and a few passkeys
  bool validate = true;  // run the whole policy on prompts kept out; off leaves plan.validation empty
  double percent = 10;   // run-time budget, (0, 100]
  BudgetPreset budget = BudgetPreset::kDefault;
  uint64_t seed = 0;  // of the passkeys
  int threads = 0;    // 0 = all
  // Where the plan goes, whole or not at all; empty = nowhere. While it runs, output + ".partial" keeps the
  // statistics of finished prompts; a later run with the same model, settings and prompts goes on from there.
  // Removed at the end.
  std::string output;
  std::string tool_version;
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(const CalibrationProgress&)> progress;  // called from one thread at a time
};

struct CalibrationOutcome {
  Plan plan;
  bool validated = false;              // plan.validation->passed
  std::vector<PasskeyTally> passkeys;  // of the validation, by length
  std::string warning;                 // why it is not validated, in one line; empty when it is
  std::string method;
  int64_t prompts = 0;  // that statistics were gathered from
  int64_t tokens = 0;   // theirs
  int64_t resumed_prompts = 0;
  double seconds = 0;
  uint64_t peak_bytes = 0;  // of the process
};

/// Throws BadArgument naming the option, BadFile for prompts, IoError when output cannot be written (checked
/// first), Cancelled (finished prompts stay in the partial file, no plan is written). The same inputs give
/// the same plan bytes for any thread count, interrupted or not.
CalibrationOutcome calibrate(std::shared_ptr<const PreparedModel> model, const CalibrateOptions& options);

}  // namespace kascade
