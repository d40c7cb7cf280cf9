// SPDX-License-Identifier: Apache-2.0
#include "eval/demo_report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "eval/default_data.h"
#include "eval/prompts.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kQuestion =
    "To whom are these letters written, and where is the writer of the letters going?";
// Prompt tokens at the end of the prefill that are compared with dense attention.
constexpr int64_t kScoredPromptTokens = 256;
// Passkeys when a plan is given; otherwise those of its validation are told.
constexpr int64_t kPasskeyLengths[] = {1024, 2048, 4096};
constexpr double kPasskeyDepths[] = {0.25, 0.65};
constexpr uint64_t kPasskeySeed = 2'000'000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check_cancel(const std::atomic<bool>* cancel) {
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("demo: cancelled");
}

// One policy's way through prompt and answer.
struct Run {
  std::unique_ptr<Sequence> sequence;
  std::vector<float> prompt_rows;  // [scored prompt tokens, hidden]: the rows before them
  std::vector<float> last_row;     // [hidden]: after the whole prompt
  std::vector<int32_t> answer;     // greedy, not stopped at the end of the turn
  std::vector<float> answer_rows;  // [answer tokens, hidden]: the rows before them
  double prefill_seconds = 0, decode_seconds = 0;
};

void append(std::vector<float>& to, std::span<const float> rows) {
  to.insert(to.end(), rows.begin(), rows.end());
}

std::span<const float> step(Engine& engine, Sequence& sequence, int32_t token, const Policy* policy) {
  const ForwardItem item{&sequence, {&token, 1}, 0};
  return engine.forward({&item, 1}, ForwardOptions{.phase = Phase::kDecode, .policy = policy});
}

void prefill(Engine& engine, std::span<const int32_t> prompt, const Policy* policy, int64_t scored,
             const std::atomic<bool>* cancel, Run& run) {
  const int64_t width = engine.model().config().hidden;
  const int64_t end = static_cast<int64_t>(prompt.size()) - 1;
  run.sequence = engine.make_sequence();
  const auto keep = [&](int64_t first, std::span<const float> hidden) {
    const int64_t rows = static_cast<int64_t>(hidden.size()) / width;
    const int64_t from = std::clamp(end - scored, first, first + rows);
    const int64_t to = std::clamp(end, first, first + rows);
    append(run.prompt_rows, hidden.subspan((from - first) * width, (to - from) * width));
  };
  const auto start = Clock::now();
  const std::span<const float> last = engine.prefill(*run.sequence, prompt, policy, nullptr, keep, cancel);
  run.last_row.assign(last.begin(), last.end());
  run.prefill_seconds = seconds_since(start);
}

void answer(Engine& engine, int64_t tokens, const Policy* policy, const std::atomic<bool>* cancel, Run& run) {
  run.answer_rows = run.last_row;
  run.answer.push_back(arg_max(engine.logits(run.last_row)));
  const auto start = Clock::now();
  while (static_cast<int64_t>(run.answer.size()) < tokens) {
    check_cancel(cancel);
    const std::span<const float> hidden = step(engine, *run.sequence, run.answer.back(), policy);
    append(run.answer_rows, hidden);
    run.answer.push_back(arg_max(engine.logits(hidden)));
  }
  run.decode_seconds = seconds_since(start);
}

// The rows before each of another run's answer tokens, teacher-forced.
std::vector<float> rows_of_answer(Engine& engine, Run& run, int64_t prompt_tokens,
                                  std::span<const int32_t> tokens, const Policy* policy) {
  run.sequence->truncate(prompt_tokens);
  std::vector<float> rows = run.last_row;
  for (const int32_t token : tokens.first(tokens.size() - 1))
    append(rows, step(engine, *run.sequence, token, policy));
  return rows;
}

DemoAnswer tell(const Tokenizer& tokenizer, const Run& run, int64_t prompt_tokens, std::string policy) {
  DemoAnswer result;
  result.policy = std::move(policy);
  const auto end = std::find_if(run.answer.begin(), run.answer.end(),
                                [&](int32_t id) { return tokenizer.ends_generation(id); });
  result.text = tokenizer.decode({run.answer.begin(), end});
  const auto rate = [](int64_t tokens, double seconds) {
    return static_cast<double>(tokens) / std::max(seconds, 1e-9);
  };
  result.prefill_tokens_per_s = rate(prompt_tokens, run.prefill_seconds);
  // The first token comes out of the prefill.
  result.decode_tokens_per_s = rate(static_cast<int64_t>(run.answer.size()) - 1, run.decode_seconds);
  return result;
}

