// SPDX-License-Identifier: Apache-2.0
// Vectors for the CPU kernels: what Highway gives, and the few things that it does not (bf16 dot products,
// the exponential, sums over many vectors at once). Included by *_isa.cc only, which are compiled once per
// instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "hwy/highway.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if !defined(KASCADE_ISA)
#error "compiled outside kascade_isa_sources()"
#endif

namespace kascade::KASCADE_ISA {

namespace hn = hwy::HWY_NAMESPACE;

using TagF = hn::ScalableTag<float>;
using TagU = hn::ScalableTag<uint32_t>;
using TagI = hn::ScalableTag<int32_t>;
using VecF = hn::Vec<TagF>;
using VecU = hn::Vec<TagU>;
using VecI = hn::Vec<TagI>;

// Lanes of a float vector; every instruction set that is compiled has a fixed width.
constexpr int kLanes = static_cast<int>(hn::MaxLanes(TagF()));

constexpr float kMinusInfinity = -__builtin_inff();

HWY_INLINE VecF load(const float* p) { return hn::LoadU(TagF(), p); }
HWY_INLINE VecU load(const uint32_t* p) { return hn::LoadU(TagU(), p); }
HWY_INLINE VecI load(const int32_t* p) { return hn::LoadU(TagI(), p); }
HWY_INLINE void store(VecF v, float* p) { hn::StoreU(v, TagF(), p); }
HWY_INLINE void store(VecU v, uint32_t* p) { hn::StoreU(v, TagU(), p); }
HWY_INLINE void store(VecI v, int32_t* p) { hn::StoreU(v, TagI(), p); }
HWY_INLINE VecF broadcast(float x) { return hn::Set(TagF(), x); }
HWY_INLINE VecU broadcast(uint32_t x) { return hn::Set(TagU(), x); }
HWY_INLINE VecI broadcast(int32_t x) { return hn::Set(TagI(), x); }
HWY_INLINE VecF zero() { return hn::Zero(TagF()); }

/// The first `count` lanes of p, zeros after them; nothing past them is read.
HWY_INLINE VecF load_first(const float* p, int count) {
  if (count >= kLanes) return load(p);
  if (count <= 0) return zero();
  return hn::MaskedLoad(hn::FirstN(TagF(), static_cast<size_t>(count)), TagF(), p);
}
HWY_INLINE void store_first(VecF v, float* p, int count) {
  if (count >= kLanes) return store(v, p);
  hn::BlendedStore(v, hn::FirstN(TagF(), static_cast<size_t>(count)), TagF(), p);
}

/// Storage types of keys and values. half and bfloat are bits.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

HWY_INLINE VecF load_as_float(const float* p) { return load(p); }
HWY_INLINE VecF load_as_float(const Bfloat* p) {
  const hn::Rebind<uint16_t, TagU> d16;
  const auto bits = hn::PromoteTo(TagU(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(TagF(), hn::ShiftLeft<16>(bits));
}
HWY_INLINE VecF load_as_float(const Half* p) {
#if HWY_TARGET == HWY_SCALAR
  // Highway's own conversion makes NaN and infinity finite.
  const uint32_t magnitude = static_cast<uint32_t>(p->bits & 0x7FFF) << 13;
  const uint32_t sign = static_cast<uint32_t>(p->bits & 0x8000) << 16;
  float value;
  __builtin_memcpy(&value, &magnitude, sizeof(value));
  value *= 0x1p112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if (magnitude >= 0x0F800000u) bits |= 0x7F800000u;
  return hn::BitCast(TagF(), broadcast(bits | sign));
#else
  const hn::Rebind<hwy::float16_t, TagF> d16;
  return hn::PromoteTo(TagF(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

/// Row tails: head dims are multiples of 8, so only vectors of 16 have them, and those are half full.
template <class Stored>
HWY_INLINE VecF load_as_float(const Stored* p, int count) {
  if (count >= kLanes) return load_as_float(p);
  alignas(64) Stored padded[kLanes] = {};
  for (int i = 0; i < count; ++i) padded[i] = p[i];
  return load_as_float(padded);
}

/// 2^x for x <= 0 (or slightly above): 0 for -inf and from about -126 on, NaN for NaN, exactly 1 for 0.
/// Relative error below 2e-7.
HWY_INLINE VecF exp2_nonpositive(VecF x) {
#if defined(__AVX512F__)
  // -inf is let through: the polynomial then is NaN in lanes that the mask clears.
  const __mmask16 in_range = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const VecF n{_mm512_roundscale_ps(x.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  const VecF r = hn::Sub(x, n);
#else
  const auto in_range = hn::Not(hn::Lt(x, broadcast(-126.0f)));
  const VecF clamped = hn::IfThenElse(in_range, x, zero());
  const VecF n = hn::Round(clamped);
  const VecF r = hn::Sub(clamped, n);
#endif
  // 2^r = 1 + r q(r) on [-1/2, 1/2], q fitted for the least largest relative error (9e-8).
  VecF p = broadcast(1.3264739e-3f);
  p = hn::MulAdd(p, r, broadcast(9.67151672e-3f));
  p = hn::MulAdd(p, r, broadcast(5.55073358e-2f));
  p = hn::MulAdd(p, r, broadcast(2.40222424e-1f));
  p = hn::MulAdd(p, r, broadcast(6.93147004e-1f));
  p = hn::MulAdd(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return VecF{_mm512_maskz_scalef_ps(in_range, p.raw, n.raw)};
#else
  const VecI exponent = hn::ShiftLeft<23>(hn::ConvertTo(TagI(), n));
  const VecF scaled = hn::BitCast(TagF(), hn::Add(hn::BitCast(TagI(), p), exponent));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElseZero(in_range, scaled));
#endif
}

#if defined(__AVX512F__)
/// Lane 4 b + i is the sum of the four lanes of block b of v[i], i in 0..3.
HWY_INLINE VecF block_sums_of(const VecF* v) {
  // Each step adds two vectors into one of which every half of a block belongs to one of the two. Blends run
  // on any pipe, so a step shuffles only once.
  const auto halves = [](VecF a, VecF b) {  // lanes a a b b
    return _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a.raw, b.raw), _mm512_shuffle_ps(a.raw, b.raw, 0x4E));
  };
  const auto quarters = [](__m512 ab, __m512 cd) {  // lanes a c b d
    return _mm512_add_ps(_mm512_mask_blend_ps(0xAAAA, ab, cd),
                         _mm512_permute_ps(_mm512_mask_blend_ps(0xAAAA, cd, ab), 0xB1));
  };
  return VecF{quarters(halves(v[0], v[2]), halves(v[1], v[3]))};
}
#endif

/// Lane i is the sum of the lanes of v[i]. The order of the additions is the same for every i.
HWY_INLINE VecF sums_of(const VecF* v) {
#if HWY_TARGET == HWY_SCALAR
  return v[0];
#elif defined(__AVX512F__)
  // As above, with halves of the vector.
  const auto four = [](const VecF* p) { return block_sums_of(p).raw; };
  const auto block_halves = [](__m512 p, __m512 q) {  // blocks p p q q
    return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, p, q), _mm512_shuffle_f32x4(p, q, 0x4E));
  };
  const __m512 pq = block_halves(four(v), four(v + 8)), rt = block_halves(four(v + 4), four(v + 12));
  const __m512 crossed = _mm512_mask_blend_ps(0xF0F0, rt, pq);
  return VecF{
      _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, pq, rt), _mm512_shuffle_f32x4(crossed, crossed, 0xB1))};
#else
  const TagF d;
  const hn::Repartition<double, TagF> d64;
  VecF four[kLanes / 4];
  for (int i = 0; i < kLanes / 4; ++i) {
    const VecF* a = v + 4 * i;
    const VecF ab = hn::Add(hn::InterleaveLower(d, a[0], a[1]), hn::InterleaveUpper(d, a[0], a[1]));
    const VecF ce = hn::Add(hn::InterleaveLower(d, a[2], a[3]), hn::InterleaveUpper(d, a[2], a[3]));
    const auto x = hn::BitCast(d64, ab), y = hn::BitCast(d64, ce);
    four[i] = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, x, y)),
                      hn::BitCast(d, hn::InterleaveUpper(d64, x, y)));
  }
