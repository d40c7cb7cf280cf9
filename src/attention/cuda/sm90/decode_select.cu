// SPDX-License-Identifier: Apache-2.0
// Selection of a decode call: pooled weights from the stored scores, exact top-k, ascending list. One cluster
// of blocks per index set; each block owns a range of the keys and the blocks add up histograms and exchange
// the keys at the cut through distributed shared memory.
#include <algorithm>

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/decode_cut.cuh"
#include "attention/cuda/sm90/decode_histogram.cuh"
#include "attention/cuda/sm90/decode_select.cuh"
#include "attention/cuda/sm90/decode_weigh.cuh"
#include "base/cuda/launch.h"
#include "base/cuda/parts.h"
#include "base/cuda/ptx/async_copy.cuh"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {
namespace {

// Keys of a block are a multiple of this, whole words of bits.
constexpr int kShareMultiple = 32;
constexpr int kSecondShift = 1;
static_assert(1 << (kDigitShift - kSecondShift) <= kBins);
// Digits of a block that its shared memory has room for; those of longer ranges lie in the workspace.
constexpr int kMostCachedKeys = 84 * 1024;
// Keys of a block, if there are no more, are kept whole beside their digits, so that those at the cut need
// not be weighed again; two blocks still fit into a multiprocessor.
constexpr int kMostWholeKeys = 11 * 1024;
// Keys of a block of which two fit into a multiprocessor.
constexpr int kPreferredKeys = 32 * 1024 + kChunkKeys;

/// For code that few calls come to, which had better lie apart: calls of a few microseconds wait for every
/// stretch of instructions that they come to.
__device__ inline bool unlikely(bool condition) { return __builtin_expect(condition, 0) != 0; }

template <int kThreads>
class Selector {
  static constexpr int kWarps = kThreads / 32;

 public:
  __device__ Selector(const DecodeCall& call, SelectMemory& memory, const BlockKeys& keys)
      : call_(call), p_(call.params), memory_(memory), keys_(keys), rank_(cluster_rank()) {}

  /// cached_keys: that shared memory has room for.
  __device__ void run(int32_t cached_keys) {
    const Place at;
    clear_histogram<kThreads>(memory_);
    // By one warp: what every warp computes, all of them wait for.
    if (at.warp == 0) find_list(cached_keys);
    __syncthreads();
    const SelectList& list = memory_.list;
    const StepBudget& budget = list.budget;
    if (rank_ >= list.blocks) return;
    const bool ranks = list.has_place && list.is_needed && budget.ranked > 0 &&
                       budget.ranked < budget.recent_begin - budget.sinks;
    if (list.has_place && list.is_needed) find_rows();
    if (unlikely(keys_.digits == nullptr)) find_keys();
    __syncthreads();
    // All that is above comes from the caller's arrays.
    wait_for_previous_kernel();
    allow_next_kernel();
    if (unlikely(!list.has_place)) return;
    if (rank_ == 0 && at.thread == 0) p_.counts[list.index] = list.is_needed ? budget.members() : 0;
    if (list.is_needed) {
      if (ranks) touch_scores();
      merge_lse();
      if (unlikely(p_.pooled_weights != nullptr || p_.own_tile_mass != nullptr))
        write_rarely(call_, memory_, keys_);
    }
    if (ranks) rank_and_write();
    write_forced(ranks);
    // No block leaves while others read its memory.
    if (ranks && memory_.list.blocks > 1) cluster_wait();
  }

