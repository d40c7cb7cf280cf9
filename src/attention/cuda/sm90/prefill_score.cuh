// SPDX-License-Identifier: Apache-2.0
// The two passes over all keys that read K alone: log-sum-exp of every query row, and pooled weights of a
// chunk of tiles. A tile of K meets two tiles of queries, so that it is fetched half as often; each computing
// warpgroup has a product of scores being multiplied while another is exponentiated.
#pragma once

#include <cstddef>

#include "attention/cuda/sm90/prefill_attend.cuh"
#include "attention/cuda/sm90/prefill_weights.cuh"

namespace kascade::cuda {

template <int D>
struct ScoreShape {
  static constexpr int kKeys = 128;
  static constexpr int kStages = D == 64 ? 8 : D == 128 ? 4 : 2;
  static constexpr int kParts = lse_rows(D) / kBlockRows;  // tiles of queries of a unit
  static constexpr int kGroups = 2 * kParts;               // computing warpgroups
  static constexpr int kThreads = (kLoadWarps + 4 * kGroups) * 32;
  // Of a loading and a computing thread, by pass: together what the block is launched with, or it would wait
  // for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kLseLoadRegisters = kParts == 1 ? 40 : 64,
                       kLseComputeRegisters = kParts == 1 ? 232 : 104;
  static constexpr int kPoolLoadRegisters = kParts == 1 ? 40 : 32,
                       kPoolComputeRegisters = kParts == 1 ? 232 : 112;
  static_assert(kLseLoadRegisters + kGroups * kLseComputeRegisters == (1 + kGroups) * kLaunchRegisters);
  static_assert(kPoolLoadRegisters + kGroups * kPoolComputeRegisters == (1 + kGroups) * kLaunchRegisters);
};

template <int D, class Unit>
struct ScoreMemory {
  using Shape = ScoreShape<D>;
  static constexpr bool kValues = false;
  static constexpr int kQueryTiles = Shape::kParts;
  alignas(1024) unsigned char q[Shape::kParts][kBlockRows * D * 2];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kKeys * D * 2];
  alignas(16) uint32_t exists[Shape::kStages][4];
  UnitQueue<Unit> queue;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t q_full, q_empty;

  __device__ void init() {
    queue.init(4 * Shape::kGroups);
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(k_full[i], kFullArrivals);
      init_barrier(k_empty[i], 4 * Shape::kGroups);
    }
    init_barrier(q_full, kLoadWarps * 32);
    init_barrier(q_empty, 4 * Shape::kGroups);
    fence_barriers();
  }
};

/// What both computers share: the ring of K and the order of products.
template <class Self, class Memory>
class ScoreComputer {
 protected:
  static constexpr int kParts = Memory::Shape::kParts;

  __device__ explicit ScoreComputer(const PrefillCall& call, Memory& memory)
      : call_(call),
        memory_(memory),
        base_(kept(shared_address(&memory))),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void release(uint64_t& empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }

  /// Self::add for blocks last, last - 1, ..., first: one warpgroup multiplies while others exponentiate.
  /// queries, keys: where the warpgroup's rows begin in shared memory, and in a tile of K.
  __device__ void run_blocks(uint32_t queries, uint32_t keys, int32_t last, int32_t first) {
    const uint32_t q = in_uniform_register(queries);
#pragma unroll 1
    for (int32_t block = last; block >= first; --block) {
      // The address is at hand when the tile is.
      const uint32_t k = in_uniform_register(tile() + keys);
      wait_barrier(base_ + at(offsetof(Memory, k_full)) + stage_ * 8, parity_);
      if (block >= boxed_) fence_async_proxy();
      begin_products();
      self().multiply(scores_, q, k);
      commit_products();
      const uint32_t empty = base_ + at(offsetof(Memory, k_empty)) + stage_ * 8;
      if (++stage_ == Memory::Shape::kStages) {
        stage_ = 0;
        parity_ ^= 1;
      }
      if (block != last) self().settle();
      wait_products<0>();
      pin(scores_);
      __syncwarp();
      if (lane_ == 0) arrive(empty);
      self().add(scores_, block);
    }
    self().settle();
  }

  __device__ uint32_t query_tile(int part) const {
    return base_ + at(offsetof(Memory, q)) + static_cast<uint32_t>(part) * sizeof(Memory::q[0]);
  }

