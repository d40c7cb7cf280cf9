// SPDX-License-Identifier: Apache-2.0
#include "cli/options.h"

#include "base/check.h"
#include "base/file.h"
#include "cli/console.h"
#include "eval/bench_e2e_device.h"
#include "eval/prompts.h"

namespace kascade::cli {

#ifdef KASCADE_CUDA
namespace {

/// Whether the CPU can do what failed.
bool of_the_gpu(const Error& error) {
  return error.kind() == ErrorKind::kUnsupported || error.kind() == ErrorKind::kOutOfMemory ||
         error.kind() == ErrorKind::kDevice;
}

}  // namespace
#endif

void RunOptions::add_json(CLI::App& verb) {
  verb.add_flag("--json", json, "Print one JSON document and nothing else");
}

void RunOptions::add_machine(CLI::App& verb) {
  verb.add_option("--threads", threads, "Threads; 0 = every processor this process may use")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  verb.add_option("--device", device, "Where to run; auto: a GPU where the build and the machine have one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

void RunOptions::add_invariant(CLI::App& verb) {
  verb.add_flag("--invariant", invariant,
                "On a GPU: products of fixed shapes, so that chunks and batch mates change no bit (slower)");
}

EngineOptions RunOptions::engine() const {
  EngineOptions result;
  result.threads = threads;
  result.invariant = invariant;
  return result;
}

void RunOptions::add(CLI::App& verb, bool model_required) {
  auto* option =
      verb.add_option("--model,-m", model, "A .gguf file, or a folder with config.json and safetensors");
  if (model_required) option->required();
  verb.add_option("--compute", compute, "auto: weights as stored; f32: the reference numeric mode")
      ->check(CLI::IsMember({"auto", "f32"}))
      ->capture_default_str();
  add_machine(verb);
  add_json(verb);
}

std::shared_ptr<const Model> RunOptions::open() const { return Model::open(model); }

void RunOptions::tell_of_cpu(const Error& error) { note(fmt::format("runs on the CPU: {}", error.what())); }

bool RunOptions::on_gpu() const {
  if (device != "auto") return device == "cuda";
#ifdef KASCADE_CUDA
  try {
    gpu_memory();
    return true;
  } catch (const Error& error) {
    if (!of_the_gpu(error)) throw;
    tell_of_cpu(error);
  }
#endif
  return false;
}

std::shared_ptr<const PreparedModel> RunOptions::prepare(std::shared_ptr<const Model> opened) const {
  Progress bar;
  const LoadProgress progress = [&bar](uint64_t done, uint64_t total) {
    bar.update("loading", static_cast<double>(done) / static_cast<double>(total));
  };
  if (device != "auto") return PreparedModel::create(std::move(opened), compute, device, progress);
#ifdef KASCADE_CUDA
  try {
    return PreparedModel::create(opened, compute, "cuda", progress);
  } catch (const Error& error) {
    if (!of_the_gpu(error)) throw;
    bar.clear();
    tell_of_cpu(error);
  }
#endif
  return PreparedModel::create(std::move(opened), compute, "cpu");
}

std::string policy_names() {
  std::string names;
  for (const PolicyInfo& info : policies())
    names += fmt::format("{}{}", names.empty() ? "" : ", ", info.name);
  return names;
}

BudgetPreset parse_budget_preset(const std::string& name) {
  if (name == "default") return BudgetPreset::kDefault;
  if (name == "paper") return BudgetPreset::kPaper;
  if (name == "kernel") return BudgetPreset::kKernel;
  throw_error<BadArgument>("--budget: expected default, paper or kernel, got '{}'", name);
}

void PolicyFlags::add(CLI::App& verb) {
  verb.add_option("--policy", name,
                  "Attention policy (default: kascade with a plan, else dense): " + policy_names());
  add_settings(verb);
}

void PolicyFlags::add_settings(CLI::App& verb) {
  verb.add_option("--plan", plan_path, "A plan written by calibrate or plan import");
  verb.add_option("--budget", budget, "Budget preset")
      ->check(CLI::IsMember({"default", "paper", "kernel"}))
      ->capture_default_str();
  verb.add_option("--percent", percent, "Share of the keys to select, in percent (0, 100]; presets say 10");
  verb.add_option("--floor", floor, "Least number of selected keys; presets say 128");
  verb.add_option("--tile", tile, "Query tokens per prefill tile, 1..128; presets say 32");
  verb.add_option("--sinks", sinks, "First keys that are always attended");
  verb.add_option("--recent", recent, "Last keys before the tile that are always attended");
  auto* on = verb.add_flag("--rolling", rolling, "Prefill budgets follow the tile's position");
  verb.add_flag("--no-rolling", no_rolling, "Prefill budgets follow the prompt's length")->excludes(on);
  verb.add_option("--anchors", anchors, "Anchor layers in place of the plan's, e.g. 0,2,8")->delimiter(',');
  verb.add_flag("--allow-other-model", allow_other_model,
                "Accept a plan made from another model of the same shape");
}

PolicyOptions PolicyFlags::settings() const {
  PolicyOptions options;
  options.budget = parse_budget_preset(budget);
  options.percent = percent;
  options.floor = floor;
  options.tile = tile;
  options.sinks = sinks;
  options.recent = recent;
  if (rolling || no_rolling) options.rolling = rolling;
  options.anchors = anchors;
  return options;
}

std::optional<Plan> PolicyFlags::load(const Model& model) const {
  if (plan_path.empty()) return std::nullopt;
  Plan plan = load_plan(plan_path);
  const std::string warning = check_plan_model(plan, model.identity(), allow_other_model);
  if (!warning.empty()) note("warning: " + warning);
  return plan;
}

std::shared_ptr<const Policy> PolicyFlags::make(const Model& model, std::optional<Plan>* plan) const {
  const PolicyOptions options = settings();
  *plan = load(model);
  const std::string chosen = !name.empty() ? name : plan_path.empty() ? "dense" : "kascade";
  return make_policy(chosen, options, model.identity(), plan->has_value() ? &**plan : nullptr);
}

void TextSource::add(CLI::App& verb, const std::string& text_option, const std::string& file_option,
                     bool tokens_option) {
  auto* group = verb.add_option_group("input", "exactly one of");
  if (!text_option.empty()) {
    group->add_option_function<std::string>(
        text_option,
        [this](const std::string& value) {
          text = value;
          text_given = true;
        },
        "The text itself");
  }
  if (!file_option.empty()) group->add_option(file_option, file, "A file, taken byte for byte");
  if (tokens_option) group->add_option("--tokens", tokens, "A file with a JSON array of token ids");
  group->require_option(1);
}

std::string TextSource::read_text() const { return text_given ? text : read_file(file); }

std::vector<int32_t> TextSource::ids(const Tokenizer& tokenizer) const {
  if (!tokens.empty()) return load_tokens(tokens, tokenizer.size());
  return text_tokens(tokenizer, read_text());
}

}  // namespace kascade::cli
