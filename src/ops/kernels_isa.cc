// SPDX-License-Identifier: Apache-2.0
#include "ops/isa_kernels.h"

namespace kascade::KASCADE_ISA {

#define KASCADE_QUOTE(x) #x
#define KASCADE_NAME(x) KASCADE_QUOTE(x)

extern const OpKernels kKernels;
constinit const OpKernels kKernels = {
    .name = KASCADE_NAME(KASCADE_ISA),
#if defined(__AVX512BF16__)
    .multiplies_bf16 = true,
#else
    .multiplies_bf16 = false,
#endif
    .decode = {decode_f32, decode_f16, decode_bf16, decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1,
               decode_q8_0, decode_q4_k, decode_q5_k, decode_q6_k},
    .dequantize_f32 = dequantize_f32_kernel,
#if defined(__AVX512BF16__)
    .dequantize_bf16 = dequantize_bf16_kernel,
    .quantize_row = quantize_row,
    .to_bf16 = to_bf16,
    .pack_bf16 = pack_bf16,
#else
    .dequantize_bf16 = nullptr,
    .quantize_row = quantize_row,
    .to_bf16 = nullptr,
    .pack_bf16 = nullptr,
#endif
    .rms_norm = rms_norm,
    .silu_multiply = silu_multiply,
    .add = add,
    .rotate = rotate,
    .row_max = row_max,
    .find = find,
    .sum_exp = sum_exp,
    .sum_exp_difference = sum_exp_difference,
};

}  // namespace kascade::KASCADE_ISA
