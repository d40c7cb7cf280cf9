// SPDX-License-Identifier: Apache-2.0
// A model's weights on a GPU, in bf16.
#pragma once

#include <memory>
#include <optional>
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

class CudaModel final : public PreparedModel {
 public:
  /// Copies the weights of model to the current device. With a seed they are random instead (each matrix
  /// N(0, 1 / inputs)), so that a model of any shape can be timed without its file. Throws Unsupported for a
  /// device or a shape that the operators do not take, OutOfMemory where the weights do not fit.
  explicit CudaModel(std::shared_ptr<const Model> model, std::optional<uint64_t> seed = std::nullopt);

  const char* device() const override { return "cuda"; }
  const cuda::DeviceInfo& device_info() const { return device_; }
  const std::vector<CudaLayer>& layers() const { return layers_; }
  const cuda::DeviceMatrix& embedding() const { return embedding_; }
  const cuda::DeviceMatrix& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  uint64_t bytes() const { return memory_.bytes(); }

  /// Device memory that the weights of a model of this shape take.
  static uint64_t weight_bytes(const ModelConfig& config);

 private:
  std::unique_ptr<Engine> make_engine(std::shared_ptr<const PreparedModel> self,
                                      const EngineOptions& options) const override;

  cuda::DeviceInfo device_;
  std::vector<CudaLayer> layers_;
  cuda::DeviceMatrix embedding_, head_;
  const float* final_norm_ = nullptr;
  cuda::DeviceBuffer<std::byte> memory_{"weights"};
};

}  // namespace kascade
