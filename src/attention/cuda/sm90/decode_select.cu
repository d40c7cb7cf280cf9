// SPDX-License-Identifier: Apache-2.0
// Selection of a decode call: pooled weights from the stored scores, exact top-k, ascending list. One cluster
// of blocks per index set; each block owns a range of the keys and the blocks add up histograms and exchange
// the keys at the cut through distributed shared memory.
#include <algorithm>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/async_copy.cuh"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/ptx/mma.cuh"

namespace kascade::cuda {
namespace {

// Blocks of a cluster, powers of two: as many as any GPU of this generation takes, and as many as most do.
constexpr int kCluster = 8;
constexpr int kLargeCluster = 16;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps <= 32, "a lane stands for a warp in sums over warps");
static_assert(kLargeCluster <= kWarps, "a warp reads one other block's keys");
// Keys of a block are a multiple of this, whole words of bits.
constexpr int kShareMultiple = 32;
// Neighbouring keys that a thread takes at once.
constexpr int kVector = 8;
// Rank keys have 31 bits. Blocks keep the upper 15 bits of their keys, plus one, as digits; 0 stands for keys
// that are not ranked. The first histogram has a bin for each digit (weights that agree to 1/128) in a window
// of 32 powers of two below the largest cut possible; it is moved in the rare case that the cut lies
// elsewhere. Keys that share the cut's digit are few: their lower bits are computed again and searched for
// the cut; if they are too many, histograms of 12 and 4 further bits decide.
constexpr int kBins = 4096;
// Bins are first looked at in runs.
constexpr int kRun = 16;
constexpr int kRuns = kBins / kRun;
static_assert(kRuns <= kThreads && kRun <= 32);
constexpr int kDigitShift = 16, kSecondShift = 4;
constexpr int kOwnCandidates = 4;  // of a thread
constexpr int kMostCandidates = kOwnCandidates * kThreads;
constexpr int kWarpCandidates = 512;  // that one warp searches
static_assert(kMostCandidates * 8 <= kBins * 4, "candidates take the histogram's place");
// Digit of an infinite weight; two digits and a guard bit each fit into a word.
constexpr int32_t kMostDigit = (0x7F800001 >> kDigitShift) + 1;
static_assert(kMostDigit < 0x8000);
constexpr uint32_t kGuards = 0x80008000u;
// Digits of a block that its shared memory has room for; those of longer ranges lie in the workspace.
constexpr int kMostCachedKeys = 84 * 1024;
// Keys of a block of which two fit into a multiprocessor.
constexpr int kPreferredKeys = 32 * 1024 + kChunkKeys;

struct Candidate {
  uint32_t key;
  int32_t position;
};

/// Where the wanted-th largest key is: its bin, the keys above that bin, and those in it.
struct Found {
  int32_t bin, above, count;
};

/// The list that a cluster selects.
struct List {
  int64_t index;  // among the sets of the call
  StepBudget budget;
  int32_t sequence, set, kv_len;
  int32_t row_begin, rows;  // rows of q
  int32_t blocks;           // that share the keys
  bool has_place, is_needed;
};

struct alignas(16) SelectMemory {
  union {
    alignas(16) int32_t histogram[kBins];       // of this block's keys; read by the others
    Candidate all_candidates[kMostCandidates];  // of the cluster, once the histograms are done
  };
  int32_t runs[kRuns];                    // sums of the histogram; read by the others
  Candidate candidates[kMostCandidates];  // of this block; read by the others
  float lse[kMaxPooledRows];              // log2
  int64_t row[kMaxPooledRows];            // where the row's scores begin
  int32_t warp_sums[kWarps], warp_ties[kWarps];
  // What blocks before this one select, and their ties, as each warp has added them up.
  int32_t selected_before[kWarps], ties_before[kWarps];
  int32_t candidate_count;
  int2 totals;  // of this block, .x candidates or ties and .y keys above them; read by the others
  Found run, found;
  int32_t exact;  // whether cut parts as many candidates as are wanted
  uint32_t cut;
  List list;
};

/// For code that few calls come to, which had better lie apart: calls of a few microseconds wait for every
/// stretch of instructions that they come to.
__device__ inline bool unlikely(bool condition) { return __builtin_expect(condition, 0) != 0; }

/// Orders weights (never negative) as the ranking does, NaN lowest.
__device__ uint32_t rank_key(float weight) { return weight != weight ? 0 : __float_as_uint(weight) + 1; }
__device__ uint32_t digit_of(uint32_t key) { return (key >> kDigitShift) + 1; }

class Selector {
 public:
  /// cache: digits of the block's keys, in shared memory, or null until the workspace serves; bits: what is
  /// selected of them, a bit a key.
  __device__ Selector(const DecodeCall& call, SelectMemory& memory, uint16_t* cache, uint32_t* bits,
                      int32_t cached_keys)
      : call_(call),
        p_(call.params),
        memory_(memory),
        cache_(cache),
        bits_(bits),
        cached_keys_(cached_keys),
        rank_(cluster_rank()),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  __device__ void run() {
    clear_histogram();
    // By one warp: what every warp computes, all of them wait for.
    if (warp_ == 0) find_list();
    __syncthreads();
    const List& list = memory_.list;
    budget_ = list.budget;
    blocks_ = list.blocks;
    if (rank_ >= blocks_) return;
    const bool ranks = list.has_place && list.is_needed && budget_.ranked > 0 &&
                       budget_.ranked < budget_.recent_begin - budget_.sinks;
    if (ranks) find_range();
    // All that is above comes from the caller's arrays.
    wait_for_previous_kernel();
    allow_next_kernel();
    if (unlikely(!list.has_place)) return;
    positions_ = p_.positions + list.index * p_.capacity;
    if (rank_ == 0 && thread_ == 0) p_.counts[list.index] = list.is_needed ? budget_.members() : 0;
    if (list.is_needed) {
      rows_ = list.rows * (p_.query_heads / call_.sets);
      if (ranks) touch_scores();
      merge_lse();
      write_by_products();
    }
    if (ranks) rank_and_write();
    write_forced(ranks);
    // No block leaves while others read its memory.
    if (ranks && blocks_ > 1) cluster_wait();
  }

