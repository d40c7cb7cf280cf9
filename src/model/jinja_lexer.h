// SPDX-License-Identifier: Apache-2.0
// Cuts a chat template into tokens, with the white-space rules that chat templates are written for:
// trim_blocks and lstrip_blocks on, one newline at the end of the file dropped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kascade::jinja {

enum class TokenKind : uint8_t {
  kText,           // outside of tags
  kVariableBegin,  // {{
  kVariableEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,  // text: with escapes resolved
  kInteger,
  kFloat,
  kOperator,  // text: as written
  kEnd,
};

struct Token {
  TokenKind kind;
  std::string text;
  int line;
};

/// Throws BadFile with the line.
std::vector<Token> tokenize_template(std::string_view source);

}  // namespace kascade::jinja
