// SPDX-License-Identifier: Apache-2.0
// Selection of a prefill call: one block takes a tile's set from its pooled weights. The histogram made with
// the weights names the bin of the cut; the keys in that bin decide the cut exactly; a last pass writes
// members ascending.
#include "attention/cuda/sm90/prefill_weights.cuh"
#include "base/cuda/launch.h"

namespace kascade::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
// Keys of the cut's bin that are kept; with more the weights are read again for every step of the search.
constexpr int kMostCandidates = 5632;
// Keys that a warp takes at once, and a lane in a row.
constexpr int kLaneKeys = 4, kWarpKeys = 32 * kLaneKeys;
// Bits of a digit of the search for the cut.
constexpr int kDigitBits = 9;

struct SelectMemory {
  int32_t keys[kMostCandidates];
  int32_t positions[kMostCandidates];
  int32_t warp_sums[kWarps];
  int32_t warp_above[kWarps], warp_ties[kWarps];
  int32_t digits[kThreads];
  int32_t candidates;
  int32_t bin, wanted;  // of the cut: its bin, and how many are wanted of that bin
  int32_t last_tie;
};

class Selector {
 public:
  __device__ Selector(const PrefillCall& call, SelectMemory& memory, int32_t chunk)
      : call_(call),
        p_(call.params),
        memory_(memory),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        slot_(static_cast<int32_t>(blockIdx.x) / call.sets),
        set_(static_cast<int32_t>(blockIdx.x) % call.sets),
        index_(chunk * call.chunk_tiles + slot_) {}

  __device__ void run() {
    if (index_ >= call_.totals->tiles) return;
    const TileEntry tile = call_.tile_table[index_];
    const int64_t list = int64_t{tile.set} * call_.sets + set_;
    int32_t* positions = p_.positions + list * p_.capacity;
    bool needed = false;
    for (int32_t i = 0; i < call_.totals->needed_sets; ++i) needed |= call_.needed_sets[i] == set_;
    const int32_t recent = tile.candidates - tile.recent_begin;
    const int32_t members = needed ? tile.sinks + tile.ranked + recent : 0;
    if (thread_ == 0) p_.counts[list] = members;
    // Sinks, recent keys and the padding.
    for (int32_t m = thread_; m < min(tile.sinks, members); m += kThreads) positions[m] = m;
    for (int32_t m = (needed ? tile.sinks + tile.ranked : 0) + thread_; m < p_.capacity; m += kThreads)
      positions[m] = m < members ? tile.recent_begin + m - tile.sinks - tile.ranked : -1;
    if (!needed) return;
    const int64_t slot_set = int64_t{slot_} * call_.sets + set_;
    weights_ = call_.weights + slot_set * call_.weight_stride;
    begin_ = tile.sinks;
    end_ = tile.recent_begin;
    positions_ = positions + tile.sinks;
    if (p_.pooled_weights != nullptr) {
      float* pooled = p_.pooled_weights + tile.set * p_.pooled_tile_stride + set_ * p_.pooled_head_stride;
      for (int32_t j = thread_; j < tile.candidates; j += kThreads) pooled[j] = weights_[j];
    }
    if (tile.ranked == end_ - begin_) {
      for (int32_t m = thread_; m < tile.ranked; m += kThreads) positions_[m] = begin_ + m;
    }
    int32_t* histogram = call_.histograms + slot_set * kWeightBins;
    if (tile.ranked == 0 || tile.ranked == end_ - begin_) {
      // Counted for nothing where pooled weights are wanted.
      if (p_.pooled_weights != nullptr)
        for (int i = thread_; i < kWeightBins; i += kThreads) histogram[i] = 0;
      return;
    }
    first_ = begin_ / kLaneKeys * kLaneKeys;
    warp_share_ = ((end_ - first_ + kWarps - 1) / kWarps + kWarpKeys - 1) / kWarpKeys * kWarpKeys;
    const int32_t in_bin = find_bin(histogram, tile.ranked);
    if (in_bin <= kMostCandidates) {
      select_from_bin();
    } else {
      select_from_all();
    }
    write();
  }

