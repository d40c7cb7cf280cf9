// SPDX-License-Identifier: Apache-2.0
// Exact top-k by the digits of a key that orders as the weights do: a histogram of the top 12 bits finds the
// digit in which the cut lies, the keys of that digit are packed, and two more histograms over those alone
// give the cut. Counting costs a few cycles a key, so of many keys only those are counted that lie between
// two bounds guessed from a sample; a wrong guess costs time, never exactness. One more pass packs the
// positions.
#include "attention/cpu/entries.h"
#include "attention/cpu/select.h"

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kTopShift = 20;   // of the first digit; keys are below 0x7F800002, so it is below 2048
constexpr int kDigitBits = 10;  // of the other two
constexpr int kDigits = 2048;
// From this many on, bounds are guessed from one vector in 16, and only the keys between them are counted.
constexpr int64_t kLeastSampled = 4096;
constexpr int64_t kSampleStride = 16;

/// Weights are 0 or more, so their bits order as they do; NaN gets 0 and everything else moves up by one.
HWY_INLINE VecU key_of(VecF weight) {
  const VecU bits = hn::And(hn::BitCast(TagU(), weight), broadcast(0x7FFFFFFFu));
  const auto is_number = hn::Not(hn::Gt(hn::BitCast(TagI(), bits), broadcast(int32_t{0x7F800000})));
  return hn::IfThenElseZero(hn::RebindMask(TagU(), is_number), hn::Add(bits, broadcast(1u)));
}

HWY_INLINE VecU iota(int64_t first) { return hn::Iota(TagU(), static_cast<uint32_t>(first)); }

/// Appends the lanes of v whose mask is set; writes a whole vector while that stays below end.
HWY_INLINE uint32_t* append(VecU v, hn::Mask<TagU> mask, uint32_t* out, const uint32_t* end) {
  const size_t count = hn::CountTrue(TagU(), mask);
  const VecU packed = hn::Compress(v, mask);
  if (out + kLanes <= end) {
    store(packed, out);
  } else {
    alignas(64) uint32_t lanes[kLanes];
    store(packed, lanes);
    for (size_t i = 0; i < count; ++i) out[i] = lanes[i];
  }
  return out + count;
}

/// The digit in which the `wanted`-th largest lies; takes what lies above it off wanted.
int find_digit(const uint32_t* histogram, int digits, int64_t* wanted) {
  int digit = digits - 1;
  for (; histogram[digit] < *wanted; --digit) *wanted -= histogram[digit];
  return digit;
}

void clear(uint32_t* histogram, int digits) {
  for (int i = 0; i < digits; ++i) histogram[i] = 0;
}

/// Packs the keys of one digit to the front; returns how many.
int64_t pack_digit(uint32_t* keys, int64_t n, int shift, uint32_t mask, uint32_t digit) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = keys[i];
    keys[kept] = key;
    kept += ((key >> shift) & mask) == digit;
  }
  return kept;
}

struct Cut {
  uint32_t key;  // the k-th largest key
  int64_t ties;  // how many weights with that key belong to the k
};

/// The cut of n keys, which are used up.
Cut cut_of(uint32_t* keys, int64_t n, int64_t wanted, uint32_t* histogram) {
  // Neighbouring weights often share their first digit; two tables keep an increment from waiting for the one
  // before it.
  uint32_t* odd = histogram + kDigits;
  clear(histogram, 2 * kDigits);
  for (int64_t i = 0; i + 1 < n; i += 2) {
    ++histogram[keys[i] >> kTopShift];
    ++odd[keys[i + 1] >> kTopShift];
  }
  if (n % 2 != 0) ++histogram[keys[n - 1] >> kTopShift];
  for (int d = 0; d < kDigits; ++d) histogram[d] += odd[d];
  uint32_t digit = static_cast<uint32_t>(find_digit(histogram, kDigits, &wanted));
  n = pack_digit(keys, n, kTopShift, ~0u, digit);
  uint32_t cut = digit << kTopShift;
  for (int shift = kTopShift - kDigitBits; shift >= 0; shift -= kDigitBits) {
    constexpr uint32_t kMask = (1u << kDigitBits) - 1;
    clear(histogram, 1 << kDigitBits);
    for (int64_t i = 0; i < n; ++i) ++histogram[(keys[i] >> shift) & kMask];
    digit = static_cast<uint32_t>(find_digit(histogram, 1 << kDigitBits, &wanted));
    if (shift > 0) n = pack_digit(keys, n, shift, kMask, digit);
    cut |= digit << shift;
  }
  return {cut, wanted};
}

/// Stores the keys of one in `stride` vectors of weights; returns how many.
int64_t sample_keys(const float* weights, int64_t n, int64_t stride, uint32_t* keys) {
  int64_t count = 0;
  for (int64_t i = 0; i + kLanes <= n; i += stride * kLanes, count += kLanes)
    store(key_of(load(weights + i)), keys + count);
  if (stride > 1) return count;
  for (; count < n; ++count) {
    alignas(64) uint32_t key[kLanes];
    store(key_of(broadcast(weights[count])), key);
    keys[count] = key[0];
  }
  return count;
}

