// SPDX-License-Identifier: Apache-2.0
#include "engine/chunk_rows.h"

#include <algorithm>

namespace kascade {

int64_t chunk_rows(int64_t most, int64_t granule, uint64_t limit_bytes,
                   FunctionRef<uint64_t(int64_t)> bytes_of) {
  if (granule > most) granule = 1;
  int64_t rows = most / granule * granule;
  uint64_t bytes = bytes_of(rows);
  while (rows > granule && bytes > limit_bytes) {
    const int64_t half = std::max(granule, rows / 2 / granule * granule);
    const uint64_t half_bytes = bytes_of(half);
    // What hardly shrinks (a thread's scores of every key) is not a matter of rows, and small chunks are
    // slow.
    if (half_bytes > bytes - bytes / 8) break;
    rows = half;
    bytes = half_bytes;
  }
  return rows;
}

}  // namespace kascade
