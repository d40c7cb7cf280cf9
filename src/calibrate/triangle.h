// SPDX-License-Identifier: Apache-2.0
// Storage of a number for every layer pair i <= j, head r of j and head a of i, without the empty half: [j,
// r, i <= j, a]. Sums are 64-bit integers in units of 2^-40, so they do not depend on the order of their
// terms.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace kascade {

inline constexpr double kFixedOne = 1099511627776.0;  // 2^40

inline int64_t to_fixed(double value) { return std::llround(value * kFixedOne); }
inline double from_fixed(int64_t value) { return static_cast<double>(value) / kFixedOne; }

/// Where [i = 0, a = 0] of (j, r) starts; [i, a] follows at i * heads + a.
inline int64_t triangle_slot(int heads, int j, int r) {
  const int64_t layers_before = int64_t{j} * (j + 1) / 2;
  return (layers_before * heads + int64_t{r} * (j + 1)) * heads;
}

/// Numbers held for all pairs. Throws BadArgument for shapes no model has, OutOfMemory past 2^30 numbers.
inline int64_t triangle_cells(int layers, int heads) {
  constexpr int kMost = 1 << 16;  // products below stay under 2^63
  require<BadArgument>(layers >= 1 && layers <= kMost, "layers: expected 1..{}, got {}", kMost, layers);
  require<BadArgument>(heads >= 1 && heads <= kMost, "kv_heads: expected 1..{}, got {}", kMost, heads);
  const uint64_t pairs = static_cast<uint64_t>(layers) * (layers + 1) / 2;
  uint64_t cells = 0;
  const bool fits = checked_mul(pairs, static_cast<uint64_t>(heads) * heads, &cells) && cells <= uint64_t{1}
                                                                                                     << 30;
  require<OutOfMemory>(fits, "similarity statistics: {} layers of {} KV heads pass the limit of 2^30 numbers",
                       layers, heads);
  return static_cast<int64_t>(cells);
}

/// Calls f(slot, full) for every number: its place in triangle storage and in a full [i, j, r, a] array.
template <class F>
void for_each_cell(int layers, int heads, F&& f) {
  for (int j = 0; j < layers; ++j)
    for (int r = 0; r < heads; ++r)
      for (int i = 0; i <= j; ++i)
        for (int a = 0; a < heads; ++a)
          f(static_cast<size_t>(triangle_slot(heads, j, r) + int64_t{i} * heads + a),
            ((static_cast<size_t>(i) * layers + j) * heads + r) * heads + a);
}

}  // namespace kascade
