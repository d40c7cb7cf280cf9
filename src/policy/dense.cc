// SPDX-License-Identifier: Apache-2.0
// Dense attention: every layer attends to every key.
#include "policy/policy_factory.h"

namespace kascade {
namespace {

class Dense final : public Policy {
 public:
  const std::string& name() const override { return name_; }
  std::string describe() const override { return name_; }
  LayerRule rule(int, Phase phase) const override {
    LayerRule rule;
    // Steps have too few rows for the kernels of prefill.
    if (phase == Phase::kDecode) rule.tile_rule = TileRule::kStep;
    return rule;
  }

 private:
  std::string name_ = "dense";
};

}  // namespace

std::shared_ptr<const Policy> make_dense(const PolicyRequest&) { return std::make_shared<Dense>(); }

}  // namespace kascade
