// SPDX-License-Identifier: Apache-2.0
// How fast the current GPU reads its memory, by a kernel that only reads.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace kascade {

/// Reads bytes (a multiple of 16) on stream; writes to *out only what no sum is.
void enqueue_read(const void* data, size_t bytes, uint32_t* out, cudaStream_t stream);

/// Median of several readings of a buffer far larger than the second-level cache. Throws OutOfMemory,
/// DeviceError.
double measure_cuda_read_gb_per_s();

}  // namespace kascade
