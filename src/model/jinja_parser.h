// SPDX-License-Identifier: Apache-2.0
// Chat template source to tree, by the grammar of Jinja 3.1.
#pragma once

#include <string_view>

#include "model/jinja_ast.h"

namespace kascade::jinja {

/// Throws BadFile (syntax, or nesting beyond kMaxTreeDepth) or Unsupported (a statement outside the subset),
/// with the line.
Block parse_template(std::string_view source);

}  // namespace kascade::jinja
