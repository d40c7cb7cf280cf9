// SPDX-License-Identifier: Apache-2.0
// What a policy's file gets to build itself from.
#pragma once

#include <memory>
#include <string>

#include "kascade/policy.h"

namespace kascade {

/// One request to make_policy; every field outlives the factory's call only. Options are within their ranges,
/// and a plan, where there is one, is valid and has the model's layers and KV heads.
struct PolicyRequest {
  const std::string& name;
  const PolicyOptions& options;
  const ModelIdentity& model;
  const Plan* plan;  // may be null
};

using PolicyFactory = std::shared_ptr<const Policy> (*)(const PolicyRequest& request);

#define KASCADE_POLICY(name, summary, needs_plan, make) \
  std::shared_ptr<const Policy> make(const PolicyRequest& request);
#include "policy/policies.inc"
#undef KASCADE_POLICY

}  // namespace kascade
