// SPDX-License-Identifier: Apache-2.0
// The pass over keys of a decode call (docs/kernels/decode.md): a block works on units of split_keys() keys
// of one list, its warps take the chunks in turn, each streaming K and V through stages of its own in shared
// memory, and leaves one partial result per query row.
#pragma once

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/launch.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/ptx/async_copy.cuh"
#include "attention/cuda/ptx/mma.cuh"

namespace kascade::cuda {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
// A row's reference score moves only when a score passes it by this much (log2): 2^8 is harmless in any type.
constexpr float kReferenceSlack = 8.0f;

template <int D, Pass pass>
struct AttendShape {
  // Keys of a stage, and what one lane addresses: a row of K alone, or lanes 0..15 of K and lanes 16..31 of
  // V.
  static constexpr int kStageKeys = pass == Pass::kScore ? kScoreStageKeys : kChunkKeys;
  static constexpr int kTileBytes = kStageKeys * D * 2;
  static constexpr int kStageBytes = pass == Pass::kScore ? kTileBytes : 2 * kTileBytes;
  // Two blocks a multiprocessor, so that one streams while the other merges. The number of warps decides
  // which keys a warp sums, so it depends on nothing that batch mates could change.
  static constexpr int kBlocks = 2;
  static constexpr int kWarps = kStageBytes <= 4096 ? 8 : kStageBytes <= 8192 ? 4 : 2;
  static constexpr int kStages = 96 * 1024 / kWarps / kStageBytes;
  static constexpr int kThreads = kWarps * 32;
  // Rows whose sums the warps exchange at a time.
  static constexpr int kRoundRows = 8 * 1024 / (kWarps * D * 4);
};

/// One unit of work: query rows that share split_keys() keys of a list. A block's warps take its chunks in
/// turn.
struct Unit {
  int32_t chunks;     // stages of keys; 0: no more work
  int32_t key_begin;  // index of the unit's first key in the list
  int32_t split;
  int32_t q_row;  // row of q of the tile's row 0
  int32_t first;  // unit row i is row (first + i) / heads of the tile, head head_begin + (first + i) % heads
  int32_t rows;
  int32_t head_begin;
  int32_t limit;  // keys of the list that the unit's first row sees; later rows of the tile see one more each
  int32_t keep_scores;
  // The list: `members` positions from a set, then the tile's own keys from `candidates` on; `length` in all.
  int32_t length, members, candidates;
  int32_t kv_head;
  int32_t sequence;
  int64_t set_begin;  // of its members in positions
};

constexpr int kUnitSlots = 4;

template <int D, Pass pass>
struct BlockMemory {
  using Shape = AttendShape<D, pass>;
  alignas(128) unsigned char stages[Shape::kWarps][Shape::kStages][Shape::kStageBytes];
  uint32_t exists[Shape::kWarps][Shape::kStages];  // bit k: key k of the chunk exists
  Unit units[kUnitSlots];
  float2 stats[2][32][Shape::kWarps];  // by parity of the unit
  float sums[pass == Pass::kScore ? 1 : Shape::kRoundRows][Shape::kWarps][D];
};

/// Where row `row` of a tile keeps its 16-byte pieces: swizzled so that eight rows at one piece hit all
/// banks.
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

/// Finds the next unit of work that has keys; the whole warp calls it, `slot` is the block's.
template <int D, Pass pass>
__device__ void find_unit(const DecodeCall& call, int32_t index, int32_t* counter, Unit& slot) {
  constexpr bool kSparse = pass == Pass::kSparse;
  const AttentionParams& p = call.params;
  const int32_t group = p.query_heads / p.kv_heads;
  const int32_t* unit_begin = kSparse ? call.sparse_units : call.dense_units;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t split = kSparse ? call.sparse_split : call.dense_split;
  Unit unit = {};
  for (;;) {
    if (index < 0) {
      if (lane == 0) index = atomicAdd(counter, 1);
      index = __shfl_sync(kFullWarp, index, 0) + 2 * static_cast<int32_t>(gridDim.x);
    }
    if (index >= unit_begin[p.batch]) break;
    const int32_t b = find_sequence(unit_begin, p.batch, index);
    int32_t local = index - unit_begin[b];
    const StepSequence s = load_sequence(call, b);
    unit.sequence = b;
    if constexpr (kSparse) {
      const int32_t tile_rows = rows_are_tiles(call) ? 1 : s.q_len;
      const int32_t row_chunks = divide_up(tile_rows * call.reader_heads, call.sparse_rows);
      const int32_t splits = (unit_begin[b + 1] - unit_begin[b]) / (s.tiles * row_chunks * call.readers);
      const int32_t reader = local % call.readers;
      local /= call.readers;
      unit.first = local % row_chunks * call.sparse_rows;
      local /= row_chunks;
      unit.split = local % splits;
      const StepTile tile = load_tile(call, s, b, local / splits);
      unit.members = member_count(call, tile, reader);
      unit.candidates = static_cast<int32_t>(tile.budget.candidates);
      unit.length = unit.members + own_keys(call, s, tile);
      unit.set_begin = (max(tile.set, int64_t{0}) * call.sets + set_of_reader(call, reader)) * p.capacity;
      unit.kv_head = call.reader_heads == 1 ? reader / group : reader;
      unit.q_row = s.row_begin + tile.row_begin;
      unit.rows = min(call.sparse_rows, tile.rows * call.reader_heads - unit.first);
      unit.head_begin = reader * call.reader_heads;
      unit.limit =
          unit.members + s.start + tile.row_begin + unit.first / call.reader_heads + 1 - unit.candidates;
    } else {
      unit.kv_head = local % p.kv_heads;
      local /= p.kv_heads;
      const int32_t row_chunks = divide_up(s.q_len * group, call.dense_rows);
      unit.first = local % row_chunks * call.dense_rows;
      unit.split = local / row_chunks;
      unit.length = s.kv_len;
      unit.q_row = s.row_begin;
      unit.rows = min(call.dense_rows, s.q_len * group - unit.first);
      unit.head_begin = unit.kv_head * group;
      unit.limit = s.start + unit.first / group + 1;
      unit.keep_scores =
          selects(p.role) && is_needed(call, p.set_owner == SetOwner::kQueryHead  ? unit.head_begin
                                             : p.set_owner == SetOwner::kAllHeads ? 0
                                                                                  : unit.kv_head);
    }
    unit.key_begin = unit.split * split;
    unit.chunks = divide_up(min(split, unit.length - unit.key_begin), AttendShape<D, pass>::kStageKeys);
    if (unit.chunks > 0) break;
    index = -1;
  }
  if (index >= unit_begin[p.batch]) unit.chunks = 0;
  if (lane == 0) slot = unit;
  if (unit.chunks == 0) return;
  // Brings the query rows into the first-level cache, so that no warp waits for them when the unit begins.
  constexpr int kLines = D * 2 / 128;
  const int32_t heads = kSparse ? call.reader_heads : group;
  for (int32_t i = lane; i < unit.rows * kLines; i += 32) {
    const int32_t n = unit.first + i / kLines;
    const char* q =
        static_cast<const char*>(p.q) + 2 * ((int64_t{unit.q_row} + n / heads) * p.q_row_stride +
                                             (int64_t{unit.head_begin} + n % heads) * p.q_head_stride);
    touch(q + i % kLines * 128);
  }
}

/// The fetching side of a warp: walks its chunks of the block's units, ahead of the computing side.
template <class T, int D, Pass pass>
class Fetcher {
  using Shape = AttendShape<D, pass>;
  using Memory = BlockMemory<D, pass>;
  static constexpr bool kSparse = pass == Pass::kSparse;

