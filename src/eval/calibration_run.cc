// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_run.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/check.h"
#include "base/file.h"
#include "eval/calibration_prompts.h"
#include "eval/calibration_settings.h"
#include "eval/one_pass.h"
#include "eval/plan_validator.h"
#include "eval/progress_meter.h"
#include "eval/statistics_run.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Prompts that the choice measures candidates on; the statistics take all. Eight suffice, and
// every one keeps its cache in memory.
constexpr size_t kChoicePrompts = 12;
// Teacher-forced rows of a prompt in the choice.
constexpr int64_t kChoiceRows = 48;
// Cost of the search, in measurements of one set on all prompts.
constexpr double kSearchCost = 150;
constexpr double kQuickSearchCost = 80;
// The search's progress is told in thousandths of its cost.
constexpr double kCostUnits = 1000;

uint64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

// One engine a worker, the CPU's threads shared out between them; a GPU is kept busy by one. Any of them can
// hold every prompt of the calibration.
std::vector<std::unique_ptr<Engine>> make_engines(const std::shared_ptr<const PreparedModel>& model,
                                                  int threads, const CalibrationPrompts& prompts,
                                                  int64_t max_new_tokens) {
  const int available = ThreadPool(threads).threads();
  const auto most = static_cast<int>(std::max(prompts.choice.size(), prompts.validation.size()));
  const int workers =
      model->device() == std::string_view("cuda") ? 1 : std::max(1, std::min(available, most));
  EngineOptions options;
  options.threads = std::max(1, available / workers);
  const auto add = [&](int64_t tokens) {
    options.cache_tokens += tokens + max_new_tokens + 2 * options.page_size;
  };
  int64_t longest = 1;
  for (const CalibrationPrompt& prompt : prompts.choice) add(static_cast<int64_t>(prompt.ids.size()));
  for (const PasskeyPrompt& passkey : prompts.choice_passkeys)
    add(static_cast<int64_t>(passkey.prompt.size()));
  for (const CalibrationPrompt& prompt : prompts.validation)
    longest = std::max(longest, static_cast<int64_t>(prompt.ids.size()));
  for (const PasskeyPrompt& passkey : prompts.validation_passkeys)
    longest = std::max(longest, static_cast<int64_t>(passkey.prompt.size() + passkey.target.size()));
  add(longest);
  std::vector<std::unique_ptr<Engine>> engines;
  engines.reserve(workers);
  for (int worker = 0; worker < workers; ++worker) engines.push_back(Engine::create(model, options));
  return engines;
}

// The last rows of a prompt, teacher-forced: for a question the tokens around its answer, the model's own
// greedy answer included; for running text its own last tokens (a small model's continuation soon repeats
// itself).
OnePassPrompt rows_of_prompt(const CalibrationPrompt& prompt, const std::vector<int32_t>& generated,
                             int64_t rows) {
  std::vector<int32_t> ids = prompt.ids;
  if (prompt.question) ids.insert(ids.end(), generated.begin(), generated.end());
  const auto n = static_cast<int64_t>(ids.size());
  const int64_t taken = std::min(rows, n / 2);
  OnePassPrompt result;
  result.prefix.assign(ids.begin(), ids.end() - taken);
  result.rows.assign(ids.end() - taken, ids.end());
  result.scored.assign(taken, 1);
  return result;
}

// Rows of a passkey that decide for themselves: the end of the prompt, where the question stands, and those
// before every digit of the answer, which alone are scored. Retrieval is lost by the question's rows as much
// as by the answer's; a choice that sees the latter alone finds every anchor set good.
constexpr int64_t kQuestionRows = 48;
OnePassPrompt rows_of_passkey(const PasskeyPrompt& passkey) {
  OnePassPrompt result;
  const auto n = static_cast<int64_t>(passkey.prompt.size());
  const int64_t question = std::min(kQuestionRows, n - 1);
  result.prefix.assign(passkey.prompt.begin(), passkey.prompt.end() - question);
  result.rows.assign(passkey.prompt.end() - question, passkey.prompt.end());
  result.rows.insert(result.rows.end(), passkey.target.begin(), passkey.target.end() - 1);
  result.targets.assign(static_cast<size_t>(question - 1), -1);
  result.targets.insert(result.targets.end(), passkey.target.begin(), passkey.target.end());
  result.scored.assign(static_cast<size_t>(question - 1), 0);
  result.scored.insert(result.scored.end(), passkey.is_digit.begin(), passkey.is_digit.end());
  return result;
}

class Calibration {
 public:
  Calibration(std::shared_ptr<const PreparedModel> model, const CalibrateOptions& options)
      : model_(std::move(model)),
        options_(options),
        resolved_(resolve_calibration(options, model_->config())),
        identity_(model_->model().identity()) {}

