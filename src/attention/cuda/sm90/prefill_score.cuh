// SPDX-License-Identifier: Apache-2.0
// What the two passes over all keys that read K alone share, and the one that makes the log-sum-exp of every
// query row; prefill_pool.cuh is the other. A tile of K meets two tiles of queries, so that it is fetched
// half as often; each computing warpgroup has a product of scores being multiplied while another is
// exponentiated.
#pragma once

#include <cstddef>

#include "attention/cuda/sm90/prefill_attend.cuh"

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

/// slices: parts of the queries, each freed by the computing warps that read it and filled by one loading
/// warp.
template <int D, class UnitType, int slices>
struct ScoreMemory {
  using Shape = ScoreShape<D>;
  using Unit = UnitType;
  static constexpr int kSlices = slices;
  alignas(1024) unsigned char q[Shape::kParts][kBlockRows * D * 2];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kKeys * D * 2];
  UnitQueue<Unit> queue;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t q_full[slices], q_empty[slices];

  __device__ void init() {
    queue.init(4 * Shape::kGroups, 32);
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(k_full[i], kFullArrivals);
      init_barrier(k_empty[i], 4 * Shape::kGroups);
    }
    for (int i = 0; i < slices; ++i) {
      init_barrier(q_full[i], 32);
      init_barrier(q_empty[i], 4 * Shape::kGroups / slices);
    }
    fence_barriers();
  }
};

// The next unit is drawn when this many blocks of keys of one are still to be loaded: soon enough to be known
// in time, and as late as that, or units would wait for those that are not done with theirs.
constexpr int32_t kBlocksLeft = 4;

// Copies of a loading warp that are made ready together, as its few registers allow.
constexpr int kScoreBatch = 4;

/// The lane, for what is rarely done: else addresses for it would be kept in registers all the time.
__device__ inline int kept_lane(int lane) { return static_cast<int>(kept(static_cast<uint32_t>(lane))); }

/// Fetches blocks of kKeys keys of a sequence from last to first, in boxes that are dealt out to the loading
/// warps; piecewise where boxes cannot be used, and a last block that is not whole, with zeros after it.
template <class T, int D, int kKeys>
class KeyLoader {
  static constexpr int kRows = kKeys / kLoadWarps;
  static constexpr int kFirst = 2;  // boxes of a warp whose pages are at hand when their tile is free

 public:
  __device__ KeyLoader(const PrefillCall& call, int warp, int lane) : call_(call), warp_(warp), lane_(lane) {
    if (call.box_rows == 0) return;
    const int boxes = kKeys / call.box_rows;
    issuers_ = min(boxes, kLoadWarps);
    own_boxes_ = warp < issuers_ ? boxes / issuers_ : 0;
  }

  /// Starts on blocks block, block - 1, ... of a sequence of so many keys.
  __device__ void begin(int32_t keys, int32_t batch, int32_t kv_head, int32_t block) {
    keys_ = keys;
    batch_ = batch;
    kv_head_ = kv_head;
    first_token_ = call_.params.page_table == nullptr ? __ldg(call_.params.cu_seqlens_kv + batch) : 0;
    take(load_page(block));
  }

  /// Looks pages of the next block up while this one is copied; once a block, before copy.
  __device__ void look_ahead(int32_t block) { next_page_ = load_page(block - 1); }

  __device__ void copy(int32_t block, uint32_t tile, uint32_t full) const {
    if (is_boxed(block)) return copy_boxes(block, tile, full);
    const int lane = kept_lane(lane_);
    const int32_t key = block * kKeys + warp_ * kRows + lane;
    const bool exists = key < keys_;
    const uint32_t offset =
        exists ? page_ * call_.k_page_units + static_cast<uint32_t>(token_of(key)) * call_.k_token_units : 0;
    copy_rows<kKeys, D, kScoreBatch>(
        tile, static_cast<const T*>(call_.params.k) + kv_head_ * call_.params.k_head_stride, offset,
        call_.kv_unit, exists, warp_, lane);
    arrive_after_copies(full);
    if (lane == 0) arrive(full);
  }

  /// On to the block before.
  __device__ void next() { take(next_page_); }

 private:
  static_assert(kRows == 32, "a lane looks up one key");

