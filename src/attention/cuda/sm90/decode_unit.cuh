// SPDX-License-Identifier: Apache-2.0
// A unit of work of a pass over keys, and how a chunk of keys lies in shared memory.
#pragma once

#include "attention/cuda/common/call.h"

namespace kascade::cuda {

/// kRows: query rows of a unit, 8 (passes with values only), 16 or 32.
template <int D, int kRows, Pass pass>
struct AttendShape {
  // A stage holds one chunk: its rows of K alone, or those of K and then those of V.
  static constexpr int kTileBytes = kChunkKeys * D * 2;
  static constexpr int kStageBytes = pass == Pass::kScore ? kTileBytes : 2 * kTileBytes;
  // Two blocks a multiprocessor with as many warps as registers allow.
  static constexpr int kBlocks = 2;
  static constexpr int kWarps = kStageBytes <= 4096 && kRows <= 16 ? 8 : kStageBytes <= 8192 ? 4 : 2;
  static constexpr int kMostStages = 96 * 1024 / kWarps / kStageBytes;
  static constexpr int kStages = kMostStages < 6 ? kMostStages : 6;
  static constexpr int kThreads = kWarps * 32;
  // A warp's units in work: those that its stages hold keys of, and the next.
  static constexpr int kUnitSlots = kStages < 4 ? 4 : 8;
  // Groups of splits that the warps of a block may share, a split a warp.
  static constexpr int kSharedGroups = pass == Pass::kSparse && kRows == 8 ? kWarps / kSplitGroup : 0;
};

/// One unit of work: query rows that share a stretch of a list.
struct Unit {
  int32_t chunks;        // stages of keys; 0: no more work
  int32_t split_chunks;  // of a split
  int32_t key_begin;     // index of the unit's first key in the list
  int32_t part;          // which partial result of its rows it leaves
  int32_t is_group;      // the warp merges its splits
  int32_t q_row;         // row of q of the tile's row 0
  int32_t first;  // unit row i is row (first + i) / heads of the tile, head head_begin + (first + i) % heads
  int32_t rows;
  int32_t head_begin;
  int32_t limit;  // keys of the list that the unit's first row sees; later rows of the tile see one more each
  int32_t keep_scores;
  // The list: `members` positions from a set, then the tile's own keys from `candidates` on; `length` in all.
  int32_t length, members, candidates;
  int32_t kv_head;
  int32_t sequence;
  int32_t kv_begin;   // first key of a packed sequence
  int32_t next;       // index that the warp's next unit may have when units are dealt out in turn; -1: none
  int64_t set_begin;  // of its members in positions
};

/// Where row `row` of a tile keeps its 16-byte pieces: swizzled so that eight rows at one piece hit all
/// banks. As rows lie at multiples of their size, piece p ^ x is at the address of piece p, exclusive or 16
/// x.
template <int D>
__device__ inline uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>(row * D * 2 + ((piece ^ (row & 7)) << 4));
}

/// The row of the shared tile that key `key` of a chunk lies in: a thread's four score columns are then four
/// consecutive keys.
__device__ inline int tile_row(int key) {
  const int quad = key >> 2 & 3, e = key & 3;
  return (key & ~15) + (e < 2 ? 2 * quad + e : 8 + 2 * quad + e - 2);
}

}  // namespace kascade::cuda