  CalibrationOutcome run() {
    const auto start = std::chrono::steady_clock::now();
    if (!options_.output.empty()) require_writable(options_.output);
    const int64_t max_new_tokens = resolved_.statistics.max_new_tokens;
    prompts_ = make_calibration_prompts(model_->model(), options_, resolved_.compares, max_new_tokens);
    engines_ = make_engines(model_, options_.threads, prompts_, max_new_tokens);

    const StatisticsRun statistics = gather();
    similarity_ = statistics.set.similarity(resolved_.aggregation);
    importance_ = statistics.set.importance();
    if (options_.validate) {
      validator_ = std::make_unique<PlanValidator>(engines_, prompts_.validation,
                                                   prompts_.validation_passkeys, options_.cancel);
    }
    const std::vector<int> anchors = choose();

    CalibrationOutcome outcome;
    outcome.plan = make_plan(identity_, resolved_.settings, similarity_, importance_, anchors);
    finish(outcome);
    outcome.prompts = statistics.set.prompts();
    outcome.tokens = statistics.set.tokens();
    outcome.resumed_prompts = statistics.resumed;
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    outcome.peak_bytes = peak_bytes();
    return outcome;
  }

 private:
  std::string partial_path() const { return options_.output.empty() ? "" : options_.output + ".partial"; }

  size_t choice_prompts() const { return std::min(kChoicePrompts, prompts_.choice.size()); }

  StatisticsRun gather() {
    ProgressMeter meter(options_.progress, "statistics", prompts_.tokens);
    StatisticsRunOptions run;
    run.settings = resolved_.statistics;
    run.identity = fmt::format("{} {} {}, {}, {}, prompts {}", identity_.fingerprint, identity_.layers,
                               model_->compute() == Compute::kF32 ? "f32" : "fast",
                               resolved_.statistics_identity(), options_.tool_version, prompts_.hash);
    run.partial_path = partial_path();
    run.cancel = options_.cancel;
    run.on_tokens = [&meter](int64_t tokens) { meter.add(tokens); };
    run.on_resumed = [&meter](int64_t tokens) { meter.skip(tokens); };
    return run_statistics(engines_, prompts_.choice, run);
  }

  std::shared_ptr<const Policy> policy_of(const Plan& plan) const {
    return make_policy("kascade", PolicyOptions{.budget = options_.budget, .percent = options_.percent},
                       identity_, &plan);
  }

  Plan plan_of(const std::vector<int>& anchors) const {
    return make_plan(identity_, resolved_.settings, similarity_, importance_, anchors);
  }

  // The prompts of the choice under dense attention: caches and, for questions, the answers that belong to
  // their rows.
  std::unique_ptr<OnePassEvaluator> make_evaluator() {
    const auto count = static_cast<int64_t>(choice_prompts());
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; ++i) tokens += static_cast<int64_t>(prompts_.choice[i].ids.size());
    for (const PasskeyPrompt& passkey : prompts_.choice_passkeys)
      tokens += static_cast<int64_t>(rows_of_passkey(passkey).prefix.size());
    ProgressMeter meter(options_.progress, "choice: prefill", tokens);

