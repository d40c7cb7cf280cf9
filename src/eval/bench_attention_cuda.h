// SPDX-License-Identifier: Apache-2.0
// The bench of bench_attention.h on the GPU.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "eval/bench_attention.h"

namespace kascade {

/// Every call is replayed from a graph, after a read that empties the second-level cache. Throws Unsupported
/// where the build has no CUDA kernels and for what they do not support, BadArgument for another kernel or
/// threads, and otherwise as bench_attention().
AttentionBenchResult bench_attention_cuda(
    const AttentionBenchOptions& options,
    const std::function<void(double share, const std::string& doing)>& progress,
    const std::atomic<bool>* cancel);

}  // namespace kascade
