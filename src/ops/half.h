// SPDX-License-Identifier: Apache-2.0
// Scalar conversion for the *_isa.cc files, static to each: dtype.h's inline functions are shared symbols,
// which those files must not instantiate.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kascade::KASCADE_ISA {
namespace {

/// IEEE binary16 bits to float.
inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  // 2^112 moves the exponent from binary16's bias to binary32's; subnormal halves become exact floats.
  uint32_t shifted = magnitude << 13;
  float value;
  std::memcpy(&value, &shifted, sizeof(value));
  value *= 0x1p112f;
  std::memcpy(&shifted, &value, sizeof(shifted));
  shifted = magnitude >= 0x7C00u ? 0x7F800000u | (magnitude & 0x3FFu) << 13 : shifted;
  shifted |= sign;
  std::memcpy(&value, &shifted, sizeof(value));
  return value;
#endif
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
