// SPDX-License-Identifier: Apache-2.0
// Kascade and its variants (docs/method.md, "Selection"): anchor layers select, the others reuse.
#include <fmt/ranges.h>

#include <numeric>
#include <vector>

#include "base/check.h"
#include "policy/policy_factory.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

constexpr int kPublishedTile = 32;

/// How the variants differ.
struct Variant {
  SetOwner set_owner = SetOwner::kKvHead;
  bool head_map = true;  // reuse layers read through the plan's head map; otherwise through the identity
  bool dense_prefill = false;  // decode steps are one-row tiles then, so nothing is charged for an own tile
};

class Kascade final : public Policy {
 public:
  Kascade(const PolicyRequest& request, const Plan& plan, const Variant& variant)
      : name_(request.name),
        variant_(variant),
        preset_(budget_preset_name(request.options.budget)),
        anchors_(plan.anchors) {
    tile_ = variant.dense_prefill ? 1 : request.options.tile.value_or(plan.settings.tile);
    budgets_ = preset_budgets(request.options, tile_);
    const auto layers = static_cast<size_t>(request.model.layers),
               heads = static_cast<size_t>(request.model.kv_heads);
    roles_.resize(layers);
    for (int layer = 0; layer < request.model.layers; ++layer)
      roles_[layer] = plan.is_anchor(layer) ? Role::kAnchor : Role::kReuse;
    // Layer 0 is dense either way: it selects only where a reuse layer reads it before the next anchor.
    const bool layer0_is_read = layers > 1 && roles_[1] == Role::kReuse;
    roles_[0] = layer0_is_read ? Role::kLayer0 : Role::kDense;
    if (!variant.head_map) return;
    needed_ = plan.needed_heads(0);
    head_map_.reserve(layers * heads);
    for (const std::vector<int>& row : plan.head_map)
      head_map_.insert(head_map_.end(), row.begin(), row.end());
    kv_heads_ = heads;
  }

  const std::string& name() const override { return name_; }

  std::string describe() const override {
    const Budget& shown = variant_.dense_prefill ? budgets_.decode : budgets_.prefill;
    return fmt::format("{}: budget {}, {}, tile {}, anchors {}", name_, preset_, describe_budget(shown),
                       tile_, fmt::join(anchors_, ","));
  }

  LayerRule rule(int layer, Phase phase) const override {
    LayerRule rule;
    if (phase == Phase::kPrefill && variant_.dense_prefill) return rule;
    rule.role = roles_[layer];
    rule.set_owner = variant_.set_owner;
    rule.tile = tile_;
    rule.tile_rule = phase == Phase::kPrefill ? TileRule::kAligned : TileRule::kStep;
    rule.budget = phase == Phase::kPrefill ? budgets_.prefill : budgets_.decode;
    if (!head_map_.empty()) {
      if (rule.role == Role::kReuse) rule.head_map = head_map_.data() + layer * kv_heads_;
      if (rule.role == Role::kLayer0) rule.needed = needed_.data();
    }
    return rule;
  }

 private:
  std::string name_;
  Variant variant_;
  const char* preset_;
  std::vector<int> anchors_;
  int tile_ = 0;
  PresetBudgets budgets_;
  std::vector<Role> roles_;  // [layers]
  size_t kv_heads_ = 0;
  std::vector<int32_t> head_map_;  // [layers, G]; empty = identity
  std::vector<uint8_t> needed_;    // [G] of layer 0
};

/// The request's plan, or one of the anchors option alone where no head map is needed.
Plan plan_of(const PolicyRequest& request, const Variant& variant) {
  const std::vector<int>& anchors = request.options.anchors;
  if (request.plan != nullptr && (anchors.empty() || anchors == request.plan->anchors)) return *request.plan;
  const bool reads_map = variant.head_map && anchors.size() != static_cast<size_t>(request.model.layers);
  if (request.plan == nullptr && (anchors.empty() || reads_map))
    throw_error<BadArgument>(
        "plan: expected one ({} needs {}), got none", request.name,
        variant.head_map ? "its head map" : "its anchors, unless the option anchors is given");
  if (reads_map)
    throw_error<BadArgument>("anchors: expected {}, those of the plan that the head map was made for, got {}",
                             fmt::join(request.plan->anchors, ","), fmt::join(anchors, ","));
  Plan plan;
  plan.model = request.model;
  plan.anchors = anchors;
  plan.settings.tile = request.plan != nullptr ? request.plan->settings.tile : kPublishedTile;
  std::vector<int> identity(static_cast<size_t>(request.model.kv_heads));
  std::iota(identity.begin(), identity.end(), 0);
  plan.head_map.assign(static_cast<size_t>(request.model.layers), identity);
  return plan;
}

std::shared_ptr<const Policy> make_variant(const PolicyRequest& request, const Variant& variant) {
  return std::make_shared<Kascade>(request, plan_of(request, variant), variant);
}

}  // namespace

std::shared_ptr<const Policy> make_kascade(const PolicyRequest& request) { return make_variant(request, {}); }

std::shared_ptr<const Policy> make_kascade_no_remap(const PolicyRequest& request) {
  return make_variant(request, {.head_map = false});
}

std::shared_ptr<const Policy> make_kascade_pooled(const PolicyRequest& request) {
  return make_variant(request, {.set_owner = SetOwner::kAllHeads, .head_map = false});
}

std::shared_ptr<const Policy> make_kascade_decode_only(const PolicyRequest& request) {
  return make_variant(request, {.dense_prefill = true});
}

}  // namespace kascade
