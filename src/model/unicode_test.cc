// SPDX-License-Identifier: Apache-2.0
#include "model/unicode.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "model/tokenizer_test_data.h"

namespace kascade {
namespace {

std::string utf8(char32_t code) {
  std::string text;
  append_utf8(text, code);
  return text;
}

bool is_surrogate(char32_t code) { return code >= 0xD800 && code < 0xE000; }

TEST(Unicode, EveryCodePointRoundTrips) {
  for (char32_t code = 0; code < 0x110000; ++code) {
    const std::string text = utf8(code);
    const Utf8Char decoded = decode_utf8(text);
    if (is_surrogate(code)) {
      ASSERT_EQ(decoded.bytes, 0u) << std::hex << static_cast<uint32_t>(code);
    } else {
      ASSERT_EQ(decoded.code, code);
      ASSERT_EQ(decoded.bytes, text.size()) << std::hex << static_cast<uint32_t>(code);
    }
  }
}

TEST(Unicode, InvalidSequencesAreInvalid) {
  for (const char* text : {"\x80",
                           "\xBF",
                           "\xC0\x80",
                           "\xC1\xBF",
                           "\xC3",
                           "\xC3(",
                           "\xE0\x80\x80",
                           "\xE0\x9F\xBF",
                           "\xE2\x82",
                           "\xE2(\xA1",
                           "\xED\xA0\x80",
                           "\xED\xBF\xBF",
                           "\xF0\x80\x80\x80",
                           "\xF0\x8F\xBF\xBF",
                           "\xF0\x9F\xA4",
                           "\xF4\x90\x80\x80",
                           "\xF5\x80\x80\x80",
                           "\xFE",
                           "\xFF",
                           ""}) {
    EXPECT_EQ(decode_utf8(text).bytes, 0u) << text;
  }
}

// Every two bytes, followed by bytes that complete whatever they began: exactly the sequences of the
// standard's table.
TEST(Unicode, LeadAndSecondByteAgreeWithAppend) {
  std::vector<bool> begins(0x10000, false);
  for (char32_t code = 0x80; code < 0x110000; ++code) {
    if (is_surrogate(code)) continue;
    const std::string text = utf8(code);
    begins[static_cast<unsigned char>(text[0]) << 8 | static_cast<unsigned char>(text[1])] = true;
  }
  for (unsigned first = 0x80; first < 0x100; ++first) {
    for (unsigned second = 0; second < 0x100; ++second) {
      const std::string text = {static_cast<char>(first), static_cast<char>(second), '\x80', '\x80'};
      ASSERT_EQ(decode_utf8(text).bytes > 0, begins[first << 8 | second]) << first << " " << second;
    }
  }
}

TEST(Unicode, ValidPrefixEndsAtTheFirstBadByte) {
  for (const std::string& good : {std::string("a"), utf8(0xE9), utf8(0x4E2D), utf8(0x1F916)}) {
    for (size_t characters = 0; characters < 20; ++characters) {
      for (size_t offset = 0; offset < 9; ++offset) {  // around the eight bytes that are read at once
        std::string text(offset, 'x');
        for (size_t i = 0; i < characters; ++i) text += good;
        EXPECT_EQ(valid_utf8_prefix(text), text.size());
        EXPECT_EQ(valid_utf8_prefix(text + "\xFFzzzzzzzzz"), text.size());
        EXPECT_EQ(valid_utf8_prefix(text + "\xE2\x82"), text.size());
      }
    }
  }
}

TEST(Unicode, UnfinishedTailIsWhatLaterBytesCanComplete) {
  // Against a search: a tail is unfinished when some continuation makes it one character.
  const auto search = [](const std::string& text) -> size_t {
    for (size_t tail = std::min<size_t>(3, text.size()); tail > 0; --tail) {
      const std::string begun = text.substr(text.size() - tail);
      for (const std::string& more :
           {std::string("\x80"), std::string("\xBF"), std::string("\x80\x80"), std::string("\xBF\xBF"),
            std::string("\x80\x80\x80"), std::string("\xBF\xBF\xBF")}) {
        if (decode_utf8(begun + more).bytes == begun.size() + more.size()) return tail;
      }
    }
    return 0;
  };
  for (const char32_t code : {0x7Fu, 0x80u, 0x7FFu, 0x800u, 0xD7FFu, 0xFFFDu, 0x10000u, 0x10FFFFu}) {
    const std::string text = utf8(code);
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      EXPECT_EQ(unfinished_utf8_tail(std::string("a").append(text, 0, cut)), cut == text.size() ? 0 : cut);
      EXPECT_EQ(unfinished_utf8_tail(text.substr(0, cut)), cut == text.size() ? 0 : cut);
    }
  }
  std::mt19937 random(1);
  const char bytes[] = {'a',    '\x80', '\x90', '\xA0', '\xBF', '\xC1', '\xC3',
                        '\xE0', '\xE2', '\xED', '\xF0', '\xF4', '\xF5'};
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (size_t left = random() % 5; left > 0; --left) text += bytes[random() % sizeof bytes];
    ASSERT_EQ(unfinished_utf8_tail(text), search(text));
  }
}

