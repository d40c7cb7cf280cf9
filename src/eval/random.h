// SPDX-License-Identifier: Apache-2.0
// SplitMix64: a small generator whose sequence is the same on every machine.
#pragma once

#include <cstdint>

namespace kascade {

class SplitMix {
 public:
  explicit SplitMix(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  /// In [0, bound), bound >= 1; the bias of the remainder is below bound / 2^64.
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }

 private:
  uint64_t state_;
};

}  // namespace kascade
