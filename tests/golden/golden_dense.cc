// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "golden.h"
#include "ops/ops.h"

namespace kascade::golden {
namespace {

// Allowed differences between two fp32 implementations: the stored noise floor (fp32 against fp64) is 1e-4 in
// a logit and 9e-6 in a mean NLL; ten times that leaves room for another order of summation.
constexpr double kMeanNllTolerance = 1e-4;
constexpr double kLogitTolerance = 2e-3;

std::vector<std::vector<float>> all_logits(Engine& engine, Sequence& sequence, std::span<const int32_t> ids) {
  const size_t hidden = static_cast<size_t>(engine.model().config().hidden);
  std::vector<std::vector<float>> rows;
  engine.prefill(
      sequence, ids, nullptr, nullptr,
      [&](int64_t, std::span<const float> chunk) {
        for (size_t row = 0; row < chunk.size() / hidden; ++row) {
          const auto logits = engine.logits(chunk.subspan(row * hidden, hidden));
          rows.emplace_back(logits.begin(), logits.end());
        }
      },
      nullptr);
  return rows;
}

void check_greedy(Engine& engine, Sequence& sequence, std::vector<float> logits, const Json& info,
                  const std::string& name, Tally& tally) {
  const auto greedy = info.at("greedy").get<std::vector<int32_t>>();
  const auto margin = info.at("greedy_margin").get<std::vector<double>>();
  for (size_t i = 0; i < greedy.size(); ++i) {
    // Below twice the logit tolerance either token may win, and the continuations part.
    if (margin[i] < 2 * kLogitTolerance) return;
    const int32_t token = arg_max(logits);
    if (!tally.check(token == greedy[i], name,
                     fmt::format("greedy token {}: {} instead of {}", i, token, greedy[i])))
      return;
    const ForwardItem item{.sequence = &sequence, .tokens = std::span(&token, 1)};
    const auto hidden = engine.forward(std::span(&item, 1), {.phase = Phase::kDecode});
    const auto next = engine.logits(hidden);
    logits.assign(next.begin(), next.end());
  }
}

}  // namespace

void run_dense(const std::string& golden_dir, Tally& tally) {
  const std::string folder = golden_dir + "/dense/";
  for (const std::string& name : cases_in(folder, ".ids.npy")) {
    const Json info = load_json(folder + name + ".json");
    const auto ids = load_ints(folder + name + ".ids.npy").values;
    const auto expected_nll = load_floats(folder + name + ".nll.npy").values;
    const auto engine = make_engine(static_cast<int64_t>(ids.size()) + 64);
    const auto sequence = engine->make_sequence();
    const auto rows = all_logits(*engine, *sequence, ids);
    if (!tally.check(rows.size() == ids.size(), name,
                     fmt::format("{} rows for {} ids", rows.size(), ids.size())))
      continue;

    double sum = 0, worst = 0, expected_sum = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const double nll = negative_log_likelihood(rows[i], ids[i + 1]);
      sum += nll;
      expected_sum += static_cast<double>(expected_nll[i]);
      worst = std::max(worst, std::abs(nll - static_cast<double>(expected_nll[i])));
    }
    const double count = static_cast<double>(ids.size() - 1);
    const double difference = std::abs(sum - expected_sum) / count;
    tally.check(difference <= kMeanNllTolerance, name,
                fmt::format("mean NLL off by {:.2e} (worst token {:.2e})", difference, worst));

    const auto top_ids = load_ints(folder + name + ".top20_ids.npy");
    const auto top_logits = load_floats(folder + name + ".top20_logits.npy");
    const auto positions = info.at("positions").get<std::vector<size_t>>();
    const size_t per_row = static_cast<size_t>(top_ids.shape[1]);
    for (size_t p = 0; p < positions.size(); ++p) {
      for (size_t i = 0; i < per_row; ++i) {
        const int32_t id = top_ids.values[p * per_row + i];
        const double got = rows[positions[p]][static_cast<size_t>(id)];
        const double expected = top_logits.values[p * per_row + i];
        tally.check(std::abs(got - expected) <= kLogitTolerance, name,
                    fmt::format("position {}, id {}: logit {:.5f} instead of {:.5f}", positions[p], id, got,
                                expected));
      }
    }
    check_greedy(*engine, *sequence, rows.back(), info, name, tally);
    tally.ran(fmt::format("{} (mean NLL off by {:.1e}, worst token {:.1e})", name, difference, worst));
  }
}

}  // namespace kascade::golden
