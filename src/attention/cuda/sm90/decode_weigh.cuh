// SPDX-License-Identifier: Apache-2.0
// Pooled weights of keys from the stored scores of a decode call, what orders them, and its upper bits.
#pragma once

#include <cstdint>

#include "attention/cuda/common/call.h"
#include "base/cuda/ptx/mma.cuh"

namespace kascade::cuda {

// Neighbouring keys that a thread takes at once.
constexpr int kVector = 8;

/// A row whose weights are pooled.
struct PooledRow {
  uint32_t begin;  // of its scores, in chunks: 2^32 of them are more than the memory of any GPU takes
  float lse;       // log2
};

/// Scores of kVector neighbouring keys of a row.
struct Scores {
  uint4 codes;
  float top;
};

/// Those of keys [key, key + kVector); key is a multiple of kVector.
__device__ inline Scores load_scores(const DecodeCall& call, const PooledRow& row, int32_t key) {
  const uint16_t* codes = call.score_codes + static_cast<uint32_t>(key);
  const float* tops = call.score_tops + static_cast<uint32_t>(key) / kChunkKeys;
  return {__ldcs(reinterpret_cast<const uint4*>(codes + uint64_t{row.begin} * kChunkKeys)),
          __ldcs(tops + row.begin)};
}

/// 2^(-code / kScoreSteps), where the code is the low or high half of a word; kScoreFarBelow gives 0.
template <bool high>
__device__ inline float power_of(uint32_t codes) {
  // 2^23 + code as a float, without the slow integer conversion; the product and the sum are exact.
  const float shifted = __uint_as_float(__byte_perm(codes, 0x4B000000u, high ? 0x7432 : 0x7410));
  return exp2_fast(fmaf(shifted, -1.0f / kScoreSteps, 8388608.0f / kScoreSteps));
}

/// a b + c, 0 instead of a denormal number: powers are flushed too, and in the order of the weights.
__device__ inline float add_flushed(float a, float b, float c) {
  float sum;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

/// Adds a row's weights to those of the keys.
__device__ inline void add_scores(float (&sum)[kVector], const Scores& scores, float lse) {
  const float factor = exp2_fast(scores.top - lse);
  const uint32_t pairs[4] = {scores.codes.x, scores.codes.y, scores.codes.z, scores.codes.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum[2 * e] = add_flushed(power_of<false>(pairs[e]), factor, sum[2 * e]);
    sum[2 * e + 1] = add_flushed(power_of<true>(pairs[e]), factor, sum[2 * e + 1]);
  }
}

/// The weight of one key, from its memory alone, by the operations of add_scores(); not inlined, as few want
/// it.
static __device__ __noinline__ float weight_of(const DecodeCall& call, const PooledRow* rows, int32_t count,
                                               int32_t key) {
  float sum = 0;
#pragma unroll 8
  for (int32_t i = 0; i < count; ++i) {
    const PooledRow row = rows[i];
    const uint64_t at = uint64_t{row.begin} * kChunkKeys + static_cast<uint32_t>(key);
    sum = add_flushed(power_of<false>(call.score_codes[at]),
                      exp2_fast(call.score_tops[at / kChunkKeys] - row.lse), sum);
  }
  return sum;
}

// Rank keys have 31 bits; a bin of a histogram holds those that agree in the upper 15. Which bins there are
// depends on the window: `base` are the upper bits of its second bin; what is below the window is in the
// first. A digit is an eighth of a bin and has 15 bits; 0 stands for keys that are not ranked.
constexpr int kBinShift = 16;
constexpr int kDigitShift = 13;
constexpr uint32_t kMostDigit = 0x7FFF;
// Upper bits of an infinite weight, plus one.
constexpr int32_t kMostBin = (0x7F800001 >> kBinShift) + 1;

/// Orders weights (never negative) as the ranking does, NaN lowest.
__device__ inline uint32_t rank_key(float weight) {
  return weight != weight ? 0 : __float_as_uint(weight) + 1;
}
/// Where the rank key of a weight is in the window: its bin in the upper half of the word, its digit above
/// bit kDigitShift. 0 and NaN are in the same place.
__device__ inline uint32_t place_in_window(float weight, int32_t base) {
  const int32_t place =
      static_cast<int32_t>(__float_as_uint(fmaxf(weight, 0))) + 1 + ((1 - base) << kBinShift);
  return static_cast<uint32_t>(
      min(max(place, 1 << kDigitShift), static_cast<int32_t>(((kMostDigit + 1) << kDigitShift) - 1)));
}

/// Digits of kVector keys, given in the upper halves of words, as they are kept: the first four in the lower
/// halves.
__device__ inline uint4 pack_digits(const uint32_t (&shifted)[kVector]) {
  constexpr int kUpperHalves = 0x7632;
  return make_uint4(
      __byte_perm(shifted[0], shifted[4], kUpperHalves), __byte_perm(shifted[1], shifted[5], kUpperHalves),
      __byte_perm(shifted[2], shifted[6], kUpperHalves), __byte_perm(shifted[3], shifted[7], kUpperHalves));
}
__device__ inline uint32_t digit_at(uint4 digits, int e) {
  const uint32_t word = (e & 3) == 0   ? digits.x
                        : (e & 3) == 1 ? digits.y
                        : (e & 3) == 2 ? digits.z
                                       : digits.w;
  return e < 4 ? word & 0xFFFFu : word >> 16;
}
/// Bit e: digit e is at least `least`, which has 15 bits.
__device__ inline uint32_t at_least(uint4 digits, uint32_t least) {
  constexpr uint32_t kGuards = 0x80008000u;
  const uint32_t both = least * 0x10001u;
  // A digit's guard bit survives the subtraction if the digit is large enough.
  const uint32_t bits =
      ((((digits.x | kGuards) - both) & kGuards) >> 15) | ((((digits.y | kGuards) - both) & kGuards) >> 14) |
      ((((digits.z | kGuards) - both) & kGuards) >> 13) | ((((digits.w | kGuards) - both) & kGuards) >> 12);
  return (bits | bits >> 12) & 0xFFu;
}

}  // namespace kascade::cuda
