// SPDX-License-Identifier: Apache-2.0
// Selection of a decode call: pooled weights from the stored scores, exact top-k, ascending list. One cluster
// of blocks per index set; each block owns a range of the keys and the blocks add up histograms and exchange
// the keys at the cut through distributed shared memory.
#include <algorithm>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/launch.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/ptx/cluster.cuh"
#include "attention/cuda/ptx/mma.cuh"

namespace kascade::cuda {
namespace {

// Blocks of a cluster, powers of two: as few as is useful, as many as any GPU of this generation takes, and
// as many as most do.
constexpr int kSmallCluster = 2;
constexpr int kCluster = 8;
constexpr int kLargeCluster = 16;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps <= 32, "a lane stands for a warp in sums over warps");
static_assert(kLargeCluster <= kWarps, "a warp reads one other block's keys");
// Neighbouring keys that a thread takes at once, twice as many when it weighs them.
constexpr int kVector = 4;
// Rank keys have 31 bits. The first histogram has a bin for each value of the upper 16 bits (weights that
// agree to 1/256) in a window of 16 powers of two below the largest cut possible; it is moved in the rare
// case that the cut lies elsewhere. Keys that share the cut's bin are few and are ranked one against another;
// if they are too many, histograms of 12 and 3 further bits decide.
constexpr int kBins = 4096;
constexpr int kBinsPerThread = kBins / kThreads;
static_assert(kBinsPerThread == 8);
constexpr int kFirstShift = 15, kSecondShift = 3;
constexpr int kMostCandidates = 512;
static_assert(kMostCandidates <= kThreads, "a thread ranks one candidate");
// Marks keys of the range that are not ranked; larger than any rank key.
constexpr uint32_t kNotRanked = 0x80000000u;
// Rank keys of a block that its shared memory has room for; those of longer ranges lie in the workspace.
constexpr int kMostCachedKeys = 46 * 1024;
// Keys of a block of which two fit into a multiprocessor.
constexpr int kPreferredKeys = 16 * 1024 + kChunkKeys;

struct Candidate {
  uint32_t key;
  int32_t position;
};

/// Where the wanted-th largest key is: its bin, the keys above that bin, and those in it.
struct Found {
  int32_t bin, above, count;
};

struct alignas(16) SelectMemory {
  union {
    alignas(16) int32_t histogram[kBins];       // of this block's keys; read by the others
    Candidate all_candidates[kMostCandidates];  // of the cluster, once the histograms are done
  };
  alignas(16) int32_t totals[kBins / kSmallCluster];  // of this block's share of the bins, over the cluster
  Candidate candidates[kMostCandidates];              // of this block; read by the others
  float lse[kMaxPooledRows];                          // log2
  int64_t row[kMaxPooledRows];                        // where the row's scores begin
  int32_t warp_selected[kWarps], warp_ties[kWarps];
  int32_t warp_sums[kWarps];
  int32_t candidate_count, block_selected, block_ties;  // read by the others
  Found found;
  Candidate cut;
};

/// Orders weights (never negative) as the ranking does, NaN lowest.
__device__ uint32_t rank_key(float weight) { return weight != weight ? 0 : __float_as_uint(weight) + 1; }

class Selector {
 public:
  __device__ Selector(const DecodeCall& call, SelectMemory& memory, uint32_t* cache, int32_t cached_keys)
      : call_(call),
        p_(call.params),
        memory_(memory),
        cache_(cache),
        cached_keys_(cached_keys),
        blocks_(cluster_size()),
        rank_(cluster_rank()),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  __device__ void run() {
    const int32_t index = static_cast<int32_t>(blockIdx.x) / blocks_;
    const int32_t tiles = rows_are_tiles(call_) ? static_cast<int32_t>(call_.maxima.q_len) : 1;
    const int32_t set = index % call_.sets;
    const int32_t b = index / call_.sets / tiles;
    const StepSequence s = load_sequence(call_, b);
    const StepTile tile = load_tile(call_, s, b, index / call_.sets % tiles);
    const bool needed = is_needed(call_, set);
    // What fits into one block needs no other: lists shorter than the maxima leave room for more lists at
    // once.
    if (tile.budget.recent_begin <= cached_keys_) {
      if (rank_ != 0) return;
      blocks_ = 1;
    }
    const int64_t list = tile.set * call_.sets + set;
    positions_ = p_.positions + list * p_.capacity;
    budget_ = tile.budget;
    const bool ranks = needed && budget_.ranked > 0 && budget_.ranked < budget_.recent_begin - budget_.sinks;
    if (ranks) clear_histogram();
    if (thread_ == 0) memory_.candidate_count = 0;
    // All that is above comes from the caller's arrays.
    wait_for_previous_kernel();
    allow_next_kernel();
    if (tile.set < 0) return;
    if (!needed) {
      budget_.sinks = budget_.ranked = 0;
      budget_.recent_begin = budget_.candidates;
    }
    if (rank_ == 0 && thread_ == 0) p_.counts[list] = needed ? static_cast<int32_t>(budget_.members()) : 0;
    if (needed) {
      const int32_t set_heads = p_.query_heads / call_.sets;
      rows_ = tile.rows * set_heads;
      merge_lse(s, tile, set, set_heads);
      write_by_products(s, tile, set, list);
    }
    write_forced(ranks);
    if (cache_ == nullptr) cache_ = call_.rank_keys + index * call_.score_stride + rank_ * share();
    if (ranks) rank_and_write();
  }

