// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_attention_cuda.h"

#include "base/check.h"

#if defined(KASCADE_CUDA)
#include "attention/cuda/bench/decode_bench.h"
#include "policy/preset_budgets.h"
#endif

namespace kascade {

#if defined(KASCADE_CUDA)

AttentionBenchResult bench_attention_cuda(const AttentionBenchOptions& o,
                                          const std::function<void(double, const std::string&)>& progress,
                                          const std::atomic<bool>* cancel) {
  require<Unsupported>(o.phase == Phase::kDecode, "--device cuda: only decode has a bench (bench decode)");
  require<BadArgument>(o.context <= INT32_MAX, "context is {}, must be at most {}", o.context, INT32_MAX);
  PolicyOptions policy;
  policy.budget = o.budget;
  policy.percent = o.percent;
  CudaDecodeBenchOptions options;
  options.batch = o.batch;
  options.context = static_cast<int32_t>(o.context);
  options.query_heads = o.query_heads;
  options.kv_heads = o.kv_heads;
  options.head_dim = o.head_dim;
  options.dtype = o.dtype;
  options.budget = preset_budgets(policy, o.tile).decode;
  options.needed = o.needed;
  options.page_size = o.page_size;
  if (o.repetitions > 0) options.repetitions = o.repetitions;
  const CudaDecodeBenchResult times = bench_decode_cuda(options, [&](double share, const std::string& doing) {
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("bench: cancelled");
    if (progress) progress(share, doing);
  });

  AttentionBenchResult result;
  result.options = o;
  result.kernel = "cuda-sm90";
  result.machine = times.device;
  result.device = "cuda";
  result.read_gb_per_s = times.read_gb_per_s;
  result.largest_error = times.largest_error;
  result.allowed_error = times.allowed_error;
  result.least_captured = -1;
  // What a role has to read at least: K and V, or K and the chosen rows of both, or those and their list.
  const double row_bytes = 2.0 * o.head_dim;
  const double all = static_cast<double>(o.batch) * static_cast<double>(o.context) * o.kv_heads * row_bytes;
  const double own =
      options.budget.own_tile == OwnTile::kOnTop ? static_cast<double>(o.batch) * o.kv_heads : 0;
  const double chosen = (static_cast<double>(times.members) + own) * row_bytes;
  const double reuse = 2 * chosen + 4.0 * static_cast<double>(times.members);
  const double bytes[] = {2 * all, 2 * all, all + 2 * chosen, reuse, reuse};
  const char* const names[] = {"dense", "layer0", "anchor", "reuse", "reuse_random"};
  for (size_t role = 0; role < times.ms.size(); ++role) {
    AttentionBenchRole entry;
    entry.name = names[role];
    entry.ms = times.ms[role];
    entry.min_ms = times.min_ms[role];
    entry.gb_per_s = bytes[role] * 1e-6 / entry.ms;
    entry.share_of_limit = entry.gb_per_s / times.read_gb_per_s;
    result.roles.push_back(entry);
  }
  double layers = 0, total = 0;
  for (size_t i = 0; i < o.roles.size(); ++i) {
    layers += o.roles[i];
    total += o.roles[i] * times.ms[i + 1];
  }
  require<BadArgument>(layers > 0, "roles (all) is 0, must be at least 1");
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
