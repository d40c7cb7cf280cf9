// SPDX-License-Identifier: Apache-2.0
// The cut of a selection among the few keys that share its digit, by the threads of a block.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/decode_weigh.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

constexpr int kMostCandidates = 2048;
constexpr int kWarpCandidates = 512;      // that one warp searches
constexpr int kComparedCandidates = 128;  // each with each

/// The keys among which the cut is.
struct AtCut {
  uint32_t digit, digits;  // they have digits [digit, digit + digits)
  uint32_t key;            // the least that they can be
  int bits;                // in which they differ from it
  int32_t count, wanted;

  /// Those of a vector, a bit a key, and those above them.
  __device__ uint32_t members(uint4 all, uint32_t& above) const {
    above = at_least(all, digit + digits);
    return at_least(all, digit) & ~above;
  }
};

struct Candidate {
  uint32_t key;
  int32_t position;

  /// In the order of the ranking.
  __device__ bool precedes(const Candidate& other) const {
    return key > other.key || (key == other.key && position < other.position);
  }
};

/// The thread's place in its block, found anew where it is wanted: registers are scarce.
struct Place {
  int thread, lane, warp;
  __device__ Place() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread & 31;
    warp = thread >> 5;
  }
};

/// What is selected of the keys [begin, begin + length), a bit a key.
struct Marks {
  uint32_t* bits;
  int32_t begin, length;

  /// Marks a selected key if it is one of these and `marks`; 1 for a key before them.
  __device__ int32_t mark(int32_t position, bool marks) const {
    const int32_t i = position - begin;
    if (marks && i >= 0 && i < length) atomicOr(bits + i / 32, 1u << (i % 32));
    return i < 0 ? 1 : 0;
  }
};

/// Marks the `wanted` first of `count` candidates, at most kComparedCandidates, in the order of the ranking,
/// each being compared with all others. Returns how many of those that the warp has looked at are selected
/// and lie before the marks.
template <int kThreads>
__device__ inline int32_t compare_candidates(const Candidate* candidates, int32_t count, int32_t wanted,
                                             const Marks& marks) {
  constexpr int kOfLane = kComparedCandidates / 32;
  const Place at;
  Candidate others[kOfLane];
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const int c = at.lane + j * 32;
    others[j] = c < count ? candidates[c] : Candidate{0, INT32_MAX};
  }
  int32_t earlier = 0;
#pragma unroll 1
  for (int32_t c = at.warp; c < count; c += kThreads / 32) {
    const Candidate own = candidates[c];
    int32_t before = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) before += others[j].precedes(own) ? 1 : 0;
    if (__reduce_add_sync(kFullWarp, before) >= wanted) continue;
    earlier += marks.mark(own.position, at.lane == 0);
  }
  return earlier;
}

/// What the cut is found to be.
struct Cut {
  uint32_t key;
  int32_t exact;  // whether it parts as many candidates as are wanted
};

/// The search for the cut by a warp: the largest key that at least `wanted` candidates reach, or any that
/// just so many reach; it differs from `key` in the lower `bits`.
__device__ inline void search_by_warp(const Candidate* candidates, int32_t count, int32_t wanted,
                                      uint32_t key, int bits, Cut& cut) {
  const Place at;
  uint32_t keys[kWarpCandidates / 32];
#pragma unroll
  for (int j = 0; j < kWarpCandidates / 32; ++j) {
    const int c = at.lane + j * 32;
    keys[j] = c < count ? candidates[c].key : 0;
  }
  bool exact = count == wanted;
#pragma unroll 1
  for (uint32_t bit = 1u << (bits - 1); bit != 0 && !exact; bit >>= 1) {
    int32_t reach = 0;
#pragma unroll
    for (int j = 0; j < kWarpCandidates / 32; ++j) reach += keys[j] >= (key | bit) ? 1 : 0;
    reach = __reduce_add_sync(kFullWarp, reach);
    if (reach >= wanted) key |= bit;
    exact = reach == wanted;
  }
  if (at.lane == 0) cut = {key, exact ? 1 : 0};
}

/// The same as compare_candidates() for up to kMostCandidates, which share the upper bits `key`: the cut is
/// searched bit by bit. `cut` is memory of the block.
template <int kThreads>
__device__ __noinline__ int32_t search_candidates(const Candidate* candidates, int32_t count, int32_t wanted,
                                                  uint32_t key, int bits, Marks marks, Cut& cut) {
  constexpr int kOwnCandidates = kMostCandidates / kThreads;
  const Place at;
  Candidate own[kOwnCandidates];
  bool exists[kOwnCandidates];
#pragma unroll
  for (int j = 0; j < kOwnCandidates; ++j) {
    exists[j] = at.thread + j * kThreads < count;
    own[j] = exists[j] ? candidates[at.thread + j * kThreads] : Candidate{0, 0};
  }
  // How many candidates satisfy a condition.
  const auto count_all = [&](auto condition) {
    if (count <= kThreads) return __syncthreads_count(exists[0] && condition(own[0]));
    int32_t all = 0;
#pragma unroll
    for (int j = 0; j < kOwnCandidates; ++j) all += __syncthreads_count(exists[j] && condition(own[j]));
    return all;
  };
  bool exact = count == wanted;
  if (count <= kWarpCandidates) {
    // By one warp, as a barrier takes longer than a look at some more candidates.
    if (at.warp == 0) search_by_warp(candidates, count, wanted, key, bits, cut);
    __syncthreads();
    key = cut.key;
    exact = cut.exact != 0;
  } else {
#pragma unroll 1
    for (uint32_t bit = 1u << (bits - 1); bit != 0 && !exact; bit >>= 1) {
      const int32_t reach = count_all([&](const Candidate& c) { return c.key >= (key | bit); });
      if (reach >= wanted) key |= bit;
      exact = reach == wanted;
    }
  }
  int32_t last = INT32_MAX;  // position of the last key at the cut that is selected
  if (!exact) {
    const int32_t left = wanted - count_all([&](const Candidate& c) { return c.key > key; });
    last = 0;
#pragma unroll 1
    for (int32_t bit = 1 << 30; bit != 0; bit >>= 1) {
      const int32_t earlier = last | bit;
      if (count_all([&](const Candidate& c) { return c.key == key && c.position < earlier; }) < left)
        last = earlier;
    }
  }
  int32_t earlier = 0;
#pragma unroll
  for (int j = 0; j < kOwnCandidates; ++j) {
    const bool selected = exists[j] && (own[j].key > key || (own[j].key == key && own[j].position <= last));
    const int32_t is_earlier = selected ? marks.mark(own[j].position, true) : 0;
    if (count > j * kThreads) earlier += __reduce_add_sync(kFullWarp, is_earlier);
  }
  return earlier;
}

}  // namespace kascade::cuda
