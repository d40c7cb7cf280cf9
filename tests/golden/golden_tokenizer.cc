// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "eval/prompts.h"
#include "golden.h"

namespace kascade::golden {

void run_tokenizer(const std::string& golden_dir, Tally& tally) {
  const Model& model = reference_model()->model();
  const Tokenizer& tokenizer = model.tokenizer();
  const std::string folder = golden_dir + "/tokenizer/";
  for (const std::string& file : cases_in(folder, ".json")) {
    const Json cases = load_json(folder + file + ".json");
    for (size_t i = 0; i < cases.size(); ++i) {
      const Json& item = cases[i];
      const std::string name = fmt::format("{}[{}]", file, i);
      const auto expected = item.at("ids").get<std::vector<int32_t>>();
      if (item.contains("messages")) {
        std::vector<ChatMessage> messages;
        for (const Json& message : item.at("messages"))
          messages.push_back({message.at("role"), message.at("content")});
        const auto chat = ChatTemplate::parse(model.chat_template_source());
        const auto spelling = [&](const std::optional<int32_t>& id) {
          return id ? tokenizer.data().tokens[static_cast<size_t>(*id)] : std::string();
        };
        const bool generation = item.at("add_generation_prompt").get<bool>();
        const RenderedChat rendered = chat->render_marked(
            messages, generation, spelling(tokenizer.data().bos), spelling(tokenizer.data().eos));
        tally.check(rendered.text == item.at("rendered").get<std::string>(), name, "rendered text differs");
        const auto ids = tokenizer.encode_marked(rendered.text, rendered.from_messages);
        tally.check(ids == expected, name, fmt::format("ids {} instead of {}", ids, expected));
        if (generation) tally.check(chat_tokens(model, messages) == expected, name, "chat_tokens differs");
      } else {
        const std::string text = item.at("text");
        const auto ids = tokenizer.encode(text, true);
        tally.check(ids == expected, name, fmt::format("ids {} instead of {}", ids, expected));
        tally.check(tokenizer.decode(expected, true) == item.at("decoded").get<std::string>(), name,
                    "decoded text differs");
      }
      tally.ran(name);
    }
  }
}

}  // namespace kascade::golden
