// SPDX-License-Identifier: Apache-2.0
// Chat templates: a bounded subset of Jinja, enough for the templates of llama, mistral, qwen and SmolLM models.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

class ChatTemplate {
 public:
  /// Throws BadFile (syntax) or Unsupported (a construct outside the subset), with the line in the template.
  static std::unique_ptr<const ChatTemplate> parse(const std::string& source);
  virtual ~ChatTemplate() = default;

  /// Throws BadFile when the template fails, calls raise_exception or passes a limit.
  virtual std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                             const std::string& bos_token, const std::string& eos_token,
                             const ChatTemplateLimits& limits = {}) const = 0;
};

}  // namespace kascade
