// SPDX-License-Identifier: Apache-2.0
// Attention of blocks of 128 packed query rows to all keys, or to a tile's set and own keys: two computing
// warpgroups that take turns on the tensor cores, and one that loads. Each step issues its Q K^T, then the P
// V of the step before. Where all keys come by the copy engine, the steps of all units form one sequence: the
// last P V of a unit is issued with the first Q K^T of the next, so the first step has a tile of V before it
// that nobody looks at, and the last P V a Q K^T with it. Where keys are gathered, a unit is finished by
// itself, while the loads of the next one are under way.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>

#include "attention/cuda/common/launch.h"
#include "attention/cuda/ptx/mma.cuh"
#include "attention/cuda/ptx/wgmma.cuh"
#include "attention/cuda/sm90/prefill_load.cuh"

namespace kascade::cuda {

constexpr float kLn2 = 0.693147180559945f;
// A row's reference for 2^x is the largest score of one of its blocks, and moves only when a thread's
// exponentials of a block add up to more than this: sums stay far below overflow, and products stay exact
// enough in 16 bits at any reference.
constexpr float kMostSum = 256.0f;

template <int D>
struct AttendShape {
  static constexpr int kKeys = D == 256 ? 64 : 128;
  static constexpr int kTiles = D == 64 ? 10 : 5;  // of K and V in turn
  static constexpr int kQueries = D == 256 ? 1 : 2;
};
/// Registers of a loading and a computing thread: together no more than the multiprocessor has.
template <bool kListed>
struct AttendRegisters {
  static constexpr int kLoad = 72, kCompute = 216;
};

struct AttendUnit {
  int32_t reader;  // -1: no more units
  int32_t count;   // members of its list
  int32_t unused[2];
  RowBlock block;
};

template <int D>
struct AttendMemory {
  using Shape = AttendShape<D>;
  static constexpr bool kValues = true;
  static constexpr int kKeys = Shape::kKeys, kTiles = Shape::kTiles, kQueries = Shape::kQueries;
  static constexpr int kQueryTiles = 1;
  alignas(1024) unsigned char q[kQueries][1][kBlockRows * D * 2];
  alignas(1024) unsigned char tiles[kTiles][kKeys * D * 2];
  alignas(16) uint32_t exists[kTiles][4];
  // One whose output is not stored yet, one in work, and two further ones.
  UnitQueue<AttendUnit, 4> queue;
  uint64_t full[kTiles], empty[kTiles];
  uint64_t q_full[kQueries], q_empty[kQueries];
};

/// Addresses in a block's shared memory, from one that is kept.
template <class Memory>
class Addresses {
 public:
  __device__ explicit Addresses(Memory& memory) : base_(kept(shared_address(&memory))) {}
  __device__ uint32_t q(int query, int part = 0) const {
    return base_ + at(offsetof(Memory, q)) +
           static_cast<uint32_t>(query * Memory::kQueryTiles + part) * sizeof(Memory::q[0][0]);
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
};

/// Draws the units of a launch one by one: all units of a head together, so that its keys stay in the cache.
/// The work on the next unit is done in parts, so that one's latency passes while the loading warp does
/// others' work.
template <class Queue>
class UnitDrawer {
 public:
  __device__ UnitDrawer(const AttendWork& work, Queue& queue) : work_(work), queue_(queue) {}

