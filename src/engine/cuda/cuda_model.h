// SPDX-License-Identifier: Apache-2.0
// A model's weights on a GPU, in bf16.
#pragma once

#include <memory>
#include <vector>

#include "engine/cuda/device_memory.h"
#include "kascade/engine.h"
#include "ops/cuda/ops.h"

namespace kascade {

struct CudaLayer {
  const float* attention_norm = nullptr;             // [hidden]
  const float* ffn_norm = nullptr;                   // [hidden]
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim]; null unless the model has them
  const float* qkv_bias = nullptr;                   // [(H + 2G) D]; null unless the model has one
  cuda::DeviceMatrix qkv, output, gate_up, down;     // q, k and v, gate and up, one below the other
};

/// A model's weights, as they lie in one allocation.
struct CudaPlaces {
  std::vector<CudaLayer> layers;
  cuda::DeviceMatrix embedding, head;  // the same when tied
  const float* final_norm = nullptr;   // [hidden]
};

/// Its engines work on the device that was current when it was made, whichever is current in their callers'
/// threads.
class CudaModel final : public PreparedModel {
 public:
  /// Copies the weights of model to the current device; progress hears of their bytes. Throws Unsupported for
  /// a device or a shape that the operators do not take, OutOfMemory where the weights do not fit.
  explicit CudaModel(std::shared_ptr<const Model> model, const LoadProgress& progress = {});
  /// Random weights instead (each matrix N(0, 1 / inputs)), so that a model of any shape can be timed without
  /// its file; model has a configuration and no weights.
  CudaModel(std::shared_ptr<const Model> model, uint64_t seed);

  const char* device() const override { return "cuda"; }
  const cuda::DeviceInfo& device_info() const { return device_; }
  const std::vector<CudaLayer>& layers() const { return places_.layers; }
  const cuda::DeviceMatrix& embedding() const { return places_.embedding; }
  const cuda::DeviceMatrix& head() const { return places_.head; }
  const float* final_norm() const { return places_.final_norm; }
  uint64_t bytes() const { return memory_.bytes(); }

  /// Device memory that the weights of a model of this shape take.
  static uint64_t weight_bytes(const ModelConfig& config);
  /// Throws Unsupported, naming it, for what the operators do not take of a model's shape. Needs no device.
  static void require_shape(const ModelConfig& config);

 private:
  /// Places for all weights on the current device, which must be one that the operators take.
  const CudaPlaces& allocate();
  std::unique_ptr<Engine> make_engine(std::shared_ptr<const PreparedModel> self,
                                      const EngineOptions& options) const override;

  cuda::DeviceInfo device_;
  CudaPlaces places_;
  cuda::DeviceBuffer<std::byte> memory_{"weights"};
};

}  // namespace kascade