 private:
  /// Leaves the bin of the cut in memory, and empties the histogram; returns how many keys the bin has.
  __device__ int32_t find_bin(int32_t* histogram, int32_t wanted) {
    constexpr int kShare = kWeightBins / kThreads;
    static_assert(kShare == 4, "a thread reads four bins at once");
    // Thread t looks at the bins from the top.
    int4* own = reinterpret_cast<int4*>(histogram) + (kThreads - 1 - thread_);
    const int4 four = *own;
    *own = make_int4(0, 0, 0, 0);
    const int32_t counts[4] = {four.w, four.z, four.y, four.x};
    const int32_t all = counts[0] + counts[1] + counts[2] + counts[3];
    if (thread_ < kWarps) memory_.warp_above[thread_] = memory_.warp_ties[thread_] = 0;
    if (thread_ == 0) memory_.candidates = 0;
    int32_t above = running_sum(all) - all;
    if (above < wanted && wanted <= above + all) {
      int bin = kWeightBins - 1 - thread_ * kShare, i = 0;
#pragma unroll
      for (; i < kShare - 1; ++i) {
        if (above + counts[i] >= wanted) break;
        above += counts[i];
      }
      memory_.bin = bin - i;
      memory_.wanted = wanted - above;
      memory_.last_tie = i == 0 ? counts[0] : i == 1 ? counts[1] : i == 2 ? counts[2] : counts[3];
    }
    __syncthreads();
    wanted_ = memory_.wanted;
    low_ = bin_begin(memory_.bin);
    high_ = memory_.bin == kWeightBins - 1 ? INT32_MAX : bin_begin(memory_.bin + 1);
    return memory_.last_tie;
  }