 private:
  __device__ void find_list() {
    const int32_t cluster = cluster_size();
    const int32_t index = static_cast<int32_t>(blockIdx.x) / cluster;
    const int32_t tiles = rows_are_tiles(call_) ? static_cast<int32_t>(call_.maxima.q_len) : 1;
    List list;
    list.set = index % call_.sets;
    const int32_t tile_index = index / call_.sets;
    list.sequence = tile_index / tiles;
    const StepSequence s = load_sequence(call_, list.sequence);
    const StepTile tile = load_tile(call_, s, list.sequence, tile_index % tiles);
    list.index = int64_t{tile.set} * call_.sets + list.set;
    list.budget = tile.budget;
    list.kv_len = s.kv_len;
    list.row_begin = s.row_begin + tile.row_begin;
    list.rows = tile.rows;
    list.has_place = tile.set >= 0;
    list.is_needed = is_needed(call_, list.set);
    // What fits into one block needs no other: lists shorter than the maxima leave room for more lists at
    // once.
    list.blocks = list.budget.recent_begin <= cached_keys_ ? 1 : cluster;
    if (!list.is_needed) {
      list.budget.sinks = list.budget.ranked = 0;
      list.budget.recent_begin = list.budget.candidates;
    }
    if (lane_ != 0) return;
    memory_.list = list;
    memory_.candidate_count = 0;
  }

