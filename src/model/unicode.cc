// SPDX-License-Identifier: Apache-2.0
#include "model/unicode.h"

#include <cstdint>
#include <cstring>

namespace kascade {

Utf8Char decode_utf8(std::string_view text) {
  if (text.empty()) return {};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  // The second byte alone rules out overlong forms, surrogates and codes above U+10FFFF (Unicode standard,
  // table 3-7).
  size_t bytes = 0;
  unsigned low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    bytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    bytes = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    bytes = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {};
  }
  if (text.size() < bytes || byte(1) < low || byte(1) > high) return {};
  char32_t code = lead & (0x7Fu >> bytes);
  code = (code << 6) | (byte(1) & 0x3F);
  for (size_t i = 2; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    code = (code << 6) | (byte(i) & 0x3F);
  }
  return {code, bytes};
}

void append_utf8(std::string& text, char32_t code) {
  const auto put = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    uint64_t word;
    if (text.size() - i >= sizeof word) {
      std::memcpy(&word, text.data() + i, sizeof word);
      if ((word & 0x8080808080808080u) == 0) {  // eight ASCII characters at once
        i += sizeof word;
        continue;
      }
    }
    const size_t bytes = decode_utf8(text.substr(i)).bytes;
    if (bytes == 0) break;
    i += bytes;
  }
  return i;
}

size_t unfinished_utf8_tail(std::string_view text) {
  for (size_t tail = 1; tail <= 3 && tail <= text.size(); ++tail) {
    const auto lead = static_cast<unsigned char>(text[text.size() - tail]);
    if ((lead & 0xC0) == 0x80) continue;  // a continuation byte: the lead byte stands before it
    // Unfinished when filling up with the smallest or the largest continuation bytes makes a character.
    for (const char* fill : {"\x80\x80\x80", "\xBF\xBF\xBF"}) {
      const std::string filled = std::string(text.substr(text.size() - tail)) + fill;
      if (decode_utf8(filled).bytes > tail) return tail;
    }
    return 0;
  }
  return 0;
}

bool is_white_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

}  // namespace kascade
