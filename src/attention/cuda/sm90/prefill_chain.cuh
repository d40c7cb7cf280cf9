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

/// Keeps the computation of x before what follows: the assembler would move it behind a wait for products
/// that it does not depend on, but not an instruction that may be executed or not by its outcome.
__device__ inline void finish_before_products(float x) {
  asm volatile("{\n.reg .pred huge;\nsetp.gt.f32 huge, %0, 0f7E967699;\n@huge nanosleep.u32 0;\n}\n" ::"f"(x)
               : "memory");
}

template <class T, int D>
class ChainComputer {
  using Memory = ChainMemory<D>;
  static constexpr int kKeys = Memory::kKeys, kTiles = Memory::kTiles;
  static constexpr int kScores = kKeys / 2;  // of a thread in a step

 public:
  __device__ ChainComputer(const PrefillCall& call, Memory& memory)
      : call_(call),
        memory_(memory),
        at_(memory),
        heads_(AttendWork{call, false}.heads()),
        group_(static_cast<int>(threadIdx.x) / 128 - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    k_ring_.stage = 1;
  }

  __device__ void run() {
    StoreReader reader(memory_.queue);
    bool stored = false;  // there is a unit whose last P V is not issued yet
    if (group_ == 1) named_arrive(kTurn, 256);
    while (true) {
      const int index = reader.wait();
      const AttendUnit& unit = memory_.queue.units[index];
      const bool done = unit.reader < 0;
      if (done && !stored) break;
      const int32_t blocks = done ? 1 : unit_blocks<kKeys>(unit, heads_);
      if (blocks == 0) {
        store_nothing(unit);
        reader.release(index);
        continue;
      }
      if (stored) leave_sums();
      begin_rows(unit);
      boxed_ = unit.block.keys / kKeys;
      wait_barrier(at_.q_full(q_ring_.stage), q_ring_.parity);
      const uint32_t q = in_uniform_register(at_.q(q_ring_.stage) + group_ * 64 * D * 2);
#pragma unroll 1
      for (int32_t block = blocks - 1; block >= 0; --block) {
        const bool first = block == blocks - 1;
        // Addresses are at hand when the turn comes.
        const uint32_t k = in_uniform_register(at_.tile(k_ring_.stage)),
                       v = in_uniform_register(at_.tile(v_ring_.stage));
        wait_barriers(at_.full(v_ring_.stage), v_ring_.parity, at_.full(k_ring_.stage), k_ring_.parity);
        // Tiles that threads have copied: the queries, and blocks that are not whole.
        if (first || block + 1 >= boxed_) fence_async_proxy();
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
        begin_exponentials();
        // What the product of values overlaps with; the assembler would move it behind the wait if nothing
        // that follows were executed or not by its outcome.
        exponentiate<0, kScores / 2>();
        finish_before_products(added_[0] + added_[1]);
        wait_products<0>();
        pin(out_);
        exponentiate<kScores / 2, kScores>();
        pack();
        const bool high = outgrown();
        if (rarely(first || high)) {
          if (first && stored) {
            const float2 sums[2] = {left_sums(0), left_sums(1)};
            store(left_unit(), {sums[0].x, sums[1].x}, {sums[0].y, sums[1].y});
            release(at_.q_empty(q_ring_.stage ^ 1));
          }
          if (!first) move_references(at_.q(q_ring_.stage), at_.tile(k_ring_.stage), [&] { mask(block); });
        }
        sum_[0] += added_[0];
        sum_[1] += added_[1];
        started_ = first ? 0 : 1;
        release_tiles();
      }
      if (done) break;
      q_ring_.next();
      leave_unit(unit);
      reader.release(index);
      stored = true;
    }
  }

 private:
  static constexpr int kTurn = 1;  // named barriers kTurn + group

