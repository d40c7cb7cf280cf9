// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "golden.h"
#include "ops/ops.h"

namespace kascade::golden {
namespace {

// Near-ties at the cut may fall the other way in another fp32 implementation; repeating a run in fp64 moves
// the mean by under 1e-4, so 2e-3 is far above rounding and far below any real difference between strategies.
constexpr double kMeanNllTolerance = 2e-3;
constexpr double kDigitNllTolerance = 5e-3;

struct Run {
  std::vector<double> prefill_nll;  // of the last `scored` prompt tokens
  std::vector<std::vector<float>> decode_logits;
  std::vector<double> decode_nll;
};

// Prefills prompt, then feeds continuation[0 .. n-2] one step each and scores each against the next token.
Run run_policy(Engine& engine, const Policy* policy, std::span<const int32_t> prompt,
               std::span<const int32_t> continuation, size_t scored) {
  Run run;
  const size_t hidden = static_cast<size_t>(engine.model().config().hidden);
  const auto sequence = engine.make_sequence();
  engine.prefill(
      *sequence, prompt, policy, nullptr,
      [&](int64_t first, std::span<const float> chunk) {
        for (size_t row = 0; row < chunk.size() / hidden; ++row) {
          const size_t next = static_cast<size_t>(first) + row + 1;
          if (next >= prompt.size() || next + scored < prompt.size()) continue;
          run.prefill_nll.push_back(
              negative_log_likelihood(engine.logits(chunk.subspan(row * hidden, hidden)), prompt[next]));
        }
      },
      nullptr);
  for (size_t step = 0; step + 1 < continuation.size(); ++step) {
    const ForwardItem item{.sequence = sequence.get(), .tokens = continuation.subspan(step, 1)};
    const auto row = engine.forward(std::span(&item, 1), {.phase = Phase::kDecode, .policy = policy});
    const auto logits = engine.logits(row);
    run.decode_logits.emplace_back(logits.begin(), logits.end());
    run.decode_nll.push_back(negative_log_likelihood(logits, continuation[step + 1]));
  }
  return run;
}

double mean(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double mean(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value);
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

}  // namespace

void run_strategies(const std::string& golden_dir, Tally& tally) {
  for (const std::string& prompt_name : folders_in(golden_dir + "/strategies")) {
    const std::string folder = golden_dir + "/strategies/" + prompt_name + "/";
    const auto prompt = load_ints(folder + "prompt_ids.npy").values;
    const auto continuation = load_ints(folder + "continuation_ids.npy").values;
    const auto engine = make_engine(static_cast<int64_t>(prompt.size() + continuation.size()) + 64);
    const Run dense = run_policy(*engine, nullptr, prompt, continuation, 512);
    for (const std::string& strategy_name : cases_in(folder, ".decode_nll32.npy")) {
      const std::string name = prompt_name + "/" + strategy_name;
      const Strategy strategy = make_strategy(strategy_name, golden_dir, engine->model().model().identity());
      if (!tally.check(strategy.known, name, "unknown strategy")) continue;
      if (strategy.policy == nullptr) {
        tally.skipped(name, "its policy comes later");
        continue;
      }
      const Run run = run_policy(*engine, strategy.policy.get(), prompt, continuation, 512);
      const auto prefill = load_floats(folder + strategy_name + ".prefill_nll512.npy").values;
      const auto decode = load_floats(folder + strategy_name + ".decode_nll32.npy").values;
      const auto stored_kl = load_floats(folder + strategy_name + ".decode_kl32.npy").values;
      std::vector<double> kl;
      for (size_t i = 0; i < run.decode_logits.size(); ++i)
        kl.push_back(kl_divergence(dense.decode_logits[i], run.decode_logits[i]));
      tally.check(run.prefill_nll.size() == prefill.size() && run.decode_nll.size() == decode.size(), name,
                  "other numbers of scored tokens");
      const double prefill_off = std::abs(mean(run.prefill_nll) - mean(prefill));
      const double decode_off = std::abs(mean(run.decode_nll) - mean(decode));
      const double kl_off = std::abs(mean(kl) - mean(stored_kl));
      const auto compare = [&](const char* what, double off) {
        tally.check(off <= kMeanNllTolerance, name, fmt::format("{} off by {:.2e}", what, off));
      };
      compare("prefill mean NLL", prefill_off);
      compare("decode mean NLL", decode_off);
      compare("decode mean KL", kl_off);
      tally.ran(fmt::format("{} (prefill NLL off by {:.1e}, decode NLL {:.1e}, KL {:.1e})", name, prefill_off,
                            decode_off, kl_off));
    }
  }
}

void run_needle(const std::string& golden_dir, Tally& tally) {
  const std::string folder = golden_dir + "/needle/";
  for (const std::string& needle : cases_in(folder, ".prompt_ids.npy")) {
    const Json info = load_json(folder + needle + ".json");
    const auto prompt = load_ints(folder + needle + ".prompt_ids.npy").values;
    const auto target = load_ints(folder + needle + ".target_ids.npy").values;
    const auto engine = make_engine(static_cast<int64_t>(prompt.size() + target.size()) + 64);
    for (const auto& [strategy_name, expected] : info.at("results").items()) {
      const std::string name = needle + "/" + strategy_name;
      const Strategy strategy = make_strategy(strategy_name, golden_dir, engine->model().model().identity());
      if (!tally.check(strategy.known, name, "unknown strategy")) continue;
      if (strategy.policy == nullptr) {
        tally.skipped(name, "its policy comes later");
        continue;
      }
      // The first target is a space; each digit is scored by the step that was fed the token before it.
      const Run run = run_policy(*engine, strategy.policy.get(), prompt, target, 0);
      int right = 0;
      for (size_t i = 0; i < run.decode_logits.size(); ++i)
        right += arg_max(run.decode_logits[i]) == target[i + 1] ? 1 : 0;
      const double nll = mean(run.decode_nll);
      const double stored = expected.at("digit_nll_mean").get<double>();
      tally.check(std::abs(nll - stored) <= kDigitNllTolerance, name,
                  fmt::format("digit NLL {:.4f} instead of {:.3f}", nll, stored));
      tally.check(right == expected.at("digits_right").get<int>(), name,
                  fmt::format("{} digits right instead of {}", right, expected.at("digits_right").dump()));
      tally.ran(fmt::format("{} (digit NLL {:.3f}, stored {:.3f})", name, nll, stored));
    }
  }
}

}  // namespace kascade::golden
