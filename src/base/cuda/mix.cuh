// SPDX-License-Identifier: Apache-2.0
// Seeded numbers: splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

namespace kascade::cuda {

/// What the generator's state grows by from number to number.
constexpr uint64_t kMixStep = 0x9E3779B97F4A7C15u;

/// The number of a state.
__host__ __device__ inline uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

}  // namespace kascade::cuda
