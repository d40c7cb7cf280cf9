// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE, special tokens, decoding and the checks of tokenizer data.
#include "kascade/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kascade/error.h"
#include "model/tokenizer_test_data.h"

namespace kascade {
namespace {

using Ids = std::vector<int32_t>;
using testing::ElementsAre;
using testing::HasSubstr;

int32_t append_token(TokenizerData& data, const std::string& spelling, TokenType type) {
  data.types.resize(data.tokens.size(), TokenType::kNormal);
  data.tokens.push_back(spelling);
  data.types.push_back(type);
  return static_cast<int32_t>(data.tokens.size()) - 1;
}

// The bytes as tokens, in order: id = byte.
TokenizerData bytes_only() {
  TokenizerData data;
  data.source = "bytes";
  data.pre_tokenizer = "gpt-2";
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    append_utf8(data.tokens.emplace_back(), printable ? byte : next++);
  }
  return data;
}

TEST(BpeTokenizer, IdsAreTheReferences) {
  const Json fixture = load_tokenizer_fixture("bpe.json");
  for (const std::string family : {"smollm", "gpt-2", "llama-bpe", "qwen2", "llama-bpe ignore_merges"}) {
    TokenizerData data = small_bpe(family.substr(0, family.find(' ')));
    data.ignore_merges = family.ends_with("ignore_merges");
    data.normalize_nfc = family == "qwen2";
    const auto tokenizer = Tokenizer::create(data);
    for (const Json& test : fixture["cases"]) {
      const std::string text = test["text"];
      const Ids ids = tokenizer->encode(text);
      ASSERT_EQ(ids, test[family].get<Ids>()) << family << ": " << test["text"];
      std::string expected = data.normalize_nfc ? normalize_nfc(text) : text;
      std::erase(expected, '\x06');  // has no token
      ASSERT_EQ(tokenizer->decode(ids), expected) << family;
    }
  }
}

TEST(BpeTokenizer, IgnoreMergesFindsTokensThatNoMergeMakes) {
  TokenizerData data = small_bpe("llama-bpe");
  EXPECT_GT(Tokenizer::create(data)->encode("xyzzy").size(), 1u);
  data.ignore_merges = true;
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("xyzzy"), ElementsAre(*tokenizer->find("xyzzy")));
}

TEST(BpeTokenizer, AnyBytesRoundTrip) {
  TokenizerData data = small_bpe("llama-bpe");
  append_token(data, "\u0106", TokenType::kNormal);  // the two bytes that it lacks
  append_token(data, "\u00FF", TokenType::kNormal);
  std::mt19937 random(5);
  for (const char* family : {"smollm", "llama-bpe", "qwen2", "gpt-2"}) {
    data.pre_tokenizer = family;
    const auto tokenizer = Tokenizer::create(data);
    for (int i = 0; i < 1000; ++i) {
      const std::string text =
          i % 2 == 0 ? random_bytes(random, 60) : random_text(random, 30) + random_bytes(random, 5);
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text, true), true), text);
    }
    EXPECT_THAT(tokenizer->encode(""), ElementsAre());
  }
}

TEST(BpeTokenizer, BytesThatAreNotUtf8AreTokensByThemselves) {
  TokenizerData data = bytes_only();
  append_token(data, "\u00FE\u00FF", TokenType::kNormal);  // bytes FE FF
  append_token(data, "ab", TokenType::kNormal);
  data.merges = {"\u00FE \u00FF", "a b"};
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("ab"), ElementsAre(257));
  EXPECT_THAT(tokenizer->encode("\xFE\xFF"), ElementsAre(0xFE, 0xFF)) << "no merging across invalid bytes";
  EXPECT_THAT(tokenizer->encode("a\xC3"
                                "b"),
              ElementsAre('a', 0xC3, 'b'));
  EXPECT_THAT(tokenizer->encode("\xE2\x82"
                                "ab"),
              ElementsAre(0xE2, 0x82, 257));
  EXPECT_THAT(tokenizer->encode("\xED\xA0\x80"), ElementsAre(0xED, 0xA0, 0x80));
}

