// SPDX-License-Identifier: Apache-2.0
// The two passes over all keys that read K alone: log-sum-exp of every query row, and pooled weights of a
// chunk of tiles. Each computing warpgroup keeps two products of scores, one being multiplied while the other
// is exponentiated.
#pragma once

#include "attention/cuda/sm90/prefill_attend.cuh"
#include "attention/cuda/sm90/prefill_weights.cuh"

namespace kascade::cuda {

template <int D>
struct ScoreShape {
  static constexpr int kKeys = 128;
  static constexpr int kStages = D == 64 ? 6 : D == 128 ? 4 : 2;
};

template <int D>
struct LseMemory {
  using Shape = ScoreShape<D>;
  static constexpr bool kValues = false;
  alignas(1024) unsigned char q[kBlockRows * D * 2];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kKeys * D * 2];
  alignas(16) uint32_t exists[Shape::kStages][4];
  UnitQueue<AttendUnit> queue;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t q_full, q_empty;
};

/// What both computers share: the ring of K and the order of products.
template <class Self, class Memory>
class ScoreComputer {
 protected:
  __device__ explicit ScoreComputer(const PrefillCall& call, Memory& memory)
      : call_(call),
        memory_(memory),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void release(uint64_t& empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }

  /// Self::add for blocks last, last - 1, ..., first, each while the next is being multiplied.
  __device__ void run_blocks(int32_t last, int32_t first) {
    int32_t block = last;
#pragma unroll 1
    for (; block >= first + 3; block -= 4) {
      issue(a_, block);
      issue(b_, block - 1);
      wait_products<1>();
      finish(a_, block);
      issue(a_, block - 2);
      wait_products<1>();
      finish(b_, block - 1);
      issue(b_, block - 3);
      wait_products<1>();
      finish(a_, block - 2);
      wait_products<0>();
      finish(b_, block - 3);
    }
#pragma unroll 1
    for (; block >= first; --block) {
      issue(a_, block);
      wait_products<0>();
      finish(a_, block);
    }
  }

  const PrefillCall& call_;
  Memory& memory_;
  const int group_, warp_, lane_;
  int32_t boxed_ = 0;  // blocks before this one come by the copy engine

 private:
  __device__ void issue(float (&scores)[64], int32_t block) {
    wait_barrier(memory_.k_full[issued_.stage], issued_.parity);
    if (block >= boxed_) fence_async_proxy();
    begin_products();
    static_cast<Self*>(this)->multiply(scores, memory_.k[issued_.stage]);
    commit_products();
    issued_.next();
  }
  __device__ void finish(float (&scores)[64], int32_t block) {
    pin(scores);
    release(memory_.k_empty[done_.stage]);
    done_.next();
    static_cast<Self*>(this)->add(scores, block);
  }

  Ring<Memory::Shape::kStages> issued_, done_;
  float a_[64], b_[64];
};

template <class T, int D>
class LseComputer : public ScoreComputer<LseComputer<T, D>, LseMemory<D>> {
  using Base = ScoreComputer<LseComputer<T, D>, LseMemory<D>>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
  static constexpr int kKeys = LseMemory<D>::Shape::kKeys;

 public:
  __device__ LseComputer(const PrefillCall& call, LseMemory<D>& memory) : Base(call, memory) {}

