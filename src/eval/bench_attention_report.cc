// SPDX-License-Identifier: Apache-2.0
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>

#include "base/json.h"
#include "eval/bench_attention.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

const char* phase_name(const AttentionBenchOptions& options) {
  return options.phase == Phase::kPrefill ? "prefill" : "decode";
}

Json role_json(const AttentionBenchRole& role, bool prefill) {
  Json json = {{"ms", role.ms}, {"min_ms", role.min_ms}, {"share_of_limit", role.share_of_limit}};
  if (prefill) {
    json["tflop_per_s"] = role.tflop_per_s;
  } else {
    json["gb_per_s"] = role.gb_per_s;
  }
  return json;
}

}  // namespace

std::string bench_attention_json(const AttentionBenchResult& r) {
  const AttentionBenchOptions& o = r.options;
  Json roles = Json::object();
  for (const AttentionBenchRole& role : r.roles)
    roles[role.name] = role_json(role, o.phase == Phase::kPrefill);
  int64_t needed = o.kv_heads;
  if (!o.needed.empty()) {
    needed = 0;
    for (const uint8_t head : o.needed) needed += head != 0 ? 1 : 0;
  }
  const Json document = {
      {"bench", phase_name(o)},
      {"machine",
       {{"name", r.machine},
        {"device", r.device},
        {"threads", r.threads},
        {"read_gb_per_s", r.read_gb_per_s},
        {"f32_tflop_per_s", r.f32_tflop_per_s},
        {"bf16_tflop_per_s", r.bf16_tflop_per_s}}},
      {"kernel", r.kernel},
      {"shape",
       {{"batch", o.batch},
        {"context", o.context},
        {"query_heads", o.query_heads},
        {"kv_heads", o.kv_heads},
        {"head_dim", o.head_dim},
        {"dtype", dtype_name(o.dtype)},
        {"page_size", o.page_size},
        {"tile", o.tile}}},
      {"policy", "kascade"},
      {"budget", budget_preset_name(o.budget)},
      {"percent", o.percent},
      {"role_counts",
       {{role_name(Role::kLayer0), o.roles[0]},
        {role_name(Role::kAnchor), o.roles[1]},
        {role_name(Role::kReuse), o.roles[2]}}},
      {"needed_kv_heads", needed},
      {"roles", roles},
      {"mean_ms", r.mean_ms},
      {"speedup", r.speedup},
      {"largest_error", r.largest_error},
      {"allowed_error", r.allowed_error},
      {"least_captured_mass", r.least_captured < 0 ? Json() : Json(r.least_captured)},
      {"peers", Json::array()},
      {"commit", o.commit.empty() ? Json() : Json(o.commit)},
      {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
  };
  return dump_json(document, 2);
}

std::string bench_attention_table(const AttentionBenchResult& r) {
  const AttentionBenchOptions& o = r.options;
  const bool prefill = o.phase == Phase::kPrefill, gpu = r.device == "cuda";
  // A GPU multiplies f16 at the rate of bf16, which is measured.
  const char* multiplied = gpu || o.dtype == DType::kBF16 ? "bf16" : "f32";
  std::string text = fmt::format(
      "{} on {}{}, kernel {}\n"
      "batch {}, {} tokens, {} query heads, {} KV heads, head dim {}, {}, budget {} at {} %\n"
      "limits: {:.1f} GB/s read{}\n\n"
      "{:<14}{:>10}{:>12}{:>10}{:>12}\n",
      phase_name(o), r.machine, gpu ? "" : fmt::format(", {} threads", r.threads), r.kernel, o.batch,
      o.context, o.query_heads, o.kv_heads, o.head_dim, dtype_name(o.dtype), budget_preset_name(o.budget),
      o.percent, r.read_gb_per_s,
      r.peak_tflop_per_s > 0 ? fmt::format(", {:.3f} TFLOP/s {}", r.peak_tflop_per_s, multiplied) : "",
      "role", "ms", prefill ? "TFLOP/s" : "GB/s", "of limit", "of dense");
  for (const AttentionBenchRole& role : r.roles)
    text += fmt::format("{:<14}{:>10.3f}{:>12.3f}{:>9.0f}%{:>12.3f}\n", role.name, role.ms,
                        prefill ? role.tflop_per_s : role.gb_per_s, role.share_of_limit * 100,
                        role.ms / r.roles.front().ms);
  text +=
      fmt::format("\nmean of {} layer 0 + {} anchors + {} reuse: {:.3f} ms, {:.2f} times as fast as dense\n",
                  o.roles[0], o.roles[1], o.roles[2], r.mean_ms, r.speedup);
  text += fmt::format("checked: largest error {:.2g} (allowed {:.2g})", r.largest_error, r.allowed_error);
  if (r.least_captured >= 0) text += fmt::format(", sets capture {:.5f} of the best mass", r.least_captured);
  text += "\n";
  return text;
}

}  // namespace kascade
