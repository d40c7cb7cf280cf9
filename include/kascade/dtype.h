// SPDX-License-Identifier: Apache-2.0
// Element types of tensors, and the two 16-bit floats as plain storage types.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kascade {

/// Element types of activations and KV caches.
enum class DType : uint8_t { kF32, kF16, kBF16 };

constexpr size_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kF32 ? "f32" : dtype == DType::kF16 ? "f16" : "bf16";
}

/// bfloat16 bits: sign, 8 exponent bits, 7 mantissa bits.
struct BF16 {
  uint16_t bits = 0;
};

/// IEEE binary16 bits.
struct F16 {
  uint16_t bits = 0;
};

constexpr float to_float(float x) { return x; }
constexpr float to_float(BF16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

constexpr float to_float(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1Fu;
  const uint32_t mantissa = x.bits & 0x3FFu;
  if (exponent == 0x1Fu) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Subnormal halves are multiples of 2^-24, exact in a float.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

/// Round to nearest even; NaN stays NaN.
constexpr BF16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return BF16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BF16{static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

/// Round to nearest even; values past 65,504 become infinite, NaN stays NaN.
constexpr F16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return F16{static_cast<uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x47800000u) return F16{static_cast<uint16_t>(sign | 0x7C00u)};
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the value rounded to a multiple of 2^-24 in the low mantissa bits.
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return F16{static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3F000000u))};
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23);
  return F16{static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace kascade
