// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kascade/error.h"
#include "kascade/tokenizer.h"
#include "model/tokenizer_test_data.h"

namespace kascade {
namespace {

using Ids = std::vector<int32_t>;
using testing::ElementsAre;
using testing::HasSubstr;

// <unk>, <s>, </s>, the 256 bytes: id = 3 + byte.
TokenizerData base_vocabulary() {
  TokenizerData data;
  data.source = "some.gguf";
  data.kind = TokenizerKind::kSentencePiece;
  data.tokens = {"<unk>", "<s>", "</s>"};
  data.types = {TokenType::kUnknown, TokenType::kControl, TokenType::kControl};
  for (int byte = 0; byte < 256; ++byte) {
    data.tokens.push_back(fmt::format("<0x{:02X}>", byte));
    data.types.push_back(TokenType::kByte);
  }
  data.scores.assign(data.tokens.size(), 0);
  data.unknown = 0;
  data.bos = 1;
  data.eos = 2;
  return data;
}

int32_t append_piece(TokenizerData& data, const std::string& spelling, float score,
                     TokenType type = TokenType::kNormal) {
  data.tokens.push_back(spelling);
  data.types.push_back(type);
  data.scores.push_back(score);
  return static_cast<int32_t>(data.tokens.size()) - 1;
}

TEST(SentencePieceMerges, IdsAreTheReferences) {
  const Json fixture = load_tokenizer_fixture("sentencepiece.json");
  TokenizerData base;
  base.source = "sentencepiece.json";
  base.kind = TokenizerKind::kSentencePiece;
  base.tokens = fixture["tokens"].get<std::vector<std::string>>();
  base.merges = fixture["merges"].get<std::vector<std::string>>();
  base.types.assign(base.tokens.size(),
                    TokenType::kNormal);  // tokenizer.json does not say which tokens are bytes
  base.types[0] = TokenType::kUnknown;
  base.types[1] = base.types[2] = TokenType::kControl;
  base.unknown = 0;
  const std::map<std::string, std::function<void(TokenizerData&)>> variants = {
      {"legacy", [](TokenizerData&) {}},
      {"none", [](TokenizerData& data) { data.add_space_prefix = false; }},
      {"first", [](TokenizerData& data) { data.space_prefix_once = data.space_prefix_unless_space = true; }},
      {"always", [](TokenizerData& data) { data.space_prefix_unless_space = true; }},
      {"no_fallback", [](TokenizerData& data) { data.byte_fallback = false; }},
  };
  for (const auto& [name, apply] : variants) {
    TokenizerData data = base;
    apply(data);
    const auto tokenizer = Tokenizer::create(data);
    for (const Json& test : fixture["cases"]) {
      const Ids ids = tokenizer->encode(test["text"].get<std::string>(), true);
      ASSERT_EQ(ids, test[name].get<Ids>()) << name << ": " << test["text"];
    }
  }
}

TEST(SentencePieceMerges, DecodeIsTheInverseOfEncode) {
  const Json fixture = load_tokenizer_fixture("sentencepiece.json");
  TokenizerData data;
  data.kind = TokenizerKind::kSentencePiece;
  data.tokens = fixture["tokens"].get<std::vector<std::string>>();
  data.merges = fixture["merges"].get<std::vector<std::string>>();
  data.types.assign(data.tokens.size(), TokenType::kNormal);
  data.types[0] = TokenType::kUnknown;
  data.types[1] = data.types[2] = TokenType::kControl;
  std::mt19937 random(4);
  for (const bool prefix : {true, false}) {
    data.add_space_prefix = prefix;
    const auto tokenizer = Tokenizer::create(data);
    for (int i = 0; i < 1500; ++i) {
      std::string text;
      for (size_t parts = random() % 4; parts > 0; --parts) {
        text += random() % 3 == 0 ? random_bytes(random, 8) : random_text(random, 10);
        if (random() % 3 == 0) text += random() % 2 == 0 ? "</s>" : " ";
      }
      // U+2581 is a space to these vocabularies, nothing else is changed.
      if (text.find("\u2581") != std::string::npos) continue;
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text, true), true), text);
    }
  }
}

// The definition, on strings: as long as the union of two neighbours is a token, the pair of highest score
// merges, the leftmost among equals. What is no token in the end becomes bytes.
Ids encode_by_definition(const TokenizerData& data, const std::string& text) {
  std::map<std::string, int32_t> ids;
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    if (data.types[id] == TokenType::kNormal) ids.emplace(data.tokens[id], static_cast<int32_t>(id));
  }
  std::vector<std::string> symbols;
  for (size_t i = 0; i < text.size();) {
    const size_t bytes = std::max<size_t>(1, decode_utf8(std::string_view(text).substr(i)).bytes);
    symbols.push_back(text[i] == ' ' ? "\u2581" : text.substr(i, bytes));
    i += bytes;
  }
  for (;;) {
    size_t best = symbols.size();
    float score = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ids.find(symbols[i] + symbols[i + 1]);
      if (found != ids.end() && (best == symbols.size() || data.scores[found->second] > score)) {
        best = i;
        score = data.scores[found->second];
      }
    }
    if (best == symbols.size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
  Ids result;
  for (const std::string& symbol : symbols) {
    if (const auto found = ids.find(symbol); found != ids.end()) {
      result.push_back(found->second);
    } else {
      for (const char byte : symbol) result.push_back(3 + static_cast<unsigned char>(byte));
    }
  }
  return result;
}