 private:
  __device__ void sync_blocks() const {
    if (blocks_ > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  }

  __device__ void clear_histogram() {
    for (int i = thread_; i < kBins; i += kThreads) memory_.histogram[i] = 0;
  }

  /// Keys of a block.
  __device__ int32_t share() const {
    return divide_up(divide_up(static_cast<int32_t>(budget_.recent_begin), blocks_), kChunkKeys) * kChunkKeys;
  }

  /// Log-sum-exp (log2) of the pooled rows over all keys they see, from the partial results of the score
  /// pass.
  __device__ void merge_lse(const StepSequence& s, const StepTile& tile, int32_t set, int32_t set_heads) {
    const int32_t splits = split_count(call_.dense_rule, s.kv_len);
    for (int32_t i = warp_; i < rows_; i += kWarps) {
      const int32_t row =
          (s.row_begin + tile.row_begin + i / set_heads) * p_.query_heads + set * set_heads + i % set_heads;
      const float2* stats = call_.partial_stats + int64_t{row} * call_.dense_splits;
      const RowStats row_stats = merge_stats(stats, splits);
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

  /// Of one key, from its memory alone; not inlined, as only by-products want it.
  static __device__ __noinline__ float weight(const DecodeCall& call, const SelectMemory& memory,
                                              int32_t rows, int32_t key) {
    float sum = 0;
    for (int32_t i = 0; i < rows; ++i) {
      const uint64_t at = static_cast<uint64_t>(memory.row[i] + key);
      sum += weight_of(call.score_codes[at], call.score_tops[at / kChunkKeys] - memory.lse[i]);
    }
    return sum;
  }

  /// Weights of keys [key, key + 8); key is a multiple of 8.
  __device__ void weights(int32_t key, float (&sum)[2 * kVector]) const {
#pragma unroll
    for (int e = 0; e < 2 * kVector; ++e) sum[e] = 0;
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

  __device__ void write_by_products(const StepSequence& s, const StepTile& tile, int32_t set,
                                    int64_t list) const {
    if (p_.pooled_weights != nullptr) {
      float* pooled = p_.pooled_weights + tile.set * p_.pooled_tile_stride + set * p_.pooled_head_stride;
      for (int32_t j = rank_ * kThreads + thread_; j < budget_.candidates; j += blocks_ * kThreads)
        pooled[j] = weight(call_, memory_, rows_, j);
    }
    if (p_.own_tile_mass != nullptr && rank_ == 0 && thread_ == 0) {
      float mass = 0;
      for (int32_t j = static_cast<int32_t>(budget_.candidates); j < s.kv_len; ++j)
        mass += weight(call_, memory_, rows_, j);
      p_.own_tile_mass[list] = mass;
    }
  }

  /// Sinks, recent keys and the padding; and the ranked keys, when they are all.
  __device__ void write_forced(bool ranks) const {
    const int32_t sinks = static_cast<int32_t>(budget_.sinks), ranked = static_cast<int32_t>(budget_.ranked);
    const int32_t members = static_cast<int32_t>(budget_.members());
    const int32_t recent_begin = static_cast<int32_t>(budget_.recent_begin);
    const int32_t first = rank_ * kThreads + thread_, step = blocks_ * kThreads;
    const int32_t leading = ranks ? sinks : sinks + ranked;
    for (int32_t m = first; m < leading; m += step) positions_[m] = m;
    for (int32_t m = sinks + ranked + first; m < p_.capacity; m += step)
      positions_[m] = m < members ? recent_begin + m - sinks - ranked : -1;
  }

  __device__ void rank_and_write() {
    const int32_t end = static_cast<int32_t>(budget_.recent_begin);
    begin_ = min(rank_ * share(), end);
    length_ = min(begin_ + share(), end) - begin_;
    warp_share_ = divide_up(divide_up(length_, kWarps), 32 * kVector) * 32 * kVector;

    const int32_t ranked = static_cast<int32_t>(budget_.ranked);
    // The wanted-th largest weight is at most the mean of those above it.
    const uint32_t largest = rank_key(1.01f * static_cast<float>(rows_) / static_cast<float>(ranked));
    int32_t base = max(static_cast<int32_t>(largest >> kFirstShift) - (kBins - 2), 0);
    weigh(base);
    Found found = find_bin(ranked);
    while ((found.bin == 0 && base > 0) ||
           (found.bin == kBins - 1 &&
            base + kBins - 1 < static_cast<int32_t>((kNotRanked - 1) >> kFirstShift))) {
      base = max(found.bin == 0 ? base - (kBins - 2) : base + (kBins - 2), 0);
      clear_histogram();
      __syncthreads();
      for_each_key([&](int32_t, const uint32_t(&keys)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) count_first(keys[e], base);
      });
      found = find_bin(ranked);
    }
    const uint32_t prefix = static_cast<uint32_t>(base + found.bin);
    int32_t before;  // selected keys of the blocks before this one
    if (found.count <= kMostCandidates) {
      before = cut_by_rank(prefix, found.count, ranked - found.above);
    } else {
      before = cut_by_digits(prefix << kFirstShift, ranked - found.above);
    }
    write_selected(before);
    if (blocks_ > 1) cluster_wait();  // no block leaves while others read its memory
  }

  /// Weighs the block's keys once: into the cache and the first histogram.
  __device__ void weigh(int32_t base) {
    const int32_t sinks = static_cast<int32_t>(budget_.sinks) - begin_;
    __syncthreads();
#pragma unroll 1
    for (int32_t i = thread_ * 2 * kVector; i < length_; i += kThreads * 2 * kVector) {
      float sum[2 * kVector];
      weights(begin_ + i, sum);
      uint32_t keys[2 * kVector];
#pragma unroll
      for (int e = 0; e < 2 * kVector; ++e) {
        keys[e] = i + e >= sinks && i + e < length_ ? rank_key(sum[e]) : kNotRanked;
        count_first(keys[e], base);
      }
      *reinterpret_cast<uint4*>(cache_ + i) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
      *reinterpret_cast<uint4*>(cache_ + i + 4) = make_uint4(keys[4], keys[5], keys[6], keys[7]);
    }
  }

  /// Bin 0 is left out: it may hold most keys, which would wait for each other.
  __device__ void count_first(uint32_t key, int32_t base) {
    const int32_t bin = min(static_cast<int32_t>(key >> kFirstShift) - base, kBins - 1);
    if (bin > 0 && key < kNotRanked) atomicAdd(memory_.histogram + bin, 1);
  }

  /// Rank keys of the block's keys i .. i + kVector - 1, before `last`; i is a multiple of kVector.
  __device__ void load_keys(int32_t i, int32_t last, uint32_t (&keys)[kVector]) const {
    const uint4 four = i < last ? *reinterpret_cast<const uint4*>(cache_ + i)
                                : make_uint4(kNotRanked, kNotRanked, kNotRanked, kNotRanked);
    keys[0] = four.x;
    keys[1] = four.y;
    keys[2] = four.z;
    keys[3] = four.w;
  }

  /// f(i, keys) for every run of kVector keys, each warp over a stretch of its own; all lanes stay together.
  template <class F>
  __device__ void for_each_key(F f) const {
    const int32_t first = warp_ * warp_share_, last = min(first + warp_share_, length_);
#pragma unroll 1
    for (int32_t i = first + lane_ * kVector; i - lane_ * kVector < last; i += 32 * kVector) {
      uint32_t keys[kVector];
      load_keys(i, last, keys);
      f(i, keys);
    }
  }

  /// Adds up the blocks' histograms and finds the bin of the wanted-th largest key. Keys that are in no bin
  /// count as bin 0.
  __device__ Found find_bin(int32_t wanted) {
    const int32_t share = kBins / blocks_, share_shift = 31 - __clz(share);  // a power of two
    sync_blocks();
    const int lowest = kBins - (thread_ + 1) * kBinsPerThread;
    const int32_t* own_totals = memory_.histogram + lowest;
    if (blocks_ > 1) {
      for (int bin = thread_; bin < share; bin += kThreads) {
        int32_t total = 0;
#pragma unroll 8
        for (int block = 0; block < blocks_; ++block)
          total += in_block(&memory_.histogram[0], block)[rank_ * share + bin];
        memory_.totals[bin] = total;
      }
      cluster_sync();
      own_totals = in_block(&memory_.totals[0], lowest >> share_shift) + (lowest & (share - 1));
    }
    // Thread t looks at the bins from the top: [t * kBinsPerThread, (t + 1) * kBinsPerThread).
    const int4* totals = reinterpret_cast<const int4*>(own_totals);
    const int4 low = totals[0], high = totals[1];
    const int32_t counts[kBinsPerThread] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) own += counts[i];
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane_ >= step) sum += other;
    }
    if (lane_ == 31) memory_.warp_sums[warp_] = sum;
    __syncthreads();
    const int32_t of_warps = lane_ < warp_ ? memory_.warp_sums[lane_] : 0;
    int32_t above = __reduce_add_sync(0xFFFFFFFFu, of_warps) + sum - own;
    if (above < wanted && wanted <= above + own) {
      int bin = lowest + kBinsPerThread - 1;
      int32_t count = counts[0];
#pragma unroll
      for (int i = 1; i < kBinsPerThread; ++i) {
        if (above + count >= wanted) break;
        above += count;
        count = counts[i];
        --bin;
      }
      memory_.found = {bin, above, count};
    } else if (thread_ == kThreads - 1 && wanted > above + own) {
      memory_.found = {0, above + own, INT32_MAX};
    }
    __syncthreads();
    return memory_.found;
  }

