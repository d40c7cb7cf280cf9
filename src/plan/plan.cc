// SPDX-License-Identifier: Apache-2.0
#include "kascade/plan.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string_view>

#include "base/check.h"
#include "base/text.h"
#include "plan/plan_fault.h"

namespace kascade {
namespace {

template <class Expected, class Actual>
std::string fault(const std::string& field, const Expected& expected, const Actual& actual) {
  return fmt::format("field '{}': expected {}, got {}", field, expected, actual);
}

std::optional<std::string> range_fault(const std::string& field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return std::nullopt;
  return fault(field, fmt::format("an integer in {}..{}", min, max), value);
}

std::optional<std::string> choice_fault(const std::string& field, const std::string& value,
                                        std::initializer_list<std::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return std::nullopt;
  return fault(field, fmt::format("one of {}", fmt::join(choices, ", ")), quote_text(value));
}

std::optional<std::string> number_fault(const std::string& field, double value) {
  if (std::isfinite(value)) return std::nullopt;
  return fault(field, "a finite number", value);
}

std::optional<std::string> share_fault(const std::string& field, double value) {
  if (value >= 0 && value <= 1) return std::nullopt;  // false for NaN
  return fault(field, "a share in 0..1", value);
}

// Hashes are empty (unknown) or 16 lower-case hexadecimal digits.
std::optional<std::string> hash_fault(const std::string& field, const std::string& value) {
  const bool hex = std::all_of(value.begin(), value.end(),
                               [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (value.empty() || (hex && value.size() == 16)) return std::nullopt;
  return fault(field, "16 lower-case hexadecimal digits or nothing", quote_text(value));
}

std::optional<std::string> per_layer_fault(const std::string& field, const std::vector<double>& values,
                                           int layers) {
  if (values.empty()) return std::nullopt;
  if (values.size() != static_cast<size_t>(layers))
    return fault(field, fmt::format("{} numbers (one a layer) or none", layers), values.size());
  for (size_t i = 0; i < values.size(); ++i)
    if (auto f = number_fault(fmt::format("{}[{}]", field, i), values[i])) return f;
  return std::nullopt;
}

std::optional<std::string> model_fault(const ModelIdentity& model) {
  if (auto f = range_fault("model.layers", model.layers, 1, kMaxPlanLayers)) return f;
  if (auto f = range_fault("model.kv_heads", model.kv_heads, 1, kMaxPlanHeads)) return f;
  if (auto f = range_fault("model.query_heads", model.query_heads, 0, kMaxPlanHeads)) return f;
  if (auto f = range_fault("model.head_dim", model.head_dim, 0, kMaxPlanHeadDim)) return f;
  if (model.query_heads % model.kv_heads != 0)
    return fault("model.query_heads", fmt::format("a multiple of the {} KV heads", model.kv_heads),
                 model.query_heads);
  return hash_fault("model.fingerprint", model.fingerprint);
}

std::optional<std::string> settings_fault(const CalibrationSettings& settings, int kv_heads) {
  if (auto f =
          choice_fault("settings.method", settings.method, {"published", "budget", "measured", "imported"}))
    return f;
  if (auto f = range_fault("settings.tile", settings.tile, 1, 128)) return f;
  if (auto f = range_fault("settings.similarity_k", settings.similarity_k, 0, INT32_MAX)) return f;
  if (auto f = choice_fault("settings.aggregation", settings.aggregation, {"min", "mean"})) return f;
  if (auto f = choice_fault("settings.forward", settings.forward, {"dense", "sparse"})) return f;
  if (auto f = range_fault("settings.tensor_parallel", settings.tensor_parallel, 1, kMaxPlanHeads)) return f;
  if (kv_heads % settings.tensor_parallel != 0 && settings.tensor_parallel % kv_heads != 0)
    return fault("settings.tensor_parallel", fmt::format("a divisor or a multiple of {} KV heads", kv_heads),
                 settings.tensor_parallel);
  if (auto f = range_fault("settings.percent_hundredths", settings.percent_hundredths, 1, 10000)) return f;
  return choice_fault("settings.budget", settings.budget, {"default", "paper", "kernel"});
}

std::optional<std::string> head_map_fault(const Plan& plan) {
  const int kv_heads = plan.model.kv_heads;
  if (plan.head_map.size() != static_cast<size_t>(plan.model.layers))
    return fault("head_map", fmt::format("{} rows (model.layers)", plan.model.layers), plan.head_map.size());
  // Heads of one tensor-parallel rank; with more ranks than KV heads each rank holds one.
  const int rank_heads = std::max(1, kv_heads / plan.settings.tensor_parallel);
  for (int layer = 0; layer < plan.model.layers; ++layer) {
    const std::vector<int>& row = plan.head_map[layer];
    if (row.size() != static_cast<size_t>(kv_heads))
      return fault(fmt::format("head_map[{}]", layer), fmt::format("{} entries (model.kv_heads)", kv_heads),
                   row.size());
    const bool anchor = plan.is_anchor(layer);
    for (int head = 0; head < kv_heads; ++head) {
      const int source = row[head];
      const bool inside = source >= 0 && source < kv_heads;
      const bool same_rank = inside && source / rank_heads == head / rank_heads;
      if (inside && same_rank && (!anchor || source == head)) continue;
      const std::string field = fmt::format("head_map[{}][{}]", layer, head);
      if (!inside) return range_fault(field, source, 0, kv_heads - 1);
      if (anchor)
        return fault(field, fmt::format("{} (layer {} is an anchor, which maps to itself)", head, layer),
                     source);
      return fault(field,
                   fmt::format("a KV head of rank {} (settings.tensor_parallel {})", head / rank_heads,
                               plan.settings.tensor_parallel),
                   source);
    }
  }
  return std::nullopt;
}

std::optional<std::string> similarity_fault(const Plan& plan) {
  if (plan.similarity.empty()) return std::nullopt;
  const size_t layers = static_cast<size_t>(plan.model.layers);
  if (plan.similarity.size() != layers)
    return fault("similarity", fmt::format("{} rows (model.layers) or none", layers), plan.similarity.size());
  for (size_t i = 0; i < layers; ++i) {
    const std::vector<double>& row = plan.similarity[i];
    if (row.size() != layers)
      return fault(fmt::format("similarity[{}]", i), fmt::format("{} numbers (model.layers)", layers),
                   row.size());
    for (size_t j = 0; j < layers; ++j)
      if (!std::isfinite(row[j])) return number_fault(fmt::format("similarity[{}][{}]", i, j), row[j]);
  }
  return std::nullopt;
}

std::optional<std::string> figures_fault(const Plan& plan) {
  for (size_t i = 0; i < plan.candidates.size(); ++i) {
    const PlanCandidate& candidate = plan.candidates[i];
    const std::string field = fmt::format("candidates[{}]", i);
    if (auto f = anchors_fault(candidate.anchors, plan.model.layers, field + ".anchors")) return f;
    if (auto f = number_fault(field + ".kl", candidate.kl)) return f;
    if (auto f = share_fault(field + ".top1", candidate.top1)) return f;
    if (auto f = share_fault(field + ".passkey", candidate.passkey)) return f;
    if (auto f = number_fault(field + ".objective", candidate.objective)) return f;
  }
  if (!plan.validation) return std::nullopt;
  if (auto f = number_fault("validation.kl", plan.validation->kl)) return f;
  if (auto f = share_fault("validation.top1", plan.validation->top1)) return f;
  if (auto f = share_fault("validation.passkey", plan.validation->passkey)) return f;
  if (auto f = share_fault("validation.passkey_dense", plan.validation->passkey_dense)) return f;
  return range_fault("validation.prompts", plan.validation->prompts, 0, INT64_MAX);
}

void require_layer(const Plan& plan, int layer) {
  require<BadArgument>(layer >= 0 && layer < plan.model.layers, "layer: expected 0..{}, got {}",
                       plan.model.layers - 1, layer);
}

// Shapes that a plan from a bare head map leaves at 0 are unknown and fit any model.
void require_shape(const char* field, int plan, int model, bool may_be_unknown) {
  if (may_be_unknown && plan == 0) return;
  require<BadArgument>(plan == model, "plan: field 'model.{}': expected {} (this model), got {}", field,
                       model, plan);
}

std::string or_unknown(const std::string& text) { return text.empty() ? "unknown" : quote_text(text); }

}  // namespace

std::optional<std::string> anchors_fault(const std::vector<int>& anchors, int layers,
                                         const std::string& name) {
  if (anchors.empty()) return fault(name, "at least layer 0", "none");
  if (anchors[0] != 0) return fault(name + "[0]", "0 (layer 0 is the first anchor)", anchors[0]);
  for (size_t i = 1; i < anchors.size(); ++i)
    if (anchors[i] <= anchors[i - 1] || anchors[i] >= layers)
      return fault(fmt::format("{}[{}]", name, i),
                   fmt::format("a layer above {} and below {}", anchors[i - 1], layers), anchors[i]);
  return std::nullopt;
}

std::optional<std::string> plan_fault(const Plan& plan) {
  if (auto f = model_fault(plan.model)) return f;
  if (auto f = anchors_fault(plan.anchors, plan.model.layers, "anchors")) return f;
  if (auto f = settings_fault(plan.settings, plan.model.kv_heads)) return f;
  if (auto f = head_map_fault(plan)) return f;
  if (auto f = per_layer_fault("importance", plan.importance, plan.model.layers)) return f;
  if (auto f = similarity_fault(plan)) return f;
  if (auto f = per_layer_fault("retained_mass", plan.retained_mass, plan.model.layers)) return f;
  if (auto f = number_fault("objective", plan.objective)) return f;
  if (auto f = range_fault("data.prompts", plan.data.prompts, 0, INT64_MAX)) return f;
  if (auto f = range_fault("data.tokens", plan.data.tokens, 0, INT64_MAX)) return f;
  if (auto f = hash_fault("data.hash", plan.data.hash)) return f;
  return figures_fault(plan);
}

void validate_plan(const Plan& plan) {
  if (const auto f = plan_fault(plan)) throw BadArgument("plan: " + *f);
}

int Plan::source_anchor(int layer) const {
  require_layer(*this, layer);
  const auto after = std::upper_bound(anchors.begin(), anchors.end(), layer);
  require<BadArgument>(after != anchors.begin(),
                       "plan: field 'anchors': expected at least layer 0, got none");
  return *std::prev(after);
}

bool Plan::is_anchor(int layer) const { return std::binary_search(anchors.begin(), anchors.end(), layer); }

std::vector<uint8_t> Plan::needed_heads(int anchor) const {
  require<BadArgument>(is_anchor(anchor), "plan: layer {} is no anchor; anchors are {}", anchor,
                       fmt::join(anchors, ","));
  std::vector<uint8_t> needed(static_cast<size_t>(model.kv_heads), 0);
  for (int layer = anchor + 1; layer < model.layers && !is_anchor(layer); ++layer)
    for (const int head : head_map[layer]) needed[head] = 1;
  return needed;
}

std::string check_plan_model(const Plan& plan, const ModelIdentity& model, bool allow_other_model) {
  require_shape("layers", plan.model.layers, model.layers, false);
  require_shape("query_heads", plan.model.query_heads, model.query_heads, true);
  require_shape("kv_heads", plan.model.kv_heads, model.kv_heads, false);
  require_shape("head_dim", plan.model.head_dim, model.head_dim, true);

  const std::string& made_from = plan.model.fingerprint;
  if (!made_from.empty() && made_from == model.fingerprint) return {};
  const bool other_architecture = !plan.model.architecture.empty() && !model.architecture.empty() &&
                                  plan.model.architecture != model.architecture;
  std::string difference;
  if (!made_from.empty() && !model.fingerprint.empty())
    difference = fmt::format("plan: field 'model.fingerprint': expected {} (this model), got {}",
                             or_unknown(model.fingerprint), or_unknown(made_from));
  else if (other_architecture)
    difference = fmt::format("plan: field 'model.architecture': expected {} (this model), got {}",
                             or_unknown(model.architecture), or_unknown(plan.model.architecture));
  if (difference.empty()) return "plan: no model fingerprint to compare; only the shapes were checked";
  require<BadArgument>(allow_other_model,
                       "{}; the plan was made from another model (--allow-other-model uses it)", difference);
  return difference + "; the plan was made from another model";
}

}  // namespace kascade
