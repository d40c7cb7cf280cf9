// SPDX-License-Identifier: Apache-2.0
// Attention of blocks of 128 packed query rows to all keys, where they come by the copy engine: two computing
// warpgroups that take turns on the tensor cores, and one that loads. The steps of all units of a block form
// one sequence: each issues its Q K^T, then the P V of the step before, be it of another unit. So the first
// step has a tile of V before it that nobody looks at, and the last P V a Q K^T with it. No maximum is taken
// after a row's first block unless exponentials outgrow their reference.
#pragma once

#include "attention/cuda/sm90/prefill_chain_load.cuh"

namespace kascade::cuda {

/// x, which is false so often that what follows belongs out of the way.
__device__ inline bool rarely(bool x) { return __builtin_expect(static_cast<long>(x), 0L) != 0; }

template <class T, int D>
class ChainComputer {
  using Memory = ChainMemory<D>;
  static constexpr int kKeys = Memory::kKeys, kTiles = Memory::kTiles;
  static constexpr int kScores = kKeys / 2;  // of a thread in a step
  static constexpr int kAtOnce = 16;         // of these, exponentiated one after the other

 public:
  __device__ ChainComputer(const PrefillCall& call, Memory& memory)
      : call_(call),
        memory_(memory),
        at_(memory),
        heads_(AttendWork{call, false}.heads()),
        division_(heads_),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    k_ring_.stage = 1;
  }

  __device__ void run() {
    StoreReader reader(memory_.queue);
    bool stored = false;  // there is a unit whose last P V is not issued yet
    if (group_ == 1) named_arrive(kTurn, 256);
    bool ready = false;  // the tiles of the next step are known to be full
    while (true) {
      // All of it at once: a read of shared memory takes hundreds of cycles beside products.
      const int index = reader.wait();
      const AttendUnit unit = memory_.queue.units[index];
      reader.release(index);
      const bool done = unit.reader < 0;
      if (done && !stored) break;
      const int32_t blocks = done ? 1 : unit.blocks;
      if (blocks == 0) {
        store_nothing(unit);
        continue;
      }
      if (stored) leave_sums();
      begin_rows(unit);
      if (done) unmasked_ = -1;
      if (lane_ == 0)
        pending(q_ring_.stage) = {unit.reader, unit.block.row, unit.block.first, unit.block.rows};
      // The first step also has the values of the last one of the unit before.
      const bool copied_first = boxed_ == 0 || !boxes_queries(call_, unit);
      boxed_ = unit.block.keys / kKeys;
      copied_ = min(boxed_ - 1, copied_first ? blocks - 1 : blocks);
      wait_barrier(at_.q_full(q_ring_.stage), q_ring_.parity);
      const uint32_t q = in_uniform_register(at_.q(q_ring_.stage) + group_ * 64 * D * 2);
#pragma unroll 1
      for (int32_t block = blocks - 1; block >= 0; --block) {
        const bool first = block == blocks - 1;
        // Tiles that threads have copied: the queries, and blocks that are not whole.
        const bool copied = block >= copied_;
        if (rarely(!ready || copied)) {
          give_queries_back();
          if (!ready)
            wait_barriers(at_.full(v_ring_.stage), v_ring_.parity, at_.full(k_ring_.stage), k_ring_.parity);
          if (copied) fence_async_proxy();
        }
        const uint32_t k = in_uniform_register(at_.tile(k_ring_.stage)),
                       v = in_uniform_register(at_.tile(v_ring_.stage));
        named_sync(kTurn + group_, 256);
        issue_scores(q, k);
        issue_values(v, started_);
        named_arrive(kTurn + 1 - group_, 256);
        wait_products<1>();
        pin(scores_);
        if (rarely(block >= unmasked_ || unset_)) {
          mask(block);
          set_references();
        }
        // Up to the wait, what the product of values overlaps with. Each group of exponentials has its uses
        // in the next one.
        sums_[0][0] = sums_[0][1] = sums_[1][0] = sums_[1][1] = 0;
        scale(0);
        exponentiate(0);
        scale(16);
        settle<0, 32, 0, 0>();
        exponentiate(16);
        add_up(0);
        scale(32);
        settle<16, 48, 0, 0>();
        exponentiate(32);
        add_up(16);
        scale(48);
        settle<32, 64, 0, 0>();
        wait_products<0>();
        pin(out_);
        release(at_.empty(v_ring_.stage));
        const uint32_t k_empty = at_.empty(k_ring_.stage), k_tile = at_.tile(k_ring_.stage);
        // What the next step begins with, so that nothing is left to be done when the turn comes.
        v_ring_.next();
        k_ring_.next();
        ready =
            test_barriers(at_.full(v_ring_.stage), v_ring_.parity, at_.full(k_ring_.stage), k_ring_.parity);
        exponentiate(48);
        pack(0);
        pack(16);
        add_up(32);
        pack(32);
        settle<48, 64, 0, 48>();
        add_up(48);
        pack(48);
        added_[0] = sums_[0][0] + sums_[0][1];
        added_[1] = sums_[1][0] + sums_[1][1];
        const bool high = outgrown();
        if (rarely(first || high)) {
          if (first && stored) {
            store(pending(q_ring_.stage ^ 1));
            ready = false;  // for give_queries_back()
          }
          if (!first) move_references(at_.q(q_ring_.stage), k_tile, [&] { mask(block); });
        }
        sum_[0] += added_[0];
        sum_[1] += added_[1];
        started_ = first ? 0 : 1;
        release(k_empty);
      }
      give_queries_back();
      if (unmasked_ < 0) break;  // done
      q_ring_.next();
      stored = true;
    }
  }

