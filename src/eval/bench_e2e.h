// SPDX-License-Identifier: Apache-2.0
// Timing of the whole model under several policies: time to the first token of a prompt, steps of sequences
// that are long already, where the time goes, and the machine's own limits in the same run.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/parts.h"
#include "kascade/attention.h"
#include "kascade/engine.h"

namespace kascade {

/// kPrefill: one prompt of `tokens` tokens and its first new token. kDecode: steps of `batch` sequences, the
/// last timed one over `tokens` keys each.
struct E2eWork {
  Phase phase = Phase::kDecode;
  int32_t batch = 1;
  int64_t tokens = 0;
  bool operator==(const E2eWork&) const = default;
};

/// "decode:4x128K", "prefill:32K". Throws BadArgument naming --work.
E2eWork parse_e2e_work(std::string_view text);
std::string e2e_work_name(const E2eWork& work);

/// How reports show a part.
struct E2ePart {
  Part part;
  const char* name;    // in documents
  const char* label;   // in the figure
  const char* colour;  // of its blocks
  bool pale;           // the colour: text on it is dark
};
constexpr std::array<E2ePart, kParts> kE2eParts = {{
    {Part::kProducts, "products", "matrix products", "#9aa7b5", true},
    {Part::kDense, role_name(Role::kDense), "attention, dense", "#e8384f", false},
    {Part::kLayer0, role_name(Role::kLayer0), "layer 0", "#b8577f", false},
    {Part::kAnchor, role_name(Role::kAnchor), "anchor layers", "#d9822b", false},
    {Part::kReuse, role_name(Role::kReuse), "reuse layers", "#1f77a4", false},
    {Part::kRest, "rest", "rest", "#d5dbe1", true},
}};

struct E2eBenchOptions {
  std::vector<E2eWork> works;
  std::vector<std::shared_ptr<const Policy>> policies;
  int64_t steps = 32;   // timed decode steps of a repetition
  int repetitions = 3;  // go round the policies
  int threads = 0;
  bool invariant = false;  // EngineOptions::invariant
  uint64_t seed = 1;       // of prompts and cached keys
  const std::atomic<bool>* cancel = nullptr;
  std::function<void(double share, const std::string& doing)> progress;
};

/// One policy on one piece of work.
struct E2eRun {
  std::string policy;       // name()
  std::string description;  // describe()
  // Prefill: to the first token. Decode: of one step of all sequences. Median and least of the repetitions.
  double seconds = 0, min_seconds = 0;
  PartTimes parts{};          // of a separate untimed pass without graphs; all 0 where the device tells none
  uint64_t memory_bytes = 0;  // the engine's own account after the run, weights included

  double parts_seconds() const;
};

struct E2eWorkResult {
  E2eWork work;
  std::vector<E2eRun> runs;  // in the order of the policies
  double dense_bytes = 0;  // decode: weights and KV that a dense step reads, on the mean over the timed steps
  double product_flop = 0;          // prefill: of the products with stored weights
  double dense_attention_flop = 0;  // prefill: of dense attention
};

/// What the device can do at most, measured in the same run; 0 where unknown.
struct E2eLimits {
  double read_gb_per_s = 0;
  double bf16_tflop_per_s = 0;            // of the fastest large products, in short runs
  double bf16_sustained_tflop_per_s = 0;  // the same for most of a second, which heats the device
};

struct E2eReport {
  std::string device;   // "cpu", "cuda"
  std::string machine;  // name of the GPU, or of the processor
  uint64_t device_memory_bytes = 0;
  ModelConfig config;
  uint64_t weight_bytes = 0;  // on the device
  bool random_weights = false;
  E2eLimits limits;
  int threads = 0;
  bool invariant = false;
  int64_t steps = 0;
  int repetitions = 0;
  std::string plan;    // where the plan comes from; empty without one
  std::string commit;  // of the build; empty when unknown
  std::vector<E2eWorkResult> works;
};

/// Runs the bench, one engine for each piece of work, caches filled with random keys on a GPU and by a dense
/// prefill on the CPU. Throws BadArgument for options out of range and steps of more rows than the engine
/// takes, Unsupported past the model's context,
/// OutOfMemory (naming the work and what it needs, before anything runs, on a GPU), Cancelled, and Error when
/// a step's logits are no numbers. The names of plan and commit are the caller's to fill in.
E2eReport bench_e2e(const std::shared_ptr<const PreparedModel>& model, const E2eBenchOptions& options);

/// How often dense's time holds this run's; 0 when no run is dense.
double e2e_ratio_to_dense(const E2eWorkResult& result, const E2eRun& run);

/// The document of `bench e2e --json`.
std::string bench_e2e_json(const E2eReport& report);
/// The same as a table for people.
std::string bench_e2e_table(const E2eReport& report);
/// Stacked bars of where the time goes, the policies side by side in each piece of work.
std::string bench_e2e_svg(const E2eReport& report);

}  // namespace kascade
