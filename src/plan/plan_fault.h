// SPDX-License-Identifier: Apache-2.0
// The one list of what makes a plan valid, shared by callers' plans (BadArgument) and plan files (BadFile).
#pragma once

#include <optional>
#include <string>

#include "kascade/plan.h"

namespace kascade {

// Far above any model, low enough that sizes built from them cannot overflow.
inline constexpr int kMaxPlanLayers = 1024;
inline constexpr int kMaxPlanHeads = 65536;
inline constexpr int kMaxPlanHeadDim = 65536;

/// "field 'F': expected E, got G" for the first fault of the plan, or nothing.
std::optional<std::string> plan_fault(const Plan& plan);

/// The same for a list of anchors of a model of `layers` layers; name is the field's.
std::optional<std::string> anchors_fault(const std::vector<int>& anchors, int layers,
                                         const std::string& name);

}  // namespace kascade
