// SPDX-License-Identifier: Apache-2.0
// The pass over keys of a decode call (docs/kernels/decode.md): a warp works on units of split_keys() keys of
// a list, streams their K and V through stages of its own in shared memory, and leaves one partial result per
// query row. Warps never wait for each other.
#pragma once

#include <type_traits>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/decode_compute.cuh"
#include "attention/cuda/sm90/decode_partial.cuh"
#include "attention/cuda/sm90/decode_unit.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/async_copy.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

template <int D, int kRows, Pass pass>
struct BlockMemory {
  using Shape = AttendShape<D, kRows, pass>;
  alignas(1024) unsigned char stages[Shape::kWarps][Shape::kStages][Shape::kStageBytes];
  uint32_t exists[Shape::kWarps][Shape::kStages];  // bit k: key k of the chunk exists
  Unit units[Shape::kWarps][Shape::kUnitSlots];
  // Of a self-scheduled call.
  int32_t unit_begin[kMostSelfScheduled + 1];
  UnitTile tiles[kMostSelfScheduled];
};

__device__ inline int32_t page_of(const DecodeCall& call, int32_t position) {
  return call.page_shift >= 0 ? position >> call.page_shift
                              : static_cast<int32_t>(static_cast<uint32_t>(position) /
                                                     static_cast<uint32_t>(call.params.page_size));
}

/// Units that warps have without asking, one each.
__device__ inline int32_t first_units() { return static_cast<int32_t>(gridDim.x * blockDim.x) / 32; }

/// The unit that a warp has after unit `index`, when units are dealt out. Each round is dealt from one warp
/// further: else a warp would always get the same head, and heads whose scores are stored take longer.
__device__ inline int32_t next_dealt(int32_t index) {
  const int32_t next = index + first_units();
  return (next + 1) % first_units() == 0 ? next + 1 - first_units() : next + 1;
}

/// Units of work of each tile of a self-scheduled call, by one warp.
template <bool kSparse>
__device__ void schedule_block(const DecodeCall& call, int32_t* unit_begin, UnitTile* tiles) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t entries = call.params.batch * call.tiles;
  const int32_t lanes = lanes_of_tile(entries);
  const int32_t entry = lane / lanes;
  // Once a call: an anchor's pass over its sets has nothing to add.
  const bool reports =
      (!kSparse || call.params.role == Role::kReuse) && blockIdx.x == 0 && call.params.status != nullptr;
  uint32_t status = 0;
  int32_t units = 0, splits = 0;
  UnitTile tile = {};
  if (entry < entries) {
    const unsigned together = tile_mask(lanes, entry);
    schedule_tile<!kSparse, kSparse, 1>(
        call, entry, lane % lanes, lanes, [&](int32_t own) { return __reduce_max_sync(together, own); }, tile,
        units, tile, splits, reports, status);
  }
  if constexpr (kSparse) {
    const int32_t in_call = __reduce_add_sync(kFullWarp, lane % lanes == 0 ? splits * call.readers : 0);
    if (splits > 0) units = cut_sparse_tile(call, tile, splits, in_call);
  }
  const int32_t sum = sum_up_to(lane % lanes > 0 ? 0 : units, lane);
  if (lane == 0) unit_begin[0] = 0;
  if (lane % lanes == 0 && entry < entries) {
    unit_begin[entry + 1] = sum;
    tiles[entry] = tile;
  }
  if (status != 0) atomicOr(call.params.status, status);
}

/// Brings what a self-scheduled call will read into the second-level cache before it is known who reads what;
/// the loads would otherwise wait for each other.
__device__ inline void prefetch_lists(const DecodeCall& call) {
  const AttentionParams& p = call.params;
  if (p.page_table == nullptr) prefetch(p.cu_seqlens_kv);
  if (p.role != Role::kReuse) return;
  prefetch(p.counts);
  constexpr int kLine = 128;
  const int64_t sets =
      int64_t{min(p.batch * call.tiles, static_cast<int32_t>(call.maxima.tiles))} * call.sets;
  const int64_t lines = sets * p.capacity * 4 / kLine;
  const auto threads = static_cast<int32_t>(gridDim.x * (blockDim.x - 32));
#pragma unroll 1
  for (int64_t i = static_cast<int32_t>(blockIdx.x * (blockDim.x - 32) + threadIdx.x) - 32; i < lines;
       i += threads)
    prefetch(reinterpret_cast<const char*>(p.positions) + i * kLine);
}

