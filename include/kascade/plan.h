// SPDX-License-Identifier: Apache-2.0
// A plan: what calibration hands to inference. Which layers are anchors, and which anchor KV head each KV
// head of a reuse layer borrows its index sets from (docs/method.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kascade {

/// Shapes and fingerprint of the model a plan was made from.
struct ModelIdentity {
  std::string architecture;  // "llama", "mistral", "qwen2", "qwen3"; empty in an imported published map
                             // without a model
  int layers = 0;
  int query_heads = 0;  // 0 = unknown (an imported head map)
  int kv_heads = 0;
  int head_dim = 0;         // 0 = unknown
  std::string fingerprint;  // 16 hex digits over the attention norms rounded to bf16; empty when unknown
};

/// How the calibration was run.
struct CalibrationSettings {
  std::string method = "measured";  // "published" | "budget" | "measured" | "imported"
  int tile = 32;                    // query tokens per tile, 1..128
  int similarity_k = 32;  // K_cal: selected keys per set besides the own tile; 0 = the run-time budget
  std::string aggregation = "min";  // over the tiles and steps of a prompt: "min" | "mean"
  std::string forward = "dense";    // while collecting: "dense" | "sparse"
  bool importance = false;          // whether the dynamic program weights layers by importance
  int tensor_parallel = 1;          // head maps stay inside each rank's KV heads
  int percent_hundredths = 1000;    // run-time budget that the choice and the validation used
  std::string budget = "default";   // preset: "default" | "paper" | "kernel"
};

/// What a plan was calibrated on.
struct CalibrationData {
  std::string name;
  int64_t prompts = 0;
  int64_t tokens = 0;
  std::string hash;  // 16 hex digits over the token ids
};

/// Figures of one anchor set on the choosing prompts (one-pass evaluation).
struct PlanCandidate {
  std::vector<int> anchors;
  double kl = 0;       // mean KL(dense || policy), nats
  double top1 = 0;     // share of rows whose arg-max equals dense's
  double passkey = 0;  // share of passkey digits right
  double objective = 0;
};

/// The whole policy, sparse prefill and decode, on prompts kept out of the choice.
struct PlanValidation {
  double kl = 0;
  double top1 = 0;
  double passkey = 0;        // share of digits right
  double passkey_dense = 0;  // the same with dense attention
  int64_t prompts = 0;
  bool passed = false;
};

struct Plan {
  ModelIdentity model;
  std::vector<int> anchors;                // ascending, the first is 0
  std::vector<std::vector<int>> head_map;  // [layers][kv_heads]; anchors map to themselves (identity)
  CalibrationSettings settings;
  CalibrationData data;
  double objective = 0;
  std::vector<double> importance;               // [layers]; empty when unknown
  std::vector<std::vector<double>> similarity;  // [layers][layers], row = anchor; empty when unknown
  std::vector<double> retained_mass;  // [layers]: layer similarity to its source anchor; empty when unknown
  std::vector<PlanCandidate> candidates;  // one for every M that was tried
  std::optional<PlanValidation> validation;
  std::string tool_version;

  /// The last anchor at or before layer. Requires a validated plan and 0 <= layer < layers.
  int source_anchor(int layer) const;
  bool is_anchor(int layer) const;
  /// [kv_heads], 1 where some reuse layer reads that KV head's sets of this anchor.
  std::vector<uint8_t> needed_heads(int anchor) const;
};

/// Throws BadArgument naming the field, expected and actual, unless the plan is valid by itself: anchors
/// ascending from 0 and below layers, map of the right shape with entries in [0, kv_heads), anchors mapped to
/// themselves.
void validate_plan(const Plan& plan);

/// Throws BadArgument unless the plan fits the model: shapes always, the fingerprint unless
/// allow_other_model. Returns a warning to show (other fingerprint or architecture, allowed) or an empty
/// string.
std::string check_plan_model(const Plan& plan, const ModelIdentity& model, bool allow_other_model);

/// JSON, "format": "kascade-plan", "version": 1. load throws BadFile naming file and field, expected and
/// actual.
Plan load_plan(const std::string& path);
Plan parse_plan(const std::string& json, const std::string& source);
std::string plan_to_json(const Plan& plan);  // ends with a newline; the same plan gives the same bytes
void save_plan(const Plan& plan, const std::string& path);

/// A published head map: a NumPy .npy of int32 (or int64) [layers, kv_heads], C order. Anchors are given, or
/// read from
/// "..._layers_0_2_8.npy" in the file's name when empty. Throws BadFile or BadArgument.
Plan import_npy(const std::string& path, const std::vector<int>& anchors);

/// An SVG of the similarity matrix with the anchors marked, beside it the quality against M when candidates
/// are known. Throws BadArgument when the plan carries no similarity.
std::string plan_svg(const Plan& plan);

/// Human-readable differences of two plans, one per line; empty when they act alike and were made alike.
std::vector<std::string> diff_plans(const Plan& a, const Plan& b);

}  // namespace kascade
