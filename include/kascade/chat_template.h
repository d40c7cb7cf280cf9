// SPDX-License-Identifier: Apache-2.0
// Chat templates: a bounded subset of Jinja, enough for the templates of llama, mistral, qwen and SmolLM
// models.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kascade/tokenizer.h"

namespace kascade {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

/// Limits on what a template, a program from a stranger, may do.
struct ChatTemplateLimits {
  int64_t max_steps = 1'000'000;
  int max_depth = 64;
  size_t max_output_bytes = size_t{16} << 20;
};

/// A rendered conversation and where in it the text of messages went: Tokenizer::encode_marked takes both, so
/// that a control-token spelling inside a message stays text while the template's own become tokens.
struct RenderedChat {
  std::string text;
  std::vector<TextRange> from_messages;  // ascending, disjoint
};

class ChatTemplate {
 public:
  /// Throws BadFile (syntax) or Unsupported (a construct outside the subset), with the line in the template.
  static std::unique_ptr<const ChatTemplate> parse(const std::string& source);
  virtual ~ChatTemplate() = default;

  /// The template sees messages, add_generation_prompt, bos_token and eos_token; tools and documents are
  /// none, as where such templates come from. strftime_now gives the local time. Throws BadFile when the
  /// template fails, calls raise_exception or passes a limit, Unsupported when it reaches a filter, test or
  /// method outside the subset.
  virtual std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                             const std::string& bos_token, const std::string& eos_token,
                             const ChatTemplateLimits& limits = {}) const = 0;

  /// The same text as render, with the bytes that came from a message's role or content marked. Text that the
  /// template cuts, trims, joins or replaces keeps its marks; what it rewrites otherwise (tojson) is marked
  /// as a whole.
  virtual RenderedChat render_marked(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                                     const std::string& bos_token, const std::string& eos_token,
                                     const ChatTemplateLimits& limits = {}) const = 0;
};

}  // namespace kascade
