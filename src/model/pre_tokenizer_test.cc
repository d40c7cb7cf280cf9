// SPDX-License-Identifier: Apache-2.0
// The regular expressions against a splitter written out by hand, over the classes that the reference library
// gives to every code point.
#include "model/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kascade/error.h"
#include "model/tokenizer_test_data.h"

namespace kascade {
namespace {

constexpr const char* kFamilies[] = {"smollm", "llama-bpe", "qwen2", "gpt-2"};

std::vector<std::string_view> pieces_of(const PreTokenizer& pre_tokenizer, std::string_view text) {
  std::vector<std::string_view> pieces;
  PreTokenizer::Walk walk(pre_tokenizer, text);
  for (std::string_view piece = walk.next(); !piece.empty(); piece = walk.next()) pieces.push_back(piece);
  return pieces;
}

enum class Class : uint8_t { kOther, kLetter, kNumber, kSpace };

const std::vector<Class>& classes() {
  static const std::vector<Class> table = [] {
    std::vector<Class> result(0x110000, Class::kOther);
    const Json fixture = load_tokenizer_fixture("unicode.json");
    const auto fill = [&](const char* name, Class value) {
      for (const Json& range : fixture[name]) {
        for (uint32_t code = range[0]; code <= range[1].get<uint32_t>(); ++code) result[code] = value;
      }
    };
    fill("letters", Class::kLetter);
    fill("numbers", Class::kNumber);
    fill("spaces", Class::kSpace);
    return result;
  }();
  return table;
}

// One step of each family, by hand: how many characters of text from `at` on make the next piece.
class HandSplitter {
 public:
  HandSplitter(const std::string& family, std::string_view text)
      : gpt2_(family == "gpt-2" || family == "smollm"),
        smollm_(family == "smollm"),
        qwen2_(family == "qwen2"),
        text_(text) {
    for (size_t i = 0; i < text.size();) {
      const Utf8Char character = decode_utf8(text.substr(i));
      characters_.push_back(character.code);
      begins_.push_back(i);
      i += character.bytes;
    }
    begins_.push_back(text.size());
  }

  std::vector<std::string_view> run() {
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < characters_.size();) {
      const size_t size = gpt2_ ? gpt2_piece(at) : llama_piece(at);
      pieces.push_back(text_.substr(begins_[at], begins_[at + size] - begins_[at]));
      at += size;
    }
    return pieces;
  }

 private:
  bool is(size_t at, Class wanted) const {
    return at < characters_.size() && classes()[characters_[at]] == wanted;
  }
  size_t run_of(size_t at, Class wanted) const {
    size_t end = at;
    while (is(end, wanted)) ++end;
    return end - at;
  }
  bool is_line_end(size_t at) const {
    return at < characters_.size() && (characters_[at] == '\r' || characters_[at] == '\n');
  }

