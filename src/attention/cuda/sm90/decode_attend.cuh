// SPDX-License-Identifier: Apache-2.0
// The pass over keys of a decode call (docs/kernels/decode.md): a warp works on units of split_keys() keys of
// a list, streams their K and V through stages of its own in shared memory, and leaves one partial result per
// query row. Warps never wait for each other.
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

template <int D, int row_tiles, Pass pass>
struct AttendShape {
  // A stage holds one chunk: its rows of K alone, or lanes 0..15 address those of K and lanes 16..31 those of
  // V.
  static constexpr int kTileBytes = kChunkKeys * D * 2;
  static constexpr int kStageBytes = pass == Pass::kScore ? kTileBytes : 2 * kTileBytes;
  // Two blocks a multiprocessor with as many warps as registers allow.
  static constexpr int kBlocks = 2;
  static constexpr int kWarps = kStageBytes <= 4096 && row_tiles == 1 ? 8 : kStageBytes <= 8192 ? 4 : 2;
  static constexpr int kMostStages = 96 * 1024 / kWarps / kStageBytes;
  static constexpr int kStages = kMostStages < 6 ? kMostStages : 6;
  static constexpr int kThreads = kWarps * 32;
  // A warp's units in work: those that its stages hold keys of, and the next.
  static constexpr int kUnitSlots = kStages < 4 ? 4 : 8;
};

/// One unit of work: query rows that share a stretch of a list.
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
  int32_t next;       // index that the warp's next unit may have, when units are dealt out in turn
  int64_t set_begin;  // of its members in positions
};

template <int D, int row_tiles, Pass pass>
struct BlockMemory {
  using Shape = AttendShape<D, row_tiles, pass>;
  alignas(1024) unsigned char stages[Shape::kWarps][Shape::kStages][Shape::kStageBytes];
  uint32_t exists[Shape::kWarps][Shape::kStages];  // bit k: key k of the chunk exists
  Unit units[Shape::kWarps][Shape::kUnitSlots];
  int32_t unit_begin[kMostSelfScheduled + 1];
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

__device__ inline int32_t page_of(const DecodeCall& call, int32_t position) {
  return call.page_shift >= 0 ? position >> call.page_shift
                              : static_cast<int32_t>(static_cast<uint32_t>(position) /
                                                     static_cast<uint32_t>(call.params.page_size));
}

/// Units that warps have without asking, one each.
__device__ inline int32_t first_units() { return static_cast<int32_t>(gridDim.x * blockDim.x) / 32; }

/// Units of work before each sequence of a self-scheduled call, by one warp.
template <bool kSparse>
__device__ void schedule_block(const DecodeCall& call, int32_t* unit_begin) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  // A power of two of lanes for each sequence.
  const int32_t lanes = 32 >> (32 - __clz(call.params.batch - 1));
  const int32_t b = lane / lanes;
  uint32_t status = 0;
  Units units;
  if (b < call.params.batch) {
    const unsigned together = (lanes == 32 ? kFullWarp : (1u << lanes) - 1) << (b * lanes);
    units = count_units<1>(
        call, b, lane % lanes, lanes, [&](int32_t own) { return __reduce_max_sync(together, own); }, &status);
  }
  int32_t sum = lane % lanes > 0 ? 0 : kSparse ? units.sparse : units.dense;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 0) unit_begin[0] = 0;
  if (lane % lanes == 0) unit_begin[b + 1] = sum;
  // Once a call: an anchor's pass over its sets has nothing to add.
  const bool reports = !kSparse || call.params.role == Role::kReuse;
  if (reports && blockIdx.x == 0 && status != 0 && call.params.status != nullptr)
    atomicOr(call.params.status, status);
}

