// SPDX-License-Identifier: Apache-2.0
// Statistics of many prompts in parallel, kept in a side file so that an interrupted run goes on where it
// stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eval/calibration_prompts.h"
#include "eval/calibration_statistics.h"
#include "kascade/calibrate.h"

namespace kascade {

struct StatisticsRun {
  StatisticsSet set;
  int64_t resumed = 0;  // prompts whose statistics the side file had
};

struct StatisticsRunOptions {
  StatisticsSettings settings;
  std::string identity;      // tells one calibration from another
  std::string partial_path;  // side file; empty = none
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(int64_t tokens)> on_tokens;   // how many more are done, one call at a time
  std::function<void(int64_t tokens)> on_resumed;  // how many the side file had done
};

/// engines: one a worker. A side file of another calibration, or a damaged one, is ignored and replaced.
/// After every prompt it is written anew, whole or not at all.
StatisticsRun run_statistics(std::span<const std::unique_ptr<Engine>> engines,
                             std::span<const CalibrationPrompt> prompts, const StatisticsRunOptions& options);

}  // namespace kascade
