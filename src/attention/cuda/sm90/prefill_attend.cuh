// SPDX-License-Identifier: Apache-2.0
// Attention of blocks of 128 packed query rows to all keys, or to a tile's set and own keys: the loop of
// FlashAttention-3 (two computing warpgroups that take turns on the tensor cores, one that loads) with keys
// fetched through a list.
#pragma once

#include <cfloat>
#include <cmath>

#include "attention/cuda/sm90/prefill_load.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/mma.cuh"
#include "base/cuda/ptx/wgmma.cuh"

namespace kascade::cuda {

constexpr float kLn2 = 0.693147180559945f;
// A row's reference for 2^x moves only when its largest score has outgrown it by this (log2); sums stay far
// below overflow, and products stay exact enough in 16 bits at any reference.
constexpr float kReferenceSlack = 8.0f;
// Where no maximum is taken, a thread's 32 exponentials of a row and block may sum up to this before the
// reference moves: seldom even in a row's second block, whose reference may come of a single key; weights of
// 16 bits hold eight times as much.
constexpr float kMostSum = 8192.0f;

template <int D>
struct AttendShape {
  static constexpr int kKeys = D == 256 ? 64 : 128;
  static constexpr int kStages = D == 64 ? 4 : D == 128 ? 3 : 2;
  // Of a loading and a computing thread: together no more than the multiprocessor has.
  static constexpr int kLoadRegisters = D == 256 ? 56 : 104, kComputeRegisters = D == 256 ? 224 : 200;
};

struct AttendUnit {
  int32_t reader;  // -1: no more units
  int32_t count;   // members of its list
  int32_t blocks;  // of keys; prefill_chain
  int32_t unused;
  RowBlock block;
};

template <int D>
struct AttendMemory {
  using Shape = AttendShape<D>;
  alignas(1024) unsigned char q[kBlockRows * D * 2];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kKeys * D * 2];
  alignas(1024) unsigned char v[Shape::kStages][Shape::kKeys * D * 2];
  alignas(16) uint32_t exists[Shape::kStages][4];
  UnitQueue<AttendUnit> queue;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  uint64_t q_full, q_empty;
};

/// Keys of the unit's list that packed row n may see; what a list holds of the tile's own keys ends at its
/// position.
__device__ inline int32_t row_limit(const AttendUnit& unit, int32_t n, int32_t heads) {
  return unit.block.position + n / heads + 1 - unit.block.own_begin + unit.count;
}
/// Blocks of keys of a unit: up to what its last row sees.
template <int kKeys>
__device__ inline int32_t unit_blocks(const AttendUnit& unit, int32_t heads) {
  if (unit.block.rows <= 0) return 0;
  return divide_up(max(row_limit(unit, unit.block.first + unit.block.rows - 1, heads), 0), kKeys);
}

// Keys (K and V, or K alone) that stay in the L2 cache beside all else.
constexpr int64_t kCachedKeys = 32768;

/// What the units of an attend launch mean.
struct AttendWork {
  const PrefillCall& call;
  const bool sparse;

  __device__ int32_t heads() const {
    return sparse ? call.reader_heads : call.params.query_heads / call.params.kv_heads;
  }
  __device__ int32_t readers() const { return sparse ? call.readers : call.params.kv_heads; }
  __device__ int32_t kv_head(int32_t reader) const {
    return readers() == call.params.kv_heads ? reader
                                             : reader / (call.params.query_heads / call.params.kv_heads);
  }
  /// The list of the tile's sets that a reader attends to.
  __device__ int64_t list_of(int32_t set, int32_t reader) const {
    const AttentionParams& p = call.params;
    int32_t owner = reader;
    if (p.set_owner == SetOwner::kAllHeads) {
      owner = 0;
    } else if (p.role == Role::kReuse && p.head_map != nullptr) {
      const int32_t group = p.query_heads / p.kv_heads;
      const int32_t mapped = max(0, min(__ldg(p.head_map + kv_head(reader)), p.kv_heads - 1));
      owner = p.set_owner == SetOwner::kQueryHead ? mapped * group + reader % group : mapped;
    }
    return int64_t{set} * call.sets + owner;
  }
  /// Unit `index` of the launch: all units of a head together, so that its keys stay in the cache.
  __device__ AttendUnit unit(int32_t index) const {
    const int32_t blocks = sparse ? call.totals->sparse_blocks : call.totals->dense_blocks;
    AttendUnit unit = {};
    unit.reader = -1;
    if (blocks == 0 || index / blocks >= readers()) return unit;
    unit.reader = index / blocks;
    unit.block = (sparse ? call.sparse_table : call.dense_table)[index % blocks];
    if (unit.block.set >= 0)
      unit.count =
          max(0, min(call.params.counts[list_of(unit.block.set, unit.reader)], call.params.capacity));
    return unit;
  }
};