  __device__ void sync_blocks() const {
    if (blocks_ > 1) {
      cluster_arrive_own();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  __device__ void clear_histogram() {
    for (int i = thread_ * 4; i < kBins; i += kThreads * 4)
      *reinterpret_cast<int4*>(memory_.histogram + i) = make_int4(0, 0, 0, 0);
  }

  /// Log-sum-exp (log2) of the pooled rows over all keys they see, from the partial results of the score
  /// pass.
  __device__ void merge_lse() {
    const List& list = memory_.list;
    const int32_t heads = p_.query_heads / call_.sets;
    const int32_t splits = split_count(call_.dense_rule, list.kv_len);
    const bool by_groups =
        cut_units(call_.dense_rule, splits, list.sequence, p_.batch, 0).merge != GroupMerge::kNobody;
#pragma unroll 1
    for (int32_t i = warp_; i < rows_; i += kWarps) {
      const int32_t row = (list.row_begin + i / heads) * p_.query_heads + list.set * heads + i % heads;
      const float2* stats = call_.partial_stats + int64_t{row} * call_.dense_splits;
      const RowStats row_stats = merge_stats(stats, splits, by_groups);
      if (lane_ != 0) continue;
      // A row that sees no key weighs none.
      memory_.lse[i] = row_stats.total == 0 ? INFINITY : row_stats.top + log2f(row_stats.total);
      memory_.row[i] = row * call_.score_stride;
    }
    __syncthreads();
  }

  /// kScoreFarBelow is 128 powers of two below the chunk's top, which is at most lse: the result is 0.
  __device__ static float weight_of(uint32_t code, float offset) {
    // 2^23 + code as a float, without the slow integer conversion.
    const float distance = __uint_as_float(0x4B000000u | code) - 8388608.0f;
    return exp2_fast(fmaf(distance, -1.0f / kScoreSteps, offset));
  }

  /// Of one key, from its memory alone; not inlined, as few want it.
  static __device__ __noinline__ float weight(const DecodeCall& call, const SelectMemory& memory,
                                              int32_t rows, int32_t key) {
    float sum = 0;
#pragma unroll 4
    for (int32_t i = 0; i < rows; ++i) {
      const uint64_t at = static_cast<uint64_t>(memory.row[i] + key);
      sum += weight_of(call.score_codes[at], call.score_tops[at / kChunkKeys] - memory.lse[i]);
    }
    return sum;
  }

  /// Rank key of the block's key i.
  __device__ uint32_t rank_key_of(int32_t i) const {
    return rank_key(weight(call_, memory_, rows_, begin_ + i));
  }

  /// Weights of keys [key, key + kVector); key is a multiple of kVector.
  __device__ void weights(int32_t key, float (&sum)[kVector]) const {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum[e] = 0;
#pragma unroll 4
    for (int32_t i = 0; i < rows_; ++i) {
      const uint64_t at = static_cast<uint64_t>(memory_.row[i] + key);
      const uint4 codes = __ldcs(reinterpret_cast<const uint4*>(call_.score_codes + at));
      const float offset = __ldcs(call_.score_tops + at / kChunkKeys) - memory_.lse[i];
      const uint32_t pairs[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[2 * e] += weight_of(pairs[e] & 0xFFFFu, offset);
        sum[2 * e + 1] += weight_of(pairs[e] >> 16, offset);
      }
    }
  }

  __device__ void write_by_products() const {
    const List& list = memory_.list;
    if (unlikely(p_.pooled_weights != nullptr)) {
      float* pooled = p_.pooled_weights + list.index / call_.sets * p_.pooled_tile_stride +
                      list.set * p_.pooled_head_stride;
      for (int32_t j = rank_ * kThreads + thread_; j < budget_.candidates; j += blocks_ * kThreads)
        pooled[j] = weight(call_, memory_, rows_, j);
    }
    if (unlikely(p_.own_tile_mass != nullptr) && rank_ == 0 && thread_ == 0) {
      float mass = 0;
      for (int32_t j = budget_.candidates; j < list.kv_len; ++j) mass += weight(call_, memory_, rows_, j);
      p_.own_tile_mass[list.index] = mass;
    }
  }

  /// Sinks, recent keys and the padding; and the ranked keys, when they are all.
  __device__ void write_forced(bool ranks) const {
    const int32_t sinks = budget_.sinks, ranked = budget_.ranked, members = budget_.members();
    const int32_t recent_begin = budget_.recent_begin;
    const int32_t first = rank_ * kThreads + thread_, step = blocks_ * kThreads;
    const int32_t leading = ranks ? sinks : sinks + ranked;
    for (int32_t m = first; m < leading; m += step) positions_[m] = m;
    for (int32_t m = sinks + ranked + first; m < p_.capacity; m += step)
      positions_[m] = m < members ? recent_begin + m - sinks - ranked : -1;
  }

  /// The block's keys.
  __device__ void find_range() {
    const int32_t end = budget_.recent_begin;
    const int blocks_shift = 31 - __clz(blocks_);  // a power of two
    const int32_t share =
        (((end + blocks_ - 1) >> blocks_shift) + kShareMultiple - 1) / kShareMultiple * kShareMultiple;
    begin_ = min(rank_ * share, end);
    length_ = min(begin_ + share, end) - begin_;
    if (unlikely(cache_ == nullptr)) {
      const int64_t set = static_cast<int32_t>(blockIdx.x) / cluster_size();
      cache_ = call_.rank_digits + set * call_.score_stride + begin_;
      bits_ = call_.rank_bits + (set * call_.score_stride + begin_) / 32;
    }
  }

  /// Brings the scores that the thread weighs first into the first-level cache, which takes as long as the
  /// sums of the softmax.
  __device__ void touch_scores() const {
    constexpr int32_t kMostRows = 8;
    const List& list = memory_.list;
    const int32_t heads = p_.query_heads / call_.sets;
    const int32_t i = thread_ * kVector;
    if (i >= length_) return;
#pragma unroll 1
    for (int32_t r = 0; r < min(rows_, kMostRows); ++r) {
      const int32_t row = (list.row_begin + r / heads) * p_.query_heads + list.set * heads + r % heads;
      const int64_t at = row * call_.score_stride + begin_ + i;
      touch(call_.score_codes + at);
      touch(call_.score_tops + at / kChunkKeys);
    }
  }

  __device__ void rank_and_write() {
    const int32_t ranked = budget_.ranked;
    // The wanted-th largest weight is at most the mean of those above it.
    const auto largest = static_cast<int32_t>(
        digit_of(rank_key(1.01f * static_cast<float>(rows_) / static_cast<float>(ranked))));
    int32_t base = max(largest - (kBins - 2), 0);
    weigh(base);
    Found found = find_bin(ranked);
    while (
        unlikely((found.bin == 0 && base > 0) || (found.bin == kBins - 1 && base + kBins - 1 < kMostDigit))) {
      base = max(found.bin == 0 ? base - (kBins - 2) : base + (kBins - 2), 0);
      sync_blocks();  // others may still read the histogram
      clear_histogram();
      __syncthreads();
      for_each_vector([&](int32_t, uint4 digits) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) count_digit(digit_at(digits, e), base);
      });
      found = find_bin(ranked);
    }
    const auto prefix = static_cast<uint32_t>(base + found.bin);
    const int32_t before = unlikely(found.count > kMostCandidates)
                               ? cut_by_digits(prefix, ranked - found.above)
                               : cut_by_search(prefix, found.count, ranked - found.above);
    write_selected(before);
  }

