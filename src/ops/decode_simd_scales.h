// SPDX-License-Identifier: Apache-2.0
// The packed scales of blocks of 256 elements, four rows at a time, by scalar bit operations over
// scale_bytes() of decode_simd_*.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace kascade::KASCADE_ISA {
namespace {

// What begins a Q4_K or Q5_K block (two halves, then packed scales and minima) of four rows.
struct PackedScales {
  uint16_t scale[4], minimum[4];
  uint32_t words[4][3];
};

inline PackedScales load_packed_scales(const uint8_t* const* row) {
  PackedScales packed;
  for (int r = 0; r < 4; ++r) {
    std::memcpy(&packed.scale[r], row[r], sizeof(packed.scale[r]));
    std::memcpy(&packed.minimum[r], row[r] + 2, sizeof(packed.minimum[r]));
    std::memcpy(packed.words[r], row[r] + 4, sizeof(packed.words[r]));
    packed.minimum[r] ^= 0x8000u;  // subtracted
  }
  return packed;
}

// Scales and (negative) minima of groups 4 * kHalf to 4 * kHalf + 3. base/dequantize.cc describes the
// packing.
template <int kHalf>
inline void unpack_scales(const PackedScales& packed, Scales& scale, Scales& minimum) {
  uint32_t scales[4];
  uint32_t minima[4];
  for (int r = 0; r < 4; ++r) {
    const uint32_t* w = packed.words[r];
    scales[r] = kHalf == 0 ? w[0] & 0x3F3F3F3Fu : (w[2] & 0x0F0F0F0Fu) | (w[0] >> 2 & 0x30303030u);
    minima[r] = kHalf == 0 ? w[1] & 0x3F3F3F3Fu : (w[2] >> 4 & 0x0F0F0F0Fu) | (w[1] >> 2 & 0x30303030u);
  }
  scale = scale_bytes<false>(scales, packed.scale);
  minimum = scale_bytes<false>(minima, packed.minimum);
}

// The 16 signed scales and the half of a Q6_K block of four rows.
struct SignedScales {
  uint8_t bytes[4][16];
  uint16_t scale[4];
};

inline SignedScales load_signed_scales(const uint8_t* const* row, int bytes_offset, int half_offset) {
  SignedScales packed;
  for (int r = 0; r < 4; ++r) {
    std::memcpy(packed.bytes[r], row[r] + bytes_offset, sizeof(packed.bytes[r]));
    std::memcpy(&packed.scale[r], row[r] + half_offset, sizeof(packed.scale[r]));
  }
  return packed;
}

// Those of groups 4 * kHalf to 4 * kHalf + 3: even ones for the first 16 elements of each, odd ones for the
// last.
template <int kHalf, int kOdd>
inline Scales unpack_signed_scales(const SignedScales& packed) {
  uint32_t bytes[4] = {};
  for (int r = 0; r < 4; ++r)
    for (int g = 0; g < 4; ++g)
      bytes[r] |= static_cast<uint32_t>(packed.bytes[r][8 * kHalf + kOdd + 2 * g]) << (8 * g);
  return scale_bytes<true>(bytes, packed.scale);
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
