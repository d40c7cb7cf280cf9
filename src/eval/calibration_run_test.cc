// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>

#include "base/file.h"
#include "eval/calibration_prompts.h"
#include "eval/calibration_settings.h"
#include "eval/default_data.h"
#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

PromptSet token_prompts(int count, int64_t tokens) {
  PromptSet set;
  set.name = "tokens.jsonl";
  for (int i = 0; i < count; ++i) {
    PromptRecord record;
    record.kind = PromptRecord::Kind::kTokens;
    record.tokens = test::random_ids(tokens + 7 * i, 400 + i);
    record.line = i + 1;
    set.records.push_back(record);
  }
  return set;
}

CalibrateOptions options_of(const std::string& method, const std::string& output) {
  CalibrateOptions options;
  options.prompts = token_prompts(5, 200);
  options.method = method;
  options.threads = 1;
  options.output = output;
  options.percent = 2;
  options.tool_version = "test";
  return options;
}

std::string bytes_of(const std::string& path) { return read_file(path); }

TEST(Calibrate, WritesAValidPlanWithEveryMethod) {
  for (const char* method : {"published", "budget", "measured"}) {
    const test::TemporaryFolder folder;
    const std::string output = folder.file("plan.json");
    const CalibrationOutcome outcome = calibrate(test::tiny_model("f32"), options_of(method, output));
    const Plan plan = load_plan(output);
    EXPECT_EQ(plan.anchors, outcome.plan.anchors);
    EXPECT_EQ(plan.settings.method, method);
    EXPECT_EQ(outcome.method, method);
    EXPECT_EQ(plan.anchors.front(), 0);
    EXPECT_FALSE(plan.similarity.empty());
    EXPECT_FALSE(plan.candidates.empty());
    EXPECT_EQ(plan.data.name, "tokens.jsonl");
    // One of five is kept out.
    EXPECT_EQ(plan.data.prompts, 4);
    EXPECT_EQ(outcome.prompts, 4);
    EXPECT_EQ(outcome.tokens, 200 + 207 + 214 + 228);
    ASSERT_TRUE(plan.validation);
    EXPECT_EQ(outcome.validated, plan.validation->passed);
    EXPECT_EQ(outcome.warning.empty(), outcome.validated);
    EXPECT_GT(outcome.peak_bytes, 0u);
    EXPECT_EQ(check_plan_model(plan, test::tiny_model()->model().identity(), false), "");
    EXPECT_FALSE(std::filesystem::exists(output + ".partial"));
  }
}

TEST(Calibrate, GivesTheSameBytesForAnyThreadCount) {
  for (const char* compute : {"f32", "auto"}) {
    std::string first;
    for (const int threads : {1, 2, 3}) {
      const test::TemporaryFolder folder;
      CalibrateOptions options = options_of("measured", folder.file("plan.json"));
      options.threads = threads;
      calibrate(test::tiny_model(compute), options);
      const std::string bytes = bytes_of(options.output);
      if (first.empty()) first = bytes;
      EXPECT_EQ(bytes, first) << compute << ", " << threads << " threads";
    }
  }
}

TEST(Calibrate, GoesOnWhereItStoppedAndGivesTheSameBytes) {
  const test::TemporaryFolder folder;
  CalibrateOptions options = options_of("measured", folder.file("whole.json"));
  calibrate(test::tiny_model("auto"), options);

  options.output = folder.file("resumed.json");
  std::atomic<bool> cancel = false;
  options.cancel = &cancel;
  int64_t tokens = 0;
  options.progress = [&](const CalibrationProgress& progress) {
    if (progress.stage == "statistics" && progress.done >= 300) cancel = true;
    tokens = std::max(tokens, progress.done);
  };
  EXPECT_THROW(calibrate(test::tiny_model("auto"), options), Cancelled);
  EXPECT_FALSE(std::filesystem::exists(options.output));
  ASSERT_TRUE(std::filesystem::exists(options.output + ".partial"));
  EXPECT_LT(tokens, 849);

  options.cancel = nullptr;
  options.progress = {};
  const CalibrationOutcome outcome = calibrate(test::tiny_model("auto"), options);
  EXPECT_GE(outcome.resumed_prompts, 1);
  EXPECT_LT(outcome.resumed_prompts, 4);
  EXPECT_EQ(bytes_of(options.output), bytes_of(folder.file("whole.json")));
  EXPECT_FALSE(std::filesystem::exists(options.output + ".partial"));
}

