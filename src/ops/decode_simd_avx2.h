// SPDX-License-Identifier: Apache-2.0
// decode_simd.h for AVX2: two lanes a vector.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kLaneBlocks = 2;
using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;

inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Floats zero_floats() { return _mm256_setzero_ps(); }
inline Bytes broadcast_byte(uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline void prefetch(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline Bytes load_activations(const int8_t* q) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(q));
}

inline Bytes flip_sign_bits(Bytes v) { return _mm256_xor_si256(v, broadcast_byte(0x80)); }

// 16 bytes at offset from each of two blocks.
inline Bytes load_lanes(const uint8_t* const* block, int offset) {
  return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(block[1] + offset),
                             reinterpret_cast<const __m128i*>(block[0] + offset));
}

inline Bytes low_nibbles(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(0x0F)); }
inline Bytes high_nibbles(Bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

// Adds 16 to byte i of lane b where bit (first + i) of the word at offset of block b is set.
template <int kFirst>
inline Bytes add_fifth_bits(Bytes v, const uint8_t* const* block, int offset) {
  uint16_t bits[2];
  for (int b = 0; b < 2; ++b) std::memcpy(&bits[b], block[b] + offset + kFirst / 8, sizeof(bits[b]));
  const __m256i words = _mm256_set_m128i(_mm_set1_epi16(static_cast<short>(bits[1])),
                                         _mm_set1_epi16(static_cast<short>(bits[0])));
  // Bytes 0..7 look at the low byte of the word, 8..15 at the high one.
  const __m256i select = _mm256_set_epi64x(0x0101010101010101, 0, 0x0101010101010101, 0);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i set = _mm256_and_si256(_mm256_shuffle_epi8(words, select), bit);
  const __m256i high = _mm256_and_si256(_mm256_cmpeq_epi8(set, bit), _mm256_set1_epi8(16));
  return _mm256_or_si256(v, high);
}

// Lane l of four, two a part: 16 bytes at p + 16 * kChunk_l.
template <int k0, int k1, int k2, int k3>
inline Bytes load_chunks(const uint8_t* p, int part) {
  const auto* chunks = reinterpret_cast<const __m128i*>(p);
  return part == 0 ? _mm256_loadu2_m128i(chunks + k1, chunks + k0)
                   : _mm256_loadu2_m128i(chunks + k3, chunks + k2);
}

// Lane l: kBits bits of each byte from bit k_l on, moved to bit kTo.
template <int k0, int k1, int k2, int k3, int kBits, int kTo>
inline Bytes extract_bits(Bytes v, int part) {
  const __m256i shifts = part == 0 ? _mm256_setr_epi32(k0, k0, k0, k0, k1, k1, k1, k1)
                                   : _mm256_setr_epi32(k2, k2, k2, k2, k3, k3, k3, k3);
  const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(v, shifts), broadcast_byte((1 << kBits) - 1));
  return _mm256_slli_epi32(low, kTo);
}

inline Bytes or_bytes(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }

// Whether dot() takes any unsigned byte; else 16-bit sums of two products limit it to 128.
constexpr bool kDotTakesAnyByte = false;

// acc + sums of four products, u unsigned, s signed.
inline Ints dot(Ints acc, Bytes u, Bytes s) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}

// The same for signed w, any value. s is in -127..127.
inline Ints dot_signed(Ints acc, Bytes w, Bytes s) {
  // |w| <= 128 as unsigned, so two products fit 16 bits: 2 * 128 * 127 < 2^15.
  return dot(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
}

inline Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Floats mul_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// One float for each of four groups of four weight rows.
struct Scales {
  __m128 row[4];
};

inline Scales zero_scales() {
  Scales a;
  for (__m128& row : a.row) row = _mm_setzero_ps();
  return a;
}
inline Scales multiply(Scales a, const float* group) {
  for (__m128& row : a.row) row = _mm_mul_ps(row, _mm_load_ps(group));
  return a;
}
inline void mul_add(Scales& acc, const Scales& a, const float* group) {
  for (int r = 0; r < 4; ++r) acc.row[r] = _mm_fmadd_ps(a.row[r], _mm_load_ps(group), acc.row[r]);
}
inline Floats expand(const Scales& a, int row, int part) {
  const __m256i lanes =
      part == 0 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1) : _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3);
  return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(a.row[row]), lanes);
}
// Sums of four rows: all lanes of rows[r], and the four groups of extra's row r.
inline void sum_rows(const Floats* rows, const Scales& extra, float* sums) {
  for (int r = 0; r < 4; ++r) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(rows[r]), _mm256_extractf128_ps(rows[r], 1));
    const __m128 four = _mm_add_ps(half, extra.row[r]);
    const __m128 pairs = _mm_add_ps(four, _mm_movehl_ps(four, four));
    sums[r] = _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
  }
}

// The halves that begin blocks (kHalves = 1: scale; 2: scale and minimum) of four consecutive blocks of
// kBytes in four rows; only the first `valid` blocks exist.
template <int kBytes, int kHalves, bool kPartial>
inline void load_headers(const uint8_t* const* row, int valid, Scales& scale, Scales& minimum) {
  const int blocks = kPartial ? valid : 4;
  for (int r = 0; r < 4; ++r) {
    uint64_t scales = 0;
    uint64_t minima = 0;
    for (int b = 0; b < blocks; ++b) {
      uint16_t halves[2];
      std::memcpy(halves, row[r] + b * kBytes, sizeof(halves));
      scales |= uint64_t{halves[0]} << (16 * b);
      minima |= uint64_t{halves[1]} << (16 * b);
    }
    scale.row[r] = _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(scales)));
    if constexpr (kHalves == 2)
      minimum.row[r] = _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(minima)));
  }
}

// Four bytes of each row times the row's half.
template <bool kSigned>
inline Scales scale_bytes(const uint32_t* bytes, const uint16_t* halves) {
  Scales a;
  for (int r = 0; r < 4; ++r) {
    const __m128i packed = _mm_cvtsi32_si128(static_cast<int>(bytes[r]));
    const __m128i wide = kSigned ? _mm_cvtepi8_epi32(packed) : _mm_cvtepu8_epi32(packed);
    const __m128 half = _mm_cvtph_ps(_mm_cvtsi32_si128(halves[r]));
    a.row[r] = _mm_mul_ps(_mm_cvtepi32_ps(wide), _mm_broadcastss_ps(half));
  }
  return a;
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