  __device__ bool is_boxed(int32_t block) const {
    return call_.box_rows != 0 && (block + 1) * kKeys <= keys_;
  }
  __device__ int32_t page_of(int32_t key) const {
    return call_.page_shift >= 0 ? key >> call_.page_shift : key / call_.params.page_size;
  }
  /// Where a key lies in its page, or among all keys that are packed.
  __device__ int32_t token_of(int32_t key) const {
    return call_.params.page_table == nullptr ? first_token_ + key
                                              : key - page_of(key) * call_.params.page_size;
  }
  // A tile's boxes are dealt out to the warps in turn; first key of a warp's i-th:
  __device__ int32_t box_key(int32_t block, int i) const {
    return block * kKeys + (warp_ + i * issuers_) * call_.box_rows;
  }
  /// Page of this lane's box or key of a block.
  __device__ uint32_t load_page(int32_t block) const {
    const AttentionParams& p = call_.params;
    if (p.page_table == nullptr) return 0;
    const bool boxed = is_boxed(block);
    const int32_t key = boxed ? box_key(block, lane_) : block * kKeys + warp_ * kRows + lane_;
    const bool wanted = block >= 0 && key < keys_ && (!boxed || lane_ < own_boxes_);
    return static_cast<uint32_t>(
        load_if(wanted, p.page_table + batch_ * p.page_table_stride + page_of(max(key, 0)), 0));
  }
  __device__ void take(uint32_t page) {
    page_ = page;
#pragma unroll
    for (int i = 0; i < kFirst; ++i) first_pages_[i] = __shfl_sync(kFullWarp, page, i);
  }
  __device__ void copy_boxes(int32_t block, uint32_t tile, uint32_t full) const {
    const int32_t rows = call_.box_rows;
    if (lane_ == 0) {
      if (own_boxes_ > 0) expect_bytes(full, static_cast<uint32_t>(own_boxes_ * rows * D * 2));
      arrive(full, kFullArrivals / kLoadWarps);
    }
    const auto copy = [&](int i, uint32_t page) {
      const int32_t key = box_key(block, i);
      copy_box_by_one(tile + static_cast<uint32_t>((key - block * kKeys) * D * 2), &call_.k_boxes.map, full,
                      0, token_of(key), kv_head_ * call_.k_boxes.head_panels, 0, static_cast<int32_t>(page));
    };
#pragma unroll
    for (int i = 0; i < kFirst; ++i)
      if (i < own_boxes_) copy(i, first_pages_[i]);
#pragma unroll 1
    for (int i = kFirst; i < own_boxes_; ++i) copy(i, __shfl_sync(kFullWarp, page_, i));
  }

  const PrefillCall& call_;
  const int warp_, lane_;
  int issuers_ = 1, own_boxes_ = 0;  // warps that share a tile's boxes, and how many each copies
  int32_t keys_ = 0, batch_ = 0, kv_head_ = 0, first_token_ = 0;
  uint32_t page_ = 0, next_page_ = 0;  // of this lane's box or key of the block, and of the one before
  uint32_t first_pages_[kFirst];       // of the warp's first boxes of the block
};

/// The slice of the queries that a loading warp fills, if there are as many: not by those with K's boxes, if
/// these are few. No other warp waits for it to be free, or one that is late could take a phase of its
/// barrier for another.
__device__ inline int own_slice(int warp) { return (warp + 2) % kLoadWarps; }

/// A loading warp by itself copies rows to a slice of queries, as copy_queries of all four.
template <int D, int batch, int slice_rows>
__device__ void copy_slice(const PrefillCall& call, uint32_t slice, int32_t row, int32_t first, int32_t rows,
                           int32_t head_begin, int32_t heads, int lane) {
#pragma unroll 1
  for (int i = 0; i < kLoadWarps; ++i)
    copy_queries<D, batch, slice_rows>(call, slice, row, first, rows, head_begin, heads, i, lane);
}

/// How many of so many heads' units come in turn: the more of them there are, the more even is the end, but
/// keys of these heads should stay in the cache.
__device__ inline int32_t heads_in_turn(int32_t heads, int64_t keys) {
  int32_t at_once = 1;
  while (2 * at_once <= heads && heads % (2 * at_once) == 0 && 2 * at_once * keys <= kCachedKeys)
    at_once *= 2;
  return at_once;
}
/// Index of the unit that comes index-th then, where units are counted head after head, `units` each.
__device__ inline int32_t in_turn(int32_t index, int32_t at_once, int32_t units) {
  const int32_t x = index / at_once;
  return (x / max(units, 1) * at_once + index % at_once) * units + x % max(units, 1);
}

/// x, which is not negative and the same in all lanes, as what the compiler knows to be so: branches by it do
/// not part the warp then. After one that may, it would use no uniform register in the loop around it.
__device__ inline int32_t same_in_all(int32_t x) {
  return static_cast<int32_t>(in_uniform_register(static_cast<uint32_t>(x)));
}
/// The next number of a counter, in all lanes of a warp.
__device__ inline int32_t draw_number(int32_t* counter, int lane) {
  return same_in_all(lane == 0 ? atomicAdd(counter, 1) : 0);
}

