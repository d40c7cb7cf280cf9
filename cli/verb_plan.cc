// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "base/file.h"
#include "base/json.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"

namespace kascade::cli {
namespace {

void show(const std::string& path, const std::string& svg, bool json) {
  const Plan plan = load_plan(path);
  if (!svg.empty()) write_file_atomic(svg, plan_svg(plan));
  if (json) {
    print(plan_to_json(plan));
    return;
  }
  const auto line = [](const char* key, const std::string& value) {
    print(fmt::format("{:<14}{}\n", key, one_line(value)));
  };
  line("model",
       fmt::format("{}, {} layers, {}/{} heads, d {}{}",
                   plan.model.architecture.empty() ? "unknown architecture" : plan.model.architecture,
                   plan.model.layers, plan.model.query_heads, plan.model.kv_heads, plan.model.head_dim,
                   plan.model.fingerprint.empty() ? "" : ", fingerprint " + plan.model.fingerprint));
  line("anchors", fmt::format("{} ({} of {} layers)", fmt::join(plan.anchors, ", "), plan.anchors.size(),
                              plan.model.layers));
  line("method",
       fmt::format("{}, tile {}, K_cal {}, {} over tiles, {} forward, importance {}", plan.settings.method,
                   plan.settings.tile, plan.settings.similarity_k, plan.settings.aggregation,
                   plan.settings.forward, plan.settings.importance ? "on" : "off"));
  line("budget", fmt::format("{}, {} %", plan.settings.budget, plan.settings.percent_hundredths / 100.0));
  if (plan.data.prompts > 0) {
    line("data", fmt::format("{}: {} prompts, {} tokens, hash {}", plan.data.name, plan.data.prompts,
                             plan.data.tokens, plan.data.hash));
  }
  if (plan.validation) {
    line("validation", fmt::format("{}: KL {:.4f}, top-1 {:.3f}, passkey {:.3f} (dense {:.3f}), {} prompts",
                                   plan.validation->passed ? "passed" : "NOT passed", plan.validation->kl,
                                   plan.validation->top1, plan.validation->passkey,
                                   plan.validation->passkey_dense, plan.validation->prompts));
  }
  if (!plan.candidates.empty()) {
    std::vector<std::vector<std::string>> rows = {{"anchors", "M", "KL", "top-1", "passkey"}};
    for (const PlanCandidate& candidate : plan.candidates) {
      rows.push_back({fmt::format("{}", fmt::join(candidate.anchors, ",")),
                      std::to_string(candidate.anchors.size()), fmt::format("{:.4f}", candidate.kl),
                      fmt::format("{:.3f}", candidate.top1), fmt::format("{:.3f}", candidate.passkey)});
    }
    print("\n" + table(rows));
  }
  std::vector<std::vector<std::string>> rows = {{"layer", "reads", "head map", "retained"}};
  for (int layer = 0; layer < plan.model.layers; ++layer) {
    const int source = plan.source_anchor(layer);
    rows.push_back({std::to_string(layer), layer == source ? "anchor" : std::to_string(source),
                    layer == source ? "" : fmt::format("{}", fmt::join(plan.head_map[layer], " ")),
                    plan.retained_mass.empty() ? "" : fmt::format("{:.4f}", plan.retained_mass[layer])});
  }
  print("\n" + table(rows));
}

struct PlanVerb {
  std::string path, other, svg, model, output;
  std::vector<int> anchors;
  bool json = false;

  void import() const {
    const auto opened = Model::open(model);
    Plan plan = import_npy(path, anchors);
    const ModelIdentity identity = opened->identity();
    plan.model.query_heads = identity.query_heads;
    plan.model.head_dim = identity.head_dim;
    const std::string warning = check_plan_model(plan, identity, true);
    plan.model = identity;
    validate_plan(plan);
    save_plan(plan, output);
    if (!warning.empty()) note("note: " + warning);
    if (json)
      print_json({{"anchors", plan.anchors}, {"output", output}});
    else
      print(fmt::format("{}: anchors {}\n", one_line(output), fmt::join(plan.anchors, ", ")));
  }

  void diff() const {
    const std::vector<std::string> differences = diff_plans(load_plan(path), load_plan(other));
    if (json) {
      print_json({{"equal", differences.empty()}, {"differences", differences}});
      return;
    }
    if (differences.empty()) print("no difference\n");
    for (const std::string& difference : differences) print(one_line(difference) + "\n");
  }
};

}  // namespace

void add_plan(CLI::App& app, std::function<void()>* run) {
  auto plan = std::make_shared<PlanVerb>();
  CLI::App* verb = app.add_subcommand("plan", "Show, draw, import and compare plans");
  verb->require_subcommand(1);
  verb->footer("Example: kascade plan show plan.json --svg similarity.svg");

  CLI::App* show_verb = verb->add_subcommand("show", "Print a plan; --svg draws its similarity matrix");
  show_verb->add_option("FILE", plan->path, "A plan")->required();
  show_verb->add_option("--svg", plan->svg,
                        "Write the similarity matrix with the anchors marked, and quality against M");
  show_verb->footer("Example: kascade plan show plan.json --svg similarity.svg");
  show_verb->add_flag("--json", plan->json, "Print one JSON document and nothing else");
  show_verb->callback([plan, run] { *run = [plan] { show(plan->path, plan->svg, plan->json); }; });

  CLI::App* import_verb = verb->add_subcommand("import", "Turn a published head map (.npy) into a plan");
  import_verb->add_option("FILE", plan->path, "int32 [layers, kv_heads]; anchors from its name unless given")
      ->required();
  import_verb->add_option("--model,-m", plan->model, "The model it belongs to")->required();
  import_verb->add_option("--anchors", plan->anchors, "Anchor layers, e.g. 0,2,8")->delimiter(',');
  import_verb->add_option("--output,-o", plan->output, "Where to write the plan")->required();
  import_verb->add_flag("--json", plan->json, "Print one JSON document and nothing else");
  import_verb->footer(
      "Example: kascade plan import map_layers_0_2_8_13_14.npy --model model.gguf --output plan.json");
  import_verb->callback([plan, run] { *run = [plan] { plan->import(); }; });

  CLI::App* diff_verb = verb->add_subcommand("diff", "Say in what two plans differ");
  diff_verb->add_option("A", plan->path, "A plan")->required();
  diff_verb->add_option("B", plan->other, "Another plan")->required();
  diff_verb->footer("Example: kascade plan diff plan.json other.json");
  diff_verb->add_flag("--json", plan->json, "Print one JSON document and nothing else");
  diff_verb->callback([plan, run] { *run = [plan] { plan->diff(); }; });
}

}  // namespace kascade::cli
