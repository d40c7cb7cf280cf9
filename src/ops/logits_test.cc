// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "kascade/error.h"
#include "ops/ops_test_util.h"

namespace kascade {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double exact_log_sum_exp(const std::vector<float>& x) {
  long double max = -std::numeric_limits<long double>::infinity();
  for (const float v : x) max = std::max(max, static_cast<long double>(v));
  long double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<long double>(v) - max);
  return static_cast<double>(max + std::log(sum));
}

double exact_kl(const std::vector<float>& p, const std::vector<float>& q) {
  const double p_sum = exact_log_sum_exp(p);
  const double q_sum = exact_log_sum_exp(q);
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double log_p = static_cast<double>(p[i]) - p_sum;
    const double log_q = static_cast<double>(q[i]) - q_sum;
    if (p[i] != -kInf) kl += std::exp(log_p) * (log_p - log_q);
  }
  return kl;
}

TEST(LogSumExp, MatchesALongDouble) {
  for_each_isa([] {
    for (const int64_t count : {1, 2, 7, 8, 9, 17, 100, 49152}) {
      for (const float scale : {0.1f, 5.0f, 300.0f}) {
        const std::vector<float> x = random_floats(count, 1, scale);
        const double exact = exact_log_sum_exp(x);
        EXPECT_NEAR(log_sum_exp(x), exact, 1e-13 * std::abs(exact) + 1e-13) << count << ' ' << scale;
      }
    }
  });
}

TEST(LogSumExp, Extremes) {
  for_each_isa([] {
    EXPECT_EQ(log_sum_exp({}), -std::numeric_limits<double>::infinity());
    EXPECT_EQ(log_sum_exp(std::vector<float>{-kInf, -kInf}), -std::numeric_limits<double>::infinity());
    EXPECT_EQ(log_sum_exp(std::vector<float>{1, kInf}), std::numeric_limits<double>::infinity());
    EXPECT_EQ(log_sum_exp(std::vector<float>{-kInf, 3}), 3);
    EXPECT_NEAR(log_sum_exp(std::vector<float>{3e38f, 3e38f}), 3e38, 1e32);
    for (size_t at = 0; at < 40; at += 13) {
      std::vector<float> x(40, 1);
      x[at] = kNan;
      EXPECT_TRUE(std::isnan(log_sum_exp(x))) << at;
    }
  });
}

TEST(KlDivergence, MatchesTheDefinition) {
  for_each_isa([] {
    for (const int64_t count : {1, 3, 16, 33, 5000}) {
      std::vector<float> p = random_floats(count, 2, 4);
      std::vector<float> q = random_floats(count, 3, 4);
      EXPECT_NEAR(kl_divergence(p, q), exact_kl(p, q), 1e-12);
      EXPECT_EQ(kl_divergence(p, p), 0);
      // Nearly equal rows: the small result is what matters.
      std::vector<float> near = p;
      for (size_t i = 0; i < near.size(); ++i) near[i] += i % 2 == 0 ? 1e-3f : -1e-3f;
      EXPECT_NEAR(kl_divergence(p, near), exact_kl(p, near), 1e-13);
    }
  });
}

TEST(KlDivergence, ExcludedTokens) {
  for_each_isa([] {
    EXPECT_NEAR(kl_divergence(std::vector<float>{0, -kInf}, std::vector<float>{0, 0}), std::log(2.0), 1e-15);
    EXPECT_EQ(kl_divergence(std::vector<float>{0, 0}, std::vector<float>{0, -kInf}),
              std::numeric_limits<double>::infinity());
    EXPECT_EQ(kl_divergence(std::vector<float>{0, -kInf}, std::vector<float>{0, -kInf}), 0);
    EXPECT_TRUE(std::isnan(kl_divergence(std::vector<float>{0, kNan}, std::vector<float>{0, 0})));
    EXPECT_TRUE(std::isnan(kl_divergence(std::vector<float>{0, 0}, std::vector<float>{kNan, 0})));
    EXPECT_THROW(kl_divergence(std::vector<float>{0}, std::vector<float>{0, 0}), BadArgument);
  });
}

TEST(ArgMax, SmallestIndexOnTies) {
  for_each_isa([] {
    for (const int64_t count : {1, 5, 16, 17, 100}) {
      for (int64_t at = 0; at < count; ++at) {
        std::vector<float> x(static_cast<size_t>(count), -2);
        x[static_cast<size_t>(at)] = -1;
        x.back() = -1;
        EXPECT_EQ(arg_max(x), at);
      }
    }
    EXPECT_EQ(arg_max(std::vector<float>{-kInf, -kInf}), 0);
    EXPECT_EQ(arg_max(std::vector<float>{0, kInf, kInf}), 1);
    EXPECT_THROW(arg_max({}), BadArgument);
    EXPECT_THROW(arg_max(std::vector<float>{0, kNan}), BadArgument);
  });
}

}  // namespace
}  // namespace kascade