 public:
  __device__ Fetcher(const DecodeCall& call, Memory& memory, int warp, int lane)
      : call_(call), memory_(memory), warp_(warp), lane_(lane) {}

  /// Starts the copies of the next chunk into a stage, unless it belongs to a unit after number `last_unit`.
  __device__ bool fetch(int stage, int32_t last_unit) {
    if (chunk_ >= chunks_ && !next_unit(last_unit)) return false;
    if (fresh_) look_ahead();
    fresh_ = false;
    const AttentionParams& p = call_.params;
    int64_t offset = -1;
    if (position_ >= 0) {
      const int64_t page_stride = for_v() ? p.v_page_stride : p.k_page_stride;
      const int64_t token_stride = for_v() ? p.v_token_stride : p.k_token_stride;
      offset = p.page_table == nullptr
                   ? (packed_begin_ + position_) * token_stride
                   : int64_t{page_} * page_stride +
                         int64_t{static_cast<uint32_t>(position_) % static_cast<uint32_t>(p.page_size)} *
                             token_stride;
    }
    const uint32_t exists = __ballot_sync(kFullWarp, position_ >= 0);
    if (lane_ == 0) memory_.exists[warp_][stage] = exists;
    const uint32_t base = shared_address(memory_.stages[warp_][stage]);
    copy_rows(base, static_cast<const T*>(p.k) + head_offset_k_, offset, 0);
    if constexpr (pass != Pass::kScore)
      copy_rows(base + Shape::kTileBytes, static_cast<const T*>(p.v) + head_offset_v_, offset,
                Shape::kStageKeys);
    commit_copies();
    chunk_ += Shape::kWarps;
    if (chunk_ < chunks_) {
      look_ahead();
    } else {
      next_unit(last_unit);
    }
    return true;
  }

