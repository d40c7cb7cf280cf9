// SPDX-License-Identifier: Apache-2.0
// The statistics of one prompt (docs/method.md section 9.1-9.3): the engine runs, an observer gathers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kascade/budget.h"
#include "kascade/engine.h"

namespace kascade {

struct StatisticsSettings {
  int tile = 32;                // query tokens, 1..128
  int similarity_k = 32;        // K_cal; 0 = the run-time budget below
  Budget budget;                // read when similarity_k is 0
  bool sparse_forward = false;  // every layer is itself cut to its sets, as in the published code
  int64_t max_new_tokens = 32;  // greedy, each one more tile; stops at a token that ends generation
};

/// What one prompt gives. L = layers, G = KV heads.
struct PromptStatistics {
  // [L, L, G, G], index [i, j, r, a]: share of the mass of layer j, KV head r that the sets of layer i, head
  // a capture; over the prompt's tiles and decode steps. Zero for j < i.
  std::vector<float> similarity_min, similarity_mean;
  std::vector<double> importance;  // [L] 1 - mean over tokens of cos(x, x + attention output)
  int64_t tiles = 0;               // prompt tiles, and one per decoded token but the first
  int64_t prompt_tokens = 0;
  std::vector<int32_t> generated;  // greedy continuation, the ending token included
};

/// Runs tokens through engine and gathers. Memory besides the caches grows with prefill_chunk, never with the
/// square of the prompt. When keep is given, the sequence (prompt and generated tokens but the last) is
/// handed out instead of dropped; its keys are those of the forward mode. on_tokens hears of progress. Does
/// not depend on threads or chunking.
PromptStatistics collect_statistics(Engine& engine, std::span<const int32_t> tokens,
                                    const StatisticsSettings& settings,
                                    const std::atomic<bool>* cancel = nullptr,
                                    const std::function<void(int64_t tokens_done)>& on_tokens = {},
                                    std::unique_ptr<Sequence>* keep = nullptr);

}  // namespace kascade
