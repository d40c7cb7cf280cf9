// SPDX-License-Identifier: Apache-2.0
// A policy says what every layer does in every phase: dense, select, or reuse; for whom, in which unit, with
// what budget. All attention methods of the comparison set sit behind this interface (DESIGN.md "A policy").
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kascade/attention.h"
#include "kascade/budget.h"
#include "kascade/plan.h"

namespace kascade {

enum class Phase : uint8_t {
  kPrefill,  // tiles of query rows
  kDecode,   // one step of each sequence, 1..8 rows
  kRows,     // teacher-forced rows, each deciding for itself as if decoded alone (one-pass evaluation)
};

/// What one layer does in one phase.
struct LayerRule {
  Role role = Role::kDense;
  TileRule tile_rule = TileRule::kAligned;
  SetOwner set_owner = SetOwner::kKvHead;
  int32_t tile = 32;
  Budget budget;
  // The policy fills the index sets itself (PolicyState::select) from its own scores. role is then kReuse
  // (this layer attends to them, and so may the reuse layers after it) or kDense (dense output; they are for
  // the layers after it, and select runs once attention is done). tile_rule, tile, set_owner and budget give
  // the sets' shape; the budget bounds their members.
  bool selects_itself = false;
  bool needs_lse = false;  // the state reads params.lse in select (of a dense layer) or in attended
  const int32_t* head_map = nullptr;  // reuse: [G], lives as long as the policy; null = identity
  const uint8_t* needed = nullptr;    // layer0: [G], as above; null = all
};

/// What a policy keeps for one sequence besides K and V: page bounds, compact keys, accumulated scores, ...
/// One object a sequence; the engine calls it in the order of the layers, every call with a batch of that
/// sequence alone. A state that is made for a sequence with keys already in the cache hears of them in its
/// first appended. Teacher-forced rows (kRows) are appended, selected for and attended one by one, so that no
/// row hears of a later one. The policy outlives the sequences that run it.
class PolicyState {
 public:
  virtual ~PolicyState() = default;
  /// Keys [begin, end) of this sequence were appended in layer; params views the cache and the new rows'
  /// queries.
  virtual void appended(int layer, const AttentionParams& params, int64_t begin, int64_t end) = 0;
  /// Fills params.positions and params.counts for a rule with selects_itself.
  virtual void select(int layer, Phase phase, const AttentionParams& params) = 0;
  /// After attention of a layer: corrections of params.out such as a mean-value term, or observing (eviction
  /// scores).
  virtual void attended(int layer, Phase phase, const AttentionParams& params) = 0;
  /// The sequence was cut back to length keys.
  virtual void truncated(int64_t length) = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual const std::string& name() const = 0;
  /// One line naming every setting: policy, preset, percent, floor, tile, sinks, recent, rolling, anchors.
  virtual std::string describe() const = 0;
  virtual LayerRule rule(int layer, Phase phase) const = 0;
  /// Null when K and V are all the policy needs.
  virtual std::unique_ptr<PolicyState> make_state() const { return nullptr; }
};

/// Settings of --policy; unset options keep what the preset says.
struct PolicyOptions {
  BudgetPreset budget = BudgetPreset::kDefault;
  std::optional<double> percent{};  // (0, 100]; presets say 10
  std::optional<int> floor{};       // >= 0
  std::optional<int> tile{};        // 1..128
  std::optional<int> sinks{};       // >= 0
  std::optional<int> recent{};      // >= 0
  std::optional<bool> rolling{};
  std::vector<int>
      anchors{};  // replaces the plan's anchors; its head map then needs a plan of the same anchors
};

struct PolicyInfo {
  const char* name;
  const char* summary;
  bool needs_plan;
};

/// Every policy of this build, as listed in policies.inc.
std::span<const PolicyInfo> policies();

/// Builds a policy for a model's shape. plan may be null where the policy needs none. Throws BadArgument
/// naming the option (unknown name, percent outside (0, 100], tile outside 1..128, a plan that is missing).
std::shared_ptr<const Policy> make_policy(const std::string& name, const PolicyOptions& options,
                                          const ModelIdentity& model, const Plan* plan);

}  // namespace kascade