 private:
  /// Goes to the next unit that has a chunk for this warp; false if there is none up to number last_unit.
  __device__ bool next_unit(int32_t last_unit) {
    while (chunk_ >= chunks_) {
      if (unit_ == last_unit) return false;
      const Unit& unit = memory_.units[(unit_ + 1) % kUnitSlots];
      if (unit.chunks == 0) return false;
      ++unit_;
      begin(unit);
    }
    return true;
  }

  __device__ bool for_v() const { return lane_ >= Shape::kStageKeys; }

  __device__ void begin(const Unit& unit) {
    const AttentionParams& p = call_.params;
    chunk_ = warp_;
    chunks_ = unit.chunks;
    key_begin_ = unit.key_begin;
    length_ = unit.length;
    members_ = unit.members;
    candidates_ = unit.candidates;
    list_ = p.positions + unit.set_begin;
    head_offset_k_ = unit.kv_head * p.k_head_stride;
    head_offset_v_ = unit.kv_head * p.v_head_stride;
    if (p.page_table == nullptr) {
      packed_begin_ = p.cu_seqlens_kv[unit.sequence];
    } else {
      pages_ = p.page_table + unit.sequence * p.page_table_stride;
    }
    ahead_ = load_position(chunk_);
    fresh_ = true;
  }

  __device__ void copy_rows(uint32_t shared, const T* base, int64_t offset, int first_lane) {
    constexpr int kPieces = D / 8, kKeysAtOnce = 32 / kPieces;
    const int piece = lane_ % kPieces;
#pragma unroll
    for (int i = 0; i < Shape::kStageKeys / kKeysAtOnce; ++i) {
      const int key = i * kKeysAtOnce + lane_ / kPieces;
      const int64_t row = __shfl_sync(kFullWarp, offset, first_lane + key);
      copy_async_16(shared + piece_offset<D>(tile_row(key), piece), base + (row < 0 ? 0 : row) + piece * 8,
                    row < 0 ? 0 : 16);
    }
  }

  /// Makes chunk_ current from what was loaded for it before, and starts the loads for the one after it.
  __device__ void look_ahead() {
    const AttentionParams& p = call_.params;
    position_ = chunk_ < chunks_ ? checked_position(index_of(chunk_), ahead_) : -1;
    if (p.page_table != nullptr && position_ >= 0)
      page_ = pages_[static_cast<uint32_t>(position_) / static_cast<uint32_t>(p.page_size)];
    ahead_ = load_position(chunk_ + Shape::kWarps);
  }

  __device__ int32_t index_of(int32_t chunk) const {
    return key_begin_ + chunk * Shape::kStageKeys + lane_ % Shape::kStageKeys;
  }