  __device__ void run() {
    const int32_t heads = call_.params.query_heads / call_.params.kv_heads;
    UnitReader<AttendUnit> reader(memory_.queue);
    uint32_t q_parity = 0;
    while (true) {
      const AttendUnit unit = reader.next();
      if (unit.reader < 0) break;
      const int32_t blocks = unit_blocks<kKeys>(unit, heads);
      this->boxed_ = call_.map_rows == 0 ? 0 : unit.block.keys / kKeys;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        limit_[half] = row_limit(unit, unit.block.first + row_of(half), heads);
        reference_[half] = -INFINITY;
        sum_[half] = 0;
      }
      unmasked_ = max(row_limit(unit, unit.block.first + group_ * 64 + warp_ * 16, heads), 0) / kKeys;
      if (blocks > 0) {
        wait_barrier(memory_.q_full, q_parity);
        q_parity ^= 1;
        load_queries();
        this->release(memory_.q_empty);
        this->run_blocks(blocks - 1, 0);
      }
      store(unit, heads);
    }
  }

 private:
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ void load_queries() {
    const uint32_t tile = shared_address(memory_.q);
    const int row = group_ * 64 + warp_ * 16 + (lane_ & 15);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      load_matrices(queries_[step], piece_address<kBlockRows>(tile, row, step * 2 + (lane_ >> 4)));
  }

  __device__ void multiply(float (&scores)[64], const unsigned char* keys) {
    const uint64_t k = matrix_descriptor(shared_address(keys), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kKeys>::template registers<0>(scores, queries_[step],
                                               advance(k, step / 4 * kKeys * 128 + step % 4 * 32), step > 0);
  }

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
    const float scale = call_.scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tops[2] = {scores[2 * half], scores[2 * half + 1]};
#pragma unroll
      for (int j = 1; j < kKeys / 8; ++j) {
        tops[0] = fmaxf(tops[0], scores[4 * j + 2 * half]);
        tops[1] = fmaxf(tops[1], scores[4 * j + 2 * half + 1]);
      }
      float top = fmaxf(tops[0], tops[1]);
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)) * scale;
      if (top > reference_[half] + kReferenceSlack) {
        sum_[half] *= exp2_fast(reference_[half] - top);
        reference_[half] = top;
      }
      const float offset = reference_[half] == -INFINITY ? 0 : -reference_[half];
      float sums[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[e] += exp2_fast(fmaf(scores[4 * j + 2 * half + e], scale, offset));
      sum_[half] += sums[0] + sums[1];
    }
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
  uint32_t queries_[D / 16][4];
};

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_lse_kernel(const __grid_constant__ PrefillCall call) {
  extern __shared__ __align__(1024) unsigned char shared[];
  LseMemory<D>& memory = *reinterpret_cast<LseMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    memory.queue.init();
    for (int i = 0; i < LseMemory<D>::Shape::kStages; ++i) {
      init_barrier(memory.k_full[i], kFullArrivals);
      init_barrier(memory.k_empty[i], kComputeWarps);
    }
    init_barrier(memory.q_full, kLoadWarps * 32);
    init_barrier(memory.q_empty, kComputeWarps);
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<kLoadRegisters>();
    attend_load<T, D>(call, memory, false);
  } else {
    take_registers<kComputeRegisters>();
    LseComputer<T, D>(call, memory).run();
  }
}

/// A range of keys [first_key, end_key) of a tile and set, first_key a multiple of kRangeKeys.
struct PoolUnit {
  int32_t set;   // -1: no more units
  int32_t slot;  // of the tile in its chunk
  int32_t first_key, end_key;
  TileEntry tile;
};

/// Query rows that a unit pools, in blocks of packed rows of one KV head.
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

template <int D>
struct PoolMemory {
  using Shape = ScoreShape<D>;
  alignas(1024) unsigned char q[kBlockRows * D * 2];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kKeys * D * 2];
  alignas(16) uint32_t exists[Shape::kStages][4];
  int32_t histogram[kWeightBins];
  UnitQueue<PoolUnit> queue;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t q_full, q_empty;
};

/// The next unit of a chunk that has keys: all tiles on one range of one head's keys before the next range.
__device__ inline PoolUnit draw_pool_unit(const PrefillCall& call, int32_t chunk) {
  const int32_t tiles = min(call.totals->tiles - chunk * call.chunk_tiles, call.chunk_tiles);
  const int32_t ranges = divide_up(call.chunk_keys[chunk], kRangeKeys);
  PoolUnit unit = {};
  unit.set = -1;
  while (tiles > 0) {
    const int32_t index = atomicAdd(call.counters + 2 + chunk, 1);
    const int32_t set = index / tiles / max(ranges, 1);
    if (ranges == 0 || set >= call.totals->needed_sets) break;
    unit.slot = index % tiles;
    unit.first_key = index / tiles % ranges * kRangeKeys;
    unit.tile = call.tile_table[chunk * call.chunk_tiles + unit.slot];
    unit.end_key = min(unit.first_key + kRangeKeys, unit.tile.candidates);
    // Nothing is ranked when all keys are members.
    const bool all = unit.tile.ranked == unit.tile.recent_begin - unit.tile.sinks;
    if (unit.end_key <= unit.first_key ||
        ((all || unit.tile.ranked == 0) && call.params.pooled_weights == nullptr))
      continue;
    unit.set = call.needed_sets[set];
    break;
  }
  return unit;
}

