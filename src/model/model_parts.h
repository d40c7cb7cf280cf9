// SPDX-License-Identifier: Apache-2.0
// What a loader makes of a file or directory; Model::open puts a tokenizer on top.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kascade/model.h"

namespace kascade {

struct ModelParts {
  ModelConfig config;
  ModelWeights weights;  // points into the bytes that were read, or into copies
  TokenizerData tokenizer;
  std::string chat_template;
  std::vector<std::unique_ptr<std::byte[]>> copies;  // of tensors that the file does not align
};

// Limits of what a configuration may claim, far above any model in use; products of three fit in 63 bits.
constexpr int64_t kMaxLayers = 1 << 12;
constexpr int64_t kMaxWidth = 1 << 20;    // hidden, ffn
constexpr int64_t kMaxHeads = 1 << 12;    // query_heads, kv_heads
constexpr int64_t kMaxHeadDim = 1 << 12;  // head_dim
constexpr int64_t kMaxTokens = 1 << 22;   // vocabulary
constexpr int64_t kMaxContext = 1 << 30;  // context

/// Adds eos, and every control token with a spelling that is known to end a text or a turn, to data.end_ids;
/// each once.
void add_end_ids(TokenizerData& data);

}  // namespace kascade
