// SPDX-License-Identifier: Apache-2.0
// What is said when the GPU, or the host's pinned memory, refuses an allocation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "kascade/error.h"

namespace kascade::cuda {

enum class Place : uint8_t { kDevice, kPinned };

/// "12.30 GB", of 10^9 bytes; megabytes where that would be less than a hundredth.
inline std::string gigabytes(uint64_t bytes) {
  char text[48];
  const bool small = bytes < 10'000'000 && bytes > 0;
  std::snprintf(text, sizeof text, small ? "%.3f MB" : "%.2f GB",
                static_cast<double>(bytes) / (small ? 1e6 : 1e9));
  return text;
}

/// Throws OutOfMemory naming what was to be allocated, its bytes and what is free. The failed call's error is
/// taken off the device, so that no later launch meets it.
[[noreturn]] inline void throw_memory_refused(const char* what, uint64_t bytes, Place place) {
  size_t free = 0, total = 0;
  std::string state = "what is free on the device is not known";
  if (cudaMemGetInfo(&free, &total) == cudaSuccess)
    state = gigabytes(free) + " of " + gigabytes(total) + " are free on the device";
  cudaGetLastError();
  throw OutOfMemory(std::string(what) + ": cannot allocate " + gigabytes(bytes) + " of " +
                    (place == Place::kDevice ? "device" : "pinned") + " memory (" + state + ")");
}

}  // namespace kascade::cuda
