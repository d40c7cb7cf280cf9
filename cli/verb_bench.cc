// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <ctime>
#include <memory>

#include "base/check.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/bench_attention.h"
#include "eval/bench_attention_cuda.h"
#include "eval/bench_engine.h"
#include "eval/default_data.h"
#include "eval/prompts.h"

namespace kascade::cli {
namespace {

struct OperatorBench {
  AttentionBenchOptions options;
  RunOptions machine;
  std::string dtype = "bf16";
  std::string budget = "default";
  std::vector<int> roles = {1, 4, 27};
  std::vector<int> needed;

  void add(CLI::App& verb, std::function<void()>* run, const std::shared_ptr<OperatorBench>& self) {
    machine.add_machine(verb);
    verb.add_option("--batch", options.batch, "Sequences")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb.add_option("--context", options.context, "Keys of each sequence")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
        ->capture_default_str();
    verb.add_option("--percent", options.percent, "Share of the keys to select")->capture_default_str();
    verb.add_option("--query-heads", options.query_heads, "H")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    verb.add_option("--kv-heads", options.kv_heads, "G")->check(CLI::Range(1, 1024))->capture_default_str();
    verb.add_option("--head-dim", options.head_dim, "D")->check(CLI::Range(8, 1024))->capture_default_str();
    verb.add_option("--dtype", dtype, "Of keys and values")
        ->check(CLI::IsMember({"bf16", "f16", "f32"}))
        ->capture_default_str();
    verb.add_option("--budget", budget, "Budget preset")
        ->check(CLI::IsMember({"default", "paper", "kernel"}))
        ->capture_default_str();
    verb.add_option("--roles", roles, "Layers that are layer 0, anchors and reuse: weights of the mean")
        ->delimiter(',')
        ->expected(3)
        ->check(CLI::Range(0, 100000));
    verb.add_option("--needed-heads", needed, "KV heads of layer 0 whose sets anyone reads (default all)")
        ->delimiter(',');
    verb.add_option("--page-size", options.page_size, "Tokens of a cache page; 0 = contiguous")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    verb.add_option("--kernel", options.kernel, "Implementation by name (default: the best here)");
    verb.add_option("--repetitions", options.repetitions, "Timed calls of each role; 0 = enough")
        ->check(CLI::Range(0, 10000));
    verb.add_option("--commit", options.commit, "Of the build, for the report");
    machine.add_json(verb);
    verb.callback([self, run] { *run = [self] { self->run(); }; });
  }

  void run() {
    options.threads = machine.threads;
    options.dtype = dtype == "f32" ? DType::kF32 : dtype == "f16" ? DType::kF16 : DType::kBF16;
    options.budget = parse_budget_preset(budget);
    options.roles = {roles[0], roles[1], roles[2]};
    if (!needed.empty()) {
      options.needed.assign(static_cast<size_t>(options.kv_heads), 0);
      for (const int head : needed) {
        require<BadArgument>(head >= 0 && head < options.kv_heads, "--needed-heads: expected 0..{}, got {}",
                             options.kv_heads - 1, head);
        options.needed[static_cast<size_t>(head)] = 1;
      }
    }
    Progress progress;
    const AttentionBenchResult result = (machine.device == "cuda" ? bench_attention_cuda : bench_attention)(
        options, [&](double share, const std::string& doing) { progress.update(doing, share); },
        &interrupted());
    progress.clear();
    if (machine.json)
      print(bench_attention_json(result) + "\n");
    else
      print(bench_attention_table(result));
  }
};

struct EngineBench {
  RunOptions options;
  PolicyFlags policy_flags;
  int64_t context = 7500;
  int64_t decode_tokens = 64;
  int repetitions = 3;

