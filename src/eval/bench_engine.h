// SPDX-License-Identifier: Apache-2.0
// Timing of the whole model: prefill and decode rates of policies on one prompt, in turns, in one process.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kascade/engine.h"

namespace kascade {

struct EngineBenchOptions {
  std::vector<std::shared_ptr<const Policy>> policies;
  std::vector<int32_t> prompt;  // token ids
  int64_t decode_tokens = 64;   // timed steps after the prompt, greedy
  int repetitions = 3;
  int threads = 0;
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(int64_t done, int64_t all)> progress;  // runs
};

/// Medians over the repetitions; repetitions go round the policies, so that drift of the machine hits all
/// alike.
struct EngineBenchResult {
  std::string policy;  // describe()
  double prefill_tokens_per_s = 0;
  double decode_tokens_per_s = 0;
  uint64_t memory_bytes = 0;       // the engine's own account after the run
  std::vector<int32_t> token_ids;  // of the last repetition
};

/// Throws BadArgument without policies, prompt or repetitions, Unsupported past the context.
std::vector<EngineBenchResult> bench_engine(std::shared_ptr<const PreparedModel> model,
                                            const EngineBenchOptions& options);

}  // namespace kascade