// The chat prompt of document and question, which must fit the context.
std::vector<int32_t> make_prompt(const Model& model, const std::string& document, const std::string& question,
                                 int64_t answer_tokens) {
  const ChatMessage message{"user", fmt::format("{}\n\nQuestion: {}", document, question)};
  std::vector<int32_t> ids = chat_tokens(model, {&message, 1});
  const int64_t room = model.config().context - answer_tokens;
  require<Unsupported>(
      static_cast<int64_t>(ids.size()) <= room,
      "demo: document and question have {} tokens, but the model's context of {} less {} for the answer "
      "leaves {}",
      ids.size(), model.config().context, answer_tokens, room);
  return ids;
}

std::vector<PasskeyTally> run_passkeys(Engine& engine, const Policy& policy, const DemoOptions& options) {
  const Model& model = engine.model().model();
  std::vector<int64_t> lengths;
  const int64_t least = least_passkey_tokens(model.tokenizer());
  for (const int64_t length : kPasskeyLengths)
    if (length >= least && length + 16 <= model.config().context) lengths.push_back(length);
  const std::vector<PasskeyPrompt> prompts =
      make_passkeys(model.tokenizer(), default_document(), lengths, kPasskeyDepths, kPasskeySeed);
  std::vector<PasskeyResult> dense, sparse;
  for (const PasskeyPrompt& prompt : prompts) {
    if (options.progress)
      options.progress(
          {"passkeys", static_cast<int64_t>(dense.size()), static_cast<int64_t>(prompts.size()), 0, -1});
    dense.push_back(run_passkey(engine, prompt, nullptr, options.cancel));
    sparse.push_back(run_passkey(engine, prompt, &policy, options.cancel));
  }
  return tally_passkeys(dense, sparse);
}

std::string figure(const Figure& value, int decimals) {
  return fmt::format("{0:.{3}f} [{1:.{3}f}, {2:.{3}f}]", value.value, value.low, value.high, decimals);
}

// Text from a model as a Markdown quotation, whatever characters it holds.
std::string quotation(const std::string& text) {
  std::string quoted = "> ";
  for (const char c : text) {
    quoted += c;
    if (c == '\n') quoted += "> ";
  }
  return quoted;
}

}  // namespace

DemoReport run_demo(std::shared_ptr<const PreparedModel> model, const DemoOptions& options) {
  const auto start = Clock::now();
  DemoReport report;
  report.model_name = model->config().name;
  require<BadArgument>(options.answer_tokens >= 2, "answer tokens: expected at least 2, got {}",
                       options.answer_tokens);
  report.question = options.question.empty() ? kQuestion : options.question;
  const std::string document = options.document.empty() ? std::string(default_document()) : options.document;
  const std::vector<int32_t> prompt =
      make_prompt(model->model(), document, report.question, options.answer_tokens);
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  report.prompt_tokens = prompt_tokens;
  report.document_tokens = static_cast<int64_t>(model->model().tokenizer().encode(document).size());

  if (options.plan) {
    report.plan = *options.plan;
  } else {
    CalibrateOptions calibration = options.calibrate;
    calibration.quick = true;
    calibration.cancel = options.cancel;
    calibration.progress = options.progress;
    report.calibration = calibrate(model, calibration);
    report.plan = report.calibration->plan;
  }

  EngineOptions engine_options;
  engine_options.threads = options.calibrate.threads;
  engine_options.cache_tokens = 2 * (prompt_tokens + options.answer_tokens + engine_options.page_size);
  const std::unique_ptr<Engine> engine = Engine::create(model, engine_options);
  report.threads = engine->threads();
  const std::shared_ptr<const Policy> policy = make_policy(
      "kascade", PolicyOptions{.budget = options.calibrate.budget, .percent = options.calibrate.percent},
      model->model().identity(), &report.plan);

  const auto tell_progress = [&](const char* stage, int64_t done) {
    if (options.progress) options.progress({stage, done, 2, seconds_since(start), -1});
  };
  const int64_t scored = std::min(kScoredPromptTokens, prompt_tokens - 1);
  Run dense, kascade;
  tell_progress("answer", 0);
  prefill(*engine, prompt, nullptr, scored, options.cancel, dense);
  answer(*engine, options.answer_tokens, nullptr, options.cancel, dense);
  tell_progress("answer", 1);
  prefill(*engine, prompt, policy.get(), scored, options.cancel, kascade);
  answer(*engine, options.answer_tokens, policy.get(), options.cancel, kascade);
  const Tokenizer& tokenizer = model->model().tokenizer();
  report.dense = tell(tokenizer, dense, prompt_tokens, "dense");
  report.kascade = tell(tokenizer, kascade, prompt_tokens, policy->describe());
  report.prefill_speedup = report.kascade.prefill_tokens_per_s / report.dense.prefill_tokens_per_s;
  report.decode_speedup = report.kascade.decode_tokens_per_s / report.dense.decode_tokens_per_s;

  tell_progress("agreement", 0);
  score_rows(*engine, dense.prompt_rows, kascade.prompt_rows, std::span<const int32_t>(prompt).last(scored),
             report.prefill);
  summarise(report.prefill);
  score_rows(*engine, dense.answer_rows,
             rows_of_answer(*engine, kascade, prompt_tokens, dense.answer, policy.get()), dense.answer,
             report.decode);
  summarise(report.decode);
  dense.sequence.reset();
  kascade.sequence.reset();

  report.passkeys =
      report.calibration ? report.calibration->passkeys : run_passkeys(*engine, *policy, options);
  report.seconds = seconds_since(start);
  return report;
}

