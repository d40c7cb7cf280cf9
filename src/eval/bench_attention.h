// SPDX-License-Identifier: Apache-2.0
// Timings of the attention operator by role, against the machine's own limits.
// Protocol: every timed call uses another copy of K and V and fresh sets, over four times the last-level
// cache in all, so that nothing is cached that would not be in a real run; roles take turns; medians are
// reported.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kascade/attention.h"
#include "kascade/dtype.h"
#include "kascade/policy.h"

namespace kascade {

/// What is timed, in the order of the results; the last is reuse of random sets as large as the anchor's.
constexpr std::array<const char*, 5> kTimedRoleNames = {role_name(Role::kDense), role_name(Role::kLayer0),
                                                        role_name(Role::kAnchor), role_name(Role::kReuse),
                                                        "reuse_random"};

struct AttentionBenchOptions {
  Phase phase = Phase::kDecode;  // kDecode: one row a sequence; kPrefill: whole prompts
  std::string kernel;            // "" = the best available
  int32_t batch = 1;
  int64_t context = 32768;  // keys of each sequence
  double percent = 10;
  BudgetPreset budget = BudgetPreset::kDefault;
  int32_t query_heads = 32, kv_heads = 8, head_dim = 128;
  DType dtype = DType::kBF16;                 // of K and V
  std::array<int32_t, 3> roles = {1, 4, 27};  // layers: layer 0, anchors, reuse
  std::vector<uint8_t> needed;  // layer 0: [kv_heads] KV heads whose sets anyone reads; empty = all
  int32_t page_size = 64;       // of the cache; 0 = contiguous
  int32_t tile = 32;            // of prefill
  int32_t threads = 0;          // 0 = all processors
  int32_t repetitions = 0;      // of each role; 0 = 15 in decode, 3 in prefill
  std::string commit;           // of the build, for the report; "" = unknown
};

struct AttentionBenchRole {
  std::string name;  // of kTimedRoleNames
  double ms = 0;     // median
  double min_ms = 0;
  double gb_per_s = 0;     // decode: the bytes of K, V and lists that the role has to read, over the median
  double tflop_per_s = 0;  // prefill: the operations that the role has to do, over the median
  double share_of_limit = 0;
};

struct AttentionBenchResult {
  AttentionBenchOptions options;
  std::string kernel;
  int32_t threads = 0;  // of the CPU; 0 on a GPU
  std::string machine;
  std::string device = "cpu";  // or "cuda"
  double read_gb_per_s = 0;
  double f32_tflop_per_s = 0;
  double bf16_tflop_per_s = 0;  // of bf16 dot products, where the kernel uses them; else of fp32
  double peak_tflop_per_s = 0;  // the one of the two that the kernel multiplies with
  std::vector<AttentionBenchRole> roles;
  double mean_ms = 0;        // of a layer, weighted by the counts of the roles
  double speedup = 0;        // dense / mean
  double largest_error = 0;  // of the rows checked against the reference
  double allowed_error = 0;
  double least_captured =
      0;  // mass of the checked sets over the best possible with as many members; < 0: unknown
};

/// Throws BadArgument, naming it, for an option out of range.
void check_attention_bench(const AttentionBenchOptions& options);

/// Runs the bench. progress (may be empty) hears what is being done, in [0, 1]; cancel (may be null) ends it
/// with Cancelled. Throws BadArgument for options out of range, OutOfMemory, Unsupported, and Error when an
/// answer is wrong or a share of the limit exceeds 1.
AttentionBenchResult bench_attention(
    const AttentionBenchOptions& options,
    const std::function<void(double share, const std::string& doing)>& progress,
    const std::atomic<bool>* cancel);

/// The document of `bench decode | prefill --json`: machine, shape, roles, mean_ms, speedup, peers, commit,
/// date.
std::string bench_attention_json(const AttentionBenchResult& result);

/// The same as a table for people.
std::string bench_attention_table(const AttentionBenchResult& result);

}  // namespace kascade
