// SPDX-License-Identifier: Apache-2.0
// The loading side of the prefill kernels: one warpgroup fills tiles in shared memory for two that compute.
// Blocks of keys that lie whole in memory come as boxes by the bulk copy engine, gathered and partial ones 16
// bytes a thread.
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/prefill_call.h"
#include "base/cuda/parts.h"
#include "base/cuda/ptx/barrier.cuh"
#include "base/cuda/ptx/wgmma.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

constexpr int kLoadWarps = 4, kComputeWarps = 8;
constexpr int kPrefillThreads = (kLoadWarps + kComputeWarps) * 32;
// Arrivals at a barrier of a full tile: every loading thread's copies, and each loading warp for what it
// stored itself.
constexpr uint32_t kFullArrivals = kLoadWarps * 32 + kLoadWarps;

/// Divides packed rows by the query heads that share keys, by a multiplication.
class HeadDivision {
 public:
  __device__ explicit HeadDivision(int32_t heads)
      : heads_(heads), inverse_(0xFFFFFFFFu / static_cast<uint32_t>(heads)) {}
  /// Token of packed row n >= 0.
  __device__ int32_t token_of(int32_t n) const {
    // Rounded down twice, so it may be one too few.
    const auto token = static_cast<int32_t>(__umulhi(static_cast<uint32_t>(n), inverse_));
    return n - token * heads_ >= heads_ ? token + 1 : token;
  }

 private:
  const int32_t heads_;
  const uint32_t inverse_;  // 2^32 over it
};

// Tiles [rows, D] in shared memory are eight rows after eight rows, of these 64 columns after 64
// columns, swizzled: so one box brings all columns of its keys.
template <int D>
constexpr int kEightRows = 8 * D * 2;  // bytes

/// Where 16-byte piece `piece` of row `row` lies in such a tile.
template <int D>
__device__ inline uint32_t tile_piece(uint32_t tile, int row, int piece) {
  return tile + static_cast<uint32_t>(row / 8 * kEightRows<D> + piece / 8 * 1024 + row % 8 * 128 +
                                      ((piece ^ row) & 7) * 16);
}
/// A tile as an operand of products, which are over its columns or its rows.
template <int D>
__device__ inline uint64_t row_descriptor(uint32_t tile) {
  return matrix_descriptor(tile, 1024, kEightRows<D>);
}
/// Where columns [16 step, 16 step + 16) of a tile begin.
__device__ inline constexpr uint32_t step_bytes(int step) {
  return static_cast<uint32_t>(step / 4 * 1024 + step % 4 * 32);
}

// Copies of a loading warp that are made ready together, as its registers allow.
template <int D>
constexpr int kRowBatch = D == 256 ? 4 : 8;

/// One loading warp copies its rows [warp * rows / 4, ...) of a tile [rows, D]: row i of them from base +
/// unit * offset of lane i; zeros where that lane's `exists` is false.
template <int rows, int D, int batch>
__device__ inline void copy_rows(uint32_t tile, const void* base, uint32_t offset, uint32_t unit, bool exists,
                                 int warp, int lane) {
  constexpr int kPieces = D / 8, kRows = rows / kLoadWarps, kAtOnce = 32 / kPieces;
  const int own_row = lane / kPieces, piece = lane % kPieces;
  const uint32_t own = tile_piece<D>(tile, warp * kRows + own_row, piece);
  const auto to = [own](int row) {
    return (own ^ static_cast<uint32_t>(row % 8 * 16)) +
           static_cast<uint32_t>(row / 8 * kEightRows<D> + row % 8 * 128);
  };
  const uint32_t all = __ballot_sync(kFullWarp, exists || lane >= kRows);
  const char* from = static_cast<const char*>(base) + piece * 16;
  if (all == kFullWarp) {
    // Some at a time, step by step, so that no copy waits for the one before it: a shuffle and an address
    // take 40 cycles, and as long again until the copy has read its registers.
    static_assert(kRows % (batch * kAtOnce) == 0);
#pragma unroll
    for (int first = 0; first < kRows; first += batch * kAtOnce) {
      uint32_t offsets[batch];
      const char* rows_from[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i)
        offsets[i] = __shfl_sync(kFullWarp, offset, first + i * kAtOnce + own_row);
#pragma unroll
      for (int i = 0; i < batch; ++i) rows_from[i] = from + uint64_t{offsets[i]} * unit;
#pragma unroll
      for (int i = 0; i < batch; ++i) copy_async_16(to(first + i * kAtOnce), rows_from[i], 16);
    }
    return;
  }
#pragma unroll 1
  for (int row = 0; row < kRows; row += kAtOnce)
    copy_async_16(to(row), from + uint64_t{__shfl_sync(kFullWarp, offset, row + own_row)} * unit,
                  (all >> (row + own_row) & 1u) * 16);
}

