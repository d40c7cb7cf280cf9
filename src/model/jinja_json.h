// SPDX-License-Identifier: Apache-2.0
// The filter tojson, as chat templates know it: Python's json.dumps with ensure_ascii off.
#pragma once

#include "model/jinja_builtins.h"

namespace kascade::jinja {

/// Arguments: ensure_ascii, indent, separators, sort_keys.
Value to_json(Machine& machine, const Value& input, const Arguments& arguments);

}  // namespace kascade::jinja
