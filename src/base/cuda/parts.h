// SPDX-License-Identifier: Apache-2.0
// How many parts work has, and whether 16-byte accesses are possible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace kascade::cuda {

/// Parts of `each` that make up `whole`, the last of which may be smaller; whole >= 0, each > 0.
constexpr int64_t parts_of(int64_t whole, int64_t each) { return (whole + each - 1) / each; }

/// The same in 32 bits, also for device code.
constexpr int32_t divide_up(int32_t whole, int32_t each) {
  return static_cast<int32_t>((static_cast<uint32_t>(whole) + static_cast<uint32_t>(each) - 1) /
                              static_cast<uint32_t>(each));
}

/// Whether all addresses are multiples of 16 bytes; null is.
inline bool aligned_16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

}  // namespace kascade::cuda