  size_t contraction(size_t at, bool any_case) const {
    if (characters_[at] != '\'') return 0;
    const auto letter = [&](size_t ahead) -> char32_t {
      if (at + ahead >= characters_.size()) return 0;
      const char32_t code = characters_[at + ahead];
      if (any_case && code >= 'A' && code <= 'Z') return code + 32;
      if (any_case && code == 0x17F) return 's';  // the long s folds to s
      return code;
    };
    const char32_t first = letter(1), second = letter(2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
      return 3;
    return 0;
  }

  // All spaces of a run, but one fewer where a word or sign follows.
  size_t spaces(size_t at, bool number_ends) const {
    const size_t run = run_of(at, Class::kSpace);
    const size_t after = at + run;
    const bool at_end = after == characters_.size() || (number_ends && is(after, Class::kNumber));
    return at_end || run == 1 ? run : run - 1;
  }

  size_t gpt2_piece(size_t at) const {
    if (smollm_ && is(at, Class::kNumber)) return 1;
    if (const size_t size = contraction(at, false)) return size;
    const size_t space = characters_[at] == ' ' ? 1 : 0;
    for (const Class kind : {Class::kLetter, Class::kNumber, Class::kOther}) {
      if (smollm_ && kind == Class::kNumber) continue;
      if (const size_t run = run_of(at + space, kind)) return space + run;
    }
    return spaces(at, smollm_);
  }

  size_t llama_piece(size_t at) const {
    if (const size_t size = contraction(at, true)) return size;
    if (const size_t run = run_of(at, Class::kLetter)) return run;
    const bool may_lead = !is_line_end(at) && !is(at, Class::kNumber);
    if (may_lead && is(at + 1, Class::kLetter)) return 1 + run_of(at + 1, Class::kLetter);
    if (is(at, Class::kNumber)) return qwen2_ ? 1 : std::min<size_t>(3, run_of(at, Class::kNumber));
    const size_t space = characters_[at] == ' ' ? 1 : 0;
    if (const size_t run = run_of(at + space, Class::kOther)) {
      size_t end = at + space + run;
      while (is_line_end(end)) ++end;
      return end - at;
    }
    const size_t run = run_of(at, Class::kSpace);
    for (size_t size = run; size > 0; --size) {
      if (is_line_end(at + size - 1)) return size;  // up to the last line end of the run
    }
    return spaces(at, false);
  }

  bool gpt2_, smollm_, qwen2_;
  std::string_view text_;
  std::vector<char32_t> characters_;
  std::vector<size_t> begins_;  // [characters + 1], in bytes
};

std::vector<std::string_view> pieces_by_hand(const std::string& family, std::string_view text) {
  return HandSplitter(family, text).run();
}

TEST(PreTokenizer, KnownPieces) {
  using testing::ElementsAre;
  const PreTokenizer smollm("smollm", "f"), llama("llama-bpe", "f"), qwen2("qwen2", "f"), gpt2("gpt-2", "f");
  EXPECT_THAT(pieces_of(gpt2, "It's 1234  x\n\n y!!"),
              ElementsAre("It", "'s", " 1234", " ", " x", "\n\n", " y", "!!"));
  EXPECT_THAT(pieces_of(smollm, "It's 12  3  x "),
              ElementsAre("It", "'s", " ", "1", "2", "  ", "3", " ", " x", " "));
  EXPECT_THAT(pieces_of(llama, "IT'S 1234  x\n\n y!!\n"),
              ElementsAre("IT", "'S", " ", "123", "4", " ", " x", "\n\n", " y", "!!\n"));
  EXPECT_THAT(pieces_of(qwen2, "(x) 12 \n z"), ElementsAre("(x", ")", " ", "1", "2", " \n", " z"));
  EXPECT_THAT(pieces_of(gpt2, ""), ElementsAre());
  EXPECT_THAT(pieces_of(gpt2, "   "), ElementsAre("   "));
}

TEST(PreTokenizer, EveryCodePointHasTheReferencesClass) {
  std::string text;
  // The planes above 3 hold no letters, numbers or spaces: a sample of them does.
  for (char32_t code = 0; code < 0x110000; code += code < 0x33000 ? 1 : 0x1F) {
    if (code >= 0xD800 && code < 0xE000) continue;
    std::string character;
    append_utf8(character, code);
    text += "a" + character + "1" + character + "!" + character + " ";
  }
  for (const char* family : kFamilies) {
    const PreTokenizer pre_tokenizer(family, "f");
    PreTokenizer::Walk walk(pre_tokenizer, text);
    for (const std::string_view piece : pieces_by_hand(family, text)) ASSERT_EQ(walk.next(), piece) << family;
    ASSERT_EQ(walk.next(), "");
  }
}

TEST(PreTokenizer, RandomTextIsCutAsByHandWithAndWithoutJit) {
  std::mt19937 random(7);
  const std::vector<std::string> parts = {
      " ",      "  ",      "\n",     "\r\n", "\t",         "\u3000",     "\u180E",
      "\u200B", "\u2028",  "\u0085", "a",    "Bc",         "'",          "'s",
      "'S",     "'\u017F", "'ll",    "'lL",  "'re",        "'VE",        "'x",
      "\u00E9", "\u4E2D",  "\u0301", "1",    "23",         "4567",       "\u00BD",
      "\u0664", "!",       "?!",     "_",    "\U0001F916", "\U00031350", std::string(1, '\0')};
  for (const char* family : kFamilies) {
    const PreTokenizer jit(family, "f"), interpreted(family, "f", false);
    for (int i = 0; i < 4000; ++i) {
      std::string text;
      for (size_t left = random() % 12; left > 0; --left) text += parts[random() % parts.size()];
      if (i % 4 == 0) text = random_text(random, 20);
      const auto expected = pieces_by_hand(family, text);
      ASSERT_EQ(pieces_of(jit, text), expected) << family << " '" << text << "'";
      ASSERT_EQ(pieces_of(interpreted, text), expected) << family << " '" << text << "'";
    }
  }
}

TEST(PreTokenizer, LongRunsOfEveryClassAreCut) {
  for (const char* family : kFamilies) {
    const PreTokenizer jit(family, "f"), interpreted(family, "f", false);
    for (const char* unit : {" ", "\u3000", "a", "\u4E2D", "\u0301", "1", "\u0664", "!", "\U0001F916", "\n",
                             " \n", " a", "'s", "\t ", "a1"}) {
      for (const char* end : {"", "x", "1", "\n"}) {
        std::string text;
        while (text.size() < 10000) text += unit;
        text += end;
        const auto expected = pieces_by_hand(family, text);
        ASSERT_EQ(pieces_of(jit, text), expected) << family << " " << unit << " " << end;
        ASSERT_EQ(pieces_of(interpreted, text), expected) << family << " " << unit << " " << end;
      }
    }
  }
}

// PCRE2's default limits would stop at ten million steps of going back.
TEST(PreTokenizer, AVeryLongRunOfSpacesIsWithinTheLimits) {
  const std::string text = std::string(12'000'000, ' ') + "x";
  for (const bool use_jit : {true, false}) {
    for (const char* family : {"llama-bpe", "gpt-2"}) {
      const auto pieces = pieces_of(PreTokenizer(family, "f", use_jit), text);
      ASSERT_EQ(pieces.size(), 2u);
      EXPECT_EQ(pieces[1], " x");
    }
  }
}

TEST(PreTokenizer, AnUnknownFamilyIsRefusedByName) {
  for (const std::string name : {"", "default", "tekken", "gpt2", "GPT-2", "smollm "}) {
    try {
      PreTokenizer pre_tokenizer(name, "model.gguf");
      ADD_FAILURE() << "'" << name << "' was taken";
    } catch (const Unsupported& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("model.gguf"));
      EXPECT_THAT(error.what(), testing::HasSubstr("'" + name + "'"));
    }
  }
}

TEST(PreTokenizer, OneServesManyThreads) {
  const PreTokenizer pre_tokenizer("qwen2", "f");
  std::mt19937 random(3);
  std::vector<std::string> texts;
  for (int i = 0; i < 200; ++i) texts.push_back(random_text(random, 50));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const std::string& text : texts)
        EXPECT_EQ(pieces_of(pre_tokenizer, text), pieces_by_hand("qwen2", text));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kascade
