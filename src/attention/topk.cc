// SPDX-License-Identifier: Apache-2.0
// Exact top-k without sorting: the cut is found digit by digit from histograms of an order-preserving integer
// key, then one ascending pass takes everything above the cut and the first of what ties with it.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kascade/attention.h"

namespace kascade {
namespace {

constexpr int kDigitBits =
    11;  // three passes over 32 bits; a histogram of 8 KB stays in the first-level cache
constexpr uint32_t kDigits = 1u << kDigitBits;

/// Orders as the ranking does: NaN lowest, then -inf .. +inf; both zeros alike.
uint32_t rank_key(float weight) {
  if (std::isnan(weight)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(weight + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct Cut {
  uint32_t key;  // the k-th largest key
  int64_t ties;  // how many weights with that key belong to the k
};

Cut find_cut(const float* weights, int64_t n, int64_t k, uint32_t* histogram) {
  uint32_t prefix = 0, prefix_mask = 0;
  int64_t wanted = k;
  for (int shift = 32; shift > 0;) {
    const int bits = std::min(shift, kDigitBits);
    shift -= bits;
    const uint32_t digit_mask = (1u << bits) - 1;
    std::fill_n(histogram, digit_mask + 1, 0u);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = rank_key(weights[i]);
      if ((key & prefix_mask) == prefix) ++histogram[(key >> shift) & digit_mask];
    }
    uint32_t digit = digit_mask;
    for (; histogram[digit] < wanted; --digit) wanted -= histogram[digit];
    prefix |= digit << shift;
    prefix_mask |= digit_mask << shift;
  }
  return {prefix, wanted};
}

}  // namespace

int64_t select_top_k_scratch(int64_t) { return kDigits; }

int64_t select_top_k(const float* weights, int64_t n, int64_t k, int32_t* positions, uint32_t* scratch) {
  k = std::clamp<int64_t>(k, 0, std::max<int64_t>(n, 0));
  if (k == 0) return 0;
  const Cut cut = find_cut(weights, n, k, scratch);
  int64_t count = 0;
  int64_t ties = cut.ties;
  for (int64_t i = 0; count < k; ++i) {
    const uint32_t key = rank_key(weights[i]);
    if (key < cut.key || (key == cut.key && ties-- <= 0)) continue;
    positions[count++] = static_cast<int32_t>(i);
  }
  return count;
}

}  // namespace kascade