template <class T, int D>
__device__ void pool_load(const PrefillCall& call, PoolMemory<D>& memory, int32_t chunk) {
  using Shape = ScoreShape<D>;
  constexpr int kKeys = Shape::kKeys;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  UnitWriter<PoolUnit> writer(memory.queue);
  UnitReader<PoolUnit> reader(memory.queue);
  const bool draws = warp == 0 && lane == 0;
  if (draws) writer.put(draw_pool_unit(call, chunk));
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
    keys.entries = unit.tile.keys;
    keys.batch = unit.tile.batch;
    for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
      for (int32_t begin = 0; begin < unit.tile.rows * rows.heads; begin += kBlockRows) {
        keys.kv_head = g;
        loader.begin(keys, last);
        for (int32_t block = last; block >= first; --block) {
          loader.look_ahead(block);
          wait_barrier(memory.k_empty[ring.stage], ring.parity ^ 1);
          loader.copy_keys(block, shared_address(memory.k[ring.stage]), memory.k_full[ring.stage],
                           memory.exists[ring.stage]);
          loader.next();
          ring.next();
          if (block != last) continue;
          wait_barrier(memory.q_empty, q_parity);
          q_parity ^= 1;
          copy_queries<T, D>(call.params, shared_address(memory.q), memory.q_full, unit.tile.row, begin,
                             unit.tile.rows * rows.heads - begin,
                             rows.head_begin + (g - rows.kv_head_begin) * rows.heads, rows.heads, warp, lane);
        }
      }
    if (draws) writer.put(draw_pool_unit(call, chunk));
    __syncwarp();
  }
}

/// Keys lie on the rows of the product and the tile's packed rows on its columns, so that a thread adds up
/// most of a key's weight by itself.
template <class T, int D>
class PoolComputer : public ScoreComputer<PoolComputer<T, D>, PoolMemory<D>> {
  using Base = ScoreComputer<PoolComputer<T, D>, PoolMemory<D>>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
  static constexpr int kKeys = PoolMemory<D>::Shape::kKeys;
  static constexpr int kAll = 1;  // named barrier of the computing warps

 public:
  __device__ PoolComputer(const PrefillCall& call, PoolMemory<D>& memory) : Base(call, memory) {}

  __device__ void run() {
    UnitReader<PoolUnit> reader(memory_.queue);
    uint32_t q_parity = 0;
    const int thread = static_cast<int>(threadIdx.x) - kLoadWarps * 32;
    for (int i = thread; i < kWeightBins; i += kComputeWarps * 32) memory_.histogram[i] = 0;
    named_sync(kAll, kComputeWarps * 32);
    while (true) {
      const PoolUnit unit = reader.next();
      if (unit.set < 0) break;
      const PoolRows rows(call_, unit.set);
      const int64_t slot_set = int64_t{unit.slot} * call_.sets + unit.set;
      weights_ = call_.weights + slot_set * call_.weight_stride;
      end_ = unit.end_key;
      sinks_ = unit.tile.sinks;
      recent_begin_ = unit.tile.recent_begin;
      this->boxed_ = call_.map_rows == 0 ? 0 : unit.tile.keys / kKeys;
      first_part_ = true;
      for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
        for (int32_t begin = 0; begin < unit.tile.rows * rows.heads; begin += kBlockRows) {
          last_part_ = g == rows.kv_head_end - 1 && begin + kBlockRows >= unit.tile.rows * rows.heads;
          load_lse(unit, rows, g, begin);
          wait_barrier(memory_.q_full, q_parity);
          q_parity ^= 1;
          fence_async_proxy();
          this->run_blocks(divide_up(unit.end_key, kKeys) - 1, unit.first_key / kKeys);
          this->release(memory_.q_empty);
          first_part_ = false;
        }
      named_sync(kAll, kComputeWarps * 32);
      int32_t* histogram = call_.histograms + slot_set * kWeightBins;
      for (int i = thread; i < kWeightBins; i += kComputeWarps * 32) {
        const int32_t count = memory_.histogram[i];
        if (count == 0) continue;
        atomicAdd(histogram + i, count);
        memory_.histogram[i] = 0;
      }
      named_sync(kAll, kComputeWarps * 32);
    }
  }