  void run() const {
    const auto model = options.open();
    std::optional<Plan> plan;
    EngineBenchOptions bench;
    bench.policies.push_back(make_policy("dense", {}, model->identity(), nullptr));
    const auto policy = policy_flags.make(*model, &plan);
    if (policy->name() != "dense") bench.policies.push_back(policy);
    const std::vector<int32_t> text = text_tokens(model->tokenizer(), default_document());
    while (static_cast<int64_t>(bench.prompt.size()) < context) {
      const auto count = std::min<size_t>(text.size(), static_cast<size_t>(context) - bench.prompt.size());
      bench.prompt.insert(bench.prompt.end(), text.begin(),
                          text.begin() + static_cast<std::ptrdiff_t>(count));
    }
    bench.decode_tokens = decode_tokens;
    bench.repetitions = repetitions;
    bench.threads = options.threads;
    bench.cancel = &interrupted();
    Progress progress;
    bench.progress = [&](int64_t done, int64_t all) {
      progress.update("whole model", static_cast<double>(done) / static_cast<double>(all));
    };
    const auto results = bench_engine(options.prepare(model), bench);
    progress.clear();
    if (options.json) {
      Json policies = Json::array();
      for (const EngineBenchResult& result : results) {
        policies.push_back({{"policy", result.policy},
                            {"prefill_tokens_per_s", result.prefill_tokens_per_s},
                            {"decode_tokens_per_s", result.decode_tokens_per_s},
                            {"memory_bytes", result.memory_bytes}});
      }
      Json document = {{"model", model->config().name},
                       {"weight_bytes", model->weights().bytes},
                       {"context", context},
                       {"decode_tokens", decode_tokens},
                       {"repetitions", repetitions},
                       {"compute", options.compute},
                       {"policies", policies}};
      if (results.size() > 1) {
        document["prefill_speedup"] = results[1].prefill_tokens_per_s / results[0].prefill_tokens_per_s;
        document["decode_speedup"] = results[1].decode_tokens_per_s / results[0].decode_tokens_per_s;
      }
      print_json(document);
      return;
    }
    std::vector<std::vector<std::string>> rows = {
        {"policy", "prefill/s", "ratio", "decode/s", "ratio", "memory"}};
    for (const EngineBenchResult& result : results) {
      rows.push_back({result.policy, fmt::format("{:.1f}", result.prefill_tokens_per_s),
                      fmt::format("{:.2f}", result.prefill_tokens_per_s / results[0].prefill_tokens_per_s),
                      fmt::format("{:.1f}", result.decode_tokens_per_s),
                      fmt::format("{:.2f}", result.decode_tokens_per_s / results[0].decode_tokens_per_s),
                      human_bytes(result.memory_bytes)});
    }
    print(table(rows));
  }
};

}  // namespace

void add_bench(CLI::App& app, std::function<void()>* run) {
  CLI::App* verb = app.add_subcommand("bench", "Time the attention operator by role, or the whole model");
  verb->require_subcommand(1);
  verb->footer("Example: kascade bench decode --context 32768 --json");

  auto decode = std::make_shared<OperatorBench>();
  CLI::App* decode_verb = verb->add_subcommand("decode", "One new token a sequence");
  decode->add(*decode_verb, run, decode);
  decode_verb->footer("Example: kascade bench decode --batch 4 --context 32768 --percent 10");

  auto prefill = std::make_shared<OperatorBench>();
  prefill->options.phase = Phase::kPrefill;
  prefill->options.context = 16384;
  CLI::App* prefill_verb = verb->add_subcommand("prefill", "Whole prompts");
  prefill->add(*prefill_verb, run, prefill);
  prefill_verb->footer("Example: kascade bench prefill --context 16384 --roles 1,4,27");

  auto engine = std::make_shared<EngineBench>();
  CLI::App* engine_verb =
      verb->add_subcommand("e2e", "Whole model: prefill and decode rates, dense beside a policy");
  engine->options.add(*engine_verb);
  engine->policy_flags.add(*engine_verb);
  engine_verb->add_option("--context", engine->context, "Prompt tokens, from the shipped document")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->capture_default_str();
  engine_verb->add_option("--decode-tokens", engine->decode_tokens, "Timed steps after the prompt")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->capture_default_str();
  engine_verb->add_option("--repetitions", engine->repetitions, "Runs of each policy, in turns")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  engine_verb->footer("Example: kascade bench e2e --model model.gguf --plan plan.json --context 7500");
  engine_verb->callback([engine, run] { *run = [engine] { engine->run(); }; });
}

}  // namespace kascade::cli
