// SPDX-License-Identifier: Apache-2.0
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>

#include "base/json.h"
#include "eval/bench_e2e.h"

namespace kascade {
namespace {

double tokens_per_s(const E2eWork& work, const E2eRun& run) {
  const double tokens =
      work.phase == Phase::kDecode ? static_cast<double>(work.batch) : static_cast<double>(work.tokens);
  return run.seconds > 0 ? tokens / run.seconds : 0;
}

// Where a run stands against the device's limits; 0 where that is unknown.
struct Shares {
  double of_read_limit = 0;          // a dense decode step
  double products_tflop_per_s = 0;   // prefill
  double products_of_peak = 0;       // prefill
  double attention_tflop_per_s = 0;  // dense prefill
};

Shares shares_of(const E2eReport& report, const E2eWorkResult& result, const E2eRun& run) {
  Shares shares;
  const bool dense = run.policy == "dense";
  const double read = report.limits.read_gb_per_s * 1e9, peak = report.limits.bf16_tflop_per_s * 1e12;
  if (result.work.phase == Phase::kDecode) {
    if (dense && read > 0 && run.seconds > 0) shares.of_read_limit = result.dense_bytes / read / run.seconds;
    return shares;
  }
  const double products = run.parts[Part::kProducts], attention = run.parts[Part::kDense];
  if (products > 0) shares.products_tflop_per_s = result.product_flop / products * 1e-12;
  if (peak > 0) shares.products_of_peak = shares.products_tflop_per_s * 1e12 / peak;
  if (dense && attention > 0) shares.attention_tflop_per_s = result.dense_attention_flop / attention * 1e-12;
  return shares;
}

Json known(double value) { return value > 0 ? Json(value) : Json(); }

Json run_json(const E2eReport& report, const E2eWorkResult& result, const E2eRun& run) {
  const bool decode = result.work.phase == Phase::kDecode;
  Json json = {{"policy", run.policy},
               {"description", run.description},
               {decode ? "step_seconds" : "first_token_seconds", run.seconds},
               {decode ? "least_step_seconds" : "least_first_token_seconds", run.min_seconds},
               {"tokens_per_s", tokens_per_s(result.work, run)},
               {"ratio_to_dense", known(e2e_ratio_to_dense(result, run))},
               {"memory_bytes", run.memory_bytes},
               {"parts", Json()}};
  if (const double all = run.parts_seconds(); all > 0) {
    Json parts = Json::object();
    for (const E2ePart& shown : kE2eParts)
      parts[shown.name] = {{"seconds", run.parts[shown.part]}, {"share", run.parts[shown.part] / all}};
    json["parts"] = parts;
  }
  const Shares shares = shares_of(report, result, run);
  if (decode) {
    json["share_of_read_limit"] = known(shares.of_read_limit);
  } else {
    json["products_tflop_per_s"] = known(shares.products_tflop_per_s);
    json["products_share_of_peak"] = known(shares.products_of_peak);
    json["dense_attention_tflop_per_s"] = known(shares.attention_tflop_per_s);
  }
  return json;
}

std::string percent(double share) { return share > 0 ? fmt::format("{:.0f} %", share * 100) : "-"; }

std::string seconds_text(double seconds) {
  return seconds >= 1 ? fmt::format("{:.3f} s", seconds) : fmt::format("{:.2f} ms", seconds * 1e3);
}

}  // namespace

std::string bench_e2e_json(const E2eReport& r) {
  Json works = Json::array();
  for (const E2eWorkResult& result : r.works) {
    Json runs = Json::array();
    for (const E2eRun& run : result.runs) runs.push_back(run_json(r, result, run));
    works.push_back({{"name", e2e_work_name(result.work)},
                     {"phase", result.work.phase == Phase::kDecode ? "decode" : "prefill"},
                     {"batch", result.work.batch},
                     {"tokens", result.work.tokens},
                     {"dense_step_bytes", known(result.dense_bytes)},
                     {"product_flop", known(result.product_flop)},
                     {"runs", runs}});
  }
  const ModelConfig& c = r.config;
  const Json document = {
      {"bench", "e2e"},
      {"machine",
       {{"device", r.device},
        {"name", r.machine},
        {"threads", r.threads},
        {"memory_bytes", r.device_memory_bytes},
        {"read_gb_per_s", known(r.limits.read_gb_per_s)},
        {"bf16_tflop_per_s", known(r.limits.bf16_tflop_per_s)},
        {"bf16_sustained_tflop_per_s", known(r.limits.bf16_sustained_tflop_per_s)}}},
      {"model",
       {{"name", c.name},
        {"weights", r.random_weights ? "random" : "file"},
        {"weight_bytes", r.weight_bytes},
        {"layers", c.layers},
        {"hidden", c.hidden},
        {"ffn", c.ffn},
        {"query_heads", c.query_heads},
        {"kv_heads", c.kv_heads},
        {"head_dim", c.head_dim},
        {"vocabulary", c.vocabulary}}},
      {"plan", r.plan.empty() ? Json() : Json(r.plan)},
      {"invariant", r.invariant},
      {"steps", r.steps},
      {"repetitions", r.repetitions},
      {"work", works},
      {"commit", r.commit.empty() ? Json() : Json(r.commit)},
      {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
  };
  return dump_json(document, 2);
}

std::string bench_e2e_table(const E2eReport& r) {
  std::string text =
      fmt::format("{}{} on {}{}\n", r.config.name.empty() ? "model" : r.config.name,
                  r.random_weights ? " (random weights)" : "", r.machine.empty() ? r.device : r.machine,
                  r.device == "cpu" ? fmt::format(", {} threads", r.threads) : "");
  if (!r.plan.empty()) text += fmt::format("plan: {}\n", r.plan);
  if (r.limits.read_gb_per_s > 0)
    text +=
        fmt::format("limits: {:.0f} GB/s read, {:.0f} TFLOP/s bf16 products ({:.0f} sustained)\n",
                    r.limits.read_gb_per_s, r.limits.bf16_tflop_per_s, r.limits.bf16_sustained_tflop_per_s);
  text += fmt::format("\n{:<16}{:<20}{:>12}{:>11}{:>9}{:>11}{:>10}{:>7}{:>10}{:>10}\n", "work", "policy",
                      "time", "tokens/s", "ratio", "attention", "products", "rest", "memory", "of limit");
  for (const E2eWorkResult& result : r.works) {
    std::string name = e2e_work_name(result.work);
    for (const E2eRun& run : result.runs) {
      const Shares shares = shares_of(r, result, run);
      const double all = run.parts_seconds(), products = run.parts[Part::kProducts],
                   rest = run.parts[Part::kRest];
      const double ratio = e2e_ratio_to_dense(result, run);
      const auto part = [&](double seconds) { return all > 0 ? percent(seconds / all) : "-"; };
      text += fmt::format(
          "{:<16}{:<20}{:>12}{:>11.1f}{:>9}{:>11}{:>10}{:>7}{:>10}{:>10}\n", name, run.policy,
          seconds_text(run.seconds), tokens_per_s(result.work, run),
          ratio > 0 ? fmt::format("{:.2f}", ratio) : "-", part(all - products - rest), part(products),
          part(rest), fmt::format("{:.1f} GB", static_cast<double>(run.memory_bytes) * 1e-9),
          percent(result.work.phase == Phase::kDecode ? shares.of_read_limit : shares.products_of_peak));
      name.clear();
    }
  }
  text +=
      "\ntime: of a step of all sequences, or to the first token; ratio: to dense; of limit: bytes of a "
      "dense step\n"
      "over the measured read bandwidth, or products over the measured peak\n";
  return text;
}

}  // namespace kascade
