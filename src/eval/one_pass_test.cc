// SPDX-License-Identifier: Apache-2.0
#include "eval/one_pass.h"

#include <algorithm>

#include "eval/eval_test_util.h"
#include "kascade/error.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using test::message_of;
using testing::HasSubstr;

Plan make_plan_of(std::vector<int> anchors, std::vector<int> map) {
  Plan plan;
  plan.model = test::tiny_model()->model().identity();
  plan.anchors = std::move(anchors);
  plan.head_map.assign(plan.model.layers, map);
  for (const int anchor : plan.anchors) plan.head_map[anchor] = {0, 1};
  return plan;
}

std::shared_ptr<const Policy> policy_of(const Plan& plan) {
  return make_policy("kascade", PolicyOptions{.percent = 2, .floor = 8, .recent = 4}, plan.model, &plan);
}

std::vector<OnePassPrompt> make_prompts() {
  std::vector<OnePassPrompt> prompts;
  for (int i = 0; i < 5; ++i) {
    OnePassPrompt prompt;
    prompt.prefix = test::random_ids(150 + 37 * i, 100 + i);
    prompt.rows = test::random_ids(6 + i, 200 + i);
    prompt.scored.assign(prompt.rows.size(), 1);
    if (i >= 3) {
      prompt.targets = test::random_ids(6 + i, 300 + i);
      prompt.scored[0] = 0;
    }
    prompts.push_back(prompt);
  }
  return prompts;
}

std::vector<Plan> candidates() {
  return {make_plan_of({0}, {0, 1}), make_plan_of({0, 1}, {1, 1}), make_plan_of({0, 2}, {0, 0}),
          make_plan_of({0, 1, 2}, {0, 1})};
}

void expect_same(const std::vector<OnePassFigures>& a, const std::vector<OnePassFigures>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].rows, b[i].rows);
    EXPECT_EQ(a[i].kl_sum, b[i].kl_sum) << i;
    EXPECT_EQ(a[i].agree, b[i].agree);
    EXPECT_EQ(a[i].digits, b[i].digits);
    EXPECT_EQ(a[i].digit_kl_sum, b[i].digit_kl_sum) << i;
    EXPECT_EQ(a[i].digits_right, b[i].digits_right);
  }
}

TEST(FirstChangedLayer, IsTheSourceAnchorOfTheFirstDifference) {
  const Plan base = make_plan_of({0, 2}, {0, 1});
  EXPECT_EQ(first_changed_layer(base, base), 3);
  EXPECT_EQ(first_changed_layer(base, make_plan_of({0, 1, 2}, {0, 1})), 1);
  // Layer 2 becomes a reuse layer of layer 0, whose sets must be made again.
  EXPECT_EQ(first_changed_layer(base, make_plan_of({0}, {0, 1})), 0);
  EXPECT_EQ(first_changed_layer(make_plan_of({0}, {0, 1}), base), 2);
  // Another head map alone.
  EXPECT_EQ(first_changed_layer(make_plan_of({0, 1}, {0, 1}), make_plan_of({0, 1}, {1, 1})), 1);
}

TEST(OnePass, EqualsSequentialDecoding) {
  const auto engines = test::tiny_engines(1);
  const std::vector<OnePassPrompt> prompts = make_prompts();
  OnePassEvaluator evaluator(engines, prompts, {}, policy_of, 512, nullptr, {});
  const std::vector<Plan> plans = candidates();
  const std::vector<OnePassFigures> figures = evaluator.evaluate(plans);

  Engine& engine = *engines[0];
  // Row by row, each over a cache whose prefix is dense and whose rows are the policy's own.
  const auto decode = [&](const OnePassPrompt& prompt, const Policy* policy) {
    std::vector<std::vector<float>> logits;
    const auto sequence = engine.make_sequence();
    engine.prefill(*sequence, prompt.prefix, nullptr, nullptr, {}, nullptr);
    for (const int32_t token : prompt.rows) {
      const ForwardItem item{sequence.get(), {&token, 1}, 0};
      const auto row = engine.logits(
          engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kDecode, .policy = policy}));
      logits.emplace_back(row.begin(), row.end());
    }
    return logits;
  };
  for (size_t c = 0; c < plans.size(); ++c) {
    const auto policy = policy_of(plans[c]);
    OnePassFigures expected;
    for (const OnePassPrompt& prompt : prompts) {
      const auto dense = decode(prompt, nullptr), sparse = decode(prompt, policy.get());
      for (size_t row = 0; row < prompt.rows.size(); ++row) {
        if (!prompt.scored[row]) continue;
        const double kl = kl_divergence(dense[row], sparse[row]);
        if (prompt.targets.empty()) {
          ++expected.rows;
          expected.kl_sum += kl;
          expected.agree += arg_max(dense[row]) == arg_max(sparse[row]);
        } else {
          ++expected.digits;
          expected.digit_kl_sum += kl;
          expected.digits_right += arg_max(sparse[row]) == prompt.targets[row];
        }
      }
    }
    EXPECT_EQ(figures[c].rows, expected.rows);
    EXPECT_EQ(figures[c].digits, expected.digits);
    // fp32 in another order; random weights give KL of order 1, so this sees any wrong set.
    EXPECT_NEAR(figures[c].kl(), expected.kl_sum / static_cast<double>(expected.rows), 1e-4) << c;
    EXPECT_NEAR(figures[c].digit_kl(), expected.digit_kl_sum / static_cast<double>(expected.digits), 1e-4)
        << c;
    EXPECT_EQ(figures[c].agree, expected.agree);
    EXPECT_EQ(figures[c].digits_right, expected.digits_right);
    EXPECT_GT(figures[c].kl(), 1e-3);
  }
}

