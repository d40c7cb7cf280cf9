// SPDX-License-Identifier: Apache-2.0
#include "policy/preset_budgets.h"

#include <fmt/format.h>

#include <cmath>

#include "base/check.h"

namespace kascade {
namespace {

constexpr int32_t kPresetPercentHundredths = 1000;

void apply_counts(const PolicyOptions& options, Budget& budget) {
  if (options.floor) budget.floor = *options.floor;
  if (options.sinks) budget.sinks = *options.sinks;
  if (options.recent) budget.recent = *options.recent;
}

}  // namespace

int32_t percent_to_hundredths(double percent) {
  require<BadArgument>(percent > 0 && percent <= 100, "percent: expected above 0 and at most 100, got {}",
                       percent);
  const auto hundredths = static_cast<int32_t>(std::llround(percent * 100));
  require<BadArgument>(hundredths >= 1, "percent: expected at least 0.01, got {}", percent);
  return hundredths;
}

PresetBudgets preset_budgets(const PolicyOptions& options, int tile) {
  const int32_t hundredths =
      options.percent ? percent_to_hundredths(*options.percent) : kPresetPercentHundredths;
  PresetBudgets budgets;
  switch (options.budget) {
    case BudgetPreset::kDefault:
      budgets.prefill = default_budget(hundredths);
      budgets.prefill.tile = tile;
      budgets.prefill.rolling = options.rolling.value_or(true);
      budgets.decode = budgets.prefill;
      break;
    case BudgetPreset::kPaper:
      budgets.prefill = paper_budget(hundredths, tile, options.rolling.value_or(false));
      budgets.decode = paper_budget(hundredths, tile, false);
      break;
    case BudgetPreset::kKernel:
      budgets.prefill = kernel_budget(hundredths, tile, options.rolling.value_or(true));
      budgets.decode = kernel_decode_budget(hundredths);
      break;
  }
  apply_counts(options, budgets.prefill);
  apply_counts(options, budgets.decode);
  return budgets;
}

const char* budget_preset_name(BudgetPreset preset) {
  switch (preset) {
    case BudgetPreset::kDefault:
      return "default";
    case BudgetPreset::kPaper:
      return "paper";
    case BudgetPreset::kKernel:
      return "kernel";
  }
  throw_error<BadArgument>("budget: expected default (0), paper (1) or kernel (2), got {}",
                           static_cast<int>(preset));
}

std::string describe_budget(const Budget& budget) {
  return fmt::format("percent {}, floor {}, sinks {}, recent {}, rolling {}",
                     budget.percent_hundredths / 100.0, budget.floor, budget.sinks, budget.recent,
                     budget.rolling ? "on" : "off");
}

}  // namespace kascade
