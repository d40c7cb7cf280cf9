// SPDX-License-Identifier: Apache-2.0
// Logits as integers in their order.
#pragma once

#include <cstdint>

namespace kascade::cuda {

/// Ordered as the logits are; a NaN above everything, never 0.
__device__ inline uint32_t logit_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 as 0
  return isnan(x) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace kascade::cuda
