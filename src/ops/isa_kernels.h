// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set (kernels.h says what each does); *_isa.cc files only.
#pragma once

#include "ops/kernels.h"

namespace kascade::KASCADE_ISA {

void decode_f32(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_f16(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_bf16(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q4_0(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q4_1(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q5_0(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q5_1(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q8_0(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q4_k(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q5_k(const DecodeArgs& args, int64_t begin, int64_t end);
void decode_q6_k(const DecodeArgs& args, int64_t begin, int64_t end);

/// dequantize_row of `type` to fp32, or to bfloat16 where the instruction set multiplies it.
DequantizeKernel dequantize_f32_kernel(WeightType type);
DequantizeKernel dequantize_bf16_kernel(WeightType type);

void quantize_row(const float* x, int64_t columns, int8_t* q, float* scale, float* scaled_sum);
void to_bf16(const float* x, int64_t count, uint16_t* out);
void pack_bf16(const uint16_t* rows, int64_t columns, int64_t stride, uint16_t* out, int64_t pair_stride);

void rms_norm(const float* x, int64_t columns, const float* weight, float epsilon, float* out);
void silu_multiply(float* gate, const float* up, int64_t count);
void add(float* x, const float* y, int64_t count);
void rotate(float* x, const float* cosines, const float* sines, int64_t half, bool adjacent);

bool row_max(const float* x, int64_t count, float* max);
int64_t find(const float* x, int64_t count, float value);
double sum_exp(const float* x, int64_t count, float max);
double sum_exp_difference(const float* p, const float* q, int64_t count, float p_max);

namespace {

inline void store_output(const DecodeArgs& args, int64_t row, int64_t output, float value) {
  float* out = args.out + row * args.out_stride + output;
  if (args.bias != nullptr) value += args.bias[output];
  *out = args.accumulate ? *out + value : value;
}

}  // namespace
}  // namespace kascade::KASCADE_ISA
