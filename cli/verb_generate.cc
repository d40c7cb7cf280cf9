// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>

#include "base/check.h"
#include "cli/console.h"
#include "cli/generate_options.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/prompts.h"

namespace kascade::cli {
namespace {

struct Generate {
  RunOptions options;
  PolicyFlags policy_flags;
  TextSource source;
  GenerateFlags flags;
  bool chat = false;
  bool ignore_end = false;

  std::vector<int32_t> prompt_ids(const Model& model) const {
    if (!chat) return source.ids(model.tokenizer());
    require<BadArgument>(source.tokens.empty(), "--chat: expected --prompt or --prompt-file, got --tokens");
    return chat_tokens(model, std::vector<ChatMessage>{{"user", source.read_text()}});
  }

  void run() const {
    const auto model = options.open();
    std::optional<Plan> plan;
    const auto policy = policy_flags.make(*model, &plan);
    const std::vector<int32_t> prompt = prompt_ids(*model);
    const GenerateOptions generate_options = flags.make(ignore_end);
    // The cache holds what this run can need, never the whole of a very long context.
    EngineOptions engine_options = options.engine();
    engine_options.cache_tokens = static_cast<int64_t>(prompt.size()) + flags.max_tokens + 1;
    const auto engine = options.make_engine(model, engine_options);
    const auto sequence = engine->make_sequence();
    const bool stream = !options.json;
    const GenerateResult result =
        generate(*engine, *sequence, prompt, policy.get(), generate_options, [&](std::string_view text) {
          if (stream) print_now(text);
        });
    const auto rate = [](int64_t tokens, double seconds) {
      return tokens > 0 && seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
    };
    const double prefill_rate = rate(result.prompt_tokens, result.prefill_seconds);
    const double decode_rate = rate(result.new_tokens - 1, result.decode_seconds);
    if (options.json) {
      print_json({{"text", result.text},
                  {"token_ids", result.token_ids},
                  {"prompt_tokens", result.prompt_tokens},
                  {"new_tokens", result.new_tokens},
                  {"prefill_tokens_per_s", prefill_rate},
                  {"decode_tokens_per_s", decode_rate},
                  {"finish", result.finish},
                  {"policy", policy->describe()},
                  {"device", engine->model().device()},
                  {"threads", engine->threads()},
                  {"memory_bytes", engine->memory_bytes()}});
    } else {
      print_now("\n");
      note("\n" +
           table({{"", "tokens", "seconds", "tokens/s"},
                  {"prefill", std::to_string(result.prompt_tokens),
                   fmt::format("{:.2f}", result.prefill_seconds), fmt::format("{:.1f}", prefill_rate)},
                  {"decode", std::to_string(std::max<int64_t>(result.new_tokens - 1, 0)),
                   fmt::format("{:.2f}", result.decode_seconds), fmt::format("{:.1f}", decode_rate)}}) +
           policy->describe());
    }
    require<Cancelled>(result.finish != "cancelled", "interrupted after {} new tokens", result.new_tokens);
  }
};

}  // namespace

void add_generate(CLI::App& app, std::function<void()>* run) {
  auto generate = std::make_shared<Generate>();
  CLI::App* verb = app.add_subcommand("generate", "Continue a prompt, streaming the text");
  generate->options.add(*verb);
  generate->options.add_invariant(*verb);
  generate->source.add(*verb, "--prompt", "--prompt-file", true);
  generate->policy_flags.add(*verb);
  generate->flags.add(*verb);
  verb->add_flag("--chat", generate->chat, "Wrap the prompt as one user turn of the model's chat template");
  verb->add_flag("--ignore-end", generate->ignore_end, "Go on past end-of-text tokens");
  verb->footer(
      "Example: kascade generate --model model.gguf --plan plan.json --prompt-file report.txt --max-tokens "
      "200");
  verb->callback([generate, run] { *run = [generate] { generate->run(); }; });
}

}  // namespace kascade::cli
