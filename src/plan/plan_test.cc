// SPDX-License-Identifier: Apache-2.0
#include "kascade/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "plan/plan_test_util.h"

namespace kascade {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Plan, SourceAnchorIsTheLastAtOrBefore) {
  const Plan plan = sample_plan();
  std::vector<int> sources;
  for (int layer = 0; layer < 6; ++layer) sources.push_back(plan.source_anchor(layer));
  EXPECT_THAT(sources, ElementsAre(0, 1, 1, 1, 4, 4));
  EXPECT_THROW(plan.source_anchor(-1), BadArgument);
  EXPECT_THROW(plan.source_anchor(6), BadArgument);
  EXPECT_TRUE(plan.is_anchor(4));
  EXPECT_FALSE(plan.is_anchor(5));
}

TEST(Plan, NeededHeadsAreThoseThatReuseLayersName) {
  const Plan plan = sample_plan();
  EXPECT_THAT(plan.needed_heads(0), ElementsAre(0, 0));  // followed by an anchor at once
  EXPECT_THAT(plan.needed_heads(1), ElementsAre(1, 1));
  EXPECT_THAT(plan.needed_heads(4), ElementsAre(1, 0));
  EXPECT_THROW(plan.needed_heads(2), BadArgument);
}

TEST(Plan, EndsAreValid) {
  Plan one;  // a model of one layer and one head
  one.model = {"", 1, 0, 1, 0, ""};
  one.anchors = {0};
  one.head_map = {{0}};
  EXPECT_NO_THROW(validate_plan(one));
  EXPECT_THAT(one.needed_heads(0), ElementsAre(0));

  Plan all = sample_plan();
  all.anchors = {0, 1, 2, 3, 4, 5};
  for (auto& row : all.head_map) row = {0, 1};
  EXPECT_NO_THROW(validate_plan(all));
}