TEST(Calibrate, APartialFileOfAnotherRunOrADamagedOneIsNotUsed) {
  const test::TemporaryFolder folder;
  CalibrateOptions options = options_of("published", folder.file("plan.json"));
  options.anchors = 2;
  options.validate = false;
  const auto interrupt = [&](CalibrateOptions interrupted) {
    std::atomic<bool> cancel = false;
    interrupted.cancel = &cancel;
    interrupted.progress = [&](const CalibrationProgress& progress) { cancel = progress.done >= 300; };
    EXPECT_THROW(calibrate(test::tiny_model("f32"), interrupted), Cancelled);
  };
  const auto resumed = [&] { return calibrate(test::tiny_model("f32"), options).resumed_prompts; };
  interrupt(options);
  EXPECT_GE(resumed(), 1);

  CalibrateOptions other = options;
  other.tile = 16;
  interrupt(other);
  EXPECT_EQ(resumed(), 0);
  other = options;
  other.prompts.records[0].tokens[3] ^= 1;
  interrupt(other);
  EXPECT_EQ(resumed(), 0);

  interrupt(options);
  std::string bytes = bytes_of(options.output + ".partial");
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file_atomic(options.output + ".partial", bytes);
  EXPECT_EQ(resumed(), 0);
  write_file_atomic(options.output + ".partial", "{}");
  EXPECT_EQ(resumed(), 0);
}

TEST(Calibrate, CancelledInTheChoiceOrValidationLeavesNoPlan) {
  for (const char* stage : {"choice: prefill", "choice", "validation"}) {
    const test::TemporaryFolder folder;
    CalibrateOptions options = options_of("measured", folder.file("plan.json"));
    options.anchors = 2;
    std::atomic<bool> cancel = false;
    options.cancel = &cancel;
    options.progress = [&](const CalibrationProgress& progress) {
      if (progress.stage == stage) cancel = true;
    };
    EXPECT_THROW(calibrate(test::tiny_model("f32"), options), Cancelled) << stage;
    EXPECT_FALSE(std::filesystem::exists(options.output)) << stage;
  }
}

TEST(Calibrate, ReportsProgressThatEndsAtItsTotal) {
  std::map<std::string, CalibrationProgress> last;
  CalibrateOptions options = options_of("measured", "");
  options.anchors = 2;
  options.threads = 2;
  options.progress = [&](const CalibrationProgress& progress) {
    EXPECT_GE(progress.done, last[progress.stage].done) << progress.stage;
    last[progress.stage] = progress;
  };
  calibrate(test::tiny_model("f32"), options);
  for (const char* stage : {"statistics", "choice: prefill", "validation"})
    EXPECT_EQ(last[stage].done, last[stage].total) << stage;
  EXPECT_EQ(last["statistics"].total, 849);
  EXPECT_TRUE(last.contains("choice"));
}

TEST(Calibrate, PresetPaperTakesEveryPromptAndMeasuresNoCandidate) {
  CalibrateOptions options = options_of("published", "");
  options.method.reset();
  options.preset = "paper";
  options.anchors = 2;
  options.validate = false;
  const CalibrationOutcome outcome = calibrate(test::tiny_model("f32"), options);
  const CalibrationSettings& settings = outcome.plan.settings;
  EXPECT_EQ(settings.method, "published");
  EXPECT_EQ(settings.forward, "sparse");
  EXPECT_EQ(settings.aggregation, "min");
  EXPECT_TRUE(settings.importance);
  EXPECT_EQ(settings.similarity_k, 32);
  EXPECT_EQ(outcome.plan.data.prompts, 5);
  EXPECT_TRUE(outcome.plan.candidates.empty());
  EXPECT_FALSE(outcome.validated);
  EXPECT_THAT(outcome.warning, HasSubstr("not validated"));
}

TEST(Calibrate, AnUnreachableLimitGivesAPlanAndAWarning) {
  CalibrateOptions options = options_of("measured", "");
  options.thresholds = {.max_kl = 0, .min_top1 = 1, .max_passkey_loss = 0};
  const CalibrationOutcome outcome = calibrate(test::tiny_model("f32"), options);
  EXPECT_FALSE(outcome.validated);
  EXPECT_THAT(outcome.warning, HasSubstr("KL"));
  EXPECT_FALSE(outcome.plan.anchors.empty());
  ASSERT_TRUE(outcome.plan.validation);
  EXPECT_FALSE(outcome.plan.validation->passed);
}

TEST(Calibrate, AtItsEnds) {
  for (const int anchors : {1, 3}) {
    for (const char* method : {"published", "measured"}) {
      CalibrateOptions options = options_of(method, "");
      options.anchors = anchors;
      options.quick = true;
      const CalibrationOutcome outcome = calibrate(test::tiny_model("f32"), options);
      EXPECT_EQ(static_cast<int>(outcome.plan.anchors.size()), anchors) << method;
    }
  }
}

