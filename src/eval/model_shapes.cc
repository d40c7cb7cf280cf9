// SPDX-License-Identifier: Apache-2.0
#include "eval/model_shapes.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "base/check.h"
#include "eval/default_data.h"

namespace kascade {
namespace {

constexpr int kScaledAnchors = 5;

std::vector<ModelConfig> shapes() {
  ModelConfig llama;
  llama.architecture = "llama";
  llama.name = "llama-3.1-8b";
  llama.layers = 32;
  llama.hidden = 4096;
  llama.ffn = 14336;
  llama.query_heads = 32;
  llama.kv_heads = 8;
  llama.head_dim = 128;
  llama.vocabulary = 128256;
  llama.context = 131072;
  llama.norm_epsilon = 1e-5f;
  llama.rope_theta = 500000;
  llama.rope_scaling = {.kind = RopeScaling::Kind::kLlama3,
                        .factor = 8,
                        .low_freq_factor = 1,
                        .high_freq_factor = 4,
                        .original_context = 8192};

  ModelConfig qwen3;
  qwen3.architecture = "qwen3";
  qwen3.name = "qwen3-8b";
  qwen3.layers = 36;
  qwen3.hidden = 4096;
  qwen3.ffn = 12288;
  qwen3.query_heads = 32;
  qwen3.kv_heads = 8;
  qwen3.head_dim = 128;
  qwen3.vocabulary = 151936;
  qwen3.context = 40960;
  qwen3.norm_epsilon = 1e-6f;
  qwen3.rope_theta = 1000000;
  qwen3.qk_norm = true;

  ModelConfig qwen2;
  qwen2.architecture = "qwen2";
  qwen2.name = "qwen2.5-1.5b";
  qwen2.layers = 28;
  qwen2.hidden = 1536;
  qwen2.ffn = 8960;
  qwen2.query_heads = 12;
  qwen2.kv_heads = 2;
  qwen2.head_dim = 128;
  qwen2.vocabulary = 151936;
  qwen2.context = 32768;
  qwen2.norm_epsilon = 1e-6f;
  qwen2.rope_theta = 1000000;
  qwen2.qkv_bias = true;
  qwen2.tied_embeddings = true;
  return {llama, qwen3, qwen2};
}

class ShapeModel final : public Model {
 public:
  explicit ShapeModel(const ModelConfig& config) {
    config_ = config;
    path_ = config.name;
  }
};

}  // namespace

std::vector<std::string> model_shape_names() {
  std::vector<std::string> names;
  for (const ModelConfig& shape : shapes()) names.push_back(shape.name);
  return names;
}

std::shared_ptr<const Model> shape_model(const std::string& name, int64_t context) {
  for (ModelConfig& shape : shapes()) {
    if (shape.name != name) continue;
    shape.context = std::max(shape.context, context);
    return std::make_shared<ShapeModel>(shape);
  }
  throw_error<BadArgument>("shape: expected one of {}, got '{}'", fmt::join(model_shape_names(), ", "), name);
}

Plan published_plan(const ModelIdentity& model) {
  for (const std::string_view text : {published_llama_plan(), published_qwen3_plan()}) {
    Plan plan = parse_plan(std::string(text), "published plan");
    const ModelIdentity& made_for = plan.model;
    if (made_for.architecture == model.architecture && made_for.layers == model.layers &&
        made_for.query_heads == model.query_heads && made_for.kv_heads == model.kv_heads)
      return plan;
  }
  Plan plan;
  plan.model = model;
  plan.settings.method = "imported";
  plan.data.name = "anchors at equal distances, heads mapped to themselves";
  for (int i = 0; i < kScaledAnchors; ++i) plan.anchors.push_back(i * model.layers / kScaledAnchors);
  plan.anchors.erase(std::unique(plan.anchors.begin(), plan.anchors.end()), plan.anchors.end());
  std::vector<int> identity(static_cast<size_t>(model.kv_heads));
  std::iota(identity.begin(), identity.end(), 0);
  plan.head_map.assign(static_cast<size_t>(model.layers), identity);
  validate_plan(plan);
  return plan;
}

}  // namespace kascade