/// Finds the next unit of work that has keys and brings into the first-level cache what the warp will ask for
/// when it begins. index: where to look first.
template <int D, Pass pass>
__device__ void find_unit(const DecodeCall& call, const int32_t* block_units, int32_t index, int32_t* counter,
                          bool lists_are_ready, Unit& slot) {
  constexpr bool kSparse = pass == Pass::kSparse;
  const AttentionParams& p = call.params;
  const int32_t* unit_begin = call.self_scheduled ? block_units
                              : kSparse           ? call.sparse_units
                                                  : call.dense_units;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t end = unit_begin[p.batch];
  const int32_t heads = kSparse ? call.reader_heads : call.group;
  Unit unit = {};
#pragma unroll 1
  while (index < end) {
    const int32_t b = find_sequence(unit_begin, p.batch, index);
    auto local = static_cast<uint32_t>(index - unit_begin[b]);
    unit.sequence = b;
    int32_t split;
    if constexpr (kSparse) {
      const auto readers = static_cast<uint32_t>(call.readers);
      const auto reader = static_cast<int32_t>(local % readers);
      local /= readers;
      SparseTile tile;
      if (call.sparse_tiles != nullptr) {
        tile = call.sparse_tiles[b];
      } else {
        const StepSequence s = load_sequence(call, b);
        int32_t tile_index = 0;
        if (s.tiles > 1) {
          const auto tiles = static_cast<uint32_t>(s.tiles);
          const uint32_t units_of_tile =
              static_cast<uint32_t>(unit_begin[b + 1] - unit_begin[b]) / (tiles * readers);
          tile_index = static_cast<int32_t>(local / units_of_tile);
          local %= units_of_tile;
        }
        const StepTile step_tile = load_tile(call, s, b, tile_index);
        tile = sparse_tile(call, s, step_tile, longest_list(call, s, step_tile));
      }
      const auto row_chunks = static_cast<uint32_t>(tile.row_chunks);
      if (row_chunks > 1) {
        unit.first = static_cast<int32_t>(local % row_chunks) * call.sparse_rows;
        local /= row_chunks;
      }
      unit.split = static_cast<int32_t>(local);
      split = tile.split;
      const int64_t list = max(tile.set, int64_t{0}) * call.sets + set_of_reader(call, reader);
      unit.members = tile.members;
      if (p.role == Role::kReuse && tile.set >= 0) unit.members = max(0, min(p.counts[list], p.capacity));
      unit.candidates = tile.candidates;
      unit.length = unit.members + tile.own;
      unit.set_begin = list * p.capacity;
      unit.kv_head = call.reader_heads == call.group ? reader : reader / call.group;
      unit.q_row = tile.q_row;
      unit.rows = min(call.sparse_rows, tile.rows * heads - unit.first);
      unit.head_begin = reader * heads;
      unit.limit = unit.members + tile.limit;
    } else {
      const StepSequence s = load_sequence(call, b);
      const auto kv_heads = static_cast<uint32_t>(p.kv_heads);
      const auto row_chunks = static_cast<uint32_t>(divide_up(s.q_len * heads, call.dense_rows));
      unit.kv_head = static_cast<int32_t>(local % kv_heads);
      local /= kv_heads;
      if (row_chunks > 1) {
        unit.first = static_cast<int32_t>(local % row_chunks) * call.dense_rows;
        local /= row_chunks;
      }
      unit.split = static_cast<int32_t>(local);
      unit.length = s.kv_len;
      split = split_keys(call.dense_rule, s.kv_len);
      unit.q_row = s.row_begin;
      unit.rows = min(call.dense_rows, s.q_len * heads - unit.first);
      unit.head_begin = unit.kv_head * heads;
      unit.limit = s.start + 1;
      unit.keep_scores =
          selects(p.role) && is_needed(call, p.set_owner == SetOwner::kQueryHead  ? unit.head_begin
                                             : p.set_owner == SetOwner::kAllHeads ? 0
                                                                                  : unit.kv_head);
    }
    if (unit.first > 0) unit.limit += unit.first / heads;
    unit.key_begin = unit.split * split;
    unit.chunks = divide_up(max(min(split, unit.length - unit.key_begin), 0), kChunkKeys);
    if (unit.chunks > 0) break;
    index = call.self_scheduled
                ? index + first_units()
                : __shfl_sync(kFullWarp, lane == 0 ? atomicAdd(counter, 1) : 0, 0) + first_units();
  }
  if (index >= end) unit.chunks = 0;
  unit.next = index + first_units();
  if (lane == 0) slot = unit;
  if (unit.chunks == 0) return;
  constexpr int kLines = D * 2 / 128;
#pragma unroll 1
  for (int32_t i = lane; i < unit.rows * kLines; i += 32) {
    const int32_t n = unit.first + i / kLines;
    const char* q =
        static_cast<const char*>(p.q) + 2 * ((int64_t{unit.q_row} + n / heads) * p.q_row_stride +
                                             (int64_t{unit.head_begin} + n % heads) * p.q_head_stride);
    touch(q + i % kLines * 128);
  }
  constexpr int kWords = 32;  // of a line
  if constexpr (kSparse) {
    if (!lists_are_ready) return;
    const int32_t keys = min(unit.members - unit.key_begin, unit.chunks * kChunkKeys);
    const int32_t* list = p.positions + unit.set_begin + unit.key_begin;
    for (int32_t i = lane * kWords; i < keys; i += 32 * kWords) touch(list + i);
  } else if (p.page_table != nullptr) {
    const int32_t keys = min(unit.length - unit.key_begin, unit.chunks * kChunkKeys);
    const int32_t first = page_of(call, unit.key_begin), last = page_of(call, unit.key_begin + keys - 1);
    const int32_t* pages = p.page_table + unit.sequence * p.page_table_stride;
    for (int32_t i = first + lane * kWords; i <= last; i += 32 * kWords) touch(pages + i);
  }
}