    std::vector<OnePassPrompt> prompts(count);
    std::vector<OnePassEvaluator::Prefilled> prefilled(count);
    ThreadPool pool(static_cast<int>(engines_.size()));
    pool.parallel_for(count, [&](int64_t i, int worker) {
      const CalibrationPrompt& prompt = prompts_.choice[i];
      const int64_t new_tokens = prompt.question ? resolved_.statistics.max_new_tokens : 0;
      DensePrompt dense = prefill_dense(*engines_[worker], prompt.ids, new_tokens, options_.cancel);
      prompts[i] = rows_of_prompt(prompt, dense.generated, kChoiceRows);
      prefilled[i] = {static_cast<size_t>(worker), std::move(dense.sequence)};
      meter.add(static_cast<int64_t>(prompt.ids.size()));
    });
    for (const PasskeyPrompt& passkey : prompts_.choice_passkeys) prompts.push_back(rows_of_passkey(passkey));
    prefilled.resize(prompts.size());
    return std::make_unique<OnePassEvaluator>(
        engines_, std::move(prompts), std::move(prefilled),
        [this](const Plan& plan) { return policy_of(plan); }, engines_.front()->max_rows(), options_.cancel,
        [&meter](int64_t done) { meter.add(done); });
  }

  std::vector<int> choose() {
    const LayerSimilarity layers = layer_similarity(similarity_, resolved_.settings.tensor_parallel);
    const std::vector<double> weights = resolved_.settings.importance ? importance_ : std::vector<double>();
    if (!resolved_.compares) return choose_anchors(layers, weights, resolved_.anchors).anchors;

    const std::unique_ptr<OnePassEvaluator> evaluator = make_evaluator();
    const AnchorEvaluator evaluate = [&](const EvaluationRequest& request) {
      std::vector<Plan> plans;
      for (const std::vector<int>& anchors : request.anchor_sets) plans.push_back(plan_of(anchors));
      const Plan base = plan_of(request.base);
      const OnePassFigures dense = evaluator->dense(request.fidelity);
      std::vector<AnchorEvaluation> evaluations;
      for (const OnePassFigures& figures : evaluator->evaluate(plans, request.fidelity, &base))
        evaluations.push_back({figures.kl() + figures.digit_kl(), figures.kl(), figures.top1(),
                               figures.passkey(), dense.passkey()});
      return evaluations;
    };
    ProgressMeter meter(options_.progress, "choice", 1);
    SearchOptions search;
    search.anchors = resolved_.anchors;
    search.thresholds = options_.thresholds;
    search.max_cost = options_.quick ? kQuickSearchCost : kSearchCost;
    search.progress = [&meter](const SearchProgress& progress) {
      meter.set(std::llround(progress.cost * kCostUnits), std::llround(progress.max_cost * kCostUnits));
    };
    search.cancelled = [this] {
      return options_.cancel != nullptr && options_.cancel->load(std::memory_order_relaxed);
    };
    if (validator_)
      search.accept = [this](const std::vector<int>& anchors, const AnchorEvaluation&) {
        const ValidationResult* validation = validate(anchors, false);
        return validation != nullptr && validation->figures.passed;
      };
    const SearchResult result = resolved_.settings.method == "measured"
                                    ? search_anchors(layers, evaluate, search)
                                    : search_program(layers, weights, evaluate, search);
    candidates_ = result.candidates;
    measured_objective_ = result.evaluation.objective;
    return result.anchors;
  }

  // Null when the prompts alone miss the limits and the whole was not asked for.
  const ValidationResult* validate(const std::vector<int>& anchors, bool whole) {
    const auto known = validations_.find(anchors);
    if (known != validations_.end()) return &known->second;
    ProgressMeter meter(options_.progress, "validation", validator_->items());
    std::optional<ValidationResult> validation = validator_->validate(
        *policy_of(plan_of(anchors)), options_.thresholds, whole, [&meter] { meter.add(1); });
    if (!validation) return nullptr;
    return &validations_.emplace(anchors, *std::move(validation)).first->second;
  }

  void finish(CalibrationOutcome& outcome) {
    Plan& plan = outcome.plan;
    plan.data = {prompts_.name, static_cast<int64_t>(prompts_.choice.size()), prompts_.tokens, prompts_.hash};
    plan.candidates = candidates_;
    if (resolved_.settings.method == "measured") plan.objective = measured_objective_;
    plan.tool_version = options_.tool_version;
    if (validator_) {
      const ValidationResult* validation = validate(plan.anchors, true);
      plan.validation = validation->figures;
      outcome.passkeys = validation->passkeys;
    }
    outcome.validated = plan.validation && plan.validation->passed;
    outcome.method = resolved_.settings.method;
    if (!outcome.validated) outcome.warning = warning_of(plan);
    validate_plan(plan);
    if (options_.output.empty()) return;
    save_plan(plan, options_.output);
    std::error_code ignored;
    std::filesystem::remove(partial_path(), ignored);
  }

  std::string warning_of(const Plan& plan) const {
    if (!plan.validation) return "the plan was not validated";
    const PlanValidation& v = *plan.validation;
    const CalibrationThresholds& t = options_.thresholds;
    return fmt::format(
        "the plan misses its limits on prompts kept out of the choice: KL {:.4f} (at most {}), top-1 "
        "{:.3f} (at least {}), passkey digits {:.3f} against {:.3f} dense (at most {} less)",
        v.kl, t.max_kl, v.top1, t.min_top1, v.passkey, v.passkey_dense, t.max_passkey_loss);
  }

  std::shared_ptr<const PreparedModel> model_;
  const CalibrateOptions& options_;
  ResolvedCalibration resolved_;
  ModelIdentity identity_;
  CalibrationPrompts prompts_;
  std::vector<std::unique_ptr<Engine>> engines_;
  HeadSimilarity similarity_;
  std::vector<double> importance_;  // [layers]
  std::unique_ptr<PlanValidator> validator_;
  std::map<std::vector<int>, ValidationResult> validations_;
  std::vector<PlanCandidate> candidates_;
  double measured_objective_ = 0;
};

}  // namespace

CalibrationOutcome calibrate(std::shared_ptr<const PreparedModel> model, const CalibrateOptions& options) {
  return Calibration(std::move(model), options).run();
}

}  // namespace kascade