TEST(BpeTokenizer, LongPiecesOfEveryKindEncode) {
  TokenizerData data = small_bpe("llama-bpe");
  std::mt19937 random(6);
  std::string letters;
  for (int i = 0; i < 200'000; ++i) letters += static_cast<char>('a' + random() % 26);
  std::vector<std::string> texts = {letters};
  for (const char* unit : {"a", " ", "1", "!", "\n", "\u4E2D", "\u0301", "\xFE", "the"}) {
    std::string& text = texts.emplace_back();
    while (text.size() < 200'000) text += unit;
  }
  for (const char* family : {"smollm", "llama-bpe"}) {
    data.pre_tokenizer = family;
    const auto tokenizer = Tokenizer::create(data);
    for (const std::string& text : texts) ASSERT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text);
  }
}

TEST(BpeTokenizer, FilesAreTakenByteForByteAndNoBosIsAdded) {
  TokenizerData data = bytes_only();
  data.bos = append_token(data, "<s>", TokenType::kControl);
  data.add_bos = true;
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("\xEF\xBB\xBF"
                                "a\r\n\n"),
              ElementsAre(0xEF, 0xBB, 0xBF, 'a', '\r', '\n', '\n'));
  EXPECT_THAT(tokenizer->encode("<s>a", true), ElementsAre(*data.bos, 'a'));
}

class SpecialTokens : public testing::Test {
 protected:
  SpecialTokens() {
    end_ = append_token(data_, "<|end|>", TokenType::kControl);
    ending_ = append_token(data_, "<|end|>ing", TokenType::kControl);
    bar_ = append_token(data_, "|>", TokenType::kControl);
    think_ = append_token(data_, "<think>", TokenType::kUserDefined);
    unknown_ = append_token(data_, "<unk>", TokenType::kUnknown);
    tokenizer_ = Tokenizer::create(data_);
  }
  Ids plain(std::string_view text) const {
    Ids ids;
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
    return ids;
  }

  TokenizerData data_ = bytes_only();
  int32_t end_, ending_, bar_, think_, unknown_;
  std::unique_ptr<const Tokenizer> tokenizer_;
};

TEST_F(SpecialTokens, ControlSpellingsInTextStayText) {
  for (const char* text : {"<|end|>", "a<|end|>ing b", "<unk>", "|>|>", "<|end|><|end|>"}) {
    EXPECT_EQ(tokenizer_->encode(text), plain(text)) << text;
  }
}

TEST_F(SpecialTokens, TheLeftmostThenTheLongestIsParsed) {
  EXPECT_THAT(tokenizer_->encode("<|end|>", true), ElementsAre(end_));
  EXPECT_THAT(tokenizer_->encode("<|end|>ing", true), ElementsAre(ending_));
  EXPECT_THAT(tokenizer_->encode("<|end|>in", true), ElementsAre(end_, 'i', 'n'));
  EXPECT_THAT(tokenizer_->encode("x|><|end|>ing<unk>", true), ElementsAre('x', bar_, ending_, unknown_));
  EXPECT_THAT(tokenizer_->encode("<|end<|end|>", true), ElementsAre('<', '|', 'e', 'n', 'd', end_));
  EXPECT_THAT(tokenizer_->encode("<|END|>", true), ElementsAre('<', '|', 'E', 'N', 'D', bar_));
  EXPECT_THAT(tokenizer_->encode("<|end|", true), ElementsAre('<', '|', 'e', 'n', 'd', '|'));
}

TEST_F(SpecialTokens, UserDefinedTokensAreAlwaysParsed) {
  EXPECT_THAT(tokenizer_->encode("a<think>b"), ElementsAre('a', think_, 'b'));
  EXPECT_THAT(tokenizer_->encode("<think><think", true), ElementsAre(think_, '<', 't', 'h', 'i', 'n', 'k'));
}

