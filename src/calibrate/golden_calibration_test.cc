// SPDX-License-Identifier: Apache-2.0
// The reference implementation's statistics in, its anchors and head maps out
// (tests/golden/fixtures/calibration).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/file.h"
#include "base/json.h"
#include "kascade/calibrate.h"
#include "plan/npy.h"

namespace kascade {
namespace {

constexpr int kLayers = 30, kHeads = 3, kPrompts = 4;

std::string folder(const std::string& forward) {
  return std::string(KASCADE_FIXTURES) + "/../golden/fixtures/calibration/" + forward + "_forward/";
}

std::vector<float> read_floats(const std::string& path) {
  const MappedFile file(path);
  const NpyArray array = parse_npy(file.bytes(), path);
  EXPECT_EQ(array.descr, "<f4");
  std::vector<float> values(array.elements);
  std::memcpy(values.data(), array.data.data(), array.data.size());
  return values;
}

// The four prompts as a statistics set. The dense forward's S_mean is stored as the mean over the prompts
// already.
StatisticsSet reference_set(const std::string& forward) {
  const std::vector<float> min = read_floats(folder(forward) + "S_min.npy");
  const std::vector<float> mean = read_floats(folder(forward) + "S_mean.npy");
  const std::vector<float> importance = read_floats(folder(forward) + "importance.npy");
  constexpr size_t kCells = kLayers * kLayers * kHeads * kHeads;
  StatisticsSet set(kLayers, kHeads, forward);
  for (size_t prompt = 0; prompt < kPrompts; ++prompt) {
    const auto part = [&](const std::vector<float>& values, size_t size) {
      const auto begin = values.begin() + static_cast<int64_t>(values.size() == size ? 0 : prompt * size);
      return std::vector<float>(begin, begin + static_cast<int64_t>(size));
    };
    set.insert(static_cast<int64_t>(prompt),
               {kLayers, kHeads, 1, 1, part(min, kCells), part(mean, kCells), part(importance, kLayers)});
  }
  return set;
}

void expect_near(const LayerSimilarity& actual, const std::vector<float>& expected, const std::string& name) {
  for (size_t i = 0; i < kLayers; ++i)
    for (size_t j = 0; j < kLayers; ++j)
      EXPECT_NEAR(actual[i][j], expected[i * kLayers + j], 1e-6)
          << name << " " << i << " " << j;  // fp32 means
}

class GoldenCalibration : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenCalibration, LayerSimilarity) {
  const StatisticsSet set = reference_set(GetParam());
  const LayerSimilarity min = layer_similarity(set.similarity(Aggregation::kMin));
  const std::vector<double> importance = set.importance();
  LayerSimilarity weighted = min;
  for (auto& row : weighted)
    for (size_t j = 0; j < row.size(); ++j) row[j] *= importance[j];
  expect_near(min, read_floats(folder(GetParam()) + "layer_similarity.npy"), "min");
  expect_near(weighted, read_floats(folder(GetParam()) + "layer_similarity_weighted.npy"), "weighted");
  expect_near(layer_similarity(set.similarity(Aggregation::kMean)),
              read_floats(folder(GetParam()) + "layer_similarity_mean_variant.npy"), "mean");
}

TEST_P(GoldenCalibration, AnchorsAndHeadMaps) {
  // Below these gaps the reference's own rounding decides.
  constexpr double kAnchorGap = 1e-5, kHeadGap = 1e-4;
  const StatisticsSet set = reference_set(GetParam());
  const std::vector<double> importance = set.importance();
  const Json plans = load_json(folder(GetParam()) + "plans.json");
  int anchors_compared = 0, heads_compared = 0;
  for (const char* aggregation : {"min", "mean"}) {
    const HeadSimilarity heads = set.similarity(aggregation_from_name(aggregation));
    const LayerSimilarity layers = layer_similarity(heads);
    for (int m = 3; m <= 8; ++m) {
      const Json& expected = plans[aggregation][std::to_string(m)];
      const auto reference = expected["anchors"].get<std::vector<int>>();
      const auto best = best_anchor_sets(layers, importance, m, 2);
      const std::string where = std::string(aggregation) + " M=" + std::to_string(m);
      EXPECT_NEAR(best[0].objective, expected["score"].get<double>(), 2e-6)
          << where;  // a sum of 30 fp32 products
      EXPECT_NEAR(best[1].objective, expected["runner_up_score"].get<double>(), 2e-6) << where;
      EXPECT_NEAR(anchor_objective(layers, importance, reference), expected["score"].get<double>(), 2e-6)
          << where;
      if (expected["score"].get<double>() - expected["runner_up_score"].get<double>() > kAnchorGap) {
        EXPECT_EQ(best[0].anchors, reference) << where;
        ++anchors_compared;
      }
      const auto map = head_map(heads, reference);
      for (int layer = 0; layer < kLayers; ++layer)
        for (int r = 0; r < kHeads; ++r)
          if (expected["head_map_gap_top1_top2"][layer][r].get<double>() > kHeadGap) {
            EXPECT_EQ(map[layer][r], expected["head_map"][layer][r].get<int>())
                << where << " " << layer << " " << r;
            ++heads_compared;
          }
    }
  }
  EXPECT_GE(anchors_compared, 10);  // else the gaps leave nothing to compare
  EXPECT_GE(heads_compared, 12 * kLayers * kHeads * 9 / 10);
}

INSTANTIATE_TEST_SUITE_P(Forward, GoldenCalibration, ::testing::Values("dense", "sparse"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kascade
