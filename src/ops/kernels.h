// SPDX-License-Identifier: Apache-2.0
// What each instruction set provides (the *_isa.cc files): single-threaded kernels over plain pointers.
// Checks, work cuts and threads are the callers'.
#pragma once

#include <cstdint>

#include "kascade/weight.h"

namespace kascade {

/// Activations in groups of 32 elements: x ~ scale * q. Four groups make a step of 128 bytes: the first 16
/// elements of each group, then the last 16 of each, the order in which 4-bit blocks hold their low and high
/// nibbles. The last step is padded with zeros.
struct QuantizedRow {
  const int8_t* q = nullptr;          // [steps, 2, 4, 16]
  const float* scale = nullptr;       // [4 * steps]
  const float* scaled_sum = nullptr;  // [4 * steps], scale times the sum of the group's q
};
constexpr int64_t kGroup = 32;
constexpr int64_t kStep = 4 * kGroup;
constexpr int64_t kMaxDecodeRows = 8;

/// The product of a few activation rows with a range of weight rows.
struct DecodeArgs {
  const uint8_t* weights = nullptr;  // [outputs] rows as stored
  int64_t row_bytes = 0;
  int64_t columns = 0;
  int64_t rows = 0;                             // of activations, 1..kMaxDecodeRows
  const float* x[kMaxDecodeRows] = {};          // plain types: [columns] each
  QuantizedRow quantized[kMaxDecodeRows] = {};  // block types
  float* out = nullptr;                         // [rows, outputs]
  int64_t out_stride = 0;
  const float* bias = nullptr;  // [outputs] or null
  bool accumulate = false;
};

/// Computes outputs [begin, end) of all rows. The bits of an output depend on nothing but its weight row, its
/// activation row, bias and prior content.
using DecodeKernel = void (*)(const DecodeArgs& args, int64_t begin, int64_t end);
using DequantizeKernel = void (*)(const uint8_t* row, int64_t columns, void* out);

struct OpKernels {
  const char* name;
  bool multiplies_bf16;  // whether prefill multiplies in bfloat16 (else fp32)

  DecodeKernel decode[kWeightTypes];
  DequantizeKernel (*dequantize_f32)(WeightType type);   // bit for bit dequantize_row
  DequantizeKernel (*dequantize_bf16)(WeightType type);  // null unless multiplies_bf16

  /// columns is a multiple of kGroup. A NaN or infinity in a group makes its scale NaN.
  void (*quantize_row)(const float* x, int64_t columns, int8_t* q, float* scale, float* scaled_sum);
  void (*to_bf16)(const float* x, int64_t count, uint16_t* out);  // null unless multiplies_bf16
  /// 16 rows of bfloat16 to pairs: out[pair_stride * (c / 2) + 2 * r + c % 2] = rows[stride * r + c]; columns
  /// is a multiple of 32. Null unless multiplies_bf16.
  void (*pack_bf16)(const uint16_t* rows, int64_t columns, int64_t stride, uint16_t* out,
                    int64_t pair_stride);

  void (*rms_norm)(const float* x, int64_t columns, const float* weight, float epsilon, float* out);
  void (*silu_multiply)(float* gate, const float* up, int64_t count);
  void (*add)(float* x, const float* y, int64_t count);
  /// Rotates one head: pairs (2i, 2i+1) if adjacent, else (i, i + half).
  void (*rotate)(float* x, const float* cosines, const float* sines, int64_t half, bool adjacent);

  /// The largest element (-inf for none); false when there is a NaN.
  bool (*row_max)(const float* x, int64_t count, float* max);
  int64_t (*find)(const float* x, int64_t count, float value);  // first index of value, or count
  double (*sum_exp)(const float* x, int64_t count, float max);  // sum of exp(x - max)
  /// Sum of exp(p - p_max) * (p - q); elements whose exp is 0 add nothing.
  double (*sum_exp_difference)(const float* p, const float* q, int64_t count, float p_max);
};

}  // namespace kascade
