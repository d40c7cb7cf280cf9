// SPDX-License-Identifier: Apache-2.0
// What the launcher (launch.cc) and the kernels compiled per instruction set (*_isa.cc) say to each other:
// plain structs and a table of functions. Everything here is pointers and sizes that are already checked and
// clamped; strides of K and V are in bytes, all others in elements. A group is the query heads that share
// index sets: the R heads of a KV head, or one query head when query heads own the sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kascade::cpu {

/// Keys are attended in blocks of this many, at multiples of it: the unit in which prefill updates its
/// softmax. A multiple of every register block of rows (4, 6, 8) and of 16.
constexpr int kBlockKeys = 96;
/// Keys (or members of a set) in one work item of decode. Partial results are merged in order, so it fixes
/// the bits.
constexpr int kSplitKeys = 512;
/// Query rows that one pass over the keys serves.
constexpr int kPassRows = 256;

enum class Stored : uint8_t { kF32, kF16, kBF16 };

/// Where the rows of one KV head of one sequence lie.
struct CacheView {
  const char* k = nullptr;  // of token 0 (packed) or slot 0 of page 0
  const char* v = nullptr;
  int64_t k_page_stride = 0, k_token_stride = 0;
  int64_t v_page_stride = 0, v_token_stride = 0;
  const int32_t* page_table = nullptr;  // null = packed
  int32_t page_size = 1;
  int32_t page_shift = -1;  // log2(page_size), -1 when it is no power of two
  Stored stored = Stored::kF32;
};

/// Keys that rows attend, ascending: [0, range_end), or list[0, list_count) and then [own_begin, own_end).
struct KeySource {
  const int32_t* list = nullptr;  // null = range
  int64_t list_count = 0;
  int64_t own_begin = 0, own_end = 0;
  int64_t range_end = 0;

  [[gnu::always_inline]] int64_t size() const {
    return list != nullptr ? list_count + (own_end - own_begin) : range_end;
  }
};

/// The query rows of one group in one tile (or in a block of rows of a dense call). Row r is head r / tokens
/// of the group and token r % tokens; token t sits at position first_position + t and sees keys up to it.
struct RowBlock {
  const float* q = nullptr;  // of head 0, token 0
  int64_t q_token_stride = 0, q_head_stride = 0;
  float* out = nullptr;
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // null = not wanted
  int64_t lse_token_stride = 0;
  int64_t first_position = 0;
  int32_t tokens = 0, heads = 0;
  int32_t head_dim = 0;
  float score_scale = 1;  // of q.k, to the base 2: softmax scale * scale of the keys * log2(e)
  float value_scale = 1;

  [[gnu::always_inline]] int32_t rows() const { return tokens * heads; }
};

/// Which members a set gets, and where they go.
struct SetWork {
  int64_t candidates = 0, sinks = 0, recent_begin = 0, ranked = 0;  // SetBudget
  int64_t own_end = 0;                                              // own keys are [candidates, own_end)
  int32_t* members = nullptr;                                       // [capacity]
  int32_t* count = nullptr;
  int64_t capacity = 0;
  float* pooled = nullptr;         // where the caller wants the candidates' weights; null = not wanted
  float* own_tile_mass = nullptr;  // null = not wanted

  [[gnu::always_inline]] bool covers_all() const {
    return sinks + ranked + (candidates - recent_begin) == candidates;
  }
};

/// What the scratch of one worker must hold, at most.
struct PrefillSizes {
  int64_t head_dim = 0;
  int64_t rows = 0;    // of a group in a tile
  int64_t groups = 1;  // of a tile
  int64_t keys = 0;    // of the longest sequence; 0 for roles that do not select
  int64_t list = 0;    // longest index list of a reuse call
  Stored stored = Stored::kF32;
};

/// One tile of a call of the `aligned` rule (or rows of a dense call): all groups that share its set.
struct PrefillTile {
  RowBlock rows;  // of the first group
  CacheView cache;
  int32_t groups = 1;  // > 1 when all heads own one set; group g reads KV head g
  int64_t q_group_stride = 0, out_group_stride = 0, lse_group_stride = 0;
  int64_t k_group_stride = 0, v_group_stride = 0;  // bytes
  KeySource keys;  // of reuse; other roles attend to what the rows may see, or to the set that they select
  SetWork set;     // of selecting roles
  bool selects = false;         // layer0 (of a set that is needed), anchor
  bool attends_to_set = false;  // anchor, reuse
};