TEST(Calibrate, NamesOptionsOutOfRange) {
  const auto error = [](const std::function<void(CalibrateOptions&)>& change) {
    CalibrateOptions options = options_of("measured", "");
    change(options);
    return message_of<BadArgument>([&] { calibrate(test::tiny_model("f32"), options); });
  };
  EXPECT_THAT(error([](auto& o) { o.preset = "best"; }), AllOf(HasSubstr("preset"), HasSubstr("best")));
  EXPECT_THAT(error([](auto& o) { o.method = "guess"; }), AllOf(HasSubstr("method"), HasSubstr("guess")));
  EXPECT_THAT(error([](auto& o) { o.aggregation = "max"; }), HasSubstr("aggregation"));
  EXPECT_THAT(error([](auto& o) { o.forward = "back"; }), HasSubstr("forward"));
  EXPECT_THAT(error([](auto& o) { o.anchors = 4; }),
              AllOf(HasSubstr("anchors"), HasSubstr("1..3"), HasSubstr("4")));
  EXPECT_THAT(error([](auto& o) { o.anchors = 0; }), HasSubstr("anchors"));
  EXPECT_THAT(error([](auto& o) { o.tile = 129; }), AllOf(HasSubstr("tile"), HasSubstr("129")));
  EXPECT_THAT(error([](auto& o) { o.similarity_k = 0; }), HasSubstr("similarity-k"));
  EXPECT_THAT(error([](auto& o) { o.percent = 0; }), HasSubstr("percent"));
  EXPECT_THAT(error([](auto& o) { o.percent = 100.5; }), HasSubstr("percent"));
  EXPECT_THAT(error([](auto& o) { o.tensor_parallel = 3; }), HasSubstr("tensor-parallel"));
  EXPECT_THAT(error([](auto& o) { o.thresholds.max_kl = -1; }), HasSubstr("max-kl"));
  EXPECT_THAT(error([](auto& o) { o.thresholds.min_top1 = 2; }), HasSubstr("min-top1"));
  EXPECT_THAT(error([](auto& o) { o.thresholds.max_passkey_loss = std::nan(""); }),
              HasSubstr("max-passkey-loss"));
}

TEST(Calibrate, ChecksTheOutputBeforeAnyWork) {
  CalibrateOptions options = options_of("measured", "/nonexistent/folder/plan.json");
  options.progress = [](const CalibrationProgress&) { ADD_FAILURE() << "work was done"; };
  EXPECT_THAT(message_of<IoError>([&] { calibrate(test::tiny_model("f32"), options); }),
              HasSubstr("/nonexistent/folder"));
}

TEST(Calibrate, APromptBeyondTheContextIsAnError) {
  CalibrateOptions options = options_of("measured", "");
  options.prompts.records[2].tokens = test::random_ids(500, 1);
  EXPECT_THAT(message_of<BadFile>([&] { calibrate(test::tiny_model("f32"), options); }),
              AllOf(HasSubstr("tokens.jsonl: line 3"), HasSubstr("500"), HasSubstr("512")));
}

TEST(CalibrationPrompts, KeepChoiceAndValidationApart) {
  const Model& model = test::tiny_model()->model();
  CalibrateOptions options;
  const CalibrationPrompts all = make_calibration_prompts(model, options, true, 32);
  EXPECT_EQ(all.choice.size(), 16u);
  EXPECT_EQ(static_cast<int64_t>(all.validation.size()), kDefaultValidationPrompts);
  for (const CalibrationPrompt& prompt : all.choice) EXPECT_LE(prompt.ids.size(), 480u);
  for (const PasskeyPrompt& a : all.choice_passkeys)
    for (const PasskeyPrompt& b : all.validation_passkeys) EXPECT_NE(a.code, b.code);
  EXPECT_FALSE(all.choice_passkeys.empty());
  EXPECT_FALSE(all.validation_passkeys.empty());
  options.quick = true;
  EXPECT_EQ(make_calibration_prompts(model, options, true, 32).choice.size(), 6u);
  // Three records are too few to keep one out: the built-in text validates.
  options.prompts = token_prompts(3, 50);
  const CalibrationPrompts few = make_calibration_prompts(model, options, true, 32);
  EXPECT_EQ(few.choice.size(), 3u);
  EXPECT_EQ(few.validation.size(), 6u);
  EXPECT_TRUE(make_calibration_prompts(model, options, false, 32).choice_passkeys.empty());
}

TEST(ResolveCalibration, EveryOptionOverridesItsPreset) {
  CalibrateOptions options;
  options.preset = "paper";
  options.forward = "dense";
  options.importance = false;
  options.aggregation = "mean";
  options.similarity_k = 64;
  options.tile = 16;
  options.anchors_auto = true;
  const ResolvedCalibration resolved = resolve_calibration(options, test::tiny_model()->config());
  EXPECT_EQ(resolved.settings.forward, "dense");
  EXPECT_FALSE(resolved.settings.importance);
  EXPECT_EQ(resolved.settings.aggregation, "mean");
  EXPECT_EQ(resolved.statistics.similarity_k, 64);
  EXPECT_EQ(resolved.statistics.tile, 16);
  EXPECT_EQ(resolved.anchors, 0);
  EXPECT_TRUE(resolved.compares);
  EXPECT_EQ(resolve_calibration(CalibrateOptions{}, test::tiny_model()->config()).settings.method,
            "measured");
}

}  // namespace
}  // namespace kascade
