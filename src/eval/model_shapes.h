// SPDX-License-Identifier: Apache-2.0
// Models that are timed without their files: shapes as data, and plans for them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kascade/model.h"
#include "kascade/plan.h"

namespace kascade {

/// "llama-3.1-8b", "qwen3-8b", "qwen2.5-1.5b".
std::vector<std::string> model_shape_names();

/// A model of that shape with neither weights nor tokenizer: only its configuration may be read. Its context
/// is at least context tokens. Throws BadArgument for other names.
std::shared_ptr<const Model> shape_model(const std::string& name, int64_t context);

/// The published head map of the Llama-3.1-8B or Qwen3-8B shape (data/plans). Other shapes get layer 0 and
/// four anchors at equal distances with heads mapped to themselves: it costs what a plan costs, and is
/// measured on nothing.
Plan published_plan(const ModelIdentity& model);

}  // namespace kascade
