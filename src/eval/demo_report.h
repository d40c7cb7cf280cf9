// SPDX-License-Identifier: Apache-2.0
// The main job, end to end, as one report: calibrate, then answer a question over a document with dense and
// with kascade attention, and say how much faster and how close.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/calibration_run.h"
#include "eval/passkey.h"
#include "eval/region_score.h"

namespace kascade {

struct DemoOptions {
  std::optional<Plan> plan;    // given: nothing is calibrated
  CalibrateOptions calibrate;  // quick is set by the demo; output names the plan file
  std::string question;        // empty: the demo's own
  std::string document;        // empty: the document that the program carries
  int64_t answer_tokens = 64;
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(const CalibrationProgress&)>
      progress;  // stages of calibrate, then "answer", "agreement", "passkeys"
};

struct DemoAnswer {
  std::string policy;  // its description
  std::string text;
  double prefill_tokens_per_s = 0;
  double decode_tokens_per_s = 0;
};

struct DemoReport {
  Plan plan;
  std::optional<CalibrationOutcome> calibration;
  std::string model_name;
  int threads = 0;
  int64_t document_tokens = 0;
  int64_t prompt_tokens = 0;
  std::string question;
  DemoAnswer dense, kascade;
  double prefill_speedup = 0, decode_speedup = 0;
  RegionScore prefill;                 // kascade beside dense on the last tokens of the prompt
  RegionScore decode;                  // and on the tokens of dense's answer
  std::vector<PasskeyTally> passkeys;  // by length
  double seconds = 0;
};

DemoReport run_demo(std::shared_ptr<const PreparedModel> model, const DemoOptions& options);

/// The report as Markdown, ends with a newline.
std::string demo_markdown(const DemoReport& report);

}  // namespace kascade
