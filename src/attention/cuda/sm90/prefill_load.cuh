// SPDX-License-Identifier: Apache-2.0
// The loading side of the prefill kernels: one warpgroup fills tiles in shared memory for two that compute.
// Blocks of keys that lie whole in memory come as boxes by the bulk copy engine, gathered and partial ones 16
// bytes a thread.
#pragma once

#include <cstdint>

#include "attention/cuda/ptx/barrier.cuh"
#include "attention/cuda/sm90/prefill_call.h"

namespace kascade::cuda {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
constexpr int kLoadWarps = 4, kComputeWarps = 8;
constexpr int kPrefillThreads = (kLoadWarps + kComputeWarps) * 32;
// Arrivals at a barrier of a full tile: every loading thread's copies, and each loading warp for what it
// stored itself.
constexpr uint32_t kFullArrivals = kLoadWarps * 32 + kLoadWarps;

__device__ inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// Where 16-byte piece `piece` of row `row` lies in a tile of `rows` rows: 64 columns after 64 columns,
/// swizzled.
template <int rows>
__device__ inline uint32_t piece_address(uint32_t tile, int row, int piece) {
  return tile + static_cast<uint32_t>(piece / 8 * rows * 128 + row * 128 + ((piece ^ row) & 7) * 16);
}

/// Rows of a tile [rows, D] that one loading warp copies: [warp * kRows, (warp + 1) * kRows), kAtOnce of them
/// by one instruction.
template <int rows, int D>
struct WarpRows {
  static constexpr int kPieces = D / 8, kRows = rows / kLoadWarps, kAtOnce = 32 / kPieces;
  static constexpr int kCopies = kRows / kAtOnce;

  __device__ WarpRows(uint32_t tile, int warp, int lane)
      : own_row(lane / kPieces),
        piece(lane % kPieces),
        own(piece_address<rows>(tile, warp * kRows + own_row, piece)) {}

  /// Where this thread's piece of its i-th row goes.
  __device__ uint32_t to(int i) const {
    const int row = i * kAtOnce;
    return (own ^ static_cast<uint32_t>((row & 7) * 16)) + static_cast<uint32_t>(row * 128);
  }

  const int own_row, piece;
  const uint32_t own;
};

/// Copies the warp's rows: row i of them from base + unit * the offset of lane i; zeros where that lane's
/// `exists` is false.
template <int rows, int D, int unroll>
__device__ inline void copy_rows(uint32_t tile, const void* base, uint32_t offset, uint32_t unit, bool exists,
                                 int warp, int lane) {
  using Rows = WarpRows<rows, D>;
  const Rows own(tile, warp, lane);
  const uint32_t all = __ballot_sync(kFullWarp, exists);
  const char* from = static_cast<const char*>(base) + own.piece * 16;
#pragma unroll unroll
  for (int i = 0; i < Rows::kCopies; ++i) {
    const int row = i * Rows::kAtOnce + own.own_row;
    copy_async_16(own.to(i), from + uint64_t{__shfl_sync(kFullWarp, offset, row)} * unit,
                  (all >> row & 1u) * 16);
  }
}

/// A ring of tiles: stage and parity of the next one, `step` tiles further each time.
template <int stages, int step = 1>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    stage += step;
    if (stage < stages) return;
    stage -= stages;
    parity ^= 1;
  }
};

/// Units of work, handed from the warp that draws them to all warps.
template <class Unit, int entries = 2>
struct UnitQueue {
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
class UnitReader {
 public:
  __device__ explicit UnitReader(Queue& queue) : queue_(queue) {}
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
  /// A copy of the next unit.
  __device__ auto next() {
    const int index = wait();
    const auto unit = queue_.units[index];
    release(index);
    return unit;
  }

 private:
  Queue& queue_;
  Ring<Queue::kEntries> ring_;
};
template <class Queue>
class UnitWriter {
 public:
  __device__ explicit UnitWriter(Queue& queue) : queue_(queue) {}
  /// One thread calls it.
  template <class Unit>
  __device__ void put(const Unit& unit) {
    wait_barrier(queue_.empty[ring_.stage], ring_.parity ^ 1);
    queue_.units[ring_.stage] = unit;
    arrive(queue_.full[ring_.stage]);
    ring_.next();
  }

 private:
  Queue& queue_;
  Ring<Queue::kEntries> ring_;
};

/// The keys of one unit: entry e is list[e] below count, then own_begin, own_begin + 1, ...
struct KeyList {
  const int32_t* list = nullptr;  // ascending positions below own_begin; anything else in it does not exist
  int32_t count = 0;
  int32_t own_begin = 0;
  int32_t entries = 0;  // of a list without members: all keys of the sequence
  int32_t batch = 0, kv_head = 0;
};

/// Fetches blocks of kKeys entries of a KeyList from last to first into tiles of K, and of V when it is
/// given. kListed: lists may have members or lie where boxes cannot be used.
template <class T, int D, int kKeys, bool kListed>
class BlockLoader {
  using Rows = WarpRows<kKeys, D>;
  static constexpr int kRows = Rows::kRows, kPanels = D / 64;