 private:
  __device__ void find_list(int32_t cached_keys) {
    const Place at;
    const int32_t cluster = cluster_size(), index = cluster_index();
    const int32_t tiles = rows_are_tiles(call_) ? static_cast<int32_t>(call_.maxima.q_len) : 1;
    SelectList list;
    list.set = index % call_.sets;
    const int32_t tile_index = index / call_.sets;
    list.sequence = tiles == 1 ? tile_index : tile_index / tiles;
    touch_lengths(list.sequence);
    const StepSequence s = load_sequence(call_, list.sequence);
    const StepTile tile = load_tile(call_, s, list.sequence, tile_index - list.sequence * tiles);
    list.index = int64_t{tile.set} * call_.sets + list.set;
    list.budget = tile.budget;
    list.kv_len = s.kv_len;
    list.row_begin = s.row_begin + tile.row_begin;
    list.has_place = tile.set >= 0;
    list.is_needed = is_needed(call_, list.set);
    // What fits into one block needs no other: lists shorter than the maxima leave room for more lists at
    // once.
    list.blocks = list.budget.recent_begin <= cached_keys ? 1 : cluster;
    const int blocks_shift = 31 - __clz(list.blocks);  // a power of two
    const int32_t end = list.budget.recent_begin;
    const int32_t share =
        (((end + list.blocks - 1) >> blocks_shift) + kShareMultiple - 1) / kShareMultiple * kShareMultiple;
    list.begin = min(rank_ * share, end);
    list.length = min(list.begin + share, end) - list.begin;
    list.pooled = tile.rows * (p_.query_heads / call_.sets);
    if (!list.is_needed) {
      list.budget.sinks = list.budget.ranked = 0;
      list.budget.recent_begin = list.budget.candidates;
    }
    if (at.lane < kBinDigits) memory_.digit_counts[at.lane] = 0;
    if (at.lane != 0) return;
    memory_.list = list;
    memory_.totals = make_int2(0, 0);
  }

  /// Brings what is known of a sequence into the first-level cache, all of it at once; where it is used, one
  /// load waits for the other.
  __device__ void touch_lengths(int32_t sequence) const {
    touch(p_.cu_seqlens_q + sequence);
    touch(p_.seq_lens_kv + sequence);
    touch(p_.tile_offsets + sequence);
    if (p_.budget_lens != nullptr) touch(p_.budget_lens + sequence);
  }

  __device__ int32_t* positions() const { return p_.positions + memory_.list.index * p_.capacity; }

  /// Log-sum-exp (log2) of the pooled rows over all keys they see, from the partial results of the score
  /// pass.
  __device__ void merge_lse() {
    const Place at;
    const SelectList& list = memory_.list;
    const int32_t splits = split_count(call_.dense_rule, list.kv_len);
    const bool by_groups =
        cut_units(call_.dense_rule, splits, list.sequence, p_.batch, 0).merge != GroupMerge::kNobody;
#pragma unroll 1
    for (int32_t i = at.warp; i < memory_.list.pooled; i += kWarps) {
      const float2* stats = call_.partial_stats + int64_t{memory_.row_index[i]} * call_.dense_splits;
      const RowStats row_stats = merge_stats(stats, splits, by_groups);
      if (at.lane != 0) continue;
      // A row that sees no key weighs none.
      memory_.rows[i].lse = row_stats.total == 0 ? INFINITY : row_stats.top + log2f(row_stats.total);
    }
    __syncthreads();
  }

  /// Rank key of the block's key i.
  __device__ uint32_t rank_key_of(int32_t i) const {
    if (keys_.whole != nullptr) return keys_.whole[i];
    return rank_key(weigh_one(memory_.list.begin + i));
  }

  __device__ float weigh_one(int32_t key) const {
    return weight_of(call_, memory_.rows, memory_.list.pooled, key);
  }

  __device__ void write_by_products() const {
    const Place at;
    const SelectList& list = memory_.list;
    if (p_.pooled_weights != nullptr) {
      float* pooled = p_.pooled_weights + list.index / call_.sets * p_.pooled_tile_stride +
                      list.set * p_.pooled_head_stride;
      for (int32_t j = rank_ * kThreads + at.thread; j < list.budget.candidates;
           j += memory_.list.blocks * kThreads)
        pooled[j] = weigh_one(j);
    }
    if (p_.own_tile_mass != nullptr && rank_ == 0 && at.thread == 0) {
      float mass = 0;
      for (int32_t j = list.budget.candidates; j < list.kv_len; ++j) mass += weigh_one(j);
      p_.own_tile_mass[list.index] = mass;
    }
  }

