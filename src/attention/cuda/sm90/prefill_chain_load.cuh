// SPDX-License-Identifier: Apache-2.0
// The loading side of prefill_chain.cuh: units of work, and keys and values of whole sequences by the copy
// engine.
#pragma once

#include <cstddef>

#include "attention/cuda/sm90/prefill_attend.cuh"

namespace kascade::cuda {

// As many copies as do not spill registers here.
constexpr int kChainBatch = 4;

/// Units of work, handed from the warp that draws them to all warps, which leave them there until they are
/// done.
template <class Unit, int entries>
struct UnitStore {
  static constexpr int kEntries = entries;
  Unit units[entries];
  uint64_t full[entries], empty[entries];

  __device__ void init(int compute_warps) {
    for (int i = 0; i < entries; ++i) {
      init_barrier(full[i], 1);
      init_barrier(empty[i], static_cast<uint32_t>(kLoadWarps + compute_warps));
    }
  }
};
template <class Queue>
class StoreReader {
 public:
  __device__ explicit StoreReader(Queue& queue) : queue_(queue) {}
  /// Index of the next unit, which stays until it is released; all lanes of a warp call it together.
  __device__ int wait() {
    const int index = ring_.stage;
    wait_barrier(queue_.full[index], ring_.parity);
    ring_.next();
    return index;
  }
  __device__ void release(int index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(queue_.empty[index]);
  }

 private:
  Queue& queue_;
  Ring<Queue::kEntries> ring_;
};

/// What storing a unit's output takes, which is not done before the next unit's first step.
struct alignas(16) PendingUnit {
  int32_t reader, row, first, rows;
};

template <int D>
struct ChainMemory {
  static constexpr int kKeys = 128;
  static constexpr int kTiles = 5;  // of K and V in turn
  static constexpr int kQueries = 2;
  alignas(1024) unsigned char q[kQueries][kBlockRows * D * 2];
  alignas(1024) unsigned char tiles[kTiles][kKeys * D * 2];
  UnitStore<AttendUnit, 6> queue;
  uint64_t full[kTiles], empty[kTiles];
  uint64_t q_full[kQueries], q_empty[kQueries];
  // Of the unit whose output is not stored yet, and of the one in work.
  PendingUnit pending[kQueries][kComputeWarps];
  // Of the former, its rows' sums in two halves, and their references.
  float2 row_sums[kBlockRows];
  float references[kBlockRows];
};

/// Addresses in a block's shared memory, from one that is kept.
template <class Memory>
class Addresses {
 public:
  __device__ explicit Addresses(Memory& memory) : base_(kept(shared_address(&memory))) {}
  __device__ uint32_t q(int query) const {
    return base_ + at(offsetof(Memory, q)) + static_cast<uint32_t>(query) * sizeof(Memory::q[0]);
  }
  __device__ uint32_t tile(int stage) const {
    return base_ + at(offsetof(Memory, tiles)) + static_cast<uint32_t>(stage) * sizeof(Memory::tiles[0]);
  }
  __device__ uint32_t full(int stage) const { return base_ + at(offsetof(Memory, full)) + at(8 * stage); }
  __device__ uint32_t empty(int stage) const { return base_ + at(offsetof(Memory, empty)) + at(8 * stage); }
  __device__ uint32_t q_full(int query) const { return base_ + at(offsetof(Memory, q_full)) + at(8 * query); }
  __device__ uint32_t q_empty(int query) const {
    return base_ + at(offsetof(Memory, q_empty)) + at(8 * query);
  }

 private:
  template <class T>
  __device__ static constexpr uint32_t at(T bytes) {
    return static_cast<uint32_t>(bytes);
  }
  const uint32_t base_;
};

/// Draws the units of a launch one by one: first the one with the block's index, then by a counter. All units
/// of a head come together, so that its keys stay in the cache, or of as many heads as have them there; only
/// the shortest come at the end, so that it is even. The work on the next unit is done in parts, so that
/// one's latency passes while the loading warp does others' work.
template <class Queue, int kKeys>
class UnitDrawer {
 public:
  __device__ UnitDrawer(const AttendWork& work, Queue& queue) : work_(work), queue_(queue) {
    while (work_.readers() % (2 * at_once_) == 0 && 2 * at_once_ * work_.call.maxima.kv_len <= kCachedKeys)
      at_once_ *= 2;
  }

