// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/function_ref.h"

namespace kascade {

/// Rows of one chunk of a prompt: the largest multiple of granule up to most, halved (to multiples of
/// granule) while its scratch, bytes_of(rows), passes limit_bytes and halving still takes a good part of it
/// away. A granule above most counts as 1.
int64_t chunk_rows(int64_t most, int64_t granule, uint64_t limit_bytes,
                   FunctionRef<uint64_t(int64_t)> bytes_of);

}  // namespace kascade