  __device__ void begin_rows(const AttendUnit& unit) {
    unset_ = true;
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

  /// For exponentiate(): nothing is added up yet, scores are offset by the references.
  __device__ void begin_exponentials() {
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
  __device__ void pack() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weights_[i / 4][i % 4] = pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
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

  /// A row's sum over the threads that share it.
  __device__ float total_sum(int half) const {
    const float pair = sum_[half] + __shfl_xor_sync(kFullWarp, sum_[half], 1);
    return pair + __shfl_xor_sync(kFullWarp, pair, 2);
  }

  /// Output and log-sum-exps of a unit whose sums are complete.
  __device__ void store(const AttendUnit& unit, const float (&references)[2], const float (&totals)[2]) {
    const AttentionParams& p = call_.params;
    float factor[2];
    bool exists[2];
    int64_t to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = totals[half];
      factor[half] = total == 0 ? 0 : p.v_scale / total;
      const int i = row_of(half);
      exists[half] = i < unit.block.rows;
      to[half] = store_lse(unit, i, total == 0 ? -INFINITY : references[half] + log2f(total));
    }
    switch (p.out_dtype) {
      case DType::kF32:
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* out = static_cast<float*>(p.out) + to[half] + 2 * (lane_ & 3);
#pragma unroll
          for (int j = 0; j < D / 8; ++j)
            if (exists[half])
              *reinterpret_cast<float2*>(out + 8 * j) = scaled(4 * j + 2 * half, factor[half]);
        }
        break;
      case DType::kBF16:
        store_packed<__nv_bfloat16>(factor, exists, to);
        break;
      default:
        store_packed<__half>(factor, exists, to);
        break;
    }
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

  /// What storing a unit takes later, when its place in the queue may have been needed for many without keys.
  __device__ void leave_unit(const AttendUnit& unit) {
    constexpr int kWords = sizeof(AttendUnit) / 4;
    if (lane_ < kWords)
      reinterpret_cast<uint32_t*>(&left_unit())[lane_] = reinterpret_cast<const uint32_t*>(&unit)[lane_];
  }
  __device__ AttendUnit& left_unit() const { return memory_.stored[group_ * 4 + warp_]; }
  /// Out of the way, as registers are scarce: the sums of the unit whose last P V is not issued yet.
  __device__ void leave_sums() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = total_sum(half);
      if (lane_ % 4 == 0) memory_.row_sums[row_of(half)] = make_float2(reference_[half], total);
    }
    __syncwarp();
  }
  __device__ float2 left_sums(int half) const { return memory_.row_sums[row_of(half)]; }

  /// The tiles of K and V that a step has read.
  __device__ void release_tiles() {
    __syncwarp();
    if (lane_ < 2) arrive(at_.empty(lane_ == 0 ? k_ring_.stage : v_ring_.stage));
    k_ring_.next();
    v_ring_.next();
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
  template <class Out>
  __device__ void store_packed(const float (&factor)[2], const bool (&exists)[2], const int64_t (&to)[2]) {
    // Rows of all registers at once, so that shuffles do not wait for each other.
    constexpr int kSquares = D / 32;
    uint32_t words[2 * kSquares][4];
#pragma unroll
    for (int n = 0; n < 2 * kSquares; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = n / kSquares, j = n % kSquares * 4 + i;
        const float2 pair = scaled(4 * j + 2 * half, factor[half]);
        words[n][i] = pack_pair<Out>(pair.x, pair.y);
      }
    transpose_quads(words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!exists[half]) continue;
      uint16_t* out = static_cast<uint16_t*>(call_.params.out) + to[half] + (lane_ & 3) * 8;
#pragma unroll
      for (int n = 0; n < kSquares; ++n) {
        const uint32_t(&r)[4] = words[half * kSquares + n];
        *reinterpret_cast<uint4*>(out + 32 * n) = make_uint4(r[0], r[1], r[2], r[3]);
      }
    }
  }

  const PrefillCall& call_;
  Memory& memory_;
  const Addresses<Memory> at_;
  const int heads_, group_, warp_, lane_;
  StepRing<kTiles, 2> k_ring_, v_ring_;
  StepRing<Memory::kQueries> q_ring_;
  bool unset_ = false;    // rows of the warp have no reference yet
  int32_t boxed_ = 0;     // blocks before this one come by the copy engine
  int32_t unmasked_ = 0;  // blocks before this one are seen whole by every row of the warp
  int started_ = 0;       // whether out_ holds sums of the unit that is multiplied
  int32_t limit_[2] = {};
  float reference_[2] = {}, sum_[2] = {};
  float added_[2] = {}, offset_[2] = {};  // of the step in work: its sums, what scores are offset by
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
