// SPDX-License-Identifier: Apache-2.0
// Oracle top-k: every layer selects for itself, for each query and query head, in both phases. An upper bound
// on quality; nothing is saved.
#include <fmt/format.h>

#include "base/check.h"
#include "policy/policy_factory.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

class OracleTopk final : public Policy {
 public:
  OracleTopk(const PolicyRequest& request, bool dense_layer0)
      : name_(request.name), dense_layer0_(dense_layer0) {
    const PolicyOptions& options = request.options;
    const int tile = options.tile.value_or(1);
    require<BadArgument>(tile == 1, "tile: expected 1 ({} selects per query), got {}", name_, tile);
    require<BadArgument>(!options.rolling.value_or(false),
                         "rolling: expected off ({} takes its percentage of the whole length), got on",
                         name_);
    budget_ = Budget{.floor = options.floor.value_or(5),
                     .sinks = options.sinks.value_or(0),
                     .recent = options.recent.value_or(0),
                     .own_tile = OwnTile::kCandidate,
                     .tile = 1,
                     .rolling = false};
    if (options.percent) budget_.percent_hundredths = percent_to_hundredths(*options.percent);
  }

  const std::string& name() const override { return name_; }
  std::string describe() const override {
    return fmt::format("{}: {}, tile 1", name_, describe_budget(budget_));
  }

  LayerRule rule(int layer, Phase phase) const override {
    LayerRule rule;
    if (layer == 0 && dense_layer0_) return rule;
    rule.role = Role::kAnchor;
    rule.set_owner = SetOwner::kQueryHead;
    rule.tile = 1;
    rule.tile_rule = phase == Phase::kPrefill ? TileRule::kAligned : TileRule::kStep;
    rule.budget = budget_;
    return rule;
  }

 private:
  std::string name_;
  bool dense_layer0_;
  Budget budget_;
};

}  // namespace

std::shared_ptr<const Policy> make_oracle_topk(const PolicyRequest& request) {
  return std::make_shared<OracleTopk>(request, false);
}

std::shared_ptr<const Policy> make_oracle_topk_dense_layer0(const PolicyRequest& request) {
  return std::make_shared<OracleTopk>(request, true);
}

}  // namespace kascade