  const PrefillCall& call_;
  Memory& memory_;
  const uint32_t base_;  // address of memory_
  const int group_, warp_, lane_;
  int32_t boxed_ = 0;  // blocks before this one come by the copy engine

 private:
  template <class T>
  __device__ static constexpr uint32_t at(T bytes) {
    return static_cast<uint32_t>(bytes);
  }
  __device__ uint32_t tile() const {
    return base_ + at(offsetof(Memory, k)) + stage_ * at(sizeof(Memory::k[0]));
  }
  __device__ Self& self() { return *static_cast<Self*>(this); }

  // Of the next tile of K.
  uint32_t stage_ = 0, parity_ = 0;
  float scores_[64];
};

template <class T, int D>
class LseComputer : public ScoreComputer<LseComputer<T, D>, ScoreMemory<D, AttendUnit>> {
  using Memory = ScoreMemory<D, AttendUnit>;
  using Base = ScoreComputer<LseComputer<T, D>, Memory>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
  static constexpr int kKeys = Memory::Shape::kKeys;

 public:
  __device__ LseComputer(const PrefillCall& call, Memory& memory) : Base(call, memory) {}

  __device__ void run() {
    const int32_t heads = call_.params.query_heads / call_.params.kv_heads;
    UnitReader<AttendUnit> reader(memory_.queue);
    uint32_t q_parity = 0;
    while (true) {
      const AttendUnit unit = reader.next();
      if (unit.reader < 0) break;
      const int32_t blocks = unit_blocks<kKeys>(unit, heads);
      this->boxed_ = call_.box_rows == 0 ? 0 : unit.block.keys / kKeys;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        limit_[half] = row_limit(unit, unit.block.first + row_of(half), heads);
        reference_[half] = -FLT_MAX;
        sum_[half] = 0;
      }
      unmasked_ = max(row_limit(unit, unit.block.first + group_ * 64 + warp_ * 16, heads), 0) / kKeys;
      if (blocks > 0) {
        wait_barrier(memory_.q_full, q_parity);
        q_parity ^= 1;
        fence_async_proxy();
        this->run_blocks(this->query_tile(group_ / 2) + static_cast<uint32_t>(group_ % 2 * 64 * D * 2), 0,
                         blocks - 1, 0);
        this->release(memory_.q_empty);
      }
      store(unit, heads);
    }
  }

 private:
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ void multiply(float (&scores)[64], uint32_t queries, uint32_t keys) {
    const uint64_t q = row_descriptor<D>(queries), k = row_descriptor<D>(keys);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kKeys>::shared(scores, advance(q, step_bytes(step)), advance(k, step_bytes(step)), step > 0);
  }

  /// Sums of 2^(score - reference) over the thread's keys of both rows; offset: less the references.
  __device__ void sum_up(const float (&scores)[64], const float (&offset)[2], float (&sums)[2]) const {
    float partial[2][2] = {};
    float powers[2][16];
    // Added up one step later: a sum would wait for the exponential just before it.
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < 4) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
          powers[step & 1][i] = exp2_fast(fmaf(scores[16 * step + i], call_.scale_log2, offset[i >> 1 & 1]));
      }
      if (step > 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) partial[i >> 1 & 1][i & 1] += powers[(step - 1) & 1][i];
      }
    }
    sums[0] = partial[0][0] + partial[0][1];
    sums[1] = partial[1][0] + partial[1][1];
  }

  __device__ void settle() {}

  __device__ void add(float (&scores)[64], int32_t block) {
    if (block >= unmasked_) {
      const int first = 2 * (lane_ & 3);
      const int32_t limits[2] = {limit_[0] - block * kKeys - first, limit_[1] - block * kKeys - first};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * j + (e & 1) >= limits[e >> 1]) scores[4 * j + e] = -INFINITY;
    }
    float sums[2], offset[2] = {-reference_[0], -reference_[1]};
    sum_up(scores, offset, sums);
    const bool high = !(sums[0] <= kMostSum) || !(sums[1] <= kMostSum);
    // Rare after the first block: no maximum is taken unless a sum has outgrown its reference.
    if (__any_sync(kFullWarp, high)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = scores[2 * half];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
          top = fmaxf(top, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)) * call_.scale_log2;
        int own = !(sums[half] <= kMostSum) ? 1 : 0;
        own |= __shfl_xor_sync(kFullWarp, own, 1);
        own |= __shfl_xor_sync(kFullWarp, own, 2);
        if (own == 0 || top == -INFINITY) continue;
        sum_[half] *= exp2_fast(reference_[half] - top);
        reference_[half] = top;
        offset[half] = -top;
      }
      sum_up(scores, offset, sums);
    }
    sum_[0] += sums[0];
    sum_[1] += sums[1];
  }

  __device__ void store(const AttendUnit& unit, int32_t heads) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum_[half];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      const int i = row_of(half), n = unit.block.first + i;
      if (i >= unit.block.rows || (lane_ & 3) != 0) continue;
      const int64_t row = unit.block.row + n / heads, head = unit.reader * heads + n % heads;
      call_.lse[row * call_.params.query_heads + head] =
          total == 0 ? -INFINITY : reference_[half] + log2f(total);
    }
  }

  int32_t unmasked_ = 0;  // blocks before this one are seen whole by every row of the warp
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {};
};

