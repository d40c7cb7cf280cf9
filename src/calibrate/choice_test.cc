// SPDX-License-Identifier: Apache-2.0
// Layer similarity, the dynamic program against brute force, head maps, plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "kascade/calibrate.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using ::testing::ElementsAre;

// The dynamic program of docs/method.md, "Calibration", worked out by hand.
const LayerSimilarity kExample = {{1, .90, .60, .50}, {0, 1, .85, .80}, {0, 0, 1, .95}, {0, 0, 0, 1}};
const std::vector<double> kExampleImportance = {.6, .5, .2, .1};

// All anchor sets of one size, best first, equal values by the last anchor, then the one before it, ...
std::vector<AnchorChoice> brute_force(const LayerSimilarity& s, const std::vector<double>& weights,
                                      int anchors) {
  const int layers = static_cast<int>(s.size());
  std::vector<AnchorChoice> all;
  for (uint32_t mask = 0; mask < 1u << std::max(layers - 1, 0); ++mask) {
    std::vector<int> set = {0};
    for (int layer = 1; layer < layers; ++layer)
      if (mask >> (layer - 1) & 1) set.push_back(layer);
    if (static_cast<int>(set.size()) != anchors) continue;
    double value = 0;
    for (int j = 0; j < layers; ++j) {
      const int source = *std::prev(std::upper_bound(set.begin(), set.end(), j));
      value += (weights.empty() ? 1.0 : weights[j]) * s[source][j];
    }
    all.push_back({set, value});
  }
  std::sort(all.begin(), all.end(), [](const AnchorChoice& a, const AnchorChoice& b) {
    if (a.objective != b.objective) return a.objective > b.objective;
    return std::lexicographical_compare(a.anchors.rbegin(), a.anchors.rend(), b.anchors.rbegin(),
                                        b.anchors.rend());
  });
  return all;
}

TEST(ChooseAnchors, WorkedExample) {
  const auto best = [](const std::vector<double>& weights, int m, int count) {
    return best_anchor_sets(kExample, weights, m, count);
  };
  const auto two = best(kExampleImportance, 2, 9);
  ASSERT_EQ(two.size(), 3u);  // there are no more
  EXPECT_THAT(two[0].anchors, ElementsAre(0, 1));
  EXPECT_THAT(two[1].anchors, ElementsAre(0, 2));
  EXPECT_THAT(two[2].anchors, ElementsAre(0, 3));
  EXPECT_NEAR(two[0].objective, 1.35, 1e-12);
  EXPECT_NEAR(two[1].objective, 1.345, 1e-12);
  EXPECT_NEAR(two[2].objective, 1.27, 1e-12);

  const auto plain = best({}, 2, 3);
  EXPECT_THAT(plain[0].anchors, ElementsAre(0, 2));
  EXPECT_NEAR(plain[0].objective, 3.85, 1e-12);
  EXPECT_NEAR(plain[1].objective, 3.65, 1e-12);
  EXPECT_NEAR(plain[2].objective, 3.50, 1e-12);

  const auto three = best(kExampleImportance, 3, 3);
  EXPECT_THAT(three[0].anchors, ElementsAre(0, 1, 2));
  EXPECT_NEAR(three[0].objective, 1.395, 1e-12);
  EXPECT_NEAR(three[1].objective, 1.37, 1e-12);
  EXPECT_NEAR(three[2].objective, 1.35, 1e-12);
  EXPECT_NEAR(choose_anchors(kExample, kExampleImportance, 1).objective, 1.22, 1e-12);
}

TEST(ChooseAnchors, EqualsBruteForceOnExactScores) {
  std::mt19937 random(4);
  for (int round = 0; round < 60; ++round) {
    const int layers = 1 + round % 9;
    // Few distinct values, exact in binary: sums are exact and ties common.
    const int values = round % 3 == 0 ? 2 : 64;
    LayerSimilarity s(layers, std::vector<double>(layers, 0.0));
    std::vector<double> weights;
    for (int i = 0; i < layers; ++i)
      for (int j = i; j < layers; ++j) s[i][j] = static_cast<double>(random() % (values + 1)) / values;
    if (round % 2 == 0)
      for (int j = 0; j < layers; ++j) weights.push_back(static_cast<double>(random() % 9) / 8);
    for (int m = 1; m <= layers; ++m) {
      const auto expected = brute_force(s, weights, m);
      for (const int count : {1, 3, 1000}) {
        const auto actual = best_anchor_sets(s, weights, m, count);
        ASSERT_EQ(actual.size(), std::min<size_t>(count, expected.size()));
        for (size_t n = 0; n < actual.size(); ++n) {
          EXPECT_EQ(actual[n].objective, expected[n].objective) << round << " M=" << m << " n=" << n;
          EXPECT_EQ(actual[n].anchors, expected[n].anchors) << round << " M=" << m << " n=" << n;
          EXPECT_EQ(anchor_objective(s, weights, actual[n].anchors), actual[n].objective);
        }
      }
    }
  }
}

