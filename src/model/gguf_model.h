// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "model/model_parts.h"

namespace kascade {

/// Configuration, weights, tokenizer data and chat template of a GGUF model, each checked against the others.
/// file must outlive the result and start at an address divisible by 8; source names it in errors. Metadata
/// of the architecture that this engine does not implement is refused by name unless its value changes
/// nothing. Throws BadFile or Unsupported.
ModelParts read_gguf_model(std::span<const std::byte> file, const std::string& source);

}  // namespace kascade
