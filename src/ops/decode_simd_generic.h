// SPDX-License-Identifier: Apache-2.0
// decode_simd.h in plain loops: one lane a vector.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/half.h"

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kLaneBlocks = 1;
struct Bytes {
  uint8_t v[16];
};
struct Ints {
  int32_t v[4];
};
struct Floats {
  float v[4];
};

inline Ints zero_ints() { return {}; }
inline Floats zero_floats() { return {}; }
inline Bytes broadcast_byte(uint8_t value) {
  Bytes a;
  for (uint8_t& byte : a.v) byte = value;
  return a;
}
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
inline Bytes load_activations(const int8_t* q) {
  Bytes a;
  std::memcpy(a.v, q, sizeof(a.v));
  return a;
}

inline Bytes flip_sign_bits(Bytes a) {
  for (uint8_t& byte : a.v) byte ^= 0x80;
  return a;
}

// 16 bytes at offset from the block.
inline Bytes load_lanes(const uint8_t* const* block, int offset) {
  Bytes a;
  std::memcpy(a.v, block[0] + offset, sizeof(a.v));
  return a;
}

inline Bytes low_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte &= 0x0F;
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>(byte >> 4);
  return a;
}

// Adds 16 to byte i where bit (first + i) of the word at offset of the block is set.
template <int kFirst>
inline Bytes add_fifth_bits(Bytes a, const uint8_t* const* block, int offset) {
  uint16_t bits;
  std::memcpy(&bits, block[0] + offset + kFirst / 8, sizeof(bits));
  for (int i = 0; i < 16; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] | (bits >> i & 1) << 4);
  return a;
}

// Lane l of four, one a part: 16 bytes at p + 16 * kChunk_l.
template <int k0, int k1, int k2, int k3>
inline Bytes load_chunks(const uint8_t* p, int part) {
  Bytes a;
  std::memcpy(a.v, p + 16 * (part == 0 ? k0 : part == 1 ? k1 : part == 2 ? k2 : k3), sizeof(a.v));
  return a;
}

// Lane l: kBits bits of each byte from bit k_l on, moved to bit kTo.
template <int k0, int k1, int k2, int k3, int kBits, int kTo>
inline Bytes extract_bits(Bytes a, int part) {
  const int from = part == 0 ? k0 : part == 1 ? k1 : part == 2 ? k2 : k3;
  for (uint8_t& byte : a.v) byte = static_cast<uint8_t>((byte >> from & ((1 << kBits) - 1)) << kTo);
  return a;
}

inline Bytes or_bytes(Bytes a, const Bytes& b) {
  for (int i = 0; i < 16; ++i) a.v[i] |= b.v[i];
  return a;
}

// Whether dot() takes any unsigned byte; products of signed bytes are as cheap here.
constexpr bool kDotTakesAnyByte = false;

// acc + sums of four products, u unsigned, s signed.
inline Ints dot(Ints acc, const Bytes& u, const Bytes& s) {
  for (int i = 0; i < 16; ++i) acc.v[i / 4] += u.v[i] * static_cast<int8_t>(s.v[i]);
  return acc;
}

// The same for signed w.
inline Ints dot_signed(Ints acc, const Bytes& w, const Bytes& s) {
  for (int i = 0; i < 16; ++i) acc.v[i / 4] += static_cast<int8_t>(w.v[i]) * static_cast<int8_t>(s.v[i]);
  return acc;
}

inline Ints subtract(Ints a, const Ints& b) {
  for (int i = 0; i < 4; ++i) a.v[i] -= b.v[i];
  return a;
}
inline Floats to_floats(const Ints& a) {
  Floats f;
  for (int i = 0; i < 4; ++i) f.v[i] = static_cast<float>(a.v[i]);
  return f;
}
inline Floats mul_add(const Floats& a, const Floats& b, Floats c) {
  for (int i = 0; i < 4; ++i) c.v[i] += a.v[i] * b.v[i];
  return c;
}

// One float for each of four groups of four weight rows.
struct Scales {
  float v[4][4];
};

inline Scales zero_scales() { return {}; }
inline Scales multiply(Scales a, const float* group) {
  for (auto& row : a.v)
    for (int g = 0; g < 4; ++g) row[g] *= group[g];
  return a;
}
inline void mul_add(Scales& acc, const Scales& a, const float* group) {
  for (int r = 0; r < 4; ++r)
    for (int g = 0; g < 4; ++g) acc.v[r][g] += a.v[r][g] * group[g];
}
inline Floats expand(const Scales& a, int row, int part) {
  const float value = a.v[row][part];
  return {{value, value, value, value}};
}
// Sums of four rows: all lanes of rows[r], and the four groups of extra's row r.
inline void sum_rows(const Floats* rows, const Scales& extra, float* sums) {
  for (int r = 0; r < 4; ++r) {
    const float* a = rows[r].v;
    const float* b = extra.v[r];
    sums[r] = ((a[0] + a[1]) + (a[2] + a[3])) + ((b[0] + b[1]) + (b[2] + b[3]));
  }
}

// The halves that begin blocks (kHalves = 1: scale; 2: scale and minimum) of four consecutive blocks of
// kBytes in four rows; only the first `valid` blocks exist.
template <int kBytes, int kHalves, bool kPartial>
inline void load_headers(const uint8_t* const* row, int valid, Scales& scale, Scales& minimum) {
  const int blocks = kPartial ? valid : 4;
  scale = zero_scales();
  if constexpr (kHalves == 2) minimum = zero_scales();
  for (int r = 0; r < 4; ++r) {
    for (int b = 0; b < blocks; ++b) {
      uint16_t halves[2];
      std::memcpy(halves, row[r] + b * kBytes, sizeof(halves));
      scale.v[r][b] = half_to_float(halves[0]);
      if constexpr (kHalves == 2) minimum.v[r][b] = half_to_float(halves[1]);
    }
  }
}

// Four bytes of each row times the row's half.
template <bool kSigned>
inline Scales scale_bytes(const uint32_t* bytes, const uint16_t* halves) {
  Scales a;
  for (int r = 0; r < 4; ++r) {
    const float half = half_to_float(halves[r]);
    for (int g = 0; g < 4; ++g) {
      const auto byte = static_cast<uint8_t>(bytes[r] >> (8 * g));
      a.v[r][g] = half * static_cast<float>(kSigned ? static_cast<int8_t>(byte) : byte);
    }
  }
  return a;
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
