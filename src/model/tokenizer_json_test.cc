// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_json.h"

#include <functional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/text.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::string kModels = std::string(KASCADE_FIXTURES) + "/models/";
constexpr int64_t kVocabulary = 352;

// A byte-level tokenizer of a few tokens.
Json tiny() {
  return parse_json(R"({
    "added_tokens": [
      {"id": 5, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
      {"id": 6, "content": "<tool>", "special": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "post_processor": {"type": "ByteLevel", "trim_offsets": false},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
              "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
              "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": ["a b", "ab c"]}})",
                    "F");
}

// A SentencePiece-type tokenizer of a few tokens.
Json tiny_sentencepiece() {
  return parse_json(R"({
    "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "pre_tokenizer": null,
    "post_processor": {"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]},
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
              "vocab": {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "▁a": 5}, "merges": [["▁", "a"]]}})",
                    "F");
}

using Change = std::function<void(Json&)>;

TokenizerData read(const Json& json, int64_t vocabulary = 8) {
  return read_tokenizer_json(json, vocabulary, "F");
}
TokenizerData read_with(Json json, const Change& change) {
  change(json);
  return read(json);
}
template <class E>
std::string fault(const Json& json, const Change& change) {
  return fault_of<E>([&] { read_with(json, change); });
}

TEST(TokenizerJson, ReadsByteLevel) {
  const TokenizerData data = read(tiny());
  EXPECT_EQ(data.kind, TokenizerKind::kByteBpe);
  EXPECT_EQ(data.pre_tokenizer, "gpt-2");
  EXPECT_THAT(data.tokens, ElementsAre("a", "b", "c", "ab", "abc", "<|end|>", "<tool>", "[PAD7]"));
  EXPECT_THAT(data.merges, ElementsAre("a b", "ab c"));
  EXPECT_EQ(data.types[0], TokenType::kNormal);
  EXPECT_EQ(data.types[5], TokenType::kControl);
  EXPECT_EQ(data.types[6], TokenType::kUserDefined);
  EXPECT_EQ(data.types[7], TokenType::kUnused);
  EXPECT_FALSE(data.normalize_nfc);
  EXPECT_FALSE(data.add_bos);
  EXPECT_FALSE(data.ignore_merges);
  EXPECT_EQ(data.unknown, std::nullopt);
}

TEST(TokenizerJson, ReadsSentencePieceType) {
  const TokenizerData data = read(tiny_sentencepiece());
  EXPECT_EQ(data.kind, TokenizerKind::kSentencePiece);
  EXPECT_THAT(data.merges, ElementsAre("\u2581 a"));
  EXPECT_THAT(data.scores, IsEmpty());
  EXPECT_EQ(data.types[0], TokenType::kUnknown);
  EXPECT_EQ(data.types[1], TokenType::kControl);
  EXPECT_EQ(data.types[2], TokenType::kByte);
  EXPECT_TRUE(data.byte_fallback);
  EXPECT_TRUE(data.add_space_prefix);
  EXPECT_TRUE(data.add_bos);
  EXPECT_EQ(data.bos, 1);
  EXPECT_EQ(data.unknown, 0);
}

TEST(TokenizerJson, MetaspaceSaysWhetherASpaceIsPutInFront) {
  const auto prefix = [](const char* scheme) {
    return read_with(tiny_sentencepiece(),
                     [&](Json& j) {
                       j["normalizer"] = nullptr;
                       j["pre_tokenizer"] = {{"type", "Metaspace"},
                                             {"replacement", "\u2581"},
                                             {"prepend_scheme", scheme},
                                             {"split", false}};
                     })
        .add_space_prefix;
  };
  EXPECT_TRUE(prefix("first"));
  EXPECT_TRUE(prefix("always"));
  EXPECT_FALSE(prefix("never"));
  EXPECT_THROW(prefix("sometimes"), Unsupported);
  EXPECT_FALSE(read_with(tiny_sentencepiece(), [](Json& j) {
                 j["normalizer"]["normalizers"].erase(0);
               }).add_space_prefix);
}

TEST(TokenizerJson, GapsBecomeUnusedTokens) {
  const TokenizerData data = read(tiny(), 1000);
  ASSERT_EQ(data.tokens.size(), 1000u);
  EXPECT_EQ(data.tokens[999], "[PAD999]");
  EXPECT_EQ(data.types[999], TokenType::kUnused);
  const TokenizerData clash = read_with(tiny(), [](Json& j) {
    j["model"]["vocab"]["[PAD7]"] = 2;
    j["model"]["vocab"].erase("c");
  });
  EXPECT_EQ(clash.tokens[7], "[PAD7]_");
}

