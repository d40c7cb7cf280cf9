// SPDX-License-Identifier: Apache-2.0
#include "kascade/policy.h"

#include <fmt/ranges.h>

#include <array>

#include "base/check.h"
#include "base/text.h"
#include "policy/policy_factory.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

constexpr int kMaxTile = 128;

// The names and their factories, in the same order.
constexpr std::array kPolicies = {
#define KASCADE_POLICY(name, summary, needs_plan, make) PolicyInfo{name, summary, needs_plan},
#include "policy/policies.inc"
#undef KASCADE_POLICY
};
constexpr std::array<PolicyFactory, kPolicies.size()> kFactories = {
#define KASCADE_POLICY(name, summary, needs_plan, make) make,
#include "policy/policies.inc"
#undef KASCADE_POLICY
};

void check_at_least_zero(const char* option, const std::optional<int>& value) {
  if (value) require<BadArgument>(*value >= 0, "{}: expected 0 or more, got {}", option, *value);
}

void check_options(const PolicyOptions& options, const ModelIdentity& model) {
  budget_preset_name(options.budget);
  if (options.percent) percent_to_hundredths(*options.percent);
  check_at_least_zero("floor", options.floor);
  check_at_least_zero("sinks", options.sinks);
  check_at_least_zero("recent", options.recent);
  if (options.tile)
    require<BadArgument>(*options.tile >= 1 && *options.tile <= kMaxTile, "tile: expected 1..{}, got {}",
                         kMaxTile, *options.tile);
  for (size_t i = 0; i < options.anchors.size(); ++i) {
    const int anchor = options.anchors[i];
    const int least = i == 0 ? 0 : options.anchors[i - 1] + 1;
    const int most = i == 0 ? 0 : model.layers - 1;
    require<BadArgument>(anchor >= least && anchor <= most,
                         "anchors: expected ascending layers of 0..{} that start with 0, got {}",
                         model.layers - 1, fmt::join(options.anchors, ","));
  }
}

std::string policy_names() {
  std::string names;
  for (const PolicyInfo& info : kPolicies) names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

}  // namespace

std::span<const PolicyInfo> policies() { return kPolicies; }

std::shared_ptr<const Policy> make_policy(const std::string& name, const PolicyOptions& options,
                                          const ModelIdentity& model, const Plan* plan) {
  for (size_t i = 0; i < kPolicies.size(); ++i) {
    if (name != kPolicies[i].name) continue;
    check_options(options, model);
    if (plan != nullptr) {
      validate_plan(*plan);
      // Shapes only: whether another fingerprint is allowed is for whoever opened both files to say.
      check_plan_model(*plan, model, true);
    }
    return kFactories[i](PolicyRequest{name, options, model, plan});
  }
  throw_error<BadArgument>("policy: expected one of {}, got {}", policy_names(), quote_text(name));
}

}  // namespace kascade