template <class T, int D>
__global__ void __launch_bounds__(ScoreShape<D>::kThreads, 1)
    prefill_lse_kernel(const __grid_constant__ PrefillCall call) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<ScoreMemory<D, AttendUnit>*>(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<ScoreShape<D>::kLseLoadRegisters>();
    attend_load<T, D>(call, memory, false);
  } else {
    take_registers<ScoreShape<D>::kLseComputeRegisters>();
    LseComputer<T, D>(call, memory).run();
  }
}

/// Counts one more at an address in shared memory.
__device__ inline void count_shared(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

/// One tile of a unit of pooling.
struct PoolTile {
  int32_t place;  // of its weights and histogram for the unit's set
  int32_t row, rows;
  int32_t end_key;              // weights of keys before it are wanted; 0 for none
  int32_t sinks, recent_begin;  // ranked keys lie between
};

/// A range of keys of one or two neighbouring tiles and a set; first_key is a multiple of kRangeKeys.
struct PoolUnit {
  int32_t set;  // -1: no more units
  int32_t batch, keys;
  int32_t first_key, end_key;
  PoolTile tiles[2];
};

/// Query rows that a unit pools: of each KV head from kv_head_begin on, of `heads` query heads.
struct PoolRows {
  int32_t kv_head_begin, kv_head_end;
  int32_t head_begin, heads;  // query heads of the first KV head, and of each

  __device__ PoolRows(const PrefillCall& call, int32_t set) {
    const AttentionParams& p = call.params;
    const int32_t group = p.query_heads / p.kv_heads;
    kv_head_begin = p.set_owner == SetOwner::kAllHeads    ? 0
                    : p.set_owner == SetOwner::kQueryHead ? set / group
                                                          : set;
    kv_head_end = p.set_owner == SetOwner::kAllHeads ? p.kv_heads : kv_head_begin + 1;
    head_begin = p.set_owner == SetOwner::kQueryHead ? set : kv_head_begin * group;
    heads = p.set_owner == SetOwner::kQueryHead ? 1 : group;
  }
};

/// Packed rows from `begin` on of one of the unit's tiles.
struct PoolPart {
  const PoolTile& tile;
  int32_t rows;

  __device__ PoolPart(const PoolUnit& unit, const PoolRows& rows_of_set, int32_t begin, int part)
      : tile(unit.tiles[part]), rows(max(tile.rows * rows_of_set.heads - begin, 0)) {}
};
/// Packed rows of the unit's larger tile.
__device__ inline int32_t pooled_rows(const PoolUnit& unit, const PoolRows& rows) {
  return max(unit.tiles[0].rows, unit.tiles[1].rows) * rows.heads;
}

__device__ inline PoolTile pool_tile(const PrefillCall& call, const TileEntry& entry, int32_t place,
                                     int32_t first_key) {
  PoolTile tile;
  tile.place = place;
  tile.row = entry.row;
  tile.rows = entry.rows;
  tile.sinks = entry.sinks;
  tile.recent_begin = entry.recent_begin;
  tile.end_key = min(first_key + kRangeKeys, entry.candidates);
  // Nothing is ranked when none or all of the keys between are members.
  const bool ranks = entry.ranked != 0 && entry.ranked != entry.recent_begin - entry.sinks;
  if ((!ranks && call.params.pooled_weights == nullptr) || tile.end_key <= first_key) tile.end_key = 0;
  return tile;
}

/// The next unit of a chunk that has keys: all tiles on one range of one head's keys before the next range.
template <int parts>
__device__ inline PoolUnit draw_pool_unit(const PrefillCall& call, int32_t chunk) {
  const PrefillTotals& totals = *call.totals;
  const int32_t tiles = min(totals.tiles - chunk * totals.chunk_tiles, totals.chunk_tiles);
  const int32_t ranges = divide_up(call.chunk_keys[chunk], kRangeKeys);
  const TileEntry* table = call.tile_table + chunk * totals.chunk_tiles;
  PoolUnit unit = {};
  unit.set = -1;
  while (tiles > 0) {
    const int32_t index = atomicAdd(call.counters + 2 + chunk, 1);
    const int32_t needed = index / tiles / max(ranges, 1);
    if (ranges == 0 || needed >= totals.needed_sets) break;
    // The longest first, so that the end is even.
    const int32_t set = call.needed_sets[needed], slot = tiles - 1 - index % tiles;
    const TileEntry entry = table[slot];
    // The second of a pair comes with the first.
    if (parts == 2 && slot % 2 == 1 && table[slot - 1].batch == entry.batch) continue;
    unit.batch = entry.batch;
    unit.keys = entry.keys;
    unit.first_key = index / tiles % ranges * kRangeKeys;
    unit.tiles[0] = pool_tile(call, entry, slot * totals.needed_sets + needed, unit.first_key);
    unit.tiles[1] = PoolTile{};
    if (parts == 2 && slot % 2 == 0 && slot + 1 < tiles && table[slot + 1].batch == entry.batch)
      unit.tiles[1] =
          pool_tile(call, table[slot + 1], (slot + 1) * totals.needed_sets + needed, unit.first_key);
    unit.end_key = max(unit.tiles[0].end_key, unit.tiles[1].end_key);
    if (unit.end_key == 0) continue;
    unit.set = set;
    break;
  }
  return unit;
}

template <class T, int D>
__device__ void pool_load(const PrefillCall& call, ScoreMemory<D, PoolUnit>& memory, int32_t chunk) {
  using Shape = ScoreShape<D>;
  constexpr int kKeys = Shape::kKeys, kParts = Shape::kParts;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  UnitWriter<PoolUnit> writer(memory.queue);
  UnitReader<PoolUnit> reader(memory.queue);
  const bool draws = warp == 0 && lane == 0;
  if (draws) writer.put(draw_pool_unit<kParts>(call, chunk));
  __syncwarp();
  BlockLoader<T, D, kKeys> loader(call, warp, lane);
  Ring<Shape::kStages> ring;
  uint32_t q_parity = 1;
  while (true) {
    const PoolUnit unit = reader.next();
    if (unit.set < 0) break;
    const PoolRows rows(call, unit.set);
    const int32_t last = divide_up(unit.end_key, kKeys) - 1, first = unit.first_key / kKeys;
    KeyList keys;
    keys.entries = unit.keys;
    keys.batch = unit.batch;
    bool drawn = false;
    for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
      for (int32_t begin = 0; begin < pooled_rows(unit, rows); begin += kBlockRows) {
        keys.kv_head = g;
        loader.begin(keys, last);
        for (int32_t block = last; block >= first; --block) {
          loader.look_ahead(block);
          wait_barrier(memory.k_empty[ring.stage], ring.parity ^ 1);
          loader.copy_keys(block, shared_address(memory.k[ring.stage]), memory.k_full[ring.stage],
                           memory.exists[ring.stage]);
          loader.next();
          ring.next();
          // The next unit, while there is work for some time.
          if (!drawn && block == max(last - Shape::kStages, first)) {
            drawn = true;
            if (draws) writer.put(draw_pool_unit<kParts>(call, chunk));
            __syncwarp();
          }
          if (block != last) continue;
          wait_barrier(memory.q_empty, q_parity);
          q_parity ^= 1;
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const PoolPart part(unit, rows, begin, i);
            copy_queries<D>(call, shared_address(memory.q[i]), part.tile.row, begin, part.rows,
                            rows.head_begin + (g - rows.kv_head_begin) * rows.heads, rows.heads, warp, lane);
          }
          arrive_after_copies(memory.q_full);
        }
      }
  }
}

