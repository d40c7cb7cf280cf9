// SPDX-License-Identifier: Apache-2.0
// What one decode call hands to its kernels: the caller's parameters, the stated maxima, and where the parts
// of the workspace lie. docs/kernels/decode.md explains the passes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "attention/params.h"
#include "base/cuda/parts.h"

namespace kascade::cuda {

constexpr int kMaxStepRows = 8;
// Keys of one matrix product, and per reference value of stored scores.
constexpr int kChunkKeys = 16;
// Stored scores: the chunk's largest less the score, in log2 units times this, rounded; kScoreFarBelow means
// weight 0.
constexpr float kScoreSteps = 512.0f;
constexpr uint32_t kScoreFarBelow = 65535;
// Rows times heads that one index set may pool.
constexpr int kMaxPooledRows = 512;

enum class Pass { kDense, kScore, kSparse };

constexpr uint32_t kUnitsMultiple = 128;
// Splits of a group.
constexpr int32_t kSplitGroup = 4;

/// How a list is cut into splits, whose results are merged in a fixed order: those of a group of successive
/// splits one after the other, then the groups. A function of the list's own length and of the call's shape,
/// so that a sequence's result never depends on its batch mates. How splits are dealt out as units of work
/// (UnitCut) changes who adds, not what is added, and may depend on anything.
struct SplitRule {
  int32_t units = 0;  // splits that a tile is cut into if their size allows it, a multiple of kUnitsMultiple
  int32_t least = 0;  // keys of a split
  int32_t most = 0;
  int32_t lists = 0;  // of one tile
  // How units are cut.
  int32_t warps = 0;         // of the pass
  int32_t block_groups = 0;  // that the blocks of a call of a single tile may share out, one each or more
  int32_t most_grouped = INT32_MAX;  // splits of a list whose groups a warp may merge
  bool many_of_a_call = false;  // units may be several splits, or groups, as a call's splits part among warps
};
__host__ __device__ inline int32_t split_keys(const SplitRule& rule, int32_t length) {
  // No 64-bit division, which is long: the shift leaves 32 bits, as lists are at most 2048.
  const auto chunks = (static_cast<uint32_t>(length) + kChunkKeys - 1) / kChunkKeys;
  const uint64_t all = uint64_t{chunks} * static_cast<uint32_t>(rule.lists);
  const auto part = static_cast<uint32_t>((all + kUnitsMultiple - 1) / kUnitsMultiple);
  const auto parts = static_cast<uint32_t>(rule.units) / kUnitsMultiple;
  const uint32_t share = (part + parts - 1) / parts;
  const uint32_t most = static_cast<uint32_t>(rule.most) / kChunkKeys;
  const auto keys = static_cast<int32_t>((share < most ? share : most) * kChunkKeys);
  return keys < rule.least ? rule.least : keys;
}
__host__ __device__ inline int32_t split_count(const SplitRule& rule, int32_t length) {
  return divide_up(length, split_keys(rule, length));
}

/// Who merges the splits of a group: all of them leave a partial result for the merge kernel, or the group
/// leaves one.
enum class GroupMerge : int32_t { kNobody, kWarp, kBlock };

/// Successive splits that make up a unit of work, which a warp works on: one or more, or whole groups.
struct UnitCut {
  int32_t splits;
  GroupMerge merge;
};
/// The cut of sequence b, which has lists of `splits` splits; in_call: splits of all lists of the call, 0 if
/// that is not known. Groups leave fewer partial results, small units share work more evenly.
__host__ __device__ inline UnitCut cut_units(const SplitRule& rule, int32_t splits, int32_t b, int32_t batch,
                                             int32_t in_call) {
  const int32_t groups = divide_up(splits, kSplitGroup) * rule.lists;
  if (groups == 0 || splits > rule.most_grouped) return {1, GroupMerge::kNobody};
  // Fewer groups than for half of the blocks leave too many warps idle.
  if (groups <= rule.block_groups && 2 * groups >= rule.block_groups) return {1, GroupMerge::kBlock};
  if (rule.many_of_a_call && in_call > 0) {
    // One unit a warp if that keeps nearly all warps busy.
    const int32_t share = divide_up(in_call, rule.warps);
    if (2 * share <= kSplitGroup) return {share, GroupMerge::kNobody};
    const int32_t whole = divide_up(share, kSplitGroup);
    constexpr int32_t kMostGroups = 4;
    if (whole == 1 ||
        (whole <= kMostGroups && in_call / (whole * kSplitGroup) >= rule.warps - rule.warps / 8))
      return {whole * kSplitGroup, GroupMerge::kWarp};
  }
  // The last sequences of the batch are cut more finely, so that warps finish at about the same time.
  const int32_t tail = divide_up(rule.warps, groups);
  return b < batch - tail ? UnitCut{kSplitGroup, GroupMerge::kWarp} : UnitCut{1, GroupMerge::kNobody};
}

/// The most splits of one list of up to `longest` keys.
inline int32_t most_splits(const SplitRule& rule, int64_t longest) {
  const int64_t by_most = (longest + rule.most - 1) / rule.most;
  const int64_t by_least = (longest + rule.least - 1) / rule.least;
  const int64_t even = (int64_t{rule.units} + rule.lists - 1) / rule.lists;
  return static_cast<int32_t>(by_most > even ? by_most : by_least < even ? by_least : even);
}

// Tiles that a block has room for when it finds the units of work by itself; most_self_scheduled() decides.
constexpr int32_t kMostSelfScheduled = 32;

/// What units of work need to know of a tile; in passes over all keys, of a sequence, whose keys then are the
/// list's own.
struct alignas(16) UnitTile {
  int32_t sequence;
  int32_t q_row, rows;  // of the tile
  int32_t row_chunks;   // units that share a stretch of a list
  int32_t split;        // keys of a split
  int32_t unit_splits;  // splits of a unit
  GroupMerge merge;
  int32_t members;  // of an anchor's sets
  int32_t own;      // own keys after the members
  int32_t candidates;
  int32_t limit;  // keys that the first row sees, less the members
  int32_t set;    // index of its sets, -1 without a place
};

/// Dimension of value `index` of a partial result, in the order in which the lanes of a warp hold them.
__host__ __device__ inline int stored_dimension(int index) {
  return index / 32 * 32 + index % 4 * 8 + index % 32 / 4;
}

struct DecodeCall {
  AttentionParams params;
  Maxima maxima;
  float scale_log2 = 0;      // score_scale * log2(e)
  int32_t sets = 0;          // S
  int32_t readers = 0;       // lists attended per tile: one per KV head, or per query head
  int32_t reader_heads = 0;  // query heads that share a list
  int32_t group = 0;         // query heads of a KV head
  int32_t tiles = 0;         // of a sequence, at most
  int32_t dense_rows = 0;    // query rows of one unit of work, 8, 16 or 32
  int32_t sparse_rows = 0;
  SplitRule dense_rule;  // of the pass over all keys
  SplitRule sparse_rule;
  int32_t dense_splits = 0;  // partial results that a row and head has room for, by pass
  int32_t sparse_splits = 0;
  int64_t score_stride = 0;     // keys, rounded up to whole stages
  int32_t page_shift = -1;      // log2 of the page size, if it is a power of two
  bool self_scheduled = false;  // units are found in every block, and dealt out in turn instead of counted
  // Strides of tokens and pages in units of bytes: StrideUnits of common/host.h says how far 32 bits
  // reach.
  uint32_t stride_unit = 0, k_token_units = 0, k_page_units = 0, v_token_units = 0, v_page_units = 0;
  uint64_t key_policy = 0;      // of copies of K in the pass without values
  int32_t multiprocessors = 0;  // that the passes over keys may fill