  /// One part of the work on the next unit; nothing when it is in the queue.
  __device__ void advance() {
    const PrefillCall& call = work_.call;
    AttendUnit& unit = queue_.units[ring_.stage];
    switch (part_) {
      case 0:
        index_ = atomicAdd(call.counters + (work_.sparse ? 1 : 0), 1);
        wait_barrier(queue_.empty[ring_.stage], ring_.parity ^ 1);
        break;
      case 1: {
        const int32_t blocks = work_.sparse ? call.totals->sparse_blocks : call.totals->dense_blocks;
        const bool more = blocks > 0 && index_ / blocks < work_.readers();
        unit.reader = more ? index_ / blocks : -1;
        if (more) unit.block = (work_.sparse ? call.sparse_table : call.dense_table)[index_ % blocks];
        break;
      }
      case 2:
        unit.count = unit.reader < 0 || unit.block.set < 0
                         ? 0
                         : max(0, min(call.params.counts[work_.list_of(unit.block.set, unit.reader)],
                                      call.params.capacity));
        break;
      case 3:
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
    while (part_ < 4) advance();
    part_ = 0;
  }

 private:
  const AttendWork& work_;
  Queue& queue_;
  Ring<Queue::kEntries> ring_;
  int part_ = 0;
  int32_t index_ = 0;
};

/// Loads what the units of a launch need, until there are no more.
template <class T, int D, bool kListed, class Memory>
__device__ void attend_load(const PrefillCall& call, Memory& memory, bool sparse) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const AttendWork work{call, sparse};
  const bool draws = warp == kLoadWarps - 1 && lane == 0;
  UnitDrawer drawer(work, memory.queue);
  UnitReader reader(memory.queue);
  if (draws) drawer.finish();
  __syncwarp();
  BlockLoader<T, D, Memory::kKeys, kListed> loader(call, warp, lane);
  Ring<Memory::kTiles> ring;
  Ring<Memory::kQueries> q_ring;
  const Addresses at(memory);
  // Of computers that chain units, the first P V and the last Q K^T read tiles without contents.
  const bool pads = Memory::kValues && !kListed, leads = warp == 0 && lane == 0;
  if (pads) {
    if (leads) arrive(at.full(ring.stage), kFullArrivals);
    ring.next();
  }
  while (true) {
    const int index = reader.wait();
    const AttendUnit& unit = memory.queue.units[index];
    if (unit.reader < 0) break;
    const int32_t blocks = unit_blocks<Memory::kKeys>(unit, work.heads());
    KeyList keys;
    if (unit.count > 0)
      keys.list = call.params.positions + work.list_of(unit.block.set, unit.reader) * call.params.capacity;
    keys.count = unit.count;
    keys.own_begin = unit.block.own_begin;
    keys.entries = unit.count + unit.block.keys - unit.block.own_begin;
    keys.batch = unit.block.batch;
    keys.kv_head = work.kv_head(unit.reader);
    const auto load_queries = [&] {
      wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < Memory::kQueryTiles; ++i)
        copy_queries<T, D>(call, at.q(q_ring.stage, i), unit.block.row, unit.block.first + i * kBlockRows,
                           unit.block.rows - i * kBlockRows, unit.reader * work.heads(), work.heads(), warp,
                           lane);
      arrive_after_copies(at.q_full(q_ring.stage));
      q_ring.next();
    };
    if (blocks > 0) {
      loader.begin(keys, blocks - 1);
      if (Memory::kQueries > 1) load_queries();
    }
#pragma unroll 1
    for (int32_t block = blocks - 1; block >= 0; --block) {
      loader.look_ahead(block);
      if (loader.takes_part(block)) {
        wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
        loader.copy_keys(block, at.tile(ring.stage), at.full(ring.stage), memory.exists[ring.stage]);
      }
      ring.next();
      // With room for one unit's queries only, keys come first: they need not wait for the unit before.
      if (Memory::kQueries == 1 && block == blocks - 1) load_queries();
      if constexpr (Memory::kValues) {
        if (loader.takes_part(block)) {
          wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
          loader.copy_values(block, at.tile(ring.stage), at.full(ring.stage));
        }
        ring.next();
      }
      loader.next();
      if (draws) drawer.advance();
      __syncwarp();
    }
    reader.release(index);
    if (draws) drawer.finish();
    __syncwarp();
  }
  if (!pads || !leads) return;
  wait_barrier(at.empty(ring.stage), ring.parity ^ 1);
  arrive(at.full(ring.stage), kFullArrivals);
  wait_barrier(at.q_empty(q_ring.stage), q_ring.parity ^ 1);
  arrive(at.q_full(q_ring.stage), kLoadWarps * 32);
}

/// x, which is the same in all lanes, so that what is computed from it goes to uniform registers.
__device__ inline uint32_t uniform(uint32_t x) { return __reduce_max_sync(kFullWarp, x); }

/// x, which is false so often that what follows belongs out of the way.
__device__ inline bool rarely(bool x) { return __builtin_expect(static_cast<long>(x), 0L) != 0; }

/// Keeps the computation of x before what follows: the assembler would move it behind a wait for products
/// that it does not depend on, but not an instruction that may be executed or not by its outcome.
__device__ inline void finish_before_wait(float x) {
  asm volatile("{\n.reg .pred huge;\nsetp.gt.f32 huge, %0, 0f7E967699;\n@huge nanosleep.u32 0;\n}\n" ::"f"(x)
               : "memory");
}

/// Transposes 4 x 4 words over the four lanes of a quad.
__device__ inline void transpose_quad(uint32_t (&r)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? r[i] : r[i + 1], 1);
    (odd ? r[i] : r[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, high ? r[i] : r[i + 2], 2);
    (high ? r[i] : r[i + 2]) = got;
  }
}