// What the fixtures' authors call each pre-tokeniser, and the ids that their library gives for each text.
struct TokenizerFixture {
  const char* file;
  const char* cases;
  const char* pre_tokenizer;
};

class TokenizerFixtures : public testing::TestWithParam<TokenizerFixture> {};

TEST_P(TokenizerFixtures, GiveTheStoredIds) {
  const TokenizerFixture& fixture = GetParam();
  const Json json = load_json(kModels + fixture.file);
  const TokenizerData data = read_tokenizer_json(json, kVocabulary, fixture.file);
  EXPECT_EQ(data.pre_tokenizer, fixture.pre_tokenizer);
  EXPECT_EQ(data.normalize_nfc, std::string_view(fixture.pre_tokenizer) == "qwen2");
  const auto tokenizer = Tokenizer::create(data);
  for (const Json& one : load_json(kModels + fixture.cases)) {
    const auto text = one["text"].get<std::string>();
    const bool special = text.find("<|") != std::string::npos;
    EXPECT_EQ(tokenizer->encode(text, special), one["ids"].get<std::vector<int32_t>>()) << quote_text(text);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Files, TokenizerFixtures,
    testing::Values(TokenizerFixture{"llama/tokenizer.json", "llama.tokens.json", "llama-bpe"},
                    TokenizerFixture{"mistral/tokenizer.json", "mistral.tokens.json", ""},
                    TokenizerFixture{"qwen2/tokenizer.json", "qwen2.tokens.json", "qwen2"},
                    TokenizerFixture{"qwen3/tokenizer.json", "qwen3.tokens.json", "qwen2"},
                    TokenizerFixture{"tokenizers/smollm.json", "tokenizers/smollm.tokens.json", "smollm"},
                    TokenizerFixture{"tokenizers/gpt-2.json", "tokenizers/gpt-2.tokens.json", "gpt-2"},
                    TokenizerFixture{"tokenizers/metaspace.json", "tokenizers/metaspace.tokens.json", ""}),
    [](const auto& test) {
      std::string name = test.param.file;
      for (char& c : name)
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
      return name;
    });

TEST(TokenizerJson, UnknownComponentsAreRefusedByName) {
  const struct {
    const char* expected;
    Change change;
  } kByteLevel[] = {
      {"'model.type': expected BPE, got '\"Unigram\"'", [](Json& j) { j["model"]["type"] = "Unigram"; }},
      {"'model.dropout'", [](Json& j) { j["model"]["dropout"] = 0.1; }},
      {"'model.continuing_subword_prefix'", [](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; }},
      {"'model.end_of_word_suffix'", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
      {"'normalizer'",
       [](Json& j) {
         j["normalizer"] = {{"type", "Lowercase"}};
       }},
      {"'normalizer.normalizers[1]'",
       [](Json& j) {
         j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "NFKC"}}}}};
       }},
      {"'pre_tokenizer': expected ByteLevel",
       [](Json& j) {
         j["pre_tokenizer"] = {{"type", "Whitespace"}};
       }},
      {"'pre_tokenizer.add_prefix_space'", [](Json& j) { j["pre_tokenizer"]["add_prefix_space"] = true; }},
      {"'pre_tokenizer': none of smollm", [](Json& j) { j["pre_tokenizer"]["use_regex"] = false; }},
      {"'pre_tokenizer': none or Metaspace is supported with byte_fallback only",
       [](Json& j) { j["pre_tokenizer"] = nullptr; }},
      {"'decoder'",
       [](Json& j) {
         j["decoder"] = {{"type", "WordPiece"}};
       }},
      {"'post_processor'",
       [](Json& j) {
         j["post_processor"] = {{"type", "BertProcessing"}};
       }},
      {"'added_tokens[0].lstrip'", [](Json& j) { j["added_tokens"][0]["lstrip"] = true; }},
      {"'added_tokens[0].rstrip'", [](Json& j) { j["added_tokens"][0]["rstrip"] = true; }},
      {"'added_tokens[1].single_word'", [](Json& j) { j["added_tokens"][1]["single_word"] = true; }},
  };
  for (const auto& one : kByteLevel)
    EXPECT_THAT(fault<Unsupported>(tiny(), one.change), HasSubstr(one.expected));

  const struct {
    const char* expected;
    Change change;
  } kSentencePiece[] = {
      {"'normalizer.normalizers[0]'", [](Json& j) { j["normalizer"]["normalizers"][0]["prepend"] = "_"; }},
      {"'normalizer.normalizers[1]'", [](Json& j) { j["normalizer"]["normalizers"][1]["content"] = "_"; }},
      {"'normalizer'", [](Json& j) { j["normalizer"] = nullptr; }},
      {"'normalizer'",
       [](Json& j) {
         j["normalizer"] = {{"type", "NFC"}};
       }},
      {"'decoder.decoders[2]'", [](Json& j) { j["decoder"]["decoders"][2]["type"] = "CTC"; }},
      {"'pre_tokenizer.split'",
       [](Json& j) {
         j["normalizer"] = nullptr;
         j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "\u2581"}};
       }},
      {"'pre_tokenizer.replacement'",
       [](Json& j) {
         j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "_"}, {"split", false}};
       }},
      {"'post_processor.single'",
       [](Json& j) {
         j["post_processor"]["single"].push_back({{"SpecialToken", {{"id", "</s>"}}}});
       }},
  };
  for (const auto& one : kSentencePiece)
    EXPECT_THAT(fault<Unsupported>(tiny_sentencepiece(), one.change), HasSubstr(one.expected));
}

