// SPDX-License-Identifier: Apache-2.0
// config.json of a safetensors model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "kascade/model.h"

namespace kascade {

struct SafetensorsConfig {
  ModelConfig model;          // tied_embeddings as stated
  bool states_tying = false;  // whether "tie_word_embeddings" is there at all
  std::optional<int32_t> bos;
  std::vector<int32_t> eos;  // one id, several, or none
};

/// Fields that change the mathematics are honoured, or refused by name unless their value changes nothing; so
/// are unknown fields whose names sound as if they did. Throws BadFile or Unsupported naming source and
/// field.
SafetensorsConfig read_safetensors_config(const Json& root, const std::string& source);

}  // namespace kascade
