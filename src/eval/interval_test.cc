// SPDX-License-Identifier: Apache-2.0
#include "eval/interval.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "eval/random.h"

namespace kascade {
namespace {

TEST(BootstrapMean, CoversTheMeanOfANormalSample) {
  SplitMix random(7);
  std::vector<double> values(400);
  double sum = 0, squares = 0;
  for (double& value : values) {
    // Sum of twelve uniforms: mean 6, standard deviation 1.
    value = 0;
    for (int i = 0; i < 12; ++i) value += static_cast<double>(random.below(1 << 20)) / (1 << 20);
    sum += value;
    squares += value * value;
  }
  const Figure figure = bootstrap_mean(values);
  const double mean = sum / 400, deviation = std::sqrt(squares / 400 - mean * mean);
  EXPECT_DOUBLE_EQ(figure.value, mean);
  // For a normal sample the percentile bootstrap comes near 1.96 standard errors (0.05 each); its own noise
  // at 1,000 resamples is about a tenth of that.
  EXPECT_NEAR(figure.high - mean, 1.96 * deviation / 20, 0.02);
  EXPECT_NEAR(mean - figure.low, 1.96 * deviation / 20, 0.02);
  const Figure again = bootstrap_mean(values);
  EXPECT_EQ(again.low, figure.low);
  EXPECT_EQ(again.high, figure.high);
}

TEST(BootstrapMean, OfFewValues) {
  EXPECT_EQ(bootstrap_mean({}).value, 0);
  const double one = 2.5;
  EXPECT_EQ(bootstrap_mean({&one, 1}).low, 2.5);
  EXPECT_EQ(bootstrap_mean({&one, 1}).high, 2.5);
  const std::vector<double> equal(5, 0.25);
  EXPECT_EQ(bootstrap_mean(equal).low, 0.25);
  EXPECT_EQ(bootstrap_mean(equal).high, 0.25);
}

TEST(WilsonShare, MatchesPublishedValues) {
  const Figure figure = wilson_share(8, 10);  // 0.490 .. 0.943 in textbooks
  EXPECT_DOUBLE_EQ(figure.value, 0.8);
  EXPECT_NEAR(figure.low, 0.4902, 1e-4);
  EXPECT_NEAR(figure.high, 0.9433, 1e-4);
}

TEST(WilsonShare, StaysWithinZeroAndOne) {
  EXPECT_EQ(wilson_share(0, 0).high, 1);
  EXPECT_EQ(wilson_share(7, 7).high, 1);
  EXPECT_LT(wilson_share(7, 7).low, 1);
  EXPECT_EQ(wilson_share(0, 7).low, 0);
  EXPECT_GT(wilson_share(0, 7).high, 0);
}

}  // namespace
}  // namespace kascade
