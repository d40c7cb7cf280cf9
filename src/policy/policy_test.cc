// SPDX-License-Identifier: Apache-2.0
#include "kascade/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "kascade/error.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

using testing::HasSubstr;

constexpr int kLayers = 6, kQueryHeads = 4, kKvHeads = 2;

ModelIdentity identity() { return {"llama", kLayers, kQueryHeads, kKvHeads, 16, "0123456789abcdef"}; }

Plan plan_with(std::vector<int> anchors, int tile = 32) {
  Plan plan;
  plan.model = identity();
  plan.anchors = std::move(anchors);
  plan.settings.tile = tile;
  // Reuse layers read KV head 1 alone, so the map differs from the identity and layer 0 has one head to
  // spare.
  plan.head_map.assign(kLayers, {1, 1});
  for (const int anchor : plan.anchors) plan.head_map[anchor] = {0, 1};
  return plan;
}

std::shared_ptr<const Policy> make(const std::string& name, const PolicyOptions& options = {},
                                   const Plan* plan = nullptr) {
  return make_policy(name, options, identity(), plan);
}

template <class F>
std::string bad_argument(F&& f) {
  try {
    f();
  } catch (const BadArgument& error) {
    return error.what();
  }
  return "(nothing thrown)";
}

TEST(Policies, EveryNameIsUniqueAndBuilds) {
  const Plan plan = plan_with({0, 3});
  std::set<std::string> names;
  for (const PolicyInfo& info : policies()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    const auto policy = make(info.name, {}, info.needs_plan ? &plan : nullptr);
    EXPECT_EQ(policy->name(), info.name);
    EXPECT_THAT(policy->describe(), HasSubstr(info.name));
    for (int layer = 0; layer < kLayers; ++layer)
      for (const Phase phase : {Phase::kPrefill, Phase::kDecode, Phase::kRows}) {
        const LayerRule rule = policy->rule(layer, phase);
        EXPECT_TRUE(layer > 0 || rule.role != Role::kReuse) << info.name << ": layer 0 has nothing to reuse";
        EXPECT_TRUE(phase == Phase::kPrefill || rule.role == Role::kDense ||
                    rule.tile_rule == TileRule::kStep);
      }
    if (info.needs_plan) {
      EXPECT_THAT(bad_argument([&] { make(info.name); }), HasSubstr("plan"));
    }
  }
  EXPECT_EQ(names.size(), 7u);
}

TEST(Policies, UnknownNameListsTheKnownOnes) {
  const std::string message = bad_argument([] { make("kascade\n"); });
  EXPECT_THAT(message, HasSubstr("kascade-no-remap"));
  EXPECT_THAT(message, HasSubstr("'kascade\\x0a'"));
}

TEST(Policies, OptionsOutOfRangeAreRefusedByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
  for (const double percent : {0.0, -1.0, 100.0001, 0.001, nan, infinity, -infinity})
    EXPECT_THAT(bad_argument([&] { make("dense", {.percent = percent}); }), HasSubstr("percent")) << percent;
  for (const int tile : {0, -32, 129})
    EXPECT_THAT(bad_argument([&] { make("dense", {.tile = tile}); }), HasSubstr("tile"));
  EXPECT_THAT(bad_argument([] { make("dense", {.floor = -1}); }), HasSubstr("floor"));
  EXPECT_THAT(bad_argument([] { make("dense", {.sinks = -1}); }), HasSubstr("sinks"));
  EXPECT_THAT(bad_argument([] { make("dense", {.recent = -1}); }), HasSubstr("recent"));
  for (const std::vector<int>& anchors : {std::vector{1}, {0, 0}, {0, 3, 2}, {0, kLayers}, {-1}})
    EXPECT_THAT(bad_argument([&] { make("kascade-pooled", {.anchors = anchors}); }), HasSubstr("anchors"));
  EXPECT_THAT(bad_argument([] { make("oracle-topk", {.tile = 32}); }), HasSubstr("tile"));
  EXPECT_THAT(bad_argument([] { make("oracle-topk", {.rolling = true}); }), HasSubstr("rolling"));
}