/// The fetching side of a warp: walks the chunks of its units, ahead of the computing side.
template <class T, int D, int row_tiles, Pass pass>
class Fetcher {
  using Shape = AttendShape<D, row_tiles, pass>;
  using Memory = BlockMemory<D, row_tiles, pass>;
  static constexpr bool kSparse = pass == Pass::kSparse;
  static constexpr int kPieces = D / 8;  // 16-byte pieces of a row, one a lane

 public:
  __device__ Fetcher(const DecodeCall& call, Memory& memory, int warp, int lane)
      : call_(call), memory_(memory), warp_(warp), lane_(lane) {}

  /// Whether all chunks of the unit have been fetched.
  __device__ bool done() const { return chunk_ >= chunks_; }

  __device__ void begin(const Unit& unit) {
    const AttentionParams& p = call_.params;
    chunk_ = 0;
    chunks_ = unit.chunks;
    key_begin_ = unit.key_begin;
    length_ = unit.length;
    members_ = unit.members;
    candidates_ = unit.candidates;
    list_ = p.positions + unit.set_begin;
    const int piece = lane_ % kPieces;
    k_ = static_cast<const T*>(p.k) + unit.kv_head * p.k_head_stride + piece * 8;
    v_ = static_cast<const T*>(p.v) + unit.kv_head * p.v_head_stride + piece * 8;
    if (p.page_table == nullptr) {
      const int64_t first = p.cu_seqlens_kv[unit.sequence];
      k_ += first * p.k_token_stride;
      v_ += first * p.v_token_stride;
    } else {
      pages_ = p.page_table + unit.sequence * p.page_table_stride;
    }
    position_ = checked_position(0, load_position(0));
    load_page();
    loaded_ = load_position(1);
  }

  /// Bit k: key k of a fetched stage exists.
  __device__ uint32_t exists(int stage) const {
    return (gaps_ >> stage & 1u) == 0 ? 0xFFFFu : memory_.exists[warp_][stage];
  }

  /// A chunk without keys, fetched like any other.
  __device__ void rehearse() {
    chunks_ = 1;
    position_ = -1;
    k_ = static_cast<const T*>(call_.params.k);
    v_ = static_cast<const T*>(call_.params.v);
  }

  /// Starts the copies of the next chunk into a stage.
  __device__ void fetch(int stage) {
    const int half = chunk_ & 1;
    if (half == 0) next_pair();
    const uint32_t exists = exists_ >> (half * kChunkKeys) & 0xFFFFu;
    gaps_ &= ~(1u << stage);
    if (exists != 0xFFFFu) {
      gaps_ |= 1u << stage;
      if (lane_ == 0) memory_.exists[warp_][stage] = exists;
    }
    constexpr int kKeysAtOnce = 32 / kPieces;
    const int own_key = lane_ / kPieces, piece = lane_ % kPieces;
    const uint32_t base = shared_address(memory_.stages[warp_][stage]);
    const int first = half * kChunkKeys;  // lane of the chunk's first key
    if (exists == 0xFFFFu) {
      // The row of a key is the sum, and its swizzle the exclusive or, of a lane's part and one known here.
      const uint32_t lane_base = base + static_cast<uint32_t>(tile_row(own_key) * D * 2);
      const uint32_t lane_piece = static_cast<uint32_t>(piece ^ (tile_row(own_key) & 7)) << 4;
#pragma unroll
      for (int i = 0; i < kChunkKeys / kKeysAtOnce; ++i) {
        const int key = i * kKeysAtOnce, row = tile_row(key);
        const uint32_t to = lane_base + (lane_piece ^ static_cast<uint32_t>((row & 7) << 4)) + row * D * 2;
        const uint32_t from_k = __shfl_sync(kFullWarp, k_offset_, first + key + own_key);
        copy_async_16(to, address(k_, from_k), 16);
        if constexpr (pass != Pass::kScore) {
          const uint32_t from_v = __shfl_sync(kFullWarp, v_offset_, first + key + own_key);
          copy_async_16(to + Shape::kTileBytes, address(v_, from_v), 16);
        }
      }
    } else {
#pragma unroll 1
      for (int key = own_key; key < kChunkKeys; key += kKeysAtOnce) {
        const uint32_t bytes = (exists >> key & 1u) * 16;
        const uint32_t to = base + piece_offset<D>(tile_row(key), piece);
        const uint32_t from_k = __shfl_sync(kFullWarp, k_offset_, first + key);
        copy_async_16(to, address(k_, from_k), bytes);
        if constexpr (pass != Pass::kScore) {
          const uint32_t from_v = __shfl_sync(kFullWarp, v_offset_, first + key);
          copy_async_16(to + Shape::kTileBytes, address(v_, from_v), bytes);
        }
      }
    }
    commit_copies();
    ++chunk_;
  }

