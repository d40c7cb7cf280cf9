// SPDX-License-Identifier: Apache-2.0
// How pooled weights are ranked: shared by the pass that makes them and the selection.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/prefill_call.h"

namespace kascade::cuda {

/// Orders weights (never negative) as the ranking does, NaN lowest.
__device__ inline int32_t rank_key(float weight) { return weight != weight ? 0 : __float_as_int(weight) + 1; }

// Bins are the exponent and five bits of the fraction, from 2^-57 up.
constexpr int kBinShift = 18;
constexpr int32_t kFirstBin = (127 - 57) << 5;

__device__ inline int32_t weight_bin(int32_t key) {
  return max(0, min((max(key, 1) - 1 >> kBinShift) - kFirstBin + 1, kWeightBins - 1));
}
/// The least rank key of a bin.
__device__ inline int32_t bin_begin(int32_t bin) {
  return bin == 0 ? 0 : (bin - 1 + kFirstBin << kBinShift) + 1;
}

}  // namespace kascade::cuda
