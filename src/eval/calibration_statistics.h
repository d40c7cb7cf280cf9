// SPDX-License-Identifier: Apache-2.0
// The statistics of one prompt (docs/method.md, "Calibration"): the engine runs, an observer gathers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kascade/budget.h"
#include "kascade/calibrate.h"
#include "kascade/engine.h"

namespace kascade {

struct StatisticsSettings {
  int tile = 32;          // query tokens, 1..128
  int similarity_k = 32;  // K_cal; 0 = the run-time budget below
  Budget budget;          // read when similarity_k is 0: of prompt tiles
  Budget decode_budget;   // and of generated tokens
  // Own-tile mass of the anchor's head in place of the reuse layer's (TileWeights::own_mass_of_heads).
  bool published_own_mass = false;
  bool sparse_forward = false;  // every layer is itself cut to its sets, as in the published code
  int64_t max_new_tokens = 32;  // greedy, each one more tile; ends at a token that ends generation
  int32_t prefill_chunk = 512;  // rows of one forward
};

/// What one prompt gives.
struct CollectedPrompt {
  PromptStatistics statistics;     // tiles: prompt tiles, and one per generated token but the last
  std::vector<int32_t> generated;  // greedy continuation, the ending token included
};

/// Runs tokens through engine and gathers. Memory besides the cache grows with the rows of a chunk times the
/// length, never with its square. on_tokens hears of the prompt's tokens as they are done. Does not depend on
/// threads, nor on prefill_chunk (at most the engine's; cut to a multiple of the tile). Throws BadArgument
/// for an empty prompt or settings out of range, Unsupported when prompt and new tokens pass the context.
CollectedPrompt collect_statistics(Engine& engine, std::span<const int32_t> tokens,
                                   const StatisticsSettings& settings,
                                   const std::atomic<bool>* cancel = nullptr,
                                   const std::function<void(int64_t tokens_done)>& on_tokens = {});

/// A prompt under dense attention: its cache, with the greedy tokens but the last, and those tokens.
struct DensePrompt {
  std::unique_ptr<Sequence> sequence;
  std::vector<int32_t> generated;
};

/// The same prompt and continuation without gathering. (A selecting layer's dense output differs from dense
/// attention's in its last digits, so whoever compares with dense attention starts from here.)
DensePrompt prefill_dense(Engine& engine, std::span<const int32_t> tokens, int64_t max_new_tokens,
                          const std::atomic<bool>* cancel = nullptr);

}  // namespace kascade
