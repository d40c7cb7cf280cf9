// SPDX-License-Identifier: Apache-2.0
// The few vector operations that the integer dot products need, per instruction set. A vector holds
// kLaneBlocks lanes of 128 bits; a lane holds 16 bytes of one group of 32 elements, and after dot() four
// partial sums of that group. Four groups take 4 / kLaneBlocks vectors: their parts. Included by *_isa.cc
// files only; everything is static to the including file.
#pragma once

#if defined(__AVX512BW__)
#include "ops/decode_simd_avx512.h"  // IWYU pragma: export
#elif defined(__AVX2__)
#include "ops/decode_simd_avx2.h"    // IWYU pragma: export
#include "ops/decode_simd_scales.h"  // IWYU pragma: export
#else
#include "ops/decode_simd_generic.h"  // IWYU pragma: export
#include "ops/decode_simd_scales.h"   // IWYU pragma: export
#endif
