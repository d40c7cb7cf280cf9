// SPDX-License-Identifier: Apache-2.0
#include "eval/prompts.h"

#include <algorithm>

#include "base/file.h"
#include "eval/default_data.h"
#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(PromptFile, ReadsTheThreeForms) {
  const PromptSet set = parse_prompts(
      "{\"prompt\": \"a\\nb\"}\n{\"context\": \"c\", \"input\": \"q\", \"answers\": [\"x\", \"y\"], "
      "\"length\": 3}\n"
      "{\"tokens\": [5, 0, 7]}",
      "folder/file.jsonl");
  EXPECT_EQ(set.name, "file.jsonl");
  ASSERT_EQ(set.records.size(), 3u);
  EXPECT_EQ(set.records[0].prompt, "a\nb");
  EXPECT_EQ(set.records[1].kind, PromptRecord::Kind::kQuestion);
  EXPECT_THAT(set.records[1].answers, ElementsAre("x", "y"));
  EXPECT_THAT(set.records[2].tokens, ElementsAre(5, 0, 7));
  EXPECT_EQ(set.records[2].line, 3);
}

TEST(PromptFile, SplitsAtLineFeedOnly) {
  // Line and paragraph separators, next line, form feed escapes and a carriage return at the end of a line.
  const std::string separators = "\xE2\x80\xA8 \xE2\x80\xA9 \xC2\x85";
  const PromptSet set =
      parse_prompts("{\"prompt\": \"" + separators + "\"}\r\n\n  \t\n{\"prompt\": \"last\"}\n", "f");
  ASSERT_EQ(set.records.size(), 2u);
  EXPECT_EQ(set.records[0].prompt, separators);
  EXPECT_EQ(set.records[1].line, 4);
}

TEST(PromptFile, ErrorsNameFileLineAndField) {
  const auto error = [](const std::string& line) {
    return message_of<BadFile>([&] { parse_prompts("{\"prompt\": \"fine\"}\n\n" + line + "\n", "p.jsonl"); });
  };
  EXPECT_THAT(error("{\"prompt\": "), HasSubstr("p.jsonl: line 3"));
  EXPECT_THAT(error("[1]"), AllOf(HasSubstr("p.jsonl: line 3"), HasSubstr("object"), HasSubstr("array")));
  EXPECT_THAT(error("{\"prompt\": 5}"),
              AllOf(HasSubstr("line 3"), HasSubstr("'prompt'"), HasSubstr("string")));
  EXPECT_THAT(error("{\"prompt\": \"\"}"),
              AllOf(HasSubstr("line 3"), HasSubstr("'prompt'"), HasSubstr("empty")));
  EXPECT_THAT(error("{\"context\": \"c\"}"), AllOf(HasSubstr("line 3"), HasSubstr("input")));
  EXPECT_THAT(error("{\"input\": \"q\"}"), AllOf(HasSubstr("line 3"), HasSubstr("context")));
  EXPECT_THAT(error("{\"context\": \"c\", \"input\": \"\"}"),
              AllOf(HasSubstr("'input'"), HasSubstr("empty")));
  EXPECT_THAT(error("{\"context\": \"c\", \"input\": \"q\", \"answers\": \"x\"}"),
              AllOf(HasSubstr("'answers'"), HasSubstr("array")));
  EXPECT_THAT(error("{\"context\": \"c\", \"input\": \"q\", \"answers\": [\"x\", 4]}"),
              HasSubstr("'answers[1]'"));
  EXPECT_THAT(error("{\"prompt\": \"a\", \"tokens\": [1]}"),
              AllOf(HasSubstr("line 3"), HasSubstr("exactly one")));
  EXPECT_THAT(error("{\"text\": \"a\"}"), AllOf(HasSubstr("line 3"), HasSubstr("'prompt'")));
  EXPECT_THAT(error("{\"tokens\": []}"), AllOf(HasSubstr("'tokens'"), HasSubstr("empty")));
  EXPECT_THAT(error("{\"tokens\": [1, -2]}"), AllOf(HasSubstr("'tokens'[1]"), HasSubstr("-2")));
  EXPECT_THAT(error("{\"tokens\": [1.5]}"), AllOf(HasSubstr("'tokens'[0]"), HasSubstr("1.5")));
  EXPECT_THAT(error("{\"tokens\": [18446744073709551615]}"), HasSubstr("'tokens'[0]"));
  EXPECT_THAT(error("{\"tokens\": [2147483648]}"), HasSubstr("'tokens'[0]"));
  EXPECT_THAT(error("{\"prompt\": \"\xFF\"}"), HasSubstr("line 3"));
}