 public:
  __device__ BlockLoader(const PrefillCall& call, int warp, int lane)
      : call_(call), warp_(warp), lane_(lane), map_rows_(call.map_rows) {
    if (map_rows_ == 0) return;
    const int boxes = kKeys / map_rows_ * kPanels;
    issuers_ = min(boxes, kLoadWarps);
    own_boxes_ = boxes / issuers_;
  }

  /// Starts on blocks block, block - 1, ... of a list.
  __device__ void begin(const KeyList& keys, int32_t block) {
    keys_ = keys;
    first_token_ = call_.params.page_table == nullptr ? __ldg(call_.params.cu_seqlens_kv + keys.batch) : 0;
    boxes_ = !kListed || (keys.list == nullptr && keys.own_begin == 0 && map_rows_ != 0);
    if (boxes_) {
      page_ = load_box_page(block);
      if (is_boxed(block)) return;
    }
    position_ = resolve(load_entry(block), block);
    if (boxes_) return;
    page_ = load_page(position_);
    next_entry_ = load_entry(block - 1);
  }

  /// Whether this warp copies any part of a block.
  __device__ bool takes_part(int32_t block) const { return !is_boxed(block) || warp_ < issuers_; }

  /// Looks entries of the next block up while this one's are copied; once a block, before copy_keys.
  __device__ void look_ahead(int32_t block) {
    if (!kListed) {
      if (call_.params.page_table != nullptr) next_page_ = load_box_page(block - 1);
      return;
    }
    // Not by branches: where one ends, what was loaded in it is waited for.
    next_position_ = resolve(next_entry_, block - 1);
    next_page_ = load_page(boxes_ ? key_of_box(block - 1) : next_position_);
    after_next_ = load_entry(block - 2);
  }

