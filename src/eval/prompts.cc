// SPDX-License-Identifier: Apache-2.0
#include "eval/prompts.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"

namespace kascade {
namespace {

std::string text_field(const Json& object, const char* key, const std::string& source) {
  return json_string(object, key, source, "");
}

std::vector<int32_t> token_array(const Json& array, const std::string& source, const std::string& field,
                                 int64_t vocabulary) {
  require<BadFile>(array.is_array(), "{}: {}: expected an array of token ids, got {}", source, field,
                   array.type_name());
  std::vector<int32_t> ids;
  ids.reserve(array.size());
  for (size_t i = 0; i < array.size(); ++i) {
    const Json& value = array[i];
    const bool fits =
        value.is_number_integer() &&
        (!value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT32_MAX));
    require<BadFile>(fits, "{}: {}[{}]: expected a token id, got {}", source, field, i, dump_json(value));
    const int64_t id = value.get<int64_t>();
    require<BadFile>(id >= 0 && id < vocabulary, "{}: {}[{}]: expected a token id in 0..{}, got {}", source,
                     field, i, vocabulary - 1, id);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

PromptRecord parse_record(const Json& object, const std::string& source) {
  require<BadFile>(object.is_object(), "{}: expected a JSON object, got {}", source, object.type_name());
  const bool text = object.contains("prompt");
  const bool question = object.contains("context") || object.contains("input");
  const bool tokens = object.contains("tokens");
  require<BadFile>(
      text + question + tokens == 1,
      "{}: expected exactly one of the fields 'prompt', 'context' with 'input', or 'tokens', got {}", source,
      text + question + tokens);
  PromptRecord record;
  if (text) {
    record.kind = PromptRecord::Kind::kText;
    record.prompt = text_field(object, "prompt", source);
    require<BadFile>(!record.prompt.empty(), "{}: field 'prompt': expected text, got an empty string",
                     source);
  } else if (question) {
    record.kind = PromptRecord::Kind::kQuestion;
    record.context = text_field(object, "context", source);
    record.input = text_field(object, "input", source);
    require<BadFile>(!record.input.empty(), "{}: field 'input': expected text, got an empty string", source);
    if (object.contains("answers")) {
      const Json& answers = object["answers"];
      require<BadFile>(answers.is_array(), "{}: field 'answers': expected an array of strings, got {}",
                       source, answers.type_name());
      for (size_t i = 0; i < answers.size(); ++i) {
        require<BadFile>(answers[i].is_string(), "{}: field 'answers[{}]': expected a string, got {}", source,
                         i, answers[i].type_name());
        record.answers.push_back(answers[i].get<std::string>());
      }
    }
  } else {
    record.kind = PromptRecord::Kind::kTokens;
    record.tokens = token_array(object["tokens"], source, "field 'tokens'", int64_t{INT32_MAX} + 1);
    require<BadFile>(!record.tokens.empty(), "{}: field 'tokens': expected token ids, got an empty array",
                     source);
  }
  return record;
}

std::string record_source(const std::string& source, int64_t line) {
  return fmt::format("{}: line {}", source, line);
}

std::vector<int32_t> with_bos(const Tokenizer& tokenizer, std::vector<int32_t> ids) {
  const TokenizerData& data = tokenizer.data();
  if (data.add_bos && data.bos && (ids.empty() || ids.front() != *data.bos))
    ids.insert(ids.begin(), *data.bos);
  return ids;
}

}  // namespace

PromptSet parse_prompts(std::string_view text, const std::string& source) {
  PromptSet set;
  const size_t slash = source.find_last_of('/');
  set.name = slash == std::string::npos ? source : source.substr(slash + 1);
  int64_t line_number = 0;
  while (!text.empty()) {
    ++line_number;
    // Split at LF alone: the separators of Unicode (U+2028 and others) stand unescaped inside JSON strings.
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = record_source(source, line_number);
    PromptRecord record = parse_record(parse_json(line, where), where);
    record.line = line_number;
    set.records.push_back(std::move(record));
  }
  require<BadFile>(!set.records.empty(), "{}: expected at least one prompt, one JSON object a line, got none",
                   source);
  return set;
}

PromptSet load_prompts(const std::string& path) { return parse_prompts(read_file(path), path); }

std::vector<int32_t> load_tokens(const std::string& path, int32_t vocabulary) {
  return token_array(load_json(path), path, "token array", vocabulary);
}

std::vector<int32_t> text_tokens(const Tokenizer& tokenizer, std::string_view text) {
  return with_bos(tokenizer, tokenizer.encode(text));
}

std::vector<int32_t> chat_tokens(const Model& model, std::span<const ChatMessage> messages) {
  const Tokenizer& tokenizer = model.tokenizer();
  if (!model.chat_template_source().empty()) {
    const TokenizerData& data = tokenizer.data();
    const auto spelling = [&data](std::optional<int32_t> id) {
      return id ? data.tokens[*id] : std::string();
    };
    const RenderedChat chat =
        ChatTemplate::parse(model.chat_template_source())
            ->render_marked({messages.begin(), messages.end()}, true, spelling(data.bos), spelling(data.eos));
    return with_bos(tokenizer, tokenizer.encode_marked(chat.text, chat.from_messages));
  }
  std::string text;
  for (const ChatMessage& message : messages) {
    if (!text.empty()) text += "\n\n";
    text += message.content;
  }
  return text_tokens(tokenizer, text);
}

std::string question_text(const PromptRecord& record) {
  if (record.context.empty()) return fmt::format("Question: {}\nAnswer:", record.input);
  constexpr const char* kInstruction =
      "Answer the question based on the given passages. Only give me the answer and do not output any other "
      "words.";
  return fmt::format("{0}\n\nThe following are given passages.\n{1}\n\n{0}\n\nQuestion: {2}\nAnswer:",
                     kInstruction, record.context, record.input);
}

std::vector<int32_t> prompt_tokens(const Model& model, const PromptRecord& record, const std::string& source,
                                   int64_t reserve) {
  const std::string where = record_source(source, record.line);
  std::vector<int32_t> ids;
  switch (record.kind) {
    case PromptRecord::Kind::kText:
      ids = text_tokens(model.tokenizer(), record.prompt);
      break;
    case PromptRecord::Kind::kQuestion: {
      const ChatMessage message{"user", question_text(record)};
      ids = chat_tokens(model, {&message, 1});
      break;
    }
    case PromptRecord::Kind::kTokens: {
      const int32_t vocabulary = model.config().vocabulary;
      for (size_t i = 0; i < record.tokens.size(); ++i)
        require<BadFile>(record.tokens[i] >= 0 && record.tokens[i] < vocabulary,
                         "{}: field 'tokens'[{}]: expected a token id in 0..{}, got {}", where, i,
                         vocabulary - 1, record.tokens[i]);
      ids = record.tokens;
      break;
    }
  }
  require<BadFile>(!ids.empty(), "{}: expected a prompt of at least one token, got none", where);
  const int64_t room = model.config().context - reserve;
  require<BadFile>(
      static_cast<int64_t>(ids.size()) <= room,
      "{}: the prompt has {} tokens, but the model's context of {} less {} for the continuation leaves {}",
      where, ids.size(), model.config().context, reserve, std::max<int64_t>(room, 0));
  return ids;
}

std::string tokens_hash(std::span<const std::vector<int32_t>> prompts) {
  uint64_t hash = kFnvOffset;
  for (const std::vector<int32_t>& ids : prompts) {
    const uint64_t count = ids.size();
    hash = fnv1a(std::as_bytes(std::span(&count, 1)), hash);
    hash = fnv1a(std::as_bytes(std::span(ids)), hash);
  }
  return hash_hex(hash);
}

}  // namespace kascade