TEST(PromptFile, WithoutARecordIsRefused) {
  for (const char* text : {"", "\n\n", "  \r\n"})
    EXPECT_THAT(message_of<BadFile>([&] { parse_prompts(text, "empty.jsonl"); }), HasSubstr("empty.jsonl"));
}

TEST(PromptFile, TheDefaultPromptsAreThere) {
  const PromptSet set = parse_prompts(default_calibration(), "default");
  EXPECT_EQ(set.records.size(), 22u);
  EXPECT_GT(static_cast<int64_t>(set.records.size()), kDefaultValidationPrompts);
  EXPECT_GT(default_document().size(), 30000u);
  EXPECT_GT(default_haystack().size(), 20000u);
  // The haystack that the choice sees shares no text with the document of the validation.
  EXPECT_EQ(default_document().find(default_haystack().substr(1000, 60)), std::string_view::npos);
}

TEST(TokenFile, IsAnArrayOfIdsOfTheVocabulary) {
  const test::TemporaryFolder folder;
  const auto load = [&](const std::string& text) {
    write_file_atomic(folder.file("t.json"), text);
    return load_tokens(folder.file("t.json"), 352);
  };
  EXPECT_THAT(load("[0, 351]"), ElementsAre(0, 351));
  EXPECT_TRUE(load("[]").empty());
  for (const char* bad : {"[352]", "[-1]", "[true]", "[\"1\"]", "[1e3]", "{}", "3"})
    EXPECT_THAT(message_of<BadFile>([&] { load(bad); }), HasSubstr("t.json")) << bad;
}

TEST(PromptTokens, CarryBosExactlyOnce) {
  const Model& model = test::tiny_model()->model();
  const TokenizerData& data = model.tokenizer().data();
  ASSERT_TRUE(data.add_bos && data.bos);
  const auto count_bos = [&](const std::vector<int32_t>& ids) {
    return std::count(ids.begin(), ids.end(), *data.bos);
  };
  EXPECT_EQ(count_bos(text_tokens(model.tokenizer(), "The dog")), 1);
  EXPECT_EQ(text_tokens(model.tokenizer(), "").size(), 1u);
  const ChatMessage message{"user", "The dog <|begin_of_text|> sleeps"};
  const std::vector<int32_t> ids = chat_tokens(model, {&message, 1});
  EXPECT_EQ(ids.front(), *data.bos);
  // The spelling inside the message stays text.
  EXPECT_EQ(count_bos(ids), 1);
  EXPECT_THAT(model.tokenizer().decode(ids), HasSubstr("The dog <|begin_of_text|> sleeps"));
  PromptRecord record;
  record.kind = PromptRecord::Kind::kTokens;
  record.tokens = {3, 4};
  EXPECT_THAT(prompt_tokens(model, record, "f", 0), ElementsAre(3, 4));
}

TEST(PromptTokens, NameWhatDoesNotFit) {
  const Model& model = test::tiny_model()->model();
  PromptRecord record;
  record.kind = PromptRecord::Kind::kTokens;
  record.line = 9;
  record.tokens.assign(500, 1);
  EXPECT_THAT(message_of<BadFile>([&] { prompt_tokens(model, record, "f.jsonl", 32); }),
              AllOf(HasSubstr("f.jsonl: line 9"), HasSubstr("500"), HasSubstr("512"), HasSubstr("32")));
  EXPECT_EQ(prompt_tokens(model, record, "f.jsonl", 12).size(), 500u);
  record.tokens = {1, 352};
  EXPECT_THAT(message_of<BadFile>([&] { prompt_tokens(model, record, "f.jsonl", 0); }),
              AllOf(HasSubstr("line 9"), HasSubstr("'tokens'[1]"), HasSubstr("352")));
}

TEST(TokensHash, SeesOrderAndLengths) {
  using Prompts = std::vector<std::vector<int32_t>>;
  const std::string hash = tokens_hash(Prompts{{1, 2}, {3}});
  EXPECT_EQ(hash.size(), 16u);
  EXPECT_EQ(hash, tokens_hash(Prompts{{1, 2}, {3}}));
  EXPECT_NE(hash, tokens_hash(Prompts{{1}, {2, 3}}));
  EXPECT_NE(hash, tokens_hash(Prompts{{3}, {1, 2}}));
  EXPECT_NE(hash, tokens_hash(Prompts{{1, 2, 3}}));
}

}  // namespace
}  // namespace kascade
