// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "ops/ops_test_util.h"

namespace kascade {
namespace {

constexpr int64_t kWidths[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 576};
constexpr float kCanary = 12345;

TEST(RmsNorm, MatchesFp64AtEveryWidthAndStride) {
  for_each_isa([] {
    ThreadPool pool(2);
    for (const int64_t columns : kWidths) {
      constexpr int64_t kRows = 19;
      const int64_t x_stride = columns + 2;
      const int64_t out_stride = columns + 3;
      const std::vector<float> x = random_floats(kRows * x_stride, 1, 3);
      const std::vector<float> weight = random_floats(columns, 2);
      std::vector<float> out(static_cast<size_t>(kRows * out_stride), kCanary);
      rms_norm(x.data(), kRows, columns, x_stride, weight.data(), 1e-5f, out.data(), out_stride, pool);
      for (int64_t r = 0; r < kRows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < columns; ++i)
          squares += std::pow(static_cast<double>(x[r * x_stride + i]), 2);
        const double scale =
            1 / std::sqrt(squares / static_cast<double>(columns) + static_cast<double>(1e-5f));
        for (int64_t i = 0; i < columns; ++i) {
          const double exact =
              static_cast<double>(x[r * x_stride + i]) * scale * static_cast<double>(weight[i]);
          // The scale and two products, each rounded to fp32.
          ASSERT_NEAR(out[r * out_stride + i], exact, 3 * 0x1p-24 * std::abs(exact));
        }
        for (int64_t i = columns; i < out_stride; ++i) ASSERT_EQ(out[r * out_stride + i], kCanary);
      }
    }
  });
}

TEST(RmsNorm, InPlaceLargeAndZeroRows) {
  for_each_isa([] {
    ThreadPool pool(1);
    std::vector<float> x = {3e19f, -4e19f, 0, 0};  // squares overflow fp32
    const std::vector<float> weight = {1, 2};
    rms_norm(x.data(), 2, 2, 2, weight.data(), 1e-5f, x.data(), 2, pool);
    EXPECT_FLOAT_EQ(x[0], 0.6f * std::sqrt(2.0f));
    EXPECT_FLOAT_EQ(x[1], -1.6f * std::sqrt(2.0f));
    EXPECT_EQ(x[2], 0);
    EXPECT_EQ(x[3], 0);
  });
}

TEST(SiluMultiply, MatchesFp64) {
  for_each_isa([] {
    ThreadPool pool(2);
    for (const int64_t columns : kWidths) {
      constexpr int64_t kRows = 9;
      const int64_t stride = columns + 1;
      std::vector<float> gate = random_floats(kRows * stride, 3, 6);
      const std::vector<float> before = gate;
      const std::vector<float> up = random_floats(kRows * stride, 4);
      silu_multiply(gate.data(), up.data(), kRows, columns, stride, pool);
      for (int64_t i = 0; i < kRows * stride; ++i) {
        if (i % stride >= columns) {
          ASSERT_EQ(gate[i], before[i]);
          continue;
        }
        const double x = static_cast<double>(before[i]);
        const double exact = x / (1 + std::exp(-x)) * static_cast<double>(up[i]);
        // An exponential good to two units, a sum, a quotient and a product.
        ASSERT_NEAR(gate[i], exact, 6 * 0x1p-24 * std::abs(exact)) << x;
      }
    }
  });
}

TEST(SiluMultiply, ExtremesStayFiniteAndNanStaysNan) {
  for_each_isa([] {
    ThreadPool pool(1);
    std::vector<float> gate = {-3e38f, -100, -88, 0, 88, 3e38f, std::numeric_limits<float>::quiet_NaN()};
    const std::vector<float> up(gate.size(), 1);
    silu_multiply(gate.data(), up.data(), 1, 7, 7, pool);
    EXPECT_NEAR(gate[0], 0, 1e-35f);
    EXPECT_NEAR(gate[1], 0, 1e-35f);
    EXPECT_NEAR(gate[2], 0, 1e-35f);
    EXPECT_EQ(gate[3], 0);
    EXPECT_EQ(gate[4], 88);
    EXPECT_EQ(gate[5], 3e38f);
    EXPECT_TRUE(std::isnan(gate[6]));
  });
}

TEST(AddRows, AddsWithinItsColumns) {
  for_each_isa([] {
    ThreadPool pool(2);
    for (const int64_t columns : kWidths) {
      constexpr int64_t kRows = 17;
      std::vector<float> x = random_floats(kRows * (columns + 1), 5);
      const std::vector<float> before = x;
      const std::vector<float> y = random_floats(kRows * (columns + 4), 6);
      add_rows(x.data(), y.data(), kRows, columns, columns + 1, columns + 4, pool);
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t i = 0; i <= columns; ++i) {
          const int64_t at = r * (columns + 1) + i;
          ASSERT_EQ(x[at], i < columns ? before[at] + y[r * (columns + 4) + i] : before[at]);
        }
      }
    }
  });
}

TEST(EmbedRows, AreTheTablesRows) {
  for_each_isa([] {
    ThreadPool pool(2);
    for (const WeightType type : kAllWeightTypes) {
      const RandomWeights table(type, 50, 256, 7);
      std::vector<int32_t> ids;
      for (int i = 0; i < 21; ++i) ids.push_back(i * 7 % 50);
      std::vector<float> out(21 * 260, kCanary);
      embed_rows(table.tensor, ids, out.data(), 260, pool);
      for (size_t r = 0; r < ids.size(); ++r) {
        EXPECT_EQ(std::memcmp(out.data() + r * 260, table.floats.data() + ids[r] * 256, 256 * sizeof(float)),
                  0);
        EXPECT_EQ(out[r * 260 + 256], kCanary);
      }
    }
  });
}

TEST(Elementwise, NoRows) {
  ThreadPool pool(2);
  float x = 1;
  rms_norm(&x, 0, 1, 1, &x, 1e-5f, &x, 1, pool);
  silu_multiply(&x, &x, 0, 1, 1, pool);
  add_rows(&x, &x, 0, 1, 1, 1, pool);
  embed_rows({.data = &x, .type = WeightType::kF32, .rows = 1, .columns = 1}, {}, &x, 1, pool);
  EXPECT_EQ(x, 1);
}

}  // namespace
}  // namespace kascade
