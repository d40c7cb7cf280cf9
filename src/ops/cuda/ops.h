// SPDX-License-Identifier: Apache-2.0
// The model's operators besides attention, on the GPU. Rows are tokens; every matrix is row-major with its
// last dimension contiguous. All pointers are device pointers, aligned to 16 bytes where rows are. Everything
// enqueues on the stream given, allocates nothing, never waits for the device unless it says so, and may be
// captured in a graph. A call with 0 rows does nothing. Failed launches throw DeviceError naming the kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "kascade/weight.h"

namespace kascade::cuda {

/// Stored weights to bf16, rounded to nearest even from the floats of base/dequantize.h. count is a multiple
/// of the type's block (else BadArgument); stored needs the alignment of WeightTensor only.
void dequantize(WeightType type, const void* stored, int64_t count, __nv_bfloat16* out, cudaStream_t stream);

/// Normal weights of mean 0 and the given deviation; element i depends on the seed and i alone.
void fill_normal(__nv_bfloat16* out, int64_t count, float deviation, uint64_t seed, cudaStream_t stream);

/// residual[r] = table[tokens[r]], [rows, hidden]. Tokens are checked by the caller.
void embed(const __nv_bfloat16* table, const int32_t* tokens, int64_t rows, int64_t hidden, float* residual,
           cudaStream_t stream);

/// out[r] = x[r] * weight / sqrt(mean(x[r]^2) + epsilon), any width.
void rms_norm(const float* x, const float* weight, float epsilon, int64_t rows, int64_t width,
              __nv_bfloat16* out, cudaStream_t stream);

/// (cos, sin) of position * inverse_frequencies[i], computed in fp64, for positions begin..end-1. table is
/// that of position 0: entry [position, i] is written. inverse_frequencies [half] is on the device.
void rope_table(const double* inverse_frequencies, int half, int64_t begin, int64_t end, float2* table,
                cudaStream_t stream);

/// One layer's rows between the product and attention: bias, norm of q and k heads, rotary embedding, keys
/// and values to their cache slots.
struct RopeAppend {
  __nv_bfloat16* qkv = nullptr;   // [rows, (H + 2G) D]: q is rotated in place, k and v are read
  int64_t row_stride = 0;         // elements
  const float* bias = nullptr;    // [(H + 2G) D] or null
  const float* q_norm = nullptr;  // [D] or null
  const float* k_norm = nullptr;
  float norm_epsilon = 0;
  const float2* rope_table = nullptr;  // [positions, D/2]
  bool adjacent = false;               // pairs (2i, 2i + 1); else (i, i + D/2)
  const int32_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;    // [rows]: page * page_size + offset in the page; below 0 appends nothing
  __nv_bfloat16* k_pages = nullptr;  // of this layer, [pages, G, page_size, D]
  __nv_bfloat16* v_pages = nullptr;
  int32_t page_size = 0;
  int query_heads = 0, kv_heads = 0, head_dim = 0;
};
/// head_dim is even and at most 256 (else BadArgument).
void rope_append(const RopeAppend& call, int64_t rows, cudaStream_t stream);

/// out[r, i] = silu(gate) * up; a row of gate_up [rows, 2 ffn] is gate, then up.
void silu_multiply(const __nv_bfloat16* gate_up, int64_t rows, int64_t ffn, __nv_bfloat16* out,
                   cudaStream_t stream);

/// Index of the largest logit of each row, the smaller index on ties; -1 where a logit is NaN or the largest
/// is not finite.
void arg_max(const float* logits, int64_t rows, int64_t vocabulary, int32_t* tokens, cudaStream_t stream);

/// out[r] = x[indices[r]].
void gather_rows(const float* x, const int32_t* indices, int64_t rows, int64_t width, float* out,
                 cudaStream_t stream);

/// One stored matrix on the device, [outputs, inputs].
struct DeviceMatrix {
  const __nv_bfloat16* weight = nullptr;
  int64_t outputs = 0, inputs = 0;
};

/// kInvariant: fixed tile shapes; a row's bits do not depend on the rows beside it, nor on how many there are
/// as long as they stay up to 64, or above 64. Throws Unsupported where one algorithm does not take them all.
/// kFast: whatever is fastest for the number of rows; the same call gives the same bits.
enum class Products : uint8_t { kFast, kInvariant };

/// Products with stored matrices, fp32 sums. Owns the cuBLASLt handle, its workspace, and the algorithms
/// chosen. Of the device current at construction; calls must not overlap on several streams (one workspace).
class MatrixProducts {
 public:
  explicit MatrixProducts(Products mode);
  ~MatrixProducts();
  MatrixProducts(MatrixProducts&&) noexcept;
  MatrixProducts& operator=(MatrixProducts&&) noexcept;

  /// Chooses how multiply() does a call of this shape (kFast: times the best few candidates unless a similar
  /// number of rows has been prepared; waits for the stream, allocates and frees; with too little memory
  /// nothing is timed). A shape never prepared takes the first suitable way.
  void prepare(const DeviceMatrix& matrix, int64_t rows, bool float_out, bool accumulate,
               cudaStream_t stream);

  /// out [rows, outputs] = x [rows, inputs] W^T, bf16 or fp32; accumulate (fp32 only, else BadArgument) adds
  /// to what out holds. Up to 64 rows the time is that of reading the weights, which may begin before the
  /// kernels ahead in the stream have ended: whatever writes weights is waited for before.
  void multiply(const DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows, void* out, bool float_out,
                bool accumulate, cudaStream_t stream);

  static constexpr uint64_t kWorkspaceBytes = size_t{64} << 20;

  /// For comparisons: shapes that are new from here on go to cuBLASLt alone.
  void use_library_alone();
  /// How a prepared or used shape is multiplied, in words; empty for others.
  std::string chosen(const DeviceMatrix& matrix, int64_t rows, bool float_out, bool accumulate) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kascade::cuda
