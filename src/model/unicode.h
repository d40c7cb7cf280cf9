// SPDX-License-Identifier: Apache-2.0
// UTF-8 and the few facts of Unicode that tokenizers and templates need.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace kascade {

/// One decoded character; bytes = 0 where no valid UTF-8 sequence begins.
struct Utf8Char {
  char32_t code = 0;
  size_t bytes = 0;
};

/// The character at the start of text. Strict: overlong forms, surrogates and codes above U+10FFFF are
/// invalid.
Utf8Char decode_utf8(std::string_view text);

/// Appends the UTF-8 form of a code point up to U+10FFFF.
void append_utf8(std::string& text, char32_t code);

/// Bytes of the longest valid UTF-8 prefix of text.
size_t valid_utf8_prefix(std::string_view text);

/// Bytes at the end of text (0 to 3) that begin a character which later bytes could still complete.
size_t unfinished_utf8_tail(std::string_view text);

/// Property White_Space (what Unicode regular expressions mean by \s).
bool is_white_space(char32_t code);

/// Canonical composition (NFC) of valid UTF-8, by the tables of Unicode 14 and the algorithm of UAX #15. Text
/// without combining or composed characters comes back as it is, fast.
std::string normalize_nfc(std::string_view text);

}  // namespace kascade