#if HWY_MAX_BYTES == 32
  return hn::Add(hn::ConcatLowerLower(d, four[1], four[0]), hn::ConcatUpperUpper(d, four[1], four[0]));
#else
  return four[0];
#endif
#endif
}

HWY_INLINE float sum_of(VecF v) { return hn::GetLane(hn::SumOfLanes(TagF(), v)); }
HWY_INLINE float max_of(VecF v) { return hn::GetLane(hn::MaxOfLanes(TagF(), v)); }

#if defined(__AVX512BF16__)

/// acc + a.even * b.even + a.odd * b.odd of pairs of bf16, summed in fp32.
HWY_INLINE VecF dot_pairs(VecF acc, VecU a, VecU b) {
  return VecF{
      _mm512_dpbf16_ps(acc.raw, reinterpret_cast<__m512bh>(a.raw), reinterpret_cast<__m512bh>(b.raw))};
}
/// Lane i holds (low[i], high[i]) rounded to bf16.
HWY_INLINE VecU pair_up(VecF low, VecF high) {
  const __m512i packed = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.raw, low.raw));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return VecU{_mm512_permutexvar_epi16(order, packed)};
}
/// 32 consecutive floats rounded to bf16, in order.
HWY_INLINE VecU round_to_bfloat(VecF low, VecF high) {
  return VecU{reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.raw, low.raw))};
}
/// 32 elements of two rows: low and high get the pairs (a[i], b[i]) of elements 0..15 and 16..31.
HWY_INLINE void interleave_rows(VecU a, VecU b, VecU* low, VecU* high) {
  const __m512i low_order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                             7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high_order = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24,
                                              55, 23, 54, 22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  *low = VecU{_mm512_permutex2var_epi16(a.raw, low_order, b.raw)};
  *high = VecU{_mm512_permutex2var_epi16(a.raw, high_order, b.raw)};
}
/// The 8 elements at p, in all four blocks.
HWY_INLINE VecU broadcast_block(const void* p) {
  return VecU{_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
/// Block m to p[m], m in 0..3.
HWY_INLINE void store_blocks(VecF v, float* const* p) {
  _mm_storeu_ps(p[0], _mm512_castps512_ps128(v.raw));
  _mm_storeu_ps(p[1], _mm512_extractf32x4_ps(v.raw, 1));
  _mm_storeu_ps(p[2], _mm512_extractf32x4_ps(v.raw, 2));
  _mm_storeu_ps(p[3], _mm512_extractf32x4_ps(v.raw, 3));
}
/// Elements [0, count) of 32, zeros after them; count is a multiple of 8.
HWY_INLINE VecU load_pairs(const Bfloat* p, int count) {
  if (count >= 32) return VecU{_mm512_loadu_si512(p)};
  if (count <= 0) return VecU{_mm512_setzero_si512()};
  return VecU{_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1), p)};
}

#else

// Declared for the code that is never instantiated without them (math.h: BfloatMath).
VecF dot_pairs(VecF acc, VecU a, VecU b);
VecU pair_up(VecF low, VecF high);
VecU round_to_bfloat(VecF low, VecF high);
void interleave_rows(VecU a, VecU b, VecU* low, VecU* high);
VecU broadcast_block(const void* p);
#if !defined(__AVX512F__)
VecF block_sums_of(const VecF* v);
#endif
void store_blocks(VecF v, float* const* p);
VecU load_pairs(const Bfloat* p, int count);

#endif

/// The floats that the low and the high halves of pairs of bf16 stand for.
HWY_INLINE VecF low_halves(VecU pairs) { return hn::BitCast(TagF(), hn::ShiftLeft<16>(pairs)); }
HWY_INLINE VecF high_halves(VecU pairs) {
  return hn::BitCast(TagF(), hn::And(pairs, broadcast(0xFFFF0000u)));
}

}  // namespace kascade::KASCADE_ISA