template <class T, int D, bool kListed>
class AttendComputer {
  using Shape = AttendShape<D>;
  using Memory = AttendMemory<D>;
  static constexpr int kKeys = Shape::kKeys, kTiles = Shape::kTiles;
  static constexpr int kScores = kKeys / 2;  // of a thread in a step

 public:
  __device__ AttendComputer(const PrefillCall& call, Memory& memory, bool sparse)
      : call_(call),
        memory_(memory),
        at_(memory),
        work_{call, sparse},
        heads_(work_.heads()),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    if (kListed) {
      v_ring_.stage = 1;
    } else {
      k_ring_.stage = 1;
    }
  }

  __device__ void run() {
    UnitReader reader(memory_.queue);
    int stored = -1;  // the unit whose last P V is not issued yet
    if (group_ == 1) named_arrive(kTurn, 256);
    while (true) {
      const int index = reader.wait();
      const AttendUnit& unit = memory_.queue.units[index];
      const bool done = unit.reader < 0;
      if (done && (kListed || stored < 0)) break;
      const int32_t blocks = done ? 1 : unit_blocks<kKeys>(unit, heads_);
      if (blocks == 0) {
        store_nothing(unit);
        reader.release(index);
        continue;
      }
      begin(unit);
      wait_barrier(at_.q_full(q_ring_.stage), q_ring_.parity);
      const uint32_t q = uniform(at_.q(q_ring_.stage) + group_ * 64 * 128);
#pragma unroll 1
      for (int32_t block = blocks - 1; block >= 0; --block) {
        const bool first = block == blocks - 1;
        // The first step of a unit that is finished by itself multiplies K for V, which nobody looks at.
        const bool values = !kListed || !first;
        const int v_stage = values ? v_ring_.stage : k_ring_.stage;
        const uint32_t v_parity = values ? v_ring_.parity : k_ring_.parity;
        // Addresses are at hand when the turn comes.
        const uint32_t k = uniform(at_.tile(k_ring_.stage)), v = uniform(at_.tile(v_stage));
        wait_barriers(at_.full(v_stage), v_parity, at_.full(k_ring_.stage), k_ring_.parity);
        // Tiles that threads have copied: the queries, and all keys of lists and of blocks that are not
        // whole.
        if (kListed || first || block + 1 >= boxed_) fence_async_proxy();
        named_sync(kTurn + group_, 256);
        issue_scores(q, k);
        issue_values(v);
        named_arrive(kTurn + 1 - group_, 256);
        wait_products<1>();
        pin(scores_);
        prepare(block);
        // What the product of values overlaps with; the assembler would move it behind the wait if nothing
        // that follows were executed or not by its outcome.
        exponentiate<0, kScores / 2>();
        finish_before_wait(added_[0] + added_[1]);
        wait_products<0>();
        pin(out_);
        exponentiate<kScores / 2, kScores>();
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i)
          weights_[i / 4][i % 4] = pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
        const bool high = __any_sync(kFullWarp, !(added_[0] <= kMostSum) || !(added_[1] <= kMostSum));
        if (rarely(first || high)) {
          if (!kListed && first && stored >= 0) {
            store(memory_.queue.units[stored]);
            reader.release(stored);
            if (Memory::kQueries > 1) release(at_.q_empty(q_ring_.stage ^ 1));
          }
          if (!first) move_references(block);
        }
        if (Memory::kQueries == 1 && block == 0) release(at_.q_empty(q_ring_.stage));
        sum_[0] += added_[0];
        sum_[1] += added_[1];
        started_ = first ? 0 : 1;
        release_tiles(values);
      }
      if (done) break;
      if (kListed) {
        finish(unit);
        reader.release(index);
        if (Memory::kQueries > 1) release(at_.q_empty(q_ring_.stage));
      } else {
        stored = index;
      }
      q_ring_.next();
    }
  }

 private:
  static constexpr int kTurn = 1;  // named barriers kTurn + group

  __device__ void begin(const AttendUnit& unit) {
    listed_ = unit.count > 0;
    unset_ = true;
    boxed_ = unit.block.keys / kKeys;
    keep_sums();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit_[half] = row_limit(unit, unit.block.first + row_of(half), heads_);
      reference_[half] = -FLT_MAX;
      sum_[half] = 0;
    }
    unmasked_ = max(row_limit(unit, unit.block.first + group_ * 64 + warp_ * 16, heads_), 0) / kKeys;
  }

  // Row of the block of the thread's first (half 0) or second row of sums.
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ void release(uint32_t empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }
  /// The tiles of K and V that a step has read.
  __device__ void release_tiles(bool values) {
    __syncwarp();
    if (lane_ < (values ? 2 : 1)) arrive(at_.empty(lane_ == 0 ? k_ring_.stage : v_ring_.stage));
    k_ring_.next();
    if (values) v_ring_.next();
  }

  /// The last P V of a unit that is finished by itself, and its output.
  __device__ void finish(const AttendUnit& unit) {
    const uint32_t v = uniform(at_.tile(v_ring_.stage));
    wait_barrier(at_.full(v_ring_.stage), v_ring_.parity);
    fence_async_proxy();
    issue_values(v);
    wait_products<0>();
    pin(out_);
    release(at_.empty(v_ring_.stage));
    v_ring_.next();
    keep_sums();
    store(unit);
  }
  /// Sums and references for store(), after which the next unit may begin.
  __device__ void keep_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      last_reference_[half] = reference_[half];
      last_sum_[half] = sum_[half];
    }
  }

  __device__ void issue_scores(uint32_t q_address, uint32_t k_address) {
    const uint64_t q = matrix_descriptor(q_address, 0), k = matrix_descriptor(k_address, 0);
    begin_products();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kKeys>::shared(scores_, advance(q, step / 4 * kBlockRows * 128 + step % 4 * 32),
                                advance(k, step / 4 * kKeys * 128 + step % 4 * 32), step > 0);
    commit_products();
  }
  __device__ void issue_values(uint32_t v_address) {
    const uint64_t v = matrix_descriptor(v_address, kKeys * 128);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      Product<T, D>::template registers<1>(out_, weights_[step], advance(v, step * 16 * 128),
                                           step > 0 ? 1 : started_);
    commit_products();
  }

  /// Which keys of the block exist: a bit for each.
  __device__ void load_exists(uint32_t (&exists)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) exists[i] = kFullWarp;
    if (!kListed || !listed_) return;
    const uint4 words = *reinterpret_cast<const uint4*>(memory_.exists[k_ring_.stage]);
    exists[0] = words.x;
    exists[1] = words.y;
    if (kKeys == 128) {
      exists[2] = words.z;
      exists[3] = words.w;
    }
  }

  /// Masks scores where that is needed, and gives rows a reference that have none.
  __device__ void prepare(int32_t block) {
    bool whole = block < unmasked_;
    if (kListed) {
      uint32_t exists[4];
      load_exists(exists);
      whole = whole && (exists[0] & exists[1] & exists[2] & exists[3]) == kFullWarp;
    }
    if (rarely(!whole || unset_)) {
      mask(block);
      set_references();
    }
    added_[0] = added_[1] = 0;
    offset_[0] = -reference_[0];
    offset_[1] = -reference_[1];
  }

  /// Scores [begin, end) become 2^(score - reference) and are added up.
  template <int begin, int end>
  __device__ void exponentiate() {
    const float scale = call_.scale_log2;
    float sums[2][2] = {{added_[0], 0}, {added_[1], 0}};
    // The special function unit takes an exponential of a warp every eighth cycle; what else is to be done
    // belongs between them. The assembler would multiply all scores first, so each few wait for an
    // exponential of those two before: the offset plus 0 times it.
    constexpr int kAtOnce = 8;
#pragma unroll
    for (int from = begin; from < end; from += kAtOnce) {
      if (from >= 2 * kAtOnce) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          offset_[half] = fmaf(scores_[from - kAtOnce - 4 + 2 * half], 0.0f, offset_[half]);
      }
#pragma unroll
      for (int i = from; i < from + kAtOnce; ++i)
        scores_[i] = exp2_fast(fmaf(scores_[i], scale, offset_[i >> 1 & 1]));
#pragma unroll
      for (int i = from; i < from + kAtOnce; ++i) sums[i >> 1 & 1][i & 1] += scores_[i];
    }
    added_[0] = sums[0][0] + sums[0][1];
    added_[1] = sums[1][0] + sums[1][1];
  }

  /// Scores that a row does not see become minus infinity.
  __device__ void mask(int32_t block) {
    uint32_t exists[4];
    load_exists(exists);
    const int first = 2 * (lane_ & 3);
    const int32_t limits[2] = {limit_[0] - block * kKeys - first, limit_[1] - block * kKeys - first};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const uint32_t bits = exists[j / 4] >> (j % 4 * 8) >> first;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if ((kListed && (bits >> (e & 1) & 1u) == 0) || 8 * j + (e & 1) >= limits[e >> 1])
          scores_[4 * j + e] = -INFINITY;
    }
  }

  /// A row's largest score, in log2 units.
  __device__ float largest(int half) const {
    float tops[2] = {scores_[2 * half], scores_[2 * half + 1]};
#pragma unroll
    for (int j = 1; j < kKeys / 8; ++j) {
      tops[0] = fmaxf(tops[0], scores_[4 * j + 2 * half]);
      tops[1] = fmaxf(tops[1], scores_[4 * j + 2 * half + 1]);
    }
    float top = fmaxf(tops[0], tops[1]);
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
    return fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)) * call_.scale_log2;
  }

  /// Of rows that have none, which have seen no key before.
  __device__ void set_references() {
    if (!unset_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = largest(half);
      if (reference_[half] == -FLT_MAX && top != -INFINITY) reference_[half] = top;
    }
    unset_ = __any_sync(kFullWarp, reference_[0] == -FLT_MAX || reference_[1] == -FLT_MAX);
  }

  /// Rare: a row's exponentials of a block add up to too much. All products are done; the scores are made
  /// again, by this warp alone, and the reference of such a row moves to the largest of them. Other rows stay
  /// as they are.
  __device__ void move_references(int32_t block) {
    bool own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int high = !(added_[half] <= kMostSum) ? 1 : 0;
      high |= __shfl_xor_sync(kFullWarp, high, 1);
      high |= __shfl_xor_sync(kFullWarp, high, 2);
      own[half] = high != 0;
    }
    const uint32_t q = at_.q(q_ring_.stage), k = at_.tile(k_ring_.stage);
    const int q_row = group_ * 64 + warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
      float c[2][4] = {};
      int k_row = pair * 16 + lane_ / 16 * 8 + lane_ % 8;
      asm volatile("" : "+r"(k_row));  // or addresses of all pairs would be computed beforehand