TEST(Policies, PercentBecomesExactHundredths) {
  EXPECT_EQ(percent_to_hundredths(10), 1000);
  EXPECT_EQ(percent_to_hundredths(0.01), 1);
  EXPECT_EQ(percent_to_hundredths(100), 10000);
  // Decimal fractions that no double holds exactly: truncation would lose a hundredth.
  for (int hundredths = 1; hundredths <= 10000; ++hundredths)
    EXPECT_EQ(percent_to_hundredths(hundredths / 100.0), hundredths);
}

TEST(Policies, AnInvalidPlanOrOneOfAnotherShapeIsRefused) {
  Plan other_layers = plan_with({0, 3});
  other_layers.model.layers = 7;
  other_layers.head_map.push_back({0, 1});
  EXPECT_THAT(bad_argument([&] { make("kascade", {}, &other_layers); }), HasSubstr("model.layers"));
  Plan bad_map = plan_with({0, 3});
  bad_map.head_map[4][0] = 2;
  EXPECT_THAT(bad_argument([&] { make("kascade", {}, &bad_map); }), HasSubstr("head_map[4][0]"));
  Plan no_layer0 = plan_with({0, 3});
  no_layer0.anchors = {3};
  EXPECT_THAT(bad_argument([&] { make("kascade", {}, &no_layer0); }), HasSubstr("anchors"));
}

TEST(Kascade, RolesMapsAndNeededHeadsFollowThePlan) {
  const Plan plan = plan_with({0, 3});
  const auto policy = make("kascade", {}, &plan);
  const std::vector<Role> expected = {Role::kLayer0, Role::kReuse, Role::kReuse,
                                      Role::kAnchor, Role::kReuse, Role::kReuse};
  for (const Phase phase : {Phase::kPrefill, Phase::kDecode, Phase::kRows})
    for (int layer = 0; layer < kLayers; ++layer) {
      const LayerRule rule = policy->rule(layer, phase);
      EXPECT_EQ(rule.role, expected[layer]);
      EXPECT_EQ(rule.set_owner, SetOwner::kKvHead);
      if (rule.role == Role::kReuse) {
        ASSERT_NE(rule.head_map, nullptr);
        EXPECT_EQ(std::vector<int>(rule.head_map, rule.head_map + kKvHeads), plan.head_map[layer]);
      } else {
        EXPECT_EQ(rule.head_map, nullptr);
      }
    }
  const LayerRule layer0 = policy->rule(0, Phase::kPrefill);
  ASSERT_NE(layer0.needed, nullptr);
  EXPECT_EQ(std::vector<int>(layer0.needed, layer0.needed + kKvHeads), (std::vector<int>{0, 1}));
}

TEST(Kascade, Layer0IsPlainDenseWhenNobodyReadsItsSets) {
  const Plan plan = plan_with({0, 1, 3});
  for (const char* name : {"kascade", "kascade-no-remap", "kascade-pooled"})
    EXPECT_EQ(make(name, {}, &plan)->rule(0, Phase::kPrefill).role, Role::kDense) << name;
  const ModelIdentity one_layer{"llama", 1, kQueryHeads, kKvHeads, 16, ""};
  EXPECT_EQ(make_policy("kascade", {.anchors = {0}}, one_layer, nullptr)->rule(0, Phase::kDecode).role,
            Role::kDense);
}