  /// One part of the work on the next unit; nothing when it is in the queue.
  __device__ void advance() {
    AttendUnit& unit = queue_.units[ring_.stage];
    switch (part_) {
      case 0:
        index_ = first_ ? blockIdx.x : gridDim.x + static_cast<uint32_t>(atomicAdd(work_.call.counters, 1));
        first_ = false;
        wait_barrier(queue_.empty[ring_.stage], ring_.parity ^ 1);
        break;
      case 1: {
        const auto index = static_cast<int32_t>(index_), blocks = work_.call.totals->dense_blocks;
        const int32_t readers = work_.readers();
        unit.reader = -1;
        unit.count = unit.blocks = 0;
        if (blocks == 0 || index / blocks >= readers) break;
        // Two short units a multiprocessor, of all heads in turn, come last.
        const int32_t short_ones = min(divide_up(2 * static_cast<int32_t>(gridDim.x), readers), blocks);
        const int32_t long_ones = blocks - short_ones;
        const bool is_short = index >= long_ones * readers;
        const int32_t i = is_short ? index - long_ones * readers : index;
        const int32_t at_once = is_short ? readers : at_once_, of_head = is_short ? short_ones : long_ones;
        unit.reader = i / at_once / of_head * at_once + i % at_once;
        unit.block = work_.call.dense_table[(is_short ? long_ones : 0) + i / at_once % of_head];
        break;
      }
      case 2:
        if (unit.reader >= 0) unit.blocks = unit_blocks<kKeys>(unit, work_.heads());
        arrive(queue_.full[ring_.stage]);
        ring_.next();
        break;
      default:
        return;
    }
    ++part_;
  }
  /// The rest of the work on the next unit; then the one after it is next.
  __device__ void finish() {
    while (part_ < 3) advance();
    part_ = 0;
  }

 private:
  const AttendWork& work_;
  Queue& queue_;
  Ring<Queue::kEntries> ring_;
  int32_t at_once_ = 1;  // heads whose units come in turn
  int part_ = 0;
  bool first_ = true;
  uint32_t index_ = 0;
};

/// Fetches blocks of kKeys keys of a sequence from last to first into tiles of K and V, in boxes; a last
/// block that is not whole is copied piecewise.
template <class T, int D, int kKeys>
class BoxLoader {
  static constexpr int kRows = kKeys / kLoadWarps;
  static constexpr int kFirst = 2;  // boxes of a warp whose places are at hand when their tile is free

 public:
  __device__ BoxLoader(const PrefillCall& call, int warp, int lane)
      : call_(call), warp_(warp), lane_(lane), box_rows_(call.box_rows) {
    const int boxes = kKeys / box_rows_;
    issuers_ = min(boxes, kLoadWarps);
    own_boxes_ = warp < issuers_ ? boxes / issuers_ : 0;
  }

  /// Announces a unit that has blocks of keys, so that what is looked up first is at hand when it begins.
  __device__ void announce(const AttendUnit& unit) {
    const RowBlock& rows = unit.block;
    // Nothing is done with what was loaded: that would wait for it.
    next_first_token_ =
        load_if(call_.params.page_table == nullptr, call_.params.cu_seqlens_kv + rows.batch, 0);
    first_place_ = place_box(unit.blocks - 1, rows.keys, rows.batch, 0);
  }
  /// Starts on blocks of keys of the unit that was announced, from the last on.
  __device__ void begin(const AttendUnit& unit) {
    keys_ = unit.block.keys;
    batch_ = unit.block.batch;
    kv_head_ = unit.reader;
    first_token_ = next_first_token_;
    first_place_.token += first_token_;
    take(first_place_);
  }

  /// Looks places in the next block up while this one is copied; once a block, before copy_keys.
  __device__ void look_ahead(int32_t block) {
    next_place_ = place_box(block - 1, keys_, batch_, first_token_);
  }