/// A ring: stage and parity of the next entry, `step` further each time.
template <int stages, int step = 1>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    stage += step;
    if (stage < stages) return;
    stage = step == 1 ? 0 : stage - stages;
    parity ^= 1;
  }
};

/// Units of work, handed from the warp that draws them to all warps, two deep.
template <class Unit>
struct UnitQueue {
  Unit units[2];
  uint64_t full[2], empty[2];

  /// writers: threads that put a unit.
  __device__ void init(int compute_warps, uint32_t writers) {
    for (int i = 0; i < 2; ++i) {
      init_barrier(full[i], writers);
      init_barrier(empty[i], static_cast<uint32_t>(kLoadWarps + compute_warps));
    }
  }
};
template <class Unit>
class UnitReader {
 public:
  __device__ explicit UnitReader(UnitQueue<Unit>& queue) : queue_(queue) {}
  /// The next unit; all lanes of a warp call it together.
  __device__ Unit next() {
    const Unit unit = wait();
    release();
    return unit;
  }
  /// The same; it stays where it is until release().
  __device__ const Unit& wait() {
    wait_barrier(queue_.full[ring_.stage], ring_.parity);
    return queue_.units[ring_.stage];
  }
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(queue_.empty[ring_.stage]);
    ring_.next();
  }

 private:
  UnitQueue<Unit>& queue_;
  Ring<2> ring_;
};
template <class Unit>
class UnitWriter {
 public:
  __device__ explicit UnitWriter(UnitQueue<Unit>& queue) : queue_(queue) {}
  /// One thread calls it.
  __device__ void put(const Unit& unit) {
    wait_barrier(queue_.empty[ring_.stage], ring_.parity ^ 1);
    queue_.units[ring_.stage] = unit;
    arrive(queue_.full[ring_.stage]);
    ring_.next();
  }
  /// The same by all loading warps, of which one makes the unit; each of its lanes puts it, and arrives for
  /// itself. So no branch but for that is between what a warp does before and after.
  template <class Make>
  __device__ void put_by(bool makes, const Make& make) {
    wait_barrier(queue_.empty[ring_.stage], ring_.parity ^ 1);
    if (makes) {
      queue_.units[ring_.stage] = make();
      arrive(queue_.full[ring_.stage]);
    }
    ring_.next();
  }

 private:
  UnitQueue<Unit>& queue_;
  Ring<2> ring_;
};

/// The keys of one unit: entry e is list[e] below count, then own_begin, own_begin + 1, ...
struct KeyList {
  const int32_t* list = nullptr;  // ascending positions below own_begin; anything else in it does not exist
  int32_t count = 0;
  int32_t own_begin = 0;
  int32_t entries = 0;  // of a list without members: all keys of the sequence
  int32_t batch = 0, kv_head = 0;
};

/// Fetches blocks of kKeys entries of a KeyList from last to first into tiles of K and V.
template <class T, int D, int kKeys>
class BlockLoader {
  static constexpr int kRows = kKeys / kLoadWarps;