TEST(SentencePieceScores, AgreesWithTheDefinition) {
  std::mt19937 random(11);
  const std::vector<std::string> letters = {"a", "b", "c", "\u2581", "\u00E9", "\u4E2D"};
  for (int round = 0; round < 200; ++round) {
    TokenizerData data = base_vocabulary();
    data.add_space_prefix = false;
    std::vector<std::string> pieces = letters;
    for (int i = 0; i < 40; ++i) {
      pieces.push_back(pieces[random() % pieces.size()] + pieces[random() % pieces.size()]);
    }
    std::map<std::string, bool> known;
    for (const std::string& piece : pieces) {
      // Some pieces, single characters among them, are left out of the vocabulary; scores often tie.
      if (random() % 5 == 0 || piece.size() > 40 || !known.emplace(piece, true).second) continue;
      append_piece(data, piece, -static_cast<float>(random() % 12));
    }
    const auto tokenizer = Tokenizer::create(data);
    for (int i = 0; i < 20; ++i) {
      std::string text;
      for (size_t left = random() % 25; left > 0; --left) {
        const size_t pick = random() % (letters.size() + 2);
        text += pick < letters.size()    ? (letters[pick] == "\u2581" ? " " : letters[pick])
                : pick == letters.size() ? "z"
                                         : "\xFF";
      }
      ASSERT_EQ(tokenizer->encode(text), encode_by_definition(data, text)) << text;
    }
  }
}

TEST(SentencePieceScores, ControlAndByteSpellingsInTextStayText) {
  TokenizerData data = base_vocabulary();
  data.add_space_prefix = false;
  for (const char* piece :
       {"<", "s", ">", "<s", "/", "</", "0", "x", "4", "1", "<0", "<0x", "<0x4", "<0x41", "u", "n", "k"}) {
    append_piece(data, piece, -1);
  }
  const auto tokenizer = Tokenizer::create(data);
  const auto id = [&](const char* piece) { return *tokenizer->find(piece); };
  EXPECT_THAT(tokenizer->encode("<s>"), ElementsAre(id("<s"), id(">")));
  EXPECT_THAT(tokenizer->encode("<s>", true), ElementsAre(1));
  EXPECT_THAT(tokenizer->encode("<0x41>"), ElementsAre(id("<0x41"), id(">")));
  EXPECT_THAT(tokenizer->encode("<0x41>", true), ElementsAre(id("<0x41"), id(">")));
  for (const int32_t token : tokenizer->encode("</s><unk><s>")) EXPECT_FALSE(tokenizer->is_control(token));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("</s><unk><s>")), "</s><unk><s>");
}

TEST(SentencePieceScores, SpacePrefix) {
  TokenizerData data = base_vocabulary();
  const int32_t space = append_piece(data, "\u2581", -1), a = append_piece(data, "a", -1);
  const int32_t space_a = append_piece(data,
                                       "\u2581"
                                       "a",
                                       -1);
  const auto always = Tokenizer::create(data);
  EXPECT_THAT(always->encode(""), ElementsAre());
  EXPECT_THAT(always->encode("a"), ElementsAre(space_a));
  EXPECT_THAT(always->encode(" a"), ElementsAre(space, space_a));
  EXPECT_THAT(always->encode("<s>a</s>a", true), ElementsAre(1, space_a, 2, space_a));
  EXPECT_EQ(always->decode(Ids{space_a, space_a}), "a a");
  EXPECT_EQ(always->decode(Ids{1, space_a, 2, space_a}, true), "<s>a</s>a");
  EXPECT_EQ(always->decode(Ids{space, space_a}), " a");
  EXPECT_EQ(always->decode(Ids{a, space_a}), "a a") << "only a space at the start is encode's";

  data.space_prefix_once = true;
  const auto once = Tokenizer::create(data);
  EXPECT_THAT(once->encode("a</s>a", true), ElementsAre(space_a, 2, a));
  EXPECT_THAT(once->encode("<s>a", true), ElementsAre(1, a));
  EXPECT_EQ(once->decode(Ids{space_a, 2, a, space_a}, true), "a</s>a a");
  EXPECT_EQ(once->decode(Ids{1, space_a}), "a") << "a BOS put in front by the caller";

  data.space_prefix_once = false;
  data.space_prefix_unless_space = true;
  const auto unless = Tokenizer::create(data);
  EXPECT_THAT(unless->encode(" a"), ElementsAre(space_a));
  EXPECT_THAT(unless->encode("a"), ElementsAre(space_a));

  data.add_space_prefix = false;
  const auto never = Tokenizer::create(data);
  EXPECT_THAT(never->encode("a"), ElementsAre(a));
  EXPECT_EQ(never->decode(Ids{space_a}), " a");
}

