// SPDX-License-Identifier: Apache-2.0
// Selection of a decode call: pooled weights from the stored scores, exact top-k, ascending list. One cluster
// of blocks per index set; each block owns a range of the keys and the blocks share histograms through
// distributed shared memory.
#include <cooperative_groups.h>

#include <algorithm>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/launch.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/ptx/mma.cuh"

namespace kascade::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kCluster = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps <= 32, "a lane stands for a warp in sums over warps");
constexpr int kVector =
    4;  // neighbouring keys that a thread takes at once, twice as many when it weighs them
// Rank keys are 31 bits, cut into digits of 11, 10 and 10.
__host__ __device__ constexpr int digit_bits(int pass) { return pass == 0 ? 11 : 10; }
__host__ __device__ constexpr int digit_shift(int pass) { return 20 - 10 * pass; }
// Histograms lie apart by this; a few words more than the bins, so that equal bins of two copies lie in other
// banks.
constexpr int kHistogramStride = (1 << 11) + 8;
// First digits are counted in four copies, a quarter of the lanes each: weights crowd in few bins, and lanes
// that meet in one wait for each other. Once added up, the second and third copy hold the other digits'
// histograms.
constexpr int kCopies = 4;
__host__ __device__ constexpr int first_bin(int pass) { return pass * kHistogramStride; }
// Marks keys of the range that are not ranked; matches no prefix and counts as above no cut.
constexpr uint32_t kNotRanked = 0x80000000u;
// Rank keys kept in shared memory; ranges longer than this are weighed again in every pass.
constexpr int kMostCachedKeys = 44 * 1024;
// Keys that share the first digit of the cut, kept apart so that later passes read only them; more are not
// kept.
constexpr int kMostCandidates = 1024;