TEST(Plan, EveryFaultNamesFieldExpectedAndActual) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  struct Case {
    std::function<void(Plan&)> spoil;
    const char* message;
  };
  const Case cases[] = {
      {[](Plan& p) { p.model.layers = 0; }, "field 'model.layers': expected an integer in 1..1024, got 0"},
      {[](Plan& p) { p.model.layers = 2'000'000'000; }, "field 'model.layers'"},
      {[](Plan& p) { p.model.layers = 7; }, "field 'head_map': expected 7 rows (model.layers), got 6"},
      {[](Plan& p) { p.model.kv_heads = -1; }, "field 'model.kv_heads'"},
      {[](Plan& p) { p.model.kv_heads = 3; },
       "field 'model.query_heads': expected a multiple of the 3 KV heads, got 4"},
      {[](Plan& p) { p.model.head_dim = -64; }, "field 'model.head_dim'"},
      {[](Plan& p) { p.model.fingerprint = "0123456789ABCDEF"; }, "field 'model.fingerprint'"},
      {[](Plan& p) { p.model.fingerprint = "0123"; }, "field 'model.fingerprint'"},
      {[](Plan& p) { p.anchors.clear(); }, "field 'anchors': expected at least layer 0, got none"},
      {[](Plan& p) {
         p.anchors = {1, 4};
       },
       "field 'anchors[0]': expected 0"},
      {[](Plan& p) {
         p.anchors = {0, 4, 1};
       },
       "field 'anchors[2]': expected a layer above 4 and below 6, got 1"},
      {[](Plan& p) {
         p.anchors = {0, 1, 1};
       },
       "field 'anchors[2]'"},
      {[](Plan& p) {
         p.anchors = {0, 1, 6};
       },
       "field 'anchors[2]': expected a layer above 1 and below 6, got 6"},
      {[](Plan& p) { p.head_map.pop_back(); }, "field 'head_map': expected 6 rows"},
      {[](Plan& p) { p.head_map[3] = {0}; },
       "field 'head_map[3]': expected 2 entries (model.kv_heads), got 1"},
      {[](Plan& p) { p.head_map[3][1] = 2; }, "field 'head_map[3][1]': expected an integer in 0..1, got 2"},
      {[](Plan& p) { p.head_map[3][1] = -1; }, "field 'head_map[3][1]': expected an integer in 0..1, got -1"},
      {[](Plan& p) {
         p.head_map[4] = {0, 0};
       },
       "field 'head_map[4][1]': expected 1 (layer 4 is an anchor"},
      {[](Plan& p) { p.settings.tensor_parallel = 2; },
       "field 'head_map[2][0]': expected a KV head of rank 0"},
      {[](Plan& p) { p.settings.tensor_parallel = 3; }, "field 'settings.tensor_parallel'"},
      {[](Plan& p) { p.settings.tensor_parallel = 0; }, "field 'settings.tensor_parallel'"},
      {[](Plan& p) { p.settings.method = "magic"; },
       "field 'settings.method': expected one of published, budget"},
      {[](Plan& p) { p.settings.tile = 0; }, "field 'settings.tile': expected an integer in 1..128, got 0"},
      {[](Plan& p) { p.settings.tile = 129; }, "field 'settings.tile'"},
      {[](Plan& p) { p.settings.similarity_k = -1; }, "field 'settings.similarity_k'"},
      {[](Plan& p) { p.settings.aggregation = "max"; },
       "field 'settings.aggregation': expected one of min, mean"},
      {[](Plan& p) { p.settings.forward = ""; },
       "field 'settings.forward': expected one of dense, sparse, got ''"},
      {[](Plan& p) { p.settings.percent_hundredths = 0; }, "field 'settings.percent_hundredths'"},
      {[](Plan& p) { p.settings.percent_hundredths = 10001; }, "field 'settings.percent_hundredths'"},
      {[](Plan& p) { p.settings.budget = "mine"; }, "field 'settings.budget'"},
      {[](Plan& p) { p.importance.pop_back(); },
       "field 'importance': expected 6 numbers (one a layer) or none, got 5"},
      {[](Plan& p) { p.importance[2] = kNaN; }, "field 'importance[2]': expected a finite number, got nan"},
      {[](Plan& p) { p.similarity.pop_back(); }, "field 'similarity': expected 6 rows"},
      {[](Plan& p) { p.similarity[1].clear(); }, "field 'similarity[1]': expected 6 numbers"},
      {[](Plan& p) { p.similarity[1][5] = kInf; },
       "field 'similarity[1][5]': expected a finite number, got inf"},
      {[](Plan& p) { p.retained_mass = {1}; }, "field 'retained_mass'"},
      {[](Plan& p) { p.objective = -kInf; }, "field 'objective'"},
      {[](Plan& p) { p.data.prompts = -1; }, "field 'data.prompts'"},
      {[](Plan& p) { p.data.tokens = -1; }, "field 'data.tokens'"},
      {[](Plan& p) { p.data.hash = "xyz"; }, "field 'data.hash'"},
      {[](Plan& p) {
         p.candidates[1].anchors = {0, 9};
       },
       "field 'candidates[1].anchors[1]'"},
      {[](Plan& p) { p.candidates[1].kl = kNaN; }, "field 'candidates[1].kl'"},
      {[](Plan& p) { p.candidates[1].top1 = 1.5; },
       "field 'candidates[1].top1': expected a share in 0..1, got 1.5"},
      {[](Plan& p) { p.candidates[1].passkey = kNaN; }, "field 'candidates[1].passkey'"},
      {[](Plan& p) { p.candidates[1].objective = kInf; }, "field 'candidates[1].objective'"},
      {[](Plan& p) { p.validation->kl = kInf; }, "field 'validation.kl'"},
      {[](Plan& p) { p.validation->top1 = -0.1; }, "field 'validation.top1'"},
      {[](Plan& p) { p.validation->passkey_dense = 2; }, "field 'validation.passkey_dense'"},
      {[](Plan& p) { p.validation->prompts = -5; }, "field 'validation.prompts'"},
  };
  ASSERT_NO_THROW(validate_plan(sample_plan()));
  for (const Case& c : cases) {
    Plan plan = sample_plan();
    c.spoil(plan);
    EXPECT_THAT(message_of<BadArgument>([&] { validate_plan(plan); }), HasSubstr(c.message));
    EXPECT_THROW(plan_to_json(plan), BadArgument) << c.message;  // nothing invalid is ever written
  }
}

TEST(Plan, TensorParallelRanksHoldWholeMaps) {
  Plan plan = sample_plan();
  plan.head_map = {{0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}};
  for (const int ranks : {1, 2, 4}) {  // 4 ranks of 2 KV heads: replicated, each rank holds one
    plan.settings.tensor_parallel = ranks;
    EXPECT_NO_THROW(validate_plan(plan)) << ranks;
  }
}

TEST(CheckPlanModel, SameModelFits) {
  const Plan plan = sample_plan();
  EXPECT_EQ(check_plan_model(plan, plan.model, false), "");
  ModelIdentity renamed = plan.model;  // one model under the names of two formats
  renamed.architecture = "mistral";
  EXPECT_EQ(check_plan_model(plan, renamed, false), "");
}

TEST(CheckPlanModel, OtherShapesNeverFit) {
  const Plan plan = sample_plan();
  for (int field = 0; field < 4; ++field) {
    ModelIdentity model = plan.model;
    const char* names[] = {"model.layers", "model.query_heads", "model.kv_heads", "model.head_dim"};
    int* values[] = {&model.layers, &model.query_heads, &model.kv_heads, &model.head_dim};
    const int made_for = *values[field];
    *values[field] *= 2;
    for (const bool allow : {false, true})
      EXPECT_THAT(message_of<BadArgument>([&] { check_plan_model(plan, model, allow); }),
                  AllOf(HasSubstr(names[field]), HasSubstr("expected " + std::to_string(*values[field])),
                        HasSubstr("got " + std::to_string(made_for))));
  }
}

TEST(CheckPlanModel, OtherFingerprintNeedsPermission) {
  const Plan plan = sample_plan();
  ModelIdentity model = plan.model;
  model.fingerprint = "aaaaaaaaaaaaaaaa";
  EXPECT_THAT(message_of<BadArgument>([&] { check_plan_model(plan, model, false); }),
              AllOf(HasSubstr("model.fingerprint"), HasSubstr("0123456789abcdef"),
                    HasSubstr("aaaaaaaaaaaaaaaa"), HasSubstr("--allow-other-model")));
  EXPECT_THAT(check_plan_model(plan, model, true), HasSubstr("aaaaaaaaaaaaaaaa"));
}

TEST(CheckPlanModel, OtherArchitectureCountsWhereNoFingerprintTells) {
  Plan plan = sample_plan();
  plan.model.fingerprint.clear();
  ModelIdentity model = plan.model;
  model.fingerprint = "aaaaaaaaaaaaaaaa";
  EXPECT_THAT(check_plan_model(plan, model, false), HasSubstr("only the shapes were checked"));
  model.architecture = "qwen2";
  EXPECT_THROW(check_plan_model(plan, model, false), BadArgument);
  EXPECT_THAT(check_plan_model(plan, model, true), HasSubstr("model.architecture"));
}

TEST(CheckPlanModel, UnknownShapesOfAnImportedMapFit) {
  Plan plan = sample_plan();
  plan.model = {"", 6, 0, 2, 0, ""};
  const ModelIdentity model = {"llama", 6, 8, 2, 128, "aaaaaaaaaaaaaaaa"};
  EXPECT_THAT(check_plan_model(plan, model, false), HasSubstr("only the shapes were checked"));
}

TEST(DiffPlans, EqualPlansHaveNone) { EXPECT_TRUE(diff_plans(sample_plan(), sample_plan()).empty()); }

TEST(DiffPlans, NamesWhatDiffers) {
  Plan other = sample_plan();
  other.anchors = {0, 1, 5};
  other.head_map[4] = {1, 1};
  other.head_map[5] = {0, 1};
  other.settings.importance = true;
  other.data.name = "books\x1b[2J";
  other.similarity[0][3] = 0.5;
  other.candidates.pop_back();
  other.validation.reset();
  EXPECT_THAT(
      diff_plans(sample_plan(), other),
      ElementsAre("anchors: 0,1,4 -> 0,1,5", "head_map[4]: 0,1 -> 1,1", "head_map[5]: 0,0 -> 0,1",
                  "settings.importance: off -> on", "data.name: 'multi-hop questions' -> 'books\\x1b[2J'",
                  "candidates[2]: 0,1,4 (KL 0.05, top-1 0.93, passkey 1, objective 0.0625) -> none",
                  "validation: passed (KL 0.055, top-1 0.92, passkey 0.98 of dense 1, 12 prompts) -> none",
                  "similarity: differs by up to 0.2"));
}

TEST(DiffPlans, AnySingleFieldIsSeen) {
  const std::function<void(Plan&)> changes[] = {
      [](Plan& p) { p.model.architecture = "qwen2"; },
      [](Plan& p) { p.model.query_heads = 2; },
      [](Plan& p) { p.model.head_dim = 128; },
      [](Plan& p) { p.model.fingerprint = ""; },
      [](Plan& p) { p.settings.tile = 16; },
      [](Plan& p) { p.settings.similarity_k = 32; },
      [](Plan& p) { p.settings.aggregation = "mean"; },
      [](Plan& p) { p.settings.forward = "sparse"; },
      [](Plan& p) { p.settings.budget = "paper"; },
      [](Plan& p) { p.settings.percent_hundredths = 2000; },
      [](Plan& p) { p.settings.method = "budget"; },
      [](Plan& p) { p.data.prompts = 8; },
      [](Plan& p) { p.data.tokens = 1; },
      [](Plan& p) { p.data.hash = ""; },
      [](Plan& p) { p.objective = 1; },
      [](Plan& p) { p.candidates[0].top1 = 0.31; },
      [](Plan& p) { p.validation->passed = false; },
      [](Plan& p) { p.importance.clear(); },
      [](Plan& p) { p.similarity.clear(); },
      [](Plan& p) { p.retained_mass[2] = 0.91; },
      [](Plan& p) { p.tool_version = "9"; },
  };
  int index = 0;
  for (const auto& change : changes) {
    Plan other = sample_plan();
    change(other);
    EXPECT_EQ(diff_plans(sample_plan(), other).size(), 1u) << index;
    EXPECT_EQ(diff_plans(other, sample_plan()).size(), 1u) << index;
    ++index;
  }
}

TEST(DiffPlans, OtherShapes) {
  Plan small;
  small.model = {"llama", 1, 0, 1, 0, ""};
  small.anchors = {0};
  small.head_map = {{0}};
  EXPECT_THAT(diff_plans(sample_plan(), small), ::testing::Contains("model.layers: 6 -> 1"));
}

}  // namespace
}  // namespace kascade
