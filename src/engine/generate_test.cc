// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "engine/tiny_model.h"
#include "kascade/engine.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::TinyModel;
using testing::ElementsAre;
using testing::HasSubstr;

/// A model that counts: token i is followed by i + 1; the last one ends generation.
class Counting : public testing::Test {
 protected:
  explicit Counting(std::vector<std::string> spellings = {"zero ", "one ", "two ", "three ", "four ",
                                                          "<end>"}) {
    std::vector<int32_t> next(spellings.size());
    for (size_t i = 0; i < next.size(); ++i) next[i] = static_cast<int32_t>(std::min(i + 1, next.size() - 1));
    const auto end = static_cast<int32_t>(next.size() - 1);
    model_ = TinyModel::successor(next, std::move(spellings), end);
    engine_ = test::make_engine(model_);
    sequence_ = engine_->make_sequence();
  }

  GenerateResult run(std::vector<int32_t> prompt, const GenerateOptions& options) {
    pieces_.clear();
    return generate(*engine_, *sequence_, prompt, nullptr, options,
                    [&](std::string_view text) { pieces_.emplace_back(text); });
  }

  std::shared_ptr<const Model> model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Sequence> sequence_;
  std::vector<std::string> pieces_;
};

TEST_F(Counting, StopsAtTheEndToken) {
  const GenerateResult result = run({0}, {});
  EXPECT_EQ(result.text, "one two three four ");
  EXPECT_THAT(result.token_ids, ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(result.new_tokens, 4);
  EXPECT_EQ(result.prompt_tokens, 1);
  EXPECT_EQ(result.finish, "end");
  EXPECT_THAT(pieces_, ElementsAre("one ", "two ", "three ", "four "));
  EXPECT_EQ(sequence_->length(), 5);  // the prompt and the four tokens
}

TEST_F(Counting, MayIgnoreTheEndToken) {
  const GenerateResult result = run({3}, {.max_tokens = 4, .ignore_end = true});
  EXPECT_EQ(result.text, "four <end><end><end>");
  EXPECT_EQ(result.finish, "length");
  EXPECT_EQ(result.new_tokens, 4);
}

TEST_F(Counting, StopsAtTheLength) {
  const GenerateResult result = run({0}, {.max_tokens = 2});
  EXPECT_EQ(result.text, "one two ");
  EXPECT_EQ(result.finish, "length");
  EXPECT_EQ(sequence_->length(), 2);  // the last sampled token is not in it
}

TEST_F(Counting, ZeroNewTokensOnlyPrefill) {
  const GenerateResult result = run({0, 1}, {.max_tokens = 0});
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.new_tokens, 0);
  EXPECT_EQ(result.finish, "length");
  EXPECT_EQ(sequence_->length(), 2);
  EXPECT_TRUE(pieces_.empty());
}

TEST_F(Counting, AWhollyCachedPromptGoesOn) {
  run({0, 1}, {.max_tokens = 0});
  const GenerateResult result = run({}, {.max_tokens = 1});
  EXPECT_EQ(result.text, "two ");
  EXPECT_EQ(result.prompt_tokens, 0);
}

TEST_F(Counting, AnEmptyPromptWithNothingBeforeItIsAnError) {
  EXPECT_THROW(run({}, {}), BadArgument);
  EXPECT_EQ(run({}, {.max_tokens = 0}).finish, "length");
  run({0, 1}, {.max_tokens = 0});
  sequence_->truncate(1);  // the last row's residual went with the row
  EXPECT_THROW(run({}, {}), BadArgument);
}

TEST_F(Counting, StopStringsSpanTokensAndNeverShow) {
  const GenerateResult result = run({0}, {.stops = {"o thr"}});
  EXPECT_EQ(result.text, "one tw");
  EXPECT_EQ(result.finish, "stop");
  EXPECT_THAT(result.token_ids, ElementsAre(1, 2, 3));
  std::string streamed;
  for (const std::string& piece : pieces_) streamed += piece;
  EXPECT_EQ(streamed, result.text);
}

TEST_F(Counting, AnUnfinishedStopStringIsTextInTheEnd) {
  const GenerateResult result = run({0}, {.stops = {"four five"}});
  EXPECT_EQ(result.text, "one two three four ");
  EXPECT_EQ(result.finish, "end");
  EXPECT_EQ(pieces_.back(), "four ");
}

TEST_F(Counting, CancelStopsBetweenTokensAndKeepsWhatThereIs) {
  std::atomic<bool> cancel = false;
  const std::array<int32_t, 1> prompt = {0};
  const GenerateOptions options{.cancel = &cancel};
  const GenerateResult result = generate(*engine_, *sequence_, prompt, nullptr, options,
                                         [&](std::string_view text) { cancel = text == "two "; });
  EXPECT_EQ(result.text, "one two ");
  EXPECT_EQ(result.finish, "cancelled");
  const GenerateResult at_once = generate(*engine_, *sequence_, prompt, nullptr, options, {});
  EXPECT_EQ(at_once.finish, "cancelled");
  EXPECT_EQ(at_once.new_tokens, 0);
}