/// Loads what the units of a launch need, until there are no more.
template <class T, int D>
__device__ void attend_load(const PrefillCall& call, AttendMemory<D>& memory, bool sparse) {
  using Shape = AttendShape<D>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const AttendWork work{call, sparse};
  int32_t* counter = call.counters + (sparse ? 1 : 0);
  UnitWriter<AttendUnit> writer(memory.queue);
  UnitReader<AttendUnit> reader(memory.queue);
  const bool draws = warp == 0 && lane == 0;
  if (draws) writer.put(work.unit(atomicAdd(counter, 1)));
  __syncwarp();
  BlockLoader<T, D, Shape::kKeys> loader(call, warp, lane);
  Ring<Shape::kStages> ring;
  uint32_t q_parity = 1;
  while (true) {
    const AttendUnit unit = reader.next();
    if (unit.reader < 0) break;
    const int32_t blocks = unit_blocks<Shape::kKeys>(unit, work.heads());
    KeyList keys;
    if (unit.count > 0)
      keys.list = call.params.positions + work.list_of(unit.block.set, unit.reader) * call.params.capacity;
    keys.count = unit.count;
    keys.own_begin = unit.block.own_begin;
    keys.entries = unit.count + unit.block.keys - unit.block.own_begin;
    keys.batch = unit.block.batch;
    keys.kv_head = work.kv_head(unit.reader);
    if (blocks > 0) loader.begin(keys, blocks - 1);
    for (int32_t block = blocks - 1; block >= 0; --block) {
      loader.look_ahead(block);
      wait_barrier(memory.k_empty[ring.stage], ring.parity ^ 1);
      loader.copy_keys(block, shared_address(memory.k[ring.stage]), memory.k_full[ring.stage],
                       memory.exists[ring.stage]);
      if (block == blocks - 1) {
        wait_barrier(memory.q_empty, q_parity);
        q_parity ^= 1;
        copy_queries<D>(call, shared_address(memory.q), unit.block.row, unit.block.first, unit.block.rows,
                        unit.reader * work.heads(), work.heads(), warp, lane);
        arrive_after_copies(memory.q_full);
      }
      wait_barrier(memory.v_empty[ring.stage], ring.parity ^ 1);
      loader.copy_values(block, shared_address(memory.v[ring.stage]), memory.v_full[ring.stage]);
      loader.next();
      ring.next();
      // The next unit, while there is work for some time.
      if (block == max(blocks - Shape::kStages, 0) && draws) writer.put(work.unit(atomicAdd(counter, 1)));
      __syncwarp();
    }
    if (blocks == 0 && draws) writer.put(work.unit(atomicAdd(counter, 1)));
    __syncwarp();
  }
}

/// x, which is the same in all lanes, in a uniform register.
__device__ inline uint32_t in_uniform_register(uint32_t x) { return __reduce_max_sync(kFullWarp, x); }

/// Keeps the computation of x, which is never negative, before what follows: the assembler would move it
/// behind a wait for products that it does not depend on, but not an instruction that may be executed or not
/// by its outcome.
__device__ inline void finish_before_wait(float x) {
  asm volatile(
      "{\n.reg .pred negative;\nsetp.lt.f32 negative, %0, 0fBF800000;\n@negative nanosleep.u32 0;\n}\n" ::"f"(
          x)
      : "memory");
}

/// Transposes 4 x 4 words over the four lanes of a quad, for each of `count` such squares.
template <int count>
__device__ inline void transpose_quads(uint32_t (&r)[count][4]) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? r[n][i] : r[n][i + 1], 1);
      (odd ? r[n][i] : r[n][i + 1]) = got;
    }
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t got = __shfl_xor_sync(kFullWarp, high ? r[n][i] : r[n][i + 2], 2);
      (high ? r[n][i] : r[n][i + 2]) = got;
    }
}

template <class T, int D>
class AttendComputer {
  using Shape = AttendShape<D>;
  static constexpr int kKeys = Shape::kKeys;

