// SPDX-License-Identifier: Apache-2.0
// What the tests of tokenizers share: the fixtures and a generator of nasty text.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/json.h"
#include "kascade/tokenizer.h"
#include "model/unicode.h"

namespace kascade {

inline Json load_tokenizer_fixture(const std::string& name) {
  return load_json(std::string(KASCADE_FIXTURES) + "/tokenizer/" + name);
}

/// The small byte-level vocabulary of the fixtures; bytes 0x06 and 0xFF have no token.
inline TokenizerData small_bpe(const std::string& pre_tokenizer) {
  static const Json fixture = load_tokenizer_fixture("bpe.json");
  TokenizerData data;
  data.source = "bpe.json";
  data.pre_tokenizer = pre_tokenizer;
  data.tokens = fixture["tokens"].get<std::vector<std::string>>();
  data.merges = fixture["merges"].get<std::vector<std::string>>();
  return data;
}

/// A code point from one of several neighbourhoods, so that every class of characters is met.
inline char32_t random_code(std::mt19937& random) {
  constexpr char32_t kLimits[] = {0x30, 0x80, 0x300, 0x3100, 0x10000, 0x20000, 0x110000};
  for (;;) {
    const char32_t limit = kLimits[random() % std::size(kLimits)];
    const char32_t code = static_cast<char32_t>(random() % limit);
    if (code < 0xD800 || code >= 0xE000) return code;
  }
}

inline std::string random_text(std::mt19937& random, size_t most_characters) {
  std::string text;
  for (size_t left = random() % (most_characters + 1); left > 0; --left) {
    const std::string before = text;
    append_utf8(text, random_code(random));
    if (random() % 4 == 0) text += text.substr(before.size());  // runs
  }
  return text;
}

inline std::string random_bytes(std::mt19937& random, size_t most_bytes) {
  std::string bytes;
  for (size_t left = random() % (most_bytes + 1); left > 0; --left)
    bytes.push_back(static_cast<char>(random()));
  return bytes;
}

}  // namespace kascade