 public:
  static constexpr uint32_t kTileBytes = kKeys * D * 2;

  __device__ BlockLoader(const PrefillCall& call, int warp, int lane)
      : call_(call), warp_(warp), lane_(lane) {}

  /// Starts on blocks block, block - 1, ... of a list.
  __device__ void begin(const KeyList& keys, int32_t block) {
    keys_ = keys;
    boxes_ = keys.list == nullptr && keys.own_begin == 0 && call_.box_rows != 0;
    first_token_ = call_.params.page_table == nullptr ? __ldg(call_.params.cu_seqlens_kv + keys.batch) : 0;
    if (boxes_) {
      page_ = load_box_page(block);
      return;
    }
    position_ = resolve(load_entry(block), block);
    page_ = load_page(position_);
    next_entry_ = load_entry(block - 1);
  }

  /// Whether the bulk copy engine fetches a block.
  __device__ bool is_boxed(int32_t block) const { return boxes_ && (block + 1) * kKeys <= keys_.entries; }

  /// Looks entries of the next block up while this one's are copied; once a block, before copy_keys.
  __device__ void look_ahead(int32_t block) {
    if (boxes_) {
      next_page_ = load_box_page(block - 1);
      if (is_boxed(block)) return;
      // The one partial block of a list that is otherwise boxed.
      position_ = resolve(load_entry(block), block);
      page_ = load_page(position_);
      return;
    }
    next_position_ = resolve(next_entry_, block - 1);
    next_page_ = load_page(next_position_);
    after_next_ = load_entry(block - 2);
  }

