// SPDX-License-Identifier: Apache-2.0
// Exact top-k in three digits of a key that orders as the weights do: a histogram of the top 12 bits finds the digit in which
// the cut lies, the keys of that digit are packed into scratch, and two more histograms over those alone give the cut. One
// more pass packs the positions.
#include "attention/cpu/select.h"

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kTopShift = 20;   // of the first digit; keys are below 0x7F800002, so it is below 2048
constexpr int kDigitBits = 10;  // of the other two
constexpr int kDigits = 2048;

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

/// One more digit of `bits` at `shift` over packed keys; returns the cut's digit and packs the keys that share it.
uint32_t refine(uint32_t* keys, int64_t* n, int shift, int64_t* wanted, uint32_t* histogram) {
  constexpr uint32_t kMask = (1u << kDigitBits) - 1;
  clear(histogram, 1 << kDigitBits);
  for (int64_t i = 0; i < *n; ++i) ++histogram[(keys[i] >> shift) & kMask];
  const uint32_t digit = static_cast<uint32_t>(find_digit(histogram, 1 << kDigitBits, wanted));
  int64_t kept = 0;
  for (int64_t i = 0; i < *n; ++i) {
    keys[kept] = keys[i];
    kept += ((keys[i] >> shift) & kMask) == digit;
  }
  *n = kept;
  return digit << shift;
}

struct Cut {
  uint32_t key;  // the k-th largest key
  int64_t ties;  // how many weights with that key belong to the k
};

Cut find_cut(const float* weights, int64_t n, int64_t k, uint32_t* scratch) {
  // Neighbouring weights often share a digit; two tables keep an increment from waiting for the one before it.
  uint32_t* even = scratch;
  uint32_t* odd = scratch + kDigits;
  uint32_t* keys = scratch + 2 * kDigits;
  clear(even, 2 * kDigits);
  alignas(64) uint32_t digits[kLanes];
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(hn::ShiftRight<kTopShift>(key_of(load(weights + i))), digits);
    for (int lane = 0; lane + 1 < kLanes; lane += 2) {
      ++even[digits[lane]];
      ++odd[digits[lane + 1]];
    }
    if (kLanes == 1) ++even[digits[0]];
  }
  for (; i < n; ++i) {
    store(hn::ShiftRight<kTopShift>(key_of(broadcast(weights[i]))), digits);
    ++even[digits[0]];
  }
  for (int d = 0; d < kDigits; ++d) even[d] += odd[d];
  int64_t wanted = k;
  const uint32_t digit = static_cast<uint32_t>(find_digit(even, kDigits, &wanted));

  uint32_t* end = keys;
  const VecU wanted_digit = broadcast(digit);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const VecU key = key_of(load(weights + i));
    const auto mask = hn::Eq(hn::ShiftRight<kTopShift>(key), wanted_digit);
    if (!hn::AllFalse(TagU(), mask)) end = append(key, mask, end, keys + n + 64);
  }
  for (; i < n; ++i) {
    store(key_of(broadcast(weights[i])), digits);
    if (digits[0] >> kTopShift == digit) *end++ = digits[0];
  }
  int64_t left = end - keys;
  uint32_t key = digit << kTopShift;
  key |= refine(keys, &left, kDigitBits, &wanted, scratch);
  key |= refine(keys, &left, 0, &wanted, scratch);
  return {key, wanted};
}

}  // namespace

int64_t select_ranked(const float* weights, int64_t n, int64_t k, int32_t first, int32_t* members, uint32_t* scratch) {
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