/// A piece of decode: rows of one group against the keys [begin, begin + count) of a source.
struct DecodeSplit {
  RowBlock rows;
  CacheView cache;
  KeySource keys;
  int64_t begin = 0;
  int32_t count = 0;
  int64_t list_size = 0;  // entries that the scratch has for a list
  bool values = true;     // also multiply V
  float* kept = nullptr;  // [rows, kept_stride]: probabilities relative to the split's maximum, by position;
                          // null = not kept
  int64_t kept_stride = 0;
  float* maximum = nullptr;  // [rows] to the base 2
  float* sum = nullptr;      // [rows]
  float* partial = nullptr;  // [rows, padded head dim]
  char* scratch = nullptr;   // of the worker
  // Rows are fetched across pieces: the one that the worker takes next (null = none), to which a kernel
  // writes how many of its rows it has fetched, and whether it found the list ascending and within bounds.
  DecodeSplit* next = nullptr;
  int32_t fetched = 0;
  bool list_is_good = false;
};

/// What is left of a group when all of its splits are done.
struct DecodeMerge {
  RowBlock rows;
  int64_t splits = 0;
  int64_t split_stride = 0;      // rows of maximum and sum between splits (= rows)
  float* maximum = nullptr;      // [splits, rows]
  float* sum = nullptr;          // [splits, rows]
  float* partial = nullptr;      // [splits, rows, padded head dim]; null: no output (an anchor's first pass)
  float* row_maximum = nullptr;  // [rows] out: of all splits; null = not wanted
  float* row_sum = nullptr;      // [rows] out
};

/// Ranks the candidates of a set from the kept probabilities of one or more groups.
struct DecodeSelect {
  SetWork set;
  int32_t groups = 1;
  int32_t rows = 0;  // of a group
  int64_t splits = 0;
  const float* kept = nullptr;  // [groups, rows, kept_stride]
  int64_t kept_stride = 0, kept_group_stride = 0;
  float* maximum = nullptr;  // [groups][splits, rows] in: of the splits; out: factors to the row's maximum
  const float* row_maximum = nullptr;  // [groups][rows]
  const float* row_sum = nullptr;      // [groups][rows]
  int64_t group_stride = 0;            // between groups of maximum
  int64_t row_group_stride = 0;        // between groups of row_maximum and row_sum
  char* scratch = nullptr;
};

/// A piece of an anchor's own sparse pass: like DecodeSplit, but the probabilities are those that were kept.
struct DecodeKept {
  DecodeSplit split;
  const float* factors = nullptr;      // [splits of the first pass, rows]
  const float* row_maximum = nullptr;  // [rows]
};

/// How far ahead a loop that reads memory fetches it, in bytes; 0 = not.
struct ReadAhead {
  int64_t far = 0;   // into the second-level cache
  int64_t near = 0;  // into the first
};

/// The kernels of one instruction set.
struct Kernels {
  size_t (*prefill_scratch_bytes)(const PrefillSizes& sizes);
  /// Computes one tile; scratch is laid out from the same sizes.
  void (*prefill_tile)(const PrefillTile& tile, const PrefillSizes& sizes, char* scratch);

  int64_t (*padded_head_dim)(int64_t head_dim);
  /// keys: of the longest sequence, 0 when nothing is selected.
  size_t (*decode_scratch_bytes)(int64_t head_dim, int64_t list_size, int64_t keys);
  void (*decode_split)(const DecodeSplit& split);
  void (*decode_kept)(const DecodeKept& kept);
  /// Merges in order, turns maxima into factors and writes the output. Returns false when some row's kept
  /// probabilities sum to too little to be divided by it; the caller then computes them afresh.
  bool (*decode_merge)(const DecodeMerge& merge, bool kept);
  void (*decode_select)(const DecodeSelect& select);

  /// The top-k of pooled weights (select.h), for tests and benches; scratch holds select_scratch_size(n)
  /// elements.
  int64_t (*select_scratch_size)(int64_t n);
  int64_t (*select_ranked)(const float* weights, int64_t n, int64_t k, int32_t first, int32_t* members,
                           uint32_t* scratch);

  // The machine's limits, for benches. The multiply functions return how many floating-point operations they
  // did.
  void (*read_memory)(const char* data, int64_t bytes, const ReadAhead& ahead, float* sink);
  double (*multiply_floats)(int64_t rounds, float* sink);
  double (*multiply_bfloats)(int64_t rounds,
                             float* sink);  // of bf16 products where there are any, else of floats
};

}  // namespace kascade::cpu