  /// K of a block, or V.
  __device__ void copy(int32_t block, int values, uint32_t tile, uint32_t full) {
    const AttentionParams& p = call_.params;
    if (is_boxed(block)) return copy_boxes(tile, full, values == 0 ? call_.k_boxes : call_.v_boxes);
    const bool keys = values == 0;
    copy_piecewise(
        block, tile, full,
        static_cast<const T*>(keys ? p.k : p.v) + kv_head_ * (keys ? p.k_head_stride : p.v_head_stride),
        keys ? call_.k_page_units : call_.v_page_units, keys ? call_.k_token_units : call_.v_token_units);
  }

  /// On to the block before.
  __device__ void next() { take(next_place_); }

 private:
  static_assert(kRows == 32 || kRows == 16, "a lane looks up at most one key");

  /// Whether the bulk copy engine fetches a block: all but a last one that is not whole.
  __device__ bool is_boxed(int32_t block) const { return (block + 1) * kKeys <= keys_; }

  /// The warp's rows of a block that is not whole.
  __device__ void copy_piecewise(int32_t block, uint32_t tile, uint32_t full, const T* base,
                                 uint32_t page_units, uint32_t token_units) {
    const int32_t position = block * kKeys + warp_ * kRows + lane_;
    const bool there = lane_ < kRows && position < keys_;
    uint32_t offset = 0;
    if (there && call_.params.page_table == nullptr) {
      offset = static_cast<uint32_t>(first_token_ + position) * token_units;
    } else if (there) {
      const int32_t index = page_of(position);
      offset = static_cast<uint32_t>(load_page(index, batch_)) * page_units +
               static_cast<uint32_t>(position - index * call_.params.page_size) * token_units;
    }
    copy_rows<kKeys, D, kChainBatch>(tile, base, offset, call_.kv_unit, there, warp_, lane_);
    arrive_after_copies(full);
    if (lane_ == 0) arrive(full);
  }

  __device__ int32_t page_of(int32_t position) const {
    return call_.page_shift >= 0 ? position >> call_.page_shift : position / call_.params.page_size;
  }
  __device__ int32_t load_page(int32_t index, int32_t batch, bool wanted = true) const {
    return load_if(wanted, call_.params.page_table + batch * call_.params.page_table_stride + index, 0);
  }

  // A tile's boxes are dealt out to the warps in turn; a warp's i-th:
  __device__ int box_of(int i) const { return warp_ + i * issuers_; }
  /// Where a box begins: its first key's place in its page or among the packed keys.
  struct Place {
    int32_t token = 0, page = 0;
  };
  /// Of the warp's box of a block that this lane looks up.
  __device__ Place place_box(int32_t block, int32_t keys, int32_t batch, int32_t first_token) const {
    const int32_t key = block * kKeys + box_of(lane_) * box_rows_;
    if (call_.params.page_table == nullptr) return {first_token + key, 0};
    const int32_t index = page_of(max(key, 0));
    return {key - index * call_.params.page_size,
            load_page(index, batch, key >= 0 && key < keys && lane_ < own_boxes_)};
  }
  __device__ Place place_of(int box) const {
    return {__shfl_sync(kFullWarp, place_.token, box), __shfl_sync(kFullWarp, place_.page, box)};
  }
  __device__ void take(const Place& place) {
    place_ = place;
#pragma unroll
    for (int i = 0; i < kFirst; ++i) first_places_[i] = place_of(i);
  }
  __device__ void copy_boxes(uint32_t tile, uint32_t full, const BoxMap& map) const {
    // All warps arrive, also those without a box: none may be so far ahead or behind that it takes a phase of
    // a barrier for another.
    if (lane_ == 0) {
      if (own_boxes_ > 0) expect_bytes(full, static_cast<uint32_t>(own_boxes_ * box_rows_ * D * 2));
      arrive(full, kFullArrivals / kLoadWarps);
    }
    const auto copy = [&](int i, const Place& place) {
      copy_box_by_one(tile + static_cast<uint32_t>(box_of(i) * box_rows_ * D * 2), &map.map, full, 0,
                      place.token, kv_head_ * map.head_panels, 0, place.page);
    };
#pragma unroll
    for (int i = 0; i < kFirst; ++i)
      if (i < own_boxes_) copy(i, first_places_[i]);
#pragma unroll 1
    for (int i = kFirst; i < own_boxes_; ++i) copy(i, place_of(i));
  }