 public:
  __device__ AttendComputer(const PrefillCall& call, AttendMemory<D>& memory, bool sparse)
      : call_(call),
        memory_(memory),
        work_{call, sparse},
        heads_(work_.heads()),
        division_(heads_),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    UnitReader<AttendUnit> reader(memory_.queue);
    uint32_t q_parity = 0;
    if (group_ == 1) named_arrive(kTurn, 256);
    while (true) {
      const AttendUnit unit = reader.next();
      if (unit.reader < 0) break;
      const int32_t blocks = begin(unit);
      if (blocks > 0) {
        wait_barrier(memory_.q_full, q_parity);
        q_parity ^= 1;
        fence_async_proxy();
        first_block(blocks - 1, blocks == 1);
        for (int32_t block = blocks - 2; block >= 0; --block) next_block(block, block == 0);
        last_values(unit);
      } else {
        prepare_store(unit);
      }
      store();
    }
  }

 private:
  static constexpr int kTurn = 1;  // named barriers kTurn + group

  __device__ int32_t begin(const AttendUnit& unit) {
    first_token_ = unit.block.first / heads_;
    first_head_ = unit.block.first - first_token_ * heads_;
    listed_ = unit.count > 0;
    entries_boxed_ =
        listed_ || unit.block.own_begin != 0 || call_.box_rows == 0 ? 0 : unit.block.keys / kKeys;
    const int32_t limit = row_limit(unit, unit.block.first, heads_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit_[half] = limit + tokens_to(row_of(half));
      reference_[half] = -INFINITY;
      sum_[half] = 0;
    }
    unmasked_ = max(limit + tokens_to(group_ * 64 + warp_ * 16), 0) / kKeys;
    started_ = 0;
    return unit_blocks<kKeys>(unit, heads_);
  }

  // Row of the block of the thread's first (half 0) or second row of sums.
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }
  /// Tokens from the first row of the unit's block to its row i.
  __device__ int32_t tokens_to(int i) const { return division_.token_of(first_head_ + i); }

  __device__ void wait_keys() { wait_barrier(memory_.k_full[k_ring_.stage], k_ring_.parity); }
  __device__ void wait_values() { wait_barrier(memory_.v_full[v_ring_.stage], v_ring_.parity); }
  /// Before products of tiles that threads have copied: those of blocks up to this one.
  __device__ void fence_up_to(int32_t block) {
    if (block >= entries_boxed_) fence_async_proxy();
  }
  /// Whether all keys of the next tile of K exist.
  __device__ bool all_exist() const {
    if (!listed_) return true;
    const uint4 words = *reinterpret_cast<const uint4*>(memory_.exists[k_ring_.stage]);
    return (words.x & words.y & (kKeys == 128 ? words.z & words.w : kFullWarp)) == kFullWarp;
  }
  __device__ uint32_t key_tile() const {
    return in_uniform_register(shared_address(memory_.k[k_ring_.stage]));
  }
  __device__ uint32_t value_tile() const {
    return in_uniform_register(shared_address(memory_.v[v_ring_.stage]));
  }
  __device__ void release(uint64_t& empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }

  __device__ void issue_scores(uint32_t key_tile) {
    const uint64_t k = row_descriptor<D>(key_tile);
    begin_products();
    const uint64_t q =
        row_descriptor<D>(in_uniform_register(shared_address(memory_.q) + group_ * 64 * D * 2));
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kKeys>::shared(scores_, advance(q, step_bytes(step)), advance(k, step_bytes(step)),
                                step > 0);
    commit_products();
  }
  __device__ void issue_values(uint32_t value_tile) {
    const uint64_t v = row_descriptor<D>(value_tile);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      Product<T, D>::template registers<1>(out_, weights_[step], advance(v, step * 16 * D * 2),
                                           step > 0 ? 1 : started_);
    commit_products();
    started_ = 1;
  }

  __device__ void first_block(int32_t block, bool last) {
    wait_keys();
    fence_up_to(block);
    const bool whole = all_exist();
    issue_scores(key_tile());
    wait_products<0>();
    pin(scores_);
    finish_keys(block, last, whole);
    soften();
    pack();
    values_block_ = block;
  }

  __device__ void next_block(int32_t block, bool last) {
    // All that can be is at hand when the turn comes.
    const uint32_t k = key_tile(), v = value_tile();
    wait_keys();
    wait_values();
    fence_up_to(block + 1);
    const bool whole = all_exist();
    named_sync(kTurn + group_, 256);
    issue_scores(k);
    issue_values(v);
    named_arrive(kTurn + 1 - group_, 256);
    wait_products<1>();
    pin(scores_);
    finish_keys(block, last, whole);
    const bool moved = soften();
    // Exponentials belong before the wait: they are what the product of values overlaps with.
    finish_before_wait(fminf(sum_[0], sum_[1]));
    wait_products<0>();
    pin(out_);
    release(memory_.v_empty[v_ring_.stage]);
    v_ring_.next();
    if (moved) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) out_[i] *= factor_[i / 2 % 2];
    }
    pack();
    values_block_ = block;
  }

  __device__ void last_values(const AttendUnit& unit) {
    wait_values();
    fence_up_to(values_block_);
    issue_values(value_tile());
    prepare_store(unit);
    finish_before_wait(factor_[0] + factor_[1]);
    wait_products<0>();
    pin(out_);
    release(memory_.v_empty[v_ring_.stage]);
    v_ring_.next();
  }

  /// After the product of scores: masks, and gives the tile of K (and with the last the queries) back.
  /// whole: all of the tile's keys exist.
  __device__ void finish_keys(int32_t block, bool last, bool whole) {
    const bool masks = block >= unmasked_ || !whole;
    uint32_t exists[4] = {kFullWarp, kFullWarp, kFullWarp, kFullWarp};
    if (listed_ && masks) {
      const uint4 words = *reinterpret_cast<const uint4*>(memory_.exists[k_ring_.stage]);
      exists[0] = words.x;
      exists[1] = words.y;
      if (kKeys == 128) {
        exists[2] = words.z;
        exists[3] = words.w;
      }
    }
    release(memory_.k_empty[k_ring_.stage]);
    k_ring_.next();
    if (last) release(memory_.q_empty);
    if (!masks) return;
    const int first = 2 * (lane_ & 3);
    const int32_t limits[2] = {limit_[0] - block * kKeys - first, limit_[1] - block * kKeys - first};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const uint32_t bits = exists[j / 4] >> (j % 4 * 8) >> first;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if ((bits >> (e & 1) & 1u) == 0 || 8 * j + (e & 1) >= limits[e >> 1]) scores_[4 * j + e] = -INFINITY;
    }
  }

  /// Scores become 2^(score - reference); whether a reference moved, by factor_.
  __device__ bool soften() {
    const float scale = call_.scale_log2;
    float offset[2], tops[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) tops[i >> 1][i & 1] = scores_[i];
#pragma unroll
    for (int i = 4; i < kKeys / 2; ++i) tops[i >> 1 & 1][i & 1] = fmaxf(tops[i >> 1 & 1][i & 1], scores_[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = fmaxf(tops[half][0], tops[half][1]);
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)) * scale;
      factor_[half] = 1;
      if (top > reference_[half] + kReferenceSlack) {
        factor_[half] = exp2_fast(reference_[half] - top);
        reference_[half] = top;
      }
      offset[half] = reference_[half] == -INFINITY ? 0 : -reference_[half];
    }
    const bool moved = __any_sync(kFullWarp, factor_[0] != 1 || factor_[1] != 1);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) scores_[i] = fmaf(scores_[i], scale, offset[i >> 1 & 1]);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) scores_[i] = exp2_fast(scores_[i]);
    float sums[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i >> 1][i & 1] = scores_[i];
