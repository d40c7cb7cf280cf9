// SPDX-License-Identifier: Apache-2.0
// How fast the current GPU multiplies 16-bit matrices.
#pragma once

namespace kascade {

/// TFLOP/s of a kernel that only multiplies random bf16 matrices in shared memory for some tens of
/// milliseconds: the median of several runs. Throws DeviceError.
double measure_cuda_bf16_tflop_per_s();

}  // namespace kascade
