// SPDX-License-Identifier: Apache-2.0
// What `kascade bench e2e` and `inspect` ask of a GPU beyond the engine's interface. Builds without CUDA have
// answers for the CPU alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "eval/bench_e2e.h"
#include "kascade/engine.h"

namespace kascade {

/// A model of model's shape with seeded random weights on the current GPU. Throws Unsupported in builds
/// without CUDA, and what PreparedModel::create throws.
std::shared_ptr<const PreparedModel> random_gpu_model(std::shared_ptr<const Model> model, uint64_t seed);

/// Name and memory of the device that the model lies on, and the bytes of its weights there.
struct E2eDevice {
  std::string name;
  uint64_t memory_bytes = 0;
  uint64_t weight_bytes = 0;
};
E2eDevice e2e_device(const PreparedModel& model);

/// Measured on the model's device; all 0 on the CPU.
E2eLimits measure_e2e_limits(const PreparedModel& model);

/// Fills a new sequence's first keys with random ones; false where the engine cannot.
bool fill_random_keys(Engine& engine, Sequence& sequence, int64_t length, uint64_t seed);

/// Device time of the parts of what call enqueues; all 0 on the CPU (call does not run there).
PartTimes time_e2e_parts(Engine& engine, const std::function<void()>& call);

/// Memory of a GPU that a model of this shape takes with batch sequences of context tokens.
struct GpuMemoryPlan {
  uint64_t weight_bytes = 0, kv_bytes = 0, scratch_bytes = 0;
  uint64_t total() const { return weight_bytes + kv_bytes + scratch_bytes; }
};
/// Throws Unsupported in builds without CUDA, past the model's context and for shapes that a GPU does not
/// take; BadArgument for numbers below 1 or more than a cache or a step holds. Needs no GPU.
GpuMemoryPlan plan_gpu_memory(const ModelConfig& config, int64_t context, int64_t batch);

/// The current GPU; throws Unsupported where there is none.
struct GpuMemory {
  std::string name;
  uint64_t total_bytes = 0, free_bytes = 0;
};
GpuMemory gpu_memory();

}  // namespace kascade