/// What both computers share: the ring of K and the order of products.
template <class Self, class Memory>
class ScoreComputer {
 protected:
  static constexpr int kParts = Memory::Shape::kParts;

  __device__ explicit ScoreComputer(const PrefillCall& call, Memory& memory)
      : call_(call),
        memory_(memory),
        base_(kept(shared_address(&memory))),
        group_(static_cast<int>(in_uniform_register(threadIdx.x / 128)) - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void release(uint64_t& empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }
  /// Waits until a slice of the queries is filled; boxed: by a box.
  __device__ void wait_queries(int slice, bool boxed) {
    wait_barrier(base_ + at(offsetof(Memory, q_full)) + at(8 * slice), q_parity_);
    q_parity_ ^= 1;
    if (!boxed) fence_async_proxy();
  }

  /// Self::add for blocks last, last - 1, ..., first: one warpgroup multiplies while others exponentiate. The
  /// slice of queries is free when the last product is done.
  /// queries, keys: where the warpgroup's rows begin in shared memory, and in a tile of K.
  __device__ void run_blocks(int slice, uint32_t queries, uint32_t keys, int32_t last, int32_t first) {
    const uint32_t q_empty = base_ + at(offsetof(Memory, q_empty)) + at(8 * slice);
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
      if (lane_ == 0) {
        arrive(empty);
        if (block == first) arrive(q_empty);
      }
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
  uint32_t q_parity_ = 0;
  float scores_[64];
};

/// A warpgroup's rows are a slice of the queries.
template <int D>
using LseMemory = ScoreMemory<D, AttendUnit, ScoreShape<D>::kGroups>;

/// Whether a box brings a warpgroup's queries, of which there are so many rows; else threads copy them.
__device__ inline bool boxes_group(const PrefillCall& call, int32_t rows) {
  return call.q_group_boxes.usable && rows >= kGroupRows;
}

/// The next unit, for all lanes of a warp.
__device__ inline AttendUnit draw_lse_unit(const PrefillCall& call, int32_t heads, int lane) {
  const int32_t blocks = same_in_all(call.totals->dense_blocks);
  const int32_t index =
      in_turn(draw_number(call.counters, lane), heads_in_turn(heads, call.maxima.kv_len), blocks);
  AttendUnit unit = {};
  unit.reader = -1;
  if (blocks == 0 || index / blocks >= heads) return unit;
  unit.reader = index / blocks;
  unit.block = call.dense_table[index % blocks];
  return unit;
}

template <class T, int D>
__device__ void lse_load(const PrefillCall& call, LseMemory<D>& memory) {
  using Memory = LseMemory<D>;
  using Shape = typename Memory::Shape;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kBatch = D == 64 ? 4 : kRowBatch<D>;
  constexpr uint32_t kSliceBytes = kGroupRows * D * 2;
  const int warp = static_cast<int>(in_uniform_register(threadIdx.x / 32)),
            lane = static_cast<int>(threadIdx.x) % 32;
  const AttendWork work{call, false};
  UnitWriter<AttendUnit> writer(memory.queue);
  UnitReader<AttendUnit> reader(memory.queue);
  const auto draw = [&] {
    writer.put_by(warp == kLoadWarps - 1, [&] { return draw_lse_unit(call, work.readers(), lane); });
  };
  draw();
  KeyLoader<T, D, kKeys> loader(call, warp, lane);
  Ring<Shape::kStages> ring;
  uint32_t q_parity = 1;
  while (true) {
    const AttendUnit unit = reader.next();
    if (unit.reader < 0) break;
    const int32_t last = unit_blocks<kKeys>(unit, work.heads()) - 1;
    if (last < 0) {
      draw();
      continue;
    }
    loader.begin(unit.block.keys, unit.block.batch, unit.reader, last);
#pragma unroll 1
    for (int32_t block = last; block >= 0; --block) {
      loader.look_ahead(block);
      wait_barrier(memory.k_empty[ring.stage], ring.parity ^ 1);
      loader.copy(block, shared_address(memory.k[ring.stage]), shared_address(&memory.k_full[ring.stage]));
      loader.next();
      ring.next();
      // By then the slowest warpgroup is at the last block of the unit before.
      if (block == max(last - (Shape::kStages - 2), 0)) {
        if (const int own = own_slice(warp); own < Memory::kSlices) {
          const int32_t begin = unit.block.first + own * kGroupRows,
                        rows = unit.block.rows - own * kGroupRows;
          const uint32_t slice = shared_address(memory.q[0]) + static_cast<uint32_t>(own) * kSliceBytes;
          const uint32_t full = shared_address(&memory.q_full[own]);
          wait_barrier(memory.q_empty[own], q_parity);
          if (boxes_group(call, rows)) {
            if (lane == 0) expect_bytes(full, kSliceBytes);
            copy_box_by_one(slice, &call.q_group_boxes.map, full, 0, unit.reader * work.heads(),
                            unit.block.row + begin / work.heads(), 0, 0);
          } else {
            copy_slice<D, kBatch, kGroupRows>(call, slice, unit.block.row, begin, rows,
                                              unit.reader * work.heads(), work.heads(), kept_lane(lane));
          }
          arrive_after_copies(full);
        }
        q_parity ^= 1;
      }
      if (block == min(kBlocksLeft, last)) draw();
    }
  }
}

template <class T, int D>
class LseComputer : public ScoreComputer<LseComputer<T, D>, LseMemory<D>> {
  using Memory = LseMemory<D>;
  using Base = ScoreComputer<LseComputer<T, D>, Memory>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::lane_;
  using Base::memory_;
  using Base::warp_;
  static constexpr int kKeys = Memory::Shape::kKeys;

 public:
  __device__ LseComputer(const PrefillCall& call, Memory& memory)
      : Base(call, memory), heads_(call.params.query_heads / call.params.kv_heads), division_(heads_) {}

  __device__ void run() {
    UnitReader<AttendUnit> reader(memory_.queue);
    AttendUnit unit = reader.next();
    while (unit.reader >= 0) {
      const int32_t first_token = unit.block.first / heads_;
      first_head_ = unit.block.first - first_token * heads_;
      const int32_t limit = unit.block.position + first_token + 1;
      const int32_t blocks =
          unit.block.rows <= 0 ? 0 : divide_up(max(limit + tokens_to(unit.block.rows - 1), 0), kKeys);
      this->boxed_ = call_.box_rows == 0 ? 0 : unit.block.keys / kKeys;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        limit_[half] = limit + tokens_to(row_of(half));
        reference_[half] = -FLT_MAX;
        sum_[half] = 0;
      }
      unmasked_ = max(limit + tokens_to(group_ * 64 + warp_ * 16), 0) / kKeys;
      if (blocks > 0) {
        this->wait_queries(group_, boxes_group(call_, unit.block.rows - group_ * kGroupRows));
        this->run_blocks(group_,
                         this->query_tile(group_ / 2) + static_cast<uint32_t>(group_ % 2 * 64 * D * 2), 0,
                         blocks - 1, 0);
      }
      // What the next unit takes arrives meanwhile.
      const AttendUnit next = reader.next();
      store(unit, first_token);
      unit = next;
    }
  }

 private:
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }
  /// Tokens from the first row of the unit to its row i.
  __device__ int32_t tokens_to(int i) const { return division_.token_of(first_head_ + i); }

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

