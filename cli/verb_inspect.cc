// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "base/amount.h"
#include "base/check.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/bench_e2e_device.h"

namespace kascade::cli {
namespace {

// Of --memory: what CUDA's context, its libraries and the driver hold before anything is allocated.
constexpr uint64_t kReserveBytes = uint64_t{1} << 30;

// What a model and its sequences take of a GPU.
struct GpuFit {
  GpuMemoryPlan plan;
  std::string device;  // empty: neither a GPU nor --memory
  uint64_t available_bytes = 0, reserve_bytes = 0;
  std::string no_device;  // why there is none
  int64_t context = 0, batch = 0;

  bool known() const { return !device.empty(); }
  bool fits() const { return plan.total() <= available_bytes; }
  Json json() const {
    return {{"context", context},
            {"batch", batch},
            {"weight_bytes", plan.weight_bytes},
            {"kv_bytes", plan.kv_bytes},
            {"scratch_bytes", plan.scratch_bytes},
            {"total_bytes", plan.total()},
            {"device", device.empty() ? Json() : Json(device)},
            {"available_bytes", known() ? Json(available_bytes) : Json()},
            {"reserve_bytes", reserve_bytes},
            {"fits", known() ? Json(fits()) : Json()}};
  }
  void require_fit() const {
    require<OutOfMemory>(
        !known() || fits(),
        "does not fit: {} sequences of {} tokens need {} beside {} of weights, {} in all; {} has {}", batch,
        context, human_bytes(plan.kv_bytes + plan.scratch_bytes), human_bytes(plan.weight_bytes),
        human_bytes(plan.total()), device, human_bytes(available_bytes));
  }
};

struct Inspect {
  RunOptions options;
  int64_t context = 0;
  int64_t batch = 1;
  std::string memory;
  bool on_gpu = false;

  std::optional<GpuFit> gpu_fit(const ModelConfig& config, int64_t tokens) const {
    if (!on_gpu) return std::nullopt;
    require<Unsupported>(options.compute == "auto", "compute: a GPU works in bf16 (auto), got {}",
                         options.compute);
    GpuFit fit;
    fit.context = tokens;
    fit.batch = batch;
    fit.plan = plan_gpu_memory(config, tokens, batch);
    if (!memory.empty()) {
      const uint64_t bytes = parse_bytes(memory, "--memory");
      fit.reserve_bytes = std::min(bytes, kReserveBytes);
      fit.available_bytes = bytes - fit.reserve_bytes;
      fit.device = fmt::format("a GPU of {} ({} of it for the driver and CUDA)", memory,
                               human_bytes(fit.reserve_bytes));
      return fit;
    }
    try {
      const GpuMemory gpu = gpu_memory();
      fit.device = gpu.name;
      fit.available_bytes = gpu.free_bytes;
    } catch (const Unsupported& error) {
      fit.no_device = error.what();
    }
    return fit;
  }

  void run() const {
    require<BadArgument>(on_gpu || (batch == 1 && memory.empty()), "{}: goes with --device cuda",
                         memory.empty() ? "--batch" : "--memory");
    const auto model = options.open();
    const ModelConfig& config = model->config();
    const Tokenizer& tokenizer = model->tokenizer();
    const int64_t tokens = context > 0 ? context : config.context;
    const std::optional<GpuFit> gpu = gpu_fit(config, tokens);
    const int64_t kv_element_bytes = options.compute == "f32" ? 4 : 2;
    const int64_t kv_bytes =
        int64_t{2} * config.layers * config.kv_heads * config.head_dim * kv_element_bytes;
    const std::string tokenizer_name = tokenizer.data().kind == TokenizerKind::kByteBpe
                                           ? "byte-level BPE (" + tokenizer.data().pre_tokenizer + ")"
                                           : "SentencePiece";
    if (options.json) {
      Json document = {{"path", model->path()},
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
                       {"fingerprint", model->identity().fingerprint}};
      if (gpu) document["gpu"] = gpu->json();
      print_json(document);
      if (gpu) gpu->require_fit();
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
    if (!gpu) return;
    line("on a GPU", fmt::format("{} sequence(s) of {} tokens, bf16", batch, tokens));
    line("  weights", human_bytes(gpu->plan.weight_bytes));
    line("  KV cache", human_bytes(gpu->plan.kv_bytes));
    line("  scratch", human_bytes(gpu->plan.scratch_bytes) + " at most");
    line("  total", human_bytes(gpu->plan.total()));
    if (!gpu->known()) {
      line("  fits", "unknown: " + gpu->no_device + " (--memory stands for one)");
      return;
    }
    gpu->require_fit();
    line("  fits", fmt::format("yes: {} has {}{}", gpu->device, human_bytes(gpu->available_bytes),
                               memory.empty() ? " free" : ""));
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
  verb->add_option("--device", inspect->options.device,
                   "cuda: also state what --batch sequences of --context tokens take of a GPU, and whether "
                   "that fits (exit code 1 when it does not); needs a build by make cuda, but no GPU with "
                   "--memory")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  verb->add_option("--batch", inspect->batch, "Sequences, for --device cuda")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  verb->add_option("--memory", inspect->memory,
                   "For --device cuda: a GPU's memory, e.g. 80GB, in place of that of the GPU here");
  inspect->options.add_json(*verb);
  verb->footer(
      "Example: kascade inspect SmolLM2-135M-Instruct.Q4_1.gguf --context 8192\n"
      "         kascade inspect model.gguf --device cuda --context 131072 --batch 4 --memory 141GB");
  verb->callback([inspect, run] {
    inspect->on_gpu = inspect->options.device == "cuda";
    *run = [inspect] { inspect->run(); };
  });
}

}  // namespace kascade::cli