#pragma unroll
    for (int i = 4; i < kKeys / 2; ++i) sums[i >> 1 & 1][i & 1] += scores_[i];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      sum_[half] = fmaf(sum_[half], factor_[half], sums[half][0] + sums[half][1]);
    return moved;
  }

  __device__ void pack() {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights_[step][i] = pack_pair<T>(scores_[8 * step + 2 * i], scores_[8 * step + 2 * i + 1]);
  }

  /// All that storing the unit's output takes but the output, while the last product is under way; stores
  /// log-sum-exps.
  __device__ void prepare_store(const AttendUnit& unit) {
    const AttentionParams& p = call_.params;
    float totals[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      totals[half] = sum_[half] + __shfl_xor_sync(kFullWarp, sum_[half], 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) totals[half] += __shfl_xor_sync(kFullWarp, totals[half], 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row_of(half);
      const int32_t token = tokens_to(i);
      const int64_t row = unit.block.row + first_token_ + token;
      const int64_t head = unit.reader * heads_ + first_head_ + i - token * heads_;
      exists_[half] = i < unit.block.rows;
      to_[half] = row * p.out_row_stride + head * p.out_head_stride;
      // Without keys no product has set the output.
      factor_[half] = totals[half] == 0 || started_ == 0 ? 0 : __fdividef(p.v_scale, totals[half]);
      if (!exists_[half] || (lane_ & 3) != 0 || (p.lse == nullptr && p.role != Role::kLayer0)) continue;
      const float lse = totals[half] == 0 ? -INFINITY : reference_[half] + __log2f(totals[half]);
      if (p.lse != nullptr) p.lse[row * p.lse_row_stride + head] = lse * kLn2;
      if (p.role == Role::kLayer0) call_.lse[row * p.query_heads + head] = lse;
    }
  }

  __device__ void store() {
    const AttentionParams& p = call_.params;
    switch (p.out_dtype) {
      case DType::kF32:
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* out = static_cast<float*>(p.out) + to_[half] + 2 * (lane_ & 3);
#pragma unroll
          for (int j = 0; j < D / 8; ++j)
            if (exists_[half])
              *reinterpret_cast<float2*>(out + 8 * j) = scaled(4 * j + 2 * half, factor_[half]);
        }
        break;
      case DType::kBF16:
        store_packed<__nv_bfloat16>();
        break;
      default:
        store_packed<__half>();
        break;
    }
  }
  template <class Out>
  __device__ void store_packed() {
    // Some rows of registers at once, so that shuffles do not wait for each other.
    constexpr int kSquares = D == 64 ? 2 : 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int first = 0; first < D / 8; first += 4 * kSquares) {
        uint32_t words[kSquares][4];
#pragma unroll
        for (int n = 0; n < kSquares; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 pair = scaled(4 * (first + 4 * n + i) + 2 * half, factor_[half]);
            words[n][i] = pack_pair<Out>(pair.x, pair.y);
          }
        transpose_quads(words);
        uint16_t* out = static_cast<uint16_t*>(call_.params.out) + to_[half] + (first + (lane_ & 3)) * 8;
#pragma unroll
        for (int n = 0; n < kSquares; ++n)
          if (exists_[half])
            *reinterpret_cast<uint4*>(out + 32 * n) =
                make_uint4(words[n][0], words[n][1], words[n][2], words[n][3]);
      }
  }
  __device__ float2 scaled(int i, float factor) const {
    return factor == 0 ? make_float2(0, 0) : make_float2(out_[i] * factor, out_[i + 1] * factor);
  }

  const PrefillCall& call_;
  AttendMemory<D>& memory_;
  const AttendWork work_;
  const int32_t heads_;
  const HeadDivision division_;
  const int group_, warp_, lane_;
  Ring<Shape::kStages> k_ring_, v_ring_;
  int32_t first_token_ = 0, first_head_ = 0;  // of the block's first row
  bool listed_ = false;
  int32_t entries_boxed_ = 0;  // blocks before this one come by the copy engine
  int32_t unmasked_ = 0;       // blocks before this one are seen whole by every row of the warp
  int32_t values_block_ = 0;
  int started_ = 0;  // whether out_ holds sums
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {}, factor_[2] = {};
  // Of the output of the thread's rows: whether and where it is stored.
  bool exists_[2] = {};
  int64_t to_[2] = {};
  float scores_[kKeys / 2];
  uint32_t weights_[kKeys / 16][4];
  float out_[D / 2];
};

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_attend_kernel(const __grid_constant__ PrefillCall call, bool sparse) {
  extern __shared__ __align__(1024) unsigned char shared[];
  AttendMemory<D>& memory = *reinterpret_cast<AttendMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    memory.queue.init(kComputeWarps, 1);
    for (int i = 0; i < AttendShape<D>::kStages; ++i) {
      init_barrier(memory.k_full[i], kFullArrivals);
      init_barrier(memory.v_full[i], kFullArrivals);
      init_barrier(memory.k_empty[i], kComputeWarps);
      init_barrier(memory.v_empty[i], kComputeWarps);
    }
    init_barrier(memory.q_full, kLoadWarps * 32);
    init_barrier(memory.q_empty, kComputeWarps);
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<AttendShape<D>::kLoadRegisters>();
    attend_load<T, D>(call, memory, sparse);
  } else {
    take_registers<AttendShape<D>::kComputeRegisters>();
    AttendComputer<T, D>(call, memory, sparse).run();
  }
}

template <class T, int D>
void launch_prefill_attend(const PrefillCall& call, bool sparse, cudaStream_t stream) {
  const char* name = sparse ? "prefill_sparse" : "prefill_dense";
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = kPrefillThreads;
  shape.shared_bytes = sizeof(AttendMemory<D>);
  launch(name, prefill_attend_kernel<T, D>, shape, stream, call, sparse);
}

}  // namespace kascade::cuda
