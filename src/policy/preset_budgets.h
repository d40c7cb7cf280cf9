// SPDX-License-Identifier: Apache-2.0
// Budget presets and the options that override them.
#pragma once

#include <cstdint>
#include <string>

#include "kascade/budget.h"
#include "kascade/policy.h"

namespace kascade {

/// The budgets of a policy with tiles of `tile` query rows in prefill.
struct PresetBudgets {
  Budget prefill;
  Budget decode;  // of a step
};

/// The preset named by options.budget, with the options that are set in place of its fields. `rolling`
/// concerns prefill, and decode under `default` alone: the published presets have no rolling decode.
PresetBudgets preset_budgets(const PolicyOptions& options, int tile);

/// percent * 100, rounded to the nearest whole hundredth. Throws BadArgument naming percent unless it is in
/// (0, 100] and at least one hundredth.
int32_t percent_to_hundredths(double percent);

/// "default", "paper", "kernel".
const char* budget_preset_name(BudgetPreset preset);

/// "percent 10, floor 128, sinks 0, recent 128, rolling off".
std::string describe_budget(const Budget& budget);

}  // namespace kascade