/// Keys lie on the rows of the product and packed query rows on its columns, so that a thread adds up most of
/// a key's weight by itself.
template <class T, int D>
class PoolComputer : public ScoreComputer<PoolComputer<T, D>, ScoreMemory<D, PoolUnit>> {
  using Memory = ScoreMemory<D, PoolUnit>;
  using Base = ScoreComputer<PoolComputer<T, D>, Memory>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::kParts;
  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
  static constexpr int kKeys = Memory::Shape::kKeys;
  static constexpr int kAll = 1;  // named barrier of the computing threads
  static constexpr int kThreads = Memory::Shape::kGroups * 128;

 public:
  __device__ PoolComputer(const PrefillCall& call, Memory& memory, int32_t* histograms)
      : Base(call, memory), histograms_(histograms) {}

  __device__ void run() {
    UnitReader<PoolUnit> reader(memory_.queue);
    uint32_t q_parity = 0;
    const int thread = static_cast<int>(threadIdx.x) - kLoadWarps * 32;
    for (int i = thread; i < kParts * kWeightBins; i += kThreads) histograms_[i] = 0;
    named_sync(kAll, kThreads);
    while (true) {
      const PoolUnit unit = reader.next();
      if (unit.set < 0) break;
      const PoolRows rows(call_, unit.set);
      this->boxed_ = call_.box_rows == 0 ? 0 : unit.keys / kKeys;
      bool fresh = true;
      for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
        for (int32_t begin = 0; begin < pooled_rows(unit, rows); begin += kBlockRows) {
          begin_part(unit, rows, g, begin, fresh);
          fresh = false;
          wait_barrier(memory_.q_full, q_parity);
          q_parity ^= 1;
          fence_async_proxy();
          this->run_blocks(this->query_tile(own_part()), static_cast<uint32_t>(group_ % 2 * 64 * D * 2),
                           divide_up(unit.end_key, kKeys) - 1, unit.first_key / kKeys);
          this->release(memory_.q_empty);
        }
      named_sync(kAll, kThreads);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const PoolTile& tile = unit.tiles[i];
        if (tile.end_key == 0) continue;
        int32_t* histogram = call_.histograms + int64_t{tile.place} * kWeightBins;
        for (int bin = thread; bin < kWeightBins; bin += kThreads) {
          const int32_t count = histograms_[i * kWeightBins + bin];
          if (count == 0) continue;
          atomicAdd(histogram + bin, count);
          histograms_[i * kWeightBins + bin] = 0;
        }
      }
      named_sync(kAll, kThreads);
    }
  }

 private:
  /// What add() needs to know of a part; add() goes on from block to block with it.
  struct Part {
    float* weight;  // of the thread's key of the block
    bool stores;    // whether the thread has a key whose weight is stored
    bool fresh;     // the first rows of the unit: weights are set, not added to
    // The thread's key less the first that is ranked, and how many are; none before the last rows are added.
    uint32_t place, ranked;
    uint32_t histogram;  // its tile's, an address in shared memory
  };

  __device__ void begin_part(const PoolUnit& unit, const PoolRows& rows, int32_t g, int32_t begin,
                             bool fresh) {
    const PoolPart part(unit, rows, begin, own_part());
    // Of the last block; lanes 0 and 1 of a quad end up with the weights of its two keys. What the last block
    // has beyond the tile's end is stored too, where nobody looks at it.
    const int32_t key = (divide_up(unit.end_key, kKeys) - 1) * kKeys + group_ % 2 * 64 + warp_ * 16 +
                        lane_ / 4 + 8 * (lane_ & 1);
    Part& p = part_;
    p.weight = call_.weights + int64_t{part.tile.place} * call_.weight_stride + key;
    p.stores = part.rows > 0 && part.tile.end_key > 0 && (lane_ & 2) == 0;
    p.fresh = fresh;
    const bool last = g == rows.kv_head_end - 1 && part.rows <= kBlockRows;
    const int32_t end = min(part.tile.recent_begin, part.tile.end_key);
    p.place = static_cast<uint32_t>(key - part.tile.sinks);
    p.ranked = last ? static_cast<uint32_t>(max(end - part.tile.sinks, 0)) : 0;
    p.histogram = shared_address(histograms_ + own_part() * kWeightBins);
    const int32_t head_begin = rows.head_begin + (g - rows.kv_head_begin) * rows.heads;
    // Infinite for columns without a row, whose weights become zero. n / heads for n below 65536:
    const uint32_t reciprocal = 0xFFFFFFFFu / static_cast<uint32_t>(rows.heads) + 1;
    const float* lse = call_.lse + int64_t{part.tile.row} * call_.params.query_heads + head_begin;
#pragma unroll
    for (int c = 0; c < 32; ++c) {
      const int32_t at = c / 2 * 8 + 2 * (lane_ & 3) + c % 2, n = begin + at;
      const int32_t token =
          rows.heads == 1 ? n : static_cast<int32_t>(__umulhi(static_cast<uint32_t>(n), reciprocal));
      lse_[c] = at < part.rows ? lse[token * call_.params.query_heads + n - token * rows.heads] : INFINITY;
    }
  }

  // Warpgroups 0 and 1 take the two halves of a block's keys for the first part, the others for the second.
  __device__ int own_part() const { return group_ / 2; }

  __device__ void multiply(float (&scores)[64], uint32_t queries, uint32_t keys) {
    const uint64_t q = row_descriptor<D>(queries), k = row_descriptor<D>(keys);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kBlockRows>::shared(scores, advance(k, step_bytes(step)), advance(q, step_bytes(step)),
                                     step > 0);
  }

  __device__ void add(const float (&scores)[64], int32_t) {
    float sums[2][2] = {}, powers[2][16];
    // Added up one step later: a sum would wait for the exponential just before it.
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < 4) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
          powers[step & 1][i] =
              exp2_fast(fmaf(scores[16 * step + i], call_.scale_log2, -lse_[8 * step + i / 4 * 2 + (i & 1)]));
      }
      if (step > 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i >> 1 & 1][i & 1] += powers[(step - 1) & 1][i];
      }
    }
    added_[0] = sums[0][0] + sums[0][1];
    added_[1] = sums[1][0] + sums[1][1];
  }

  /// Weights of a block's keys, whose sums were added up before.
  __device__ void settle() {
    const float first = added_[0], second = added_[1];
    const bool odd = (lane_ & 1) != 0;
    float weight = (odd ? second : first) + __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
    weight += __shfl_xor_sync(kFullWarp, weight, 2);
    Part& p = part_;
    if (p.stores) {
      if (!p.fresh) weight += *p.weight;
      if (weight != weight) weight = kNanWeight;
      *p.weight = weight;
      if (p.place < p.ranked)
        count_shared(p.histogram + static_cast<uint32_t>(weight_bin(__float_as_int(weight))) * 4);
    }
    p.weight -= kKeys;
    p.place -= kKeys;
    __syncwarp();
  }

  int32_t* const histograms_;  // [parts, kWeightBins] in shared memory
  Part part_;
  float added_[2] = {};  // of the thread's rows, for each of its two keys
  float lse_[32];
};

