// SPDX-License-Identifier: Apache-2.0
#include "eval/demo_report.h"

#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

DemoOptions small_demo() {
  DemoOptions options;
  options.document = "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.";
  options.question = "Who sleeps?";
  options.answer_tokens = 8;
  options.calibrate.threads = 1;
  return options;
}

TEST(Demo, CalibratesComparesAndReports) {
  DemoOptions options = small_demo();
  PromptRecord record;
  record.kind = PromptRecord::Kind::kTokens;
  record.tokens = test::random_ids(150, 5);
  options.calibrate.prompts = {"p", {record, record}};
  options.calibrate.anchors = 2;
  std::vector<std::string> stages;
  options.progress = [&](const CalibrationProgress& progress) {
    if (stages.empty() || stages.back() != progress.stage) stages.push_back(progress.stage);
  };
  const DemoReport report = run_demo(test::tiny_model(), options);
  ASSERT_TRUE(report.calibration);
  EXPECT_EQ(report.plan.anchors.size(), 2u);
  EXPECT_THAT(stages, testing::IsSupersetOf({"statistics", "validation", "answer", "agreement"}));
  EXPECT_EQ(report.decode.positions, 8);
  EXPECT_EQ(report.prefill.positions, report.prompt_tokens - 1);
  EXPECT_GT(report.dense.prefill_tokens_per_s, 0);
  EXPECT_GT(report.kascade.decode_tokens_per_s, 0);
  // So short a prompt lies within the floor: everything is attended, and both agree to rounding.
  EXPECT_LT(report.decode.kl.value, 1e-6);
  EXPECT_EQ(report.decode.top1.value, 1);
  EXPECT_EQ(report.dense.text, report.kascade.text);
  EXPECT_FALSE(report.passkeys.empty());

  const std::string markdown = demo_markdown(report);
  EXPECT_TRUE(markdown.ends_with("\n"));
  EXPECT_THAT(markdown, AllOf(HasSubstr("| prefill, tokens/s |"), HasSubstr("| decode, tokens/s |"),
                              HasSubstr("KL"), HasSubstr("## Passkey retrieval"), HasSubstr("Who sleeps?"),
                              HasSubstr("budget default")));
}

TEST(Demo, TakesAPlanAsGiven) {
  DemoOptions options = small_demo();
  Plan plan;
  plan.model = test::tiny_model()->model().identity();
  plan.anchors = {0, 2};
  plan.head_map.assign(3, {0, 1});
  options.plan = plan;
  const DemoReport report = run_demo(test::tiny_model(), options);
  EXPECT_FALSE(report.calibration);
  EXPECT_EQ(report.plan.anchors, plan.anchors);
}

TEST(Demo, NamesWhatDoesNotFit) {
  DemoOptions options = small_demo();
  options.document = std::string(4000, 'x');
  EXPECT_THAT(message_of<Unsupported>([&] { run_demo(test::tiny_model(), options); }),
              AllOf(HasSubstr("512"), HasSubstr("document")));
}

TEST(Demo, QuotesTextOfAnyKind) {
  DemoReport report;
  report.question = "q";
  report.dense.text = "one\n# two\n";
  EXPECT_THAT(demo_markdown(report), HasSubstr("> one\n> # two\n> "));
}

}  // namespace
}  // namespace kascade
