// SPDX-License-Identifier: Apache-2.0
// Sums over the lanes of a warp, all of which take part.
#pragma once

namespace kascade::cuda {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;

/// Of x, in all lanes.
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

/// Of x in the lanes up to this one.
template <class T>
__device__ inline T sum_up_to(T x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

}  // namespace kascade::cuda