template <int D>
struct PoolMemory {
  ScoreMemory<D, PoolUnit> score;
  int32_t histograms[ScoreShape<D>::kParts][kWeightBins];
};

template <class T, int D>
__global__ void __launch_bounds__(ScoreShape<D>::kThreads, 1)
    prefill_pool_kernel(const __grid_constant__ PrefillCall call, int32_t chunk) {
  extern __shared__ __align__(1024) unsigned char shared[];
  PoolMemory<D>& memory = *reinterpret_cast<PoolMemory<D>*>(shared);
  if (threadIdx.x == 0) memory.score.init();
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<ScoreShape<D>::kPoolLoadRegisters>();
    pool_load<T, D>(call, memory.score, chunk);
  } else {
    take_registers<ScoreShape<D>::kPoolComputeRegisters>();
    PoolComputer<T, D>(call, memory.score, memory.histograms[0]).run();
  }
}

template <class T, int D>
void launch_prefill_lse(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = ScoreShape<D>::kThreads;
  shape.shared_bytes = sizeof(ScoreMemory<D, AttendUnit>);
  launch("prefill_lse", prefill_lse_kernel<T, D>, shape, stream, call);
}

template <class T, int D>
void launch_prefill_pool(const PrefillCall& call, int32_t chunk, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = ScoreShape<D>::kThreads;
  shape.shared_bytes = sizeof(PoolMemory<D>);
  launch("prefill_pool", prefill_pool_kernel<T, D>, shape, stream, call, chunk);
}

}  // namespace kascade::cuda
