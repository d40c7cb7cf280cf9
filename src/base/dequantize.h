// SPDX-License-Identifier: Apache-2.0
// Stored weights to floats in plain loops: the specification that the fast kernels in ops are tested against.
#pragma once

#include <cstdint>

#include "kascade/weight.h"

namespace kascade {

/// Writes the `columns` floats of one stored row to out. row needs no alignment; columns is a multiple of the
/// type's block (else BadArgument). Bit layouts are those of GGML's block formats; each product and sum is
/// rounded to float once, in the order written here, so results are the same on every machine.
void dequantize_row(WeightType type, const void* row, int64_t columns, float* out);

}  // namespace kascade
