// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kascade {

/// Calls of operator new in this test program.
int64_t allocations_so_far();

}  // namespace kascade
