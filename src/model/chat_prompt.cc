// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "kascade/model.h"

namespace kascade {
namespace {

// Brackets around each message's content while the template runs: bytes that no template and no UTF-8 text contains.
constexpr std::string_view kOpen = "\xFE\x01";
constexpr std::string_view kClose = "\xFE\x02";

// A rendered conversation with, for every byte, whether the template wrote it.
struct Rendered {
  std::string text;
  std::vector<bool> from_template;
};

bool mentions_control_token(const Tokenizer& tokenizer, std::string_view text) {
  for (int32_t id = 0; id < tokenizer.size(); ++id) {
    if (tokenizer.is_control(id) && text.find(tokenizer.data().tokens[id]) != std::string_view::npos) return true;
  }
  return false;
}

// The rendering of bracketed messages without its brackets. Content between brackets is the messages'.
Rendered strip_brackets(std::string_view bracketed) {
  Rendered rendered;
  bool inside = false;
  for (size_t i = 0; i < bracketed.size();) {
    if (bracketed.substr(i).starts_with(kOpen) || bracketed.substr(i).starts_with(kClose)) {
      inside = bracketed.substr(i).starts_with(kOpen);
      i += kOpen.size();
      continue;
    }
    rendered.text += bracketed[i++];
    rendered.from_template.push_back(!inside);
  }
  return rendered;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\r\f\v";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

Rendered render(const ChatTemplate& chat_template, const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                bool add_generation_prompt, const std::string& bos, const std::string& eos) {
  const std::string plain = chat_template.render(messages, add_generation_prompt, bos, eos);
  bool risky = false;
  for (const ChatMessage& message : messages) risky = risky || mentions_control_token(tokenizer, message.content);
  if (!risky) return {plain, std::vector<bool>(plain.size(), true)};
  // Templates put a message in as it is, or trimmed; with brackets around either, the same text must come out.
  for (const bool trimmed : {false, true}) {
    std::vector<ChatMessage> bracketed = messages;
    for (ChatMessage& message : bracketed) {
      const std::string_view content = trimmed ? trim(message.content) : std::string_view(message.content);
      message.content = fmt::format("{}{}{}", kOpen, content, kClose);
    }
    Rendered rendered = strip_brackets(chat_template.render(bracketed, add_generation_prompt, bos, eos));
    if (rendered.text == plain) return rendered;
  }
  throw_error<Unsupported>(
      "chat template: a message spells a control token and the template rewrites it; remove the spelling");
}

}  // namespace

std::vector<int32_t> chat_prompt_ids(const Model& model, const std::vector<ChatMessage>& messages,
                                     bool add_generation_prompt) {
  require<Unsupported>(!model.chat_template_source().empty(), "{}: the model has no chat template", model.path());
  const Tokenizer& tokenizer = model.tokenizer();
  const TokenizerData& data = tokenizer.data();
  const auto spelling = [&](const std::optional<int32_t>& id) { return id ? data.tokens[*id] : std::string(); };
  const auto chat_template = ChatTemplate::parse(model.chat_template_source());
  const Rendered rendered = render(*chat_template, tokenizer, messages, add_generation_prompt, spelling(data.bos),
                                   spelling(data.eos));

  std::vector<int32_t> controls;
  for (int32_t id = 0; id < tokenizer.size(); ++id) {
    if (tokenizer.is_control(id) && !data.tokens[id].empty()) controls.push_back(id);
  }
  std::vector<int32_t> ids;
  const std::string_view text = rendered.text;
  size_t segment = 0;
  const auto flush = [&](size_t end) {
    const std::vector<int32_t> part = tokenizer.encode(text.substr(segment, end - segment));
    ids.insert(ids.end(), part.begin(), part.end());
  };
  for (size_t i = 0; i < text.size();) {
    int32_t longest = -1;
    for (const int32_t id : controls) {
      const std::string& token = data.tokens[id];
      if (text.substr(i).starts_with(token) && (longest < 0 || token.size() > data.tokens[longest].size()) &&
          std::all_of(rendered.from_template.begin() + i, rendered.from_template.begin() + i + token.size(),
                      [](bool written) { return written; })) {
        longest = id;
      }
    }
    if (longest < 0) {
      ++i;
      continue;
    }
    if (i > segment) flush(i);
    ids.push_back(longest);
    i += data.tokens[longest].size();
    segment = i;
  }
  if (text.size() > segment) flush(text.size());
  if (data.add_bos && data.bos && (ids.empty() || ids.front() != *data.bos)) ids.insert(ids.begin(), *data.bos);
  return ids;
}

}  // namespace kascade