  /// Sinks, recent keys and the padding; and the ranked keys, when they are all.
  __device__ void write_forced(bool ranks) const {
    const Place at;
    const StepBudget budget = memory_.list.budget;
    const int32_t sinks = budget.sinks, ranked = budget.ranked, members = budget.members();
    const int32_t recent_begin = budget.recent_begin;
    int32_t* to = positions();
    const int32_t first = rank_ * kThreads + at.thread, step = memory_.list.blocks * kThreads;
    const int32_t leading = ranks ? sinks : sinks + ranked;
    for (int32_t m = first; m < leading; m += step) to[m] = m;
    for (int32_t m = sinks + ranked + first; m < p_.capacity; m += step)
      to[m] = m < members ? recent_begin + m - sinks - ranked : -1;
  }

  /// The rows whose weights are pooled.
  __device__ void find_rows() {
    const Place at;
    const SelectList& list = memory_.list;
    const int32_t heads = p_.query_heads / call_.sets;
#pragma unroll 1
    for (int32_t i = at.thread; i < list.pooled; i += kThreads) {
      const int32_t row = (list.row_begin + i / heads) * p_.query_heads + list.set * heads + i % heads;
      memory_.row_index[i] = row;
      memory_.rows[i].begin = static_cast<uint32_t>(row * (call_.score_stride / kChunkKeys));
    }
    // Rows that weigh nothing make up a whole group.
    if (at.thread < kGroupRows) {
      const int32_t row = list.row_begin * p_.query_heads + list.set * heads;
      memory_.rows[list.pooled + at.thread] = {static_cast<uint32_t>(row * (call_.score_stride / kChunkKeys)),
                                               INFINITY};
    }
  }

  /// Of a block's keys that lie in the workspace.
  __device__ void find_keys() {
    const int64_t begin = cluster_index() * call_.score_stride + memory_.list.begin;
    keys_.digits = call_.rank_digits + begin;
    keys_.bits = call_.rank_bits + begin / 32;
  }

  /// Brings the scores that the thread weighs first into the first-level cache, which takes as long as the
  /// sums of the softmax.
  __device__ void touch_scores() const {
    const int32_t begin = memory_.list.begin, length = memory_.list.length, rows = memory_.list.pooled;
    constexpr int32_t kMostRows = 8;
    const int32_t i = Place().thread * kVector;
    if (i >= length) return;
#pragma unroll 1
    for (int32_t r = 0; r < min(rows, kMostRows); ++r) {
      const uint64_t at = uint64_t{memory_.rows[r].begin} * kChunkKeys + static_cast<uint32_t>(begin + i);
      touch(call_.score_codes + at);
      touch(call_.score_tops + at / kChunkKeys);
    }
  }

  __device__ void rank_and_write() {
    const int32_t ranked = memory_.list.budget.ranked;
    // The wanted-th largest weight is at most the mean of those above it.
    const float bound =
        __fdividef(1.01f * static_cast<float>(memory_.list.pooled), static_cast<float>(ranked));
    int32_t base = max(static_cast<int32_t>(rank_key(bound) >> kBinShift) + 1 - (kBins - 2), 0);
    Found found;
#pragma unroll 1
    for (;;) {
      weigh(base);
      found = find_bin(memory_, ranked);
      const bool is_below = found.bin == 0 && base > 0;
      if (!unlikely(is_below || (found.bin == kBins - 1 && base + kBins - 1 < kMostBin))) break;
      base = max(is_below ? base - (kBins - 2) : base + (kBins - 2), 0);
      sync_blocks(memory_);  // others may still read the histogram
      clear_histogram<kThreads>(memory_);
      __syncthreads();
    }
    AtCut at_cut = {static_cast<uint32_t>(found.bin * kBinDigits),
                    kBinDigits,
                    static_cast<uint32_t>(base + found.bin - 1) << kBinShift,
                    kBinShift,
                    found.count,
                    ranked - found.above};
    // Whole keys are at hand; others are weighed again, each from as many places as it has rows.
    if (keys_.whole == nullptr || found.count > kMostCandidates) narrow(at_cut);
    if (unlikely(at_cut.count > kMostCandidates)) {
      cut_rarely(call_, memory_, keys_, at_cut);
    } else {
      cut_by_search(at_cut);
    }
    write_selected();
  }

