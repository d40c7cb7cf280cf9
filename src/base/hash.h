// SPDX-License-Identifier: Apache-2.0
// FNV-1a, 64 bits: identity of models and data sets, not security.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kascade {

constexpr uint64_t kFnvOffset = 0xCBF29CE484222325ull;

inline uint64_t fnv1a(std::span<const std::byte> bytes, uint64_t seed = kFnvOffset) {
  uint64_t hash = seed;
  for (const std::byte b : bytes) hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001B3ull;
  return hash;
}

/// 16 lower-case hexadecimal digits.
std::string hash_hex(uint64_t hash);

}  // namespace kascade