  /// Digit of key e of a vector: the first four keys are in the lower halves of the words.
  __device__ static uint32_t digit_at(uint4 digits, int e) {
    const uint32_t word = (e & 3) == 0   ? digits.x
                          : (e & 3) == 1 ? digits.y
                          : (e & 3) == 2 ? digits.z
                                         : digits.w;
    return e < 4 ? word & 0xFFFFu : word >> 16;
  }

  /// Bit e: digit e is at least `least`, which has 15 bits.
  __device__ static uint32_t at_least(uint4 digits, uint32_t least) {
    const uint32_t both = least * 0x10001u;
    // A digit's guard bit survives the subtraction if the digit is large enough.
    const uint32_t bits = ((((digits.x | kGuards) - both) & kGuards) >> 15) |
                          ((((digits.y | kGuards) - both) & kGuards) >> 14) |
                          ((((digits.z | kGuards) - both) & kGuards) >> 13) |
                          ((((digits.w | kGuards) - both) & kGuards) >> 12);
    return (bits | bits >> 12) & 0xFFu;
  }

  /// Weighs the block's keys once: into the cache and the first histogram.
  __device__ void weigh(int32_t base) {
    const int32_t sinks = budget_.sinks - begin_;
#pragma unroll 1
    for (int32_t i = thread_ * kVector; i < length_; i += kThreads * kVector) {
      float sum[kVector];
      weights(begin_ + i, sum);
      uint32_t digits[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        digits[e] = digit_of(rank_key(sum[e]));
        if (unlikely(i < sinks || i + kVector > length_))
          digits[e] = i + e >= sinks && i + e < length_ ? digits[e] : 0;
        count_digit(digits[e], base);
      }
      *reinterpret_cast<uint4*>(cache_ + i) =
          make_uint4(digits[0] | digits[4] << 16, digits[1] | digits[5] << 16, digits[2] | digits[6] << 16,
                     digits[3] | digits[7] << 16);
    }
  }

  /// Bin 0 is left out: it may hold most keys, which would wait for each other.
  __device__ void count_digit(uint32_t digit, int32_t base) {
    const int32_t bin = min(static_cast<int32_t>(digit) - base, kBins - 1);
    if (bin > 0) atomicAdd(memory_.histogram + bin, 1);
  }

  /// f(i, digits) for every run of kVector keys, each warp over a stretch of its own; all lanes stay
  /// together.
  template <class F>
  __device__ void for_each_vector(F f) const {
    const int32_t of_warp = (length_ + kWarps * 32 * kVector - 1) / (kWarps * 32 * kVector) * (32 * kVector);
    const int32_t first = warp_ * of_warp, last = min(first + of_warp, length_);
#pragma unroll 1
    for (int32_t run = first; run < last; run += 32 * kVector) {
      const int32_t i = run + lane_ * kVector;
      f(i, i < last ? *reinterpret_cast<const uint4*>(cache_ + i) : make_uint4(0, 0, 0, 0));
    }
  }

