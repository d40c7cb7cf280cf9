// SPDX-License-Identifier: Apache-2.0
// decode_simd.h for AVX-512: four lanes a vector, VNNI where there is one.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kLaneBlocks = 4;
using Bytes = __m512i;
using Ints = __m512i;
using Floats = __m512;

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Floats zero_floats() { return _mm512_setzero_ps(); }
inline Bytes broadcast_byte(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline void prefetch(const uint8_t* p) { _mm_prefetch(p, _MM_HINT_T0); }
inline Bytes load_activations(const int8_t* q) { return _mm512_load_si512(q); }

inline Bytes flip_sign_bits(Bytes v) { return _mm512_xor_si512(v, broadcast_byte(0x80)); }

// 16 bytes at offset from each of four blocks.
inline Bytes load_lanes(const uint8_t* const* block, int offset) {
  const auto load = [offset](const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + offset));
  };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(block[0])), load(block[1]), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(block[2])), load(block[3]), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline Bytes low_nibbles(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(0x0F)); }
inline Bytes high_nibbles(Bytes v) {
#if defined(__GFNI__)
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x1020408000000000), 0);
#else
  return low_nibbles(_mm512_srli_epi16(v, 4));
#endif
}

// Adds 16 to byte i of lane b where bit (first + i) of the word at offset of block b is set.
template <int kFirst>
inline Bytes add_fifth_bits(Bytes v, const uint8_t* const* block, int offset) {
  uint64_t mask = 0;
  for (int b = 3; b >= 0; --b) {
    uint16_t bits;
    std::memcpy(&bits, block[b] + offset + kFirst / 8, sizeof(bits));
    mask = mask << 16 | bits;
  }
  return _mm512_or_si512(v, _mm512_maskz_set1_epi8(mask, 16));
}

// Lane l: 16 bytes at p + 16 * kChunk_l.
template <int k0, int k1, int k2, int k3>
inline Bytes load_chunks(const uint8_t* p, int /*part*/) {
  if constexpr (k0 == k1 && k1 == k2 && k2 == k3)
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * k0)));
  const __m512i all = _mm512_loadu_si512(p);
  return _mm512_shuffle_i32x4(all, all, k0 | k1 << 2 | k2 << 4 | k3 << 6);
}

// Lane l: kBits bits of each byte from bit k_l on, moved to bit kTo.
template <int k0, int k1, int k2, int k3, int kBits, int kTo>
inline Bytes extract_bits(Bytes v, int /*part*/) {
#if defined(__GFNI__)
  // Row 7 - i of a byte's bit matrix selects what becomes bit i.
  const auto matrix = [](int from) {
    uint64_t rows = 0;
    for (int bit = 0; bit < kBits; ++bit) rows |= uint64_t{1} << (from + bit) << 8 * (7 - kTo - bit);
    return static_cast<int64_t>(rows);
  };
  const int64_t m0 = matrix(k0), m1 = matrix(k1), m2 = matrix(k2), m3 = matrix(k3);
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_setr_epi64(m0, m0, m1, m1, m2, m2, m3, m3), 0);
#else
  const __m512i shifts = _mm512_setr_epi32(k0, k0, k0, k0, k1, k1, k1, k1, k2, k2, k2, k2, k3, k3, k3, k3);
  const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(v, shifts), broadcast_byte((1 << kBits) - 1));
  return _mm512_slli_epi32(low, kTo);
#endif
}

inline Bytes or_bytes(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }

// Whether dot() takes any unsigned byte; else 16-bit sums of two products limit it to 128.
#if defined(__AVX512VNNI__)
constexpr bool kDotTakesAnyByte = true;
#else
constexpr bool kDotTakesAnyByte = false;
#endif

// acc + sums of four products, u unsigned, s signed.
inline Ints dot(Ints acc, Bytes u, Bytes s) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(acc, u, s);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
#endif
}

// The same for signed w, any value. s is in -127..127.
inline Ints dot_signed(Ints acc, Bytes w, Bytes s) {
  // |w| <= 128 as unsigned, so two products fit 16 bits: 2 * 128 * 127 < 2^15.
  const __mmask64 negative = _mm512_movepi8_mask(w);
  return dot(acc, _mm512_abs_epi8(w), _mm512_mask_sub_epi8(s, negative, _mm512_setzero_si512(), s));
}

