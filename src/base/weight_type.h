// SPDX-License-Identifier: Apache-2.0
// Sizes of stored tensors in checked arithmetic, for shapes that come from a file.
#pragma once

#include <cstdint>
#include <optional>

#include "kascade/weight.h"

namespace kascade {

/// Bytes of a row of `columns` elements; nullopt when columns is negative, is no multiple of the block, or
/// the size does not fit in 63 bits.
std::optional<int64_t> checked_row_bytes(WeightType type, int64_t columns);

/// Bytes of `rows` such rows, with the same care.
std::optional<int64_t> checked_tensor_bytes(WeightType type, int64_t rows, int64_t columns);

}  // namespace kascade