  /// The selected keys of a vector.
  __device__ void store_bits(int32_t i, uint32_t bits) const {
    if (i < length_) reinterpret_cast<uint8_t*>(bits_)[i / kVector] = static_cast<uint8_t>(bits);
  }

  /// Adds up the blocks' histograms and finds the bin of the wanted-th largest key. Keys that are in no bin
  /// count as bin 0.
  __device__ Found find_bin(int32_t wanted) {
    __syncthreads();
    if (thread_ < kRuns) {
      const int4* bins = reinterpret_cast<const int4*>(memory_.histogram + thread_ * kRun);
      int32_t sum = 0;
#pragma unroll
      for (int i = 0; i < kRun / 4; ++i) sum += (bins[i].x + bins[i].y) + (bins[i].z + bins[i].w);
      memory_.runs[thread_] = sum;
    }
    sync_blocks();
    // Thread t looks at the runs from the top.
    const int run = kRuns - 1 - thread_;
    int32_t own = 0, sum = 0;
    if (thread_ < kRuns) {
#pragma unroll 8
      for (int block = 0; block < blocks_; ++block) own += *in_block(&memory_.runs[run], block);
      sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane_ >= step) sum += other;
      }
      if (lane_ == 31) memory_.warp_sums[warp_] = sum;
    }
    __syncthreads();
    if (thread_ < kRuns) {
      const int32_t of_warps = lane_ < warp_ ? memory_.warp_sums[lane_] : 0;
      const int32_t above = __reduce_add_sync(0xFFFFFFFFu, of_warps) + sum - own;
      if (above < wanted && wanted <= above + own) memory_.run = {run, above, own};
      if (run == 0 && wanted > above + own) memory_.run = {-1, above + own, INT32_MAX};
    }
    __syncthreads();
    const Found of_run = memory_.run;
    if (unlikely(of_run.bin < 0)) return {0, of_run.above, INT32_MAX};
    if (warp_ == 0) {
      const int bin = of_run.bin * kRun + kRun - 1 - lane_;
      int32_t count = 0;
      if (lane_ < kRun) {
#pragma unroll 8
        for (int block = 0; block < blocks_; ++block) count += *in_block(&memory_.histogram[bin], block);
      }
      int32_t up_to = count;
#pragma unroll
      for (int step = 1; step < kRun; step *= 2) {
        const int32_t other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
        if (lane_ >= step) up_to += other;
      }
      const int32_t above = of_run.above + up_to - count;
      if (lane_ < kRun && above < wanted && wanted <= above + count) memory_.found = {bin, above, count};
    }
    __syncthreads();
    return memory_.found;
  }

  /// The sum over the block's warps, known to warp 0.
  __device__ int32_t sum_of_warps(const int32_t (&of_warps)[kWarps]) const {
    return __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? of_warps[lane_] : 0);
  }

  __device__ int2 totals_of_block(int block) const {
    return block < blocks_ ? *in_block(&memory_.totals, block) : make_int2(0, 0);
  }

  /// Adds up the totals of the blocks before this one; lane i has those of block i. Into memory, so that what
  /// was read of other blocks has come before this one says that they may leave: arriving waits for no load.
  __device__ void store_before(int2 totals) const {
    const int32_t ties = __reduce_add_sync(0xFFFFFFFFu, lane_ < rank_ ? totals.x : 0);
    const int32_t selected = __reduce_add_sync(0xFFFFFFFFu, lane_ < rank_ ? totals.y : 0);
    if (lane_ != 0) return;
    memory_.ties_before[warp_] = ties;
    memory_.selected_before[warp_] = selected;
  }

  /// The cut, when `count` keys of the cluster share its digit: the wanted-th of them in the order of the
  /// ranking. Marks what the block selects and returns how many keys the blocks before this one do.
  __device__ int32_t cut_by_search(uint32_t prefix, int32_t count, int32_t wanted) {
    int32_t above = 0;
    for_each_vector([&](int32_t i, uint4 digits) {
      const uint32_t bits = at_least(digits, prefix + 1);
      uint32_t at_cut = at_least(digits, prefix) & ~bits;
      store_bits(i, bits);
      above += __popc(bits);
      for (; at_cut != 0; at_cut &= at_cut - 1)
        memory_.candidates[atomicAdd(&memory_.candidate_count, 1)].position =
            begin_ + i + __ffs(static_cast<int>(at_cut)) - 1;
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    if (lane_ == 0) memory_.warp_sums[warp_] = above;
    __syncthreads();
    if (warp_ == 0) {
      const int32_t all = sum_of_warps(memory_.warp_sums);
      if (lane_ == 0) memory_.totals = make_int2(memory_.candidate_count, all);
    }
#pragma unroll 1
    for (int32_t c = thread_; c < memory_.candidate_count; c += kThreads)
      memory_.candidates[c].key = rank_key_of(memory_.candidates[c].position - begin_);
    sync_blocks();
    const int2 totals = totals_of_block(lane_);
    store_before(totals);
    if (warp_ < blocks_) {
      const int32_t first = __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? totals.x : 0);
      const int32_t of_block = __shfl_sync(0xFFFFFFFFu, totals.x, warp_);
      const Candidate* candidates = in_block(&memory_.candidates[0], warp_);
      for (int32_t c = lane_; c < of_block; c += 32) memory_.all_candidates[first + c] = candidates[c];
    }
    if (blocks_ > 1) cluster_arrive_own();
    __syncthreads();
    Candidate own[kOwnCandidates];
    bool exists[kOwnCandidates];
#pragma unroll
    for (int j = 0; j < kOwnCandidates; ++j) {
      exists[j] = thread_ + j * kThreads < count;
      own[j] = exists[j] ? memory_.all_candidates[thread_ + j * kThreads] : Candidate{0, 0};
    }
    // How many candidates satisfy a condition.
    const auto count_all = [&](auto condition) {
      if (count <= kThreads) return __syncthreads_count(exists[0] && condition(own[0]));
      int32_t all = 0;
#pragma unroll
      for (int j = 0; j < kOwnCandidates; ++j) all += __syncthreads_count(exists[j] && condition(own[j]));
      return all;
    };
    // The largest key that at least `wanted` candidates reach, or any that just so many reach.
    uint32_t cut = (prefix - 1) << kDigitShift;
    bool exact = count == wanted;
    if (!unlikely(count > kWarpCandidates)) {
      // By one warp, as a barrier takes longer than a look at some more candidates.
      if (warp_ == 0) search_by_warp(count, wanted, cut, exact);
      __syncthreads();
      cut = memory_.cut;
      exact = memory_.exact != 0;
    } else {
#pragma unroll 1
      for (uint32_t bit = 1u << (kDigitShift - 1); bit != 0 && !exact; bit >>= 1) {
        const int32_t reach = count_all([&](const Candidate& c) { return c.key >= (cut | bit); });
        if (reach >= wanted) cut |= bit;
        exact = reach == wanted;
      }
    }
    int32_t last = budget_.recent_begin;  // position of the last key at the cut that is selected
    if (unlikely(!exact)) {
      const int32_t left = wanted - count_all([&](const Candidate& c) { return c.key > cut; });
      last = 0;
#pragma unroll 1
      for (int32_t bit = 1 << (31 - __clz(budget_.recent_begin)); bit != 0; bit >>= 1) {
        const int32_t earlier = last | bit;
        if (count_all([&](const Candidate& c) { return c.key == cut && c.position < earlier; }) < left)
          last = earlier;
      }
    }
    int32_t before_cut = 0;
#pragma unroll
    for (int j = 0; j < kOwnCandidates; ++j) {
      const bool selected = exists[j] && (own[j].key > cut || (own[j].key == cut && own[j].position <= last));
      const int32_t i = own[j].position - begin_;
      if (selected && i >= 0 && i < length_) atomicOr(bits_ + i / 32, 1u << (i % 32));
      if (count > j * kThreads) before_cut += __syncthreads_count(selected && i < 0);
    }
    return memory_.selected_before[warp_] + before_cut;
  }

  /// The search for the cut among few candidates; leaves the result in memory.
  __device__ void search_by_warp(int32_t count, int32_t wanted, uint32_t cut, bool exact) const {
    uint32_t keys[kWarpCandidates / 32];
#pragma unroll
    for (int j = 0; j < kWarpCandidates / 32; ++j) {
      const int c = lane_ + j * 32;
      keys[j] = c < count ? memory_.all_candidates[c].key : 0;
    }
#pragma unroll 1
    for (uint32_t bit = 1u << (kDigitShift - 1); bit != 0 && !exact; bit >>= 1) {
      int32_t reach = 0;
#pragma unroll
      for (int j = 0; j < kWarpCandidates / 32; ++j) reach += keys[j] >= (cut | bit) ? 1 : 0;
      reach = __reduce_add_sync(0xFFFFFFFFu, reach);
      if (reach >= wanted) cut |= bit;
      exact = reach == wanted;
    }
    if (lane_ != 0) return;
    memory_.cut = cut;
    memory_.exact = exact ? 1 : 0;
  }

  /// The same for any number of keys: histograms of the other bits of the cut, then its ties are counted.
  __device__ int32_t cut_by_digits(uint32_t prefix, int32_t wanted) {
    uint32_t cut = (prefix - 1) << kDigitShift;
#pragma unroll 1
    for (int shift = kSecondShift, known = kDigitShift; known > 0; known = shift, shift = 0) {
      sync_blocks();  // others may still read the histogram
      clear_histogram();
      __syncthreads();
      for_each_vector([&](int32_t i, uint4 digits) {
        uint32_t at_cut = at_least(digits, prefix) & ~at_least(digits, prefix + 1);
        for (; at_cut != 0; at_cut &= at_cut - 1) {
          const uint32_t rest = rank_key_of(i + __ffs(static_cast<int>(at_cut)) - 1) ^ cut;
          if (rest >> known == 0) atomicAdd(memory_.histogram + (rest >> shift), 1);
        }
      });
      const Found found = find_bin(wanted);
      cut |= static_cast<uint32_t>(found.bin) << shift;
      wanted -= found.above;
    }
    // Keys at the cut, of a vector.
    const auto ties_of = [&](int32_t i, uint4 digits, uint32_t& bits) {
      bits = at_least(digits, prefix + 1);
      uint32_t at_cut = at_least(digits, prefix) & ~bits, ties = 0;
      for (; at_cut != 0; at_cut &= at_cut - 1) {
        const int e = __ffs(static_cast<int>(at_cut)) - 1;
        const uint32_t key = rank_key_of(i + e);
        if (key > cut) bits |= 1u << e;
        if (key == cut) ties |= 1u << e;
      }
      return ties;
    };
    int32_t above = 0, ties = 0;
    for_each_vector([&](int32_t i, uint4 digits) {
      uint32_t bits;
      ties += __popc(ties_of(i, digits, bits));
      above += __popc(bits);
      store_bits(i, bits);
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    ties = __reduce_add_sync(0xFFFFFFFFu, ties);
    if (lane_ == 0) {
      memory_.warp_sums[warp_] = above;
      memory_.warp_ties[warp_] = ties;
    }
    __syncthreads();
    if (warp_ == 0) {
      const int32_t all = sum_of_warps(memory_.warp_sums), tied = sum_of_warps(memory_.warp_ties);
      if (lane_ == 0) memory_.totals = make_int2(tied, all);
    }
    sync_blocks();
    store_before(totals_of_block(lane_));
    if (blocks_ > 1) cluster_arrive();
    __syncwarp();
    int32_t tied = memory_.ties_before[warp_];
    const int32_t before = memory_.selected_before[warp_] + min(tied, wanted);
    // Of the ties, the first `left` of this warp's stretch are selected.
    tied += __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? memory_.warp_ties[lane_] : 0);
    int32_t left = min(max(wanted - tied, 0), ties);
    if (left > 0) {
      for_each_vector([&](int32_t i, uint4 digits) {
        uint32_t bits;
        uint32_t tied_keys = ties_of(i, digits, bits);
        const int32_t own = __popc(tied_keys);
        int32_t sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
          if (lane_ >= step) sum += other;
        }
        for (int32_t mine = left - (sum - own); mine > 0 && tied_keys != 0; --mine) {
          bits |= tied_keys & (0u - tied_keys);
          tied_keys &= tied_keys - 1;
        }
        store_bits(i, bits);
        left -= __shfl_sync(0xFFFFFFFFu, sum, 31);
      });
    }
    return before;
  }

  /// Writes, ascending, every key of the block that is marked; `before` are selected in blocks before it.
  __device__ void write_selected(int32_t before) {
    __syncthreads();
    const int32_t words = (length_ + 31) / 32;
    const int32_t of_thread = (words + kThreads - 1) / kThreads;
    const int32_t first = thread_ * of_thread, last = min(first + of_thread, words);
    const auto word_at = [&](int32_t w) {
      const int32_t keys = length_ - 32 * w;
      return keys >= 32 ? bits_[w] : bits_[w] & ((1u << keys) - 1);
    };
    int32_t own = 0;
#pragma unroll 1
    for (int32_t w = first; w < last; ++w) own += __popc(word_at(w));
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane_ >= step) sum += other;
    }
    if (lane_ == 31) memory_.warp_sums[warp_] = sum;
    __syncthreads();
    before += __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? memory_.warp_sums[lane_] : 0);
    int32_t* to = positions_ + budget_.sinks + before + sum - own;
