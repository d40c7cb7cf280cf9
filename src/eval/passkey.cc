// SPDX-License-Identifier: Apache-2.0
#include "eval/passkey.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/check.h"
#include "eval/random.h"
#include "ops/ops.h"

namespace kascade {
namespace {

constexpr std::string_view kQuestion =
    "\n\nQuestion: what is the secret passcode of the library?\nAnswer: The secret passcode of the library "
    "is";

std::string statement_text(const std::string& code) {
  return fmt::format(
      " The secret passcode of the library is {0}. Remember it well: the secret passcode of the library is "
      "{0}.",
      code);
}

// Ids of text that continues other text: a SentencePiece tokenizer puts the first space in front by itself.
std::vector<int32_t> encode_inside(const Tokenizer& tokenizer, std::string_view text) {
  const TokenizerData& data = tokenizer.data();
  const bool adds_space = data.kind == TokenizerKind::kSentencePiece && data.add_space_prefix;
  if (adds_space && text.starts_with(' ')) text.remove_prefix(1);
  return tokenizer.encode(text);
}

// The place in [0, ids.size()] nearest to wanted where a sentence ends, or wanted itself when none does.
int64_t sentence_end_near(const Tokenizer& tokenizer, std::span<const int32_t> ids, int64_t wanted) {
  const auto n = static_cast<int64_t>(ids.size());
  const auto ends_sentence = [&](int64_t place) {
    return place > 0 && place < n && tokenizer.token_bytes(ids[place - 1]).ends_with('.');
  };
  for (int64_t distance = 0; distance < n; ++distance) {
    if (ends_sentence(wanted - distance)) return wanted - distance;
    if (ends_sentence(wanted + distance)) return wanted + distance;
  }
  return wanted;
}

// Tokens besides the haystack: BOS, statement, question.
struct Frame {
  std::vector<int32_t> begin, statement, question;
  int64_t tokens() const { return static_cast<int64_t>(begin.size() + statement.size() + question.size()); }
};

Frame make_frame(const Tokenizer& tokenizer, const std::string& code) {
  Frame frame;
  const TokenizerData& data = tokenizer.data();
  if (data.add_bos && data.bos) frame.begin.push_back(*data.bos);
  frame.statement = encode_inside(tokenizer, statement_text(code));
  frame.question = encode_inside(tokenizer, kQuestion);
  return frame;
}

std::string code_of(SplitMix& random) { return std::to_string(10000 + random.below(90000)); }

PasskeyPrompt make_from_ids(const Tokenizer& tokenizer, std::span<const int32_t> haystack, int64_t tokens,
                            double depth, uint64_t seed) {
  require<BadArgument>(depth >= 0 && depth <= 1, "passkey depth: expected a share in 0..1, got {}", depth);
  SplitMix random(seed);
  PasskeyPrompt passkey;
  passkey.code = code_of(random);
  passkey.depth = depth;
  const Frame frame = make_frame(tokenizer, passkey.code);
  const int64_t room = tokens - frame.tokens();
  require<BadArgument>(room >= 1, "passkey tokens: expected at least {} (statement and question), got {}",
                       frame.tokens() + 1, tokens);
  const auto available = static_cast<int64_t>(haystack.size());
  require<BadArgument>(room <= available, "passkey tokens: {} need a haystack of {} tokens, this one has {}",
                       tokens, room, available);
  const std::span<const int32_t> text = haystack.subspan(random.below(available - room + 1), room);
  const int64_t place = sentence_end_near(tokenizer, text, std::llround(depth * static_cast<double>(room)));

  std::vector<int32_t>& ids = passkey.prompt;
  const auto append = [&ids](std::span<const int32_t> part) {
    ids.insert(ids.end(), part.begin(), part.end());
  };
  append(frame.begin);
  append(text.first(place));
  append(frame.statement);
  append(text.subspan(place));
  append(frame.question);

  passkey.target = encode_inside(tokenizer, " " + passkey.code);
  for (const int32_t id : passkey.target) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    passkey.is_digit.push_back(bytes.find_first_of("0123456789") != std::string_view::npos);
  }
  return passkey;
}

}  // namespace

