// SPDX-License-Identifier: Apache-2.0
// What the host sides of decode and prefill calls share: refusals, the layout of the workspace, and strides
// in units that let kernels multiply in 32 bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "attention/params.h"

namespace kascade::cuda {

constexpr size_t kWorkspaceAlignment = 256;

/// What is said of a parameter that is not supported.
inline std::string reason(const char* name, int64_t value, const char* supported) {
  return std::string(name) + " is " + std::to_string(value) + "; supported: " + supported;
}

/// The parts of a workspace, one after the other from base; null: they are only measured.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class T>
  void take(T*& array, int64_t count) {
    array = base_ != nullptr ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    bytes_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  size_t bytes_ = 0;
};

/// Strides of 16-bit elements in the largest power of two of bytes that divides all of them; that of a
/// dimension with one entry is not the caller's to give, and counts as 0. Kernels add multiples of them up in
/// 32 bits, which reach 2^32 units from the base: 64 GiB at least, where rows are just 16-byte aligned.
template <size_t n>
struct StrideUnits {
  uint32_t unit = 0;  // bytes
  uint64_t units[n] = {};
};
template <size_t n>
StrideUnits<n> stride_units(const int64_t (&strides)[n]) {
  uint64_t all = 0;
  for (const int64_t stride : strides) all |= static_cast<uint64_t>(stride);
  const int shift = all == 0 ? 0 : std::min(std::countr_zero(all), 20);
  StrideUnits<n> result;
  result.unit = uint32_t{2} << shift;
  for (size_t i = 0; i < n; ++i) result.units[i] = static_cast<uint64_t>(strides[i]) >> shift;
  return result;
}

/// How far strides in a unit reach, for a refusal.
inline std::string reach_of(uint32_t unit) {
  return "0 or more, and offsets below 4294967296 units of " + std::to_string(unit) +
         " bytes, the power of two that divides all strides";
}

/// Of tokens and pages of K, then of V.
inline StrideUnits<4> key_stride_units(const AttentionParams& p) {
  const bool paged = p.page_table != nullptr, one_a_page = paged && p.page_size == 1;
  return stride_units<4>({one_a_page ? 0 : p.k_token_stride, paged ? p.k_page_stride : 0,
                          one_a_page ? 0 : p.v_token_stride, paged ? p.v_page_stride : 0});
}

/// Empty, or which stride of K or V leads further than 32 bits reach by what the host knows: the keys of a
/// page or of a packed sequence, and a second page. How many pages or packed keys there are it does not know.
inline std::string keys_out_of_reach(const AttentionParams& p) {
  const StrideUnits<4> strides = key_stride_units(p);
  const int64_t keys = p.page_table != nullptr ? p.page_size : p.cu_seqlens_kv != nullptr ? p.max_kv_len : 2;
  const std::pair<const char*, int64_t> given[] = {{"k_token_stride", p.k_token_stride},
                                                   {"k_page_stride", p.k_page_stride},
                                                   {"v_token_stride", p.v_token_stride},
                                                   {"v_page_stride", p.v_page_stride}};
  for (int i = 0; i < 4; ++i) {
    const auto last = static_cast<uint64_t>(i % 2 == 0 ? std::max<int64_t>(keys - 1, 1) : 1);
    if (strides.units[i] > UINT32_MAX / last)
      return reason(given[i].first, given[i].second, reach_of(strides.unit).c_str());
  }
  return "";
}

}  // namespace kascade::cuda