#pragma unroll 1
    for (int32_t w = first; w < last; ++w)
      for (uint32_t word = word_at(w); word != 0; word &= word - 1)
        *to++ = begin_ + 32 * w + __ffs(static_cast<int>(word)) - 1;
  }

  const DecodeCall& call_;
  const AttentionParams& p_;
  SelectMemory& memory_;
  uint16_t* cache_;
  uint32_t* bits_;
  const int32_t cached_keys_;  // that shared memory has room for
  const int rank_, thread_, lane_, warp_;
  int blocks_ = 1;
  int32_t* positions_ = nullptr;
  StepBudget budget_;
  int32_t rows_ = 0;
  int32_t begin_ = 0, length_ = 0;  // the block's keys
};

__global__ void __launch_bounds__(kThreads, 2)
    select_kernel(const __grid_constant__ DecodeCall call, int32_t cached_keys) {
  extern __shared__ __align__(16) unsigned char shared[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared);
  auto* cache = reinterpret_cast<uint16_t*>(shared + sizeof(SelectMemory));
  auto* bits = reinterpret_cast<uint32_t*>(cache + cached_keys);
  const bool cached = cached_keys > 0;
  Selector(call, memory, cached ? cache : nullptr, cached ? bits : nullptr, cached_keys).run();
}