  /// K of the block; exists: a bit for each of its keys, written when the list is not boxed.
  __device__ void copy_keys(int32_t block, uint32_t tile, uint64_t& full, uint32_t* exists) {
    const AttentionParams& p = call_.params;
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.k_boxes);
    copy_rows<kKeys, D, kRowBatch<D>>(tile, static_cast<const T*>(p.k) + keys_.kv_head * p.k_head_stride,
                                      page_ * call_.k_page_units + slot() * call_.k_token_units,
                                      call_.kv_unit, position_ >= 0, warp_, lane_);
    const uint32_t bits = __ballot_sync(kFullWarp, position_ >= 0 && lane_ < kRows);
    arrive_after_copies(full);
    if (lane_ != 0) return;
    if (kRows == 32) {
      exists[warp_] = bits;
    } else {
      reinterpret_cast<uint16_t*>(exists)[warp_] = static_cast<uint16_t>(bits);
    }
    arrive(full);
  }
  __device__ void copy_values(int32_t block, uint32_t tile, uint64_t& full) {
    const AttentionParams& p = call_.params;
    if (is_boxed(block)) return copy_boxes(block, tile, full, call_.v_boxes);
    copy_rows<kKeys, D, kRowBatch<D>>(tile, static_cast<const T*>(p.v) + keys_.kv_head * p.v_head_stride,
                                      page_ * call_.v_page_units + slot() * call_.v_token_units,
                                      call_.kv_unit, position_ >= 0, warp_, lane_);
    arrive_after_copies(full);
    if (lane_ == 0) arrive(full);
  }

  /// On to the block before.
  __device__ void next() {
    position_ = next_position_;
    page_ = next_page_;
    next_entry_ = after_next_;
  }

 private:
  static_assert(kRows == 32 || kRows == 16, "a lane looks up at most one key");

  /// This lane's entry of a block as it stands in the list, and the one before it.
  struct Entry {
    int32_t position = -1, before = -1;
  };
  __device__ Entry load_entry(int32_t block) const {
    const int32_t e = block * kKeys + warp_ * kRows + lane_;
    Entry entry;
    if (block < 0 || lane_ >= kRows || e >= keys_.entries) return entry;
    if (e >= keys_.count) {
      entry.position = keys_.own_begin + e - keys_.count;
      return entry;
    }
    entry.position = __ldg(keys_.list + e);
    if (e > 0) entry.before = __ldg(keys_.list + e - 1);
    return entry;
  }
  /// Its position, or -1 where it does not exist.
  __device__ int32_t resolve(const Entry& entry, int32_t block) const {
    const bool listed = block * kKeys + warp_ * kRows + lane_ < keys_.count;
    return entry.position > entry.before && (!listed || entry.position < keys_.own_begin) ? entry.position
                                                                                          : -1;
  }
  __device__ int32_t page_of(int32_t position) const {
    return call_.page_shift >= 0 ? position >> call_.page_shift : position / call_.params.page_size;
  }
  __device__ uint32_t load_page(int32_t position) const {
    const AttentionParams& p = call_.params;
    if (p.page_table == nullptr || position < 0) return 0;
    return __ldg(p.page_table + keys_.batch * p.page_table_stride + page_of(position));
  }
  /// Where the lane's key lies in its page, or among all keys that are packed; its page is 0 then.
  __device__ uint32_t slot() const {
    if (position_ < 0) return 0;
    if (call_.params.page_table == nullptr) return static_cast<uint32_t>(first_token_ + position_);
    return static_cast<uint32_t>(position_ - page_of(position_) * call_.params.page_size);
  }

  // The first warp copies a tile's boxes, a lane each.
  __device__ int32_t first_of_box(int32_t block) const { return block * kKeys + lane_ * call_.box_rows; }
  /// Page of this lane's box.
  __device__ uint32_t load_box_page(int32_t block) const {
    const int32_t key = first_of_box(block);
    return load_page(warp_ == 0 && block >= 0 && key < (block + 1) * kKeys && key < keys_.entries ? key : -1);
  }
  __device__ void copy_boxes(int32_t block, uint32_t tile, uint64_t& full, const BoxMap& map) const {
    if (warp_ != 0) return;
    const AttentionParams& p = call_.params;
    if (lane_ == 0) {
      expect_bytes(full, kTileBytes);
      arrive(full, kFullArrivals);
    }
    const int32_t key = first_of_box(block);
    const int32_t token = p.page_table == nullptr ? first_token_ + key : key - page_of(key) * p.page_size;
    __syncwarp();
    if (lane_ < kKeys / call_.box_rows)
      copy_box(tile + static_cast<uint32_t>(lane_ * call_.box_rows * D * 2), &map.map, shared_address(&full),
               0, token, keys_.kv_head * map.head_panels, 0, page_);
    __syncwarp();
  }

  const PrefillCall& call_;
  const int warp_, lane_;
  KeyList keys_;
  bool boxes_ = false;
  int32_t first_token_ = 0;  // packed: of the sequence
  int32_t position_ = -1;    // of this lane's key of the block
  uint32_t page_ = 0;        // its page
  // The same for the block before, looked up one block ahead; entries are loaded two blocks ahead.
  int32_t next_position_ = -1;
  uint32_t next_page_ = 0;
  Entry next_entry_, after_next_;
};

/// Copies packed rows [first, first + rows) of a unit to a tile [tile_rows, D]; other rows become zeros.
/// heads: query heads that share the keys, from head_begin on.
template <int D, int batch = kRowBatch<D>, int tile_rows = kBlockRows>
__device__ inline void copy_queries(const PrefillCall& call, uint32_t tile, int32_t row, int32_t first,
                                    int32_t rows, int32_t head_begin, int32_t heads, int warp, int lane) {
  constexpr int kRows = tile_rows / kLoadWarps;  // a lane looks up at most one
  const int32_t i = warp * kRows + lane, n = first + i;
  const bool exists = lane < kRows && i < rows;
  const uint32_t offset = exists ? static_cast<uint32_t>(row + n / heads) * call.q_row_units +
                                       static_cast<uint32_t>(head_begin + n % heads) * call.q_head_units
                                 : 0;
  copy_rows<tile_rows, D, batch>(tile, call.params.q, offset, call.q_unit, exists, warp, lane);
}

}  // namespace kascade::cuda
