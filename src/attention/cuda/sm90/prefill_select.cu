// SPDX-License-Identifier: Apache-2.0
// Selection of a prefill call: one block takes a tile's set from its pooled weights. The histogram made with
// the weights names the bin of the cut. One pass over the weights marks the keys above that bin, one bit
// each, and keeps those in it; these decide the cut exactly and get their marks; what is marked is written
// ascending.
#include "attention/cuda/sm90/prefill_weights.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {
namespace {

// What a set waits for most are barriers: small blocks, four to a multiprocessor.
constexpr int kThreads = 256, kWarps = kThreads / 32;
// Keys of the cut's bin that are kept; with more the weights are read again for every step of the search.
constexpr int kMostCandidates = 5632;
// Keys that a warp takes at once, and a lane in a row.
constexpr int kLaneKeys = 4, kWarpKeys = 32 * kLaneKeys;
// Runs of kWarpKeys keys that are loaded together.
constexpr int kAtOnce = 4;
// Bits of a digit of the search for the cut.
constexpr int kDigitBits = 8;
// Keys for which there is room for marks; with more, a second pass over the weights writes the members.
constexpr int64_t kMostMarks = int64_t{1} << 20;

struct alignas(16) SelectMemory {
  int32_t keys[kMostCandidates];
  int32_t positions[kMostCandidates];
  int32_t warp_sums[kWarps];
  int32_t warp_above[kWarps], warp_ties[kWarps];
  int32_t digits[kThreads];
  int32_t candidates;
  int32_t bin, wanted;  // of the cut: its bin (or digit), and how many are wanted of that bin
  int32_t in_bin;       // how many it has
};

class Selector {
 public:
  /// marks: room for a bit a key, null for more than kMostMarks keys.
  __device__ Selector(const PrefillCall& call, SelectMemory& memory, uint32_t* marks, int32_t chunk)
      : call_(call),
        p_(call.params),
        memory_(memory),
        marks_(marks),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        totals_(*call.totals),
        needed_sets_(max(totals_.needed_sets, 1)),
        slot_(static_cast<int32_t>(blockIdx.x) / needed_sets_),
        needed_(static_cast<int32_t>(blockIdx.x) % needed_sets_),
        index_(chunk * totals_.chunk_tiles + slot_) {}

  __device__ void run() {
    if (slot_ >= totals_.chunk_tiles || index_ >= totals_.tiles) return;
    const TileEntry tile = call_.tile_table[index_];
    for (int32_t set = 0, i = 0; set < call_.sets && totals_.needed_sets < call_.sets; ++set) {
      const bool needed = i < totals_.needed_sets && call_.needed_sets[i] == set;
      if (needed) {
        ++i;
      } else if (set % needed_sets_ == needed_) {
        leave_empty(int64_t{tile.set} * call_.sets + set);
      }
    }
    if (totals_.needed_sets > 0) select(tile, call_.needed_sets[needed_]);
  }

 private:
  /// A set that nobody needs.
  __device__ void leave_empty(int64_t list) {
    if (thread_ == 0) p_.counts[list] = 0;
    for (int32_t m = thread_; m < p_.capacity; m += kThreads) p_.positions[list * p_.capacity + m] = -1;
  }

