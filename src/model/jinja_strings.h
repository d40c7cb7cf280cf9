// SPDX-License-Identifier: Apache-2.0
// Methods of strings in chat templates, as Python has them.
#pragma once

#include <string_view>

#include "model/jinja_builtins.h"

namespace kascade::jinja {

Value call_string_method(Machine& machine, const Text& text, std::string_view name,
                         const Arguments& arguments);

/// The integer that a string spells, in base 10; otherwise for any other string.
Value parse_integer(Machine& machine, const Text& text, const Value& otherwise);

/// The filter title: unlike the method, only white space and opening brackets end a word.
Value title_words(Machine& machine, const Text& text);

}  // namespace kascade::jinja
