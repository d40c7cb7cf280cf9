// SPDX-License-Identifier: Apache-2.0
// Times of a call by role on the current GPU, for `kascade bench decode | prefill --device cuda`.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kascade/budget.h"
#include "kascade/dtype.h"

namespace kascade {

struct CudaAttentionBenchOptions {
  bool prefill = false;  // whole prompts in tiles; else one row a sequence
  int32_t tile = 32;     // of prefill
  int32_t batch = 1;
  int32_t context = 32768;  // keys of each sequence
  int32_t query_heads = 32, kv_heads = 8, head_dim = 128;
  DType dtype = DType::kBF16;
  Budget budget;
  std::vector<uint8_t> needed;  // layer 0: [kv_heads]; empty = all
  int32_t page_size = 64;       // 0 = packed
  int32_t repetitions = 15;
  float query_deviation = 3;
};

/// Roles in the order dense, layer0, anchor, reuse of the anchor's sets, reuse of random sets of that size.
struct CudaAttentionBenchResult {
  std::string device;
  double read_gb_per_s = 0;              // a kernel that only reads, in the same run
  double bf16_tflop_per_s = 0;           // prefill: a kernel that only multiplies, in the same run
  std::array<double, 5> ms{}, min_ms{};  // median and least
  int64_t members = 0;                   // of all sets of a call
  double member_rows = 0;                // query rows times members, summed over them
  double largest_error = 0;  // of the dense output of one sequence's last row and first KV head, against fp64
  double allowed_error = 0;
};

/// K and V are uniform of deviation 1. Every role is captured in a graph; a large buffer is read before each
/// replay, which leaves nothing of the call in the second-level cache. said hears what is being done and may
/// throw. Throws Unsupported, OutOfMemory, DeviceError.
CudaAttentionBenchResult bench_attention_by_role(const CudaAttentionBenchOptions& options,
                                                 const std::function<void(double, const std::string&)>& said);

}  // namespace kascade
