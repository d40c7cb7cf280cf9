// SPDX-License-Identifier: Apache-2.0
// Option groups that several verbs share, and what they turn into.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kascade/engine.h"
#include "kascade/error.h"
#include "kascade/model.h"
#include "kascade/plan.h"
#include "kascade/policy.h"

namespace kascade::cli {

/// --model --compute --threads --device --json
struct RunOptions {
  std::string model;
  std::string compute = "auto";
  int threads = 0;
  std::string device = "auto";
  bool invariant = false;
  bool json = false;

  void add_json(CLI::App& verb);
  void add_machine(CLI::App& verb);  // --threads --device
  void add_invariant(CLI::App& verb);
  void add(CLI::App& verb, bool model_required = true);
  std::shared_ptr<const Model> open() const;
  /// For what runs on a device without a model: whether --device says a GPU. With auto, whether there is one;
  /// says so once where a build for GPUs finds none.
  bool on_gpu() const;
  std::shared_ptr<const PreparedModel> prepare(std::shared_ptr<const Model> opened) const;
  /// run(prepare(opened)); on the CPU where auto chose a GPU whose memory does not hold what run asks for.
  template <class Run>
  auto on_device(std::shared_ptr<const Model> opened, const Run& run) const {
    const std::shared_ptr<const PreparedModel> prepared = prepare(opened);
    if (device != "auto" || std::string_view(prepared->device()) == "cpu") return run(prepared);
    try {
      return run(prepared);
    } catch (const OutOfMemory& error) {
      tell_of_cpu(error);
    }
    return run(PreparedModel::create(std::move(opened), compute, "cpu"));
  }
  std::unique_ptr<Engine> make_engine(std::shared_ptr<const Model> opened,
                                      const EngineOptions& engine_options) const {
    return on_device(std::move(opened), [&](const std::shared_ptr<const PreparedModel>& prepared) {
      return Engine::create(prepared, engine_options);
    });
  }
  EngineOptions engine() const;

 private:
  static void tell_of_cpu(const Error& error);
};

/// --plan --policy and the policy's options.
struct PolicyFlags {
  std::string plan_path;
  std::string name;
  std::string budget = "default";
  std::optional<double> percent;
  std::optional<int> floor, tile, sinks, recent;
  bool rolling = false, no_rolling = false;
  std::vector<int> anchors;
  bool allow_other_model = false;

  void add(CLI::App& verb);
  void add_settings(CLI::App& verb);  // all but --policy
  PolicyOptions settings() const;
  /// The plan of --plan, if any; shows a plan's warning on standard error.
  std::optional<Plan> load(const Model& model) const;
  /// The policy for this model; shows a plan's warning on standard error. Fills plan when one was given.
  std::shared_ptr<const Policy> make(const Model& model, std::optional<Plan>* plan) const;
};

/// A text or the ids that stand for it: exactly one of --prompt/--text, --prompt-file/--file, --tokens.
struct TextSource {
  std::string text;
  std::string file;
  std::string tokens;
  bool text_given = false;

  /// Names of the options as the verb spells them ("--prompt", "--prompt-file"); an empty name leaves one
  /// out.
  void add(CLI::App& verb, const std::string& text_option, const std::string& file_option,
           bool tokens_option);
  /// Ids with a BOS in front where the model wants one (never for --tokens).
  std::vector<int32_t> ids(const Tokenizer& tokenizer) const;
  std::string read_text() const;
};

/// Every policy's name, with commas between.
std::string policy_names();

BudgetPreset parse_budget_preset(const std::string& name);

}  // namespace kascade::cli
