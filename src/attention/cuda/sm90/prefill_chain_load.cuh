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
  // The unit whose output is not stored yet, for each computing warp, and its rows' references and sums.
  AttendUnit stored[kComputeWarps];
  float2 row_sums[kBlockRows];
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

/// Keys of a head (K and V) of which this many stay in the L2 cache.
constexpr int64_t kCachedKeys = 32768;

/// Draws the units of a launch one by one: first the one with the block's index, then by a counter. All units
/// of a head come together, so that its keys stay in the cache, or of as many heads as have them there: the
/// more units a launch ends with that are short, the more even is its end. The work on the next unit is done
/// in parts, so that one's latency passes while the loading warp does others' work.
template <class Queue>
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
        const bool more = blocks > 0 && index / blocks < work_.readers();
        unit.reader = more ? index / (blocks * at_once_) * at_once_ + index % at_once_ : -1;
        unit.count = 0;
        if (more) unit.block = work_.call.dense_table[index / at_once_ % blocks];
        break;
      }
      case 2:
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

 public:
  __device__ BoxLoader(const PrefillCall& call, int warp, int lane)
      : call_(call), warp_(warp), lane_(lane), box_rows_(call.box_rows) {
    if (box_rows_ == 0) return;
    const int boxes = kKeys / box_rows_;
    issuers_ = min(boxes, kLoadWarps);
    own_boxes_ = warp < issuers_ ? boxes / issuers_ : 0;
  }

  /// Announces a unit of `blocks` > 0 blocks, so that what is looked up first is at hand when it begins.
  __device__ void announce(const AttendUnit& unit, int32_t blocks) {
    next_keys_ = unit.block.keys;
    next_batch_ = unit.block.batch;
    next_first_token_ =
        load_if(call_.params.page_table == nullptr, call_.params.cu_seqlens_kv + next_batch_, 0);
    first_page_ = load_box_page(blocks - 1, next_keys_, next_batch_);
  }
  /// Starts on blocks block, block - 1, ... of the keys of the unit that was announced.
  __device__ void begin(int32_t kv_head, int32_t block) {
    keys_ = next_keys_;
    batch_ = next_batch_;
    kv_head_ = kv_head;
    first_token_ = next_first_token_;
    page_ = first_page_;
    if (!is_boxed(block)) position_ = position_in(block);
  }

  /// Looks pages of the next block up while this one is copied; once a block, before copy_keys.
  __device__ void look_ahead(int32_t block) {
    if (call_.params.page_table != nullptr) next_page_ = load_box_page(block - 1, keys_, batch_);
  }

  __device__ void copy_keys(int32_t block, uint32_t tile, uint32_t full) {
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.k_boxes);
    const int32_t page = load_page(position_, batch_);
    int32_t slot = position_;
    if (call_.params.page_table != nullptr) slot -= page_of(position_) * call_.params.page_size;
    if (call_.params.page_table == nullptr) slot += first_token_;
    const bool there = position_ >= 0;
    // Of a packed sequence, the page is 0.
    k_offset_ = there ? static_cast<uint32_t>(page) * call_.k_page_units +
                            static_cast<uint32_t>(slot) * call_.k_token_units
                      : 0;
    v_offset_ = there ? static_cast<uint32_t>(page) * call_.v_page_units +
                            static_cast<uint32_t>(slot) * call_.v_token_units
                      : 0;
    exists_ = __ballot_sync(kFullWarp, there && lane_ < kRows);
    copy(tile, k_offset_, static_cast<const T*>(call_.params.k) + kv_head_ * call_.params.k_head_stride);
    arrive_after_copies(full);
    if (lane_ == 0) arrive(full);
  }
  __device__ void copy_values(int32_t block, uint32_t tile, uint32_t full) {
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.v_boxes);
    copy(tile, v_offset_, static_cast<const T*>(call_.params.v) + kv_head_ * call_.params.v_head_stride);
    arrive_after_copies(full);
    if (lane_ == 0) arrive(full);
  }

  /// On to the block before.
  __device__ void next() { page_ = next_page_; }

 private:
  static_assert(kRows == 32 || kRows == 16, "a lane looks up at most one key");

  /// Whether the bulk copy engine fetches a block: all but a last one that is not whole.
  __device__ bool is_boxed(int32_t block) const { return (block + 1) * kKeys <= keys_; }

  /// The warp's rows of a block that is not whole.
  __device__ void copy(uint32_t tile, uint32_t offset, const T* base) {
    copy_rows<kKeys, D, kChainBatch>(tile, base, offset, call_.kv_unit, (exists_ >> lane_ & 1u) != 0, warp_,
                                     lane_);
  }

  /// Position of this lane's key of a block, or -1 where it does not exist.
  __device__ int32_t position_in(int32_t block) const {
    const int32_t position = block * kKeys + warp_ * kRows + lane_;
    return lane_ < kRows && position < keys_ ? position : -1;
  }
  __device__ int32_t page_of(int32_t position) const {
    return call_.page_shift >= 0 ? position >> call_.page_shift : position / call_.params.page_size;
  }
  __device__ int32_t load_page(int32_t position, int32_t batch) const {
    const AttentionParams& p = call_.params;
    if (p.page_table == nullptr) return 0;
    return load_if(position >= 0, p.page_table + batch * p.page_table_stride + page_of(max(position, 0)), 0);
  }

  // A tile's boxes are dealt out to the warps in turn; a warp's i-th:
  __device__ int box_of(int i) const { return warp_ + i * issuers_; }
  /// Page of the warp's box that this lane looks up.
  __device__ int32_t load_box_page(int32_t block, int32_t keys, int32_t batch) const {
    if (call_.params.page_table == nullptr || block < 0 || lane_ >= own_boxes_) return 0;
    const int32_t key = block * kKeys + box_of(lane_) * box_rows_;
    return load_page(key < keys ? key : -1, batch);
  }
  __device__ void copy_boxes(int32_t block, uint32_t tile, uint32_t full, const BoxMap& map) const {
    // All warps arrive, also those without a box: none may be so far ahead or behind that it takes a phase of
    // a barrier for another.
    if (lane_ == 0) {
      if (own_boxes_ > 0) expect_bytes(full, static_cast<uint32_t>(own_boxes_ * box_rows_ * D * 2));
      arrive(full, kFullArrivals / kLoadWarps);
    }
    const bool paged = call_.params.page_table != nullptr;
#pragma unroll 1
    for (int i = 0; i < own_boxes_; ++i) {
      const int row = box_of(i) * box_rows_;
      const int32_t key = block * kKeys + row, page = __shfl_sync(kFullWarp, page_, i);
      const int32_t token = paged ? key - page_of(key) * call_.params.page_size : first_token_ + key;
      if (lane_ == 0)
        copy_box(tile + static_cast<uint32_t>(row * D * 2), &map.map, full, 0, token,
                 kv_head_ * map.head_panels, 0, page);
      __syncwarp();
    }
  }

  const PrefillCall& call_;
  const int warp_, lane_;
  const int box_rows_;                          // keys of a box
  int issuers_ = 1, own_boxes_ = 0;             // warps that share a tile's boxes, and how many each copies
  int32_t keys_ = 0, batch_ = 0, kv_head_ = 0;  // of the sequence
  int32_t next_keys_ = 0, next_batch_ = 0, next_first_token_ = 0, first_page_ = 0;  // of the next unit
  int32_t first_token_ = 0;                                                         // packed: of the sequence
  int32_t position_ = -1;             // of this lane's key of the block that is not whole
  int32_t page_ = 0, next_page_ = 0;  // of this lane's box, of the block and of the one before
  // Of the block that is not whole: where this lane's key lies in K and V, which keys exist.
  uint32_t k_offset_ = 0, v_offset_ = 0, exists_ = 0;
};

