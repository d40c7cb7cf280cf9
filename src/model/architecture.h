// SPDX-License-Identifier: Apache-2.0
// Model architectures as data: one table entry each. Every file format's loader reads these tables.
#pragma once

#include <string>
#include <string_view>

#include "kascade/model.h"
#include "model/tensor_map.h"

namespace kascade {

struct Architecture {
  const char* name;             // ModelConfig::architecture, and "model_type" in config.json
  const char* gguf_name;        // "general.architecture"; null where converters write another entry's
  const char* class_name;       // in config.json's "architectures"
  RopeLayout gguf_rope_layout;  // how converters to GGUF order the rows of q and k
  bool qkv_bias;
  bool qk_norm;
};

/// Null when the name is unknown.
const Architecture* find_gguf_architecture(std::string_view gguf_name);
const Architecture* find_architecture(std::string_view name);

/// "llama, mistral, qwen2, qwen3", for messages.
std::string architecture_names();

enum class TensorNames { kGguf, kSafetensors };

/// Throws Unsupported or BadFile, naming source, unless this engine can run these shapes: query heads a
/// multiple of KV heads with at most 16 for each, head_dim a multiple of 8. The loaders have checked ranges.
void check_config(const ModelConfig& config, const std::string& source);

/// Takes every tensor of the architecture out of the map, each with the shape that config states. Throws
/// BadFile for a missing tensor, another shape or a value that is not finite, Unsupported for tensors left
/// over (they would change the mathematics). With config.tied_embeddings the head is the embedding, whether
/// or not the file has one.
ModelWeights take_weights(TensorMap& tensors, TensorNames names, const ModelConfig& config);

}  // namespace kascade
