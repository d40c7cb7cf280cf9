// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_prompts.h"

#include <algorithm>

#include "base/check.h"
#include "eval/default_data.h"

namespace kascade {
namespace {

// Lengths and depths of passkeys. Validation goes to 4K tokens, where sparse prefill loses most.
struct PasskeyGrid {
  std::vector<int64_t> lengths;
  std::vector<double> depths;
};
const PasskeyGrid kChoicePasskeys = {{1000, 1500}, {0.1, 0.25, 0.4, 0.55, 0.7, 0.85}};
const PasskeyGrid kQuickChoicePasskeys = {{800, 1400}, {0.2, 0.5, 0.8}};
const PasskeyGrid kValidationPasskeys = {{1024, 2048, 4096}, {0.1, 0.3, 0.5, 0.7, 0.9}};
const PasskeyGrid kQuickValidationPasskeys = {{1024, 2048, 4096}, {0.25, 0.65}};
// Choice and validation draw their passcodes from seeds this far apart.
constexpr uint64_t kValidationSeedOffset = 1'000'000;

// docs/decisions/0003-what-validation-scores.md: with maps from four, the plan was at the edge of the limits.
constexpr size_t kQuickPrompts = 6;
constexpr size_t kQuickValidationPrompts = 6;
// Every fourth record of the caller's is kept out of the choice.
constexpr size_t kKeptOutStride = 4;
// Built-in text is shortened to this many tokens for tokenizers that spell it with more.
constexpr int64_t kMaxBuiltInTokens = 3072;
// Room behind a passkey's prompt for its answer.
constexpr int64_t kAnswerTokens = 16;

// The first and the last part of ids, limit tokens in all: instruction and question stay.
std::vector<int32_t> shorten(std::vector<int32_t> ids, int64_t limit) {
  const auto n = static_cast<int64_t>(ids.size());
  if (n > limit) ids.erase(ids.begin() + limit / 2, ids.end() - (limit - limit / 2));
  return ids;
}

CalibrationPrompt built_in_prompt(const Model& model, const PromptRecord& record, int64_t reserve) {
  const int64_t limit = std::min(kMaxBuiltInTokens, model.config().context - reserve);
  require<Unsupported>(limit >= 2, "calibration: the model's context of {} tokens leaves no room for prompts",
                       model.config().context);
  CalibrationPrompt prompt;
  prompt.question = record.kind == PromptRecord::Kind::kQuestion;
  if (prompt.question) {
    const ChatMessage message{"user", question_text(record)};
    prompt.ids = chat_tokens(model, {&message, 1});
  } else {
    prompt.ids = text_tokens(model.tokenizer(), record.prompt);
  }
  prompt.ids = shorten(std::move(prompt.ids), limit);
  return prompt;
}

std::vector<PasskeyPrompt> make_grid(const Model& model, std::string_view haystack, const PasskeyGrid& grid,
                                     uint64_t seed) {
  const Tokenizer& tokenizer = model.tokenizer();
  const auto haystack_tokens = static_cast<int64_t>(tokenizer.encode(haystack).size());
  const int64_t longest = std::min(model.config().context - kAnswerTokens, haystack_tokens);
  const int64_t least = least_passkey_tokens(tokenizer);
  std::vector<int64_t> lengths;
  for (const int64_t length : grid.lengths)
    if (length >= least && length <= longest) lengths.push_back(length);
  // A short context still gets passkeys as long as they can be; one too short for any gets none.
  if (lengths.empty() && longest >= least) lengths.push_back(longest);
  return make_passkeys(tokenizer, haystack, lengths, grid.depths, seed);
}

}  // namespace

CalibrationPrompts make_calibration_prompts(const Model& model, const CalibrateOptions& options,
                                            bool compares, int64_t max_new_tokens) {
  CalibrationPrompts prompts;
  // Where nothing is chosen by measurement, validation tells but decides nothing: the small one is enough.
  const bool small_validation = options.quick || !compares;
  const PromptSet built_in = parse_prompts(default_calibration(), "default prompts");
  const size_t validation_begin = built_in.records.size() - kDefaultValidationPrompts;
  if (options.prompts.records.empty()) {
    prompts.name = "default";
    const size_t count = options.quick ? std::min(kQuickPrompts, validation_begin) : validation_begin;
    for (size_t i = 0; i < count; ++i)
      prompts.choice.push_back(built_in_prompt(model, built_in.records[i], max_new_tokens));
  } else {
    prompts.name = options.prompts.name;
    const std::vector<PromptRecord>& records = options.prompts.records;
    const bool keeps_out = compares && records.size() >= kKeptOutStride;
    for (size_t i = 0; i < records.size(); ++i) {
      // Every record is checked, those that --quick leaves out too.
      CalibrationPrompt prompt{prompt_tokens(model, records[i], options.prompts.name, max_new_tokens),
                               records[i].kind == PromptRecord::Kind::kQuestion};
      const bool kept_out = keeps_out && i % kKeptOutStride == kKeptOutStride - 1;
      std::vector<CalibrationPrompt>& part = kept_out ? prompts.validation : prompts.choice;
      const size_t most = kept_out ? kQuickValidationPrompts : kQuickPrompts;
      if (!options.quick || part.size() < most) part.push_back(std::move(prompt));
    }
  }
  if (prompts.validation.empty()) {
    const size_t count = small_validation
                             ? std::min<size_t>(kQuickValidationPrompts, kDefaultValidationPrompts)
                             : kDefaultValidationPrompts;
    for (size_t i = 0; i < count; ++i)
      prompts.validation.push_back(
          built_in_prompt(model, built_in.records[validation_begin + i], max_new_tokens));
  }

  if (compares)
    prompts.choice_passkeys = make_grid(model, default_haystack(),
                                        options.quick ? kQuickChoicePasskeys : kChoicePasskeys, options.seed);
  prompts.validation_passkeys =
      make_grid(model, default_document(), small_validation ? kQuickValidationPasskeys : kValidationPasskeys,
                options.seed + kValidationSeedOffset);

  std::vector<std::vector<int32_t>> ids;
  for (const CalibrationPrompt& prompt : prompts.choice) {
    prompts.tokens += static_cast<int64_t>(prompt.ids.size());
    ids.push_back(prompt.ids);
  }
  prompts.hash = tokens_hash(ids);
  return prompts;
}

}  // namespace kascade
