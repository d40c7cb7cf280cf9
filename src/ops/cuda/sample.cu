// SPDX-License-Identifier: Apache-2.0
// One block a row: the row's logits stay in L2, and every pass reads them again. Cuts (the k-th heaviest
// token, the token that completes the mass) are found digit by digit, eight bits at a time, from histograms
// of counts or masses.
#include "base/cuda/launch.h"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/warp.cuh"
#include "ops/cuda/logit_key.cuh"
#include "ops/cuda/sample.h"

namespace kascade::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;
constexpr float kUnit = 0x1p40f;  // weights are multiples of 1 / kUnit

__device__ float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

struct Shared {
  uint64_t bins[kBins];
  uint64_t warps[kWarps];
  uint32_t prefix;
  uint64_t rest;
};

/// Sum over the block, to every thread.
__device__ uint64_t block_sum(uint64_t value, Shared& shared) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = value;
  __syncthreads();
  uint64_t sum = 0;
  for (const uint64_t part : shared.warps) sum += part;
  __syncthreads();
  return sum;
}

/// Sum over the threads before this one.
__device__ uint64_t sum_before(uint64_t value, Shared& shared) {
  uint64_t running = sum_up_to(value, static_cast<int>(threadIdx.x % 32));
  if (threadIdx.x % 32 == 31) shared.warps[threadIdx.x / 32] = running;
  __syncthreads();
  for (unsigned warp = 0; warp < threadIdx.x / 32; ++warp) running += shared.warps[warp];
  __syncthreads();
  return running - value;
}

/// The tokens that may be drawn: keys above `key`, and the first `ties` of those equal to it.
struct Kept {
  uint32_t key = 0;
  uint64_t ties = 0;
};

class Row {
 public:
  __device__ Row(const float* logits, int vocabulary, const SampleRow& settings, Shared& shared)
      : logits_(logits), vocabulary_(vocabulary), settings_(settings), shared_(shared) {}

  __device__ int32_t draw() {
    if (!find_largest()) return -1;
    if (settings_.scale == 0) return first_with(largest_);
    if (settings_.top_k > 0 && settings_.top_k < vocabulary_) cut_by_count();
    if (settings_.top_p < 1) cut_by_mass();
    return draw_kept();
  }

 private:
  __device__ uint64_t weight(uint32_t key) const {
    return __float2ull_rn(exp2f((logit_of(key) - logit_of(largest_)) * settings_.scale) * kUnit);
  }

  __device__ bool find_largest() {
    uint32_t best = 0;
    for (int i = threadIdx.x; i < vocabulary_; i += kThreads) best = max(best, logit_key(logits_[i]));
    best = __reduce_max_sync(kFullWarp, best);
    if (threadIdx.x % 32 == 0) shared_.warps[threadIdx.x / 32] = best;
    __syncthreads();
    for (const uint64_t other : shared_.warps) best = max(best, static_cast<uint32_t>(other));
    __syncthreads();
    largest_ = best;
    return isfinite(logit_of(best));  // the key of a NaN stands for a NaN
  }

  __device__ int32_t first_with(uint32_t key) {
    uint32_t first = ~0u;
    for (int i = threadIdx.x; i < vocabulary_; i += kThreads)
      if (logit_key(logits_[i]) == key) first = min(first, static_cast<uint32_t>(i));
    first = __reduce_min_sync(kFullWarp, first);
    if (threadIdx.x % 32 == 0) shared_.warps[threadIdx.x / 32] = first;
    __syncthreads();
    for (const uint64_t other : shared_.warps) first = min(first, static_cast<uint32_t>(other));
    return static_cast<int32_t>(first);
  }