  __device__ void select(const TileEntry& tile, int32_t set) {
    const int64_t list = int64_t{tile.set} * call_.sets + set;
    int32_t* positions = p_.positions + list * p_.capacity;
    const int32_t members = tile.sinks + tile.ranked + tile.candidates - tile.recent_begin;
    if (thread_ == 0) p_.counts[list] = members;
    // Sinks, recent keys and the padding.
    for (int32_t m = thread_; m < min(tile.sinks, members); m += kThreads) positions[m] = m;
    for (int32_t m = tile.sinks + tile.ranked + thread_; m < p_.capacity; m += kThreads)
      positions[m] = m < members ? tile.recent_begin + m - tile.sinks - tile.ranked : -1;
    const int64_t place = int64_t{slot_} * totals_.needed_sets + needed_;
    weights_ = call_.weights + place * call_.weight_stride;
    begin_ = tile.sinks;
    end_ = tile.recent_begin;
    positions_ = positions + tile.sinks;
    if (p_.pooled_weights != nullptr) {
      float* pooled = p_.pooled_weights + tile.set * p_.pooled_tile_stride + set * p_.pooled_head_stride;
      for (int32_t j = thread_; j < tile.candidates; j += kThreads) pooled[j] = weights_[j];
    }
    if (tile.ranked == end_ - begin_) {
      for (int32_t m = thread_; m < tile.ranked; m += kThreads) positions_[m] = begin_ + m;
    }
    int32_t* histogram = call_.histograms + place * kWeightBins;
    if (tile.ranked == 0 || tile.ranked == end_ - begin_) {
      // Counted for nothing where pooled weights are wanted.
      if (p_.pooled_weights != nullptr)
        for (int i = thread_; i < kWeightBins; i += kThreads) histogram[i] = 0;
      return;
    }
    first_ = begin_ / kLaneKeys * kLaneKeys;
    warp_share_ = ((end_ - first_ + kWarps - 1) / kWarps + kWarpKeys - 1) / kWarpKeys * kWarpKeys;
    const int32_t in_bin = find_bin(histogram, tile.ranked);
    if (in_bin <= kMostCandidates && marks_ != nullptr) {
      mark_and_keep();
      mark_from_bin();
      write_marked();
    } else {
      select_from_all();
      write();
    }
  }

  /// Leaves the bin of the cut in memory, and empties the histogram; returns how many keys the bin has.
  __device__ int32_t find_bin(int32_t* histogram, int32_t wanted) {
    // Thread t looks at some bins from the top.
    constexpr int kShare = kWeightBins / kThreads;
    static_assert(kShare % 4 == 0, "a thread reads four bins at once");
    int4* own = reinterpret_cast<int4*>(histogram + (kThreads - 1 - thread_) * kShare);
    int32_t counts[kShare], all = 0;
#pragma unroll
    for (int i = 0; i < kShare; i += 4) {
      const int4 four = own[kShare / 4 - 1 - i / 4];
      own[kShare / 4 - 1 - i / 4] = make_int4(0, 0, 0, 0);
      counts[i] = four.w;
      counts[i + 1] = four.z;
      counts[i + 2] = four.y;
      counts[i + 3] = four.x;
      all += four.x + four.y + four.z + four.w;
    }
    if (thread_ < kWarps) memory_.warp_above[thread_] = memory_.warp_ties[thread_] = 0;
    if (thread_ == 0) memory_.candidates = 0;
    int32_t above = running_sum(all) - all;
    if (above < wanted && wanted <= above + all) {
      int bin = kWeightBins - 1 - thread_ * kShare;
      int32_t in_bin = counts[0];
#pragma unroll
      for (int i = 1; i < kShare; ++i) {
        if (above + in_bin >= wanted) break;
        above += in_bin;
        in_bin = counts[i];
        --bin;
      }
      memory_.bin = bin;
      memory_.wanted = wanted - above;
      memory_.in_bin = in_bin;
    }
    __syncthreads();
    wanted_ = memory_.wanted;
    low_ = bin_begin(memory_.bin);
    high_ = memory_.bin == kWeightBins - 1 ? INT32_MAX : bin_begin(memory_.bin + 1);
    return memory_.in_bin;
  }

