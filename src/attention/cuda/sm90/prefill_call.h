// SPDX-License-Identifier: Apache-2.0
// What one prefill call hands to its kernels, and the host side of each. docs/kernels/prefill.md explains the
// passes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "attention/params.h"

namespace kascade::cuda {

// Packed query rows (tokens times heads) of a tile of queries: two warpgroups of 64.
constexpr int kBlockRows = 128;
/// Packed rows of a unit of the pass that only needs log-sum-exps: as many tiles of queries as registers
/// allow.
constexpr int32_t lse_rows(int32_t head_dim) { return head_dim == 256 ? kBlockRows : 2 * kBlockRows; }
// Of these, of one warpgroup.
constexpr int kGroupRows = 64;
// Packed rows whose output one warp stores.
constexpr int kStoredRows = 16;
// Keys of one range of the pooled-weight pass; a quarter of them where there would be few units.
constexpr int32_t kRangeKeys = 16384;
// Bins of the histogram of pooled weights: 32 to an octave from 2^-57 up, the first for all that is less.
constexpr int kWeightBins = 2048;

/// Rows of a unit of work: packed row i (token i / heads, head i % heads of those that share keys) of tokens
/// that begin at row `row` of q and position `position`; rows [first, first + rows).
struct alignas(16) RowBlock {
  int32_t batch;
  int32_t row;
  int32_t position;
  int32_t first, rows;
  int32_t keys;       // of the sequence
  int32_t own_begin;  // of the tile: keys before it come from its set
  int32_t set;        // the tile's, -1 without a place for it
};

/// A tile that selects.
struct alignas(16) TileEntry {
  int32_t batch;
  int32_t row, rows;  // tokens
  int32_t position;   // of the first row
  int32_t keys;       // of the sequence
  int32_t set;
  int32_t candidates, sinks, recent_begin, ranked;  // its SetBudget
  int32_t unused[2];
};

/// Written by the schedule.
struct PrefillTotals {
  int32_t dense_blocks;   // of all keys, in dense_table
  int32_t sparse_blocks;  // in sparse_table
  int32_t tiles;          // in tile_table
  int32_t needed_sets;    // in needed_sets
  int32_t chunk_tiles;    // of a chunk: as many as there is room for with the needed sets alone
};

/// Boxes of K or V for tiles of prefill_load.cuh: whole rows of one head, of keys that lie one after
/// another in a page or in packed sequences. Coordinates: 0, key, head * head_panels, 0, page.
struct BoxMap {
  CUtensorMap map = {};
  int32_t head_panels = 0;  // 64 elements each, from one head to the next
};

/// Boxes of packed rows of queries or of their output for such tiles. Coordinates: 0, query head, token, 0,
/// 0. Not usable where eight rows are not whole tokens, or with strides that boxes cannot have.
struct RowBoxes {
  CUtensorMap map = {};
  bool usable = false;
};

struct PrefillCall {
  AttentionParams params;
  Maxima maxima;
  float scale_log2 = 0;      // score_scale * log2(e)
  int32_t sets = 0;          // S
  int32_t readers = 0;       // lists attended per tile: one per KV head, or per query head
  int32_t reader_heads = 0;  // query heads that share a list
  int32_t tile_parts = 0;    // units of work of a tile and reader
  int32_t dense_rows = 0;    // packed rows of an entry of dense_table
  int32_t chunk_tiles = 0;   // tiles whose pooled weights fit at a time, if all sets are needed
  int32_t chunks = 0;
  int64_t weight_stride = 0;   // keys, a multiple of 128
  int64_t dense_capacity = 0;  // entries of the tables
  int64_t sparse_capacity = 0;
  int64_t tile_capacity = 0;

  // Workspace.
  PrefillTotals* totals = nullptr;
  int32_t* counters =
      nullptr;  // [2 + chunks] units of work handed out: all keys, sets, pooled weights by chunk
  int32_t* chunk_keys = nullptr;   // [chunks] most candidates of a chunk's tiles
  int32_t* dense_begin = nullptr;  // [B+1] entries of the tables before each sequence
  int32_t* sparse_begin = nullptr;
  int32_t* tile_begin = nullptr;
  int32_t* needed_sets = nullptr;  // [S]
  RowBlock* dense_table = nullptr;
  RowBlock* sparse_table = nullptr;
  TileEntry* tile_table = nullptr;
  float* lse = nullptr;           // [total_q, H] log2
  float* weights = nullptr;       // pooled [totals->chunk_tiles, needed sets, weight_stride]
  int32_t* histograms = nullptr;  // [totals->chunk_tiles, needed sets, kWeightBins] of the ranked candidates

  int32_t page_shift = -1;  // log2 of page_size where it is a power of two

  int32_t multiprocessors = 0;  // that the passes over keys may fill

  int32_t box_rows = 0;  // keys of a box; 0 where boxes cannot be used
  BoxMap k_boxes, v_boxes;
  RowBoxes q_boxes;        // of kBlockRows
  RowBoxes q_group_boxes;  // of kGroupRows
  RowBoxes out_boxes;      // of kStoredRows

  // Strides of tokens and pages, and of rows and heads of q, in units of bytes: StrideUnits of common/host.h
  // says how far 32 bits reach.
  uint32_t kv_unit = 0, k_token_units = 0, k_page_units = 0, v_token_units = 0, v_page_units = 0;
  uint32_t q_unit = 0, q_row_units = 0, q_head_units = 0;
};

/// Empty, or the parameter that prefill on the device does not support and what is supported; batch > 0.
/// Types, head dims, selection_k and strides of keys, which decode refuses as well, are checked by the
/// caller.
std::string prefill_unsupported(const AttentionParams& params);
size_t prefill_workspace_bytes(const AttentionParams& params);
void launch_prefill(const AttentionParams& params, void* workspace, cudaStream_t stream,
                    int spare_multiprocessors);

// The kernels of a call, in the order in which they are launched; each throws DeviceError naming the kernel.
void launch_prefill_schedule(const PrefillCall& call, cudaStream_t stream);
template <class T, int D>
void launch_prefill_attend(const PrefillCall& call, bool sparse, cudaStream_t stream);
/// The pass over all keys at a head dim of 128, where boxes can be used.
template <class T, int D>
void launch_prefill_chain(const PrefillCall& call, cudaStream_t stream);
template <class T, int D>
void launch_prefill_lse(const PrefillCall& call, cudaStream_t stream);
template <class T, int D>
void launch_prefill_pool(const PrefillCall& call, int32_t chunk, cudaStream_t stream);
void launch_prefill_select(const PrefillCall& call, int32_t chunk, cudaStream_t stream);
void launch_prefill_own_mass(const PrefillCall& call, cudaStream_t stream);

}  // namespace kascade::cuda
