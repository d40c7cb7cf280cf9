// SPDX-License-Identifier: Apache-2.0
// Walks the tree of a chat template and writes its output.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "kascade/chat_template.h"
#include "model/jinja_ast.h"
#include "model/jinja_value.h"

namespace kascade::jinja {

/// Renders block with the given variables, whose values must belong to machine. Throws BadFile (the template
/// failed or passed a limit) or Unsupported (it uses what the subset lacks), naming the line.
RenderedChat evaluate(Machine& machine, const Block& block,
                      const std::vector<std::pair<std::string_view, Value>>& variables);

}  // namespace kascade::jinja
