// SPDX-License-Identifier: Apache-2.0
#include "base/dequantize.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/weight_type.h"
#include "kascade/dtype.h"
#include "kascade/error.h"

namespace kascade {
namespace {

constexpr WeightType kAllTypes[kWeightTypes] = {WeightType::kF32,  WeightType::kF16,  WeightType::kBF16,
                                                WeightType::kQ4_0, WeightType::kQ4_1, WeightType::kQ5_0,
                                                WeightType::kQ5_1, WeightType::kQ8_0, WeightType::kQ4_K,
                                                WeightType::kQ5_K, WeightType::kQ6_K};

class DequantizeFixture : public testing::TestWithParam<WeightType> {};

// The fixtures come from an independent implementation (tests/fixtures/make_weights.py). Equal to the bit:
// both round every product and sum once, in the same order.
TEST_P(DequantizeFixture, EqualsIndependentImplementation) {
  const WeightTypeInfo& info = weight_type_info(GetParam());
  const std::string stem = std::string(KASCADE_FIXTURES) + "/weights/" + info.name;
  const std::string raw = read_file(stem + ".raw");
  const std::string stored = read_file(stem + ".f32");
  std::vector<float> expected(stored.size() / sizeof(float));
  std::memcpy(expected.data(), stored.data(), stored.size());
  const auto columns = static_cast<int64_t>(expected.size());
  ASSERT_EQ(checked_row_bytes(GetParam(), columns), static_cast<int64_t>(raw.size()));

  std::vector<float> actual(expected.size());
  dequantize_row(GetParam(), raw.data(), columns, actual.data());
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(actual[i], expected[i]) << info.name << " element " << i;
}

INSTANTIATE_TEST_SUITE_P(Types, DequantizeFixture,
                         testing::ValuesIn(std::begin(kAllTypes) + 1, std::end(kAllTypes)),
                         [](const auto& test) { return std::string(weight_type_info(test.param).name); });

TEST(Dequantize, RowNeedsNoAlignment) {
  for (const WeightType type : kAllTypes) {
    const WeightTypeInfo& info = weight_type_info(type);
    const auto bytes = static_cast<size_t>(info.block_bytes);
    std::vector<uint8_t> block(bytes + 1);
    for (size_t i = 0; i < bytes; ++i) block[i] = static_cast<uint8_t>(i * 7 % 96);
    std::vector<float> aligned(static_cast<size_t>(info.block_elements));
    std::vector<float> shifted(aligned.size());
    dequantize_row(type, block.data(), info.block_elements, aligned.data());
    std::memmove(block.data() + 1, block.data(), bytes);
    dequantize_row(type, block.data() + 1, info.block_elements, shifted.data());
    EXPECT_EQ(aligned, shifted) << info.name;
  }
}

TEST(Dequantize, EmptyRowWritesNothing) {
  for (const WeightType type : kAllTypes) {
    float canary = 42;
    dequantize_row(type, nullptr, 0, &canary);
    EXPECT_EQ(canary, 42) << weight_type_info(type).name;
  }
}

TEST(Dequantize, PartOfABlockIsRefused) {
  float out[256];
  const uint8_t row[256] = {};
  EXPECT_THROW(dequantize_row(WeightType::kQ4_0, row, 31, out), BadArgument);
  EXPECT_THROW(dequantize_row(WeightType::kQ6_K, row, 128, out), BadArgument);
  EXPECT_THROW(dequantize_row(WeightType::kF32, row, -1, out), BadArgument);
  EXPECT_THROW(dequantize_row(static_cast<WeightType>(200), row, 32, out), BadArgument);
}

TEST(WeightType, SizesOfTheFormats) {
  EXPECT_EQ(checked_row_bytes(WeightType::kF32, 5), 20);
  EXPECT_EQ(checked_row_bytes(WeightType::kBF16, 5), 10);
  EXPECT_EQ(checked_row_bytes(WeightType::kQ4_1, 576), 360);
  EXPECT_EQ(checked_row_bytes(WeightType::kQ6_K, 512), 420);
  EXPECT_EQ(checked_tensor_bytes(WeightType::kQ8_0, 3, 64), 204);
  const WeightTensor tensor{nullptr, WeightType::kQ4_K, 7, 512};
  EXPECT_EQ(tensor.row_bytes(), 288);
  EXPECT_EQ(tensor.bytes(), 2016);
}

TEST(WeightType, SizesThatDoNotFitAreNone) {
  EXPECT_EQ(checked_row_bytes(WeightType::kQ4_0, 33), std::nullopt);
  EXPECT_EQ(checked_row_bytes(WeightType::kF32, -4), std::nullopt);
  EXPECT_EQ(checked_row_bytes(WeightType::kF32, int64_t{1} << 61), std::nullopt);
  EXPECT_EQ(checked_row_bytes(WeightType::kF32, (int64_t{1} << 61) - 1), ((int64_t{1} << 61) - 1) * 4);
  EXPECT_EQ(checked_tensor_bytes(WeightType::kF16, int64_t{1} << 31, int64_t{1} << 31), std::nullopt);
  EXPECT_EQ(checked_tensor_bytes(WeightType::kF32, -1, 8), std::nullopt);
}

}  // namespace
}  // namespace kascade
