// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_attention_cuda.h"

#include "base/check.h"

#if defined(KASCADE_CUDA)
#include <algorithm>
#include <array>

#include "attention/cuda/bench/attention_bench.h"
#include "attention/cuda/cuda_attention.h"
#include "policy/preset_budgets.h"
#endif

namespace kascade {

#if defined(KASCADE_CUDA)

namespace {

/// What a role of decode has to read at least: K and V, or K and the chosen rows of both, or those and their
/// list.
std::array<double, 5> bytes(const CudaAttentionBenchOptions& o, const CudaAttentionBenchResult& times) {
  const double row_bytes = 2.0 * o.head_dim;
  const double all = static_cast<double>(o.batch) * o.context * o.kv_heads * row_bytes;
  const double own = o.budget.own_tile == OwnTile::kOnTop ? static_cast<double>(o.batch) * o.kv_heads : 0;
  const double chosen = (static_cast<double>(times.members) + own) * row_bytes;
  const double reuse = 2 * chosen + 4.0 * static_cast<double>(times.members);
  return {2 * all, 2 * all, all + 2 * chosen, reuse, reuse};
}

/// Operations that a role of prefill has to do at least: Q K^T and P V of all pairs that are seen or chosen,
/// and of an anchor Q K^T of all.
std::array<double, 5> operations(const AttentionBenchOptions& o, const CudaAttentionBenchResult& times) {
  const double length = static_cast<double>(o.context), product = 2.0 * o.head_dim;
  const double all = o.batch * length * (length + 1) / 2 * o.query_heads * product;
  double own = 0;  // pairs of a sequence within tiles
  for (int64_t begin = 0; begin < o.context; begin += o.tile) {
    const double rows = static_cast<double>(std::min<int64_t>(o.tile, o.context - begin));
    own += rows * (rows + 1) / 2;
  }
  const double group = static_cast<double>(o.query_heads) / o.kv_heads;
  const double chosen = (times.member_rows + own * o.batch * o.kv_heads) * group * product;
  return {2 * all, 2 * all, all + chosen, 2 * chosen, 2 * chosen};
}

}  // namespace

AttentionBenchResult bench_attention_cuda(const AttentionBenchOptions& o,
                                          const std::function<void(double, const std::string&)>& progress,
                                          const std::atomic<bool>* cancel) {
  check_attention_bench(o);
  require<BadArgument>(o.kernel.empty() || o.kernel == cuda_sm90_kernel.name,
                       "kernel: a GPU has {}, got '{}' (--device cpu has others)", cuda_sm90_kernel.name,
                       o.kernel);
  require<BadArgument>(o.threads == 0, "threads: a GPU takes none, got {} (--device cpu does)", o.threads);
  require<Unsupported>(o.dtype != DType::kF32, "dtype: a GPU takes bf16 and f16, got f32");
  PolicyOptions policy;
  policy.budget = o.budget;
  policy.percent = o.percent;
  CudaAttentionBenchOptions options;
  options.batch = o.batch;
  options.context = static_cast<int32_t>(o.context);
  options.query_heads = o.query_heads;
  options.kv_heads = o.kv_heads;
  options.head_dim = o.head_dim;
  options.dtype = o.dtype;
  const bool prefill = o.phase == Phase::kPrefill;
  options.prefill = prefill;
  options.tile = o.tile;
  const PresetBudgets budgets = preset_budgets(policy, o.tile);
  options.budget = prefill ? budgets.prefill : budgets.decode;
  options.needed = o.needed;
  options.page_size = o.page_size;
  options.repetitions = o.repetitions > 0 ? o.repetitions : prefill ? 5 : 15;
  const CudaAttentionBenchResult times =
      bench_attention_by_role(options, [&](double share, const std::string& doing) {
        if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("bench: cancelled");
        if (progress) progress(share, doing);
      });

  AttentionBenchResult result;
  result.options = o;
  result.kernel = cuda_sm90_kernel.name;
  result.machine = times.device;
  result.device = "cuda";
  result.read_gb_per_s = times.read_gb_per_s;
  result.bf16_tflop_per_s = result.peak_tflop_per_s = times.bf16_tflop_per_s;
  result.largest_error = times.largest_error;
  result.allowed_error = times.allowed_error;
  result.least_captured = -1;
  const std::array<double, 5> least = prefill ? operations(o, times) : bytes(options, times);
  for (size_t role = 0; role < times.ms.size(); ++role) {
    AttentionBenchRole entry;
    entry.name = kTimedRoleNames[role];
    entry.ms = times.ms[role];
    entry.min_ms = times.min_ms[role];
    if (prefill) {
      entry.tflop_per_s = least[role] * 1e-9 / entry.ms;
      entry.share_of_limit = entry.tflop_per_s / times.bf16_tflop_per_s;
    } else {
      entry.gb_per_s = least[role] * 1e-6 / entry.ms;
      entry.share_of_limit = entry.gb_per_s / times.read_gb_per_s;
    }
    result.roles.push_back(entry);
  }
  double layers = 0, total = 0;
  for (size_t i = 0; i < o.roles.size(); ++i) {
    layers += o.roles[i];
    total += o.roles[i] * times.ms[i + 1];
  }
  result.mean_ms = total / layers;
  result.speedup = times.ms[0] / result.mean_ms;
  return result;
}

#else

AttentionBenchResult bench_attention_cuda(const AttentionBenchOptions&,
                                          const std::function<void(double, const std::string&)>&,
                                          const std::atomic<bool>*) {
  throw Unsupported("--device cuda: this build has no CUDA kernels (auto, cpu)");
}

#endif

}  // namespace kascade