  /// The cut, when `count` keys of the cluster share its first digit: the wanted-th of them in the order of
  /// the ranking. Returns how many keys the blocks before this one select, and counts those of each warp's
  /// stretch.
  __device__ int32_t cut_by_rank(uint32_t prefix, int32_t count, int32_t wanted) {
    int32_t above = 0;
    for_each_key([&](int32_t i, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const uint32_t digit = keys[e] >> kFirstShift;
        above += digit > prefix && keys[e] < kNotRanked ? 1 : 0;
        if (digit == prefix)
          memory_.candidates[atomicAdd(&memory_.candidate_count, 1)] = {keys[e], begin_ + i + e};
      }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    if (lane_ == 0) memory_.warp_selected[warp_] = above;
    __syncthreads();
    if (warp_ == 0) {
      const int32_t all = __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? memory_.warp_selected[lane_] : 0);
      if (lane_ == 0) memory_.block_selected = all;
    }
    sync_blocks();
    int32_t before = lane_ < rank_ ? *in_block(&memory_.block_selected, lane_) : 0;
    before = __reduce_add_sync(0xFFFFFFFFu, before);
    const int32_t counts = lane_ < blocks_ ? *in_block(&memory_.candidate_count, lane_) : 0;
    if (warp_ < blocks_) {
      const int32_t first = __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? counts : 0);
      const int32_t of_block = __shfl_sync(0xFFFFFFFFu, counts, warp_);
      const Candidate* candidates = in_block(&memory_.candidates[0], warp_);
      for (int32_t c = lane_; c < of_block; c += 32) memory_.all_candidates[first + c] = candidates[c];
    }
    if (blocks_ > 1) cluster_arrive();
    __syncthreads();
    // Few candidates are each compared by several lanes.
    const int lanes = count <= kThreads / 8 ? 8 : count <= kThreads / 2 ? 2 : 1;
    const int32_t mine = thread_ / lanes;
    int32_t larger = 0;
    if (mine < count) {
      const Candidate own = memory_.all_candidates[mine];
#pragma unroll 4
      for (int32_t c = thread_ % lanes; c < count; c += lanes)
        larger += precedes(memory_.all_candidates[c], own) ? 1 : 0;
    }
    for (int step = lanes / 2; step > 0; step /= 2) larger += __shfl_xor_sync(0xFFFFFFFFu, larger, step);
    if (mine < count && thread_ % lanes == 0 && larger == wanted - 1)
      memory_.cut = memory_.all_candidates[mine];
    const Candidate own = thread_ < count ? memory_.all_candidates[thread_] : Candidate{0, 0};
    __syncthreads();
    const bool selected = thread_ < count && is_selected(own.key, own.position, memory_.cut);
    if (selected && own.position >= begin_ && own.position < begin_ + length_)
      atomicAdd(&memory_.warp_selected[(own.position - begin_) / warp_share_], 1);
    return before + __syncthreads_count(selected && own.position < begin_ ? 1 : 0);
  }