 private:
  __device__ const void* address(const T* base, uint32_t offset) const {
    return reinterpret_cast<const char*>(base) + uint64_t{offset} * call_.stride_unit;
  }

  /// Makes two chunks current, a key a lane, and starts the loads for those after them: pages of the next
  /// two, positions of the two after that.
  __device__ void next_pair() {
    exists_ = __ballot_sync(kFullWarp, position_ >= 0);
    // From k_ and v_, in units of stride_unit; a packed sequence is one page.
    auto slot = static_cast<uint32_t>(position_);
    k_offset_ = v_offset_ = 0;
    if (call_.params.page_table != nullptr) {
      slot -= static_cast<uint32_t>(page_of(call_, max(position_, 0)) * call_.params.page_size);
      k_offset_ = static_cast<uint32_t>(page_) * call_.k_page_units;
      v_offset_ = static_cast<uint32_t>(page_) * call_.v_page_units;
    }
    k_offset_ += slot * call_.k_token_units;
    v_offset_ += slot * call_.v_token_units;
    if (position_ < 0) k_offset_ = v_offset_ = 0;
    position_ = checked_position(chunk_ / 2 + 1, loaded_);
    load_page();
    loaded_ = load_position(chunk_ / 2 + 2);
  }

  __device__ void load_page() {
    if (call_.params.page_table != nullptr && position_ >= 0) page_ = pages_[page_of(call_, position_)];
  }

  /// Index in the list of this lane's key of the unit's pair of chunks number `pair`.
  __device__ int32_t index_of(int32_t pair) const { return key_begin_ + pair * 2 * kChunkKeys + lane_; }

  __device__ int32_t load_position(int32_t pair) const {
    const int32_t index = index_of(pair);
    return kSparse && index < min(members_, key_begin_ + chunks_ * kChunkKeys) ? list_[index] : 0;
  }

  /// Position of that key, given what was loaded for it; -1 if there is none.
  __device__ int32_t checked_position(int32_t pair, int32_t loaded) const {
    const int32_t index = index_of(pair);
    if (index >= min(length_, key_begin_ + chunks_ * kChunkKeys)) return -1;
    if (!kSparse) return index;
    if (index >= members_) return candidates_ + index - members_;
    // A set from the caller may hold anything.
    return loaded >= 0 && loaded < candidates_ ? loaded : -1;
  }

  const DecodeCall& call_;
  Memory& memory_;
  const int warp_, lane_;
  int32_t chunk_ = 0, chunks_ = 0;
  int32_t key_begin_ = 0, length_ = 0, members_ = 0, candidates_ = 0;
  const T* k_ =
      nullptr;  // this lane's piece of the unit's head and, without pages, of the sequence's first key
  const T* v_ = nullptr;
  const int32_t* list_ = nullptr;
  const int32_t* pages_ = nullptr;
  uint32_t gaps_ = 0;  // bit s: stage s lacks keys, memory_.exists tells which
  uint32_t exists_ = 0, k_offset_ = 0, v_offset_ = 0;  // of the current two chunks
  int32_t position_ = -1, page_ = 0;                   // of the next two
  int32_t loaded_ = 0;                                 // for the two after those
};

