// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/entries.h"

namespace kascade::KASCADE_ISA {

extern const cpu::Kernels kAttentionKernels;
const cpu::Kernels kAttentionKernels = {
    prefill_scratch_bytes, prefill_tile,    padded_head_dim,  decode_scratch_bytes, decode_split,
    decode_kept,           decode_merge,    decode_select,    select_scratch_size,  select_ranked,
    read_memory,           multiply_floats, multiply_bfloats,
};

}  // namespace kascade::KASCADE_ISA
