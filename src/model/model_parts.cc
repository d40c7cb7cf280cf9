// SPDX-License-Identifier: Apache-2.0
#include "model/model_parts.h"

#include <algorithm>

namespace kascade {
namespace {

// Of llama-3, qwen and SmolLM vocabularies. Instruct models stop at the first, base models at the second of a
// pair.
constexpr const char* kEndSpellings[] = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>",
                                         "<|eom_id|>"};

}  // namespace

void add_end_ids(TokenizerData& data) {
  const auto add = [&](int32_t id) {
    if (std::find(data.end_ids.begin(), data.end_ids.end(), id) == data.end_ids.end())
      data.end_ids.push_back(id);
  };
  if (data.eos) add(*data.eos);
  for (size_t id = 0; id < data.types.size(); ++id) {
    if (data.types[id] != TokenType::kControl) continue;
    for (const char* spelling : kEndSpellings)
      if (data.tokens[id] == spelling) add(static_cast<int32_t>(id));
  }
}

}  // namespace kascade