PasskeyPrompt make_passkey(const Tokenizer& tokenizer, std::string_view haystack, int64_t tokens,
                           double depth, uint64_t seed) {
  return make_from_ids(tokenizer, tokenizer.encode(haystack), tokens, depth, seed);
}

int64_t least_passkey_tokens(const Tokenizer& tokenizer) {
  // Codes may differ in tokens where a tokenizer merges digits; five separate digits are the longest form.
  return make_frame(tokenizer, "90909").tokens() + 1 + 2 * 5;
}

std::vector<PasskeyPrompt> make_passkeys(const Tokenizer& tokenizer, std::string_view haystack,
                                         std::span<const int64_t> lengths, std::span<const double> depths,
                                         uint64_t seed) {
  const std::vector<int32_t> ids = tokenizer.encode(haystack);
  std::vector<PasskeyPrompt> prompts;
  for (const int64_t tokens : lengths) {
    for (const double depth : depths)
      prompts.push_back(make_from_ids(tokenizer, ids, tokens, depth, seed + prompts.size()));
  }
  return prompts;
}

PasskeyResult run_passkey(Engine& engine, const PasskeyPrompt& prompt, const Policy* policy,
                          const std::atomic<bool>* cancel) {
  PasskeyResult result;
  result.prompt_tokens = static_cast<int64_t>(prompt.prompt.size());
  result.depth = prompt.depth;
  result.code = prompt.code;

  const std::unique_ptr<Sequence> sequence = engine.make_sequence();
  std::span<const float> hidden = engine.prefill(*sequence, prompt.prompt, policy, nullptr, {}, cancel);
  std::vector<int32_t> answer;
  for (size_t i = 0; i < prompt.target.size(); ++i) {
    const std::span<const float> logits = engine.logits(hidden);
    const int32_t best = arg_max(logits);
    answer.push_back(best);
    if (prompt.is_digit[i]) {
      const double nll = log_sum_exp(logits) - static_cast<double>(logits[prompt.target[i]]);
      result.digit_nlls.push_back(nll);
      result.digit_nll += nll;
      ++result.digits;
      result.digits_right += best == prompt.target[i];
    }
    if (i + 1 == prompt.target.size()) break;
    const ForwardItem item{sequence.get(), {&prompt.target[i], 1}, 0};
    hidden = engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kDecode, .policy = policy});
  }
  if (result.digits > 0) result.digit_nll /= static_cast<double>(result.digits);
  result.answer = engine.model().model().tokenizer().decode(answer);
  return result;
}

std::vector<PasskeyTally> tally_passkeys(std::span<const PasskeyResult> dense,
                                         std::span<const PasskeyResult> policy) {
  require<BadArgument>(dense.size() == policy.size(), "passkeys: expected {} results of the policy, got {}",
                       dense.size(), policy.size());
  std::map<int64_t, PasskeyTally> by_length;
  for (size_t i = 0; i < dense.size(); ++i) {
    PasskeyTally& tally = by_length[dense[i].prompt_tokens];
    tally.tokens = dense[i].prompt_tokens;
    tally.digits += dense[i].digits;
    tally.dense_right += dense[i].digits_right;
    tally.policy_right += policy[i].digits_right;
  }
  std::vector<PasskeyTally> tallies;
  for (const auto& [tokens, tally] : by_length) tallies.push_back(tally);
  return tallies;
}

double passkey_share(std::span<const PasskeyResult> results) {
  int64_t digits = 0, right = 0;
  for (const PasskeyResult& result : results) {
    digits += result.digits;
    right += result.digits_right;
  }
  return digits > 0 ? static_cast<double>(right) / static_cast<double>(digits) : 0;
}

}  // namespace kascade
