// SPDX-License-Identifier: Apache-2.0
// The two ways to multiply: fp32 with fused multiply-adds, whatever K and V are stored as, and dot products
// of pairs of bf16, for bf16 caches where the machine has them. A word is what one lane holds: a float, or a
// pair of bf16. Included by *_isa.cc only.
#pragma once

#include "attention/cpu/simd.h"
#include "attention/cpu/work.h"

namespace kascade::KASCADE_ISA {

/// Scores and outputs carry fp32 rounding only.
template <class StoredType>
struct FloatMath {
  using Stored = StoredType;
  using Word = float;
  using Vec = VecF;
  static constexpr int kPair = 1;       // products per lane and instruction
  static constexpr int kLoad = kLanes;  // elements of a row that one load of row words takes
  static constexpr bool kConverts = sizeof(Stored) != sizeof(float);

  static HWY_INLINE VecF multiply_add(VecF acc, VecF a, VecF b) { return hn::MulAdd(a, b, acc); }
  static HWY_INLINE VecF load_row(const Stored* p, int count) { return load_as_float(p, count); }
};

/// Queries and probabilities are rounded to bf16 (relative 2^-9 each); products are exact and summed in fp32.
struct BfloatMath {
  using Stored = Bfloat;
  using Word = uint32_t;
  using Vec = VecU;
  static constexpr int kPair = 2;
  static constexpr int kLoad = 2 * kLanes;
  static constexpr bool kConverts = false;

  static HWY_INLINE VecF multiply_add(VecF acc, VecU a, VecU b) { return dot_pairs(acc, a, b); }
  static HWY_INLINE VecU load_row(const Bfloat* p, int count) { return load_pairs(p, count); }
};

#if defined(__AVX512BF16__)
using BestBfloatMath = BfloatMath;
#else
using BestBfloatMath = FloatMath<Bfloat>;
#endif

/// Calls visit with the math for a type of cache.
template <class Visit>
HWY_INLINE auto with_math(cpu::Stored stored, const Visit& visit) {
  switch (stored) {
    case cpu::Stored::kF16:
      return visit(FloatMath<Half>());
    case cpu::Stored::kBF16:
      return visit(BestBfloatMath());
    case cpu::Stored::kF32:
      break;
  }
  return visit(FloatMath<float>());
}

/// Word i of a row, wherever it lies.
template <class Word>
HWY_INLINE Word word_at(const void* row, int64_t i) {
  Word word;
  __builtin_memcpy(&word, static_cast<const char*>(row) + i * static_cast<int64_t>(sizeof(Word)),
                   sizeof(Word));
  return word;
}

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Calls visit(i, position, row of K, row of V) for the keys [begin, begin + count) of a source, i in [0,
/// count).
template <class Visit>
HWY_INLINE void for_each_key(const cpu::CacheView& cache, const cpu::KeySource& keys, int64_t begin,
                             int count, const Visit& visit) {
  const bool paged = cache.page_table != nullptr;
  const auto page_of = [&](int64_t position) {
    return cache.page_shift >= 0 ? position >> cache.page_shift : position / cache.page_size;
  };
  const auto slot_of = [&](int64_t position) {
    return cache.page_shift >= 0 ? position & (cache.page_size - 1) : position % cache.page_size;
  };
  // Consecutive positions: one look into the table a page.
  const auto run = [&](int i, int64_t position) {
    while (i < count) {
      int64_t length = count - i;
      const char *k = cache.k, *v = cache.v;
      if (paged) {
        const int64_t slot = slot_of(position), page = cache.page_table[page_of(position)];
        if (cache.page_size - slot < length) length = cache.page_size - slot;
        k += page * cache.k_page_stride + slot * cache.k_token_stride;
        v += page * cache.v_page_stride + slot * cache.v_token_stride;
      } else {
        k += position * cache.k_token_stride;
        v += position * cache.v_token_stride;
      }
      for (int64_t n = 0; n < length; ++n) {
        visit(i++, position++, k, v);
        k += cache.k_token_stride;
        v += cache.v_token_stride;
      }
    }
  };
  if (keys.list == nullptr) return run(0, begin);
  int i = 0;
  for (; i < count && begin + i < keys.list_count; ++i) {
    const int64_t position = keys.list[begin + i];
    if (paged) {
      const int64_t slot = slot_of(position), page = cache.page_table[page_of(position)];
      visit(i, position, cache.k + page * cache.k_page_stride + slot * cache.k_token_stride,
            cache.v + page * cache.v_page_stride + slot * cache.v_token_stride);
    } else {
      visit(i, position, cache.k + position * cache.k_token_stride,
            cache.v + position * cache.v_token_stride);
    }
  }
  run(i, keys.own_begin + (begin + i - keys.list_count));
}

/// Whether a list is ascending within [0, end).
HWY_INLINE bool is_ascending(const int32_t* list, int64_t count, int64_t end) {
  if (count == 0) return true;
  if (list[0] < 0 || list[count - 1] >= end) return false;
  int64_t i = 1;
  for (; i + kLanes <= count; i += kLanes)
    if (!hn::AllTrue(TagI(), hn::Gt(load(list + i), load(list + i - 1)))) return false;
  for (; i < count; ++i)
    if (list[i] <= list[i - 1]) return false;
  return true;
}

/// A set from the caller may hold anything. Returns list itself when it is ascending within [0, end), else
/// what is left in scratch when other entries are dropped; *count is updated.
HWY_INLINE const int32_t* checked_list(const int32_t* list, int64_t* count, int64_t end, int32_t* scratch) {
  if (is_ascending(list, *count, end)) return list;
  int64_t kept = 0, last = -1;
  for (int64_t i = 0; i < *count; ++i) {
    if (list[i] <= last || list[i] >= end) continue;
    last = list[i];
    scratch[kept++] = list[i];
  }
  *count = kept;
  return scratch;
}

/// Hands out aligned pieces of scratch; with a null base it only measures.
class Carver {
 public:
  HWY_INLINE explicit Carver(char* base) : base_(base) {}
  template <class T>
  HWY_INLINE T* take(int64_t count) {
    T* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + offset_) : nullptr;
    offset_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return piece;
  }
  HWY_INLINE size_t bytes() const { return offset_; }

 private:
  char* base_;
  size_t offset_ = 0;
};

}  // namespace kascade::KASCADE_ISA
