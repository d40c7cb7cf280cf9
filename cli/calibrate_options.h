// SPDX-License-Identifier: Apache-2.0
// Options of calibrate, shared with demo.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "base/json.h"
#include "cli/console.h"
#include "eval/calibration_run.h"

namespace kascade::cli {

struct CalibrateFlags {
  std::string prompts;
  std::string preset = "default";
  std::string anchors;
  std::optional<std::string> method, aggregation, forward, importance;
  std::optional<int> similarity_k, tile;
  CalibrationThresholds thresholds;
  double percent = 10;
  std::string budget = "default";
  int tensor_parallel = 1;
  bool quick = false;
  bool no_validate = false;
  uint64_t seed = 0;

  void add(CLI::App& verb);
  /// Everything but threads and output. progress must outlive the calibration.
  CalibrateOptions make(Progress* progress) const;
};

/// The JSON document of the calibrate verb.
Json calibration_json(const CalibrationOutcome& outcome, const std::string& output);

}  // namespace kascade::cli