TEST(SentencePieceScores, UserDefinedTokensMatchWithTheirSpaces) {
  TokenizerData data = base_vocabulary();
  data.add_space_prefix = false;
  append_piece(data, "\u2581", -2);
  append_piece(data, "a", -1);
  const int32_t user = append_piece(data, "\u2581\u2581[x]", 0, TokenType::kUserDefined);
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("a  [x]a"), ElementsAre(user - 1, user, user - 1));
  EXPECT_EQ(tokenizer->decode(Ids{user}), "  [x]");
  data.add_space_prefix = true;
  const auto prefixed = Tokenizer::create(data);
  for (const char* text : {"  [x]", "  [x]a", "a  [x]  [x]", "   [x] a"}) {
    EXPECT_EQ(prefixed->decode(prefixed->encode(text)), text);
  }
}

TEST(SentencePieceScores, UnknownCharacters) {
  TokenizerData data = base_vocabulary();
  data.add_space_prefix = false;
  const int32_t a = append_piece(data, "a", -1);
  EXPECT_THAT(Tokenizer::create(data)->encode("a\u4E2D\xFF"),
              ElementsAre(a, 3 + 0xE4, 3 + 0xB8, 3 + 0xAD, 3 + 0xFF));
  data.byte_fallback = false;
  EXPECT_THAT(Tokenizer::create(data)->encode("a\u4E2D\u4E2D\xFF"
                                              "a\xFE"),
              ElementsAre(a, 0, a, 0))
      << "a run is one";
}

TEST(SentencePieceScores, LongTextsEncode) {
  TokenizerData data = base_vocabulary();
  data.add_space_prefix = false;
  std::string piece = "a";
  for (int i = 0; i < 9; ++i) {
    append_piece(data, piece, -static_cast<float>(i));
    piece += piece;
  }
  append_piece(data, "ab", -0.5f);
  append_piece(data, "\u2581", -20);
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_TRUE(tokenizer->encode(std::string(1 << 18, 'a')) == Ids(1 << 10, 3 + 256 + 8));
  for (const std::string unit : {"ab", " ", "\u4E2D", "\xFF", "z"}) {
    std::string text;
    while (text.size() < 200'000) text += unit;
    ASSERT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text) << unit;
  }
}

TEST(SentencePieceScores, ContradictionsAreNamed) {
  const auto base = [] {
    TokenizerData data = base_vocabulary();
    append_piece(data, "a", -1);
    return data;
  };
  EXPECT_NO_THROW(Tokenizer::create(base()));
  struct Fault {
    const char* message;
    std::function<void(TokenizerData&)> apply;
  };
  const Fault faults[] = {
      {"scores'", [](auto& d) { d.scores.pop_back(); }},
      {"scores'", [](auto& d) { d.scores.clear(); }},
      {"scores[5]", [](auto& d) { d.scores[5] = std::numeric_limits<float>::quiet_NaN(); }},
      {"scores[0]", [](auto& d) { d.scores[0] = std::numeric_limits<float>::infinity(); }},
      {"tokens[10]", [](auto& d) { d.tokens[10] = "<0xZZ>"; }},
      {"tokens[10]", [](auto& d) { d.tokens[10] = "<0x7>"; }},
      {"tokens[259]", [](auto& d) { d.tokens[259] = std::string(2000, 'a'); }},
      {"unknown", [](auto& d) { d.unknown.reset(), d.byte_fallback = false; }},
      {"<0x07>", [](auto& d) { d.unknown.reset(), d.types[10] = TokenType::kUnused; }},
      {"merges[0]", [](auto& d) { d.merges = {"a b"}; }},
  };
  for (const Fault& fault : faults) {
    TokenizerData data = base();
    fault.apply(data);
    try {
      Tokenizer::create(data);
      ADD_FAILURE() << fault.message << " was taken";
    } catch (const BadFile& error) {
      EXPECT_THAT(error.what(), HasSubstr("some.gguf"));
      EXPECT_THAT(error.what(), HasSubstr(fault.message));
    }
  }
}

TEST(SentencePieceStream, SpacesAndCharactersComeWhole) {
  TokenizerData data = base_vocabulary();
  append_piece(data, "\u2581", -1);
  append_piece(data, "a", -1);
  append_piece(data,
               "\u2581"
               "a",
               -1);
  const auto tokenizer = Tokenizer::create(data);
  StreamDecoder decoder(*tokenizer);
  std::vector<std::string> parts;
  for (const int32_t id : tokenizer->encode("a a\u4E2D")) parts.push_back(decoder.push(id));
  EXPECT_THAT(parts, ElementsAre("a", " a", "", "", "\u4E2D"));
  EXPECT_EQ(decoder.flush(), "");
}

}  // namespace
}  // namespace kascade