  /// f(position of the first, bits of the weights, mask) for runs of kLaneKeys keys, each warp over a stretch
  /// of its own; all lanes stay together. mask: a bit for each key of the run that is ranked.
  template <class F>
  __device__ void for_each_key(F f) const {
    constexpr int kAtOnce = 4;
    const int32_t from = first_ + warp_ * warp_share_, to = min(from + warp_share_, end_);
#pragma unroll 1
    for (int32_t j0 = from; j0 < to; j0 += kAtOnce * kWarpKeys) {
      const int32_t j = j0 + lane_ * kLaneKeys;
      const int4* runs = reinterpret_cast<const int4*>(weights_ + j);
      int4 loaded[kAtOnce];
      if (j0 >= begin_ && j0 + kAtOnce * kWarpKeys <= to) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) loaded[i] = runs[i * 32];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) f(j + i * kWarpKeys, loaded[i], 0xFu);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = j + i * kWarpKeys;
        loaded[i] = at < to ? runs[i * 32] : make_int4(0, 0, 0, 0);
        uint32_t mask = 0;
#pragma unroll
        for (int e = 0; e < kLaneKeys; ++e) mask |= (at + e >= begin_ && at + e < to ? 1u : 0u) << e;
        f(at, loaded[i], mask);
      }
    }
  }
  static_assert(kLaneKeys == 4, "a run is four keys");

  /// The bits of the wanted_-th largest key of the bin, digit by digit from the top; for_each(f) calls f with
  /// the bits of every key of the bin, and perhaps others.
  template <class ForEach>
  __device__ int32_t search(ForEach for_each) {
    const uint32_t low = static_cast<uint32_t>(low_), width = static_cast<uint32_t>(high_) - low;
    uint32_t base = 0;  // of the keys that share the digits so far, from low on
    int32_t wanted = wanted_;
    for (int left = 32 - __clz(static_cast<int>(width - 1)); left > 0;) {
      const int digit = min(left, kDigitBits), shift = left - digit;
      memory_.digits[thread_] = 0;
      __syncthreads();
      for_each([&](int32_t key) {
        const uint32_t at = static_cast<uint32_t>(key) - low;
        if (at < width && (at ^ base) >> shift >> digit == 0)
          atomicAdd(&memory_.digits[(at ^ base) >> shift], 1);
      });
      __syncthreads();
      // Thread t looks at one digit, from the top.
      const int32_t own = memory_.digits[kThreads - 1 - thread_], sum = running_sum(own);
      if (sum - own < wanted && wanted <= sum) {
        memory_.bin = kThreads - 1 - thread_;
        memory_.wanted = wanted - (sum - own);
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
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, x, step);
      if (lane_ >= step) x += other;
    }
    if (lane_ == 31) memory_.warp_sums[warp_] = x;
    __syncthreads();
    return x + __reduce_add_sync(kFullWarp, lane_ < warp_ ? memory_.warp_sums[lane_] : 0);
  }

  __device__ void select_from_bin() {
    int32_t above = 0;
    const uint32_t width = static_cast<uint32_t>(high_) - static_cast<uint32_t>(low_);
    for_each_key([&](int32_t j, const int4& run, uint32_t mask) {
      const int32_t keys[kLaneKeys] = {run.x, run.y, run.z, run.w};
      uint32_t over = 0, inside = 0;
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        over |= (keys[e] >= high_ ? 1u : 0u) << e;
        inside |= (static_cast<uint32_t>(keys[e]) - static_cast<uint32_t>(low_) < width ? 1u : 0u) << e;
      }
      above += __popc(over & mask);
      inside &= mask;
      if (!__any_sync(kFullWarp, inside != 0)) return;
      const int32_t count = __popc(inside), before = exclusive_sum(count);
      int32_t slot = 0;
      if (lane_ == 31) slot = atomicAdd(&memory_.candidates, before + count);
      slot = __shfl_sync(kFullWarp, slot, 31) + before;
#pragma unroll
      for (int e = 0; e < kLaneKeys; ++e) {
        if ((inside >> e & 1u) == 0) continue;
        memory_.keys[slot] = keys[e];
        memory_.positions[slot++] = j + e;
      }
    });
    above = __reduce_add_sync(kFullWarp, above);
    if (lane_ == 0) atomicAdd(&memory_.warp_above[warp_], above);
    __syncthreads();
    const int32_t candidates = memory_.candidates;
    cut_ = search([&](auto f) {
      for (int32_t i = thread_; i < candidates; i += kThreads) f(memory_.keys[i]);
    });
    for (int32_t i = thread_; i < candidates; i += kThreads) {
      const int32_t key = memory_.keys[i], warp = (memory_.positions[i] - first_) / warp_share_;
      if (key > cut_) atomicAdd(&memory_.warp_above[warp], 1);
      if (key == cut_) atomicAdd(&memory_.warp_ties[warp], 1);
    }
    __syncthreads();
  }

  __device__ void select_from_all() {
    cut_ = search([&](auto f) {
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
  const int thread_, lane_, warp_;
  const int32_t slot_, set_, index_;
  const float* weights_ = nullptr;
  int32_t* positions_ = nullptr;  // of ranked members
  int32_t begin_ = 0, end_ = 0;   // ranked keys
  int32_t first_ = 0;             // where the first warp's stretch begins, a multiple of kLaneKeys
  int32_t warp_share_ = 0;
  int32_t low_ = 0, high_ = 0, wanted_ = 0;  // bits of the cut's bin, and how many are wanted of them
  int32_t cut_ = 0;
};

__global__ void __launch_bounds__(kThreads, 2)
    prefill_select_kernel(const __grid_constant__ PrefillCall call, int32_t chunk) {
  __shared__ SelectMemory memory;
  wait_for_previous_kernel();
  allow_next_kernel();
  Selector(call, memory, chunk).run();
}

}  // namespace

void launch_prefill_select(const PrefillCall& call, int32_t chunk, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = int64_t{call.chunk_tiles} * call.sets;
  shape.threads = kThreads;
  launch("prefill_select", prefill_select_kernel, shape, stream, call, chunk);
}

}  // namespace kascade::cuda
