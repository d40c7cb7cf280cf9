// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <limits>
#include <numbers>

#include "kascade/error.h"
#include "ops/ops_test_util.h"

namespace kascade {
namespace {

using testing::HasSubstr;

TEST(Rope, MatchesFp64AtEveryPositionAndLayout) {
  ThreadPool pool(2);
  for (const int head_dim : {2, 6, 64, 80}) {
    for (const bool adjacent : {false, true}) {
      const std::vector<double> frequencies = rope_inverse_frequencies(head_dim, 100000);
      Rope rope(frequencies, adjacent);
      rope.prepare(131072);
      for_each_isa([&] {
        const std::vector<int32_t> positions = {0, 1, 2, 511, 4096, 65537, 131071, 131071, 3, 0};
        constexpr int kHeads = 3;
        const int64_t stride = kHeads * head_dim + 5;
        std::vector<float> x = random_floats(static_cast<int64_t>(positions.size()) * stride, 1);
        const std::vector<float> before = x;
        rope.apply(x.data(), positions, kHeads, stride, pool);
        for (size_t r = 0; r < positions.size(); ++r) {
          const auto row = static_cast<int64_t>(r) * stride;
          for (int64_t i = kHeads * head_dim; i < stride; ++i) ASSERT_EQ(x[row + i], before[row + i]);
          for (int head = 0; head < kHeads; ++head) {
            for (int i = 0; i < head_dim / 2; ++i) {
              const int64_t a = row + head * head_dim + (adjacent ? 2 * i : i);
              const int64_t b = adjacent ? a + 1 : a + head_dim / 2;
              const double angle = positions[r] * frequencies[i];
              const double exact_a = static_cast<double>(before[a]) * std::cos(angle) -
                                     static_cast<double>(before[b]) * std::sin(angle);
              const double exact_b = static_cast<double>(before[b]) * std::cos(angle) +
                                     static_cast<double>(before[a]) * std::sin(angle);
              // fp32 tables and three fp32 operations; an fp32 angle would be off by 0.004 at the last
              // position.
              const double tolerance =
                  3 * 0x1p-24 *
                  (std::abs(static_cast<double>(before[a])) + std::abs(static_cast<double>(before[b])));
              ASSERT_NEAR(x[a], exact_a, tolerance) << "position " << positions[r] << " pair " << i;
              ASSERT_NEAR(x[b], exact_b, tolerance) << "position " << positions[r] << " pair " << i;
            }
          }
        }
      });
    }
  }
}

TEST(Rope, GrowingChangesNoAngle) {
  ThreadPool pool(1);
  const std::vector<int32_t> positions = {5, 99};
  std::vector<float> grown = random_floats(2 * 8, 2);
  std::vector<float> once = grown;
  Rope a(rope_inverse_frequencies(8, 10000), false);
  for (const int64_t n : {6, 7, 40, 100}) a.prepare(n);
  Rope b(rope_inverse_frequencies(8, 10000), false);
  b.prepare(100);
  a.apply(grown.data(), positions, 1, 8, pool);
  b.apply(once.data(), positions, 1, 8, pool);
  EXPECT_EQ(grown, once);
}

TEST(Rope, RefusesPositionsItHasNotPrepared) {
  ThreadPool pool(1);
  Rope rope(rope_inverse_frequencies(8, 10000), false);
  rope.prepare(10);
  std::vector<float> x(8);
  const std::vector<float> before = x;
  for (const int32_t position : {-1, 10, std::numeric_limits<int32_t>::max()})
    EXPECT_THROW(rope.apply(x.data(), std::vector<int32_t>{position}, 1, 8, pool), BadArgument);
  rope.apply(x.data(), {}, 1, 8, pool);
  EXPECT_EQ(x, before);
  EXPECT_THROW(Rope({}, false), BadArgument);
}

TEST(RopeFrequencies, PlainAndLinear) {
  const std::vector<double> plain = rope_inverse_frequencies(4, 10000);
  EXPECT_THAT(plain, testing::ElementsAre(1.0, testing::DoubleNear(0.01, 1e-15)));
  const std::vector<double> linear =
      rope_inverse_frequencies(4, 10000, {.kind = RopeFrequencyScaling::Kind::kLinear, .factor = 4});
  EXPECT_THAT(linear, testing::ElementsAre(0.25, testing::DoubleNear(0.0025, 1e-15)));
}

// The published settings of Llama 3.1: wavelengths below 8192 / 4 tokens are kept, those above 8192 divided
// by 8.
TEST(RopeFrequencies, Llama3) {
  const RopeFrequencyScaling scaling = {.kind = RopeFrequencyScaling::Kind::kLlama3,
                                        .factor = 8,
                                        .low_freq_factor = 1,
                                        .high_freq_factor = 4,
                                        .original_context = 8192};
  const std::vector<double> plain = rope_inverse_frequencies(128, 500000);
  const std::vector<double> scaled = rope_inverse_frequencies(128, 500000, scaling);
  int kept = 0;
  int slowed = 0;
  int between = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * std::numbers::pi / plain[i];
    if (wavelength < 2048) {
      EXPECT_EQ(scaled[i], plain[i]);
      ++kept;
    } else if (wavelength > 8192) {
      EXPECT_DOUBLE_EQ(scaled[i], plain[i] / 8);
      ++slowed;
    } else {
      // Written as in the published code: smooth = (8192 / wavelength - 1) / 3.
      const double smooth = (8192 / wavelength - 1) / 3;
      EXPECT_DOUBLE_EQ(scaled[i], (1 - smooth) * plain[i] / 8 + smooth * plain[i]);
      EXPECT_LT(scaled[i], plain[i]);
      EXPECT_GT(scaled[i], plain[i] / 8);
      ++between;
    }
  }
  EXPECT_EQ(kept + slowed + between, 64);
  EXPECT_GT(kept, 20);
  EXPECT_GT(slowed, 20);
  EXPECT_GT(between, 3);
}

TEST(RopeFrequencies, DivisorsComeLast) {
  const std::vector<float> divisors = {1, 8};
  const std::vector<double> divided = rope_inverse_frequencies(4, 10000, {}, divisors);
  EXPECT_THAT(divided, testing::ElementsAre(1.0, testing::DoubleNear(0.00125, 1e-15)));
}

TEST(RopeFrequencies, RefusesBadValues) {
  using Kind = RopeFrequencyScaling::Kind;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto message = [](int head_dim, double theta, const RopeFrequencyScaling& scaling,
                          std::vector<float> divisors = {}) -> std::string {
    try {
      rope_inverse_frequencies(head_dim, theta, scaling, divisors);
    } catch (const BadArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message(0, 1e4, {}), HasSubstr("head_dim"));
  EXPECT_THAT(message(7, 1e4, {}), HasSubstr("head_dim"));
  EXPECT_THAT(message(8, 0, {}), HasSubstr("theta"));
  EXPECT_THAT(message(8, nan, {}), HasSubstr("theta"));
  EXPECT_THAT(message(8, 1e4, {.kind = Kind::kLinear, .factor = 0}), HasSubstr("factor"));
  EXPECT_THAT(message(8, 1e4, {.kind = Kind::kLlama3, .low_freq_factor = -1}), HasSubstr("low_freq_factor"));
  EXPECT_THAT(message(8, 1e4, {.kind = Kind::kLlama3, .low_freq_factor = 4}), HasSubstr("high_freq_factor"));
  EXPECT_THAT(message(8, 1e4, {.kind = Kind::kLlama3, .original_context = nan}),
              HasSubstr("original_context"));
  EXPECT_THAT(message(8, 1e4, {}, {1, 1}), HasSubstr("divisors: expected 4, got 2"));
  EXPECT_THAT(message(8, 1e4, {}, {1, 1, 0, 1}), HasSubstr("divisor"));
}

}  // namespace
}  // namespace kascade
