// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/attention_test_case.h"
#include "kascade/attention.h"

namespace kascade {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();

std::vector<int32_t> by_sorting(const std::vector<float>& weights, int64_t k) {
  std::vector<int32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const float x = weights[static_cast<size_t>(a)], y = weights[static_cast<size_t>(b)];
    if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
    return x > y;
  });
  order.resize(static_cast<size_t>(std::clamp<int64_t>(k, 0, static_cast<int64_t>(weights.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<int32_t> selected(const std::vector<float>& weights, int64_t k) {
  const auto n = static_cast<int64_t>(weights.size());
  GuardedBuffer input(weights.size() * sizeof(float));
  std::copy(weights.begin(), weights.end(), input.as<float>());
  GuardedBuffer scratch(static_cast<size_t>(select_top_k_scratch(n)) * sizeof(uint32_t));
  GuardedBuffer positions(static_cast<size_t>(std::clamp<int64_t>(k, 0, n)) * sizeof(int32_t));
  const int64_t count =
      select_top_k(input.as<float>(), n, k, positions.as<int32_t>(), scratch.as<uint32_t>());
  EXPECT_EQ(count, std::clamp<int64_t>(k, 0, n));
  return {positions.as<int32_t>(), positions.as<int32_t>() + count};
}

void expect_all_k(const std::vector<float>& weights) {
  for (int64_t k = -1; k <= static_cast<int64_t>(weights.size()) + 1; ++k)
    ASSERT_EQ(selected(weights, k), by_sorting(weights, k)) << "k = " << k << " of " << weights.size();
}

TEST(TopKTest, LargerFirstThenSmallerPosition) {
  EXPECT_EQ(selected({1, 3, 2, 3, 1}, 2), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(selected({1, 3, 2, 3, 1}, 4), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(selected({5, 5, 5, 5}, 2), (std::vector<int32_t>{0, 1}));
}

TEST(TopKTest, NothingWantedOrNothingThere) {
  EXPECT_TRUE(selected({}, 3).empty());
  EXPECT_TRUE(selected({1, 2}, 0).empty());
  EXPECT_TRUE(selected({1, 2}, -5).empty());
  EXPECT_EQ(selected({1, 2}, 100), (std::vector<int32_t>{0, 1}));
}

TEST(TopKTest, NanRanksBelowMinusInfinity) {
  EXPECT_EQ(selected({kNan, -kInf, kNan, -1}, 2), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(selected({kNan, -kInf, -kNan, -1}, 3), (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(selected({kNan, -kNan, kNan}, 2), (std::vector<int32_t>{0, 1}));
}

TEST(TopKTest, BothZerosAreEqual) {
  EXPECT_EQ(selected({-0.0f, 0.0f, -0.0f}, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(selected({-1, -0.0f, 0.0f}, 1), (std::vector<int32_t>{1}));
}

TEST(TopKTest, ZerosAndDenormalsRankAsNumbers) {
  expect_all_k({0, kDenormal, 0, 2 * kDenormal, kDenormal, -kDenormal, 0, 1, -0.0f});
  // Fewer positive weights than k: the zeros fill up from the front.
  EXPECT_EQ(selected({0, 0, 1, 0, kDenormal, 0}, 4), (std::vector<int32_t>{0, 1, 2, 4}));
}

TEST(TopKTest, MixedSpecialValues) {
  expect_all_k({kInf, -kInf, kNan, 0, -0.0f, 1, -1, kInf, kNan, kDenormal, -kInf, 1e38f, -1e38f, 1e-38f});
}

TEST(TopKTest, EveryLengthAroundTheVectorWidths) {
  Random random(11);
  for (int64_t n = 0; n <= 70; ++n) {
    std::vector<float> weights(static_cast<size_t>(n));
    for (float& w : weights) w = std::abs(random.normal());
    expect_all_k(weights);
  }
}

TEST(TopKTest, RandomWithManyTies) {
  Random random(12);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> weights(static_cast<size_t>(random.in(1, 3000)));
    const int64_t distinct = random.of<int64_t>({1, 2, 3, 17, 1000000});
    const float unit = random.of<float>({1, 1e-30f, kDenormal, -1e-3f});
    for (float& w : weights) w = static_cast<float>(random.in(0, distinct)) * unit;
    const int64_t k = random.in(0, static_cast<int64_t>(weights.size()));
    ASSERT_EQ(selected(weights, k), by_sorting(weights, k)) << "round " << round;
  }
}

TEST(TopKTest, NeighbouringFloats) {
  // Differ in the last bits only: every digit of the key decides.
  std::vector<float> weights;
  float w = 0.1f;
  for (int i = 0; i < 5000; ++i) weights.push_back(w = std::nextafter(w, 1.0f));
  Random random(13);
  for (size_t i = weights.size() - 1; i > 0; --i) std::swap(weights[i], weights[random.bits() % (i + 1)]);
  for (const int64_t k : {1, 2, 77, 2500, 4999}) ASSERT_EQ(selected(weights, k), by_sorting(weights, k)) << k;
}

TEST(TopKTest, RampsAndSpikes) {
  std::vector<float> up(20000), down(20000), spikes(20000, 1e-7f);
  for (size_t i = 0; i < up.size(); ++i) {
    up[i] = static_cast<float>(i) * 1e-3f;
    down[i] = static_cast<float>(up.size() - i) * 1e-3f;
  }
  for (size_t i = 0; i < spikes.size(); i += 999) spikes[i] = 1;
  for (const auto& weights : {up, down, spikes})
    for (const int64_t k : {1, 20, 21, 22, 128, 1999, 19999})
      ASSERT_EQ(selected(weights, k), by_sorting(weights, k));
}

}  // namespace
}  // namespace kascade