TEST(Kascade, VariantsDifferOnlyAsNamed) {
  const Plan plan = plan_with({0, 3});
  const LayerRule pooled = make("kascade-pooled", {}, &plan)->rule(1, Phase::kPrefill);
  EXPECT_EQ(pooled.set_owner, SetOwner::kAllHeads);
  EXPECT_EQ(pooled.head_map, nullptr);
  const auto no_remap = make("kascade-no-remap", {}, &plan);
  EXPECT_EQ(no_remap->rule(1, Phase::kPrefill).set_owner, SetOwner::kKvHead);
  EXPECT_EQ(no_remap->rule(1, Phase::kPrefill).head_map, nullptr);
  EXPECT_EQ(no_remap->rule(0, Phase::kPrefill).needed, nullptr);
  const auto decode_only = make("kascade-decode-only", {}, &plan);
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(decode_only->rule(layer, Phase::kPrefill).role, Role::kDense);
    EXPECT_EQ(decode_only->rule(layer, Phase::kRows).role, decode_only->rule(layer, Phase::kDecode).role);
  }
  EXPECT_EQ(decode_only->rule(1, Phase::kDecode).role, Role::kReuse);
  EXPECT_NE(decode_only->rule(1, Phase::kDecode).head_map, nullptr);
}

TEST(Kascade, AnchorsOptionNeedsNoPlanWhereNoMapIsRead) {
  const auto pooled = make("kascade-pooled", {.anchors = {0, 2}});
  EXPECT_EQ(pooled->rule(2, Phase::kDecode).role, Role::kAnchor);
  EXPECT_THAT(pooled->describe(), HasSubstr("anchors 0,2"));
  const auto all = make("kascade", {.anchors = {0, 1, 2, 3, 4, 5}});
  for (int layer = 1; layer < kLayers; ++layer)
    EXPECT_EQ(all->rule(layer, Phase::kDecode).role, Role::kAnchor);
  const Plan plan = plan_with({0, 3});
  EXPECT_EQ(make("kascade", {.anchors = {0, 3}}, &plan)->rule(3, Phase::kDecode).role, Role::kAnchor);
  EXPECT_THAT(bad_argument([&] { make("kascade", {.anchors = {0, 2}}, &plan); }), HasSubstr("expected 0,3"));
  EXPECT_THAT(bad_argument([&] { make("kascade", {.anchors = {0, 2}}); }), HasSubstr("head map"));
}

TEST(Kascade, TileComesFromTheOptionThenFromThePlan) {
  const Plan plan = plan_with({0, 3}, 64);
  EXPECT_EQ(make("kascade", {}, &plan)->rule(3, Phase::kPrefill).tile, 64);
  const LayerRule rule = make("kascade", {.tile = 16}, &plan)->rule(3, Phase::kPrefill);
  EXPECT_EQ(rule.tile, 16);
  EXPECT_EQ(rule.budget.tile, 16);
}

// Members of one set by the rules of docs/method.md, "Budgets".
int64_t members(const Budget& budget, int64_t candidates, int64_t length, int64_t query_rows) {
  return evaluate_budget(budget, candidates, candidates, length, query_rows).members();
}

TEST(Kascade, PaperBudgetsAreThePublishedNumbers) {
  const Plan plan = plan_with({0, 3});
  const auto kascade = make("kascade", {.budget = BudgetPreset::kPaper}, &plan);
  const auto decode_only = make("kascade-decode-only", {.budget = BudgetPreset::kPaper}, &plan);
  const struct {
    int64_t length, k0, tiled;
  } rows[] = {{100, 100, 68},   {128, 128, 96},      {1000, 128, 96},       {2304, 230, 198},
              {8192, 819, 787}, {32768, 3276, 3244}, {131072, 13107, 13075}};
  for (const auto& row : rows) {
    EXPECT_EQ(members(kascade->rule(3, Phase::kDecode).budget, row.length, row.length, 1), row.tiled);
    EXPECT_EQ(members(decode_only->rule(3, Phase::kDecode).budget, row.length, row.length, 1), row.k0);
    EXPECT_EQ(members(kascade->rule(3, Phase::kPrefill).budget, row.length, row.length, row.length),
              row.tiled);
  }
  const auto rolling = make("kascade", {.budget = BudgetPreset::kPaper, .rolling = true}, &plan);
  EXPECT_EQ(members(rolling->rule(3, Phase::kPrefill).budget, 4096, 8192, 8192), 409);
  // Rolling concerns prefill; a decode step keeps the fixed rule.
  EXPECT_EQ(rolling->rule(3, Phase::kDecode).budget, kascade->rule(3, Phase::kDecode).budget);
}