  __device__ static bool precedes(const Candidate& a, const Candidate& b) {
    return a.key > b.key || (a.key == b.key && a.position < b.position);
  }
  __device__ static bool is_selected(uint32_t key, int32_t position, const Candidate& cut) {
    return (key > cut.key && key < kNotRanked) || (key == cut.key && position <= cut.position);
  }

  /// The same for any number of keys: histograms of the other digits of the cut, then its ties are counted.
  __device__ int32_t cut_by_digits(uint32_t cut, int32_t wanted) {
#pragma unroll 1
    for (int shift = kSecondShift, known = kFirstShift; known > 0; known = shift, shift = 0) {
      clear_histogram();
      __syncthreads();
      for_each_key([&](int32_t, const uint32_t(&keys)[kVector]) {
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          if ((keys[e] ^ cut) >> known == 0) atomicAdd(memory_.histogram + ((keys[e] ^ cut) >> shift), 1);
      });
      const Found found = find_bin(wanted);
      cut |= static_cast<uint32_t>(found.bin) << shift;
      wanted -= found.above;
    }
    int32_t above = 0, ties = 0;
    for_each_key([&](int32_t, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        above += keys[e] > cut && keys[e] < kNotRanked ? 1 : 0;
        ties += keys[e] == cut ? 1 : 0;
      }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    ties = __reduce_add_sync(0xFFFFFFFFu, ties);
    if (lane_ == 0) {
      memory_.warp_selected[warp_] = above;
      memory_.warp_ties[warp_] = ties;
    }
    __syncthreads();
    if (warp_ == 0) {
      const int32_t all = __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? memory_.warp_selected[lane_] : 0);
      const int32_t tied = __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? memory_.warp_ties[lane_] : 0);
      if (lane_ == 0) {
        memory_.block_selected = all;
        memory_.block_ties = tied;
        memory_.cut = {cut, -1};
      }
    }
    sync_blocks();
    int32_t before = lane_ < rank_ ? *in_block(&memory_.block_selected, lane_) : 0;
    int32_t tied = lane_ < rank_ ? *in_block(&memory_.block_ties, lane_) : 0;
    if (blocks_ > 1) cluster_arrive();
    before = __reduce_add_sync(0xFFFFFFFFu, before);
    tied = __reduce_add_sync(0xFFFFFFFFu, tied);
    before += min(tied, wanted);
    // Of the ties, the first `left` of this warp's stretch are selected.
    tied += __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? memory_.warp_ties[lane_] : 0);
    const int32_t left = min(max(wanted - tied, 0), ties);
    if (left == 0) return finish_ties(before);
    if (lane_ == 0) memory_.warp_selected[warp_] += left;
    int32_t seen = 0;
    for_each_key([&](int32_t i, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        // In the order of the lanes only for one element at a time, so ties are counted by ranges of lanes.
        int32_t up_to = 0;
#pragma unroll
        for (int other = 0; other < kVector; ++other) {
          const unsigned tied_lanes = __ballot_sync(0xFFFFFFFFu, keys[other] == cut);
          const unsigned before_lane = (1u << lane_) - 1;
          up_to += __popc(tied_lanes & (other <= e ? before_lane | 1u << lane_ : before_lane));
        }
        if (keys[e] == cut && seen + up_to == left) atomicMax(&memory_.cut.position, begin_ + i + e);
      }
      int32_t all = 0;
#pragma unroll
      for (int e = 0; e < kVector; ++e) all += __popc(__ballot_sync(0xFFFFFFFFu, keys[e] == cut));
      seen += all;
    });
    return finish_ties(before);
  }

  __device__ int32_t finish_ties(int32_t before) {
    __syncthreads();
    return before;
  }

  /// Writes, ascending, every selected key of the block; `before` are selected in other blocks before it.
  __device__ void write_selected(int32_t before) {
    const Candidate cut = memory_.cut;
    before += __reduce_add_sync(0xFFFFFFFFu, lane_ < warp_ ? memory_.warp_selected[lane_] : 0);
    int32_t* positions = positions_ + budget_.sinks;
    constexpr int kRounds = 4;  // runs of 32 vectors whose counts a lane adds up at a time, eight bits each
    static_assert(32 * kVector <= 255);
    const int32_t first = warp_ * warp_share_, last = min(first + warp_share_, length_);
#pragma unroll 1
    for (int32_t run = first; run < last; run += kRounds * 32 * kVector) {
      uint32_t selected = 0, own = 0;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int32_t i = run + (r * 32 + lane_) * kVector;
        uint32_t keys[kVector];
        load_keys(i, last, keys);
        uint32_t bits = 0;
#pragma unroll
        for (int e = 0; e < kVector; ++e) bits |= is_selected(keys[e], begin_ + i + e, cut) ? 1u << e : 0u;
        selected |= bits << (r * kVector);
        own |= static_cast<uint32_t>(__popc(bits)) << (8 * r);
      }
      uint32_t sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane_ >= step) sum += other;
      }
      const uint32_t all = __shfl_sync(0xFFFFFFFFu, sum, 31);
      sum -= own;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        int32_t* to = positions + before + (sum >> (8 * r) & 0xFFu);
        const int32_t position = begin_ + run + (r * 32 + lane_) * kVector;
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          if ((selected >> (r * kVector + e) & 1u) != 0) *to++ = position + e;
        before += static_cast<int32_t>(all >> (8 * r) & 0xFFu);
      }
    }
  }

  const DecodeCall& call_;
  const AttentionParams& p_;
  SelectMemory& memory_;
  uint32_t* cache_;            // rank keys of the block: shared memory, or null until the workspace serves
  const int32_t cached_keys_;  // that shared memory has room for
  int blocks_;
  const int rank_, thread_, lane_, warp_;
  int32_t* positions_ = nullptr;
  SetBudget budget_;
  int32_t rows_ = 0;
  int32_t begin_ = 0, length_ = 0;  // the block's keys
  int32_t warp_share_ = 0;          // how many of them each warp takes
};

