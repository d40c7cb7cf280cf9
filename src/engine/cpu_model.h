// SPDX-License-Identifier: Apache-2.0
// A model's weights as the CPU's operators take them.
#pragma once

#include <optional>
#include <vector>

#include "kascade/engine.h"
#include "ops/ops.h"

namespace kascade {

struct PreparedLayer {
  std::vector<float> attention_norm, ffn_norm;  // [hidden]
  std::vector<float> q_norm, k_norm;            // [head_dim]; empty unless the model has them
  Linear q, k, v, output, gate, up, down;
};

class CpuModel final : public PreparedModel {
 public:
  CpuModel(std::shared_ptr<const Model> model, Compute compute);

  const char* device() const override { return "cpu"; }
  const std::vector<PreparedLayer>& layers() const { return layers_; }
  const std::vector<float>& final_norm() const { return final_norm_; }
  const Linear& head() const { return *head_; }
  DType kv_dtype() const { return compute_ == Compute::kF32 ? DType::kF32 : DType::kBF16; }
  /// Memory besides the mapped file.
  uint64_t owned_bytes() const { return owned_bytes_; }

 private:
  std::unique_ptr<Engine> make_engine(std::shared_ptr<const PreparedModel> self,
                                      const EngineOptions& options) const override;

  std::vector<PreparedLayer> layers_;
  std::vector<float> final_norm_;
  std::optional<Linear> head_;
  uint64_t owned_bytes_ = 0;
};

}  // namespace kascade
