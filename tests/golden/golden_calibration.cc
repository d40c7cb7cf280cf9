// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "eval/calibration_statistics.h"
#include "golden.h"
#include "kascade/calibrate.h"

namespace kascade::golden {
namespace {

// The stored noise floor, fp64 against fp32: 1.7e-6 in S_min, 3e-7 in S_mean, 1.3e-7 in importance.
constexpr double kSimilarityTolerance = 1e-4;
constexpr double kImportanceTolerance = 1e-5;
// Below these stored gaps two choices are a tie to rounding.
constexpr double kAnchorGap = 1e-5;
constexpr double kHeadMapGap = 1e-4;

double worst_difference(const std::vector<float>& a, const float* b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return worst;
}

void check_plans(const StatisticsSet& set, const Json& plans, const std::string& name, Tally& tally) {
  const std::vector<double> importance = set.importance();
  for (const auto& [aggregation, by_count] : plans.items()) {
    const HeadSimilarity similarity = set.similarity(aggregation_from_name(aggregation));
    const LayerSimilarity layers = layer_similarity(similarity);
    for (const auto& [count, stored] : by_count.items()) {
      const std::string where = fmt::format("{} {} M={}", name, aggregation, count);
      const auto anchors = stored.at("anchors").get<std::vector<int>>();
      const double gap = stored.at("score").get<double>() - stored.at("runner_up_score").get<double>();
      const AnchorChoice choice = choose_anchors(layers, importance, std::stoi(count));
      if (gap > kAnchorGap) {
        tally.check(choice.anchors == anchors, where,
                    fmt::format("anchors {} instead of {}", choice.anchors, anchors));
      }
      // The maps are compared on the stored anchors, so that a tie between sets hides nothing.
      const auto map = head_map(similarity, anchors);
      const auto stored_map = stored.at("head_map").get<std::vector<std::vector<int>>>();
      const auto gaps = stored.at("head_map_gap_top1_top2").get<std::vector<std::vector<double>>>();
      for (size_t layer = 0; layer < map.size(); ++layer) {
        for (size_t head = 0; head < map[layer].size(); ++head) {
          if (gaps[layer][head] <= kHeadMapGap) continue;
          tally.check(map[layer][head] == stored_map[layer][head], where,
                      fmt::format("layer {} head {} maps to {} instead of {}", layer, head, map[layer][head],
                                  stored_map[layer][head]));
        }
      }
    }
  }
}

}  // namespace

void run_calibration(const std::string& golden_dir, Tally& tally) {
  const std::string folder = golden_dir + "/calibration/";
  for (const std::string& forward : folders_in(folder)) {
    if (!tally.check(forward == "dense_forward" || forward == "sparse_forward", forward,
                     "unknown forward mode"))
      continue;
    const std::string base = folder + forward + "/";
    const Json prompts = load_json(base + "prompts.json");
    const Array<float> s_min = load_floats(base + "S_min.npy"), s_mean = load_floats(base + "S_mean.npy");
    const Array<float> importance = load_floats(base + "importance.npy");
    const ModelConfig& config = reference_model()->config();
    StatisticsSet set(config.layers, config.kv_heads, forward);
    const size_t per_prompt = s_min.values.size() / prompts.size();
    std::vector<double> mean_of_means(per_prompt, 0.0);
    for (size_t p = 0; p < prompts.size(); ++p) {
      const std::string name = fmt::format("{}/prompt_{:02}", forward, p);
      const auto ids = load_ints(fmt::format("{}prompt_{:02}.ids.npy", folder, p)).values;
      const auto engine = make_engine(static_cast<int64_t>(ids.size()) + 64);
      StatisticsSettings settings;
      settings.sparse_forward = forward == "sparse_forward";
      settings.published_own_mass = true;
      const CollectedPrompt collected = collect_statistics(*engine, ids, settings);
      const PromptStatistics& statistics = collected.statistics;
      tally.check(collected.generated == prompts[p].at("generated_ids").get<std::vector<int32_t>>(), name,
                  fmt::format("generated {}", collected.generated));
      tally.check(statistics.tiles == prompts[p].at("n_tiles").get<int64_t>(), name,
                  fmt::format("{} tiles instead of {}", statistics.tiles, prompts[p].at("n_tiles").dump()));
      if (!tally.check(statistics.similarity_min.size() == per_prompt, name,
                       "another number of similarities"))
        continue;
      const double min_off =
          worst_difference(statistics.similarity_min, s_min.values.data() + p * per_prompt);
      tally.check(min_off <= kSimilarityTolerance, name, fmt::format("S_min off by {:.2e}", min_off));
      if (static_cast<size_t>(s_mean.shape[0]) == prompts.size()) {
        const double mean_off =
            worst_difference(statistics.similarity_mean, s_mean.values.data() + p * per_prompt);
        tally.check(mean_off <= kSimilarityTolerance, name, fmt::format("S_mean off by {:.2e}", mean_off));
      }
      for (size_t i = 0; i < per_prompt; ++i)
        mean_of_means[i] += static_cast<double>(statistics.similarity_mean[i]);
      const double importance_off = worst_difference(
          statistics.importance, importance.values.data() + p * statistics.importance.size());
      tally.check(importance_off <= kImportanceTolerance, name,
                  fmt::format("importance off by {:.2e}", importance_off));
      set.insert(static_cast<int64_t>(p), statistics);
      tally.ran(fmt::format("{} (S_min off by {:.1e}, importance {:.1e})", name, min_off, importance_off));
    }
    if (static_cast<size_t>(s_mean.shape[0]) == 1) {
      double worst = 0;
      for (size_t i = 0; i < per_prompt; ++i) {
        worst = std::max(worst, std::abs(mean_of_means[i] / static_cast<double>(prompts.size()) -
                                         static_cast<double>(s_mean.values[i])));
      }
      tally.check(worst <= kSimilarityTolerance, forward,
                  fmt::format("S_mean over the prompts off by {:.2e}", worst));
    }
    check_plans(set, load_json(base + "plans.json"), forward, tally);
    tally.ran(forward + "/plans");
  }
}

}  // namespace kascade::golden
