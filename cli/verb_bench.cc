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

namespace kascade::cli {
namespace {

struct OperatorBench {
  AttentionBenchOptions options;
  RunOptions machine;
  std::string dtype = "bf16";
  std::string budget = "default";
  std::vector<int> roles = {1, 4, 27};
  std::vector<int> needed;
  std::string plan_path;

  void add(CLI::App& verb, std::function<void()>* run, const std::shared_ptr<OperatorBench>& self) {
    machine.add_machine(verb);
    verb.add_option("--batch", options.batch, "Sequences")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb.add_option("--context", options.context, "Keys of each sequence")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
        ->capture_default_str();
    verb.add_option("--percent", options.percent, "Share of the keys to select")->capture_default_str();
    auto* plan = verb.add_option("--plan", plan_path,
                                 "Heads of a plan's model, and the roles and needed heads of its layers");
    verb.add_option("--query-heads", options.query_heads, "H")
        ->excludes(plan)
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    verb.add_option("--kv-heads", options.kv_heads, "G")
        ->excludes(plan)
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    verb.add_option("--head-dim", options.head_dim, "D")
        ->excludes(plan)
        ->check(CLI::Range(8, 1024))
        ->capture_default_str();
    verb.add_option("--dtype", dtype, "Of keys and values")
        ->check(CLI::IsMember({"bf16", "f16", "f32"}))
        ->capture_default_str();
    verb.add_option("--budget", budget, "Budget preset")
        ->check(CLI::IsMember({"default", "paper", "kernel"}))
        ->capture_default_str();
    verb.add_option("--roles", roles, "Layers that are layer 0, anchors and reuse: weights of the mean")
        ->excludes(plan)
        ->delimiter(',')
        ->expected(3)
        ->check(CLI::Range(0, 100000));
    verb.add_option("--needed-heads", needed, "KV heads of layer 0 whose sets anyone reads (default all)")
        ->excludes(plan)
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
    if (!plan_path.empty()) follow(load_plan(plan_path));
    const bool on_gpu = machine.on_gpu();
    if (on_gpu && machine.device == "auto") note("runs on the GPU (--device cpu: on the processors)");
    Progress progress;
    const AttentionBenchResult result = (on_gpu ? bench_attention_cuda : bench_attention)(
        options, [&](double share, const std::string& doing) { progress.update(doing, share); },
        &interrupted());
    progress.clear();
    if (machine.json)
      print(bench_attention_json(result) + "\n");
    else
      print(bench_attention_table(result));
  }

  void follow(const Plan& plan) {
    const auto anchors = static_cast<int32_t>(plan.anchors.size());
    options.roles = {1, anchors - 1, plan.model.layers - anchors};
    options.query_heads = plan.model.query_heads;
    options.kv_heads = plan.model.kv_heads;
    options.head_dim = plan.model.head_dim;
    options.needed = plan.needed_heads(0);
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

  add_bench_e2e(*verb, run);
}

}  // namespace kascade::cli
