// SPDX-License-Identifier: Apache-2.0
// The histogram of the keys that a cluster ranks: each block counts its own; added up they say which bin the
// cut is in.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/decode_cut.cuh"
#include "attention/cuda/sm90/decode_select.cuh"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

template <int kThreads>
__device__ inline void clear_histogram(SelectMemory& memory) {
  const Place at;
  static_assert(kBins % (kThreads * 4) == 0);
#pragma unroll
  for (int i = 0; i < kBins; i += kThreads * 4)
    *reinterpret_cast<int4*>(memory.histogram + i + at.thread * 4) = make_int4(0, 0, 0, 0);
}

/// Counts a key by its place in the window; histogram: its shared address. Bin 0 is left out: it may hold
/// most keys, which would wait for each other.
__device__ inline void count_bin(uint32_t histogram, uint32_t place) {
  const uint32_t at = histogram + (place >> kBinShift) * 4;
  asm volatile("{\n.reg .pred p;\nsetp.ge.u32 p, %0, %2;\n@p red.shared.add.u32 [%1], 1;\n}\n" ::"r"(place),
               "r"(at), "n"(1 << kBinShift)
               : "memory");
}

/// The sum of what *mine is in the blocks' memories.
__device__ inline int32_t sum_over_blocks(const SelectMemory& memory, int32_t* mine) {
  const int32_t blocks = memory.list.blocks;
  int32_t sum = 0;
#pragma unroll 1
  for (int first = 0; first < blocks; first += kCluster) {
    int32_t of_block[kCluster];
#pragma unroll
    for (int j = 0; j < kCluster; ++j) of_block[j] = first + j < blocks ? *in_block(mine, first + j) : 0;
#pragma unroll
    for (int j = 0; j < kCluster; ++j) sum += of_block[j];
  }
  return sum;
}

/// Adds up the blocks' histograms and finds the bin of the wanted-th largest key. Keys that are in no bin
/// count as bin 0.
__device__ inline Found find_bin(SelectMemory& memory, int32_t wanted) {
  const Place at;
  __syncthreads();
  if (at.thread < kRuns) {
    const int4* bins = reinterpret_cast<const int4*>(memory.histogram + at.thread * kRun);
    int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kRun / 4; ++i) sum += (bins[i].x + bins[i].y) + (bins[i].z + bins[i].w);
    memory.runs[at.thread] = sum;
  }
  sync_blocks(memory);
  // Thread t looks at the runs from the top.
  const int run = kRuns - 1 - at.thread;
  int32_t own = 0, sum = 0;
  if (at.thread < kRuns) {
    own = sum_over_blocks(memory, &memory.runs[run]);
    sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, sum, step);
      if (at.lane >= step) sum += other;
    }
    if (at.lane == 31) memory.warp_sums[at.warp] = sum;
  }
  __syncthreads();
  if (at.thread < kRuns) {
    const int32_t of_warps = at.lane < at.warp ? memory.warp_sums[at.lane] : 0;
    const int32_t above = __reduce_add_sync(kFullWarp, of_warps) + sum - own;
    const unsigned here = __ballot_sync(kFullWarp, above < wanted && wanted <= above + own);
    // The warp that has the run looks at its bins.
    if (here != 0) {
      const int lane = __ffs(static_cast<int>(here)) - 1;
      const int bin = (kRuns - 1 - at.warp * 32 - lane) * kRun + kRun - 1 - at.lane;
      const int32_t count = at.lane < kRun ? sum_over_blocks(memory, &memory.histogram[bin]) : 0;
      int32_t up_to = count;
#pragma unroll
      for (int step = 1; step < kRun; step *= 2) {
        const int32_t other = __shfl_up_sync(kFullWarp, up_to, step);
        if (at.lane >= step) up_to += other;
      }
      const int32_t above_bin = __shfl_sync(kFullWarp, above, lane) + up_to - count;
      if (at.lane < kRun && above_bin < wanted && wanted <= above_bin + count)
        memory.found = {bin, above_bin, count};
    }
    if (run == 0 && wanted > above + own) memory.found = {0, above + own, INT32_MAX};
  }
  __syncthreads();
  return memory.found;
}

}  // namespace kascade::cuda
