// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/check.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Rows per index of a loop: a few microseconds of work for widths of a thousand; a decode step's few rows run
// inline.
constexpr int64_t kRowsPerIndex = 8;

// f(row) for every row.
template <class F>
void for_each_row(int64_t rows, ThreadPool& pool, F f) {
  pool.parallel_for((rows + kRowsPerIndex - 1) / kRowsPerIndex, [&](int64_t index, int) {
    const int64_t end = std::min(rows, (index + 1) * kRowsPerIndex);
    for (int64_t row = index * kRowsPerIndex; row < end; ++row) f(row);
  });
}

}  // namespace

void rms_norm(const float* x, int64_t rows, int64_t columns, int64_t x_stride, const float* weight,
              float epsilon, float* out, int64_t out_stride, ThreadPool& pool) {
  const OpKernels& kernels = op_kernels();
  for_each_row(rows, pool, [&](int64_t row) {
    kernels.rms_norm(x + row * x_stride, columns, weight, epsilon, out + row * out_stride);
  });
}

void silu_multiply(float* gate, const float* up, int64_t rows, int64_t columns, int64_t stride,
                   ThreadPool& pool) {
  const OpKernels& kernels = op_kernels();
  for_each_row(rows, pool,
               [&](int64_t row) { kernels.silu_multiply(gate + row * stride, up + row * stride, columns); });
}

void add_rows(float* x, const float* y, int64_t rows, int64_t columns, int64_t x_stride, int64_t y_stride,
              ThreadPool& pool) {
  const OpKernels& kernels = op_kernels();
  for_each_row(rows, pool,
               [&](int64_t row) { kernels.add(x + row * x_stride, y + row * y_stride, columns); });
}

void embed_rows(const WeightTensor& table, std::span<const int32_t> ids, float* out, int64_t out_stride,
                ThreadPool& pool) {
  const DequantizeKernel dequantize = op_kernels().dequantize_f32(table.type);
  const int64_t row_bytes = table.row_bytes();
  for_each_row(static_cast<int64_t>(ids.size()), pool, [&](int64_t row) {
    const int64_t id = ids[static_cast<size_t>(row)];
    dequantize(static_cast<const uint8_t*>(table.data) + id * row_bytes, table.columns,
               out + row * out_stride);
  });
}

}  // namespace kascade