  __device__ int32_t load_position(int32_t chunk) const {
    const int32_t index = index_of(chunk);
    return kSparse && chunk < chunks_ && index < members_ ? list_[index] : 0;
  }

  /// Position of key `index` of the list, given what was loaded for it; -1 if there is none.
  __device__ int32_t checked_position(int32_t index, int32_t loaded) const {
    if (index >= length_) return -1;
    if (!kSparse) return index;
    if (index >= members_) return candidates_ + index - members_;
    // A set from the caller may hold anything.
    return loaded >= 0 && loaded < candidates_ ? loaded : -1;
  }

  const DecodeCall& call_;
  Memory& memory_;
  const int warp_, lane_;
  int32_t unit_ = -1;  // number of the current unit, counted from the block's first

  int32_t chunk_ = 0, chunks_ = 0;
  int32_t key_begin_ = 0, length_ = 0, members_ = 0, candidates_ = 0;
  int64_t head_offset_k_ = 0, head_offset_v_ = 0;
  int64_t packed_begin_ = 0;
  const int32_t* list_ = nullptr;
  const int32_t* pages_ = nullptr;
  int32_t position_ = -1, ahead_ = 0, page_ = 0;
  bool fresh_ = false;  // nothing of the unit has been resolved yet
};

/// The computing side: scores, softmax and weighted values of up to 16 * row_tiles query rows. A thread holds
/// rows lane / 4 and lane / 4 + 8 of each row tile, and of every chunk the keys 4 * (lane % 4) .. + 3.
template <class T, int D, int row_tiles, Pass pass>
class Computer {
  using Shape = AttendShape<D, pass>;
  using Memory = BlockMemory<D, pass>;
  static constexpr bool kValues = pass != Pass::kScore;
  static constexpr int kOutTiles = kValues ? D / 8 : 1;

 public:
  __device__ Computer(const DecodeCall& call, Memory& memory, int warp, int lane)
      : call_(call), memory_(memory), warp_(warp), lane_(lane) {}