std::string demo_markdown(const DemoReport& report) {
  std::string text = fmt::format(
      "# Kascade on {}\n\nA document of {} tokens and a question, {} tokens in all, answered with dense "
      "attention and with "
      "the plan\nbelow, on {} threads.\n\n",
      report.model_name.empty() ? "the model" : report.model_name, report.document_tokens,
      report.prompt_tokens, report.threads);
  text += fmt::format("Plan: {} of {} layers are anchors ({}), method {}.\n", report.plan.anchors.size(),
                      report.plan.model.layers, fmt::join(report.plan.anchors, ", "),
                      report.plan.settings.method);
  if (report.plan.validation) {
    const PlanValidation& v = *report.plan.validation;
    text += fmt::format(
        "Validation on text kept out of the choice {}: KL {:.4f}, top-1 agreement {:.1f} %, passkey digits "
        "{:.1f} % "
        "(dense {:.1f} %).\n",
        v.passed ? "passed" : "did not pass", v.kl, 100 * v.top1, 100 * v.passkey, 100 * v.passkey_dense);
  }
  text += fmt::format("Policy: {}\n", report.kascade.policy);
  if (report.calibration)
    text += fmt::format("Calibration: {} prompts, {} tokens, {:.0f} s.\n", report.calibration->prompts,
                        report.calibration->tokens, report.calibration->seconds);

  text += fmt::format(
      "\n## Speed\n\n| | dense | kascade | speed-up |\n| --- | ---: | ---: | ---: |\n"
      "| prefill, tokens/s | {:.1f} | {:.1f} | {:.2f}x |\n| decode, tokens/s | {:.1f} | {:.1f} | {:.2f}x |\n",
      report.dense.prefill_tokens_per_s, report.kascade.prefill_tokens_per_s, report.prefill_speedup,
      report.dense.decode_tokens_per_s, report.kascade.decode_tokens_per_s, report.decode_speedup);

  text +=
      "\n## Agreement with dense attention\n\n| region | positions | NLL dense | NLL kascade | KL, nats | "
      "top-1 |\n"
      "| --- | ---: | --- | --- | --- | --- |\n";
  const auto row = [&](const char* name, const RegionScore& region) {
    text +=
        fmt::format("| {} | {} | {} | {} | {} | {} |\n", name, region.positions, figure(region.dense_nll, 3),
                    figure(region.nll, 3), figure(region.kl, 4), figure(region.top1, 3));
  };
  row("end of the prompt, sparse prefill", report.prefill);
  row("dense's answer, sparse decode", report.decode);
  text += "\nIn brackets: 95 % intervals, bootstrap over positions (top-1: Wilson).\n";

  text +=
      "\n## Passkey retrieval\n\nDigits of five-digit passcodes hidden in the document that come out "
      "right.\n\n"
      "| tokens | digits | dense | kascade |\n| ---: | ---: | ---: | ---: |\n";
  for (const PasskeyTally& tally : report.passkeys)
    text += fmt::format("| {} | {} | {} | {} |\n", tally.tokens, tally.digits, tally.dense_right,
                        tally.policy_right);

  text += fmt::format("\n## Answers\n\nQuestion: {}\n\nDense:\n\n{}\n\nKascade:\n\n{}\n", report.question,
                      quotation(report.dense.text), quotation(report.kascade.text));
  return text;
}

}  // namespace kascade
