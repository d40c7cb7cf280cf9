// SPDX-License-Identifier: Apache-2.0
// A small valid plan for tests, and a check of what an exception says.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kascade/error.h"
#include "kascade/plan.h"

namespace kascade {

/// 6 layers, 4 query heads, 2 KV heads; anchors 0, 1, 4; every field set.
inline Plan sample_plan() {
  Plan plan;
  plan.model = {"llama", 6, 4, 2, 64, "0123456789abcdef"};
  plan.anchors = {0, 1, 4};
  plan.head_map = {{0, 1}, {0, 1}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  plan.settings.similarity_k = 200;
  plan.data = {"multi-hop questions", 16, 40123, "fedcba9876543210"};
  plan.objective = 0.0625;
  plan.importance = {0.9, 0.7, 0.1, 0.2, 0.3, 0.05};
  plan.similarity.assign(6, std::vector<double>(6, 0.0));
  for (int i = 0; i < 6; ++i)
    for (int j = i; j < 6; ++j) plan.similarity[i][j] = 1.0 - 0.1 * (j - i);
  plan.retained_mass = {1, 1, 0.9, 0.8, 1, 0.9};
  plan.candidates = {
      {{0}, 2.5, 0.3, 0.0, 3.5}, {{0, 1}, 0.5, 0.7, 0.4, 0.9}, {{0, 1, 4}, 0.05, 0.93, 1.0, 0.0625}};
  plan.validation = PlanValidation{0.055, 0.92, 0.98, 1.0, 12, true};
  plan.tool_version = "0.1.0";
  return plan;
}

/// The message of the E that action throws; fails the test when it throws nothing or something else.
template <class E, class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace kascade