  __device__ void begin(const Unit& unit) {
    const AttentionParams& p = call_.params;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = row_of(t, half);
        const bool exists = i < unit.rows;
        const int n = unit.first + i;
        const int64_t q_row = unit.q_row + n / heads(), head = unit.head_begin + n % heads();
        limit_[t][half] = exists ? unit.limit + n / heads() - unit.first / heads() : 0;
        row_[t][half] = static_cast<int32_t>(q_row * p.query_heads + head);
        const uint32_t* q = reinterpret_cast<const uint32_t*>(
            static_cast<const T*>(p.q) + q_row * p.q_row_stride + head * p.q_head_stride);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          q_[t][step][half] = exists ? q[step * 8 + lane_ % 4] : 0;
          q_[t][step][half + 2] = exists ? q[step * 8 + 4 + lane_ % 4] : 0;
        }
        reference_[t][half] = -INFINITY;
        sum_[t][half] = 0;
      }
#pragma unroll
      for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[t][d][e] = 0;
    }
  }

  /// Adds one stage of keys; exists: bit k is set when its key k exists.
  __device__ void add_stage(const Unit& unit, int32_t chunk, int stage, uint32_t exists) {
    constexpr int kChunks = Shape::kStageKeys / kChunkKeys;
    const uint32_t base = shared_address(memory_.stages[warp_][stage]);
    float s[kChunks][row_tiles][2][4];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) score(s[c], base + c * kChunkKeys * D * 2);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      key_ = unit.key_begin + chunk * Shape::kStageKeys + c * kChunkKeys;
      mask(s[c], unit, exists >> (c * kChunkKeys) & 0xFFFFu);
      softmax(s[c], unit);
    }
    if constexpr (kValues) add_values(s[0], base + Shape::kTileBytes);
  }

  /// Adds up the warps' results and writes the unit's partial results; all warps call it.
  __device__ void merge(const Unit& unit, int parity) {
    float2(&stats)[32][Shape::kWarps] = memory_.stats[parity];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[t][half];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        if ((lane_ & 3) == 0) stats[row_of(t, half)][warp_] = make_float2(reference_[t][half], sum);
      }
    __syncthreads();
    const int thread = warp_ * 32 + lane_;
    const int splits = pass == Pass::kSparse ? call_.sparse_splits : call_.dense_splits;
    if (thread < unit.rows) {
      const float top = top_of(stats[thread]);
      float total = 0;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w)
        total += stats[thread][w].y * factor_of(stats[thread][w].x, top);
      call_.partial_stats[row_index(unit, thread) * splits + unit.split] = make_float2(top, total);
    }
    if constexpr (kValues) {
      for (int first = 0; first < unit.rows; first += Shape::kRoundRows) {
        if (first > 0) __syncthreads();
#pragma unroll
        for (int t = 0; t < row_tiles; ++t)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = row_of(t, half);
            if (row < first || row >= first + Shape::kRoundRows || row >= unit.rows) continue;
            const float factor = factor_of(reference_[t][half], top_of(stats[row]));
            float* sums = &memory_.sums[row - first][warp_][2 * (lane_ & 3)];
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d)
              *reinterpret_cast<float2*>(sums + 8 * d) =
                  make_float2(out_[t][d][2 * half] * factor, out_[t][d][2 * half + 1] * factor);
          }
        __syncthreads();
        const int count = min(Shape::kRoundRows, unit.rows - first) * D;
        for (int i = thread; i < count; i += Shape::kWarps * 32) {
          const int row = i / D, d = i % D;
          float sum = 0;
#pragma unroll
          for (int w = 0; w < Shape::kWarps; ++w) sum += memory_.sums[row][w][d];
          call_.partial_out[(row_index(unit, first + row) * splits + unit.split) * D + d] = sum;
        }
      }
    }
  }

 private:
  // Half h of a row tile: rows lane / 4 + 8 h.
  __device__ int row_of(int tile, int half) const { return tile * 16 + half * 8 + lane_ / 4; }

  /// Row of q times H plus head of unit row i.
  __device__ int64_t row_index(const Unit& unit, int i) const {
    const int n = unit.first + i;
    return int64_t{unit.q_row + n / heads()} * call_.params.query_heads + unit.head_begin + n % heads();
  }
  __device__ int heads() const {
    return pass == Pass::kSparse ? call_.reader_heads : call_.params.query_heads / call_.params.kv_heads;
  }

  __device__ static float top_of(const float2 (&stats)[Shape::kWarps]) {
    float top = stats[0].x;
#pragma unroll
    for (int w = 1; w < Shape::kWarps; ++w) top = fmaxf(top, stats[w].x);
    return top;
  }
  /// What sums relative to `reference` are worth relative to `top`.
  __device__ static float factor_of(float reference, float top) {
    return reference == -INFINITY ? 0 : exp2_fast(reference - top);
  }

  __device__ void score(float (&s)[row_tiles][2][4], uint32_t keys) const {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = 0;
    // Even and odd steps sum apart: a product waits for the one before it in its chain.
    float odd[row_tiles][2][4] = {};
    const int row = (lane_ >> 4) * 8 + (lane_ & 7), piece = (lane_ >> 3) & 1;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t k[4];
      load_matrices(k, keys + piece_offset<D>(row, step * 2 + piece));
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        multiply_add<T>(step % 2 == 0 ? s[t][0] : odd[t][0], q_[t][step], k[0], k[1]);
        multiply_add<T>(step % 2 == 0 ? s[t][1] : odd[t][1], q_[t][step], k[2], k[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = (s[t][n][e] + odd[t][n][e]) * call_.scale_log2;
  }

  /// -inf for keys that do not exist or that a row may not see.
  __device__ void mask(float (&s)[row_tiles][2][4], const Unit& unit, uint32_t exists) const {
    if (exists == 0xFFFFu && key_ + kChunkKeys <= unit.limit) return;
    const int key = 4 * (lane_ & 3);
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = key + 2 * n + (e & 1);
          if ((exists >> k & 1u) == 0 || key_ + k >= limit_[t][e >> 1]) s[t][n][e] = -INFINITY;
        }
  }

  /// Scores become 2^(score - reference) of their row.
  __device__ void softmax(float (&s)[row_tiles][2][4], const Unit& unit) {
    float factor[row_tiles][2];
    bool moved = false;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[t][half] = 1;
        // No row of the unit lies here; the scores are those of a zero query, finite, and go nowhere.
        if (t * 16 + half * 8 >= unit.rows) continue;
        float* a = &s[t][0][2 * half];
        float* b = &s[t][1][2 * half];
        float top = fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        if constexpr (pass != Pass::kSparse) {
          if (unit.keep_scores != 0 && row_of(t, half) < unit.rows) store_scores(row_[t][half], top, a, b);
        }
        if (top > reference_[t][half] + kReferenceSlack) {
          factor[t][half] = exp2_fast(reference_[t][half] - top);
          reference_[t][half] = top;
          moved = true;
        }
        const float reference = reference_[t][half] == -INFINITY ? 0 : reference_[t][half];
        a[0] = exp2_fast(a[0] - reference);
        a[1] = exp2_fast(a[1] - reference);
        b[0] = exp2_fast(b[0] - reference);
        b[1] = exp2_fast(b[1] - reference);
        sum_[t][half] = sum_[t][half] * factor[t][half] + ((a[0] + a[1]) + (b[0] + b[1]));
      }
    if constexpr (kValues) {
      if (!__any_sync(kFullWarp, moved)) return;
#pragma unroll
      for (int t = 0; t < row_tiles; ++t)
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) out_[t][d][e] *= factor[t][e >> 1];
    }
  }

  /// 16-bit distances below the chunk's top: four keys, eight bytes a thread, one 32-byte sector a row.
  __device__ void store_scores(int64_t row, float top, const float* a, const float* b) const {
    const auto code = [top](float x) {
      // A NaN becomes kScoreFarBelow; so does everything when the top is -inf.
      return static_cast<uint32_t>(
          __float2int_rn(fminf((top - x) * kScoreSteps, static_cast<float>(kScoreFarBelow))));
    };
    const uint2 packed = make_uint2(code(a[0]) | code(a[1]) << 16, code(b[0]) | code(b[1]) << 16);
    *reinterpret_cast<uint2*>(call_.score_codes + row * call_.score_stride + key_ + 4 * (lane_ & 3)) = packed;
    if ((lane_ & 3) == 0) call_.score_tops[(row * call_.score_stride + key_) / kChunkKeys] = top;
  }

  __device__ void add_values(const float (&p)[row_tiles][2][4], uint32_t values) {
    uint32_t weights[row_tiles][4];
#pragma unroll
    for (int t = 0; t < row_tiles; ++t) {
      weights[t][0] = pack_pair<T>(p[t][0][0], p[t][0][1]);
      weights[t][1] = pack_pair<T>(p[t][0][2], p[t][0][3]);
      weights[t][2] = pack_pair<T>(p[t][1][0], p[t][1][1]);
      weights[t][3] = pack_pair<T>(p[t][1][2], p[t][1][3]);
    }
    const int row = ((lane_ >> 3) & 1) * 8 + (lane_ & 7), piece = lane_ >> 4;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      uint32_t v[4];
      load_matrices_transposed(v, values + piece_offset<D>(row, d * 2 + piece));
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        multiply_add<T>(out_[t][2 * d], weights[t], v[0], v[1]);
        multiply_add<T>(out_[t][2 * d + 1], weights[t], v[2], v[3]);
      }
    }
  }

  const DecodeCall& call_;
  Memory& memory_;
  const int warp_, lane_;
  int32_t key_ = 0;              // index in the list of the chunk's first key
  int32_t limit_[row_tiles][2];  // keys of the list that the row sees
  int32_t row_[row_tiles][2];    // row of q times H plus head
  uint32_t q_[row_tiles][D / 16][4];
  float out_[row_tiles][kOutTiles][4];
  float reference_[row_tiles][2], sum_[row_tiles][2];
};