 private:
  static constexpr int kTurn = 1;  // named barriers kTurn + group

  __device__ void begin_rows(const AttendUnit& unit) {
    unset_ = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit_[half] = limit_of(unit, unit.block.first + row_of(half));
      reference_[half] = -FLT_MAX;
      sum_[half] = 0;
    }
    unmasked_ = max(limit_of(unit, unit.block.first + group_ * 64 + warp_ * 16), 0) / kKeys;
  }

  /// Keys that packed row n of a unit sees.
  __device__ int32_t limit_of(const AttendUnit& unit, int32_t n) const {
    return unit.block.position + division_.token_of(n) + 1;
  }

  // Row of the block of the thread's first (half 0) or second row of sums.
  __device__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ void release(uint32_t empty) {
    __syncwarp();
    if (lane_ == 0) arrive(empty);
  }

  __device__ void issue_scores(uint32_t q_address, uint32_t k_address) {
    const uint64_t q = row_descriptor<D>(q_address), k = row_descriptor<D>(k_address);
    begin_products();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kKeys>::shared(scores_, advance(q, step_bytes(step)), advance(k, step_bytes(step)),
                                step > 0);
    commit_products();
  }
  /// started: whether out_ holds sums of the unit.
  __device__ void issue_values(uint32_t v_address, int started) {
    const uint64_t v = row_descriptor<D>(v_address);
    begin_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      Product<T, D>::template registers<1>(out_, weights_[step], advance(v, step * 16 * D * 2),
                                           step > 0 ? 1 : started);
    commit_products();
  }

  // Of scores [from, from + kAtOnce): times the scale and less the reference; 2^x; added to the sums;
  // rounded.
  __device__ void scale(int from) {
    const float scale = call_.scale_log2;
#pragma unroll
    for (int i = from; i < from + kAtOnce; ++i) scores_[i] = fmaf(scores_[i], scale, -reference_[i >> 1 & 1]);
  }
  __device__ void exponentiate(int from) {
#pragma unroll
    for (int i = from; i < from + kAtOnce; ++i) scores_[i] = exp2_fast(scores_[i]);
  }
  __device__ void add_up(int from) {
#pragma unroll
    for (int i = from; i < from + kAtOnce; ++i) sums_[i >> 1 & 1][i & 1] += scores_[i];
  }
  __device__ void pack(int from) {
#pragma unroll
    for (int i = from / 2; i < (from + kAtOnce) / 2; ++i)
      weights_[i / 4][i % 4] = pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
  }
  /// Keeps what was done to these scores, the sums and the weights made of scores [packed, packed_end) before
  /// what follows. Left alone, the assembler moves all exponentials behind the wait for products and puts
  /// each one's uses two exponentials after it, where they wait for it: beside products an exponential of a
  /// warp takes 11 cycles, but its result some 40. Here it must assume that other values may come in.
  template <int begin, int end, int packed, int packed_end>
  __device__ void settle() {
    if (!rarely(call_.multiprocessors < 0)) return;  // which is never so
    const volatile float* any = &memory_.row_sums[0].x;
#pragma unroll
    for (int i = begin; i < end; ++i) scores_[i] = any[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums_[i / 2][i % 2] = any[kScores + i];
#pragma unroll
    for (int i = packed / 2; i < packed_end / 2; ++i)
      weights_[i / 4][i % 4] = __float_as_uint(any[kScores + 4 + i]);
  }
  /// Whether a row's exponentials of a block add up to too much.
  __device__ bool outgrown() const {
    return __any_sync(kFullWarp, !(added_[0] <= kMostSum) || !(added_[1] <= kMostSum));
  }

  /// Scores of what a row does not see become minus infinity.
  __device__ void mask(int32_t block) {
    const int first = 2 * (lane_ & 3);
    const int32_t limits[2] = {limit_[0] - block * kKeys - first, limit_[1] - block * kKeys - first};
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + (e & 1) >= limits[e >> 1]) scores_[4 * j + e] = -INFINITY;
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
  /// again, by this warp alone, from the tiles at q and k, and the reference of such a row moves to the
  /// largest of them. Other rows stay as they are.
  template <class Mask>
  __device__ void move_references(uint32_t q, uint32_t k, Mask mask_scores) {
    bool own[2];
    // Looked at anew, or the loop would keep the outcome of the comparison before for here.
    asm volatile("" : "+f"(added_[0]), "+f"(added_[1]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int high = !(added_[half] <= kMostSum) ? 1 : 0;
      high |= __shfl_xor_sync(kFullWarp, high, 1);
      high |= __shfl_xor_sync(kFullWarp, high, 2);
      own[half] = high != 0;
    }
    const int q_row = group_ * 64 + warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int pair = 0; pair < kKeys / 16; ++pair) {
      float c[2][4] = {};
      int k_row = pair * 16 + lane_ / 16 * 8 + lane_ % 8;
      asm volatile("" : "+r"(k_row));  // or addresses of all pairs would be computed beforehand
#pragma unroll 1
      for (int step = 0; step < D / 16; ++step) {
        uint32_t a[4], b[4];
        load_matrices(a, tile_piece<D>(q, q_row, 2 * step + lane_ / 16));
        load_matrices(b, tile_piece<D>(k, k_row, 2 * step + lane_ / 8 % 2));
        multiply_add<T>(c[0], a, b[0], b[1]);
        multiply_add<T>(c[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) scores_[8 * pair + i] = c[i / 4][i % 4];
    }
    mask_scores();
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

  /// Output and log-sum-exps of a unit whose sums are complete; its tile of queries, which output goes
  /// through, is given back now or by give_queries_back().
  __device__ void store(const PendingUnit& unit) {
    const AttentionParams& p = call_.params;
    int lane = lane_;
    asm volatile("" : "+r"(lane));  // or addresses would be kept in registers all the time
    const int begin = (group_ * 4 + warp_) * kStoredRows;  // the warp's rows of the block
    float factor[2];
    bool none = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = begin + lane / 4 + 8 * half;
      const float2 halves = memory_.row_sums[i];
      const float sum = halves.x + halves.y;
      factor[half] = sum == 0 ? 0 : __fdividef(p.v_scale, sum);
      none |= sum == 0;
    }
    // Rows that see no key may hold what is not a number.
    if (rarely(__any_sync(kFullWarp, none))) {
#pragma unroll
      for (int k = 0; k < D / 2; ++k) out_[k] = factor[k / 2 % 2] == 0 ? 0 : out_[k];
    }
    if (p.out_dtype == DType::kF32) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int i = begin + lane / 4 + 8 * half;
        float* out = static_cast<float*>(p.out) + output_of(unit, i) + 2 * (lane & 3);
        const float own = half == 0 ? factor[0] : factor[1];
        if (i >= unit.rows) continue;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          const float x = half == 0 ? out_[4 * j] : out_[4 * j + 2],
                      y = half == 0 ? out_[4 * j + 1] : out_[4 * j + 3];
          *reinterpret_cast<float2*>(out + 8 * j) = make_float2(x * own, y * own);
        }
      }
    } else {
      // By way of the warp's rows of the unit's queries, which nobody reads any more.
      const uint32_t tile = at_.q(q_ring_.stage ^ 1) + static_cast<uint32_t>(begin / 8 * kEightRows<D>);
      if (p.out_dtype == DType::kBF16) {
        pack_output<__nv_bfloat16>(factor, tile, lane);
      } else {
        pack_output<__half>(factor, tile, lane);
      }
      if (call_.out_boxes.usable && unit.rows == kBlockRows) {
        fence_async_proxy();
        __syncwarp();
        store_box_by_one(&call_.out_boxes.map, tile, 0, unit.reader * heads_,
                         unit.row + division_.token_of(unit.first + begin), 0, 0);
        storing_ = true;
      } else {
        __syncwarp();
        store_rows(unit, begin, tile, lane);
      }
    }
    if (!storing_) {
      fence_async_proxy();  // The copy engine writes there next.
      release(at_.q_empty(q_ring_.stage ^ 1));
    }
    // After the fence, which would wait for these stores.
    if ((p.lse == nullptr && p.role != Role::kLayer0) || lane % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = begin + lane / 4 + 8 * half;
      const float2 halves = memory_.row_sums[i];
      const float sum = halves.x + halves.y;
      store_lse(unit, i, sum == 0 ? -INFINITY : memory_.references[i] + __log2f(sum));
    }
  }

  /// Zeros for a unit whose rows see no keys.
  __device__ void store_nothing(const AttendUnit& unit) {
    const AttentionParams& p = call_.params;
    const PendingUnit own = {unit.reader, unit.block.row, unit.block.first, unit.block.rows};
    const int bytes = p.out_dtype == DType::kF32 ? 4 : 2;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int i = row_of(half);
      if (i >= own.rows) continue;
      if (lane_ % 4 == 0) store_lse(own, i, -INFINITY);
      uint4* out = reinterpret_cast<uint4*>(static_cast<unsigned char*>(p.out) + output_of(own, i) * bytes);
#pragma unroll 1
      for (int j = lane_ & 3; j < D * bytes / 16; j += 4) out[j] = make_uint4(0, 0, 0, 0);
    }
  }

  /// What storing the unit whose queries are in a place takes later: its entry of the queue may have been
  /// needed for many without keys by then.
  __device__ PendingUnit& pending(int queries) const { return memory_.pending[queries][group_ * 4 + warp_]; }
  /// Out of the way, as registers are scarce: the sums of the unit whose last P V is not issued yet.
  __device__ void leave_sums() {
    int lane = lane_;
    asm volatile("" : "+r"(lane));  // or an address would be kept in local memory
    const int begin = (group_ * 4 + warp_) * kStoredRows + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float pair = sum_[half] + __shfl_xor_sync(kFullWarp, sum_[half], 1);
      if (lane % 2 == 0) (&memory_.row_sums[begin + 8 * half].x)[lane / 2 % 2] = pair;
      if (lane % 4 == 0) memory_.references[begin + 8 * half] = reference_[half];
    }
    __syncwarp();
  }
  /// The tile of queries that output has gone out from, if there is one.
  __device__ void give_queries_back() {
    if (!storing_) return;
    storing_ = false;
    wait_stored_boxes();
    release(at_.q_empty(q_ring_.stage ^ 1));
  }

  /// Row i's row of q, and its query head.
  __device__ void locate(const PendingUnit& unit, int i, int64_t* row, int64_t* head) const {
    const int n = unit.first + i;
    const int32_t token = division_.token_of(n);
    *row = unit.row + token;
    *head = unit.reader * heads_ + n - token * heads_;
  }
  /// Row i's log-sum-exp, in log2 units.
  __device__ void store_lse(const PendingUnit& unit, int i, float lse) {
    const AttentionParams& p = call_.params;
    if (i >= unit.rows) return;
    int64_t row, head;
    locate(unit, i, &row, &head);
    if (p.lse != nullptr) p.lse[row * p.lse_row_stride + head] = lse * kLn2;
    if (p.role == Role::kLayer0) call_.lse[row * p.query_heads + head] = lse;
  }
  /// Where row i's output begins.
  __device__ int64_t output_of(const PendingUnit& unit, int i) const {
    int64_t row, head;
    locate(unit, i, &row, &head);
    return row * call_.params.out_row_stride + head * call_.params.out_head_stride;
  }
  /// The warp's output, rounded, as rows of a tile.
  template <class Out>
  __device__ void pack_output(const float (&factor)[2], uint32_t tile, int lane) {
    const uint32_t put = tile_piece<D>(tile, lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = 4 * (j + i / 2) + 2 * (i & 1);
        words[i] = pack_pair<Out>(out_[k] * factor[i & 1], out_[k + 1] * factor[i & 1]);
      }
      store_matrices((put ^ static_cast<uint32_t>(j % 8 * 16)) + static_cast<uint32_t>(j / 8 * 1024), words);
    }
  }
  /// Those of these rows that exist, where no box can store them.
  __device__ void store_rows(const PendingUnit& unit, int begin, uint32_t tile, int lane) {
    constexpr int kPieces = D / 8, kRowsAtOnce = 32 / kPieces;
    const int own_row = lane / kPieces, piece = lane % kPieces;
    uint4* out = static_cast<uint4*>(call_.params.out) + piece;
#pragma unroll 1
    for (int row = own_row; row < kStoredRows && begin + row < unit.rows; row += kRowsAtOnce)
      out[output_of(unit, begin + row) / 8] = load_shared_16(tile_piece<D>(tile, row, piece));
  }

  const PrefillCall& call_;
  Memory& memory_;
  const Addresses<Memory> at_;
  const int heads_;
  const HeadDivision division_;
  const int group_, warp_, lane_;
  Ring<kTiles, 2> k_ring_, v_ring_;
  Ring<Memory::kQueries> q_ring_;
  bool unset_ = false;    // rows of the warp have no reference yet
  int32_t boxed_ = 0;     // blocks before this one come by the copy engine
  int32_t copied_ = 0;    // steps of this block and of those after it have tiles that threads have copied
  int32_t unmasked_ = 0;  // blocks before this one are seen whole by every row of the warp
  bool storing_ = false;  // output goes out from the tile of queries that is not in use
  int started_ = 0;       // whether out_ holds sums of the unit that is multiplied
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {};
  // Of the step in work: its sums, of even and odd keys and together.
  float sums_[2][2] = {}, added_[2] = {};
  float scores_[kScores];
  uint32_t weights_[kKeys / 16][4] = {};
  float out_[D / 2];
};

template <class T, int D>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_chain_kernel(const __grid_constant__ PrefillCall call) {
  extern __shared__ __align__(1024) unsigned char shared[];
  ChainMemory<D>& memory = *reinterpret_cast<ChainMemory<D>*>(shared);
  if (threadIdx.x == 0) {
    memory.queue.init(kComputeWarps);
    for (int i = 0; i < ChainMemory<D>::kTiles; ++i) {
      init_barrier(memory.full[i], kFullArrivals);
      init_barrier(memory.empty[i], kComputeWarps);
    }
    for (int i = 0; i < ChainMemory<D>::kQueries; ++i) {
      init_barrier(memory.q_full[i], kLoadWarps * 32);
      init_barrier(memory.q_empty[i], kComputeWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  // Registers of a loading and a computing thread: together no more than the multiprocessor has.
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<72>();
    chain_load<T, D>(call, memory);
  } else {
    take_registers<216>();
    ChainComputer<T, D>(call, memory).run();
  }
}

template <class T, int D>
void launch_prefill_chain(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = kPrefillThreads;
  shape.shared_bytes = sizeof(ChainMemory<D>);
  launch("prefill_dense", prefill_chain_kernel<T, D>, shape, stream, call);
}

}  // namespace kascade::cuda
