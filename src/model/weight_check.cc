// SPDX-License-Identifier: Apache-2.0
#include "model/weight_check.h"

#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/dequantize.h"
#include "base/hash.h"
#include "base/text.h"
#include "kascade/dtype.h"

namespace kascade {
namespace {

// Whether any of `count` values, `stride` bytes apart, has all exponent bits set. The loop has no branch, so
// that it runs at the speed of memory: opening a model reads every scale in it.
template <class Bits>
bool any_exponent_full(const std::byte* bytes, int64_t count, int64_t stride, Bits exponent) {
  unsigned found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * stride, sizeof(Bits));
    found |= static_cast<unsigned>((bits & exponent) == exponent);
  }
  return found != 0;
}

constexpr uint16_t kHalfExponent = 0x7C00;
constexpr uint16_t kBF16Exponent = 0x7F80;
constexpr uint32_t kFloatExponent = 0x7F800000;

bool row_has_non_finite(const WeightTensor& weight, const std::byte* row) {
  const WeightTypeInfo& info = weight_type_info(weight.type);
  const int64_t blocks = weight.columns / info.block_elements;
  const int64_t stride = info.block_bytes;
  const auto half_at = [&](int64_t offset) {
    return any_exponent_full<uint16_t>(row + offset, blocks, stride, kHalfExponent);
  };
  switch (weight.type) {
    case WeightType::kF32:
      return any_exponent_full<uint32_t>(row, blocks, sizeof(uint32_t), kFloatExponent);
    case WeightType::kF16:
      return any_exponent_full<uint16_t>(row, blocks, sizeof(uint16_t), kHalfExponent);
    case WeightType::kBF16:
      return any_exponent_full<uint16_t>(row, blocks, sizeof(uint16_t), kBF16Exponent);
    case WeightType::kQ4_0:
    case WeightType::kQ5_0:
    case WeightType::kQ8_0:
      return half_at(0);
    case WeightType::kQ4_1:
    case WeightType::kQ5_1:
    case WeightType::kQ4_K:
    case WeightType::kQ5_K:
      return half_at(0) || half_at(2);  // scale, minimum
    case WeightType::kQ6_K:
      return half_at(info.block_bytes - 2);
  }
  return true;
}

}  // namespace

void require_finite(const WeightTensor& weight, const std::string& file, const std::string& name) {
  const auto* bytes = static_cast<const std::byte*>(weight.data);
  const int64_t row_bytes = weight.row_bytes();
  for (int64_t row = 0; row < weight.rows; ++row) {
    if (row_has_non_finite(weight, bytes + row * row_bytes))
      throw_error<BadFile>("{}: tensor {}: row {}: expected finite {}, got an infinity or a NaN", file,
                           quote_text(name), row,
                           weight_type_info(weight.type).block_elements == 1 ? "values" : "block scales");
  }
}

std::string weight_fingerprint(const ModelWeights& weights) {
  uint64_t hash = kFnvOffset;
  std::vector<float> norm;
  std::vector<std::byte> bytes;
  for (const LayerWeights& layer : weights.layers) {
    const int64_t length = layer.attention_norm.columns;
    norm.resize(static_cast<size_t>(length));
    dequantize_row(layer.attention_norm.type, layer.attention_norm.data, length, norm.data());
    bytes.clear();
    for (const float value : norm) {
      const uint16_t bits = to_bf16(value).bits;
      bytes.push_back(static_cast<std::byte>(bits & 0xFF));
      bytes.push_back(static_cast<std::byte>(bits >> 8));
    }
    hash = fnv1a(bytes, hash);
  }
  return hash_hex(hash);
}

}  // namespace kascade