TEST(TokenizerJson, SplitPatternsAreRecognisedExactly) {
  const Json llama = load_json(kModels + "llama/tokenizer.json");
  const auto with = [&](const Change& change) {
    Json json = llama;
    change(json["pre_tokenizer"]["pretokenizers"][0]);
    return json;
  };
  const auto pre_of = [](const Json& json) {
    return read_tokenizer_json(json, kVocabulary, "F").pre_tokenizer;
  };
  EXPECT_EQ(pre_of(with([](Json& split) {
              split["behavior"] = "Removed";
              split["invert"] = true;
            })),
            "llama-bpe");
  EXPECT_THROW(pre_of(with([](Json& split) { split["behavior"] = "MergedWithNext"; })), Unsupported);
  EXPECT_THROW(pre_of(with([](Json& split) { split["invert"] = true; })), Unsupported);
  EXPECT_THROW(pre_of(with([](Json& split) { split["pattern"] = {{"String", " "}}; })), BadFile);
  EXPECT_THAT(fault_of<Unsupported>([&] {
                pre_of(with([](Json& split) {
                  split["pattern"]["Regex"] = split["pattern"]["Regex"].get<std::string>() + "|x";
                }));
              }),
              HasSubstr("'pre_tokenizer.pretokenizers[0].pattern.Regex': not the pattern of"));
}

TEST(TokenizerJson, FaultsNameTheField) {
  const struct {
    const char* expected;
    Change change;
  } kFaults[] = {
      {"'model': missing", [](Json& j) { j.erase("model"); }},
      {"'model': expected an object", [](Json& j) { j["model"] = 1; }},
      {"'model.vocab': missing", [](Json& j) { j["model"].erase("vocab"); }},
      {"'model.vocab': expected an object", [](Json& j) { j["model"]["vocab"] = Json::array(); }},
      {"'model.vocab': expected an object", [](Json& j) { j["model"]["vocab"] = Json::object(); }},
      {"'model.vocab': expected an id in 0..7, got '8'", [](Json& j) { j["model"]["vocab"]["d"] = 8; }},
      {"'model.vocab': expected an id in 0..7, got '-1'", [](Json& j) { j["model"]["vocab"]["d"] = -1; }},
      {"'model.vocab': expected an id in 0..7",
       [](Json& j) { j["model"]["vocab"]["d"] = 18446744073709551615ull; }},
      {"'model.vocab': expected an id in 0..7", [](Json& j) { j["model"]["vocab"]["d"] = "7"; }},
      {"'model.vocab': id 0 is both 'a' and 'd'", [](Json& j) { j["model"]["vocab"]["d"] = 0; }},
      {"'model.merges': missing", [](Json& j) { j["model"].erase("merges"); }},
      {"'model.merges': expected an array", [](Json& j) { j["model"]["merges"] = "a b"; }},
      {"'model.merges[1]': expected two strings",
       [](Json& j) {
         j["model"]["merges"][1] = {"a", "b", "c"};
       }},
      {"'model.merges[1]': expected two strings", [](Json& j) { j["model"]["merges"][1] = 1; }},
      {"'model.merges[0]': expected parts without spaces",
       [](Json& j) {
         j["model"]["merges"][0] = {"a b", "c"};
       }},
      {"'model.unk_token': 'x' is no token", [](Json& j) { j["model"]["unk_token"] = "x"; }},
      {"'model.byte_fallback': expected true or false", [](Json& j) { j["model"]["byte_fallback"] = 1; }},
      {"'added_tokens': expected an array", [](Json& j) { j["added_tokens"] = Json::object(); }},
      {"'added_tokens[0].id': expected an id", [](Json& j) { j["added_tokens"][0]["id"] = 8; }},
      {"'added_tokens[0].content': missing", [](Json& j) { j["added_tokens"][0].erase("content"); }},
      {"'added_tokens[0].content': expected text", [](Json& j) { j["added_tokens"][0]["content"] = ""; }},
      {"'added_tokens[0]': id 0 is both 'a' and '<|end|>'", [](Json& j) { j["added_tokens"][0]["id"] = 0; }},
      {"'added_tokens[0]': token 'a' has the ids 0 and 5",
       [](Json& j) { j["added_tokens"][0]["content"] = "a"; }},
      {"'added_tokens[0]': expected an object", [](Json& j) { j["added_tokens"][0] = 1; }},
      {"'pre_tokenizer': expected an object", [](Json& j) { j["pre_tokenizer"] = 1; }},
      {"'pre_tokenizer.type': missing", [](Json& j) { j["pre_tokenizer"] = Json::object(); }},
      {"'post_processor.single'",
       [](Json& j) {
         j["post_processor"] = {
             {"type", "TemplateProcessing"},
             {"single", {{{"SpecialToken", {{"id", "none"}}}}, {{"Sequence", {{"id", "A"}}}}}}};
       }},
  };
  for (const auto& one : kFaults) EXPECT_THAT(fault<BadFile>(tiny(), one.change), HasSubstr(one.expected));
  EXPECT_THAT(fault_of<BadFile>([] { read(Json::array()); }), HasSubstr("expected a JSON object"));
}