TEST_F(Counting, ContextErrorsNameBothNumbers) {
  const std::vector<int32_t> prompt(1025, 0);
  for (const auto& [tokens, new_tokens, a] :
       {std::tuple{1025, int64_t{0}, "1025"}, {1000, int64_t{25}, "25 new"}, {1, INT64_MAX, "1 prompt"}}) {
    try {
      run({prompt.begin(), prompt.begin() + tokens}, {.max_tokens = new_tokens});
      ADD_FAILURE() << tokens;
    } catch (const Unsupported& error) {
      EXPECT_THAT(error.what(), HasSubstr(a));
      EXPECT_THAT(error.what(), HasSubstr("1024"));
    }
  }
  EXPECT_EQ(sequence_->length(), 0);
  EXPECT_EQ(run({0}, {.max_tokens = 1023}).finish, "end");
}

TEST_F(Counting, OptionsOutOfRangeAreRefusedBeforeAnyWork) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               infinity = std::numeric_limits<double>::infinity();
  const std::vector<GenerateOptions> bad = {
      {.max_tokens = -1}, {.temperature = -1}, {.temperature = nan}, {.temperature = infinity}, {.top_k = -1},
      {.top_p = 0},       {.top_p = 1.0001},   {.top_p = nan},       {.stops = {"fine", ""}},
  };
  for (const GenerateOptions& options : bad) EXPECT_THROW(run({0}, options), BadArgument);
  EXPECT_EQ(sequence_->length(), 0);
}

/// Tokens that are single bytes of characters of one to four bytes, and one that never finishes.
class CountingBytes : public Counting {
 protected:
  CountingBytes()
      : Counting({"a", "\xC3", "\xA9", "\xE2", "\x82", "\xAC", "\xF0", "\x9F", "\x99", "\x82", "\xE2\x82",
                  "<end>"}) {}
};

TEST_F(CountingBytes, CharactersThatSpanTokensStreamWhole) {
  const GenerateResult result = run({0}, {.max_tokens = 9});
  EXPECT_EQ(result.text, "\u00E9\u20AC\U0001F642");
  EXPECT_THAT(pieces_, ElementsAre("\u00E9", "\u20AC", "\U0001F642"));
}

TEST_F(CountingBytes, AStopInTheMiddleOfACharacterHolds) {
  const GenerateResult result = run({0}, {.stops = {"\u20AC"}});
  EXPECT_EQ(result.text, "\u00E9");
  EXPECT_EQ(result.finish, "stop");
}

TEST_F(CountingBytes, BytesLeftOverAreGivenOutAtTheEnd) {
  const GenerateResult result = run({9}, {});
  EXPECT_EQ(result.finish, "end");
  EXPECT_THAT(result.token_ids, ElementsAre(10));
  std::string streamed;
  for (const std::string& piece : pieces_) streamed += piece;
  EXPECT_EQ(streamed, result.text);
}

TEST(GenerateSampling, TheSeedDecides) {
  const auto model = std::make_shared<TinyModel>(test::TinyModelOptions{});
  const auto engine = test::make_engine(model);
  const auto prompt = test::random_tokens(20, 61, 1);
  const auto run = [&](uint64_t seed) {
    const auto sequence = engine->make_sequence();
    return generate(*engine, *sequence, prompt, nullptr,
                    {.max_tokens = 30, .temperature = 1.5, .top_k = 20, .top_p = 0.95, .seed = seed}, {})
        .token_ids;
  };
  const auto first = run(1);
  EXPECT_EQ(first.size(), 30u);
  EXPECT_EQ(run(1), first);
  EXPECT_NE(run(2), first);
}

TEST(GenerateSampling, GreedyTakesTheLargestLogitUnderEveryPolicy) {
  const auto model = std::make_shared<TinyModel>(test::TinyModelOptions{});
  const Plan plan = test::tiny_plan(*model, {0, 2, 4});
  const auto policy = make_policy("kascade", {.floor = 9, .recent = 3}, model->identity(), &plan);
  const auto engine = test::make_engine(model);
  const auto prompt = test::random_tokens(200, 61, 2);
  const auto sequence = engine->make_sequence(), by_hand = engine->make_sequence();
  const GenerateResult result = generate(*engine, *sequence, prompt, policy.get(), {.max_tokens = 8}, {});
  std::vector<int32_t> expected;
  auto logits = engine->logits(engine->prefill(*by_hand, prompt, policy.get(), nullptr, {}, nullptr));
  std::vector<float> row(logits.begin(), logits.end());
  for (int i = 0; i < 8; ++i) {
    expected.push_back(static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    row = test::decode_logits(*engine, *by_hand, expected.back(), policy.get());
  }
  EXPECT_EQ(result.token_ids, expected);
}

TEST(GenerateSampling, LogitsThatAreNotFiniteEndInAnError) {
  const auto model = TinyModel::successor({1, 0}, {});
  *const_cast<float*>(static_cast<const float*>(model->weights().final_norm.data)) =
      std::numeric_limits<float>::quiet_NaN();
  const auto engine = test::make_engine(model);
  const auto sequence = engine->make_sequence();
  const std::array<int32_t, 1> prompt = {0};
  EXPECT_THROW(generate(*engine, *sequence, prompt, nullptr, {}, {}), BadArgument);
}

}  // namespace
}  // namespace kascade
