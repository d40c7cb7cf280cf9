// SPDX-License-Identifier: Apache-2.0
// Partial results of a row: its sums over some of its keys, relative to a score of its own.
#pragma once

#include "attention/cuda/common/sequence.cuh"

namespace kascade::cuda {

/// kPerLane values a lane, in the order in which units store them.
template <int kPerLane>
struct RowPart {
  float top, sum;
  float out[kPerLane];
};

/// Part `index` of those at stats and out; nothing if it does not exist.
template <int kPerLane>
__device__ inline void load_part(const float2* stats, const float* out, int32_t index, bool exists, int lane,
                                 RowPart<kPerLane>& part) {
  part.top = -INFINITY;
  part.sum = 0;
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) part.out[e] = 0;
  if (!exists) return;
  const float2 stat = stats[index];
  part.top = stat.x;
  part.sum = stat.y;
  const float* from = out + int64_t{index} * (32 * kPerLane) + lane * kPerLane;
  if constexpr (kPerLane == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    part.out[0] = two.x;
    part.out[1] = two.y;
  } else {
#pragma unroll
    for (int e = 0; e < kPerLane; e += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + e);
      part.out[e] = four.x;
      part.out[e + 1] = four.y;
      part.out[e + 2] = four.z;
      part.out[e + 3] = four.w;
    }
  }
}

template <int kPerLane>
__device__ inline void store_part(float2* stats, float* out, int64_t index, int lane,
                                  const RowPart<kPerLane>& part) {
  if (lane == 0) stats[index] = make_float2(part.top, part.sum);
  float* to = out + index * (32 * kPerLane) + lane * kPerLane;
  if constexpr (kPerLane == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(part.out[0], part.out[1]);
  } else {
#pragma unroll
    for (int e = 0; e < kPerLane; e += 4)
      *reinterpret_cast<float4*>(to + e) =
          make_float4(part.out[e], part.out[e + 1], part.out[e + 2], part.out[e + 3]);
  }
}

template <int kPerLane>
__device__ inline void add_part(RowPart<kPerLane>& all, const RowPart<kPerLane>& part) {
  const Merge merge = merge_tops(all.top, part.top);
  all.top = merge.top;
  all.sum = merge_sums(merge, all.sum, part.sum);
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) all.out[e] = merge_sums(merge, all.out[e], part.out[e]);
}

}  // namespace kascade::cuda
