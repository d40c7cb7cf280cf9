// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_model.h"

#include <algorithm>
#include <cmath>

#include "attention/cuda/cuda_attention.h"
#include "base/dequantize.h"
#include "engine/cuda/cuda_engine.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using cuda::check_call;
using cuda::DeviceMatrix;

constexpr uint64_t kAlignment = 256;
// Stored rows are dequantised this many bytes at a time.
constexpr int64_t kStagedBytes = int64_t{64} << 20;
// What the matrix products and rows of activations need: 16-byte rows.
constexpr int kUnit = 8;

/// Places of one allocation, in the order they are asked for; counts alone while there is no memory.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* place = base_ != nullptr ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (static_cast<uint64_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return place;
  }
  DeviceMatrix matrix(int64_t outputs, int64_t inputs) {
    return {take<__nv_bfloat16>(outputs * inputs), outputs, inputs};
  }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  uint64_t bytes_ = 0;
};

CudaPlaces lay_out(const ModelConfig& config, Layout& layout) {
  const int64_t hidden = config.hidden, q_width = int64_t{config.query_heads} * config.head_dim,
                qkv_width = q_width + int64_t{2} * config.kv_heads * config.head_dim;
  CudaPlaces places;
  for (int layer = 0; layer < config.layers; ++layer) {
    CudaLayer& weights = places.layers.emplace_back();
    weights.attention_norm = layout.take<float>(hidden);
    weights.ffn_norm = layout.take<float>(hidden);
    if (config.qk_norm) {
      weights.q_norm = layout.take<float>(config.head_dim);
      weights.k_norm = layout.take<float>(config.head_dim);
    }
    if (config.qkv_bias) weights.qkv_bias = layout.take<float>(qkv_width);
    weights.qkv = layout.matrix(qkv_width, hidden);
    weights.output = layout.matrix(hidden, q_width);
    weights.gate_up = layout.matrix(int64_t{2} * config.ffn, hidden);
    weights.down = layout.matrix(hidden, config.ffn);
  }
  places.final_norm = layout.take<float>(hidden);
  places.embedding = layout.matrix(config.vocabulary, hidden);
  places.head = config.tied_embeddings ? places.embedding : layout.matrix(config.vocabulary, hidden);
  return places;
}

/// Fills the places with a model's tensors.
class Loader {
 public:
  Loader(const LoadProgress& progress, uint64_t total) : progress_(progress), total_(total) {
    staged_.grow(kStagedBytes);
  }

  void vector(const WeightTensor& tensor, const float* to) {
    floats_.resize(static_cast<size_t>(tensor.columns));
    dequantize_row(tensor.type, tensor.data, tensor.columns, floats_.data());
    check_call(cudaMemcpyAsync(const_cast<float*>(to), floats_.data(), floats_.size() * sizeof(float),
                               cudaMemcpyHostToDevice, stream_.get()),
               "cudaMemcpyAsync");
    stream_.wait();
  }

  /// Rows of tensor to rows from first_row on.
  void matrix(const WeightTensor& tensor, const DeviceMatrix& to, int64_t first_row = 0) {
    const int64_t rows_at_once = std::max(int64_t{1}, kStagedBytes / tensor.row_bytes());
    staged_.grow(tensor.row_bytes());
    auto* out = const_cast<__nv_bfloat16*>(to.weight) + first_row * to.inputs;
    for (int64_t row = 0; row < tensor.rows; row += rows_at_once) {
      const int64_t rows = std::min(rows_at_once, tensor.rows - row);
      const auto* stored = static_cast<const std::byte*>(tensor.data) + row * tensor.row_bytes();
      check_call(cudaMemcpyAsync(staged_.data(), stored, static_cast<size_t>(rows * tensor.row_bytes()),
                                 cudaMemcpyHostToDevice, stream_.get()),
                 "cudaMemcpyAsync");
      cuda::dequantize(tensor.type, staged_.data(), rows * tensor.columns, out + row * to.inputs,
                       stream_.get());
      done_ += static_cast<uint64_t>(rows * tensor.row_bytes());
      if (progress_) progress_(done_, total_);
    }
  }

  void finish() {
    stream_.wait();
    if (progress_) progress_(total_, total_);
  }

 private:
  cuda::Stream stream_;
  cuda::DeviceBuffer<std::byte> staged_{"staged weights"};
  std::vector<float> floats_;
  const LoadProgress& progress_;
  uint64_t done_ = 0, total_;
};

