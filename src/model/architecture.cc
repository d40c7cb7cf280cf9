// SPDX-License-Identifier: Apache-2.0
#include "model/architecture.h"

#include "base/check.h"

namespace kascade {
namespace {

constexpr Architecture kArchitectures[] = {
    {.name = "llama",
     .gguf_name = "llama",
     .class_name = "LlamaForCausalLM",
     .gguf_rope_layout = RopeLayout::kAdjacent,
     .qkv_bias = false,
     .qk_norm = false},
    {.name = "mistral",
     .gguf_name = nullptr,  // the same mathematics as llama, and converters call it so
     .class_name = "MistralForCausalLM",
     .gguf_rope_layout = RopeLayout::kAdjacent,
     .qkv_bias = false,
     .qk_norm = false},
    {.name = "qwen2",
     .gguf_name = "qwen2",
     .class_name = "Qwen2ForCausalLM",
     .gguf_rope_layout = RopeLayout::kHalves,
     .qkv_bias = true,
     .qk_norm = false},
    {.name = "qwen3",
     .gguf_name = "qwen3",
     .class_name = "Qwen3ForCausalLM",
     .gguf_rope_layout = RopeLayout::kHalves,
     .qkv_bias = false,
     .qk_norm = true},
};

enum class Extent { kVector, kHidden, kFfn, kQuery, kKv, kHead };
enum class When { kAlways, kQkvBias, kQkNorm };

// A tensor of every layer. Names follow the layer's prefix.
struct LayerTensor {
  WeightTensor LayerWeights::*member;
  const char* gguf;
  const char* safetensors;
  Extent rows;  // kVector: there are only columns
  Extent columns;
  When when = When::kAlways;
};

constexpr LayerTensor kLayerTensors[] = {
    {&LayerWeights::attention_norm, "attn_norm.weight", "input_layernorm.weight", Extent::kVector,
     Extent::kHidden},
    {&LayerWeights::q, "attn_q.weight", "self_attn.q_proj.weight", Extent::kQuery, Extent::kHidden},
    {&LayerWeights::k, "attn_k.weight", "self_attn.k_proj.weight", Extent::kKv, Extent::kHidden},
    {&LayerWeights::v, "attn_v.weight", "self_attn.v_proj.weight", Extent::kKv, Extent::kHidden},
    {&LayerWeights::q_bias, "attn_q.bias", "self_attn.q_proj.bias", Extent::kVector, Extent::kQuery,
     When::kQkvBias},
    {&LayerWeights::k_bias, "attn_k.bias", "self_attn.k_proj.bias", Extent::kVector, Extent::kKv,
     When::kQkvBias},
    {&LayerWeights::v_bias, "attn_v.bias", "self_attn.v_proj.bias", Extent::kVector, Extent::kKv,
     When::kQkvBias},
    {&LayerWeights::q_norm, "attn_q_norm.weight", "self_attn.q_norm.weight", Extent::kVector, Extent::kHead,
     When::kQkNorm},
    {&LayerWeights::k_norm, "attn_k_norm.weight", "self_attn.k_norm.weight", Extent::kVector, Extent::kHead,
     When::kQkNorm},
    {&LayerWeights::output, "attn_output.weight", "self_attn.o_proj.weight", Extent::kHidden, Extent::kQuery},
    {&LayerWeights::ffn_norm, "ffn_norm.weight", "post_attention_layernorm.weight", Extent::kVector,
     Extent::kHidden},
    {&LayerWeights::gate, "ffn_gate.weight", "mlp.gate_proj.weight", Extent::kFfn, Extent::kHidden},
    {&LayerWeights::up, "ffn_up.weight", "mlp.up_proj.weight", Extent::kFfn, Extent::kHidden},
    {&LayerWeights::down, "ffn_down.weight", "mlp.down_proj.weight", Extent::kHidden, Extent::kFfn},
};

int64_t elements(Extent extent, const ModelConfig& config) {
  switch (extent) {
    case Extent::kVector:
      return 1;
    case Extent::kHidden:
      return config.hidden;
    case Extent::kFfn:
      return config.ffn;
    case Extent::kQuery:
      return int64_t{config.query_heads} * config.head_dim;
    case Extent::kKv:
      return int64_t{config.kv_heads} * config.head_dim;
    case Extent::kHead:
      return config.head_dim;
  }
  return 0;
}

bool applies(When when, const ModelConfig& config) {
  return when == When::kAlways || (when == When::kQkvBias ? config.qkv_bias : config.qk_norm);
}

LayerWeights take_layer(TensorMap& tensors, TensorNames names, const ModelConfig& config, int layer,
                        uint64_t* bytes) {
  const bool gguf = names == TensorNames::kGguf;
  const std::string prefix = fmt::format(fmt::runtime(gguf ? "blk.{}." : "model.layers.{}."), layer);
  LayerWeights weights;
  for (const LayerTensor& tensor : kLayerTensors) {
    if (!applies(tensor.when, config)) continue;
    const std::string name = prefix + (gguf ? tensor.gguf : tensor.safetensors);
    const int64_t columns = elements(tensor.columns, config);
    WeightTensor& weight = weights.*tensor.member;
    weight = tensor.rows == Extent::kVector
                 ? tensors.take_vector(name, columns)
                 : tensors.take_matrix(name, elements(tensor.rows, config), columns);
    *bytes += static_cast<uint64_t>(weight.bytes());
  }
  // Old checkpoints carry the rotary frequencies, which follow from the configuration.
  if (!gguf) tensors.drop(prefix + "self_attn.rotary_emb.inv_freq");
  return weights;
}

}  // namespace

const Architecture* find_gguf_architecture(std::string_view gguf_name) {
  for (const Architecture& architecture : kArchitectures)
    if (architecture.gguf_name != nullptr && gguf_name == architecture.gguf_name) return &architecture;
  return nullptr;
}

const Architecture* find_architecture(std::string_view name) {
  for (const Architecture& architecture : kArchitectures)
    if (name == architecture.name) return &architecture;
  return nullptr;
}

std::string architecture_names() {
  std::string names;
  for (const Architecture& architecture : kArchitectures) {
    if (!names.empty()) names += ", ";
    names += architecture.name;
  }
  return names;
}

void check_config(const ModelConfig& config, const std::string& source) {
  require<BadFile>(config.query_heads % config.kv_heads == 0,
                   "{}: query heads: expected a multiple of the {} KV heads, got {}", source, config.kv_heads,
                   config.query_heads);
  require<Unsupported>(config.query_heads / config.kv_heads <= 16,
                       "{}: query heads for each KV head: expected 1..16, got {}", source,
                       config.query_heads / config.kv_heads);
  require<Unsupported>(config.head_dim % 8 == 0, "{}: head dimension: expected a multiple of 8, got {}",
                       source, config.head_dim);
}

ModelWeights take_weights(TensorMap& tensors, TensorNames names, const ModelConfig& config) {
  const bool gguf = names == TensorNames::kGguf;
  const char* embedding = gguf ? "token_embd.weight" : "model.embed_tokens.weight";
  const char* final_norm = gguf ? "output_norm.weight" : "model.norm.weight";
  const char* head = gguf ? "output.weight" : "lm_head.weight";

  ModelWeights weights;
  weights.embedding = tensors.take_matrix(embedding, config.vocabulary, config.hidden);
  weights.bytes = static_cast<uint64_t>(weights.embedding.bytes());
  // One by one: a claimed layer count allocates nothing before the tensors of its layers were found.
  for (int layer = 0; layer < config.layers; ++layer)
    weights.layers.push_back(take_layer(tensors, names, config, layer, &weights.bytes));
  weights.final_norm = tensors.take_vector(final_norm, config.hidden);
  weights.bytes += static_cast<uint64_t>(weights.final_norm.bytes());
  if (config.tied_embeddings) {
    tensors.drop(head);
    weights.head = weights.embedding;
  } else {
    weights.head = tensors.take_matrix(head, config.vocabulary, config.hidden);
    weights.bytes += static_cast<uint64_t>(weights.head.bytes());
  }
  tensors.refuse_rest(config.architecture);
  return weights;
}

}  // namespace kascade