  const PrefillCall& call_;
  const int warp_, lane_;
  const int box_rows_;                          // keys of a box
  int issuers_ = 1, own_boxes_ = 0;             // warps that share a tile's boxes, and how many each copies
  int32_t keys_ = 0, batch_ = 0, kv_head_ = 0;  // of the sequence
  int32_t first_token_ = 0, next_first_token_ = 0;  // packed: of the sequence, and of the next unit's
  // Of the box that this lane looks up: of the block, of the one before, and of the next unit's first.
  Place place_, next_place_, first_place_;
  Place first_places_[kFirst];  // of the warp's first boxes of the block
};

/// Whether one box brings a unit's queries; else threads copy them.
__device__ inline bool boxes_queries(const PrefillCall& call, const AttendUnit& unit) {
  return call.q_boxes.usable && unit.block.rows == kBlockRows;
}

/// Loads what the units of a launch need, until there are no more.
template <class T, int D>
__device__ void chain_load(const PrefillCall& call, ChainMemory<D>& memory) {
  using Memory = ChainMemory<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const AttendWork work{call, false};
  const bool draws = warp == kLoadWarps - 1 && lane == 0;
  UnitDrawer<decltype(memory.queue), Memory::kKeys> drawer(work, memory.queue);
  StoreReader reader(memory.queue);
  BoxLoader<T, D, Memory::kKeys> loader(call, warp, lane);
  Ring<Memory::kTiles> ring;
  Ring<Memory::kQueries> q_ring;
  const bool leads = warp == 0 && lane == 0;
  const Addresses at(memory);
  const auto bring_queries = [&](const AttendUnit& unit) {
    wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
    const uint32_t full = at.q_full(q_ring.stage);
    if (!boxes_queries(call, unit)) {
      copy_queries<D, kChainBatch>(call, at.q(q_ring.stage), unit.block.row, unit.block.first,
                                   unit.block.rows, unit.reader * work.heads(), work.heads(), warp, lane);
      arrive_after_copies(full);
    } else if (warp == 0) {
      if (leads) expect_bytes(full, kBlockRows * D * 2);
      copy_box_by_one(at.q(q_ring.stage), &call.q_boxes.map, full, 0, unit.reader * work.heads(),
                      unit.block.row + unit.block.first / work.heads(), 0, 0);
      if (leads) arrive(full, kLoadWarps * 32);
    }
    __syncwarp();
    q_ring.next();
  };
  // The tile of V before the first, without contents.
  if (leads) arrive(at.full(ring.stage), kFullArrivals);
  ring.next();
  // Written so that each part stands once in the code: what is left there seldom has to be fetched anew.
  int index = -1;  // of the unit in work; none yet
  while (true) {
    const int32_t blocks = index < 0 ? 0 : memory.queue.units[index].blocks;
    if (blocks > 0) loader.begin(memory.queue.units[index]);
    // By then the queries of the unit before are no longer read, if there are as many blocks.
    const int32_t last_begin = max(min(blocks - 4, 4), 0);
    int next = -1;
#pragma unroll 1
    for (int32_t block = blocks - 1; block >= 0 || next < 0; --block) {
      if (block >= 0) {
        loader.look_ahead(block);
#pragma unroll 1
        for (int values = 0; values < 2; ++values) {
          wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
          loader.copy(block, values, at.tile(ring.stage), at.full(ring.stage));
          ring.next();
        }
        loader.next();
        // The next unit soon enough for its queries to arrive in time, but not sooner, or units would be
        // drawn by those that are not done with theirs.
        if (draws && block <= last_begin + 4) drawer.advance();
        __syncwarp();
      }
      if (block > last_begin || next >= 0) continue;
      if (draws) drawer.finish();
      __syncwarp();
      next = reader.wait();
      const AttendUnit& unit = memory.queue.units[next];
      if (unit.blocks == 0) continue;
      bring_queries(unit);
      loader.announce(unit);
    }
    if (index >= 0) reader.release(index);
    index = next;
    if (memory.queue.units[index].reader < 0) break;
  }
  // The Q K^T that the last P V is issued with.
  if (!leads) return;
  wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
  arrive(at.full(ring.stage), kFullArrivals);
  wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
  arrive(at.q_full(q_ring.stage), kLoadWarps * 32);
}

}  // namespace kascade::cuda