inline Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Floats mul_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// One float for each of four groups of four weight rows: lane 4 * row + group.
struct Scales {
  __m512 v;
};

inline Scales zero_scales() { return {_mm512_setzero_ps()}; }
inline Scales multiply(Scales a, const float* group) {
  return {_mm512_mul_ps(a.v, _mm512_broadcast_f32x4(_mm_load_ps(group)))};
}
inline void mul_add(Scales& acc, Scales a, const float* group) {
  acc.v = _mm512_fmadd_ps(a.v, _mm512_broadcast_f32x4(_mm_load_ps(group)), acc.v);
}
inline Floats expand(Scales a, int row, int /*part*/) {
  const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(4 * row)), a.v);
}
// Sums of four rows: all lanes of rows[r], and the four groups of extra's row r.
inline void sum_rows(const Floats* rows, Scales extra, float* sums) {
  const auto add_pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512 rows01 = add_pairs(rows[0], rows[1]);  // 0 1 0 1 in each lane of 128 bits
  const __m512 rows23 = add_pairs(rows[2], rows[3]);
  const __m512 lanes = _mm512_add_ps(_mm512_shuffle_ps(rows01, rows23, _MM_SHUFFLE(1, 0, 1, 0)),
                                     _mm512_shuffle_ps(rows01, rows23, _MM_SHUFFLE(3, 2, 3, 2)));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
  const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  __m512 pairs = _mm512_add_ps(extra.v, _mm512_permute_ps(extra.v, _MM_SHUFFLE(2, 3, 0, 1)));
  pairs = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, _MM_SHUFFLE(1, 0, 3, 2)));
  const __m512 first_of_rows = _mm512_maskz_compress_ps(0x1111, pairs);
  _mm_storeu_ps(sums, _mm_add_ps(sum, _mm512_castps512_ps128(first_of_rows)));
}

// The halves that begin blocks (kHalves = 1: scale; 2: scale and minimum) of four consecutive blocks of
// kBytes in four rows; only the first `valid` blocks exist.
template <int kBytes, int kHalves, bool kPartial>
inline void load_headers(const uint8_t* const* row, int valid, Scales& scale, Scales& minimum) {
  // Blocks 0 and 1 are in the 64 bytes at 0, and blocks 2 and 3 in those at kSecond; both end within the four
  // blocks.
  constexpr int kBlocksInFirst = 2 * kBytes < 64 && 3 * kBytes + 4 <= 64 ? 4 : 2;
  constexpr int kSecond = 4 * kBytes - 64 < 2 * kBytes ? 4 * kBytes - 64 : 2 * kBytes;
  const auto load = [&](const uint8_t* p, int offset) {
    if constexpr (kPartial) {
      const int bytes = valid * kBytes - offset;
      const __mmask64 mask = bytes >= 64 ? ~0ull : bytes <= 0 ? 0ull : (1ull << bytes) - 1;
      return _mm512_maskz_loadu_epi8(mask, p + offset);
    } else {
      return _mm512_loadu_si512(p + offset);
    }
  };
  // Words of the scales go to word 4 * row + block, those of the minima 16 words further.
  const auto word = [](int block, int half) {
    return static_cast<short>((block * kBytes - (kBlocksInFirst == 2 && block >= 2 ? kSecond : 0)) / 2 +
                              half);
  };
  const __m128i scales = _mm_set_epi16(word(3, 0), word(2, 0), word(1, 0), word(0, 0), word(3, 0), word(2, 0),
                                       word(1, 0), word(0, 0));
  const __m128i minima = _mm_set_epi16(word(3, 1), word(2, 1), word(1, 1), word(0, 1), word(3, 1), word(2, 1),
                                       word(1, 1), word(0, 1));
  const __m512i index = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(scales)),
                                           _mm256_broadcastsi128_si256(minima), 1);
  __m512i words = _mm512_setzero_si512();
  for (int r = 0; r < 4; ++r) {
    const __mmask32 lanes = (0x000F000Fu << (4 * r));
    if constexpr (kBlocksInFirst == 4) {
      words = _mm512_mask_permutexvar_epi16(words, lanes, index, load(row[r], 0));
    } else {
      words = _mm512_mask_permutexvar_epi16(words, lanes & 0x33333333u, index, load(row[r], 0));
      words = _mm512_mask_permutexvar_epi16(words, lanes & 0xCCCCCCCCu, index, load(row[r], kSecond));
    }
  }
  scale.v = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
  if constexpr (kHalves == 2) minimum.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
}