/// Loads what the units of a launch need, until there are no more.
template <class T, int D>
__device__ void chain_load(const PrefillCall& call, ChainMemory<D>& memory) {
  using Memory = ChainMemory<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const AttendWork work{call, false};
  const bool draws = warp == kLoadWarps - 1 && lane == 0;
  UnitDrawer drawer(work, memory.queue);
  if (draws) drawer.finish();
  __syncwarp();
  StoreReader reader(memory.queue);
  BoxLoader<T, D, Memory::kKeys> loader(call, warp, lane);
  Ring<Memory::kTiles> ring;
  Ring<Memory::kQueries> q_ring;
  const bool leads = warp == 0 && lane == 0;
  const Addresses at(memory);
  const auto bring_queries = [&](const AttendUnit& unit) {
    wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
    copy_queries<D, kChainBatch>(call, at.q(q_ring.stage), unit.block.row, unit.block.first, unit.block.rows,
                                 unit.reader * work.heads(), work.heads(), warp, lane);
    arrive_after_copies(at.q_full(q_ring.stage));
    q_ring.next();
  };
  // The tile of V before the first, without contents.
  if (leads) arrive(at.full(ring.stage), kFullArrivals);
  ring.next();
  int index = reader.wait();
  bool announced = false;
  while (true) {
    const AttendUnit& unit = memory.queue.units[index];
    if (unit.reader < 0) break;
    const int32_t blocks = unit_blocks<Memory::kKeys>(unit, work.heads());
    // By then the queries of the unit before are no longer read, if there are as many blocks.
    const int32_t last_begin = max(min(blocks - 4, 4), 0);
    int next = -1;
    const auto announce = [&](const AttendUnit& other) {
      const int32_t its_blocks = other.reader < 0 ? 0 : unit_blocks<Memory::kKeys>(other, work.heads());
      announced = its_blocks > 0;
      if (!announced) return;
      bring_queries(other);
      loader.announce(other, its_blocks);
    };
    const auto take_next = [&] {
      if (draws) drawer.finish();
      __syncwarp();
      next = reader.wait();
      announce(memory.queue.units[next]);
    };
    if (!announced) announce(unit);
    if (blocks > 0) loader.begin(work.kv_head(unit.reader), blocks - 1);
#pragma unroll 1
    for (int32_t block = blocks - 1; block >= 0; --block) {
      loader.look_ahead(block);
      wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
      loader.copy_keys(block, at.tile(ring.stage), at.full(ring.stage));
      ring.next();
      wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
      loader.copy_values(block, at.tile(ring.stage), at.full(ring.stage));
      ring.next();
      loader.next();
      // The next unit soon enough for its queries to arrive in time, but not sooner, or units would be drawn
      // by those that are not done with theirs.
      if (draws && block <= last_begin + 4) drawer.advance();
      __syncwarp();
      if (block == last_begin) take_next();
    }
    if (blocks == 0) take_next();
    reader.release(index);
    index = next;
  }
  // The Q K^T that the last P V is issued with.
  if (!leads) return;
  wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
  arrive(at.full(ring.stage), kFullArrivals);
  wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
  arrive(at.q_full(q_ring.stage), kLoadWarps * 32);
}

}  // namespace kascade::cuda
