// SPDX-License-Identifier: Apache-2.0
// Weight panels in the order that bfloat16 dot products read: pairs of columns, all outputs of a pair
// together.
#include "ops/isa_kernels.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace kascade::KASCADE_ISA {
namespace {

// out[i] lane r = in[r] lane i, of 32 bits.
inline void transpose(const __m512i* in, __m512i* out) {
  __m512i a[16];
  __m512i b[16];
  for (int r = 0; r < 16; r += 2) {
    a[r] = _mm512_unpacklo_epi32(in[r], in[r + 1]);
    a[r + 1] = _mm512_unpackhi_epi32(in[r], in[r + 1]);
  }
  // Lane q of b[4 * s + i] holds column 4 * q + i of rows 4 * s to 4 * s + 3.
  for (int s = 0; s < 16; s += 4) {
    b[s] = _mm512_unpacklo_epi64(a[s], a[s + 2]);
    b[s + 1] = _mm512_unpackhi_epi64(a[s], a[s + 2]);
    b[s + 2] = _mm512_unpacklo_epi64(a[s + 1], a[s + 3]);
    b[s + 3] = _mm512_unpackhi_epi64(a[s + 1], a[s + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i even01 = _mm512_shuffle_i32x4(b[i], b[4 + i], _MM_SHUFFLE(2, 0, 2, 0));
    const __m512i odd01 = _mm512_shuffle_i32x4(b[i], b[4 + i], _MM_SHUFFLE(3, 1, 3, 1));
    const __m512i even23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], _MM_SHUFFLE(2, 0, 2, 0));
    const __m512i odd23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], _MM_SHUFFLE(3, 1, 3, 1));
    out[i] = _mm512_shuffle_i32x4(even01, even23, _MM_SHUFFLE(2, 0, 2, 0));
    out[4 + i] = _mm512_shuffle_i32x4(odd01, odd23, _MM_SHUFFLE(2, 0, 2, 0));
    out[8 + i] = _mm512_shuffle_i32x4(even01, even23, _MM_SHUFFLE(3, 1, 3, 1));
    out[12 + i] = _mm512_shuffle_i32x4(odd01, odd23, _MM_SHUFFLE(3, 1, 3, 1));
  }
}

}  // namespace

void pack_bf16(const uint16_t* rows, int64_t columns, int64_t stride, uint16_t* out, int64_t pair_stride) {
  for (int64_t column = 0; column < columns; column += 32) {
    __m512i in[16];
    __m512i transposed[16];
    for (int r = 0; r < 16; ++r) in[r] = _mm512_loadu_si512(rows + r * stride + column);
    transpose(in, transposed);
    for (int pair = 0; pair < 16; ++pair)
      _mm512_storeu_si512(out + (column / 2 + pair) * pair_stride, transposed[pair]);
  }
}

}  // namespace kascade::KASCADE_ISA
#endif
