// SPDX-License-Identifier: Apache-2.0
#include "model/weight_check.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/dequantize.h"
#include "base/weight_type.h"
#include "kascade/dtype.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::HasSubstr;

// Three rows of two blocks of random bits with finite scales.
class BlockFixture : public testing::TestWithParam<WeightType> {
 protected:
  void SetUp() override {
    const WeightTypeInfo& info = weight_type_info(GetParam());
    bytes_.resize(static_cast<size_t>(6 * info.block_bytes));
    uint32_t state = 12345;
    for (uint8_t& byte : bytes_) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<uint8_t>(state >> 24);
    }
    weight_ = {bytes_.data(), GetParam(), 3, 2 * info.block_elements};
    clear_exponents();
  }

  // Byte offsets of the halves (or whole elements) whose exponents decide, in one block.
  std::vector<int> offsets() const {
    switch (GetParam()) {
      case WeightType::kQ4_1:
      case WeightType::kQ5_1:
      case WeightType::kQ4_K:
      case WeightType::kQ5_K:
        return {0, 2};
      case WeightType::kQ6_K:
        return {208};
      default:
        return {0};
    }
  }

  void put(size_t block, int offset, double value) {
    uint8_t* at =
        bytes_.data() + block * static_cast<size_t>(weight_type_info(GetParam()).block_bytes) + offset;
    const auto narrow = static_cast<float>(value);
    const F16 half = to_f16(narrow);
    const BF16 brain = to_bf16(narrow);
    if (GetParam() == WeightType::kF32)
      std::memcpy(at, &narrow, 4);
    else if (GetParam() == WeightType::kBF16)
      std::memcpy(at, &brain, 2);
    else
      std::memcpy(at, &half, 2);
  }

  void clear_exponents() {
    for (size_t block = 0; block < 6; ++block)
      for (const int offset : offsets()) put(block, offset, 0.25);
  }

  std::vector<uint8_t> bytes_;
  WeightTensor weight_;
};

TEST_P(BlockFixture, EachScaleIsChecked) {
  EXPECT_NO_THROW(require_finite(weight_, "F", "t"));
  for (size_t block = 0; block < 6; ++block) {
    for (const int offset : offsets()) {
      for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        put(block, offset, value);
        EXPECT_THAT(fault_of<BadFile>([&] { require_finite(weight_, "F", "t"); }),
                    HasSubstr("F: tensor 't': row " + std::to_string(block / 2) + ": expected finite"));
        put(block, offset, 0.25);
      }
    }
  }
}

// The promise of require_finite: what passes dequantises to finite floats, with the largest scales too.
TEST_P(BlockFixture, WhatPassesDequantisesToFiniteFloats) {
  for (size_t block = 0; block < 6; ++block)
    for (const int offset : offsets()) put(block, offset, block % 2 == 0 ? 65504 : -65504);
  ASSERT_NO_THROW(require_finite(weight_, "F", "t"));
  std::vector<float> row(static_cast<size_t>(weight_.columns));
  for (int64_t r = 0; r < weight_.rows; ++r) {
    dequantize_row(weight_.type, bytes_.data() + r * weight_.row_bytes(), weight_.columns, row.data());
    for (const float value : row) ASSERT_TRUE(std::isfinite(value));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BlockFixture,
                         testing::Values(WeightType::kF32, WeightType::kF16, WeightType::kBF16,
                                         WeightType::kQ4_0, WeightType::kQ4_1, WeightType::kQ5_0,
                                         WeightType::kQ5_1, WeightType::kQ8_0, WeightType::kQ4_K,
                                         WeightType::kQ5_K, WeightType::kQ6_K),
                         [](const auto& test) { return std::string(weight_type_info(test.param).name); });

ModelWeights with_norms(WeightType type, const std::vector<const void*>& norms, int64_t length) {
  ModelWeights weights;
  for (const void* norm : norms) weights.layers.emplace_back().attention_norm = {norm, type, 1, length};
  return weights;
}

TEST(Fingerprint, IsTheHashOfBf16Bytes) {
  // 1 and -2.5 are 3F80 and C020 in bf16; FNV-1a of the bytes 80 3F 20 C0, computed apart.
  const float norm[2] = {1, -2.5f};
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const uint64_t byte : {0x80, 0x3F, 0x20, 0xC0}) hash = (hash ^ byte) * 0x100000001B3ull;
  char expected[17];
  std::snprintf(expected, sizeof(expected), "%016llx", static_cast<unsigned long long>(hash));
  EXPECT_EQ(weight_fingerprint(with_norms(WeightType::kF32, {norm}, 2)), expected);
}

TEST(Fingerprint, SameForEveryTypeThatHoldsTheNorms) {
  const float wide[3] = {1, 0.5f, -1.25f};
  F16 half[3];
  BF16 brain[3];
  for (int i = 0; i < 3; ++i) {
    half[i] = to_f16(wide[i]);
    brain[i] = to_bf16(wide[i]);
  }
  const std::string expected = weight_fingerprint(with_norms(WeightType::kF32, {wide, wide}, 3));
  EXPECT_EQ(weight_fingerprint(with_norms(WeightType::kF16, {half, half}, 3)), expected);
  EXPECT_EQ(weight_fingerprint(with_norms(WeightType::kBF16, {brain, brain}, 3)), expected);
  // Below the precision of bf16 nothing changes; a layer more, or another order, does.
  const float close[3] = {1.0001f, 0.5f, -1.25f};
  const float other[3] = {0.5f, 1, -1.25f};
  EXPECT_EQ(weight_fingerprint(with_norms(WeightType::kF32, {close, wide}, 3)), expected);
  EXPECT_NE(weight_fingerprint(with_norms(WeightType::kF32, {wide}, 3)), expected);
  EXPECT_NE(weight_fingerprint(with_norms(WeightType::kF32, {wide, other}, 3)), expected);
}

}  // namespace
}  // namespace kascade