  /// K of the block; exists: a bit for each of its keys, written when the list has members.
  __device__ void copy_keys(int32_t block, uint32_t tile, uint32_t full, uint32_t* exists) {
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.k_map);
    const int32_t page = boxes_ ? load_page(position_) : page_;
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
    copy<true>(tile, k_offset_,
               static_cast<const T*>(call_.params.k) + keys_.kv_head * call_.params.k_head_stride);
    arrive_after_copies(full);
    if (lane_ != 0) return;
    if (kListed) {
      if (kRows == 32) {
        exists[warp_] = exists_;
      } else {
        reinterpret_cast<uint16_t*>(exists)[warp_] = static_cast<uint16_t>(exists_);
      }
    }
    arrive(full);
  }
  __device__ void copy_values(int32_t block, uint32_t tile, uint32_t full) {
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.v_map);
    copy<false>(tile, v_offset_,
                static_cast<const T*>(call_.params.v) + keys_.kv_head * call_.params.v_head_stride);
    arrive_after_copies(full);
    if (lane_ == 0) arrive(full);
  }

  /// On to the block before.
  __device__ void next() {
    page_ = next_page_;
    if (!kListed) return;
    position_ = next_position_;
    next_entry_ = after_next_;
  }

 private:
  static_assert(kRows == 32 || kRows == 16, "a lane looks up at most one key");

  /// Whether the bulk copy engine fetches a block: all but a last one that is not whole.
  __device__ bool is_boxed(int32_t block) const { return boxes_ && (block + 1) * kKeys <= keys_.entries; }

  /// The warp's rows of K, or of V after K.
  template <bool first>
  __device__ void copy(uint32_t tile, uint32_t offset, const T* base) {
    constexpr uint32_t kAll = kRows == 32 ? kFullWarp : (1u << (kRows % 32)) - 1;
    if (!kListed || exists_ != kAll) {
      copy_rows<kKeys, D, 1>(tile, base, offset, call_.kv_unit, (exists_ >> lane_ & 1u) != 0, warp_, lane_);
      return;
    }
    // Where each row lies is handed around once for K and V.
    const Rows own(tile, warp_, lane_);
    if (first || !call_.same_strides) {
#pragma unroll
      for (int i = 0; i < Rows::kCopies; ++i)
        offsets_[i] = __shfl_sync(kFullWarp, offset, i * Rows::kAtOnce + own.own_row);
    }
    const char* from = reinterpret_cast<const char*>(base) + own.piece * 16;
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i = 0; i < Rows::kCopies; i += kAtOnce) {
      uint32_t to[kAtOnce];
      const char* pieces[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        to[j] = own.to(i + j);
        pieces[j] = from + uint64_t{offsets_[i + j]} * call_.kv_unit;
      }
      copy_async_16(to, pieces);
    }
  }

  /// This lane's entry of a block as it stands in the list, and the one before it.
  struct Entry {
    int32_t position = -1, before = -1;
  };
  __device__ Entry load_entry(int32_t block) const {
    const int32_t e = block * kKeys + warp_ * kRows + lane_;
    Entry entry;
    const bool exists = block >= 0 && lane_ < kRows && e < keys_.entries;
    const int32_t own = exists && e >= keys_.count ? keys_.own_begin + e - keys_.count : -1;
    if (!kListed) {
      entry.position = own;
      return entry;
    }
    const bool listed = exists && e < keys_.count;
    entry.position = load_if(listed, keys_.list + e, own);
    entry.before = load_if(listed && e > 0, keys_.list + e - 1, -1);
    return entry;
  }
  /// Its position, or -1 where it does not exist.
  __device__ int32_t resolve(const Entry& entry, int32_t block) const {
    const bool listed = block * kKeys + warp_ * kRows + lane_ < keys_.count;
    return entry.position > entry.before && (!listed || entry.position < keys_.own_begin) ? entry.position
                                                                                          : -1;
  }
  __device__ int32_t page_of(int32_t position) const {
    return call_.page_shift >= 0 ? position >> call_.page_shift : position / max(call_.params.page_size, 1);
  }
  __device__ int32_t load_page(int32_t position) const {
    const AttentionParams& p = call_.params;
    const int32_t page = page_of(max(position, 0));
    return load_if(p.page_table != nullptr && position >= 0,
                   p.page_table + keys_.batch * p.page_table_stride + page, 0);
  }

  // A tile's boxes are dealt out to the warps in turn, the panels of the same keys one after another; a
  // warp's i-th:
  __device__ int box_of(int i) const { return warp_ + i * issuers_; }
  /// Page of the warp's box that this lane looks up.
  __device__ int32_t load_box_page(int32_t block) const { return load_page(key_of_box(block)); }
  /// Its first key, or -1 where there is none.
  __device__ int32_t key_of_box(int32_t block) const {
    if (block < 0 || lane_ >= own_boxes_) return -1;
    const int32_t key = block * kKeys + box_of(lane_) / kPanels * map_rows_;
    return key < keys_.entries ? key : -1;
  }
  __device__ void copy_boxes(int32_t block, uint32_t tile, uint32_t full, const CUtensorMap& map) const {
    if (lane_ == 0) {
      expect_bytes(full, static_cast<uint32_t>(own_boxes_ * map_rows_) * 128);
      arrive(full, kFullArrivals / static_cast<uint32_t>(issuers_));
    }
    const bool paged = call_.params.page_table != nullptr;
#pragma unroll 1
    for (int i = 0; i < own_boxes_; ++i) {
      const int box = box_of(i), panel = box % kPanels, row = box / kPanels * map_rows_;
      const int32_t key = block * kKeys + row, page = __shfl_sync(kFullWarp, page_, i);
      const int32_t token = paged ? key - page_of(key) * call_.params.page_size : first_token_ + key;
      if (lane_ == 0)
        copy_box(tile + static_cast<uint32_t>(panel * kKeys + row) * 128, &map, full, panel * 64, token,
                 keys_.kv_head, page);
      __syncwarp();
    }
  }

  const PrefillCall& call_;
  const int warp_, lane_;
  const int map_rows_;               // keys of a box
  int issuers_ = 1, own_boxes_ = 0;  // warps that share a tile's boxes, and how many each copies
  KeyList keys_;
  bool boxes_ = false;
  int32_t first_token_ = 0;           // packed: of the sequence
  int32_t position_ = -1, page_ = 0;  // of this lane's key of the block, or the page of its box
  // The same for the block before, looked up one block ahead; entries are loaded two blocks ahead.
  int32_t next_position_ = -1, next_page_ = 0;
  Entry next_entry_, after_next_;
  // Of the block in work: where this lane's key lies in K and V, which keys exist, where this thread's pieces
  // lie.
  uint32_t k_offset_ = 0, v_offset_ = 0, exists_ = 0;
  uint32_t offsets_[Rows::kCopies];
};

/// Copies packed rows [first, first + rows) of a unit to a tile [kBlockRows, D]; other rows become zeros.
/// heads: query heads that share the keys, from head_begin on.
template <class T, int D>
__device__ inline void copy_queries(const PrefillCall& call, uint32_t tile, int32_t row, int32_t first,
                                    int32_t rows, int32_t head_begin, int32_t heads, int warp, int lane) {
  const int32_t i = warp * 32 + lane, n = first + i;
  const bool exists = i < rows;
  const uint32_t offset = exists ? static_cast<uint32_t>(row + n / heads) * call.q_row_units +
                                       static_cast<uint32_t>(head_begin + n % heads) * call.q_head_units
                                 : 0;
  copy_rows<kBlockRows, D, 4>(tile, call.params.q, offset, call.q_unit, exists, warp, lane);
}

}  // namespace kascade::cuda