  /// The key at which the amounts of all keys from the largest down reach `wanted`, and how much of the
  /// amount of that key itself is wanted. amount(key) is 0 for keys that do not count; `extra` is the amount
  /// of kept_.key, which it leaves out.
  template <class Amount>
  __device__ void descend(uint64_t wanted, uint64_t extra, Amount amount) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      if (threadIdx.x < kBins) shared_.bins[threadIdx.x] = 0;
      __syncthreads();
      const auto inside = [&](uint32_t key) {
        return shift == 24 || key >> (shift + 8) == prefix >> (shift + 8);
      };
      for (int first = 0; first < vocabulary_; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        const uint32_t key = i < vocabulary_ ? logit_key(logits_[i]) : 0;
        const uint64_t add = i < vocabulary_ && inside(key) ? amount(key) : 0;
        add_to_bin(key >> shift & (kBins - 1), add);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        if (extra > 0 && inside(kept_.key)) shared_.bins[kept_.key >> shift & (kBins - 1)] += extra;
        uint64_t rest = wanted;
        int bin = kBins - 1;
        while (bin > 0 && shared_.bins[bin] < rest) rest -= shared_.bins[bin--];
        shared_.prefix = prefix | static_cast<uint32_t>(bin) << shift;
        shared_.rest = rest;
      }
      __syncthreads();
      prefix = shared_.prefix;
      wanted = shared_.rest;
      __syncthreads();
    }
    found_ = prefix;
    found_rest_ = wanted;
  }

  /// Adds up what the lanes of a warp have for the same bin before it goes to shared memory: most logits
  /// share their first digit.
  __device__ void add_to_bin(uint32_t bin, uint64_t amount) {
    const unsigned active = __ballot_sync(kFullWarp, amount > 0);
    if (amount == 0) return;
    const unsigned peers = __match_any_sync(active, bin);
    // Amounts are below 2^41: thirty-two of either half stay below 2^32.
    const uint64_t low = __reduce_add_sync(peers, static_cast<uint32_t>(amount & 0xFFFFFu));
    const uint64_t high = __reduce_add_sync(peers, static_cast<uint32_t>(amount >> 20));
    if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(peers)) - 1)
      atomicAdd(reinterpret_cast<unsigned long long*>(&shared_.bins[bin]), low + (high << 20));
  }

  __device__ void cut_by_count() {
    descend(static_cast<uint64_t>(settings_.top_k), 0, [](uint32_t) { return uint64_t{1}; });
    kept_ = {found_, found_rest_};
  }

  __device__ void cut_by_mass() {
    const uint32_t cut = kept_.key;
    const uint64_t at_cut = kept_.ties * weight(cut);
    uint64_t mass = 0;
    for (int i = threadIdx.x; i < vocabulary_; i += kThreads) {
      const uint32_t key = logit_key(logits_[i]);
      if (key > cut) mass += weight(key);
    }
    const uint64_t total = block_sum(mass, shared_) + at_cut;
    const auto wanted = static_cast<uint64_t>(ceil(settings_.top_p * static_cast<double>(total)));
    descend(max(wanted, uint64_t{1}), at_cut, [&](uint32_t key) { return key > cut ? weight(key) : 0; });
    const uint64_t each = weight(found_);
    // Weights round to 0 far down: everything that has one is kept then.
    kept_ = each == 0 ? Kept{found_, 0} : Kept{found_, (found_rest_ + each - 1) / each};
  }

  /// Threads own stretches of the row in order, so ties and masses are counted in the order of the tokens.
  __device__ int32_t draw_kept() {
    const int each = (vocabulary_ + kThreads - 1) / kThreads;
    const int begin = min(vocabulary_, static_cast<int>(threadIdx.x) * each);
    const int end = min(vocabulary_, begin + each);
    uint64_t equal = 0;
    for (int i = begin; i < end; ++i) equal += logit_key(logits_[i]) == kept_.key;
    uint64_t ties = sum_before(equal, shared_);
    const auto weight_at = [&](int i, uint64_t& ties_before) -> uint64_t {
      const uint32_t key = logit_key(logits_[i]);
      if (key < kept_.key || (key == kept_.key && ties_before++ >= kept_.ties)) return 0;
      return weight(key);
    };
    uint64_t mass = 0, counted = ties;
    for (int i = begin; i < end; ++i) mass += weight_at(i, counted);
    const uint64_t before = sum_before(mass, shared_), total = block_sum(mass, shared_);
    const uint64_t target = __umul64hi(settings_.random, total);  // below total, which holds the heaviest
    if (target >= before && target < before + mass) {
      uint64_t reached = before;
      for (int i = begin; i < end; ++i) {
        reached += weight_at(i, ties);
        if (reached > target) {
          shared_.prefix = static_cast<uint32_t>(i);
          break;
        }
      }
    }
    __syncthreads();
    return static_cast<int32_t>(shared_.prefix);
  }

  const float* logits_;
  int vocabulary_;
  const SampleRow& settings_;
  Shared& shared_;
  uint32_t largest_ = 0;
  Kept kept_;
  uint32_t found_ = 0;
  uint64_t found_rest_ = 0;
};

__global__ void __launch_bounds__(kThreads)
    sample_kernel(const float* logits, int64_t vocabulary, const SampleRow* settings, int32_t* tokens) {
  __shared__ Shared shared;
  allow_next_kernel();
  wait_for_previous_kernel();
  const SampleRow own = settings[blockIdx.x];
  Row row(logits + int64_t{blockIdx.x} * vocabulary, static_cast<int>(vocabulary), own, shared);
  const int32_t token = row.draw();
  if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}

}  // namespace

void sample(const float* logits, int64_t rows, int64_t vocabulary, const SampleRow* settings, int32_t* tokens,
            cudaStream_t stream) {
  if (vocabulary <= 0 || vocabulary > INT32_MAX - kThreads)
    throw BadArgument("vocabulary is " + std::to_string(vocabulary) + ", must be 1..2147482623");
  launch("sample", sample_kernel, LaunchShape{.blocks = rows, .threads = kThreads}, stream, logits,
         vocabulary, settings, tokens);
}

}  // namespace kascade::cuda
