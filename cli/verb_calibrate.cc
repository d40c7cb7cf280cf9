// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <memory>

#include "base/check.h"
#include "cli/calibrate_options.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"

namespace kascade::cli {

void CalibrateFlags::add(CLI::App& verb) {
  verb.add_option("--prompts", prompts,
                  "JSON Lines: prompt, or context and input, or tokens (default: the text shipped "
                  "with the program)");
  verb.add_option("--method", method, "How anchors are chosen; the default preset says measured")
      ->check(CLI::IsMember({"published", "budget", "measured"}));
  verb.add_option("--anchors", anchors,
                  "Number of anchor layers, layer 0 counted, or auto: the fewest within the limits");
  verb.add_option("--preset", preset, "paper reproduces the published procedure")
      ->check(CLI::IsMember({"default", "paper"}))
      ->capture_default_str();
  verb.add_option("--aggregation", aggregation, "Over the tiles of a prompt")
      ->check(CLI::IsMember({"min", "mean"}));
  verb.add_option("--forward", forward, "While collecting: dense, or every layer cut to its own sets")
      ->check(CLI::IsMember({"dense", "sparse"}));
  verb.add_option("--importance", importance, "Whether the dynamic program weights layers by importance")
      ->check(CLI::IsMember({"on", "off"}));
  verb.add_option("--similarity-k", similarity_k, "Keys per set while collecting, besides the own tile")
      ->check(CLI::Range(1, 1 << 20));
  verb.add_option("--tile", tile, "Query tokens per tile")->check(CLI::Range(1, 128));
  verb.add_option("--max-kl", thresholds.max_kl, "Largest mean KL(dense || policy), nats")
      ->capture_default_str();
  verb.add_option("--min-top1", thresholds.min_top1, "Least agreement with dense's likeliest token")
      ->capture_default_str();
  verb.add_option("--max-passkey-loss", thresholds.max_passkey_loss, "Largest share of passkey digits lost")
      ->capture_default_str();
  verb.add_option("--percent", percent, "Run-time budget the choice and the validation use")
      ->capture_default_str();
  verb.add_option("--budget", budget, "Run-time budget preset")
      ->check(CLI::IsMember({"default", "paper", "kernel"}))
      ->capture_default_str();
  verb.add_option("--tensor-parallel", tensor_parallel, "Ranks: head maps stay inside each rank's KV heads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verb.add_flag("--quick", quick, "A small calibration: 6 prompts of about 2,200 tokens and a few passkeys");
  verb.add_flag("--no-validate", no_validate,
                "Write the plan without running it on prompts kept out of the choice");
  verb.add_option("--seed", seed, "Of the passkeys")->capture_default_str();
}

CalibrateOptions CalibrateFlags::make(Progress* progress) const {
  CalibrateOptions options;
  if (!prompts.empty()) options.prompts = load_prompts(prompts);
  options.preset = preset;
  options.method = method;
  if (anchors == "auto") {
    options.anchors_auto = true;
  } else if (!anchors.empty()) {
    int count = 0;
    const auto [end, error] = std::from_chars(anchors.data(), anchors.data() + anchors.size(), count);
    require<BadArgument>(error == std::errc() && end == anchors.data() + anchors.size() && count >= 1,
                         "--anchors: expected a count of at least 1, or auto, got '{}'", anchors);
    options.anchors = count;
  }
  options.aggregation = aggregation;
  options.forward = forward;
  if (importance) options.importance = *importance == "on";
  options.similarity_k = similarity_k;
  options.tile = tile;
  options.thresholds = thresholds;
  options.tensor_parallel = tensor_parallel;
  options.quick = quick;
  options.validate = !no_validate;
  options.percent = percent;
  options.budget = parse_budget_preset(budget);
  options.seed = seed;
  options.tool_version = KASCADE_VERSION;
  options.cancel = &interrupted();
  options.progress = [progress](const CalibrationProgress& state) {
    progress->update(state.stage,
                     state.total > 0 ? static_cast<double>(state.done) / static_cast<double>(state.total) : 0,
                     state.seconds_left);
  };
  return options;
}

Json calibration_json(const CalibrationOutcome& outcome, const std::string& output) {
  Json candidates = Json::array();
  for (const PlanCandidate& candidate : outcome.plan.candidates) {
    candidates.push_back({{"anchors", candidate.anchors},
                          {"kl", candidate.kl},
                          {"top1", candidate.top1},
                          {"passkey", candidate.passkey}});
  }
  Json json = {{"anchors", outcome.plan.anchors},
               {"method", outcome.method},
               {"objective", outcome.plan.objective},
               {"candidates", candidates},
               {"validated", outcome.validated},
               {"prompts", outcome.prompts},
               {"tokens", outcome.tokens},
               {"resumed_prompts", outcome.resumed_prompts},
               {"seconds", outcome.seconds},
               {"peak_bytes", outcome.peak_bytes},
               {"output", output}};
  if (outcome.plan.validation) {
    const PlanValidation& validation = *outcome.plan.validation;
    json["validation"] = {{"kl", validation.kl},           {"top1", validation.top1},
                          {"passkey", validation.passkey}, {"passkey_dense", validation.passkey_dense},
                          {"prompts", validation.prompts}, {"passed", validation.passed}};
  }
  if (!outcome.warning.empty()) json["warning"] = outcome.warning;
  return json;
}

namespace {

struct Calibrate {
  RunOptions options;
  CalibrateFlags flags;
  std::string output;

  void run() const {
    const auto model = options.open();
    Progress progress;
    CalibrateOptions calibrate_options = flags.make(&progress);
    calibrate_options.threads = options.threads;
    calibrate_options.output = output;
    const CalibrationOutcome outcome = options.on_device(
        model, [&](const auto& prepared) { return calibrate(prepared, calibrate_options); });
    progress.clear();
    if (!outcome.warning.empty()) note("warning: " + outcome.warning);
    if (options.json) {
      print_json(calibration_json(outcome, output));
      return;
    }
    std::vector<std::vector<std::string>> rows = {{"anchors", "M", "KL", "top-1", "passkey"}};
    for (const PlanCandidate& candidate : outcome.plan.candidates) {
      rows.push_back({fmt::format("{}", fmt::join(candidate.anchors, ",")),
                      std::to_string(candidate.anchors.size()), fmt::format("{:.4f}", candidate.kl),
                      fmt::format("{:.3f}", candidate.top1), fmt::format("{:.3f}", candidate.passkey)});
    }
    if (rows.size() > 1) print(table(rows) + "\n");
    print(fmt::format("anchors {} ({}), from {} prompts, {} tokens, in {}, peak memory {}\n",
                      fmt::join(outcome.plan.anchors, ", "), outcome.method, outcome.prompts, outcome.tokens,
                      human_seconds(outcome.seconds), human_bytes(outcome.peak_bytes)));
    if (outcome.plan.validation) {
      const PlanValidation& validation = *outcome.plan.validation;
      print(fmt::format("validation {}: KL {:.4f}, top-1 {:.3f}, passkey digits {:.3f} (dense {:.3f})\n",
                        validation.passed ? "passed" : "NOT passed", validation.kl, validation.top1,
                        validation.passkey, validation.passkey_dense));
    }
    print(fmt::format("plan: {}\n", one_line(output)));
  }
};

}  // namespace

void add_calibrate(CLI::App& app, std::function<void()>* run) {
  auto calibrate = std::make_shared<Calibrate>();
  CLI::App* verb = app.add_subcommand("calibrate", "Measure a model on a few prompts and write its plan");
  calibrate->options.add(*verb);
  calibrate->flags.add(*verb);
  verb->add_option("--output,-o", calibrate->output, "Where to write the plan")->required();
  verb->footer("Example: kascade calibrate --model model.gguf --output plan.json --quick");
  verb->callback([calibrate, run] { *run = [calibrate] { calibrate->run(); }; });
}

}  // namespace kascade::cli