  /// f(position of the first, bits of the weights, mask) for kAtOnce runs of kWarpKeys keys at once, of each
  /// kLaneKeys keys in a row for every lane, and each warp over a stretch of its own; all lanes stay
  /// together. mask: a bit for each of the lane's keys that is ranked.
  template <class F>
  __device__ void for_each_runs(F f) const {
    const int32_t from = first_ + warp_ * warp_share_, to = min(from + warp_share_, end_);
#pragma unroll 1
    for (int32_t j0 = from; j0 < to; j0 += kAtOnce * kWarpKeys) {
      const int32_t j = j0 + lane_ * kLaneKeys;
      const int4* runs = reinterpret_cast<const int4*>(weights_ + j);
      int4 loaded[kAtOnce];
      if (j0 >= begin_ && j0 + kAtOnce * kWarpKeys <= to) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) loaded[i] = __ldcs(runs + i * 32);
        f(j, loaded, kAllRuns);
        continue;
      }
      uint32_t mask = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = j + i * kWarpKeys;
        loaded[i] = at < to ? runs[i * 32] : make_int4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e)
          mask |= (at + e >= begin_ && at + e < to ? 1u : 0u) << (i * kLaneKeys + e);
      }
      f(j, loaded, mask);
    }
  }
  static constexpr uint32_t kAllRuns = (1u << (kAtOnce * kLaneKeys)) - 1;
  static_assert(kLaneKeys == 4, "a run is four keys");

  /// The same, run by run.
  template <class F>
  __device__ void for_each_key(F f) const {
    for_each_runs([&](int32_t j, const int4(&runs)[kAtOnce], uint32_t mask) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) f(j + i * kWarpKeys, runs[i], mask >> (i * kLaneKeys) & 0xFu);
    });
  }

  /// The wanted-th largest of the numbers of [low, low + width) that for_each(f) calls f with, besides
  /// perhaps others; digit by digit from the top. Leaves in memory how many equal it and how many of these
  /// are wanted.
  template <class ForEach>
  __device__ int32_t search(uint32_t low, uint32_t width, int32_t wanted, ForEach for_each) {
    uint32_t base = 0;  // of the numbers that share the digits so far, from low on
    for (int left = 32 - __clz(static_cast<int>(width - 1)); left > 0;) {
      const int digit = min(left, kDigitBits), shift = left - digit;
      memory_.digits[thread_] = 0;
      __syncthreads();
      for_each([&](int32_t number) {
        const uint32_t at = static_cast<uint32_t>(number) - low;
        if (at < width && (at ^ base) >> shift >> digit == 0)
          atomicAdd(&memory_.digits[(at ^ base) >> shift], 1);
      });
      __syncthreads();
      // Thread t looks at one digit, from the top.
      const int32_t own = memory_.digits[kThreads - 1 - thread_], sum = running_sum(own);
      if (sum - own < wanted && wanted <= sum) {
        memory_.bin = kThreads - 1 - thread_;
        memory_.wanted = wanted - (sum - own);
        memory_.in_bin = own;
      }
      __syncthreads();
      base |= static_cast<uint32_t>(memory_.bin) << shift;
      wanted = memory_.wanted;
      left = shift;
    }
    return static_cast<int32_t>(low + base);
  }
  static_assert(kThreads == 1 << kDigitBits, "a thread looks at one digit");

  /// Sum of x over the threads up to this one; all threads call it.
  __device__ int32_t running_sum(int32_t x) {
    x = sum_up_to(x, lane_);
    if (lane_ == 31) memory_.warp_sums[warp_] = x;
    __syncthreads();
    return x + __reduce_add_sync(kFullWarp, lane_ < warp_ ? memory_.warp_sums[lane_] : 0);
  }

  // A run's marks are kLaneKeys words, the e-th with the bits of the lanes' e-th keys.

  /// Marks keys above the cut's bin, and keeps those in it.
  __device__ void mark_and_keep() {
    const uint32_t low = static_cast<uint32_t>(low_), width = static_cast<uint32_t>(high_) - low;
    const int32_t to = min(first_ + (warp_ + 1) * warp_share_, end_);
    for_each_runs([&](int32_t j, const int4(&runs)[kAtOnce], uint32_t mask) {
      uint32_t inside = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t keys[kLaneKeys] = {runs[i].x, runs[i].y, runs[i].z, runs[i].w};
        uint32_t words[kLaneKeys];
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) {
          const int bit = i * kLaneKeys + e;
          const bool ranked = (mask >> bit & 1u) != 0;
          words[e] = __ballot_sync(kFullWarp, ranked && keys[e] >= high_);
          inside |= (ranked && static_cast<uint32_t>(keys[e]) - low < width ? 1u : 0u) << bit;
        }
        const int32_t run = j + i * kWarpKeys;
        if (lane_ == 0 && run < to)
          *reinterpret_cast<uint4*>(marks_ + (run - first_) / kWarpKeys * kLaneKeys) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
      const int32_t count = __popc(inside);
      const int32_t sum = sum_up_to(count, lane_);
      int32_t slot = 0;
      if (lane_ == 31 && sum > 0) slot = atomicAdd(&memory_.candidates, sum);
      slot = __shfl_sync(kFullWarp, slot, 31) + sum - count;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t keys[kLaneKeys] = {runs[i].x, runs[i].y, runs[i].z, runs[i].w};
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) {
          if ((inside >> (i * kLaneKeys + e) & 1u) == 0) continue;
          memory_.keys[slot] = keys[e];
          memory_.positions[slot++] = j + i * kWarpKeys + e;
        }
      }
    });
    __syncthreads();
  }

  /// Marks the members among the keys of the cut's bin: those above the cut and the first of those that tie
  /// with it.
  __device__ void mark_from_bin() {
    const int32_t candidates = memory_.candidates;
    cut_ = search(static_cast<uint32_t>(low_), static_cast<uint32_t>(high_) - static_cast<uint32_t>(low_),
                  wanted_, [&](auto f) {
                    for (int32_t i = thread_; i < candidates; i += kThreads) f(memory_.keys[i]);
                  });
    const int32_t ties = memory_.in_bin, wanted = memory_.wanted;
    __syncthreads();
    int32_t last_tie = end_;
    if (wanted < ties)  // from the end, so that the largest are the first
      last_tie = end_ - 1 - search(0, static_cast<uint32_t>(end_ - begin_), wanted, [&](auto f) {
                   for (int32_t i = thread_; i < candidates; i += kThreads)
                     if (memory_.keys[i] == cut_) f(end_ - 1 - memory_.positions[i]);
                 });
    for (int32_t i = thread_; i < candidates; i += kThreads) {
      const int32_t key = memory_.keys[i], position = memory_.positions[i];
      if (key < cut_ || (key == cut_ && position > last_tie)) continue;
      const int32_t at = position - first_;
      atomicOr(marks_ + at / kWarpKeys * kLaneKeys + at % kLaneKeys, 1u << (at % kWarpKeys / kLaneKeys));
    }
    __syncthreads();
  }

  __device__ static int32_t ones(const uint4& words) {
    return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
  }

  /// Writes what is marked.
  __device__ void write_marked() {
    const int32_t from = warp_ * warp_share_ / kWarpKeys;
    const int32_t runs =
        max((min(warp_share_, end_ - first_ - warp_ * warp_share_) + kWarpKeys - 1) / kWarpKeys, 0);
    const uint4* marks = reinterpret_cast<const uint4*>(marks_) + from;
    int32_t members = 0;
    for (int32_t run = lane_; run < runs; run += 32) members += ones(marks[run]);
    members = __reduce_add_sync(kFullWarp, members);
    if (lane_ == 0) memory_.warp_above[warp_] = members;
    __syncthreads();
    int32_t next = __reduce_add_sync(kFullWarp, lane_ < warp_ ? memory_.warp_above[lane_] : 0);
    const uint32_t before = (1u << lane_) - 1;
#pragma unroll 1
    for (int32_t run = 0; run < runs; run += 32) {
      const int32_t own = run + lane_ < runs ? ones(marks[run + lane_]) : 0, sum = sum_up_to(own, lane_);
      const int32_t begin = next + sum - own;
      next += __shfl_sync(kFullWarp, sum, 31);
#pragma unroll 4
      for (int i = 0; i < min(32, runs - run); ++i) {
        const uint4 words = marks[run + i];
        int32_t to = __shfl_sync(kFullWarp, begin, i) +
                     ones(make_uint4(words.x & before, words.y & before, words.z & before, words.w & before));
        const uint32_t each[kLaneKeys] = {words.x, words.y, words.z, words.w};
        const int32_t j = first_ + (from + run + i) * kWarpKeys + lane_ * kLaneKeys;
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e)
          if ((each[e] >> lane_ & 1u) != 0) positions_[to++] = j + e;
      }
    }
  }

  __device__ void select_from_all() {
    const uint32_t low = static_cast<uint32_t>(low_), width = static_cast<uint32_t>(high_) - low;
    cut_ = search(low, width, wanted_, [&](auto f) {
      for_each_key([&](int32_t, const int4& run, uint32_t mask) {
        const int32_t keys[kLaneKeys] = {run.x, run.y, run.z, run.w};
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e)
          if ((mask >> e & 1u) != 0) f(keys[e]);
      });
    });
    int32_t above = 0, ties = 0;
    for_each_key([&](int32_t, const int4& run, uint32_t mask) {
      const int32_t keys[kLaneKeys] = {run.x, run.y, run.z, run.w};
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        if ((mask >> e & 1u) == 0) continue;
        above += keys[e] > cut_ ? 1 : 0;
        ties += keys[e] == cut_ ? 1 : 0;
      }
    });
    above = __reduce_add_sync(kFullWarp, above);
    ties = __reduce_add_sync(kFullWarp, ties);
    if (lane_ == 0) {
      memory_.warp_above[warp_] = above;
      memory_.warp_ties[warp_] = ties;
    }
    __syncthreads();
  }

  /// Writes every key above the cut and the first of those that tie with it.
  __device__ void write() {
    const int32_t above = lane_ < kWarps ? memory_.warp_above[lane_] : 0;
    const int32_t ties = lane_ < kWarps ? memory_.warp_ties[lane_] : 0;
    const int32_t above_all = __reduce_add_sync(kFullWarp, above), members = call_.tile_table[index_].ranked;
    int32_t ties_left = members - above_all - __reduce_add_sync(kFullWarp, lane_ < warp_ ? ties : 0);
    const int32_t above_before = __reduce_add_sync(kFullWarp, lane_ < warp_ ? above : 0);
    // Ties of the warps before that were taken are those wanted less those left, if any are left.
    int32_t next = above_before + (members - above_all - max(ties_left, 0));
    const bool all_ties = ties_left >= memory_.warp_ties[warp_];
    for_each_key([&](int32_t j, const int4& run, uint32_t mask) {
      const int32_t keys[kLaneKeys] = {run.x, run.y, run.z, run.w};
      uint32_t takes = 0;
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) takes |= (keys[e] >= cut_ ? 1u : 0u) << e;
      takes &= mask;
      if (!all_ties) {
        uint32_t tied = 0;
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) tied |= (keys[e] == cut_ ? 1u : 0u) << e;
        tied &= mask;
        int32_t before = exclusive_sum(__popc(tied));
        const int32_t all = __shfl_sync(kFullWarp, before + __popc(tied), 31);
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) {
          if ((tied >> e & 1u) == 0) continue;
          if (before >= ties_left) takes &= ~(1u << e);
          ++before;
        }
        ties_left -= all;
      }
      const int32_t count = __popc(takes), before = exclusive_sum(count);
      int32_t to = next + before;
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e)
        if ((takes >> e & 1u) != 0) positions_[to++] = j + e;
      next += __shfl_sync(kFullWarp, before + count, 31);
    });
  }

  /// Sum of the counts (0..4) of the lanes before this one.
  __device__ int32_t exclusive_sum(int32_t count) const {
    const uint32_t before = (1u << lane_) - 1;
    return __popc(__ballot_sync(kFullWarp, (count & 1) != 0) & before) +
           2 * __popc(__ballot_sync(kFullWarp, (count & 2) != 0) & before) +
           4 * __popc(__ballot_sync(kFullWarp, (count & 4) != 0) & before);
  }

  const PrefillCall& call_;
  const AttentionParams& p_;
  SelectMemory& memory_;
  uint32_t* const marks_;  // of keys from first_ on
  const int thread_, lane_, warp_;
  const PrefillTotals& totals_;
  const int32_t needed_sets_;  // 1 if there are none
  const int32_t slot_, needed_, index_;
  const float* weights_ = nullptr;
  int32_t* positions_ = nullptr;  // of ranked members
  int32_t begin_ = 0, end_ = 0;   // ranked keys
  int32_t first_ = 0;             // where the first warp's stretch begins, a multiple of kLaneKeys
  int32_t warp_share_ = 0;
  int32_t low_ = 0, high_ = 0, wanted_ = 0;  // bits of the cut's bin, and how many are wanted of them
  int32_t cut_ = 0;
};

__global__ void __launch_bounds__(kThreads, 4)
    prefill_select_kernel(const __grid_constant__ PrefillCall call, int32_t chunk) {
  extern __shared__ __align__(16) unsigned char shared[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared);
  uint32_t* marks =
      call.weight_stride <= kMostMarks ? reinterpret_cast<uint32_t*>(shared + sizeof(SelectMemory)) : nullptr;
  wait_for_previous_kernel();
  allow_next_kernel();
  Selector(call, memory, marks, chunk).run();
}

}  // namespace

void launch_prefill_select(const PrefillCall& call, int32_t chunk, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = int64_t{call.chunk_tiles} * call.sets;
  shape.threads = kThreads;
  shape.shared_bytes = sizeof(SelectMemory) +
                       (call.weight_stride <= kMostMarks ? static_cast<size_t>(call.weight_stride) / 8 : 0);
  launch("prefill_select", prefill_select_kernel, shape, stream, call, chunk);
}

}  // namespace kascade::cuda
