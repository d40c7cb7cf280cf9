// SPDX-License-Identifier: Apache-2.0
// From pooled weights to an index set. Included by *_isa.cc only.
#pragma once

#include "attention/cpu/simd.h"
#include "attention/cpu/work.h"

namespace kascade::KASCADE_ISA {

/// Elements of the scratch of select_members() for n candidates.
constexpr int64_t select_scratch(int64_t n) { return 2 * 2048 + n + 64; }

/// The k largest of weights[0, n), none of them negative: larger first, then the smaller position, NaN last.
/// Writes min(k, n) values first + position, ascending, and nothing after them; returns how many.
int64_t select_ranked(const float* weights, int64_t n, int64_t k, int32_t first, int32_t* members,
                      uint32_t* scratch);

/// Writes members, the -1 after them and the count of a set. weights [candidates] may be null when the set
/// covers all.
void select_members(const cpu::SetWork& set, const float* weights, uint32_t* scratch);

}  // namespace kascade::KASCADE_ISA