  /// From the cut's bin to the cut's digit.
  __device__ void narrow(AtCut& at_cut) const {
    const Place at;
    for_each_vector([&](int32_t, uint4 digits) {
      uint32_t above, members = at_cut.members(digits, above);
      for (; members != 0; members &= members - 1)
        atomicAdd(memory_.digit_counts + digit_at(digits, __ffs(static_cast<int>(members)) - 1) % kBinDigits,
                  1);
    });
    sync_blocks(memory_);
    if (at.warp == 0) {
      // A lane looks at a digit of some of the blocks, the highest digit first.
      static_assert(kBinDigits == 8);
      const int digit = kBinDigits - 1 - at.lane % kBinDigits;
      int32_t count = 0;
      for (int block = at.lane / kBinDigits; block < memory_.list.blocks; block += 32 / kBinDigits)
        count += *in_block(memory_.digit_counts + digit, block);
      count += __shfl_xor_sync(kFullWarp, count, 8);
      count += __shfl_xor_sync(kFullWarp, count, 16);
      int32_t up_to = count;
#pragma unroll
      for (int step = 1; step < kBinDigits; step *= 2) {
        const int32_t other = __shfl_up_sync(kFullWarp, up_to, step, kBinDigits);
        if (at.lane % kBinDigits >= step) up_to += other;
      }
      if (at.lane < kBinDigits && up_to - count < at_cut.wanted && at_cut.wanted <= up_to)
        memory_.found = {digit, up_to - count, count};
    }
    __syncthreads();
    const Found found = memory_.found;
    at_cut = {at_cut.digit + static_cast<uint32_t>(found.bin),
              1,
              at_cut.key + (static_cast<uint32_t>(found.bin) << kDigitShift),
              kDigitShift,
              found.count,
              at_cut.wanted - found.above};
  }

  /// Functions that few calls come to, with selectors of their own so that the others keep theirs in
  /// registers.
  static __device__ __noinline__ void write_rarely(const DecodeCall& call, SelectMemory& memory,
                                                   BlockKeys keys) {
    Selector(call, memory, keys).write_by_products();
  }
  static __device__ __noinline__ void cut_rarely(const DecodeCall& call, SelectMemory& memory, BlockKeys keys,
                                                 AtCut at_cut) {
    Selector(call, memory, keys).cut_by_digits(at_cut);
  }

  /// Weighs the block's keys: what is kept of them, and the histogram.
  __device__ void weigh(int32_t base) {
    const int32_t begin = memory_.list.begin, length = memory_.list.length, rows = memory_.list.pooled;
    const Place at;
    constexpr int32_t kStep = kThreads * kVector;
    const int32_t sinks = memory_.list.budget.sinks - begin;
    const uint32_t histogram = shared_address(memory_.histogram);
#pragma unroll 1
    for (int32_t i = at.thread * kVector; i < length; i += kStep) {
      float sum[kVector] = {};
#pragma unroll 1
      for (int32_t row = 0; row < rows; row += kGroupRows) {
        // What comes next has come nearer until then.
        const bool is_last = row + kGroupRows >= rows;
        prefetch_group(is_last ? 0 : row + kGroupRows, begin + (is_last ? i + kStep : i), length + begin);
        Scores scores[kGroupRows];
#pragma unroll
        for (int j = 0; j < kGroupRows; ++j) scores[j] = load_scores(call_, memory_.rows[row + j], begin + i);
#pragma unroll
        for (int j = 0; j < kGroupRows; ++j) add_scores(sum, scores[j], memory_.rows[row + j].lse);
      }
      // Where the keys are in the window, and their digits in the upper halves of words.
      uint32_t digits[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) digits[e] = place_in_window(sum[e], base);
      if (unlikely(i < sinks || i + kVector > length)) {
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          if (i + e < sinks || i + e >= length) digits[e] = kept(0);
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        count_bin(histogram, digits[e]);
        digits[e] <<= 16 - kDigitShift;
      }
      *reinterpret_cast<uint4*>(keys_.digits + i) = pack_digits(digits);
      if (keys_.whole != nullptr) {
#pragma unroll
        for (int e = 0; e < kVector; e += 4)
          *reinterpret_cast<uint4*>(keys_.whole + i + e) =
              make_uint4(rank_key(sum[e]), rank_key(sum[e + 1]), rank_key(sum[e + 2]), rank_key(sum[e + 3]));
      }
    }
  }