/// The computing side: scores, softmax and weighted values of up to 16 * row_tiles query rows. A thread holds
/// rows lane / 4 and lane / 4 + 8 of each row tile, and of every chunk the keys 4 * (lane % 4) .. + 3.
template <class T, int D, int row_tiles, Pass pass>
class Computer {
  using Shape = AttendShape<D, row_tiles, pass>;
  using Memory = BlockMemory<D, row_tiles, pass>;
  static constexpr bool kValues = pass != Pass::kScore;
  static constexpr int kOutTiles = kValues ? D / 8 : 1;

 public:
  __device__ Computer(const DecodeCall& call, Memory& memory, int warp, int lane)
      : call_(call), memory_(memory), warp_(warp), lane_(lane) {}

  /// Whether a unit must begin before the next stage.
  __device__ bool idle() const { return chunks_left_ == 0; }

  __device__ void begin(const Unit& unit) {
    const AttentionParams& p = call_.params;
    rows_ = unit.rows;
    first_limit_ = unit.limit;
    keeps_scores_ = unit.keep_scores != 0;
    chunks_left_ = unit.chunks;
    key_ = unit.key_begin;
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

  /// A row that sees no key, for a unit without keys that goes nowhere.
  __device__ void rehearse() { rows_ = 1; }

  /// Adds one stage of keys; exists: bit k is set when its key k exists.
  __device__ void add_stage(int stage, uint32_t exists) {
    const uint32_t base = shared_address(memory_.stages[warp_][stage]);
    float s[row_tiles][2][4];
    score(s, base);
    mask(s, exists);
    softmax(s);
    if constexpr (kValues) add_values(s, base + Shape::kTileBytes);
    key_ += kChunkKeys;
    --chunks_left_;
  }

  /// Writes the unit's partial results.
  __device__ void finish(const Unit& unit) {
    const int splits = pass == Pass::kSparse ? call_.sparse_splits : call_.dense_splits;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (t * 16 + half * 8 >= rows_) continue;
        float sum = sum_[t][half];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        if (row_of(t, half) >= rows_) continue;
        const int64_t part = int64_t{row_[t][half]} * splits + unit.split;
        if ((lane_ & 3) == 0) call_.partial_stats[part] = make_float2(reference_[t][half], sum);
        if constexpr (kValues) {
          float* out = call_.partial_out + part * D + 2 * (lane_ & 3);
#pragma unroll
          for (int d = 0; d < kOutTiles; ++d)
            *reinterpret_cast<float2*>(out + 8 * d) =
                make_float2(out_[t][d][2 * half], out_[t][d][2 * half + 1]);
        }
      }
  }

 private:
  // Half h of a row tile: rows lane / 4 + 8 h.
  __device__ int row_of(int tile, int half) const { return tile * 16 + half * 8 + lane_ / 4; }

  __device__ int heads() const { return pass == Pass::kSparse ? call_.reader_heads : call_.group; }