 private:
  /// Log-sum-exps of the thread's columns; infinite for columns without a row, whose weights become zero.
  __device__ void load_lse(const PoolUnit& unit, const PoolRows& rows, int32_t g, int32_t begin) {
    const int32_t head_begin = rows.head_begin + (g - rows.kv_head_begin) * rows.heads;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int32_t n = begin + i / 2 * 8 + 2 * (lane_ & 3) + i % 2;
      const int64_t row = unit.tile.row + n / rows.heads;
      lse_[i] = n < unit.tile.rows * rows.heads
                    ? call_.lse[row * call_.params.query_heads + head_begin + n % rows.heads]
                    : INFINITY;
    }
  }

  __device__ void multiply(float (&scores)[64], const unsigned char* keys) {
    const uint64_t k = matrix_descriptor(shared_address(keys) + group_ * 64 * 128, 0);
    const uint64_t q = matrix_descriptor(shared_address(memory_.q), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kBlockRows>::shared(scores, advance(k, step / 4 * kKeys * 128 + step % 4 * 32),
                                     advance(q, step / 4 * kBlockRows * 128 + step % 4 * 32), step > 0);
  }

  __device__ void add(const float (&scores)[64], int32_t block) {
    const float scale = call_.scale_log2;
    float sums[2][2] = {};
#pragma unroll
    for (int j = 0; j < kBlockRows / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[e >> 1][e & 1] += exp2_fast(fmaf(scores[4 * j + e], scale, -lse_[2 * j + (e & 1)]));
    // Lanes 0 and 1 of a quad end up with the weights of its two keys.
    const float first = sums[0][0] + sums[0][1], second = sums[1][0] + sums[1][1];
    const bool odd = (lane_ & 1) != 0;
    float weight = (odd ? second : first) + __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
    weight += __shfl_xor_sync(kFullWarp, weight, 2);
    const int32_t key = block * kKeys + group_ * 64 + warp_ * 16 + lane_ / 4 + 8 * (lane_ & 1);
    if ((lane_ & 2) != 0 || key >= end_) return;
    if (!first_part_) weight += weights_[key];
    weights_[key] = weight;
    if (last_part_ && key >= sinks_ && key < recent_begin_)
      atomicAdd(memory_.histogram + weight_bin(rank_key(weight)), 1);
  }

  float* weights_ = nullptr;
  int32_t end_ = 0, sinks_ = 0, recent_begin_ = 0;
  bool first_part_ = true, last_part_ = true;
  float lse_[32];
};

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_pool_kernel(const __grid_constant__ PrefillCall call, int32_t chunk) {
  extern __shared__ __align__(1024) unsigned char shared[];
  PoolMemory<D>& memory = *reinterpret_cast<PoolMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    memory.queue.init();
    for (int i = 0; i < ScoreShape<D>::kStages; ++i) {
      init_barrier(memory.k_full[i], kFullArrivals);
      init_barrier(memory.k_empty[i], kComputeWarps);
    }
    init_barrier(memory.q_full, kLoadWarps * 32);
    init_barrier(memory.q_empty, kComputeWarps);
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<kLoadRegisters>();
    pool_load<T, D>(call, memory, chunk);
  } else {
    take_registers<kComputeRegisters>();
    PoolComputer<T, D>(call, memory).run();
  }
}

template <class T, int D>
void launch_prefill_lse(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = multiprocessors("prefill_lse");
  shape.threads = kPrefillThreads;
  shape.shared_bytes = sizeof(LseMemory<D>);
  launch("prefill_lse", prefill_lse_kernel<T, D>, shape, stream, call);
}

template <class T, int D>
void launch_prefill_pool(const PrefillCall& call, int32_t chunk, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = multiprocessors("prefill_pool");
  shape.threads = kPrefillThreads;
  shape.shared_bytes = sizeof(PoolMemory<D>);
  launch("prefill_pool", prefill_pool_kernel<T, D>, shape, stream, call, chunk);
}

}  // namespace kascade::cuda