  /// Scores of the warp's vectors, of which the thread's begins at `key`, into the second-level cache.
  __device__ void prefetch_group(int32_t row, int32_t key, int32_t end) const {
    constexpr int kLineKeys = 64;
    if (key >= end || key % kLineKeys != 0) return;
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) {
      const uint64_t begin = memory_.rows[row + j].begin;
      prefetch(call_.score_codes + begin * kChunkKeys + static_cast<uint32_t>(key));
      if (key % (32 * kVector) == 0)
        prefetch(call_.score_tops + begin + static_cast<uint32_t>(key) / kChunkKeys);
    }
  }

  /// f(i, digits) for every run of kVector keys, each warp over a stretch of its own; all lanes stay
  /// together.
  template <class F>
  __device__ void for_each_vector(F f) const {
    const int32_t length = memory_.list.length;
    const Place at;
    const int32_t of_warp = (length + kWarps * 32 * kVector - 1) / (kWarps * 32 * kVector) * (32 * kVector);
    const int32_t first = at.warp * of_warp, last = min(first + of_warp, length);
#pragma unroll 1
    for (int32_t run = first; run < last; run += 32 * kVector) {
      const int32_t i = run + at.lane * kVector;
      f(i, i < last ? *reinterpret_cast<const uint4*>(keys_.digits + i) : make_uint4(0, 0, 0, 0));
    }
  }

  /// The selected keys of a vector.
  __device__ void store_bits(int32_t i, uint32_t bits) const {
    if (i < memory_.list.length)
      reinterpret_cast<uint8_t*>(keys_.bits)[i / kVector] = static_cast<uint8_t>(bits);
  }

  /// The sum over the block's warps.
  __device__ int32_t sum_of_warps(const int32_t (&of_warps)[kMostWarps]) const {
    const Place at;
    return __reduce_add_sync(kFullWarp, at.lane < kWarps ? of_warps[at.lane] : 0);
  }

  __device__ int2 totals_of_block(int block) const {
    return block < memory_.list.blocks ? *in_block(&memory_.totals, block) : make_int2(0, 0);
  }

  /// Adds up the totals of the blocks before this one; lane i has those of block i. Into memory, so that what
  /// was read of other blocks has come before this one says that they may leave: arriving waits for no load.
  __device__ void store_before(int2 totals) const {
    const Place at;
    const int32_t ties = __reduce_add_sync(kFullWarp, at.lane < rank_ ? totals.x : 0);
    const int32_t selected = __reduce_add_sync(kFullWarp, at.lane < rank_ ? totals.y : 0);
    if (at.lane != 0) return;
    memory_.ties_before[at.warp] = ties;
    memory_.selected_before[at.warp] = selected;
  }