#pragma unroll 1
      for (int step = 0; step < D / 16; ++step) {
        uint32_t a[4], b[4];
        load_matrices(a, piece_address<kBlockRows>(q, q_row, 2 * step + lane_ / 16));
        load_matrices(b, piece_address<kKeys>(k, k_row, 2 * step + lane_ / 8 % 2));
        multiply_add<T>(c[0], a, b[0], b[1]);
        multiply_add<T>(c[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) scores_[8 * pair + i] = c[i / 4][i % 4];
    }
    mask(block);
    float factor[2] = {1, 1};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float top = largest(half);
      if (!own[half] || top == -INFINITY) continue;
      factor[half] = exp2_fast(reference_[half] - top);
      reference_[half] = top;
      float sum = 0;
#pragma unroll
      for (int i = half; i < kScores / 2; i += 2) {
        const float low = exp2_fast(fmaf(scores_[2 * i], call_.scale_log2, -top));
        const float high = exp2_fast(fmaf(scores_[2 * i + 1], call_.scale_log2, -top));
        sum += low + high;
        weights_[i / 4][i % 4] = pack_pair<T>(low, high);
      }
      sum_[half] *= factor[half];
      added_[half] = sum;
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out_[i] *= factor[i / 2 % 2];
  }

  /// Output and log-sum-exps of a unit whose sums are complete.
  __device__ void store(const AttendUnit& unit) {
    const AttentionParams& p = call_.params;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = last_sum_[half];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      const float factor = total == 0 ? 0 : p.v_scale / total;
      const int i = row_of(half);
      const bool exists = i < unit.block.rows;
      const int64_t to = store_lse(unit, i, total == 0 ? -INFINITY : last_reference_[half] + log2f(total));
      if (p.out_dtype == DType::kF32) {
        float* out = static_cast<float*>(p.out) + to + 2 * (lane_ & 3);
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
          if (exists) *reinterpret_cast<float2*>(out + 8 * j) = scaled(4 * j + 2 * half, factor);
        continue;
      }
      const bool bf16 = p.out_dtype == DType::kBF16;
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i4 = 0; i4 < 4; ++i4) {
          const float2 pair = scaled(4 * (j + i4) + 2 * half, factor);
          words[i4] = bf16 ? pack_pair<__nv_bfloat16>(pair.x, pair.y) : pack_pair<__half>(pair.x, pair.y);
        }
        transpose_quad(words);
        if (exists)
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + to + (j + (lane_ & 3)) * 8) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  /// Row i's log-sum-exp, in log2 units; returns where its output begins.
  __device__ int64_t store_lse(const AttendUnit& unit, int i, float lse) {
    const AttentionParams& p = call_.params;
    const int n = unit.block.first + i;
    const int64_t row = unit.block.row + n / heads_, head = unit.reader * heads_ + n % heads_;
    if (i < unit.block.rows && (lane_ & 3) == 0) {
      if (p.lse != nullptr) p.lse[row * p.lse_row_stride + head] = lse * kLn2;
      if (p.role == Role::kLayer0) call_.lse[row * p.query_heads + head] = lse;
    }
    return row * p.out_row_stride + head * p.out_head_stride;
  }
  __device__ float2 scaled(int i, float factor) const {
    // Rows that see no key may hold what is not a number times zero.
    return factor == 0 ? make_float2(0, 0) : make_float2(out_[i] * factor, out_[i + 1] * factor);
  }

  /// Zeros for a unit whose rows see no keys.
  __device__ void store_nothing(const AttendUnit& unit) {
    const AttentionParams& p = call_.params;
    const int bytes = p.out_dtype == DType::kF32 ? 4 : 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int i = row_of(half);
      const int64_t to = store_lse(unit, i, -INFINITY);
      if (i >= unit.block.rows) continue;
      uint4* out = reinterpret_cast<uint4*>(static_cast<unsigned char*>(p.out) + to * bytes);
#pragma unroll 1
      for (int j = lane_ & 3; j < D * bytes / 16; j += 4) out[j] = make_uint4(0, 0, 0, 0);
    }
  }

  const PrefillCall& call_;
  Memory& memory_;
  const Addresses<Memory> at_;
  const AttendWork work_;
  const int heads_, group_, warp_, lane_;
  Ring<kTiles, 2> k_ring_, v_ring_;
  Ring<Memory::kQueries> q_ring_;
  bool listed_ = false;   // the unit's list has members
  bool unset_ = false;    // rows of the warp have no reference yet
  int32_t boxed_ = 0;     // blocks before this one come by the copy engine
  int32_t unmasked_ = 0;  // blocks before this one are seen whole by every row of the warp
  int started_ = 0;       // whether out_ holds sums of the unit that is multiplied
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {};
  float last_reference_[2] = {}, last_sum_[2] = {};  // of the unit to be stored
  float added_[2] = {}, offset_[2] = {};  // of the step in work: its sums, what scores are offset by
  float scores_[kScores];
  uint32_t weights_[kKeys / 16][4] = {};
  float out_[D / 2];
};