TEST(Kascade, KernelBudgetsAreThePublishedNumbers) {
  const Plan plan = plan_with({0, 3});
  const auto policy = make("kascade", {.budget = BudgetPreset::kKernel}, &plan);
  const Budget decode = policy->rule(3, Phase::kDecode).budget,
               prefill = policy->rule(3, Phase::kPrefill).budget;
  EXPECT_EQ(decode.own_tile, OwnTile::kCandidate);
  EXPECT_EQ(prefill.own_tile, OwnTile::kOnTop);
  const std::pair<int64_t, int64_t> rows[] = {
      {1000, 128}, {2304, 256}, {8192, 896}, {32768, 3328}, {131072, 13184}};
  for (const auto& [length, expected] : rows) EXPECT_EQ(members(decode, length, length, 1), expected);
  EXPECT_EQ(members(prefill, 4096, 8192, 8192), 512);
  const auto fixed = make("kascade", {.budget = BudgetPreset::kKernel, .rolling = false}, &plan);
  EXPECT_EQ(members(fixed->rule(3, Phase::kPrefill).budget, 4096, 8192, 8192), 896);
}

TEST(Kascade, DefaultBudgetKeepsTheRecentKeysOnTop) {
  const Plan plan = plan_with({0, 3});
  const auto policy = make("kascade", {}, &plan);
  for (const Phase phase : {Phase::kPrefill, Phase::kDecode, Phase::kRows}) {
    const Budget budget = policy->rule(3, phase).budget;
    EXPECT_EQ(budget.own_tile, OwnTile::kOnTop);
    EXPECT_EQ(members(budget, 4001, 8192, 8192), 401 + 128);  // ceil(400.1) + recent
    EXPECT_EQ(members(budget, 200, 8192, 8192), 200);
  }
  const Budget changed = make("kascade", {.percent = 20, .floor = 7, .sinks = 4, .recent = 9}, &plan)
                             ->rule(3, Phase::kDecode)
                             .budget;
  EXPECT_EQ(members(changed, 10, 10, 1), 10);
  EXPECT_EQ(members(changed, 1000, 1000, 1), 200 + 4 + 9);
}

TEST(OracleTopk, SelectsPerQueryAndHeadOfTheWholeLength) {
  const auto policy = make("oracle-topk");
  const LayerRule rule = policy->rule(0, Phase::kPrefill);
  EXPECT_EQ(rule.role, Role::kAnchor);
  EXPECT_EQ(rule.set_owner, SetOwner::kQueryHead);
  EXPECT_EQ(rule.tile, 1);
  EXPECT_EQ(members(rule.budget, 300, 300, 300), 30);
  EXPECT_EQ(members(rule.budget, 3, 300, 300), 3);  // an early row has fewer keys than the length's budget
  EXPECT_EQ(members(rule.budget, 25, 300, 300), 25);
  EXPECT_EQ(members(rule.budget, 20, 20, 20), 5);  // the floor
  const auto dense_first = make("oracle-topk-dense-layer0");
  EXPECT_EQ(dense_first->rule(0, Phase::kPrefill).role, Role::kDense);
  EXPECT_EQ(dense_first->rule(1, Phase::kDecode).role, Role::kAnchor);
}

TEST(Describe, NamesEverySetting) {
  const Plan plan = plan_with({0, 3});
  const std::string text =
      make("kascade", {.budget = BudgetPreset::kPaper, .percent = 12.5, .tile = 16, .rolling = true}, &plan)
          ->describe();
  for (const char* part : {"kascade", "budget paper", "percent 12.5", "floor 128", "tile 16", "sinks 0",
                           "recent 0", "rolling on", "anchors 0,3"})
    EXPECT_THAT(text, HasSubstr(part));
}

}  // namespace
}  // namespace kascade
