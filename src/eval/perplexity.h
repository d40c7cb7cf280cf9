// SPDX-License-Identifier: Apache-2.0
// NLL of a text under a policy, beside dense attention over the same tokens: the first tokens go through
// prefill, the rest, teacher-forced, through one-token decode steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/region_score.h"
#include "kascade/engine.h"

namespace kascade {

struct PerplexityOptions {
  std::optional<int64_t> prefill;     // tokens that go through prefill; default all
  std::optional<int64_t> score_last;  // scored tokens inside the prefill; default all but the first
  int32_t prefill_chunk = 512;        // rows of one forward; at most the engine's own
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(int64_t done_tokens, int64_t all_tokens)> progress;
};

struct PerplexityResult {
  int64_t tokens = 0;
  int64_t prefill_tokens = 0;
  RegionScore prefill;  // the last score_last tokens inside the prefill
  RegionScore first;    // the first token after it
  RegionScore decode;   // the token after each decode step
  double seconds = 0;
};

/// Policy and dense run side by side on two sequences of one engine (its cache holds 2 * tokens or more; a
/// dense policy or null runs once). Logits are made in blocks of rows, so memory does not grow with the text
/// besides the two caches. Throws BadArgument for fewer than 2 tokens, prefill outside [1, tokens] or
/// score_last outside [0, prefill - 1].
PerplexityResult perplexity(Engine& engine, std::span<const int32_t> tokens, const Policy* policy,
                            const PerplexityOptions& options);

}  // namespace kascade
