// SPDX-License-Identifier: Apache-2.0
// The options of a calibration with every preset and default worked out.
#pragma once

#include <string>

#include "eval/calibration_run.h"
#include "eval/calibration_statistics.h"

namespace kascade {

struct ResolvedCalibration {
  CalibrationSettings settings;  // as the plan records them
  StatisticsSettings statistics;
  Aggregation aggregation = Aggregation::kMin;
  int anchors = 0;        // M; 0 = auto
  bool compares = false;  // candidates are compared by measurement: method measured, or auto

  /// Everything that statistics depend on besides model and prompts, in one line.
  std::string statistics_identity() const;
};

/// Throws BadArgument naming the option, its value and what is legal.
ResolvedCalibration resolve_calibration(const CalibrateOptions& options, const ModelConfig& model);

}  // namespace kascade