__global__ void __launch_bounds__(kThreads, 2)
    select_kernel(const __grid_constant__ DecodeCall call, int32_t cached_keys) {
  extern __shared__ __align__(16) unsigned char shared[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared);
  auto* cache = reinterpret_cast<uint32_t*>(shared + sizeof(SelectMemory));
  Selector(call, memory, cached_keys > 0 ? cache : nullptr, cached_keys).run();
}

/// Rank keys of a block when clusters have `cluster` blocks; whole vectors of both kinds.
int64_t block_keys(const DecodeCall& call, int cluster) {
  constexpr int64_t kMultiple = kChunkKeys;
  static_assert(kMultiple % (2 * kVector) == 0);
  return ((call.maxima.kv_len + cluster - 1) / cluster + kMultiple - 1) / kMultiple * kMultiple;
}

LaunchShape select_shape(const DecodeCall& call, int cluster) {
  const int64_t keys = block_keys(call, cluster);
  LaunchShape shape;
  shape.blocks = select_lists(call) * cluster;
  shape.threads = kThreads;
  shape.shared_bytes =
      sizeof(SelectMemory) + (keys <= kMostCachedKeys ? static_cast<size_t>(keys) * sizeof(uint32_t) : 0);
  shape.cluster = cluster;
  return shape;
}

}  // namespace