void load(const ModelWeights& weights, const CudaPlaces& places, const LoadProgress& progress) {
  Loader loader(progress, weights.bytes);
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& from = weights.layers[i];
    const CudaLayer& to = places.layers[i];
    loader.vector(from.attention_norm, to.attention_norm);
    loader.vector(from.ffn_norm, to.ffn_norm);
    if (to.q_norm != nullptr) {
      loader.vector(from.q_norm, to.q_norm);
      loader.vector(from.k_norm, to.k_norm);
    }
    if (to.qkv_bias != nullptr) {
      loader.vector(from.q_bias, to.qkv_bias);
      loader.vector(from.k_bias, to.qkv_bias + from.q.rows);
      loader.vector(from.v_bias, to.qkv_bias + from.q.rows + from.k.rows);
    }
    loader.matrix(from.q, to.qkv);
    loader.matrix(from.k, to.qkv, from.q.rows);
    loader.matrix(from.v, to.qkv, from.q.rows + from.k.rows);
    loader.matrix(from.output, to.output);
    loader.matrix(from.gate, to.gate_up);
    loader.matrix(from.up, to.gate_up, from.gate.rows);
    loader.matrix(from.down, to.down);
  }
  loader.vector(weights.final_norm, places.final_norm);
  loader.matrix(weights.embedding, places.embedding);
  if (places.head.weight != places.embedding.weight) loader.matrix(weights.head, places.head);
  loader.finish();
}

void fill_random(const ModelConfig& config, const CudaPlaces& places, uint64_t seed) {
  cuda::Stream stream;
  const auto matrix = [&](const DeviceMatrix& to) {
    cuda::fill_normal(const_cast<__nv_bfloat16*>(to.weight), to.outputs * to.inputs,
                      1 / std::sqrt(static_cast<float>(to.inputs)), seed++, stream.get());
  };
  const auto vector = [&](const float* to, int64_t count, float value) {
    if (to == nullptr) return;
    const std::vector<float> values(static_cast<size_t>(count), value);
    check_call(cudaMemcpyAsync(const_cast<float*>(to), values.data(), values.size() * sizeof(float),
                               cudaMemcpyHostToDevice, stream.get()),
               "cudaMemcpyAsync");
    stream.wait();
  };
  for (const CudaLayer& layer : places.layers) {
    vector(layer.attention_norm, config.hidden, 1);
    vector(layer.ffn_norm, config.hidden, 1);
    vector(layer.q_norm, config.head_dim, 1);
    vector(layer.k_norm, config.head_dim, 1);
    vector(layer.qkv_bias, layer.qkv.outputs, 0);
    for (const DeviceMatrix* to : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) matrix(*to);
  }
  vector(places.final_norm, config.hidden, 1);
  matrix(places.embedding);
  if (places.head.weight != places.embedding.weight) matrix(places.head);
  stream.wait();
}

}  // namespace

uint64_t CudaModel::weight_bytes(const ModelConfig& config) {
  Layout layout(nullptr);
  lay_out(config, layout);
  return layout.bytes();
}

void CudaModel::require_shape(const ModelConfig& config) {
  require<Unsupported>(config.hidden % kUnit == 0 && config.ffn % kUnit == 0,
                       "model: rows of {} (hidden) and {} (ffn); a GPU takes multiples of {}", config.hidden,
                       config.ffn, kUnit);
  AttentionParams params;
  params.query_heads = config.query_heads;
  params.kv_heads = config.kv_heads;
  params.head_dim = config.head_dim;
  params.q_dtype = params.out_dtype = params.kv_dtype = DType::kBF16;
  params.tile_rule = TileRule::kAligned;
  const std::string reason = cuda_sm90_kernel.unsupported(params);
  require<Unsupported>(reason.empty(), "model: attention on a GPU: {}", reason);
}

CudaModel::CudaModel(std::shared_ptr<const Model> model, const LoadProgress& progress) {
  model_ = std::move(model);
  require_shape(model_->config());
  load(model_->weights(), allocate(), progress);
}

CudaModel::CudaModel(std::shared_ptr<const Model> model, uint64_t seed) {
  model_ = std::move(model);
  require_shape(model_->config());
  fill_random(model_->config(), allocate(), seed);
}

const CudaPlaces& CudaModel::allocate() {
  compute_ = Compute::kFast;
  const ModelConfig& config = model_->config();
  device_ = cuda::usable_device();
  const uint64_t bytes = weight_bytes(config);
  require<OutOfMemory>(bytes <= device_.free_bytes, "weights: {} in bf16, but {} of the {} of {} are free",
                       cuda::gigabytes(bytes), cuda::gigabytes(device_.free_bytes),
                       cuda::gigabytes(device_.total_bytes), device_.name);
  memory_.grow(static_cast<int64_t>(bytes));
  Layout layout(memory_.data());
  places_ = lay_out(config, layout);
  return places_;
}

std::unique_ptr<Engine> CudaModel::make_engine(std::shared_ptr<const PreparedModel> self,
                                               const EngineOptions& options) const {
  const cuda::DeviceScope scope(device_.index);
  return std::make_unique<CudaEngine>(std::static_pointer_cast<const CudaModel>(std::move(self)), options);
}

}  // namespace kascade