  /// The keys of the block's candidates, from the memory of the scores. Four lanes share a candidate's rows,
  /// as the way to the memory is long; sums are those of add_scores().
  __device__ void weigh_candidates() {
    const Place at;
    constexpr int kLanes = 4, kOfLane = 4;
    const int32_t count = memory_.totals.x, rows = memory_.list.pooled;
#pragma unroll 1
    for (int32_t first = at.warp * (32 / kLanes); first < count; first += kWarps * (32 / kLanes)) {
      const int32_t c = min(first + at.lane / kLanes, count - 1);
      const auto key = static_cast<uint32_t>(memory_.candidates[c].position);
      float sum = 0;
#pragma unroll 1
      for (int32_t row = 0; row < rows; row += kLanes * kOfLane) {
        uint32_t codes[kOfLane];
        float offsets[kOfLane];
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) {
          // Row `rows` weighs nothing.
          const PooledRow own = memory_.rows[min(row + j * kLanes + at.lane % kLanes, rows)];
          codes[j] = call_.score_codes[uint64_t{own.begin} * kChunkKeys + key];
          offsets[j] = call_.score_tops[uint64_t{own.begin} + key / kChunkKeys] - own.lse;
        }
#pragma unroll
        for (int j = 0; j < kOfLane; ++j) {
          const float power = power_of<false>(codes[j]), factor = exp2_fast(offsets[j]);
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane)
            sum = add_flushed(__shfl_sync(kFullWarp, power, lane, kLanes),
                              __shfl_sync(kFullWarp, factor, lane, kLanes), sum);
        }
      }
      if (at.lane % kLanes == 0) memory_.candidates[c].key = rank_key(sum);
    }
  }

  /// Marks what the block selects: the `wanted` first of the keys at the cut in the order of the ranking, and
  /// all above them.
  __device__ void cut_by_search(const AtCut& at_cut) {
    const Place at;
    int32_t above = 0;
    for_each_vector([&](int32_t i, uint4 digits) {
      uint32_t bits, members = at_cut.members(digits, bits);
      store_bits(i, bits);
      above += __popc(bits);
      for (; members != 0; members &= members - 1) {
        const int32_t key = i + __ffs(static_cast<int>(members)) - 1;
        memory_.candidates[atomicAdd(&memory_.totals.x, 1)] = {keys_.whole != nullptr ? keys_.whole[key] : 0,
                                                               memory_.list.begin + key};
      }
    });
    above = __reduce_add_sync(kFullWarp, above);
    if (at.lane == 0) atomicAdd(&memory_.totals.y, above);
    if (keys_.whole == nullptr) {
      __syncthreads();
      weigh_candidates();
    }
    sync_blocks(memory_);
    const int2 totals = totals_of_block(at.lane);
    store_before(totals);
    if (at.warp < memory_.list.blocks) {
      const int32_t first = __reduce_add_sync(kFullWarp, at.lane < at.warp ? totals.x : 0);
      const int32_t of_block = __shfl_sync(kFullWarp, totals.x, at.warp);
      const Candidate* candidates = in_block(&memory_.candidates[0], at.warp);
#pragma unroll 1
      for (int32_t c = at.lane; c < of_block; c += 32) memory_.all_candidates[first + c] = candidates[c];
    }
    if (memory_.list.blocks > 1) cluster_arrive_own();
    __syncthreads();
    const Candidate* candidates = memory_.all_candidates;
    const Marks marks = {keys_.bits, memory_.list.begin, memory_.list.length};
    const int32_t earlier = at_cut.count <= kComparedCandidates
                                ? compare_candidates<kThreads>(candidates, at_cut.count, at_cut.wanted, marks)
                                : search_candidates<kThreads>(candidates, at_cut.count, at_cut.wanted,
                                                              at_cut.key, at_cut.bits, marks, memory_.cut);
    if (at.lane == 0) memory_.earlier[at.warp] = earlier;
  }

  /// The cut for any number of keys: histograms of its other bits, then its ties are counted.
  __device__ void cut_by_digits(const AtCut& at_cut) {
    const Place at;
    uint32_t cut = at_cut.key;
    int32_t wanted = at_cut.wanted;
#pragma unroll 1
    for (int shift = kSecondShift, known = kDigitShift; known > 0; known = shift, shift = 0) {
      sync_blocks(memory_);  // others may still read the histogram
      clear_histogram<kThreads>(memory_);
      __syncthreads();
      for_each_vector([&](int32_t i, uint4 digits) {
        uint32_t above, members = at_cut.members(digits, above);
        for (; members != 0; members &= members - 1) {
          const uint32_t rest = rank_key_of(i + __ffs(static_cast<int>(members)) - 1) ^ cut;
          if (rest >> known == 0) atomicAdd(memory_.histogram + (rest >> shift), 1);
        }
      });
      const Found found = find_bin(memory_, wanted);
      cut |= static_cast<uint32_t>(found.bin) << shift;
      wanted -= found.above;
    }
    // Keys at the cut, of a vector.
    const auto ties_of = [&](int32_t i, uint4 digits, uint32_t& bits) {
      uint32_t members = at_cut.members(digits, bits), ties = 0;
      for (; members != 0; members &= members - 1) {
        const int e = __ffs(static_cast<int>(members)) - 1;
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
    above = __reduce_add_sync(kFullWarp, above);
    ties = __reduce_add_sync(kFullWarp, ties);
    if (at.lane == 0) {
      memory_.warp_sums[at.warp] = above;
      memory_.warp_ties[at.warp] = ties;
    }
    __syncthreads();
    if (at.warp == 0) {
      const int32_t all = sum_of_warps(memory_.warp_sums), tied = sum_of_warps(memory_.warp_ties);
      if (at.lane == 0) memory_.totals = make_int2(tied, all);
    }
    sync_blocks(memory_);
    store_before(totals_of_block(at.lane));
    if (memory_.list.blocks > 1) cluster_arrive();
    __syncwarp();
    int32_t tied = memory_.ties_before[at.warp];
    if (at.lane == 0) memory_.earlier[at.warp] = at.warp == 0 ? min(tied, wanted) : 0;
    // Of the ties, the first `left` of this warp's stretch are selected.
    tied += __reduce_add_sync(kFullWarp, at.lane < at.warp ? memory_.warp_ties[at.lane] : 0);
    int32_t left = min(max(wanted - tied, 0), ties);
    if (left > 0) {
      for_each_vector([&](int32_t i, uint4 digits) {
        uint32_t bits;
        uint32_t tied_keys = ties_of(i, digits, bits);
        const int32_t own = __popc(tied_keys);
        const int32_t sum = sum_up_to(own, at.lane);
        for (int32_t mine = left - (sum - own); mine > 0 && tied_keys != 0; --mine) {
          bits |= tied_keys & (0u - tied_keys);
          tied_keys &= tied_keys - 1;
        }
        store_bits(i, bits);
        left -= __shfl_sync(kFullWarp, sum, 31);
      });
    }
  }

  /// Writes, ascending, every key of the block that is marked.
  __device__ void write_selected() {
    const int32_t begin = memory_.list.begin, length = memory_.list.length;
    const Place at;
    __syncthreads();
    const int32_t before = memory_.selected_before[at.warp] + sum_of_warps(memory_.earlier);
    const int32_t words = (length + 31) / 32;
    const int32_t of_thread = (words + kThreads - 1) / kThreads;
    const int32_t first = at.thread * of_thread, last = min(first + of_thread, words);
    const auto word_at = [&](int32_t w) {
      const int32_t keys = length - 32 * w;
      return keys >= 32 ? keys_.bits[w] : keys_.bits[w] & ((1u << keys) - 1);
    };
    int32_t own = 0;
#pragma unroll 1
    for (int32_t w = first; w < last; ++w) own += __popc(word_at(w));
    const int32_t sum = sum_up_to(own, at.lane);
    if (at.lane == 31) memory_.warp_sums[at.warp] = sum;
    __syncthreads();
    const int32_t all = sum_of_warps(memory_.warp_sums);
    int32_t* to = positions() + memory_.list.budget.sinks + before;
    // Positions of neighbouring threads lie apart: many are collected where the digits were.
    auto* collected = reinterpret_cast<int32_t*>(keys_.digits);
    const bool collects = of_thread > 1 && 2 * all <= length;
    int32_t* own_to = (collects ? collected : to) + sum - own +
                      __reduce_add_sync(kFullWarp, at.lane < at.warp ? memory_.warp_sums[at.lane] : 0);
#pragma unroll 1
    for (int32_t w = first; w < last; ++w)
      for (uint32_t word = word_at(w); word != 0; word &= word - 1)
        *own_to++ = begin + 32 * w + __ffs(static_cast<int>(word)) - 1;
    if (!collects) return;
    __syncthreads();
#pragma unroll 1
    for (int32_t j = at.thread; j < all; j += kThreads) to[j] = collected[j];
  }

  const DecodeCall& call_;
  const AttentionParams& p_;
  SelectMemory& memory_;
  BlockKeys keys_;
  const int rank_;
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kManyThreads / kThreads)
    select_kernel(const __grid_constant__ DecodeCall call, int32_t cached_keys) {
  extern __shared__ __align__(16) unsigned char shared[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(shared);
  auto* digits = reinterpret_cast<uint16_t*>(shared + sizeof(SelectMemory));
  auto* whole = reinterpret_cast<uint32_t*>(digits + cached_keys);
  const bool cached = cached_keys > 0, keeps_whole = cached && cached_keys <= kMostWholeKeys;
  uint32_t* bits = whole + (keeps_whole ? cached_keys : 0);
  const BlockKeys keys = {cached ? digits : nullptr, keeps_whole ? whole : nullptr, cached ? bits : nullptr};
  Selector<kThreads>(call, memory, keys).run(cached_keys);
}

/// Keys of a block when clusters have `cluster` blocks; whole vectors.
int64_t block_keys(const DecodeCall& call, int cluster) {
  return parts_of(parts_of(call.maxima.kv_len, cluster), kShareMultiple) * kShareMultiple;
}

LaunchShape select_shape(const DecodeCall& call, int threads, int cluster) {
  const int64_t keys = block_keys(call, cluster);
  LaunchShape shape;
  shape.blocks = select_lists(call) * cluster;
  shape.threads = threads;
  // Digits, a bit a key, and whole keys.
  shape.shared_bytes = sizeof(SelectMemory) +
                       (keys <= kMostCachedKeys ? static_cast<size_t>(keys * 2 + keys / 8) : 0) +
                       (keys <= kMostWholeKeys ? static_cast<size_t>(keys * 4) : 0);
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

namespace {

/// Turns in which all lists are done, by clusters of which a multiprocessor runs so many blocks.
int64_t turns(const DecodeCall& call, int cluster, int blocks_of_multiprocessor) {
  const int64_t blocks = int64_t{call.multiprocessors} * blocks_of_multiprocessor;
  // Groups of multiprocessors are no multiple of large clusters: a sixteenth is left over.
  const int64_t at_once = std::max<int64_t>(cluster > 2 ? blocks * 15 / 16 / cluster : blocks / cluster, 1);
  return parts_of(select_lists(call), at_once);
}

}  // namespace

void launch_select(const DecodeCall& call, cudaStream_t stream) {
  const char* name = "decode_select";
  // Clusters do not fill all multiprocessors.
  const int64_t lists = select_lists(call), room = int64_t{2} * call.multiprocessors * 7 / 8;
  // Fewer blocks a list where they would not run at once anyway: what a list costs besides its keys is paid
  // less often. Nor more blocks than have keys for all of their threads.
  int cluster = kCluster;
  while (cluster > 1 && (lists * cluster > room || block_keys(call, cluster) < kFewThreads * kVector) &&
         block_keys(call, cluster / 2) <= kPreferredKeys)
    cluster /= 2;
  // Lists that nobody needs are done at once.
  const bool few_needed = call.params.role == Role::kLayer0 && call.params.needed != nullptr;
  LaunchShape shape = select_shape(call, kFewThreads, cluster);
  auto kernel = select_kernel<kFewThreads>;
  if ((lists * kLargeCluster <= call.multiprocessors &&
       block_keys(call, kLargeCluster) >= kFewThreads * kVector) ||
      select_needs_rank_digits(call)) {
    // Large clusters for few lists, and for keys that would not fit into the shared memory of a small one.
    const LaunchShape large = select_shape(call, kFewThreads, kLargeCluster);
    if (fits(name, kernel, large)) shape = large;
  } else if (cluster > 1 && lists * cluster > room && !few_needed &&
             block_keys(call, cluster / 2) <= kMostCachedKeys &&
             4 * turns(call, cluster / 2, 1) <=
                 3 * turns(call, cluster, block_keys(call, cluster) <= kPreferredKeys ? 2 : 1)) {
    // Half as many blocks of twice as many threads, as that saves a quarter of the turns.
    shape = select_shape(call, kManyThreads, cluster / 2);
    kernel = select_kernel<kManyThreads>;
  }
  const int64_t keys = block_keys(call, shape.cluster);
  launch(name, kernel, shape, stream, call, static_cast<int32_t>(keys <= kMostCachedKeys ? keys : 0));
}

}  // namespace kascade::cuda
