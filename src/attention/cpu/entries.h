// SPDX-License-Identifier: Apache-2.0
// The entries of cpu::Kernels of one instruction set. Included by *_isa.cc only.
#pragma once

#include "attention/cpu/work.h"

namespace kascade::KASCADE_ISA {

size_t prefill_scratch_bytes(const cpu::PrefillSizes& sizes);
void prefill_tile(const cpu::PrefillTile& tile, const cpu::PrefillSizes& sizes, char* scratch);
int64_t padded_head_dim(int64_t head_dim);
size_t decode_scratch_bytes(int64_t head_dim, int64_t list_size, int64_t keys);
void decode_split(const cpu::DecodeSplit& split);
void decode_kept(const cpu::DecodeKept& kept);
bool decode_merge(const cpu::DecodeMerge& merge, bool kept);
void decode_select(const cpu::DecodeSelect& select);
int64_t select_scratch_size(int64_t n);
int64_t select_ranked(const float* weights, int64_t n, int64_t k, int32_t first, int32_t* members,
                      uint32_t* scratch);
void read_memory(const char* data, int64_t bytes, const cpu::ReadAhead& ahead, float* sink);
double multiply_floats(int64_t rounds, float* sink);
double multiply_bfloats(int64_t rounds, float* sink);

}  // namespace kascade::KASCADE_ISA
