// SPDX-License-Identifier: Apache-2.0
#include "kascade/chat_template.h"

#include <utility>

#include "base/check.h"
#include "model/jinja_evaluator.h"
#include "model/jinja_parser.h"

namespace kascade {
namespace {

// The longest template known has 30,000 bytes.
constexpr size_t kMaxSourceBytes = size_t{1} << 20;

class JinjaTemplate final : public ChatTemplate {
 public:
  explicit JinjaTemplate(const std::string& source) {
    require<BadFile>(source.size() <= kMaxSourceBytes, "chat template: expected at most {} bytes, got {}",
                     kMaxSourceBytes, source.size());
    block_ = jinja::parse_template(source);
  }

  std::string render(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                     const std::string& bos_token, const std::string& eos_token,
                     const ChatTemplateLimits& limits) const override {
    return render_marked(messages, add_generation_prompt, bos_token, eos_token, limits).text;
  }

  RenderedChat render_marked(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                             const std::string& bos_token, const std::string& eos_token,
                             const ChatTemplateLimits& limits) const override {
    jinja::Machine machine(limits);
    std::vector<jinja::Value> list;
    for (const ChatMessage& message : messages) {
      list.push_back(machine.dict({{"role", machine.borrow(message.role, true)},
                                   {"content", machine.borrow(message.content, true)}}));
    }
    // As where these templates come from: tools and documents are there, but none.
    return jinja::evaluate(machine, block_,
                           {{"messages", machine.list(std::move(list))},
                            {"add_generation_prompt", machine.boolean(add_generation_prompt)},
                            {"bos_token", machine.borrow(bos_token)},
                            {"eos_token", machine.borrow(eos_token)},
                            {"tools", machine.none()},
                            {"documents", machine.none()}});
  }

 private:
  jinja::Block block_;
};

}  // namespace

std::unique_ptr<const ChatTemplate> ChatTemplate::parse(const std::string& source) {
  return std::make_unique<const JinjaTemplate>(source);
}

}  // namespace kascade
