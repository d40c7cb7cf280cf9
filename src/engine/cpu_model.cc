// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu_model.h"

#include "base/check.h"
#include "base/dequantize.h"
#include "engine/cpu_engine.h"

namespace kascade {
namespace {

std::vector<float> to_floats(const WeightTensor& vector) {
  std::vector<float> floats(static_cast<size_t>(vector ? vector.columns : 0));
  if (vector) dequantize_row(vector.type, vector.data, vector.columns, floats.data());
  return floats;
}

PreparedLayer prepare(const LayerWeights& weights, Compute compute) {
  const WeightTensor no_bias;
  return PreparedLayer{.attention_norm = to_floats(weights.attention_norm),
                       .ffn_norm = to_floats(weights.ffn_norm),
                       .q_norm = to_floats(weights.q_norm),
                       .k_norm = to_floats(weights.k_norm),
                       .q = Linear(weights.q, weights.q_bias, compute),
                       .k = Linear(weights.k, weights.k_bias, compute),
                       .v = Linear(weights.v, weights.v_bias, compute),
                       .output = Linear(weights.output, no_bias, compute),
                       .gate = Linear(weights.gate, no_bias, compute),
                       .up = Linear(weights.up, no_bias, compute),
                       .down = Linear(weights.down, no_bias, compute)};
}

}  // namespace

CpuModel::CpuModel(std::shared_ptr<const Model> model, Compute compute) {
  model_ = std::move(model);
  compute_ = compute;
  const ModelWeights& weights = model_->weights();
  final_norm_ = to_floats(weights.final_norm);
  layers_.reserve(weights.layers.size());
  for (const LayerWeights& layer : weights.layers) layers_.push_back(prepare(layer, compute));
  head_.emplace(weights.head, WeightTensor{}, compute);

  owned_bytes_ = head_->owned_bytes() + final_norm_.size() * sizeof(float);
  for (const PreparedLayer& layer : layers_) {
    for (const Linear* linear :
         {&layer.q, &layer.k, &layer.v, &layer.output, &layer.gate, &layer.up, &layer.down})
      owned_bytes_ += linear->owned_bytes();
    for (const auto* norm : {&layer.attention_norm, &layer.ffn_norm, &layer.q_norm, &layer.k_norm})
      owned_bytes_ += norm->size() * sizeof(float);
  }
}

std::unique_ptr<Engine> CpuModel::make_engine(std::shared_ptr<const PreparedModel> self,
                                              const EngineOptions& options) const {
  return std::make_unique<CpuEngine>(std::static_pointer_cast<const CpuModel>(std::move(self)), options);
}

}  // namespace kascade
