// SPDX-License-Identifier: Apache-2.0
// Drawing tokens from rows of logits on the GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kascade::cuda {

/// How the token of one row is drawn.
struct SampleRow {
  float scale = 0;      // log2(e) / temperature, finite and above 0; 0 = the most likely token
  int32_t top_k = 0;    // 0 = off
  double top_p = 1;     // (0, 1]; the token that crosses the mass stays
  uint64_t random = 0;  // uniform bits
};

/// tokens[r] drawn from logits[r] of [rows, vocabulary]: of the top_k heaviest tokens, of these the fewest
/// that hold top_p of their mass (ties to the smaller index throughout), one by its weight. Weights are
/// rounded to multiples of 2^-40 of the heaviest and sums are exact, so the same bits give the same token
/// whatever the batch. -1 where a logit is NaN or the largest is not finite. settings [rows] are on the
/// device. Enqueues on the stream and allocates nothing.
void sample(const float* logits, int64_t rows, int64_t vocabulary, const SampleRow* settings, int32_t* tokens,
            cudaStream_t stream);

}  // namespace kascade::cuda