TEST(ChooseAnchors, EqualsBruteForceOnAnyScores) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 20; ++round) {
    constexpr int kLayers = 11;
    LayerSimilarity s(kLayers, std::vector<double>(kLayers, 0.0));
    std::vector<double> weights;
    weights.reserve(kLayers);
    for (int i = 0; i < kLayers; ++i)
      for (int j = i; j < kLayers; ++j) s[i][j] = i == j ? 1 : uniform(random);
    for (int j = 0; j < kLayers; ++j) weights.push_back(uniform(random));
    for (int m = 1; m <= kLayers; ++m) {
      const auto expected = brute_force(s, weights, m);
      const auto actual = best_anchor_sets(s, weights, m, 5);
      for (size_t n = 0; n < actual.size(); ++n)
        EXPECT_NEAR(actual[n].objective, expected[n].objective, 1e-12);  // the order of the sums differs
      EXPECT_EQ(actual[0].anchors, expected[0].anchors);
    }
  }
}

TEST(ChooseAnchors, Ends) {
  EXPECT_THAT(choose_anchors({{1}}, {}, 1).anchors, ElementsAre(0));
  const LayerSimilarity two = {{1, .5}, {0, 1}};
  EXPECT_THAT(choose_anchors(two, {}, 1).anchors, ElementsAre(0));
  EXPECT_THAT(choose_anchors(two, {}, 2).anchors, ElementsAre(0, 1));
  EXPECT_THAT(choose_anchors(kExample, {}, 4).anchors, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(choose_anchors(kExample, {}, 4).objective, 4);
  const LayerSimilarity deep(200, std::vector<double>(200, 1.0));  // all equal: the smallest layers
  EXPECT_THAT(choose_anchors(deep, {}, 4).anchors, ElementsAre(0, 1, 2, 3));
}

TEST(ChooseAnchors, RefusesWhatCannotBe) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(choose_anchors({}, {}, 1), BadArgument);
  EXPECT_THROW(choose_anchors(kExample, {}, 0), BadArgument);
  EXPECT_THROW(choose_anchors(kExample, {}, 5), BadArgument);
  EXPECT_THROW(best_anchor_sets(kExample, {}, 2, 0), BadArgument);
  EXPECT_THROW(choose_anchors(kExample, {1, 2}, 2), BadArgument);
  EXPECT_THROW(choose_anchors(kExample, {1, 2, 3, kNaN}, 2), BadArgument);
  EXPECT_THROW(choose_anchors({{1, kNaN}, {0, 1}}, {}, 2), BadArgument);
  EXPECT_THROW(choose_anchors({{1, 1}, {0}}, {}, 2), BadArgument);
  for (const std::vector<int>& anchors : {std::vector<int>{}, {1}, {0, 0}, {0, 2, 1}, {0, 4}, {0, -1}}) {
    EXPECT_THROW(anchor_objective(kExample, {}, anchors), BadArgument);
    EXPECT_THROW(retained_mass(kExample, anchors), BadArgument);
  }
}

TEST(RetainedMass, SimilarityToTheSource) {
  EXPECT_THAT(retained_mass(kExample, {0, 2}), ElementsAre(1, .90, 1, .95));
  EXPECT_THAT(retained_mass(kExample, {0}), ElementsAre(1, .90, .60, .50));
}

HeadSimilarity random_similarity(int layers, int heads, uint32_t seed, int values) {
  std::mt19937 random(seed);
  HeadSimilarity s{layers, heads, {}};
  for (int i = 0; i < layers; ++i)
    for (int j = 0; j < layers; ++j)
      for (int n = 0; n < heads * heads; ++n)
        s.values.push_back(i > j ? 0.0 : static_cast<double>(random() % values) / values);
  return s;
}

