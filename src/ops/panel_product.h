// SPDX-License-Identifier: Apache-2.0
// The matrix product of the prefill path: always the same shape, 64 activation rows by 64 weight rows,
// through one single-threaded oneDNN primitive per number of columns, so that a result depends neither on the
// number of rows nor on that of threads.
#pragma once

#include <cstdint>
#include <dnnl.hpp>
#include <memory>

namespace kascade {

constexpr int64_t kPanelRows = 64;     // activation rows of a product
constexpr int64_t kPanelOutputs = 64;  // weight rows of a product
constexpr int64_t kPairBlock = 32;

/// y = x w^T. Immutable; run() may be called from any number of threads, each with a binding of its own.
class PanelProduct {
 public:
  /// The shared product for `columns` inputs in bfloat16 or fp32.
  static std::shared_ptr<const PanelProduct> get(bool bf16, int64_t columns);

  PanelProduct(bool bf16, int64_t columns);

  /// Per-thread objects of oneDNN, made once so that run() makes none.
  struct Binding {
    dnnl::stream stream;
    dnnl::memory x, w, y, scratchpad;
  };
  Binding bind() const;
  int64_t scratchpad_bytes() const { return scratchpad_bytes_; }

  /// x [64, columns] and w of the product's type, y [64, 64] fp32, all contiguous. w is [64, columns] in
  /// fp32; in bfloat16 [columns / 2, 64, 2], pairs of columns, with zeros up to a multiple of kPairBlock
  /// columns: the order in which the product reads them (given rows, oneDNN would reorder them in every call,
  /// 9 % of its time).
  void run(Binding& binding, const void* x, const void* w, float* y, void* scratchpad) const;

 private:
  dnnl::engine engine_;
  dnnl::matmul::primitive_desc desc_;
  dnnl::matmul product_;
  int64_t scratchpad_bytes_ = 0;
};

}  // namespace kascade
