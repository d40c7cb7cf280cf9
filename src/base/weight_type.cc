// SPDX-License-Identifier: Apache-2.0
#include "base/weight_type.h"

#include "base/check.h"

namespace kascade {
namespace {

// In the order of the enumerators. Block bytes are scales plus packed quants (base/dequantize.cc has the
// layouts).
constexpr WeightTypeInfo kInfo[kWeightTypes] = {
    {"F32", 1, 4},                         //
    {"F16", 1, 2},                         //
    {"BF16", 1, 2},                        //
    {"Q4_0", 32, 2 + 16},                  // scale, 4-bit quants
    {"Q4_1", 32, 2 + 2 + 16},              // scale, minimum, 4-bit quants
    {"Q5_0", 32, 2 + 4 + 16},              // scale, fifth bits, 4-bit quants
    {"Q5_1", 32, 2 + 2 + 4 + 16},          // scale, minimum, fifth bits, 4-bit quants
    {"Q8_0", 32, 2 + 32},                  // scale, 8-bit quants
    {"Q4_K", 256, 2 + 2 + 12 + 128},       // scale, minimum, 6-bit scales and minima, 4-bit quants
    {"Q5_K", 256, 2 + 2 + 12 + 32 + 128},  // the same with fifth bits
    {"Q6_K", 256, 128 + 64 + 16 + 2},      // low 4 bits, high 2 bits, 8-bit scales, scale
};

}  // namespace

const WeightTypeInfo& weight_type_info(WeightType type) {
  const auto index = static_cast<int>(type);
  require<BadArgument>(index < kWeightTypes, "weight type: expected 0..{}, got {}", kWeightTypes - 1, index);
  return kInfo[index];
}

int64_t WeightTensor::row_bytes() const {
  const WeightTypeInfo& info = weight_type_info(type);
  return columns / info.block_elements * info.block_bytes;
}

std::optional<int64_t> checked_row_bytes(WeightType type, int64_t columns) {
  const WeightTypeInfo& info = weight_type_info(type);
  if (columns < 0 || columns % info.block_elements != 0) return std::nullopt;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(columns / info.block_elements, int64_t{info.block_bytes}, &bytes))
    return std::nullopt;
  return bytes;
}

std::optional<int64_t> checked_tensor_bytes(WeightType type, int64_t rows, int64_t columns) {
  const std::optional<int64_t> row = checked_row_bytes(type, columns);
  int64_t bytes = 0;
  if (!row || rows < 0 || __builtin_mul_overflow(*row, rows, &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace kascade