TEST(TokenizerConfig, SpecialTokensAndTheBosRule) {
  TokenizerData data = read(tiny());
  apply_tokenizer_config({{"bos_token", "<tool>"}, {"eos_token", {{"content", "<|end|>"}}}}, "C", data);
  EXPECT_EQ(data.bos, 6);
  EXPECT_EQ(data.eos, 5);
  EXPECT_FALSE(data.add_bos);
  // The flag counts for the llama classes alone.
  apply_tokenizer_config({{"add_bos_token", true}, {"tokenizer_class", "Qwen2Tokenizer"}}, "C", data);
  EXPECT_FALSE(data.add_bos);
  apply_tokenizer_config({{"add_bos_token", true}, {"tokenizer_class", "LlamaTokenizer"}}, "C", data);
  EXPECT_TRUE(data.add_bos);
  apply_tokenizer_config({{"add_bos_token", false}, {"tokenizer_class", "LlamaTokenizerFast"}}, "C", data);
  EXPECT_FALSE(data.add_bos);
}

TEST(TokenizerConfig, Faults) {
  const auto apply = [](const Json& json) {
    TokenizerData data = read(tiny());
    apply_tokenizer_config(json, "C", data);
  };
  EXPECT_THAT(fault_of<BadFile>([&] {
                apply({{"eos_token", "<none>"}});
              }),
              HasSubstr("C: field 'eos_token': '<none>' is no token"));
  EXPECT_THAT(fault_of<BadFile>([&] {
                apply({{"eos_token", 5}});
              }),
              HasSubstr("C: field 'eos_token': expected a string"));
  EXPECT_THAT(fault_of<BadFile>([&] {
                apply({{"bos_token", Json::object()}});
              }),
              HasSubstr("'bos_token.content': missing"));
  EXPECT_THAT(fault_of<BadFile>([&] {
                apply({{"add_bos_token", true}, {"tokenizer_class", "LlamaTokenizer"}});
              }),
              HasSubstr("'bos_token': missing"));
  EXPECT_THAT(fault_of<Unsupported>([&] { apply({{"add_eos_token", true}}); }), HasSubstr("'add_eos_token'"));
  EXPECT_THROW(apply(Json::array()), BadFile);
}

TEST(TokenizerConfig, ChatTemplate) {
  EXPECT_EQ(chat_template_of({{"chat_template", "x"}}, "C"), "x");
  EXPECT_EQ(chat_template_of(Json::object(), "C"), "");
  EXPECT_EQ(chat_template_of({{"chat_template", nullptr}}, "C"), "");
  const Json list = {{{"name", "tool_use"}, {"template", "t"}}, {{"name", "default"}, {"template", "d"}}};
  EXPECT_EQ(chat_template_of({{"chat_template", list}}, "C"), "d");
  EXPECT_THROW(chat_template_of({{"chat_template", 1}}, "C"), BadFile);
  EXPECT_THROW(chat_template_of({{"chat_template", {{{"name", "default"}}}}}, "C"), BadFile);
}

}  // namespace
}  // namespace kascade