template <class T, int D, bool kListed>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_attend_kernel(const __grid_constant__ PrefillCall call, bool sparse) {
  extern __shared__ __align__(1024) unsigned char shared[];
  AttendMemory<D>& memory = *reinterpret_cast<AttendMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    memory.queue.init(kComputeWarps);
    for (int i = 0; i < AttendMemory<D>::kTiles; ++i) {
      init_barrier(memory.full[i], kFullArrivals);
      init_barrier(memory.empty[i], kComputeWarps);
    }
    for (int i = 0; i < AttendMemory<D>::kQueries; ++i) {
      init_barrier(memory.q_full[i], kLoadWarps * 32);
      init_barrier(memory.q_empty[i], kComputeWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<AttendRegisters<kListed>::kLoad>();
    attend_load<T, D, kListed>(call, memory, sparse);
  } else {
    take_registers<AttendRegisters<kListed>::kCompute>();
    AttendComputer<T, D, kListed>(call, memory, sparse).run();
  }
}

template <class T, int D>
void launch_prefill_attend(const PrefillCall& call, bool sparse, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = kPrefillThreads;
  shape.shared_bytes = sizeof(AttendMemory<D>);
  if (sparse || call.map_rows == 0) {
    launch(sparse ? "prefill_sparse" : "prefill_dense", prefill_attend_kernel<T, D, true>, shape, stream,
           call, sparse);
  } else {
    launch("prefill_dense", prefill_attend_kernel<T, D, false>, shape, stream, call, sparse);
  }
}

}  // namespace kascade::cuda
