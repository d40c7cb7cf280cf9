// SPDX-License-Identifier: Apache-2.0
// How pooled weights are ranked: shared by the pass that makes them and the selection. Weights are never
// negative, so their bits as signed integers order them; NaN, which ranks last, is kept as -0.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/prefill_call.h"

namespace kascade::cuda {

constexpr float kNanWeight = -0.0f;

// Bins are the exponent and five bits of the fraction, from 2^-57 up.
constexpr int kBinShift = 18;
constexpr int32_t kFirstBin = (127 - 57) << 5;

/// Bin of a weight's bits.
__device__ inline int32_t weight_bin(int32_t key) {
  return max(0, min((key >> kBinShift) - kFirstBin + 1, kWeightBins - 1));
}
/// The least bits of a bin.
__device__ inline int32_t bin_begin(int32_t bin) {
  return bin == 0 ? INT32_MIN : (bin - 1 + kFirstBin) << kBinShift;
}

}  // namespace kascade::cuda