  __device__ void score(float (&s)[row_tiles][2][4], uint32_t keys) const {
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = 0;
    // Even and odd steps sum apart: a product waits for the one before it in its chain.
    float odd[row_tiles][2][4] = {};
    const uint32_t lane_keys =
        keys + piece_offset<D>((lane_ >> 4) * 8 + (lane_ & 7), static_cast<int>(lane_ >> 3 & 1));
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t k[4];
      load_matrices(k, lane_keys ^ static_cast<uint32_t>(step * 32));
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
  __device__ void mask(float (&s)[row_tiles][2][4], uint32_t exists) const {
    if (exists == 0xFFFFu && key_ + kChunkKeys <= first_limit_) return;
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
  __device__ void softmax(float (&s)[row_tiles][2][4]) {
    float factor[row_tiles][2];
    bool moved = false;
#pragma unroll
    for (int t = 0; t < row_tiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[t][half] = 1;
        // No row of the unit lies here; the scores are those of a zero query, finite, and go nowhere.
        if (t * 16 + half * 8 >= rows_) continue;
        float* a = &s[t][0][2 * half];
        float* b = &s[t][1][2 * half];
        float top = fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        if constexpr (pass != Pass::kSparse) {
          if (keeps_scores_ && row_of(t, half) < rows_) store_scores(row_[t][half], top, a, b);
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
    const uint32_t lane_values = values + piece_offset<D>((lane_ >> 3 & 1) * 8 + (lane_ & 7), lane_ >> 4);
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      uint32_t v[4];
      load_matrices_transposed(v, lane_values ^ static_cast<uint32_t>(d * 32));
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
  int32_t key_ = 0;  // index in the list of the next chunk's first key
  int32_t chunks_left_ = 0;
  // Of the unit; first_limit_: keys that its first row sees.
  int32_t rows_ = 0, first_limit_ = 0;
  bool keeps_scores_ = false;
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
__global__ void __launch_bounds__(AttendShape<D, row_tiles, pass>::kThreads,
                                  AttendShape<D, row_tiles, pass>::kBlocks)
    attend_kernel(const __grid_constant__ DecodeCall call) {
  using Shape = AttendShape<D, row_tiles, pass>;
  using Memory = BlockMemory<D, row_tiles, pass>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int32_t* counter = call.counters + (pass == Pass::kSparse ? 1 : 0);
  // Lengths and tables come from the caller, so the first units can be found while the previous kernel runs,
  // unless that is the schedule itself.
  const bool early = call.self_scheduled || (pass == Pass::kSparse && call.params.role == Role::kAnchor);
  Fetcher<T, D, row_tiles, pass> fetcher(call, memory, warp, lane);
  Computer<T, D, row_tiles, pass> computer(call, memory, warp, lane);
  Unit* units = memory.units[warp];
  int32_t found = 0, begun = 0, done = 0;  // units of this warp
  int32_t ticket = 0;
  bool more = true;
  int fetched = 0, consumed = 0;   // chunks of this warp
  int fetch_stage = 0, stage = 0;  // both counts modulo kStages
  // While the first warp looks at the lengths, the others work on a chunk without keys, which brings the
  // instructions into the caches: they are most of what a short call would wait for.
  bool rehearses = warp > 0;
  if (rehearses) {
    if (lane == 0) {
      units[0] = {};
      units[0].chunks = 1;
    }
    __syncwarp();
    fetcher.rehearse();
  }
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    while (fetched < consumed + Shape::kStages) {
      if (fetcher.done()) {
        if (begun == found) break;
        fetcher.begin(units[begun++ % Shape::kUnitSlots]);
      }
      fetcher.fetch(fetch_stage);
      ++fetched;
      fetch_stage = fetch_stage + 1 == Shape::kStages ? 0 : fetch_stage + 1;
      if (rehearses) break;
    }
    if (more && found == begun && !rehearses) {
      int32_t index;
      if (found == 0) {
        if (!early) wait_for_previous_kernel();
        if (call.self_scheduled) {
          if (warp == 0) schedule_block<pass == Pass::kSparse>(call, memory.unit_begin);
          __syncthreads();
        }
        index = static_cast<int32_t>(blockIdx.x + warp * gridDim.x);
      } else {
        index = call.self_scheduled ? units[(found - 1) % Shape::kUnitSlots].next
                                    : __shfl_sync(kFullWarp, ticket, 0) + first_units();
      }
      Unit& unit = units[found % Shape::kUnitSlots];
      find_unit<D, pass>(call, memory.unit_begin, index, counter, found > 0 || !early, unit);
      __syncwarp();
      if (found == 0) {
        if (early) wait_for_previous_kernel();
        allow_next_kernel();
      }
      more = unit.chunks > 0;
      if (more) ++found;
      // Of the unit after that; the answer has time until then.
      if (more && !call.self_scheduled && lane == 0) ticket = atomicAdd(counter, 1);
      if (more && fetched < consumed + Shape::kStages) continue;
    }
    if (fetched == consumed) break;
    const Unit& unit = units[done % Shape::kUnitSlots];
    if (computer.idle()) computer.begin(unit);
    if (rehearses) computer.rehearse();
    wait_copies_below<Shape::kStages - 1>(fetched - consumed - 1);
    __syncwarp();
    computer.add_stage(stage, fetcher.exists(stage));
    __syncwarp();
    ++consumed;
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    if (rehearses) {
      rehearses = false;
    } else if (computer.idle()) {
      computer.finish(unit);
      ++done;
    }
  }
}

template <class T, int D, int row_tiles, Pass pass>
void launch_attend_kernel(const DecodeCall& call, cudaStream_t stream) {
  using Shape = AttendShape<D, row_tiles, pass>;
  const char* name = pass == Pass::kScore   ? "decode_score"
                     : pass == Pass::kDense ? "decode_dense"
                                            : "decode_sparse";
  LaunchShape shape;
  shape.blocks = call.multiprocessors * Shape::kBlocks;
  shape.threads = Shape::kThreads;
  shape.shared_bytes = sizeof(BlockMemory<D, row_tiles, pass>);
  // The first kernel of a call waits for all that came before it.
  shape.chained = !call.self_scheduled || (pass == Pass::kSparse && call.params.role != Role::kReuse);
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
