// SPDX-License-Identifier: Apache-2.0
// Text of unknown origin, made fit for a message.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kascade {

/// text in single quotes on one line: control bytes and bytes outside ASCII appear as \xNN, and what is
/// longer than max_bytes is cut and marked with "...". For names and values that come from a file.
std::string quote_text(std::string_view text, size_t max_bytes = 80);

}  // namespace kascade
