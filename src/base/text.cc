// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <fmt/format.h>

#include <iterator>

namespace kascade {

std::string quote_text(std::string_view text, size_t max_bytes) {
  std::string result = "'";
  for (const char c : text.substr(0, max_bytes)) {
    if (c >= ' ' && c <= '~')
      result += c;
    else
      fmt::format_to(std::back_inserter(result), "\\x{:02x}", static_cast<unsigned char>(c));
  }
  result += text.size() > max_bytes ? "'..." : "'";
  return result;
}

}  // namespace kascade
