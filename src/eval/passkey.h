// SPDX-License-Identifier: Apache-2.0
// Passkey retrieval: a five-digit passcode stated inside running text and asked for at its end. NLL and KL
// over running text hardly show lost retrieval; this does.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kascade/engine.h"
#include "kascade/tokenizer.h"

namespace kascade {

struct PasskeyPrompt {
  std::string code;               // five digits
  double depth = 0;               // where the statement stands, as a share of the text, 0..1
  std::vector<int32_t> prompt;    // ids, up to where the answer begins
  std::vector<int32_t> target;    // ids of the answer
  std::vector<uint8_t> is_digit;  // [target] 1 where the token carries digits: these are scored
};

/// A prompt of exactly `tokens` ids: text of the haystack from a place that the seed chooses, the statement
/// at the end of the sentence nearest to depth, the question last. The code follows from the seed.
/// Deterministic. Throws BadArgument when tokens leaves no room for statement and question or the haystack is
/// too short (both numbers named).
PasskeyPrompt make_passkey(const Tokenizer& tokenizer, std::string_view haystack, int64_t tokens,
                           double depth, uint64_t seed);

/// Least `tokens` that make_passkey accepts with this tokenizer.
int64_t least_passkey_tokens(const Tokenizer& tokenizer);

/// Every length at every depth, lengths outermost; prompt i has seed + i.
std::vector<PasskeyPrompt> make_passkeys(const Tokenizer& tokenizer, std::string_view haystack,
                                         std::span<const int64_t> lengths, std::span<const double> depths,
                                         uint64_t seed);

struct PasskeyResult {
  int64_t prompt_tokens = 0;
  double depth = 0;
  std::string code;
  std::string answer;              // arg-max of each position, decoded
  int64_t digits = 0;              // digit tokens scored
  int64_t digits_right = 0;        // of them, those whose arg-max is right
  double digit_nll = 0;            // mean over the digit tokens, nats
  std::vector<double> digit_nlls;  // [digits]
};

/// Prefills the prompt and feeds the answer teacher-forced, one decode step a token. policy null = dense.
PasskeyResult run_passkey(Engine& engine, const PasskeyPrompt& prompt, const Policy* policy,
                          const std::atomic<bool>* cancel = nullptr);

/// Digits right under dense attention and under a policy, over the passkeys of one length.
struct PasskeyTally {
  int64_t tokens = 0;
  int64_t digits = 0;
  int64_t dense_right = 0;
  int64_t policy_right = 0;
};

/// By length, ascending; dense and policy are results of the same prompts in the same order.
std::vector<PasskeyTally> tally_passkeys(std::span<const PasskeyResult> dense,
                                         std::span<const PasskeyResult> policy);

/// Shares of digits right over results; 0 when there are none.
double passkey_share(std::span<const PasskeyResult> results);

}  // namespace kascade