// The 16 bytes that begin a Q4_K or Q5_K block (two halves, then packed scales and minima) of four rows, one
// a lane.
struct PackedScales {
  __m512i bytes;
  __m512 scale, minimum;  // the halves, on all floats of the row's lane
};

inline PackedScales load_packed_scales(const uint8_t* const* row) {
  PackedScales packed;
  packed.bytes = load_lanes(row, 0);
  const __m128i rows = _mm_set_epi16(8, 8, 8, 8, 0, 0, 0, 0);
  const __m256i scales = _mm256_set_m128i(_mm_add_epi16(rows, _mm_set1_epi16(16)), rows);
  const __m512i index =
      _mm512_inserti64x4(_mm512_castsi256_si512(scales), _mm256_add_epi16(scales, _mm256_set1_epi16(1)), 1);
  const __m512i halves = _mm512_permutexvar_epi16(index, packed.bytes);
  packed.scale = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  packed.minimum = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  return packed;
}

// Scales and (negative) minima of groups 4 * kHalf to 4 * kHalf + 3. base/dequantize.cc describes the
// packing.
template <int kHalf>
inline void unpack_scales(const PackedScales& packed, Scales& scale, Scales& minimum) {
  __m512i six_bits;  // words 1 and 2 of a lane: four scales, four minima
  if constexpr (kHalf == 0) {
    six_bits = _mm512_and_si512(packed.bytes, broadcast_byte(0x3F));
  } else {
    const __m512i word3 =
        _mm512_shuffle_epi32(packed.bytes, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(3, 3, 3, 3)));
    const __m512i low = low_nibbles(_mm512_srlv_epi32(word3, _mm512_set1_epi64(int64_t{4})));
    const __m512i low_of_scales =
        _mm512_shuffle_epi32(low, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(1, 0, 1, 0)));
    const __m512i high = _mm512_and_si512(_mm512_srli_epi32(packed.bytes, 2), broadcast_byte(0x30));
    six_bits = _mm512_or_si512(low_of_scales, high);
  }
  const auto widen = [&](int word) {
    const char first = static_cast<char>(4 * word);
    const char none = -1;
    const __m128i pick = _mm_setr_epi8(first, none, none, none, static_cast<char>(first + 1), none, none,
                                       none, static_cast<char>(first + 2), none, none, none,
                                       static_cast<char>(first + 3), none, none, none);
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(six_bits, _mm512_broadcast_i32x4(pick)));
  };
  scale.v = _mm512_mul_ps(widen(1), packed.scale);
  minimum.v = _mm512_fnmadd_ps(widen(2), packed.minimum, _mm512_setzero_ps());
}

// The 16 signed scales and the half of a Q6_K block of four rows.
struct SignedScales {
  __m512i bytes;
  __m512 scale;
};

inline SignedScales load_signed_scales(const uint8_t* const* row, int bytes_offset, int half_offset) {
  uint16_t half[4];
  for (int r = 0; r < 4; ++r) std::memcpy(&half[r], row[r] + half_offset, sizeof(half[r]));
  const uint64_t four =
      uint64_t{half[0]} | uint64_t{half[1]} << 16 | uint64_t{half[2]} << 32 | uint64_t{half[3]} << 48;
  const __m128 scale = _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(four)));
  const __m512i rows = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  return {load_lanes(row, bytes_offset), _mm512_permutexvar_ps(rows, _mm512_castps128_ps512(scale))};
}

// Those of groups 4 * kHalf to 4 * kHalf + 3: even ones for the first 16 elements of each, odd ones for the
// last.
template <int kHalf, int kOdd>
inline Scales unpack_signed_scales(const SignedScales& packed) {
  const char none = -1;
  const char b = 8 * kHalf + kOdd;
  const __m128i pick = _mm_setr_epi8(none, none, none, b, none, none, none, b + 2, none, none, none, b + 4,
                                     none, none, none, b + 6);
  const __m512i top = _mm512_shuffle_epi8(packed.bytes, _mm512_broadcast_i32x4(pick));
  return {_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)), packed.scale)};
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