struct alignas(16) SelectMemory {
  alignas(16) int32_t histogram[kCopies * kHistogramStride];
  alignas(16) int32_t
      totals[(1 << 11) / kCluster];  // of this block's share of the bins, over the cluster; others read it
  int32_t candidates[kMostCandidates];
  float lse[kMaxPooledRows];    // log2
  int64_t row[kMaxPooledRows];  // where the row's scores begin
  int32_t warp_above[kWarps], warp_ties[kWarps];
  int32_t warp_sums[kWarps];
  int32_t candidate_count;
  int32_t block_above, block_ties;  // read by the other blocks of the cluster
  uint32_t digit;
  int32_t wanted;
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
        cluster_(cg::this_cluster()),
        rank_(static_cast<int>(cluster_.block_rank())),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32) {}

  __device__ void run() {
    const int32_t index = static_cast<int32_t>(blockIdx.x) / kCluster;
    const int32_t tiles = rows_are_tiles(call_) ? static_cast<int32_t>(call_.maxima.q_len) : 1;
    const int32_t set = index % call_.sets;
    const int32_t b = index / call_.sets / tiles;
    const StepSequence s = load_sequence(call_, b);
    const StepTile tile = load_tile(call_, s, b, index / call_.sets % tiles);
    if (tile.set < 0) return;
    const int64_t list = tile.set * call_.sets + set;
    positions_ = p_.positions + list * p_.capacity;
    budget_ = tile.budget;
    if (!is_needed(call_, set)) {
      budget_.sinks = budget_.ranked = 0;
      budget_.recent_begin = budget_.candidates;
      write_forced();
      if (rank_ == 0 && thread_ == 0) p_.counts[list] = 0;
      return;
    }
    const int32_t set_heads = p_.query_heads / call_.sets;
    rows_ = tile.rows * set_heads;
    merge_lse(s, tile, set, set_heads);
    write_by_products(s, tile, set, list);
    write_forced();
    if (rank_ == 0 && thread_ == 0) p_.counts[list] = static_cast<int32_t>(budget_.members());
    rank_and_write();
  }

 private:
  /// Log-sum-exp (log2) of the pooled rows over all keys they see, from the partial results of the score
  /// pass.
  __device__ void merge_lse(const StepSequence& s, const StepTile& tile, int32_t set, int32_t set_heads) {
    const int32_t splits = divide_up(s.kv_len, call_.dense_split);
    for (int32_t i = warp_; i < rows_; i += kWarps) {
      const int32_t row =
          (s.row_begin + tile.row_begin + i / set_heads) * p_.query_heads + set * set_heads + i % set_heads;
      const float2* stats = call_.partial_stats + int64_t{row} * call_.dense_splits;
      const RowStats row_stats = merge_stats(stats, splits);
      if (lane_ != 0) continue;
      memory_.lse[i] = row_stats.top + log2f(row_stats.total);
      memory_.row[i] = row * call_.score_stride;
    }
    __syncthreads();
  }

  __device__ static float weight_of(uint32_t code, float offset) {
    // 2^23 + code as a float, without the slow integer conversion.
    const float distance = __uint_as_float(0x4B000000u | code) - 8388608.0f;
    return code == kScoreFarBelow ? 0 : exp2_fast(fmaf(distance, -1.0f / kScoreSteps, offset));
  }

  __device__ float weight(int32_t key) const {
    float sum = 0;
    for (int32_t i = 0; i < rows_; ++i) {
      const uint64_t at = static_cast<uint64_t>(memory_.row[i] + key);
      sum += weight_of(call_.score_codes[at], call_.score_tops[at / kChunkKeys] - memory_.lse[i]);
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
      for (int32_t j = rank_ * kThreads + thread_; j < budget_.candidates; j += kCluster * kThreads)
        pooled[j] = weight(j);
    }
    if (p_.own_tile_mass != nullptr && rank_ == 0 && thread_ == 0) {
      float mass = 0;
      for (int32_t j = static_cast<int32_t>(budget_.candidates); j < s.kv_len; ++j) mass += weight(j);
      p_.own_tile_mass[list] = mass;
    }
  }

  /// Sinks, recent keys and the padding.
  __device__ void write_forced() const {
    const int32_t sinks = static_cast<int32_t>(budget_.sinks), ranked = static_cast<int32_t>(budget_.ranked);
    const int32_t members = static_cast<int32_t>(budget_.members());
    const int32_t recent_begin = static_cast<int32_t>(budget_.recent_begin);
    const int32_t first = rank_ * kThreads + thread_;
    for (int32_t m = first; m < sinks; m += kCluster * kThreads) positions_[m] = m;
    for (int32_t m = sinks + ranked + first; m < p_.capacity; m += kCluster * kThreads)
      positions_[m] = m < members ? recent_begin + m - sinks - ranked : -1;
  }

  /// Rank key of the block's key begin_ + i.
  __device__ uint32_t key_at(int32_t i) const {
    if (i < cached_keys_) return cache_[i];
    const int32_t j = begin_ + i;
    return j >= budget_.sinks && j < budget_.recent_begin ? rank_key(weight(j)) : kNotRanked;
  }

  __device__ void rank_and_write() {
    const int32_t end = static_cast<int32_t>(budget_.recent_begin);
    const int32_t share = divide_up(divide_up(end, kCluster), kChunkKeys) * kChunkKeys;
    begin_ = min(rank_ * share, end);
    length_ = min(begin_ + share, end) - begin_;
    warp_share_ = divide_up(divide_up(length_, kWarps), 32 * kVector) * 32 * kVector;
    for (int i = thread_; i < kCopies * kHistogramStride; i += kThreads) memory_.histogram[i] = 0;
    if (thread_ == 0) memory_.candidate_count = 0;
    __syncthreads();
    weigh();
    uint32_t cut = 0;
    int32_t wanted = static_cast<int32_t>(budget_.ranked);
    if (wanted == 0 || wanted == budget_.recent_begin - budget_.sinks) {
      // None, or all: NaN (rank key 0) included.
      cut = wanted == 0 ? kNotRanked - 1 : 0;
      __syncthreads();
      count_all(cut);
    } else {
      add_copies();
      find_digit(0, cut, wanted);
      collect_candidates(cut);
      find_digit(1, cut, wanted);
      count_last_digits(cut);
      find_digit(2, cut, wanted);
      if (memory_.candidate_count <= kMostCandidates) {
        count_candidates(cut);
      } else {
        count_all(cut);
      }
    }
    write_ranked(cut, wanted);
  }

  /// Weighs the block's keys once: into the cache, and the first digits into the histogram.
  __device__ void weigh() {
    const int32_t sinks = static_cast<int32_t>(budget_.sinks) - begin_;
    int32_t* histogram = memory_.histogram + lane_ % kCopies * kHistogramStride;
    for (int32_t i = thread_ * 2 * kVector; i < length_; i += kThreads * 2 * kVector) {
      float sum[2 * kVector];
      weights(begin_ + i, sum);
      uint32_t keys[2 * kVector];
#pragma unroll
      for (int e = 0; e < 2 * kVector; ++e) {
        const bool ranked = i + e >= sinks && i + e < length_;
        keys[e] = ranked ? rank_key(sum[e]) : kNotRanked;
        if (ranked) atomicAdd(histogram + (keys[e] >> digit_shift(0)), 1);
      }
      if (i + 2 * kVector > cached_keys_) continue;
      *reinterpret_cast<uint4*>(cache_ + i) = make_uint4(keys[0], keys[1], keys[2], keys[3]);
      *reinterpret_cast<uint4*>(cache_ + i + 4) = make_uint4(keys[4], keys[5], keys[6], keys[7]);
    }
  }

  /// Adds the copies of the first histogram into one and clears the others.
  __device__ void add_copies() {
    __syncthreads();
    for (int bin = thread_; bin < 1 << digit_bits(0); bin += kThreads) {
      int32_t sum = memory_.histogram[bin];
#pragma unroll
      for (int copy = 1; copy < kCopies; ++copy) {
        sum += memory_.histogram[copy * kHistogramStride + bin];
        memory_.histogram[copy * kHistogramStride + bin] = 0;
      }
      memory_.histogram[bin] = sum;
    }
  }

  /// Rank keys of the block's keys i .. i + kVector - 1; i is a multiple of kVector.
  __device__ void load_keys(int32_t i, int32_t last, uint32_t (&keys)[kVector]) const {
    if (i + kVector <= min(cached_keys_, last)) {
      const uint4 four = *reinterpret_cast<const uint4*>(cache_ + i);
      keys[0] = four.x;
      keys[1] = four.y;
      keys[2] = four.z;
      keys[3] = four.w;
      return;
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) keys[e] = i + e < last ? key_at(i + e) : kNotRanked;
  }

  /// f(i, keys) for every run of kVector keys, each warp over a stretch of its own; all lanes stay together.
  template <class F>
  __device__ void for_each_key(F f) const {
    const int32_t first = warp_ * warp_share_, last = min(first + warp_share_, length_);
    for (int32_t i = first + lane_ * kVector; i - lane_ * kVector < last; i += 32 * kVector) {
      uint32_t keys[kVector];
      load_keys(i, last, keys);
      f(i, keys);
    }
  }

  __device__ static bool is_above(uint32_t key, uint32_t cut) { return key > cut && key < kNotRanked; }

  /// Counts the second digits of the keys whose first digit is the cut's, and keeps those keys; counts the
  /// keys above.
  __device__ void collect_candidates(uint32_t cut) {
    int32_t above = 0;
    for_each_key([&](int32_t i, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const uint32_t below = keys[e] ^ cut;
        if (below >> digit_shift(0) == 0) {
          atomicAdd(&memory_.histogram[first_bin(1) + (below >> digit_shift(1))], 1);
          const int32_t slot = atomicAdd(&memory_.candidate_count, 1);
          if (slot < kMostCandidates) memory_.candidates[slot] = i + e;
        } else if (is_above(keys[e], cut)) {
          ++above;
        }
      }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    if (lane_ != 0) return;
    memory_.warp_above[warp_] = above;
    memory_.warp_ties[warp_] = 0;
  }

  __device__ void count_last_digit(uint32_t key, uint32_t cut) {
    const uint32_t below = key ^ cut;
    if (below >> digit_shift(1) == 0) atomicAdd(&memory_.histogram[first_bin(2) + below], 1);
  }
  __device__ void count_last_digits(uint32_t cut) {
    if (memory_.candidate_count <= kMostCandidates) {
      for (int32_t c = thread_; c < memory_.candidate_count; c += kThreads)
        count_last_digit(key_at(memory_.candidates[c]), cut);
      return;
    }
    for_each_key([&](int32_t, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) count_last_digit(keys[e], cut);
    });
  }

  /// Adds the candidates to the keys of each warp's stretch that are above the cut, or tie with it.
  __device__ void count_candidates(uint32_t cut) {
    for (int32_t c = thread_; c < memory_.candidate_count; c += kThreads) {
      const int32_t i = memory_.candidates[c];
      const uint32_t key = key_at(i);
      if (key > cut) atomicAdd(&memory_.warp_above[i / warp_share_], 1);
      if (key == cut) atomicAdd(&memory_.warp_ties[i / warp_share_], 1);
    }
  }

  /// The same from all keys.
  __device__ void count_all(uint32_t cut) {
    int32_t above = 0, ties = 0;
    for_each_key([&](int32_t, const uint32_t(&keys)[kVector]) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        above += is_above(keys[e], cut) ? 1 : 0;
        ties += keys[e] == cut ? 1 : 0;
      }
    });
    above = __reduce_add_sync(0xFFFFFFFFu, above);
    ties = __reduce_add_sync(0xFFFFFFFFu, ties);
    if (lane_ != 0) return;
    memory_.warp_above[warp_] = above;
    memory_.warp_ties[warp_] = ties;
  }

  /// Appends to cut the digit of the wanted-th largest key, and leaves in wanted how many keys are wanted
  /// among those that have it.
  __device__ void find_digit(int pass, uint32_t& cut, int32_t& wanted) {
    // Every block adds up its eighth of the bins for all: reading all histograms in every block would take
    // four times the traffic.
    const int bins = 1 << digit_bits(pass), own_bins = bins / kCluster;
    cluster_.sync();
    if (thread_ < own_bins) {
      int32_t total = 0;
#pragma unroll
      for (int block = 0; block < kCluster; ++block)
        total += cluster_.map_shared_rank(&memory_.histogram[0],
                                          block)[first_bin(pass) + rank_ * own_bins + thread_];
      memory_.totals[thread_] = total;
    }
    cluster_.sync();
    // Thread t looks at the bins from the top: [t * share, (t + 1) * share).
    const int share = bins / kThreads, lowest = bins - (thread_ + 1) * share;
    const int32_t* totals =
        cluster_.map_shared_rank(&memory_.totals[0], lowest / own_bins) + lowest % own_bins;
    int32_t counts[4] = {}, own = 0;
    if (pass == 0) {
      const int4 four = *reinterpret_cast<const int4*>(totals);
      counts[0] = four.w;
      counts[1] = four.z;
      counts[2] = four.y;
      counts[3] = four.x;
    } else {
      const int2 two = *reinterpret_cast<const int2*>(totals);
      counts[0] = two.y;
      counts[1] = two.x;
    }
    own = counts[0] + counts[1] + counts[2] + counts[3];
    int32_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
      if (lane_ >= step) sum += other;
    }
    if (lane_ == 31) memory_.warp_sums[warp_] = sum;
    __syncthreads();
    int32_t before = lane_ < warp_ ? memory_.warp_sums[lane_] : 0;
    before = __reduce_add_sync(0xFFFFFFFFu, before);
    int32_t above = before + sum - own;
    if (above < wanted && wanted <= above + own) {
      int bin = bins - 1 - thread_ * share;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (above + counts[i] >= wanted) break;
        above += counts[i];
        --bin;
      }
      memory_.digit = static_cast<uint32_t>(bin);
      memory_.wanted = wanted - above;
    }
    __syncthreads();
    cut |= memory_.digit << digit_shift(pass);
    wanted = memory_.wanted;
  }

  /// Writes, ascending, every key above the cut and the first `ties` of those that tie with it.
  __device__ void write_ranked(uint32_t cut, int32_t ties) {
    __syncthreads();
    if (warp_ == 0) {
      const int32_t above = __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? memory_.warp_above[lane_] : 0);
      const int32_t tied = __reduce_add_sync(0xFFFFFFFFu, lane_ < kWarps ? memory_.warp_ties[lane_] : 0);
      if (lane_ == 0) {
        memory_.block_above = above;
        memory_.block_ties = tied;
      }
    }
    cluster_.sync();
    // Keys of the blocks and warps before this one.
    int32_t above_before = 0, tied_before = 0;
    if (lane_ < rank_) {
      above_before = *cluster_.map_shared_rank(&memory_.block_above, lane_);
      tied_before = *cluster_.map_shared_rank(&memory_.block_ties, lane_);
    }
    // No block may leave while others still read its memory.
    cluster_.sync();
    if (lane_ < warp_) {
      above_before += memory_.warp_above[lane_];
      tied_before += memory_.warp_ties[lane_];
    }
    above_before = __reduce_add_sync(0xFFFFFFFFu, above_before);
    tied_before = __reduce_add_sync(0xFFFFFFFFu, tied_before);
    int32_t* positions = positions_ + budget_.sinks;
    for_each_key([&](int32_t i, const uint32_t(&keys)[kVector]) {
      // Counts of keys above (low half) and tied (high half) up to and including this lane's; at most 128
      // each.
      uint32_t own = 0;
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        own += (is_above(keys[e], cut) ? 1u : 0u) + (keys[e] == cut ? 1u << 16 : 0u);
      uint32_t sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane_ >= step) sum += other;
      }
      const uint32_t all = __shfl_sync(0xFFFFFFFFu, sum, 31);
      int32_t above = above_before + static_cast<int32_t>((sum - own) & 0xFFFFu);
      int32_t tied = tied_before + static_cast<int32_t>((sum - own) >> 16);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const bool takes_tie = keys[e] == cut && tied < ties;
        if (is_above(keys[e], cut) || takes_tie) positions[above + min(tied, ties)] = begin_ + i + e;
        above += is_above(keys[e], cut) ? 1 : 0;
        tied += keys[e] == cut ? 1 : 0;
      }
      above_before += static_cast<int32_t>(all & 0xFFFFu);
      tied_before += static_cast<int32_t>(all >> 16);
    });
  }

  const DecodeCall& call_;
  const AttentionParams& p_;
  SelectMemory& memory_;
  uint32_t* const cache_;
  const int32_t cached_keys_;
  cg::cluster_group cluster_;
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
  wait_for_previous_kernel();
  allow_next_kernel();
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared);
  Selector(call, memory, reinterpret_cast<uint32_t*>(shared + sizeof(SelectMemory)), cached_keys).run();
}

}  // namespace

void launch_select(const DecodeCall& call, cudaStream_t stream) {
  const int64_t share = (call.maxima.kv_len + kCluster - 1) / kCluster + kChunkKeys;
  const int32_t cached_keys = static_cast<int32_t>(
      std::min<int64_t>((share + 2 * kVector - 1) / (2 * kVector) * (2 * kVector), kMostCachedKeys));
  LaunchShape shape;
  const int64_t tiles = call.params.budget.own_tile != OwnTile::kOnTop ? call.maxima.q_len : 1;
  shape.blocks = int64_t{call.params.batch} * tiles * call.sets * kCluster;
  shape.threads = kThreads;
  shape.shared_bytes = sizeof(SelectMemory) + static_cast<size_t>(cached_keys) * sizeof(uint32_t);
  shape.cluster = kCluster;
  launch("decode_select", select_kernel, shape, stream, call, cached_keys);
}

}  // namespace kascade::cuda
