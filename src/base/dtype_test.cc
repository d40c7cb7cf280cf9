// SPDX-License-Identifier: Apache-2.0
#include "kascade/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace kascade {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a half by its definition, in double arithmetic.
double half_value(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = bits >> 10 & 0x1F;
  const int mantissa = bits & 0x3FF;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

TEST(F16, EveryValueWidensExactlyAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const F16 half{static_cast<uint16_t>(bits)};
    const float wide = to_float(half);
    if ((bits & 0x7C00) == 0x7C00 && (bits & 0x3FF) != 0) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_TRUE(std::isnan(to_float(to_f16(wide)))) << bits;
      continue;
    }
    if ((bits & 0x7C00) == 0x7C00)
      EXPECT_EQ(wide, (bits & 0x8000) != 0 ? -kInfinity : kInfinity);
    else
      EXPECT_EQ(static_cast<double>(wide), half_value(half.bits)) << bits;
    EXPECT_EQ(std::signbit(wide), (bits & 0x8000) != 0) << bits;
    EXPECT_EQ(to_f16(wide).bits, bits);
  }
}

// Between neighbouring halves: below the middle goes down, above it up, the middle itself to the even one.
TEST(F16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const auto middle = static_cast<float>((half_value(low) + half_value(high)) / 2);  // exact: one more bit
    const uint16_t even = (low & 1) == 0 ? low : high;
    ASSERT_EQ(to_f16(middle).bits, even) << bits;
    ASSERT_EQ(to_f16(std::nextafter(middle, 0.0f)).bits, low) << bits;
    ASSERT_EQ(to_f16(std::nextafter(middle, kInfinity)).bits, high) << bits;
    ASSERT_EQ(to_f16(-middle).bits, even | 0x8000) << bits;
  }
}

TEST(F16, RangeEnds) {
  EXPECT_EQ(to_f16(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(to_f16(std::nextafter(65520.0f, 0.0f)).bits, 0x7BFF);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7C00);  // the middle to the next power of two rounds to even: infinity
  EXPECT_EQ(to_f16(-1e30f).bits, 0xFC00);
  EXPECT_EQ(to_f16(kInfinity).bits, 0x7C00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0x0000);  // half of the smallest: to even
  EXPECT_EQ(to_f16(std::nextafter(0x1p-25f, 1.0f)).bits, 0x0001);
  EXPECT_EQ(to_f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
}

TEST(BF16, EveryValueWidensExactlyAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BF16 brain{static_cast<uint16_t>(bits)};
    const float wide = to_float(brain);
    if ((bits & 0x7F80) == 0x7F80 && (bits & 0x7F) != 0) {
      EXPECT_TRUE(std::isnan(wide)) << bits;
      EXPECT_TRUE(std::isnan(to_float(to_bf16(wide)))) << bits;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(wide), bits << 16);
      EXPECT_EQ(to_bf16(wide).bits, bits);
    }
  }
}

TEST(BF16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(float_of(0x3F808000)).bits, 0x3F80);  // middle, even below
  EXPECT_EQ(to_bf16(float_of(0x3F818000)).bits, 0x3F82);  // middle, even above
  EXPECT_EQ(to_bf16(float_of(0x3F808001)).bits, 0x3F81);
  EXPECT_EQ(to_bf16(float_of(0x3F817FFF)).bits, 0x3F81);
  EXPECT_EQ(to_bf16(float_of(0xBF818000)).bits, 0xBF82);
  EXPECT_EQ(to_bf16(float_of(0x7F7FFFFF)).bits, 0x7F80);  // FLT_MAX rounds to infinity
  EXPECT_EQ(to_bf16(kInfinity).bits, 0x7F80);
}

// A NaN whose upper mantissa bits are zero would become an infinity if it were cut.
TEST(BF16, NanStaysNan) {
  EXPECT_TRUE(std::isnan(to_float(to_bf16(float_of(0x7F800001)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(float_of(0xFFFFFFFF)))));
  EXPECT_TRUE(std::isnan(to_float(to_f16(float_of(0x7F800001)))));
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(dtype_bytes(DType::kF32), 4u);
  EXPECT_EQ(dtype_bytes(DType::kF16), 2u);
  EXPECT_EQ(dtype_bytes(DType::kBF16), 2u);
  EXPECT_STREQ(dtype_name(DType::kF32), "f32");
  EXPECT_STREQ(dtype_name(DType::kF16), "f16");
  EXPECT_STREQ(dtype_name(DType::kBF16), "bf16");
}

}  // namespace
}  // namespace kascade