TEST(OnePass, SharingLayersChangesNoBit) {
  for (const char* compute : {"f32", "auto"}) {
    const auto engines = test::tiny_engines(1, compute);
    OnePassEvaluator evaluator(engines, make_prompts(), {}, policy_of, 512, nullptr, {});
    // Enough deep candidates that the base pays, and the base itself among them.
    std::vector<Plan> plans = candidates();
    const Plan base = make_plan_of({0}, {0, 1});
    for (const std::vector<int>& map : {std::vector<int>{1, 0}, {1, 1}, {0, 0}})
      plans.push_back(make_plan_of({0, 2}, map));
    expect_same(evaluator.evaluate(plans, 1, &base), evaluator.evaluate(plans));
    // And again: nothing is left behind in the cache.
    expect_same(evaluator.evaluate(plans, 1, &base), evaluator.evaluate(plans, 1, &plans[1]));
  }
}

TEST(OnePass, DoesNotDependOnWorkersOrGroups) {
  for (const char* compute : {"f32", "auto"}) {
    const auto one = test::tiny_engines(1, compute), three = test::tiny_engines(3, compute);
    OnePassEvaluator alone(one, make_prompts(), {}, policy_of, 512, nullptr, {});
    OnePassEvaluator spread(three, make_prompts(), {}, policy_of, 17, nullptr, {});
    const std::vector<Plan> plans = candidates();
    const Plan base = make_plan_of({0}, {0, 1});
    expect_same(alone.evaluate(plans, 1, &base), spread.evaluate(plans, 1, &base));
    expect_same(alone.evaluate(plans, 0.5, &base), spread.evaluate(plans, 0.5, &base));
    EXPECT_EQ(alone.dense(0.5).digits_right, spread.dense(0.5).digits_right);
  }
}

TEST(OnePass, AShareTakesSomeOfEachKind) {
  const auto engines = test::tiny_engines(1);
  OnePassEvaluator evaluator(engines, make_prompts(), {}, policy_of, 512, nullptr, {});
  const OnePassFigures all = evaluator.dense(), some = evaluator.dense(0.1);
  EXPECT_EQ(all.rows, 6 + 7 + 8);
  EXPECT_EQ(all.digits, 8 + 9);
  EXPECT_EQ(some.rows, 7);
  EXPECT_EQ(some.digits, 9);
  const std::vector<Plan> plans = candidates();
  EXPECT_EQ(evaluator.evaluate(plans, 0.1)[0].rows, 7);
  EXPECT_THAT(message_of<BadArgument>([&] { evaluator.evaluate(plans, 0); }), HasSubstr("share"));
}

TEST(OnePass, TakesCachesThatOthersFilled) {
  const auto engines = test::tiny_engines(2);
  const std::vector<OnePassPrompt> prompts = make_prompts();
  std::vector<OnePassEvaluator::Prefilled> prefilled(prompts.size());
  for (size_t i = 0; i < prompts.size(); i += 2) {
    prefilled[i].engine = i % 2;
    prefilled[i].sequence = engines[i % 2]->make_sequence();
    // Longer than the prefix: the evaluator cuts it.
    std::vector<int32_t> ids = prompts[i].prefix;
    ids.insert(ids.end(), prompts[i].rows.begin(), prompts[i].rows.end());
    engines[i % 2]->prefill(*prefilled[i].sequence, ids, nullptr, nullptr, {}, nullptr);
  }
  const auto fresh = test::tiny_engines(1);
  OnePassEvaluator handed(engines, prompts, std::move(prefilled), policy_of, 512, nullptr, {});
  OnePassEvaluator own(fresh, prompts, {}, policy_of, 512, nullptr, {});
  expect_same(handed.evaluate(candidates()), own.evaluate(candidates()));
}

TEST(OnePass, RefusesMalformedPrompts) {
  const auto engines = test::tiny_engines(1);
  const auto run = [&](OnePassPrompt prompt) {
    return message_of<BadArgument>(
        [&] { OnePassEvaluator(engines, {prompt}, {}, policy_of, 8, nullptr, {}); });
  };
  OnePassPrompt prompt = make_prompts()[0];
  prompt.prefix.clear();
  EXPECT_THAT(run(prompt), HasSubstr("prompt 0"));
  prompt = make_prompts()[4];
  EXPECT_THAT(run(prompt), HasSubstr("10 rows"));
  prompt = make_prompts()[0];
  prompt.scored.pop_back();
  EXPECT_THAT(run(prompt), HasSubstr("5 flags"));
  EXPECT_THROW(OnePassEvaluator({}, {}, {}, policy_of, 8, nullptr, {}), BadArgument);
}

}  // namespace
}  // namespace kascade
