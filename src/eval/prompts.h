// SPDX-License-Identifier: Apache-2.0
// Prompt files, token files, and the token ids that a model expects for them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kascade/chat_template.h"
#include "kascade/model.h"

namespace kascade {

/// One line of a prompt file.
struct PromptRecord {
  enum class Kind : uint8_t {
    kText,      // {"prompt"}: raw text, continued as it stands
    kQuestion,  // {"context", "input", "answers"}: one user turn of the model's chat template
    kTokens,    // {"tokens"}: ids, taken as they are
  };
  Kind kind = Kind::kText;
  std::string prompt;
  std::string context, input;
  std::vector<std::string> answers;
  std::vector<int32_t> tokens;
  int64_t line = 0;  // 1-based, for messages
};

struct PromptSet {
  std::string name;  // the file's name without its folders
  std::vector<PromptRecord> records;
};

/// JSON Lines, split at LF only; empty lines are skipped. Unknown fields are ignored. Throws BadFile naming
/// source, line and field, expected and actual: no JSON, neither or several of the three forms, a wrong type,
/// an empty prompt, a negative token id, no record at all.
PromptSet parse_prompts(std::string_view text, const std::string& source);
PromptSet load_prompts(const std::string& path);

/// --tokens F: a JSON array of ids, each in [0, vocabulary). Throws BadFile naming the file and the index.
std::vector<int32_t> load_tokens(const std::string& path, int32_t vocabulary);

/// Ids of raw text as this model wants it: BOS exactly once in front if the tokenizer adds one.
std::vector<int32_t> text_tokens(const Tokenizer& tokenizer, std::string_view text);

/// Ids of a conversation in the model's chat template, ready for the assistant's turn. Control tokens come
/// from the template alone: their spellings inside a message stay text. BOS exactly once. A model without a
/// template gets the contents as raw text, joined by blank lines. Throws BadFile or Unsupported for a faulty
/// template.
std::vector<int32_t> chat_tokens(const Model& model, std::span<const ChatMessage> messages);

/// The user's turn of a question record: instruction, context, instruction and question in the manner of
/// LongBench.
std::string question_text(const PromptRecord& record);

/// Ids of one record. Throws BadFile naming source and line for ids outside the vocabulary, or for a prompt
/// that is empty or longer than the context less `reserve` tokens (both numbers named).
std::vector<int32_t> prompt_tokens(const Model& model, const PromptRecord& record, const std::string& source,
                                   int64_t reserve);

/// 16 hex digits over the ids of prompts, in order, lengths included.
std::string tokens_hash(std::span<const std::vector<int32_t>> prompts);

}  // namespace kascade
