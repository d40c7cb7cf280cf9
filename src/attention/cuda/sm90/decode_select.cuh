// SPDX-License-Identifier: Apache-2.0
// What the blocks of a decode call's selection keep in shared memory, and how they wait for each other.
#pragma once

#include <cstdint>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/decode_cut.cuh"
#include "attention/cuda/sm90/decode_weigh.cuh"
#include "base/cuda/ptx/cluster.cuh"

namespace kascade::cuda {

// Threads of a block, of which a multiprocessor takes two or one.
constexpr int kFewThreads = 512;
constexpr int kManyThreads = 1024;
constexpr int kMostWarps = kManyThreads / 32;
static_assert(kMostWarps <= 32, "a lane stands for a warp in sums over warps");
// Blocks of a cluster, powers of two: as many as any GPU of this generation takes, and as many as most do.
constexpr int kCluster = 8;
constexpr int kLargeCluster = 16;
static_assert(kLargeCluster <= kFewThreads / 32, "a warp reads one other block's keys");
// Rows that are weighed together, and fetched together.
constexpr int kGroupRows = 4;
// The first histogram has a bin for weights that agree to 1/128, in a window of 32 powers of two below the
// largest cut possible; in the rare case that the cut lies elsewhere, keys are weighed again with another
// window. Blocks keep the digits of their keys, eighths of bins. Keys that share the cut's bin, or digit, are
// few and are searched for the cut; if they are too many, histograms of 12 and 1 further bits decide.
constexpr int kBins = 4096;
constexpr int kBinDigits = 8;
// Bins are first looked at in runs.
constexpr int kRun = 16;
constexpr int kRuns = kBins / kRun;
static_assert(kRuns <= kFewThreads && kRuns % 32 == 0 && kRun <= 32);
static_assert(kBins * kBinDigits <= 0x8000 && kBinDigits << kDigitShift == 1 << kBinShift);

/// Where a block keeps what it knows of the keys that it ranks.
struct BlockKeys {
  uint16_t* digits;  // in shared memory, or null until the workspace serves
  uint32_t* whole;   // the keys themselves, or null
  uint32_t* bits;    // what is selected of them, a bit a key
};

/// Where the wanted-th largest key is: its bin, the keys above that bin, and those in it.
struct Found {
  int32_t bin, above, count;
};

/// The list that a cluster selects.
struct SelectList {
  int64_t index;  // among the sets of the call
  StepBudget budget;
  int32_t sequence, set, kv_len;
  int32_t row_begin;      // its first row of q
  int32_t pooled;         // rows whose weights are pooled
  int32_t blocks;         // that share the keys
  int32_t begin, length;  // of this block's keys
  bool has_place, is_needed;
};

static_assert(kMostCandidates * 8 <= kBins * 4, "candidates take the histogram's place");
struct alignas(16) SelectMemory {
  union {
    alignas(16) int32_t histogram[kBins];       // of this block's keys; read by the others
    Candidate all_candidates[kMostCandidates];  // of the cluster, once the histograms are done
  };
  int32_t runs[kRuns];                          // sums of the histogram; read by the others
  Candidate candidates[kMostCandidates];        // of this block; read by the others
  PooledRow rows[kMaxPooledRows + kGroupRows];  // the last ones weigh nothing
  int32_t row_index[kMaxPooledRows];            // of the same rows in the call
  int32_t warp_sums[kMostWarps], warp_ties[kMostWarps];
  // What blocks before this one select above the cut's digit, and their ties, as each warp has added them up.
  int32_t selected_before[kMostWarps], ties_before[kMostWarps];
  int32_t earlier[kMostWarps];  // other keys that they select; the sum over the warps counts
  int2 totals;  // of this block, .x candidates or ties and .y keys above them; read by the others
  int32_t digit_counts[kBinDigits];  // of this block's keys in the cut's bin; read by the others
  Found found;
  Cut cut;
  SelectList list;
};

/// Until the blocks that share the list's keys have all come here.
__device__ inline void sync_blocks(const SelectMemory& memory) {
  if (memory.list.blocks > 1) {
    cluster_arrive_own();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace kascade::cuda
