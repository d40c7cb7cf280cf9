// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "model/model_directory.h"
#include "model/model_parts.h"

namespace kascade {

/// Configuration, weights, tokenizer data and chat template of a model in config.json, model.safetensors (or
/// the shards that model.safetensors.index.json names, and no other file), tokenizer.json and, where present,
/// tokenizer_config.json and chat_template.jinja; each checked against the others. directory must outlive the
/// result. Throws BadFile, Unsupported or IoError naming file and field.
ModelParts read_safetensors_model(ModelDirectory& directory);

}  // namespace kascade