  /// first_token: of the unit's first row.
  __device__ void store(const AttendUnit& unit, int32_t first_token) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum_[half];
      total += __shfl_xor_sync(kFullWarp, total, 1);
      total += __shfl_xor_sync(kFullWarp, total, 2);
      const int i = row_of(half);
      if (i >= unit.block.rows || (lane_ & 3) != 0) continue;
      const int32_t tokens = tokens_to(i);
      const int64_t row = unit.block.row + first_token + tokens,
                    head = unit.reader * heads_ + first_head_ + i - tokens * heads_;
      call_.lse[row * call_.params.query_heads + head] =
          total == 0 ? -INFINITY : reference_[half] + log2f(total);
    }
  }

  const int32_t heads_;
  const HeadDivision division_;
  int32_t first_head_ = 0;  // of the unit's first row, among those of a KV head
  int32_t unmasked_ = 0;    // blocks before this one are seen whole by every row of the warp
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {};
};

template <class T, int D>
__global__ void __launch_bounds__(ScoreShape<D>::kThreads, 1)
    prefill_lse_kernel(const __grid_constant__ PrefillCall call) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& memory = *reinterpret_cast<LseMemory<D>*>(shared);
  if (threadIdx.x == 0) memory.init();
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<ScoreShape<D>::kLseLoadRegisters>();
    lse_load<T, D>(call, memory);
  } else {
    take_registers<ScoreShape<D>::kLseComputeRegisters>();
    LseComputer<T, D>(call, memory).run();
  }
}

template <class T, int D>
void launch_prefill_lse(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = ScoreShape<D>::kThreads;
  shape.shared_bytes = sizeof(LseMemory<D>);
  launch("prefill_lse", prefill_lse_kernel<T, D>, shape, stream, call);
}

}  // namespace kascade::cuda