/// Waits until at most `pending` of the thread's copy groups are unfinished.
template <int most>
__device__ inline void wait_copies_below(int pending) {
  if constexpr (most == 0) {
    wait_copies<0>();
  } else if (pending >= most) {
    wait_copies<most>();
  } else {
    wait_copies_below<most - 1>(pending);
  }
}

template <class T, int D, int row_tiles, Pass pass>
__global__ void __launch_bounds__(AttendShape<D, pass>::kThreads, AttendShape<D, pass>::kBlocks)
    attend_kernel(const __grid_constant__ DecodeCall call) {
  using Shape = AttendShape<D, pass>;
  using Memory = BlockMemory<D, pass>;
  extern __shared__ __align__(128) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int32_t* counter = call.counters + (pass == Pass::kSparse ? 1 : 0);
  wait_for_previous_kernel();
  allow_next_kernel();
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  if (warp < 2)
    find_unit<D, pass>(call, block + warp * static_cast<int32_t>(gridDim.x), counter, memory.units[warp]);
  __syncthreads();

  Fetcher<T, D, pass> fetcher(call, memory, warp, lane);
  Computer<T, D, row_tiles, pass> computer(call, memory, warp, lane);
  int fetched = 0, consumed = 0;   // chunks of this warp
  int fetch_stage = 0, stage = 0;  // both counts modulo kStages
  const auto refill = [&](int32_t last_unit) {
    while (fetched < consumed + Shape::kStages && fetcher.fetch(fetch_stage, last_unit)) {
      ++fetched;
      fetch_stage = fetch_stage + 1 == Shape::kStages ? 0 : fetch_stage + 1;
    }
  };
#pragma unroll 1
  for (int32_t number = 0;; ++number) {
    const Unit& unit = memory.units[number % kUnitSlots];
    if (unit.chunks == 0) break;
    refill(number + 1);
    computer.begin(unit);
    // The unit after the next, for use when every warp is past this one.
    if (warp == number % Shape::kWarps)
      find_unit<D, pass>(call, -1, counter, memory.units[(number + 2) % kUnitSlots]);
#pragma unroll 1
    for (int32_t chunk = warp; chunk < unit.chunks; chunk += Shape::kWarps) {
      refill(number + 1);
      wait_copies_below<Shape::kStages - 1>(fetched - consumed - 1);
      __syncwarp();
      computer.add_stage(unit, chunk, stage, memory.exists[warp][stage]);
      __syncwarp();
      ++consumed;
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    refill(number + 1);
    computer.merge(unit, number % 2);
  }
}

template <class T, int D, int row_tiles, Pass pass>
void launch_attend_kernel(const DecodeCall& call, cudaStream_t stream) {
  using Shape = AttendShape<D, pass>;
  const char* name = pass == Pass::kScore   ? "decode_score"
                     : pass == Pass::kDense ? "decode_dense"
                                            : "decode_sparse";
  LaunchShape shape;
  shape.blocks = multiprocessors(name) * Shape::kBlocks;
  shape.threads = Shape::kThreads;
  shape.shared_bytes = sizeof(BlockMemory<D, pass>);
  launch(name, attend_kernel<T, D, row_tiles, pass>, shape, stream, call);
}

template <class T, int D, Pass pass>
void launch_attend_rows(const DecodeCall& call, cudaStream_t stream) {
  // 256 dimensions leave no registers for a second tile of rows.
  if constexpr (D <= 128) {
    if ((pass == Pass::kSparse ? call.sparse_rows : call.dense_rows) > 16)
      return launch_attend_kernel<T, D, 2, pass>(call, stream);
  }
  launch_attend_kernel<T, D, 1, pass>(call, stream);
}

template <class T, int D>
void launch_attend_pass(const DecodeCall& call, Pass pass, cudaStream_t stream) {
  switch (pass) {
    case Pass::kDense:
      return launch_attend_rows<T, D, Pass::kDense>(call, stream);
    case Pass::kScore:
      return launch_attend_rows<T, D, Pass::kScore>(call, stream);
    case Pass::kSparse:
      return launch_attend_rows<T, D, Pass::kSparse>(call, stream);
  }
}

}  // namespace kascade::cuda
