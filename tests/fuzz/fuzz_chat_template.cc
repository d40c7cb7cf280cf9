// SPDX-License-Identifier: Apache-2.0
// Chat templates from outside. Input: a template; what follows a line "----" is the last message. Whatever
// the bytes, parsing and rendering throw an error of ours or give text within the limits, with marks that lie
// in it.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kascade/chat_template.h"
#include "kascade/error.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const kascade::ChatTemplate& chat_template, const std::vector<kascade::ChatMessage>& messages) {
  kascade::ChatTemplateLimits limits;
  limits.max_steps = 20'000;
  limits.max_output_bytes = 1 << 16;
  const kascade::RenderedChat chat = chat_template.render_marked(messages, true, "<s>", "</s>", limits);
  require(chat.text.size() <= limits.max_output_bytes);
  size_t last = 0;
  for (const kascade::TextRange& range : chat.from_messages) {
    require(range.begin >= last && range.begin < range.end && range.end <= chat.text.size());
    last = range.end;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  const std::string input(reinterpret_cast<const char*>(bytes), size);
  const size_t cut = input.find("\n----\n");
  const std::string content = cut == std::string::npos ? "a <b> c" : input.substr(cut + 6);
  try {
    const auto chat_template = kascade::ChatTemplate::parse(input.substr(0, cut));
    check(*chat_template,
          {{"system", "s"}, {"user", "Hi  there"}, {"assistant", "<think>x</think> y"}, {"user", content}});
    check(*chat_template, {});
  } catch (const kascade::BadFile&) {
  } catch (const kascade::Unsupported&) {
  }
  return 0;
}
