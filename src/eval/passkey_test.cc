// SPDX-License-Identifier: Apache-2.0
#include "eval/passkey.h"

#include <algorithm>
#include <cmath>

#include "eval/default_data.h"
#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

const Tokenizer& tokenizer() { return test::tiny_model()->model().tokenizer(); }

TEST(Passkey, HasExactlyTheTokensAskedFor) {
  const int64_t least = least_passkey_tokens(tokenizer());
  for (const int64_t tokens : {least, least + 1, int64_t{500}, int64_t{2000}}) {
    for (const double depth : {0.0, 0.5, 1.0}) {
      const PasskeyPrompt passkey = make_passkey(tokenizer(), default_document(), tokens, depth, 3);
      EXPECT_EQ(static_cast<int64_t>(passkey.prompt.size()), tokens);
      EXPECT_EQ(passkey.target.size(), passkey.is_digit.size());
    }
  }
}

TEST(Passkey, StatesTheCodeTwiceAndAsksForIt) {
  const PasskeyPrompt passkey = make_passkey(tokenizer(), default_document(), 1500, 0.5, 11);
  const std::string text = tokenizer().decode(passkey.prompt);
  ASSERT_EQ(passkey.code.size(), 5u);
  const size_t first = text.find(passkey.code);
  ASSERT_NE(first, std::string::npos);
  const size_t second = text.find(passkey.code, first + 1);
  ASSERT_NE(second, std::string::npos);
  EXPECT_EQ(text.find(passkey.code, second + 1), std::string::npos);
  EXPECT_TRUE(text.ends_with("The secret passcode of the library is"));
  EXPECT_EQ(tokenizer().decode(passkey.target), " " + passkey.code);
  // The statement begins where a sentence ends, near the depth asked for.
  const size_t statement = text.find(" The secret passcode");
  EXPECT_EQ(text[statement - 1], '.');
  EXPECT_NEAR(static_cast<double>(statement) / static_cast<double>(text.size()), 0.5, 0.2);
}

TEST(Passkey, FollowsFromTheSeed) {
  const auto make = [](uint64_t seed) {
    return make_passkey(tokenizer(), default_document(), 600, 0.3, seed);
  };
  EXPECT_EQ(make(5).prompt, make(5).prompt);
  EXPECT_NE(make(5).code, make(6).code);
  EXPECT_NE(make(5).prompt, make(6).prompt);
  const std::vector<int64_t> lengths = {500, 600};
  const std::vector<double> depths = {0.3, 0.7};
  const auto grid = make_passkeys(tokenizer(), default_document(), lengths, depths, 4);
  ASSERT_EQ(grid.size(), 4u);
  EXPECT_EQ(grid[2].prompt, make_passkey(tokenizer(), default_document(), 600, 0.3, 6).prompt);
}

TEST(Passkey, RefusesWhatDoesNotFit) {
  EXPECT_THAT(message_of<BadArgument>([] { make_passkey(tokenizer(), default_document(), 20, 0.5, 1); }),
              AllOf(HasSubstr("passkey tokens"), HasSubstr("20")));
  EXPECT_THAT(message_of<BadArgument>([] { make_passkey(tokenizer(), "Short text.", 1000, 0.5, 1); }),
              AllOf(HasSubstr("haystack"), HasSubstr("1000")));
  EXPECT_THAT(message_of<BadArgument>([] { make_passkey(tokenizer(), default_document(), 600, 1.5, 1); }),
              HasSubstr("depth"));
}

TEST(Passkey, ScoresTheDigitsTeacherForced) {
  const auto engine = test::tiny_engine();
  const PasskeyPrompt passkey = make_passkey(tokenizer(), default_document(), 400, 0.5, 11);
  const PasskeyResult result = run_passkey(*engine, passkey, nullptr);
  EXPECT_EQ(result.prompt_tokens, 400);
  EXPECT_EQ(result.digits, std::count(passkey.is_digit.begin(), passkey.is_digit.end(), 1));
  ASSERT_EQ(static_cast<int64_t>(result.digit_nlls.size()), result.digits);
  // The same positions, from one prefill over prompt and answer.
  std::vector<int32_t> ids = passkey.prompt;
  ids.insert(ids.end(), passkey.target.begin(), passkey.target.end());
  const auto sequence = engine->make_sequence();
  std::vector<float> hidden;
  engine->prefill(
      *sequence, ids, nullptr, nullptr,
      [&](int64_t, std::span<const float> rows) { hidden.insert(hidden.end(), rows.begin(), rows.end()); },
      nullptr);
  const int64_t width = engine->model().config().hidden;
  size_t digit = 0;
  for (size_t i = 0; i < passkey.target.size(); ++i) {
    if (!passkey.is_digit[i]) continue;
    const auto logits = engine->logits(std::span<const float>(hidden).subspan((399 + i) * width, width));
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const double nll = std::log(sum) - static_cast<double>(logits[passkey.target[i]]);
    // Decode and prefill sum in another order: a few fp32 units of a logit of size 10.
    EXPECT_NEAR(result.digit_nlls[digit++], nll, 1e-4);
  }
}

TEST(PasskeyTallies, GoByLength) {
  const auto result = [](int64_t tokens, int64_t right) {
    PasskeyResult r;
    r.prompt_tokens = tokens;
    r.digits = 5;
    r.digits_right = right;
    return r;
  };
  const std::vector<PasskeyResult> dense = {result(2000, 5), result(1000, 4), result(2000, 5)};
  const std::vector<PasskeyResult> policy = {result(2000, 3), result(1000, 4), result(2000, 0)};
  const auto tallies = tally_passkeys(dense, policy);
  ASSERT_EQ(tallies.size(), 2u);
  EXPECT_EQ(tallies[0].tokens, 1000);
  EXPECT_EQ(tallies[1].digits, 10);
  EXPECT_EQ(tallies[1].dense_right, 10);
  EXPECT_EQ(tallies[1].policy_right, 3);
  EXPECT_DOUBLE_EQ(passkey_share(policy), 7.0 / 15);
  EXPECT_EQ(passkey_share({}), 0);
  EXPECT_THROW(tally_passkeys(dense, {}), BadArgument);
}

}  // namespace
}  // namespace kascade