TEST_F(SpecialTokens, MarkedRangesAreNotParsed) {
  const std::string text = "<|end|>a<|end|>b<|end|>";
  const std::vector<TextRange> middle = {{7, 16}};
  Ids expected = {end_};
  for (const int32_t id : plain("a<|end|>b")) expected.push_back(id);
  expected.push_back(end_);
  EXPECT_EQ(tokenizer_->encode_marked(text, middle), expected);
  EXPECT_EQ(tokenizer_->encode_marked(text, {}), tokenizer_->encode(text, true));
  // A spelling that is only partly from a message is text as well; a shorter one beside the range is not.
  EXPECT_EQ(tokenizer_->encode_marked("<|end|>", std::vector<TextRange>{{6, 7}}), plain("<|end|>"));
  EXPECT_EQ(tokenizer_->encode_marked("<|end|>", std::vector<TextRange>{{0, 1}}),
            (Ids{'<', '|', 'e', 'n', 'd', bar_}));
  EXPECT_THAT(tokenizer_->encode_marked("<|end|>ing", std::vector<TextRange>{{7, 10}}),
              ElementsAre(end_, 'i', 'n', 'g'));
  EXPECT_THAT(tokenizer_->encode_marked("<think>", std::vector<TextRange>{{0, 7}}), ElementsAre(think_));
  EXPECT_THAT(tokenizer_->encode_marked("<|end|>", std::vector<TextRange>{{0, 0}, {7, 7}}),
              ElementsAre(end_));
  for (const std::vector<TextRange>& bad : {std::vector<TextRange>{{2, 1}},
                                            {{0, 8}},
                                            {{3, 5}, {4, 6}},
                                            {{3, 5}, {0, 1}},
                                            {{~size_t{0}, ~size_t{0}}}}) {
    EXPECT_THROW(tokenizer_->encode_marked("<|end|>", bad), BadArgument);
  }
}