TEST(Unicode, WhiteSpaceIsTheReferences) {
  const Json fixture = load_tokenizer_fixture("unicode.json");
  std::vector<bool> expected(0x110000, false);
  for (const Json& range : fixture["spaces"]) {
    for (uint32_t code = range[0]; code <= range[1].get<uint32_t>(); ++code) expected[code] = true;
  }
  EXPECT_EQ(std::count(expected.begin(), expected.end(), true), 25);
  for (char32_t code = 0; code < 0x110000; ++code)
    ASSERT_EQ(is_white_space(code), expected[code]) << static_cast<uint32_t>(code);
}

TEST(Unicode, NfcIsTheReferences) {
  const Json fixture = load_tokenizer_fixture("unicode.json");
  for (const Json& pair : fixture["nfc"]) {
    EXPECT_EQ(normalize_nfc(pair[0].get<std::string>()), pair[1].get<std::string>()) << pair[0];
  }
  uint64_t hash = 0xCBF29CE484222325u;
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (is_surrogate(code)) continue;
    for (const char byte : normalize_nfc(utf8(code)))
      hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
  }
  EXPECT_EQ(fmt::format("{:016x}", hash), fixture["nfc_hash"].get<std::string>());
}

TEST(Unicode, NfcIsStableAndKeepsInvalidBytes) {
  std::mt19937 random(2);
  for (int i = 0; i < 5000; ++i) {
    const std::string text = random_text(random, 12);
    const std::string once = normalize_nfc(text);
    ASSERT_EQ(normalize_nfc(once), once);
  }
  EXPECT_EQ(normalize_nfc("e\xCC\x81\xFF"
                          "e\xCC\x81\xE2\x82"),
            "\xC3\xA9\xFF\xC3\xA9\xE2\x82");
  EXPECT_EQ(normalize_nfc("\xFF\xCC\x81"), "\xFF\xCC\x81")
      << "a mark composes with nothing across an invalid byte";
  for (int i = 0; i < 2000; ++i) normalize_nfc(random_bytes(random, 40));
}

TEST(Unicode, NfcOfALongRunOfMarksSortsThem) {
  std::string text = "a", expected = "\xC3\xA0";  // a + U+0300 compose to U+00E0
  for (int i = 0; i < 100000; ++i) text += utf8(0x0300) + utf8(0x0323);
  // U+0323 has the lower class: it comes first, and the first of them composes instead.
  expected = utf8(0x1EA1);
  for (int i = 1; i < 100000; ++i) expected += utf8(0x0323);
  for (int i = 0; i < 100000; ++i) expected += utf8(0x0300);
  EXPECT_EQ(normalize_nfc(text), expected);
}

}  // namespace
}  // namespace kascade