/// Bounds that very likely enclose the k-th largest key, from a sample. low <= high.
void guess_bounds(const float* weights, int64_t n, int64_t k, uint32_t* keys, uint32_t* histogram,
                  uint32_t* low, uint32_t* high) {
  const int64_t count = sample_keys(weights, n, kSampleStride, keys);
  clear(histogram, kDigits);
  for (int64_t i = 0; i < count; ++i) ++histogram[keys[i] >> kTopShift];
  const float share = static_cast<float>(k) / static_cast<float>(n);
  const float deviation = __builtin_sqrtf(static_cast<float>(count) * share * (1 - share));
  const int64_t expected = static_cast<int64_t>(share * static_cast<float>(count));
  const int64_t margin = static_cast<int64_t>(4 * deviation) + 4;
  int64_t upper = expected - margin, lower = expected + margin;
  *high = ~0u >> 1;
  if (upper > 0)
    *high = (static_cast<uint32_t>(find_digit(histogram, kDigits, &upper)) << kTopShift) |
            ((1u << kTopShift) - 1);
  *low = 0;
  if (lower <= count) *low = static_cast<uint32_t>(find_digit(histogram, kDigits, &lower)) << kTopShift;
}

Cut find_cut(const float* weights, int64_t n, int64_t k, uint32_t* scratch) {
  uint32_t* histogram = scratch;
  uint32_t* keys = scratch + 2 * kDigits;
  if (n >= kLeastSampled) {
    uint32_t low, high;
    guess_bounds(weights, n, k, keys, histogram, &low, &high);
    const VecI below = hn::BitCast(TagI(), broadcast(low - 1)), above = hn::BitCast(TagI(), broadcast(high));
    uint32_t* end = keys;
    int64_t larger = 0;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const VecU key = key_of(load(weights + i));
      const VecI signed_key = hn::BitCast(TagI(), key);
      const auto over = hn::Gt(signed_key, above);
      larger += static_cast<int64_t>(hn::CountTrue(TagI(), over));
      const auto inside = hn::AndNot(over, hn::Gt(signed_key, below));
      if (!hn::AllFalse(TagI(), inside))
        end = append(key, hn::RebindMask(TagU(), inside), end, keys + n + kLanes);
    }
    for (; i < n; ++i) {
      alignas(64) uint32_t key[kLanes];
      store(key_of(broadcast(weights[i])), key);
      if (key[0] > high) {
        ++larger;
      } else if (key[0] >= low) {
        *end++ = key[0];
      }
    }
    if (larger < k && larger + (end - keys) >= k) return cut_of(keys, end - keys, k - larger, histogram);
  }
  sample_keys(weights, n, 1, keys);
  return cut_of(keys, n, k, histogram);
}

}  // namespace

int64_t select_scratch_size(int64_t n) { return select_scratch(n); }

int64_t select_ranked(const float* weights, int64_t n, int64_t k, int32_t first, int32_t* members,
                      uint32_t* scratch) {
  if (k <= 0 || n <= 0) return 0;
  auto* out = reinterpret_cast<uint32_t*>(members);
  if (k >= n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint32_t>(first + i);
    return n;
  }
  const Cut cut = find_cut(weights, n, k, scratch);
  const uint32_t* end = out + k;
  const VecU cut_key = broadcast(cut.key);
  int64_t ties = cut.ties;
  int64_t i = 0;
  for (; i + kLanes <= n && out < end; i += kLanes) {
    const VecU key = key_of(load(weights + i));
    const auto equal = hn::Eq(key, cut_key);
    const auto above = hn::RebindMask(TagU(), hn::Gt(hn::BitCast(TagI(), key), hn::BitCast(TagI(), cut_key)));
    auto chosen = above;
    if (ties > 0 && !hn::AllFalse(TagU(), equal)) {
      const int64_t here = static_cast<int64_t>(hn::CountTrue(TagU(), equal));
      if (here <= ties) {
        chosen = hn::Or(above, equal);
        ties -= here;
      } else {
        // More ties than are wanted: the first ones.
        alignas(64) uint32_t flags[kLanes];
        store(hn::VecFromMask(TagU(), equal), flags);
        for (int lane = 0; lane < kLanes; ++lane)
          if (flags[lane] != 0 && ties-- <= 0) flags[lane] = 0;
        ties = 0;
        chosen = hn::Or(above, hn::MaskFromVec(load(flags)));
      }
    }
    out = append(iota(first + i), chosen, out, end);
  }
  for (; i < n && out < end; ++i) {
    alignas(64) uint32_t key[kLanes];
    store(key_of(broadcast(weights[i])), key);
    if (key[0] < cut.key || (key[0] == cut.key && ties-- <= 0)) continue;
    *out++ = static_cast<uint32_t>(first + i);
  }
  return k;
}

void select_members(const cpu::SetWork& set, const float* weights, uint32_t* scratch) {
  int64_t count = 0;
  for (int64_t j = 0; j < set.sinks; ++j) set.members[count++] = static_cast<int32_t>(j);
  if (weights != nullptr) weights += set.sinks;
  count += select_ranked(weights, set.recent_begin - set.sinks, set.ranked, static_cast<int32_t>(set.sinks),
                         set.members + count, scratch);
  for (int64_t j = set.recent_begin; j < set.candidates; ++j) set.members[count++] = static_cast<int32_t>(j);
  for (int64_t i = count; i < set.capacity; ++i) set.members[i] = -1;
  *set.count = static_cast<int32_t>(count);
}

}  // namespace kascade::KASCADE_ISA
