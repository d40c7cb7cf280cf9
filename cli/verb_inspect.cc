// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>

#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"

namespace kascade::cli {
namespace {

struct Inspect {
  RunOptions options;
  int64_t context = 0;

  void run() const {
    const auto model = options.open();
    const ModelConfig& config = model->config();
    const Tokenizer& tokenizer = model->tokenizer();
    const int64_t tokens = context > 0 ? context : config.context;
    const int64_t kv_element_bytes = options.compute == "f32" ? 4 : 2;
    const int64_t kv_bytes =
        int64_t{2} * config.layers * config.kv_heads * config.head_dim * kv_element_bytes;
    const std::string tokenizer_name = tokenizer.data().kind == TokenizerKind::kByteBpe
                                           ? "byte-level BPE (" + tokenizer.data().pre_tokenizer + ")"
                                           : "SentencePiece";
    if (options.json) {
      print_json({{"path", model->path()},
                  {"name", config.name},
                  {"architecture", config.architecture},
                  {"layers", config.layers},
                  {"hidden", config.hidden},
                  {"ffn", config.ffn},
                  {"query_heads", config.query_heads},
                  {"kv_heads", config.kv_heads},
                  {"head_dim", config.head_dim},
                  {"context", config.context},
                  {"vocabulary", config.vocabulary},
                  {"weight_bytes", model->weights().bytes},
                  {"weight_type", weight_type_info(model->weights().layers[0].gate.type).name},
                  {"kv_bytes_per_token", kv_bytes},
                  {"kv_bytes", kv_bytes * tokens},
                  {"tokenizer", tokenizer_name},
                  {"chat_template", !model->chat_template_source().empty()},
                  {"fingerprint", model->identity().fingerprint}});
      return;
    }
    const auto line = [](const char* key, const std::string& value) {
      print(fmt::format("{:<18}{}\n", key, one_line(value)));
    };
    line("model", config.name.empty() ? model->path() : config.name);
    line("architecture", config.architecture);
    line("layers", std::to_string(config.layers));
    line("hidden, ffn", fmt::format("{}, {}", config.hidden, config.ffn));
    line("heads",
         fmt::format("{} query, {} KV, dimension {}", config.query_heads, config.kv_heads, config.head_dim));
    line("context", fmt::format("{} tokens", config.context));
    line("rope", fmt::format("theta {}, pairs {}", config.rope_theta,
                             config.rope_layout == RopeLayout::kAdjacent ? "adjacent" : "in halves"));
    line("vocabulary", std::to_string(config.vocabulary));
    line("tokenizer", tokenizer_name + (tokenizer.data().add_bos ? ", BOS in front" : ", no BOS"));
    line("chat template", model->chat_template_source().empty() ? "none" : "yes");
    line("weights", fmt::format("{} ({}, embedding {})", human_bytes(model->weights().bytes),
                                weight_type_info(model->weights().layers[0].gate.type).name,
                                weight_type_info(model->weights().embedding.type).name));
    line("KV cache", fmt::format("{} a token, {} at {} tokens", human_bytes(kv_bytes),
                                 human_bytes(kv_bytes * tokens), tokens));
    line("fingerprint", model->identity().fingerprint);
  }
};

}  // namespace

void add_inspect(CLI::App& app, std::function<void()>* run) {
  auto inspect = std::make_shared<Inspect>();
  CLI::App* verb = app.add_subcommand("inspect", "Check a model file and show what it is and what it needs");
  verb->add_option("MODEL,--model,-m", inspect->options.model,
                   "A .gguf file, or a folder with config.json and safetensors")
      ->required();
  verb->add_option("--context", inspect->context,
                   "Tokens to state the cache's size for (default: the model's context)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  verb->add_option("--compute", inspect->options.compute, "auto or f32: decides the cache's type")
      ->check(CLI::IsMember({"auto", "f32"}))
      ->capture_default_str();
  inspect->options.add_json(*verb);
  verb->footer("Example: kascade inspect SmolLM2-135M-Instruct.Q4_1.gguf --context 8192");
  verb->callback([inspect, run] { *run = [inspect] { inspect->run(); }; });
}

}  // namespace kascade::cli
