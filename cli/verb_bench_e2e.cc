// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/bench_e2e.h"
#include "eval/bench_e2e_device.h"
#include "eval/model_shapes.h"

namespace kascade::cli {
namespace {

// What long contexts on a large GPU are for; where the model's context or a CPU allows less, kShortTokens.
constexpr const char* kLongWork[] = {"decode:4x128K", "decode:1x128K", "decode:32x16K", "prefill:128K",
                                     "prefill:32K"};
constexpr int64_t kLongTokens = 131072, kShortTokens = 4096;

struct EndToEndBench {
  RunOptions options;
  PolicyFlags policy_flags;
  std::string shape;
  bool published = false;
  std::vector<std::string> work;
  std::vector<std::string> policies;
  int64_t steps = 32;
  int repetitions = 3;
  uint64_t seed = 1;
  std::string figure;
  std::string commit;

  void add(CLI::App& verb) {
    options.add(verb, false);
    options.add_invariant(verb);
    verb.add_option("--shape", shape, "In place of --model: a model of random weights, on a GPU")
        ->check(CLI::IsMember(model_shape_names()))
        ->excludes("--model");
    verb.add_option("--policy", policies,
                    "Policies to compare (default: dense, and kascade with a plan): " + policy_names())
        ->delimiter(',');
    policy_flags.add_settings(verb);
    verb.add_flag("--published", published,
                  "The published anchors and head map for this shape, or ones of their number (the default "
                  "with --shape)")
        ->excludes("--plan");
    verb.add_option("--work", work,
                    "decode:BATCHxTOKENS and prefill:TOKENS, e.g. decode:4x128K,prefill:32K (default: the "
                    "long ones that the model and the device are for)")
        ->delimiter(',');
    verb.add_option("--steps", steps, "Timed decode steps of a repetition")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
        ->capture_default_str();
    verb.add_option("--repetitions", repetitions, "Timed runs of each policy, in turns")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    verb.add_option("--seed", seed, "Of random weights, prompts and cached keys")->capture_default_str();
    verb.add_option("--figure", figure, "Write an SVG of where the time goes");
    verb.add_option("--commit", commit, "Of the build, for the report");
    verb.footer(
        "On a GPU caches are filled with random keys and each piece of work is told by parts; on the CPU a "
        "dense\n"
        "prefill fills them.\n"
        "Example: kascade bench e2e --shape llama-3.1-8b --device cuda --figure where.svg\n"
        "         kascade bench e2e --model model.gguf --plan plan.json --work decode:1x4K,prefill:4K");
  }

  void run() {
    require<BadArgument>(shape.empty() != options.model.empty(),
                         "bench e2e: expected either --model or --shape");
    E2eBenchOptions bench;
    for (const std::string& text : work) bench.works.push_back(parse_e2e_work(text));
    const std::shared_ptr<const Model> model = open(bench.works);
    std::optional<Plan> plan;
    const std::string plan_source = choose_plan(*model, &plan);
    if (policies.empty()) {
      policies = {"dense"};
      if (plan) policies.push_back("kascade");
    }
    for (const std::string& name : policies)
      bench.policies.push_back(
          make_policy(name, policy_flags.settings(), model->identity(), plan ? &*plan : nullptr));
    const std::shared_ptr<const PreparedModel> prepared = prepare(model);
    if (bench.works.empty()) bench.works = default_work(*prepared);
    bench.steps = steps;
    bench.repetitions = repetitions;
    bench.threads = options.threads;
    bench.invariant = options.invariant;
    bench.seed = seed;
    bench.cancel = &interrupted();
    Progress progress;
    bench.progress = [&](double share, const std::string& doing) { progress.update(doing, share); };
    E2eReport report = bench_e2e(prepared, bench);
    progress.clear();
    report.random_weights = !shape.empty();
    report.plan = plan_source;
    report.commit = commit;
    if (!figure.empty()) write_file_atomic(figure, bench_e2e_svg(report));
    print(options.json ? bench_e2e_json(report) + "\n" : bench_e2e_table(report));
  }

 private:
  std::shared_ptr<const Model> open(const std::vector<E2eWork>& works) const {
    if (shape.empty()) return options.open();
    int64_t longest = works.empty() ? kLongTokens : 0;
    for (const E2eWork& item : works) longest = std::max(longest, item.tokens);
    return shape_model(shape, longest);
  }

  std::shared_ptr<const PreparedModel> prepare(const std::shared_ptr<const Model>& model) const {
    if (shape.empty()) return options.prepare(model);
    require<Unsupported>(options.device != "cpu",
                         "--shape: random weights are made on a GPU; --device is cpu");
    require<Unsupported>(options.compute == "auto",
                         "--shape: a GPU computes in bf16 (--compute auto), got {}", options.compute);
    return random_gpu_model(model, seed);
  }

  std::string choose_plan(const Model& model, std::optional<Plan>* plan) const {
    if (published || (policy_flags.plan_path.empty() && !shape.empty())) {
      *plan = published_plan(model.identity());
      return (*plan)->data.name;
    }
    *plan = policy_flags.load(model);
    return policy_flags.plan_path;
  }

  static std::vector<E2eWork> default_work(const PreparedModel& prepared) {
    const int64_t context = prepared.config().context;
    if (std::string_view(prepared.device()) == "cuda" && context >= kLongTokens) {
      std::vector<E2eWork> works;
      for (const char* text : kLongWork) works.push_back(parse_e2e_work(text));
      return works;
    }
    const int64_t tokens = std::min(context, kShortTokens);
    return {{Phase::kDecode, 1, tokens}, {Phase::kPrefill, 1, tokens}};
  }
};

}  // namespace

void add_bench_e2e(CLI::App& bench, std::function<void()>* run) {
  auto self = std::make_shared<EndToEndBench>();
  CLI::App* verb = bench.add_subcommand(
      "e2e", "Whole model: time to first token and decode rates of policies, and where the time goes");
  self->add(*verb);
  verb->callback([self, run] { *run = [self] { self->run(); }; });
}

}  // namespace kascade::cli