  // Workspace. Row index: (row of q) * H + head. An anchor's two passes use the partial results one after the
  // other.
  int32_t* dense_units = nullptr;    // [B T + 1] units of work before each tile; unused when self-scheduled
  int32_t* sparse_units = nullptr;   // [B T + 1]
  UnitTile* dense_tiles = nullptr;   // [B T]
  UnitTile* sparse_tiles = nullptr;  // [B T]
  int32_t* counters = nullptr;       // [2] units handed out beyond the first two of each block, by pass
  float2* partial_stats = nullptr;   // [rows, splits] largest score (log2) and sum of 2^(score - largest)
  float* partial_out = nullptr;      // [rows, splits, D] unnormalised
  uint16_t* score_codes = nullptr;   // [rows, score_stride]
  float* score_tops = nullptr;       // [rows, score_stride / kChunkKeys]
  uint16_t* rank_digits = nullptr;   // [sets, score_stride] where shared memory is too small for them
  uint32_t* rank_bits = nullptr;     // [sets, score_stride / 32]

  /// Units of one stretch of a list: as many as its query rows need.
  __host__ __device__ int32_t sparse_row_chunks(int32_t q_len) const {
    const int32_t rows = params.budget.own_tile != OwnTile::kOnTop ? 1 : q_len;
    return divide_up(rows * reader_heads, sparse_rows);
  }
};

/// Lays the workspace out from base (null: only measures) and returns its size.
size_t lay_out(DecodeCall& call, std::byte* base);

/// Lists that a call may select, and whether they are so long that rank_digits is wanted.
int64_t select_lists(const DecodeCall& call);
bool select_needs_rank_digits(const DecodeCall& call);

// The kernels of a call, in the order in which they are launched; each throws DeviceError naming the kernel.
void launch_schedule(const DecodeCall& call, cudaStream_t stream);
template <class T, int D>
void launch_attend_pass(const DecodeCall& call, Pass pass, cudaStream_t stream);
void launch_select(const DecodeCall& call, cudaStream_t stream);
void launch_merge(const DecodeCall& call, bool sparse, cudaStream_t stream);

}  // namespace kascade::cuda
