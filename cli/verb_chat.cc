// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "base/check.h"
#include "cli/console.h"
#include "cli/generate_options.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/prompts.h"

namespace kascade::cli {
namespace {

struct Chat {
  RunOptions options;
  PolicyFlags policy_flags;
  GenerateFlags flags;
  std::string system;
  int64_t context = 0;

  void run() const {
    const auto model = options.open();
    std::optional<Plan> plan;
    const auto policy = policy_flags.make(*model, &plan);
    require<Unsupported>(!model->chat_template_source().empty(), "{}: the model has no chat template",
                         model->path());
    require<Unsupported>(context <= model->config().context,
                         "--context: {} tokens, but the model's context is {}", context,
                         model->config().context);
    EngineOptions engine_options = options.engine();
    engine_options.cache_tokens = context;
    const auto engine = options.make_engine(model, engine_options);
    const auto sequence = engine->make_sequence();
    const bool terminal = isatty(STDIN_FILENO) != 0;
    if (terminal) note(policy->describe() + "\nAn empty line or Ctrl-D ends the conversation.");

    std::vector<ChatMessage> messages;
    if (!system.empty()) messages.push_back({"system", system});
    std::vector<int32_t> cached;  // the ids whose keys the sequence holds
    Json turns = Json::array();
    for (std::string line; !interrupted();) {
      if (terminal) print_now("> ");
      if (!std::getline(std::cin, line)) break;
      if (line.empty() && terminal) break;
      if (line.empty()) continue;
      messages.push_back({"user", line});
      const std::vector<int32_t> ids = chat_tokens(*model, messages);
      // Earlier turns are cached: only what differs is read again.
      const auto common =
          std::mismatch(ids.begin(), ids.end(), cached.begin(), cached.end()).first - ids.begin();
      const int64_t keep = std::min<int64_t>(common, static_cast<int64_t>(ids.size()) - 1);
      sequence->truncate(std::min(keep, sequence->length()));
      const auto fresh = std::span(ids).subspan(sequence->length());
      const GenerateResult result =
          generate(*engine, *sequence, fresh, policy.get(), flags.make(false), [&](std::string_view text) {
            if (!options.json) print_now(text);
          });
      if (!options.json) print_now("\n");
      cached = ids;
      cached.insert(cached.end(), result.token_ids.begin(), result.token_ids.end());
      cached.resize(std::min<size_t>(cached.size(), sequence->length()));
      messages.push_back({"assistant", result.text});
      turns.push_back({{"user", line},
                       {"assistant", result.text},
                       {"new_tokens", result.new_tokens},
                       {"cached_tokens", static_cast<int64_t>(ids.size() - fresh.size())}});
      require<Cancelled>(result.finish != "cancelled", "interrupted");
    }
    if (options.json) print_json({{"turns", turns}, {"policy", policy->describe()}});
    if (terminal && !options.json) print_now("\n");
  }
};

}  // namespace

void add_chat(CLI::App& app, std::function<void()>* run) {
  auto chat = std::make_shared<Chat>();
  CLI::App* verb = app.add_subcommand("chat", "Talk with a model, line by line; reads a pipe too");
  chat->options.add(*verb);
  chat->options.add_invariant(*verb);
  chat->policy_flags.add(*verb);
  chat->flags.max_tokens = 512;
  chat->flags.add(*verb);
  verb->add_option("--system", chat->system, "A system message in front");
  verb->add_option("--context", chat->context,
                   "Tokens that the conversation may have (default: the model's context); a GPU's memory for "
                   "them is taken at once")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  verb->footer("Example: echo 'What is a whale?' | kascade chat --model model.gguf --plan plan.json");
  verb->callback([chat, run] { *run = [chat] { chat->run(); }; });
}

}  // namespace kascade::cli