/// Keys of a block when clusters have `cluster` blocks; whole vectors.
int64_t block_keys(const DecodeCall& call, int cluster) {
  constexpr int64_t kMultiple = kShareMultiple;
  return ((call.maxima.kv_len + cluster - 1) / cluster + kMultiple - 1) / kMultiple * kMultiple;
}

LaunchShape select_shape(const DecodeCall& call, int cluster) {
  const int64_t keys = block_keys(call, cluster);
  LaunchShape shape;
  shape.blocks = select_lists(call) * cluster;
  shape.threads = kThreads;
  // Digits, and a bit a key.
  shape.shared_bytes =
      sizeof(SelectMemory) + (keys <= kMostCachedKeys ? static_cast<size_t>(keys * 2 + keys / 8) : 0);
  shape.cluster = cluster;
  return shape;
}

}  // namespace

int64_t select_lists(const DecodeCall& call) {
  const int64_t tiles = call.params.budget.own_tile != OwnTile::kOnTop ? call.maxima.q_len : 1;
  return int64_t{call.params.batch} * tiles * call.sets;
}

// Large clusters, which need less, are not certain.
bool select_needs_rank_digits(const DecodeCall& call) { return block_keys(call, kCluster) > kMostCachedKeys; }

void launch_select(const DecodeCall& call, cudaStream_t stream) {
  const char* name = "decode_select";
  // Clusters do not fill all multiprocessors.
  const int64_t lists = select_lists(call), room = int64_t{2} * call.multiprocessors * 7 / 8;
  // Fewer blocks a list where they would not run at once anyway: what a list costs besides its keys is paid
  // less often.
  // Nor more blocks than have keys for all of their threads.
  int cluster = kCluster;
  while (cluster > 1 && (lists * cluster > room || block_keys(call, cluster) < kThreads * kVector) &&
         block_keys(call, cluster / 2) <= kPreferredKeys)
    cluster /= 2;
  LaunchShape shape = select_shape(call, cluster);
  // Large clusters for few lists, and for keys that would not fit into the shared memory of a small one.
  if ((lists * kLargeCluster <= call.multiprocessors &&
       block_keys(call, kLargeCluster) >= kThreads * kVector) ||
      select_needs_rank_digits(call)) {
    const LaunchShape large = select_shape(call, kLargeCluster);
    if (fits(name, select_kernel, large)) shape = large;
  }
  const int64_t keys = block_keys(call, shape.cluster);
  launch(name, select_kernel, shape, stream, call, static_cast<int32_t>(keys <= kMostCachedKeys ? keys : 0));
}

}  // namespace kascade::cuda