TEST(HeadMap, ArgmaxWithTiesToTheSmaller) {
  const HeadSimilarity s = random_similarity(6, 4, 6, 3);  // three values: ties everywhere
  const std::vector<int> anchors = {0, 2, 5};
  const auto map = head_map(s, anchors);
  const auto layer = layer_similarity(s);
  const int sources[] = {0, 0, 2, 2, 2, 5};
  for (int j = 0; j < 6; ++j) {
    const int i = sources[j];
    double sum = 0;
    for (int r = 0; r < 4; ++r) {
      int best = 0;
      for (int a = 1; a < 4; ++a)
        if (s.at(i, j, r, a) > s.at(i, j, r, best)) best = a;
      EXPECT_EQ(map[j][r], i == j ? r : best);
      sum += s.at(i, j, r, best);
    }
    EXPECT_EQ(layer[i][j], i == j ? 1 : sum / 4);
  }
  EXPECT_EQ(layer[3][1], 0);
}

TEST(HeadMap, TensorParallelStaysInsideTheRank) {
  const HeadSimilarity s = random_similarity(5, 4, 7, 100);
  const auto whole = head_map(s, {0});
  const auto halves = head_map(s, {0}, 2);
  const auto alone = head_map(s, {0}, 4);
  bool crossed = false;
  for (int j = 0; j < 5; ++j)
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(halves[j][r] / 2, r / 2);
      EXPECT_EQ(alone[j][r], r);
      crossed |= whole[j][r] / 2 != r / 2;
    }
  EXPECT_TRUE(crossed);                         // else the restriction restricts nothing
  EXPECT_EQ(head_map(s, {0}, 8)[1], alone[1]);  // more ranks than KV heads
  EXPECT_LE(layer_similarity(s, 2)[0][3], layer_similarity(s)[0][3]);
  EXPECT_THROW(head_map(s, {0}, 3), BadArgument);
  EXPECT_THROW(head_map(s, {0}, 0), BadArgument);
  EXPECT_THROW(layer_similarity(s, -1), BadArgument);
}

TEST(HeadMap, RefusesWhatCannotBe) {
  const HeadSimilarity s = random_similarity(3, 2, 8, 10);
  for (const std::vector<int>& anchors : {std::vector<int>{}, {1}, {0, 0}, {0, 2, 1}, {0, 3}, {0, -1}})
    EXPECT_THROW(head_map(s, anchors), BadArgument);
  HeadSimilarity ragged = s;
  ragged.values.pop_back();
  EXPECT_THROW(head_map(ragged, {0}), BadArgument);
  EXPECT_THROW(layer_similarity(ragged), BadArgument);
  EXPECT_THROW(layer_similarity(HeadSimilarity{}), BadArgument);
}

TEST(MakePlan, IsAValidPlan) {
  const HeadSimilarity s = random_similarity(5, 2, 9, 64);
  const ModelIdentity model = {"llama", 5, 6, 2, 16, "0123456789abcdef"};
  const std::vector<double> importance = {.5, .4, .3, .2, .1};
  CalibrationSettings settings;
  settings.importance = true;
  const Plan plan = make_plan(model, settings, s, importance, {0, 3});
  EXPECT_NO_THROW(validate_plan(plan));
  EXPECT_EQ(plan.objective, anchor_objective(layer_similarity(s), importance, {0, 3}));
  EXPECT_EQ(plan.retained_mass[4], layer_similarity(s)[3][4]);
  EXPECT_EQ(parse_plan(plan_to_json(plan), "memory").similarity, layer_similarity(s));
  settings.importance = false;
  EXPECT_EQ(make_plan(model, settings, s, importance, {0, 3}).objective,
            anchor_objective(layer_similarity(s), {}, {0, 3}));
  EXPECT_THROW(make_plan({"llama", 4, 6, 2, 16, ""}, settings, s, importance, {0, 3}), BadArgument);
  EXPECT_THROW(make_plan(model, settings, s, {1, 2}, {0, 3}), BadArgument);
}

TEST(MakePlan, Ends) {
  CalibrationSettings settings;
  for (const int layers : {1, 2})
    for (const int heads : {1, 3}) {  // G = 1; R = 1 with as many query heads
      const HeadSimilarity s = random_similarity(layers, heads, 10, 8);
      const ModelIdentity model = {"llama", layers, heads, heads, 8, ""};
      for (int m = 1; m <= layers; ++m) {
        const auto anchors = choose_anchors(layer_similarity(s), {}, m).anchors;
        EXPECT_NO_THROW(validate_plan(make_plan(model, settings, s, {}, anchors)));
      }
    }
}

}  // namespace
}  // namespace kascade
