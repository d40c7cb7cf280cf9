// SPDX-License-Identifier: Apache-2.0
// What one decode call hands to its kernels: the caller's parameters, the stated maxima, and where the parts
// of the workspace lie. docs/kernels/decode.md explains the passes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "attention/params.h"

namespace kascade::cuda {

constexpr int kMaxStepRows = 8;
// Keys of one matrix product, and per reference value of stored scores.
constexpr int kChunkKeys = 16;
// Keys that the pass that stores scores takes at once; rows of scores are padded to them.
constexpr int kScoreStageKeys = 2 * kChunkKeys;
// Stored scores: the chunk's largest less the score, in log2 units times this, rounded; kScoreFarBelow means
// weight 0.
constexpr float kScoreSteps = 512.0f;
constexpr uint32_t kScoreFarBelow = 65535;
// Rows times heads that one index set may pool.
constexpr int kMaxPooledRows = 512;

enum class Pass { kDense, kScore, kSparse };

/// Keys of a list per unit of work and partial result: half a megabyte of K and V at 128 dimensions. A
/// function of these alone, so that a sequence's result never depends on its batch mates.
constexpr int32_t split_keys(Pass pass, int32_t head_dim) {
  return (pass == Pass::kScore ? 4096 : 1024) * (head_dim == 64 ? 2 : 1);
}

struct DecodeCall {
  AttentionParams params;
  Maxima maxima;
  float scale_log2 = 0;      // score_scale * log2(e)
  int32_t sets = 0;          // S
  int32_t readers = 0;       // lists attended per tile: one per KV head, or per query head
  int32_t reader_heads = 0;  // query heads that share a list
  int32_t dense_rows = 0;    // query rows of one unit of work, 16 or 32
  int32_t sparse_rows = 0;
  int32_t dense_split = 0;  // split_keys() of the pass over all keys
  int32_t sparse_split = 0;
  int32_t dense_splits = 0;  // partial results that a row and head has room for, by pass
  int32_t sparse_splits = 0;
  int64_t score_stride = 0;  // keys, rounded up to whole stages

  // Workspace. Row index: (row of q) * H + head. An anchor's two passes use the partial results one after the
  // other.
  int32_t* dense_units = nullptr;   // [B+1] units of work before each sequence
  int32_t* sparse_units = nullptr;  // [B+1]
  int32_t* counters = nullptr;      // [2] units handed out beyond the first two of each block, by pass
  float2* partial_stats = nullptr;  // [rows, splits] largest score (log2) and sum of 2^(score - largest)
  float* partial_out = nullptr;     // [rows, splits, D] unnormalised
  uint16_t* score_codes = nullptr;  // [rows, score_stride]
  float* score_tops = nullptr;      // [rows, score_stride / kChunkKeys]
};

/// Lays the workspace out from base (null: only measures) and returns its size.
size_t lay_out(DecodeCall& call, std::byte* base);

// The kernels of a call, in the order in which they are launched; each throws DeviceError naming the kernel.
void launch_schedule(const DecodeCall& call, cudaStream_t stream);
template <class T, int D>
void launch_attend_pass(const DecodeCall& call, Pass pass, cudaStream_t stream);
void launch_select(const DecodeCall& call, cudaStream_t stream);
void launch_merge(const DecodeCall& call, bool sparse, cudaStream_t stream);

}  // namespace kascade::cuda