int64_t select_lists(const DecodeCall& call) {
  const int64_t tiles = call.params.budget.own_tile != OwnTile::kOnTop ? call.maxima.q_len : 1;
  return int64_t{call.params.batch} * tiles * call.sets;
}

// Large clusters, which need less, are not certain.
bool select_needs_rank_keys(const DecodeCall& call) { return block_keys(call, kCluster) > kMostCachedKeys; }

void launch_select(const DecodeCall& call, cudaStream_t stream) {
  const char* name = "decode_select";
  const int64_t lists = select_lists(call), room = int64_t{2} * call.multiprocessors;
  // Fewer blocks a list where they would not run at once anyway: what a list costs besides its keys is paid
  // less often.
  int cluster = kCluster;
  while (cluster > kSmallCluster && lists * cluster > room && block_keys(call, cluster / 2) <= kPreferredKeys)
    cluster /= 2;
  LaunchShape shape = select_shape(call, cluster);
  // Large clusters for few lists, and for keys that would not fit into the shared memory of a small one.
  if (lists * kLargeCluster <= call.multiprocessors || select_needs_rank_keys(call)) {
    const LaunchShape large = select_shape(call, kLargeCluster);
    if (fits(name, select_kernel, large)) shape = large;
  }
  const int64_t keys = block_keys(call, shape.cluster);
  launch(name, select_kernel, shape, stream, call, static_cast<int32_t>(keys <= kMostCachedKeys ? keys : 0));
}

}  // namespace kascade::cuda
