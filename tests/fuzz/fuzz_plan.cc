// SPDX-License-Identifier: Apache-2.0
// Plans from outside: JSON and published .npy maps. Whatever the bytes, the readers give a valid plan or
// throw, and what they accept survives its own writer.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "kascade/error.h"
#include "kascade/plan.h"
#include "plan/npy.h"

namespace {

using kascade::Plan;

void require(bool condition) {
  if (!condition) std::abort();
}

void check_accepted(const Plan& plan) {
  kascade::validate_plan(plan);
  const std::string json = kascade::plan_to_json(plan);
  const Plan again = kascade::parse_plan(json, "again");
  require(kascade::plan_to_json(again) == json);
  require(kascade::diff_plans(plan, again).empty());
  for (const int anchor : plan.anchors)
    require(plan.needed_heads(anchor).size() == static_cast<size_t>(plan.model.kv_heads));
  if (!plan.similarity.empty() && plan.model.layers <= 64) require(!kascade::plan_svg(plan).empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  try {
    check_accepted(kascade::parse_plan(std::string(reinterpret_cast<const char*>(data), size), "fuzz"));
  } catch (const kascade::BadFile&) {
  }
  try {
    check_accepted(kascade::plan_from_npy(bytes, {0, 2}, "fuzz"));
  } catch (const kascade::BadFile&) {
  }
  try {
    check_accepted(kascade::plan_from_npy(
        bytes, kascade::anchors_from_name(std::string(reinterpret_cast<const char*>(data), size)), "fuzz"));
  } catch (const kascade::BadFile&) {
  } catch (const kascade::BadArgument&) {  // no anchors in the name
  }
  return 0;
}