/// Finds the next unit of work that has keys and brings into the first-level cache what the warp will ask for
/// when it begins. index: where to look first; block_units, block_tiles: of a self-scheduled call.
template <int D, Pass pass>
__device__ void find_unit(const DecodeCall& call, const int32_t* block_units, const UnitTile* block_tiles,
                          int32_t index, int32_t* counter, bool lists_are_ready, Unit& slot) {
  constexpr bool kSparse = pass == Pass::kSparse;
  const AttentionParams& p = call.params;
  const int32_t* unit_begin = call.self_scheduled ? block_units
                              : kSparse           ? call.sparse_units
                                                  : call.dense_units;
  const UnitTile* tiles = call.self_scheduled ? block_tiles : kSparse ? call.sparse_tiles : call.dense_tiles;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t entries = p.batch * call.tiles, end = unit_begin[entries];
  const int32_t readers = kSparse ? call.readers : p.kv_heads;
  const int32_t heads = kSparse ? call.reader_heads : call.group;
  const int32_t most_rows = kSparse ? call.sparse_rows : call.dense_rows;
  Unit unit = {};
#pragma unroll 1
  while (index < end) {
    const int32_t entry = find_by_warp(unit_begin, entries, index);
    const UnitTile tile = tiles[entry];
    const auto local = static_cast<uint32_t>(index - unit_begin[entry]);
    const uint32_t row_and_part = local / static_cast<uint32_t>(readers);
    const int32_t reader = static_cast<int32_t>(local) - static_cast<int32_t>(row_and_part) * readers;
    unit.part = static_cast<int32_t>(row_and_part);
    if (tile.row_chunks > 1) {
      unit.part = static_cast<int32_t>(row_and_part / static_cast<uint32_t>(tile.row_chunks));
      unit.first = (static_cast<int32_t>(row_and_part) - unit.part * tile.row_chunks) * most_rows;
    }
    unit.sequence = tile.sequence;
    if (p.page_table == nullptr) unit.kv_begin = p.cu_seqlens_kv[tile.sequence];
    unit.members = tile.members;
    unit.kv_head = reader;
    if constexpr (kSparse) {
      const int64_t list = int64_t{max(tile.set, 0)} * call.sets + set_of_reader(call, reader);
      if (p.role == Role::kReuse && tile.set >= 0) unit.members = max(0, min(p.counts[list], p.capacity));
      unit.set_begin = list * p.capacity;
      if (call.reader_heads != call.group) unit.kv_head = reader / call.group;
    } else {
      unit.keep_scores =
          selects(p.role) && is_needed(call, p.set_owner == SetOwner::kQueryHead  ? reader * heads
                                             : p.set_owner == SetOwner::kAllHeads ? 0
                                                                                  : reader);
    }
    unit.candidates = tile.candidates;
    unit.length = unit.members + tile.own;
    unit.limit = unit.members + tile.limit;
    unit.q_row = tile.q_row;
    unit.rows = min(most_rows, tile.rows * heads - unit.first);
    unit.head_begin = reader * heads;
    unit.split_chunks = tile.split / kChunkKeys;
    unit.is_group = tile.merge == GroupMerge::kWarp;
    const int32_t unit_keys = tile.split * tile.unit_splits;
    if (unit.first > 0) unit.limit += unit.first / heads;
    unit.key_begin = unit.part * unit_keys;
    unit.part *= unit.is_group ? tile.unit_splits / kSplitGroup : tile.unit_splits;
    unit.chunks = divide_up(max(min(unit_keys, unit.length - unit.key_begin), 0), kChunkKeys);
    if (unit.chunks > 0 || tile.merge == GroupMerge::kBlock) break;
    index = call.self_scheduled
                ? next_dealt(index)
                : __shfl_sync(kFullWarp, lane == 0 ? atomicAdd(counter, 1) : 0, 0) + first_units();
  }
  if (index >= end) unit.chunks = 0;
  unit.next = next_dealt(index);
  if (unit.next >= end) unit.next = -1;
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

/// Unit of a warp where blocks share out the groups of a call of one tile: each has one before any has two.
__device__ inline int32_t shared_unit(const DecodeCall& call, int warp) {
  const uint32_t place = blockIdx.x + warp / kSplitGroup * gridDim.x;
  const uint32_t group = place / static_cast<uint32_t>(call.readers);
  return static_cast<int32_t>((group * kSplitGroup + warp % kSplitGroup) * call.readers +
                              (place - group * call.readers));
}

/// Merges what the warps of a block left of the splits of a group, each in its first stages: the group of the
/// warp's own split, a row a warp at a time.
template <int D, class Memory>
__device__ void merge_block(const DecodeCall& call, Memory& memory, int warp, int lane) {
  constexpr int kPerLane = D / 32;
  const int first_warp = warp / kSplitGroup * kSplitGroup;
  const Unit& unit = memory.units[first_warp][0];
#pragma unroll 1
  for (int32_t r = warp - first_warp; r < unit.rows; r += kSplitGroup) {
    RowPart<kPerLane> parts[kSplitGroup];
#pragma unroll
    for (int j = 0; j < kSplitGroup; ++j) {
      const auto* out = reinterpret_cast<const float*>(memory.stages[first_warp + j][0]);
      load_part(reinterpret_cast<const float2*>(out + 8 * D), out, r,
                memory.units[first_warp + j][0].chunks > 0, lane, parts[j]);
    }
    RowPart<kPerLane> all = {-INFINITY, 0, {}};
#pragma unroll
    for (int j = 0; j < kSplitGroup; ++j)
      if (memory.units[first_warp + j][0].chunks > 0) add_part(all, parts[j]);
    const int32_t n = unit.first + r;
    const int64_t row = int64_t{unit.q_row + n / call.reader_heads} * call.params.query_heads +
                        unit.head_begin + n % call.reader_heads;
    store_part(call.partial_stats, call.partial_out, row * call.sparse_splits + unit.part / kSplitGroup, lane,
               all);
  }
}

/// The fetching side of a warp: walks the chunks of its units, ahead of the computing side.
template <class T, int D, int kRows, Pass pass>
class Fetcher {
  using Shape = AttendShape<D, kRows, pass>;
  using Memory = BlockMemory<D, kRows, pass>;
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
      k_ += unit.kv_begin * p.k_token_stride;
      v_ += unit.kv_begin * p.v_token_stride;
    } else {
      pages_ = p.page_table + unit.sequence * p.page_table_stride;
    }
    const int32_t first = load_position(0);
    loaded_ = load_position(1);
    position_ = checked_position(0, first);
    load_page();
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
    if (half == 0) begin_pair();
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
        copy_async_16(to, address(k_, from_k), 16, policy());
        if constexpr (pass != Pass::kScore) {
          const uint32_t from_v = __shfl_sync(kFullWarp, v_offset_, first + key + own_key);
          copy_async_16(to + Shape::kTileBytes, address(v_, from_v), 16, policy());
        }
      }
    } else {
#pragma unroll 1
      for (int key = own_key; key < kChunkKeys; key += kKeysAtOnce) {
        const uint32_t bytes = (exists >> key & 1u) * 16;
        const uint32_t to = base + piece_offset<D>(tile_row(key), piece);
        const uint32_t from_k = __shfl_sync(kFullWarp, k_offset_, first + key);
        copy_async_16(to, address(k_, from_k), bytes, policy());
        if constexpr (pass != Pass::kScore) {
          const uint32_t from_v = __shfl_sync(kFullWarp, v_offset_, first + key);
          copy_async_16(to + Shape::kTileBytes, address(v_, from_v), bytes, policy());
        }
      }
    }
    commit_copies();
    // After the copies, as it waits for loads.
    if (half == 0) look_ahead();
    ++chunk_;
  }

 private:
  /// Keys give way to what other kernels of the call read again.
  __device__ uint64_t policy() const { return pass == Pass::kScore ? call_.key_policy : kEvictFirst; }

  __device__ const void* address(const T* base, uint32_t offset) const {
    return reinterpret_cast<const char*>(base) + uint64_t{offset} * call_.stride_unit;
  }

  /// Makes two chunks current, a key a lane.
  __device__ void begin_pair() {
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
  }

  /// Starts the loads for the chunks after the current two: pages of the next two, positions of the two after
  /// that.
  __device__ void look_ahead() {
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

template <class T, int D, int kRows, Pass pass>
__global__ void __launch_bounds__(AttendShape<D, kRows, pass>::kThreads, AttendShape<D, kRows, pass>::kBlocks)
    attend_kernel(const __grid_constant__ DecodeCall call) {
  using Shape = AttendShape<D, kRows, pass>;
  using Memory = BlockMemory<D, kRows, pass>;
  extern __shared__ __align__(1024) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int32_t* counter = call.counters + (pass == Pass::kSparse ? 1 : 0);
  // Lengths and tables come from the caller, so the first units can be found while the previous kernel runs,
  // unless that is the schedule itself.
  const bool early = call.self_scheduled || (pass == Pass::kSparse && call.params.role == Role::kAnchor);
  Fetcher<T, D, kRows, pass> fetcher(call, memory, warp, lane);
  std::conditional_t<pass == Pass::kScore, ScoreComputer<T, D, kRows>, ValueComputer<T, D, kRows, pass>>
      computer(call, lane);
  Unit* units = memory.units[warp];
  int32_t found = 0, begun = 0, done = 0;  // units of this warp
  int32_t ticket = 0;
  bool more = true, waits = true;
  int fetched = 0, consumed = 0;   // chunks of this warp
  int fetch_stage = 0, stage = 0;  // both counts modulo kStages
  // While the first warp looks at the lengths, the others fetch a chunk without keys or compute one, which
  // brings the instructions into the caches: they are most of what a short call would wait for.
  bool shares_group = false;
  enum Rehearsal { kNone, kFetching, kComputing };
  Rehearsal rehearsal = warp == 0 ? kNone : warp % 2 == 1 ? kFetching : kComputing;
  if (rehearsal != kNone) {
    if (pass == Pass::kSparse && call.self_scheduled) prefetch_lists(call);
    if (lane == 0) {
      units[0] = {};
      units[0].chunks = 1;
    }
    __syncwarp();
    if (rehearsal == kFetching) fetcher.rehearse();
  }
#pragma unroll 1
  for (;;) {
    // A unit's query rows are asked for before its keys are, behind which they would wait.
    if (computer.idle() && (done < found || rehearsal == kComputing))
      computer.begin(units[done % Shape::kUnitSlots],
                     shares_group || rehearsal != kNone ? shared_address(memory.stages[warp][0]) : 0);
    if (waits && found > 0) {
      wait_for_previous_kernel();
      allow_next_kernel();
      waits = false;
    }
#pragma unroll 1
    while (fetched < consumed + Shape::kStages && rehearsal != kComputing) {
      if (fetcher.done()) {
        if (begun == found) break;
        fetcher.begin(units[begun++ % Shape::kUnitSlots]);
      }
      fetcher.fetch(fetch_stage);
      ++fetched;
      fetch_stage = fetch_stage + 1 == Shape::kStages ? 0 : fetch_stage + 1;
      if (rehearsal != kNone) break;
    }
    if (more && found == begun && rehearsal == kNone) {
      int32_t index;
      if (found == 0) {
        if (!early) wait_for_previous_kernel();
        if (call.self_scheduled) {
          if (warp == 0) schedule_block<pass == Pass::kSparse>(call, memory.unit_begin, memory.tiles);
          __syncthreads();
        }
        if (Shape::kSharedGroups > 0 && call.self_scheduled)
          shares_group = memory.tiles[0].merge == GroupMerge::kBlock;
        index = shares_group ? shared_unit(call, warp) : static_cast<int32_t>(blockIdx.x + warp * gridDim.x);
      } else {
        index = call.self_scheduled ? units[(found - 1) % Shape::kUnitSlots].next
                                    : __shfl_sync(kFullWarp, ticket, 0) + first_units();
      }
      Unit& unit = units[found % Shape::kUnitSlots];
      find_unit<D, pass>(call, memory.unit_begin, memory.tiles, index, counter,
                         found > 0 || !early || call.params.role == Role::kReuse, unit);
      __syncwarp();
      more = unit.chunks > 0;
      if (found == 0 && (!early || !more)) {
        if (early) wait_for_previous_kernel();
        allow_next_kernel();
        waits = false;
      }
      if (more) ++found;
      const bool continues = more && fetched < consumed + Shape::kStages;
      if (shares_group || (call.self_scheduled && unit.next < 0)) more = false;
      // Of the unit after that; the answer has time until then.
      if (more && !call.self_scheduled && lane == 0) ticket = atomicAdd(counter, 1);
      if (continues) continue;
    }
    if (rehearsal == kFetching) {
      wait_copies<0>();
      __syncwarp();
      fetched = fetch_stage = 0;
      rehearsal = kNone;
      continue;
    }
    if (fetched == consumed && rehearsal == kNone) break;
    if (rehearsal != kNone) computer.rehearse();
    wait_copies_below<Shape::kStages - 1>(fetched - consumed - 1);
    __syncwarp();
    computer.add_stage(shared_address(memory.stages[warp][stage]),
                       rehearsal != kNone ? 0xFFFFu : fetcher.exists(stage));
    __syncwarp();
    if (rehearsal != kNone) {
      rehearsal = kNone;
      continue;
    }
    ++consumed;
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    if (computer.idle()) {
      computer.finish(units[done % Shape::kUnitSlots]);
      ++done;
    }
  }
  if constexpr (Shape::kSharedGroups > 0) {
    if (!shares_group) return;
    __syncthreads();
    merge_block<D>(call, memory, warp, lane);
  }
}

template <class T, int D, int kRows, Pass pass>
void launch_attend_kernel(const DecodeCall& call, cudaStream_t stream) {
  using Shape = AttendShape<D, kRows, pass>;
  const char* name = pass == Pass::kScore   ? "decode_score"
                     : pass == Pass::kDense ? "decode_dense"
                                            : "decode_sparse";
  LaunchShape shape;
  shape.blocks = call.multiprocessors * Shape::kBlocks;
  shape.threads = Shape::kThreads;
  shape.shared_bytes = sizeof(BlockMemory<D, kRows, pass>);
  // The first kernel of a call waits for all that came before it.
  shape.chained = !call.self_scheduled || (pass == Pass::kSparse && call.params.role != Role::kReuse);
  launch(name, attend_kernel<T, D, kRows, pass>, shape, stream, call);
}

template <class T, int D, Pass pass>
void launch_attend_rows(const DecodeCall& call, cudaStream_t stream) {
  const int32_t rows = pass == Pass::kSparse ? call.sparse_rows : call.dense_rows;
  if constexpr (pass != Pass::kScore) {
    if (rows <= 8) return launch_attend_kernel<T, D, 8, pass>(call, stream);
  }
  // 256 dimensions leave no registers for more rows.
  if constexpr (D <= 128) {
    if (rows > 16) return launch_attend_kernel<T, D, 32, pass>(call, stream);
  }
  launch_attend_kernel<T, D, 16, pass>(call, stream);
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
