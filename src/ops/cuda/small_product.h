// SPDX-License-Identifier: Apache-2.0
// The product of few rows with a stored matrix: bound by reading the matrix once.
#pragma once

#include "ops/cuda/ops.h"

namespace kascade::cuda {

constexpr int64_t kSmallRows = 64;

/// How the blocks share the work. A pass is `tiles` tiles of 16 outputs over a block's inputs.
struct SmallProductShape {
  int split = 1;   // blocks of a cluster share the inputs; decides the order of sums
  int tiles = 4;   // tiles a pass, at most 8
  int stages = 4;  // of the ring in shared memory
  int clusters = 1;
  int lead = 0;  // the next kernel may start when this many stages are still to be copied
};

/// Whether the matrix and x suit the kernel (inputs in 32s, 16-byte addresses, at most 64 rows).
bool small_product_suits(const DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows);

/// The shape for a matrix; split depends on the matrix alone. multiprocessors: of the device.
SmallProductShape small_product_shape(const DeviceMatrix& matrix, int64_t rows, int multiprocessors);

/// As MatrixProducts::multiply. Reads the matrix before the kernels ahead of it in the stream have finished:
/// they must not write it.
void small_product(const DeviceMatrix& matrix, const SmallProductShape& shape, const __nv_bfloat16* x,
                   int64_t rows, void* out, bool float_out, bool accumulate, cudaStream_t stream);

}  // namespace kascade::cuda
