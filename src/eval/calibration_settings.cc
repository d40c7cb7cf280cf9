// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_settings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "base/check.h"
#include "base/text.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

constexpr int kPublishedAnchors = 5;
constexpr int kPublishedSimilarityK = 32;
constexpr int kPublishedTile = 32;

void require_choice(const char* option, const std::string& value,
                    std::initializer_list<std::string_view> choices) {
  for (const std::string_view choice : choices)
    if (value == choice) return;
  throw_error<BadArgument>("{}: expected one of {}, got {}", option, fmt::join(choices, ", "),
                           quote_text(value));
}

void require_threshold(const char* option, double value, double most) {
  require<BadArgument>(value >= 0 && value <= most, "{}: expected a number in 0..{}, got {}", option, most,
                       value);
}

}  // namespace

std::string ResolvedCalibration::statistics_identity() const {
  const auto budget = [](const Budget& b) {
    return fmt::format("{}/{}/{}/{}/{}/{}/{}/{}/{}/{}/{}/{}", b.percent_hundredths, b.round_up, b.floor,
                       b.round_to, b.sinks, b.recent, b.forced_charged, static_cast<int>(b.own_tile), b.tile,
                       b.rolling, b.rolling_min_rows, b.rolling_capped);
  };
  std::string identity = fmt::format(
      "tile {}, similarity_k {}, forward {}, new tokens {}, published own mass {}", statistics.tile,
      statistics.similarity_k, settings.forward, statistics.max_new_tokens, statistics.published_own_mass);
  if (statistics.similarity_k == 0)
    identity +=
        fmt::format(", budget {}, decode {}", budget(statistics.budget), budget(statistics.decode_budget));
  return identity;
}

ResolvedCalibration resolve_calibration(const CalibrateOptions& options, const ModelConfig& model) {
  require_choice("preset", options.preset, {"default", "paper"});
  const bool paper = options.preset == "paper";
  ResolvedCalibration resolved;
  CalibrationSettings& settings = resolved.settings;
  settings.method = options.method.value_or(paper ? "published" : "measured");
  require_choice("method", settings.method, {"published", "budget", "measured"});
  const bool published = settings.method == "published";
  settings.aggregation = options.aggregation.value_or("min");
  require_choice("aggregation", settings.aggregation, {"min", "mean"});
  settings.forward = options.forward.value_or(paper ? "sparse" : "dense");
  require_choice("forward", settings.forward, {"dense", "sparse"});
  settings.importance = options.importance.value_or(published);
  settings.tile = options.tile.value_or(kPublishedTile);
  require<BadArgument>(settings.tile >= 1 && settings.tile <= 128, "tile: expected 1..128, got {}",
                       settings.tile);
  require<BadArgument>(!options.similarity_k || *options.similarity_k >= 1,
                       "similarity-k: expected at least 1, got {}", options.similarity_k.value_or(0));
  // 0 = the run-time budget: sets as large as those that the plan will use.
  settings.similarity_k =
      options.similarity_k.value_or(settings.method == "budget" ? 0 : kPublishedSimilarityK);
  require<BadArgument>(options.tensor_parallel >= 1 && (model.kv_heads % options.tensor_parallel == 0 ||
                                                        options.tensor_parallel % model.kv_heads == 0),
                       "tensor-parallel: expected a divisor or a multiple of the {} KV heads, got {}",
                       model.kv_heads, options.tensor_parallel);
  settings.tensor_parallel = options.tensor_parallel;
  settings.percent_hundredths = percent_to_hundredths(options.percent);
  settings.budget = budget_preset_name(options.budget);

  const bool is_auto = options.anchors_auto || (!options.anchors && !paper);
  resolved.anchors = is_auto ? 0 : options.anchors.value_or(std::min(kPublishedAnchors, model.layers));
  require<BadArgument>(is_auto || (resolved.anchors >= 1 && resolved.anchors <= model.layers),
                       "anchors: expected 1..{} (the model's layers) or auto, got {}", model.layers,
                       resolved.anchors);
  require_threshold("max-kl", options.thresholds.max_kl, 1e6);
  require_threshold("min-top1", options.thresholds.min_top1, 1);
  require_threshold("max-passkey-loss", options.thresholds.max_passkey_loss, 1);
  require<BadArgument>(options.threads >= 0, "threads: expected at least 0, got {}", options.threads);

  resolved.aggregation = aggregation_from_name(settings.aggregation);
  resolved.compares = settings.method == "measured" || is_auto;
  resolved.statistics.tile = settings.tile;
  resolved.statistics.similarity_k = settings.similarity_k;
  resolved.statistics.sparse_forward = settings.forward == "sparse";
  resolved.statistics.published_own_mass = paper;
  if (settings.similarity_k == 0) {
    const PolicyOptions run_time{.budget = options.budget, .percent = options.percent};
    const PresetBudgets budgets = preset_budgets(run_time, settings.tile);
    resolved.statistics.budget = budgets.prefill;
    resolved.statistics.decode_budget = budgets.decode;
  }
  return resolved;
}

}  // namespace kascade