TEST_F(SpecialTokens, ManyAreFoundAsFast) {
  // 20,000 spellings with long common beginnings; the text begins one at every byte and ends none.
  TokenizerData data = bytes_only();
  for (int i = 0; i < 20'000; ++i)
    append_token(data, "<<<<<<<<<<<<<<<<<<<<" + std::to_string(i) + ">", TokenType::kControl);
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_EQ(tokenizer->encode(std::string(100'000, '<'), true).size(), 100'000u);
  EXPECT_THAT(tokenizer->encode("<<<<<<<<<<<<<<<<<<<<777>", true), ElementsAre(256 + 777));
}

TEST_F(SpecialTokens, NeitherMergesNorWholePiecesMakeThem) {
  TokenizerData data = bytes_only();
  append_token(data, "ab", TokenType::kNormal);
  const int32_t control = append_token(data, "abc", TokenType::kControl);
  data.merges = {"a b", "ab c"};
  for (const bool ignore_merges : {false, true}) {
    data.ignore_merges = ignore_merges;
    const auto tokenizer = Tokenizer::create(data);
    EXPECT_THAT(tokenizer->encode("abc"), ElementsAre(256, 'c'));
    EXPECT_THAT(tokenizer->encode("abc", true), ElementsAre(control));
  }
}

TEST_F(SpecialTokens, UserDefinedTokensAreSpelledAsTheyAre) {
  TokenizerData data = bytes_only();
  // In the byte alphabet this would spell the bytes C3 A9; as a user-defined token it is the text itself.
  const int32_t user = append_token(data, "\u00C3\u00A9", TokenType::kUserDefined);
  data.merges = {"\u00C3 \u00A9"};
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("\u00C3\u00A9"), ElementsAre(user));
  EXPECT_THAT(tokenizer->encode("\xC3\xA9"), ElementsAre(0xC3, 0xA9));
  EXPECT_EQ(tokenizer->decode(Ids{user}), "\u00C3\u00A9");
}

TEST_F(SpecialTokens, OneSpellingOfTwoKindsIsFoundInEveryText) {
  TokenizerData data = bytes_only();
  append_token(data, "<x>", TokenType::kControl);
  const int32_t user = append_token(data, "<x>", TokenType::kUserDefined);
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_THAT(tokenizer->encode("<x>"), ElementsAre(user));
  EXPECT_THAT(tokenizer->encode("<x>", true), ElementsAre(user));
}

TEST_F(SpecialTokens, DecodeShowsThemOnDemand) {
  const Ids ids = {'a', end_, think_, 'b', unknown_};
  EXPECT_EQ(tokenizer_->decode(ids), "a<think>b");
  EXPECT_EQ(tokenizer_->decode(ids, true), "a<|end|><think>b<unk>");
  EXPECT_TRUE(tokenizer_->is_control(end_));
  EXPECT_FALSE(tokenizer_->is_control(think_));
  EXPECT_FALSE(tokenizer_->is_control('a'));
}

TEST_F(SpecialTokens, IdsOutsideTheVocabularyAreRefused) {
  for (const int32_t id :
       {-1, tokenizer_->size(), std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    EXPECT_THROW(tokenizer_->token_bytes(id), BadArgument);
    EXPECT_THROW(tokenizer_->is_control(id), BadArgument);
    EXPECT_THROW(tokenizer_->decode(Ids{'a', id}), BadArgument);
    EXPECT_FALSE(tokenizer_->ends_generation(id));
  }
}

TEST_F(SpecialTokens, EndOfGenerationIsEosAndWhatTheFileNames) {
  data_.eos = end_;
  data_.end_ids = {bar_, 7};
  const auto tokenizer = Tokenizer::create(data_);
  for (const int32_t id : {end_, bar_, 7}) EXPECT_TRUE(tokenizer->ends_generation(id));
  for (const int32_t id : {ending_, think_, 0}) EXPECT_FALSE(tokenizer->ends_generation(id));
  EXPECT_FALSE(tokenizer_->ends_generation(end_));
}

TEST(Tokenizer, OfTokensWithOneSpellingTheFirstTextCounts) {
  TokenizerData data = bytes_only();
  const int32_t control = append_token(data, "xy", TokenType::kControl);
  const int32_t text = append_token(data, "xy", TokenType::kNormal);
  append_token(data, "xy", TokenType::kNormal);
  append_token(data, "a", TokenType::kNormal);  // a byte once more
  data.merges = {"x y"};
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_EQ(tokenizer->find("xy"), text);
  EXPECT_EQ(tokenizer->find("a"), 'a');
  EXPECT_EQ(tokenizer->find("nothing"), std::nullopt);
  EXPECT_THAT(tokenizer->encode("xya"), ElementsAre(text, 'a'));
  EXPECT_THAT(tokenizer->encode("xya", true), ElementsAre(control, 'a'));
  EXPECT_EQ(tokenizer->decode(Ids{text + 1, text + 2}), "xya");
}

TEST(Tokenizer, OddSpellingsAreTheirOwnBytes) {
  TokenizerData data = bytes_only();
  const int32_t chinese = append_token(data, "\u4E2D", TokenType::kNormal);  // not of the byte alphabet
  const int32_t spaced = append_token(data, "a b", TokenType::kNormal);
  const int32_t broken = append_token(data, "\xFF", TokenType::kNormal);
  const int32_t empty = append_token(data, "", TokenType::kNormal);
  const int32_t unused = append_token(data, "[PAD1]", TokenType::kUnused);
  const auto tokenizer = Tokenizer::create(data);
  EXPECT_EQ(tokenizer->token_bytes(chinese), "\u4E2D");
  EXPECT_EQ(tokenizer->token_bytes(spaced), "a b");
  EXPECT_EQ(tokenizer->token_bytes(broken), "\xFF");
  EXPECT_EQ(tokenizer->token_bytes(empty), "");
  EXPECT_EQ(tokenizer->token_bytes(unused), "[PAD1]");
  EXPECT_EQ(tokenizer->token_bytes(' '), " ");
}

TEST(Tokenizer, ContradictionsAreNamed) {
  const auto base = [] {
    TokenizerData data = bytes_only();
    data.source = "some.gguf";
    append_token(data, "ab", TokenType::kNormal);
    data.merges = {"a b"};
    return data;
  };
  EXPECT_NO_THROW(Tokenizer::create(base()));
  struct Fault {
    const char* message;
    std::function<void(TokenizerData&)> apply;
  };
  const Fault faults[] = {
      {"tokens", [](auto& d) { d.tokens.clear(), d.types.clear(), d.merges.clear(); }},
      {"token types", [](auto& d) { d.types.pop_back(); }},
      {"token types[3]", [](auto& d) { d.types[3] = static_cast<TokenType>(0); }},
      {"token types[3]", [](auto& d) { d.types[3] = static_cast<TokenType>(7); }},
      {"bos id", [](auto& d) { d.bos = 257; }},
      {"bos id", [](auto& d) { d.bos = -1; }},
      {"eos id", [](auto& d) { d.eos = std::numeric_limits<int32_t>::max(); }},
      {"unknown id", [](auto& d) { d.unknown = 257; }},
      {"end ids",
       [](auto& d) {
         d.end_ids = {0, 257};
       }},
      {"add bos", [](auto& d) { d.add_bos = true; }},
      {"merges[1]", [](auto& d) { d.merges.push_back("ab"); }},
      {"merges[1]", [](auto& d) { d.merges.push_back("a b c"); }},
      {"merges[1]", [](auto& d) { d.merges.push_back(" b"); }},
      {"merges[1]", [](auto& d) { d.merges.push_back("a "); }},
      {"merges[1]", [](auto& d) { d.merges.push_back(" "); }},
      {"merges[1]", [](auto& d) { d.merges.push_back(""); }},
      {"merges[1]", [](auto& d) { d.merges.push_back("a\tb"); }},
      {"'xx' is not in the vocabulary", [](auto& d) { d.merges.push_back("xx b"); }},
      {"'zz' is not in the vocabulary", [](auto& d) { d.merges.push_back("b zz"); }},
      {"'ba' is not in the vocabulary", [](auto& d) { d.merges.push_back("b a"); }},
      {"tokens[257]", [](auto& d) { append_token(d, std::string(1025, 'x'), TokenType::kControl); }},
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
  TokenizerData unknown = base();
  unknown.pre_tokenizer = "made-up";
  EXPECT_THROW(Tokenizer::create(unknown), Unsupported);
}

TEST(Tokenizer, AMergeListedTwiceKeepsItsFirstRank) {
  TokenizerData data = bytes_only();
  append_token(data, "ab", TokenType::kNormal);
  append_token(data, "bc", TokenType::kNormal);
  data.merges = {"a b", "b c", "a b"};
  EXPECT_THAT(Tokenizer::create(data)->encode("abc"), ElementsAre(256, 'c'));
}

TEST(StreamDecoder, NeverSplitsACharacter) {
  const auto tokenizer = Tokenizer::create(bytes_only());
  const std::string text = "a\u00E9\u4E2D\U0001F916z";
  StreamDecoder decoder(*tokenizer);
  std::string streamed;
  for (const int32_t id : tokenizer->encode(text)) {
    const std::string part = decoder.push(id);
    EXPECT_EQ(valid_utf8_prefix(part), part.size());
    streamed += part;
  }
  EXPECT_EQ(streamed, text) << "nothing is held back once it is whole";
  EXPECT_EQ(decoder.flush(), "");
}

TEST(StreamDecoder, WhatIsLeftInTheMiddleOfACharacterIsFlushed) {
  const auto tokenizer = Tokenizer::create(bytes_only());
  StreamDecoder decoder(*tokenizer);
  EXPECT_EQ(decoder.push('x'), "x");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.flush(), "\xF0\x9F");
  EXPECT_EQ(decoder.flush(), "");
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push('y'), "\xF0y") << "what can no longer become a character is let go";
  EXPECT_EQ(decoder.push(0x80), "\x80");
}

TEST(StreamDecoder, AgreesWithDecodeOnAnyIds) {
  TokenizerData data = small_bpe("smollm");
  append_token(data, "<|end|>", TokenType::kControl);
  const auto tokenizer = Tokenizer::create(data);
  std::mt19937 random(9);
  for (int i = 0; i < 2000; ++i) {
    Ids ids(random() % 30);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % tokenizer->size());
    for (const bool show_special : {false, true}) {
      StreamDecoder decoder(*tokenizer, show_special);
      std::string streamed, joined;
      for (const int32_t id : ids) {
        streamed += decoder.push(id);
        if (show_special || !tokenizer->is_control(id)) joined += tokenizer->token_bytes(id);
      }
      streamed += decoder.flush();
      ASSERT_EQ(streamed, joined);
      ASSERT_EQ(tokenizer->decode(ids, show_special), joined);
    }
  }
}

}  // namespace
}  // namespace kascade
