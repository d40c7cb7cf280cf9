// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/check.h"
#include "base/text.h"
#include "kascade/plan.h"

namespace kascade {
namespace {

constexpr size_t kMaxMapLines = 16;

class Differences {
 public:
  template <class T>
  void compare(std::string_view field, const T& a, const T& b) {
    if (a != b) lines.push_back(fmt::format("{}: {} -> {}", field, shown(a), shown(b)));
  }
  std::vector<std::string> lines;

 private:
  template <class T>
  static std::string shown(const T& value) {
    return fmt::format("{}", value);
  }
  static std::string shown(const std::string& value) { return value.empty() ? "none" : quote_text(value); }
  static std::string shown(bool value) { return value ? "on" : "off"; }
  static std::string shown(const std::vector<int>& value) { return fmt::format("{}", fmt::join(value, ",")); }
};

// The largest |a - b| of two tables, or a line that says which side has none.
void compare_tables(const char* field, const std::vector<std::vector<double>>& a,
                    const std::vector<std::vector<double>>& b, std::vector<std::string>& lines) {
  if (a == b) return;
  bool same_shape = a.size() == b.size();
  double largest = 0;
  for (size_t i = 0; same_shape && i < a.size(); ++i) {
    same_shape = a[i].size() == b[i].size();
    for (size_t j = 0; same_shape && j < a[i].size(); ++j)
      largest = std::max(largest, std::fabs(a[i][j] - b[i][j]));
  }
  if (same_shape)
    lines.push_back(fmt::format("{}: differs by up to {:.3g}", field, largest));
  else
    lines.push_back(fmt::format("{}: of another size", field));
}

void compare_head_maps(const Plan& a, const Plan& b, std::vector<std::string>& lines) {
  if (a.head_map == b.head_map) return;
  if (a.model.layers != b.model.layers || a.model.kv_heads != b.model.kv_heads) return;  // told by the shapes
  std::vector<std::string> changed;
  for (int layer = 0; layer < a.model.layers; ++layer)
    if (a.head_map[layer] != b.head_map[layer])
      changed.push_back(fmt::format("head_map[{}]: {} -> {}", layer, fmt::join(a.head_map[layer], ","),
                                    fmt::join(b.head_map[layer], ",")));
  const size_t shown = std::min(changed.size(), kMaxMapLines);
  lines.insert(lines.end(), changed.begin(), changed.begin() + static_cast<int64_t>(shown));
  if (changed.size() > shown)
    lines.push_back(fmt::format("head_map: {} more layers differ", changed.size() - shown));
}

std::string validation_text(const Plan& plan) {
  if (!plan.validation) return "none";
  const PlanValidation& v = *plan.validation;
  return fmt::format("{} (KL {}, top-1 {}, passkey {} of dense {}, {} prompts)",
                     v.passed ? "passed" : "failed", v.kl, v.top1, v.passkey, v.passkey_dense, v.prompts);
}

std::string candidate_text(const Plan& plan, size_t i) {
  if (i >= plan.candidates.size()) return "none";
  const PlanCandidate& c = plan.candidates[i];
  return fmt::format("{} (KL {}, top-1 {}, passkey {}, objective {})", fmt::join(c.anchors, ","), c.kl,
                     c.top1, c.passkey, c.objective);
}

void compare_figures(const Plan& a, const Plan& b, std::vector<std::string>& lines) {
  const auto add = [&](const std::string& field, const std::string& left, const std::string& right) {
    if (left != right) lines.push_back(fmt::format("{}: {} -> {}", field, left, right));
  };
  for (size_t i = 0; i < std::max(a.candidates.size(), b.candidates.size()); ++i)
    add(fmt::format("candidates[{}]", i), candidate_text(a, i), candidate_text(b, i));
  add("validation", validation_text(a), validation_text(b));
}

}  // namespace

std::vector<std::string> diff_plans(const Plan& a, const Plan& b) {
  validate_plan(a);
  validate_plan(b);
  Differences d;
  d.compare("model.architecture", a.model.architecture, b.model.architecture);
  d.compare("model.layers", a.model.layers, b.model.layers);
  d.compare("model.query_heads", a.model.query_heads, b.model.query_heads);
  d.compare("model.kv_heads", a.model.kv_heads, b.model.kv_heads);
  d.compare("model.head_dim", a.model.head_dim, b.model.head_dim);
  d.compare("model.fingerprint", a.model.fingerprint, b.model.fingerprint);
  d.compare("anchors", a.anchors, b.anchors);
  compare_head_maps(a, b, d.lines);
  d.compare("settings.method", a.settings.method, b.settings.method);
  d.compare("settings.tile", a.settings.tile, b.settings.tile);
  d.compare("settings.similarity_k", a.settings.similarity_k, b.settings.similarity_k);
  d.compare("settings.aggregation", a.settings.aggregation, b.settings.aggregation);
  d.compare("settings.forward", a.settings.forward, b.settings.forward);
  d.compare("settings.importance", a.settings.importance, b.settings.importance);
  d.compare("settings.tensor_parallel", a.settings.tensor_parallel, b.settings.tensor_parallel);
  d.compare("settings.percent_hundredths", a.settings.percent_hundredths, b.settings.percent_hundredths);
  d.compare("settings.budget", a.settings.budget, b.settings.budget);
  d.compare("data.name", a.data.name, b.data.name);
  d.compare("data.prompts", a.data.prompts, b.data.prompts);
  d.compare("data.tokens", a.data.tokens, b.data.tokens);
  d.compare("data.hash", a.data.hash, b.data.hash);
  d.compare("objective", a.objective, b.objective);
  compare_figures(a, b, d.lines);
  compare_tables("importance", {a.importance}, {b.importance}, d.lines);
  compare_tables("similarity", a.similarity, b.similarity, d.lines);
  compare_tables("retained_mass", {a.retained_mass}, {b.retained_mass}, d.lines);
  d.compare("tool_version", a.tool_version, b.tool_version);
  return d.lines;
}

}  // namespace kascade
