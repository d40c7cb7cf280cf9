// SPDX-License-Identifier: Apache-2.0
// A decoder model as data: configuration, weights as stored in the file (memory-mapped), tokenizer, chat
// template.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kascade/chat_template.h"
#include "kascade/plan.h"
#include "kascade/tokenizer.h"
#include "kascade/weight.h"

namespace kascade {

/// Rotary embedding: which elements of a head form a pair. GGUF "llama"/"mistral" files store q and k rows
/// permuted so that pairs are adjacent; safetensors and GGUF qwen files pair element i with i + rotary_dim
/// / 2.
enum class RopeLayout : uint8_t { kAdjacent, kHalves };

/// Llama-3 rope scaling (factor 1 = none), linear scaling, or none.
struct RopeScaling {
  enum class Kind : uint8_t { kNone, kLinear, kLlama3 } kind = Kind::kNone;
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_context = 8192;
};

struct ModelConfig {
  std::string architecture;  // "llama", "mistral", "qwen2", "qwen3"
  std::string name;
  int layers = 0;
  int hidden = 0;
  int ffn = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int vocabulary = 0;
  int64_t context = 0;  // tokens
  float norm_epsilon = 1e-5f;
  double rope_theta = 10000;
  RopeLayout rope_layout = RopeLayout::kHalves;
  RopeScaling rope_scaling;
  std::vector<float>
      rope_frequency_factors;  // [head_dim/2] divisors stored in GGUF "rope_freqs.weight"; else empty
  bool qkv_bias = false;       // qwen2
  bool qk_norm = false;        // qwen3: RMS norm of each q and k head before rotary embedding
  bool tied_embeddings = false;
};

struct LayerWeights {
  WeightTensor attention_norm;          // [hidden]
  WeightTensor q, k, v;                 // [H*D, hidden], [G*D, hidden] twice
  WeightTensor q_bias, k_bias, v_bias;  // [H*D], [G*D] twice; null unless qkv_bias
  WeightTensor q_norm, k_norm;          // [head_dim]; null unless qk_norm
  WeightTensor output;                  // [hidden, H*D]
  WeightTensor ffn_norm;                // [hidden]
  WeightTensor gate, up;                // [ffn, hidden]
  WeightTensor down;                    // [hidden, ffn]
};

struct ModelWeights {
  WeightTensor embedding;  // [vocabulary, hidden]
  std::vector<LayerWeights> layers;
  WeightTensor final_norm;  // [hidden]
  WeightTensor head;        // [vocabulary, hidden]; the embedding again when tied
  uint64_t bytes = 0;       // of all tensors as stored, tied ones once
};

/// An opened, fully checked model. Immutable after open; safe to share between threads.
class Model {
 public:
  /// A .gguf file, or a directory with config.json, tokenizer.json and safetensors (sharded or not).
  /// Everything is checked here: a model that opens can run. Throws BadFile, Unsupported or IoError naming
  /// file and field. The files stay mapped: changed in place, they may change the weights; cut short, they
  /// may end the process with SIGBUS.
  static std::shared_ptr<const Model> open(const std::string& path);
  virtual ~Model();

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  /// The model's chat template source; empty when it has none. Parsed when used (template faults concern chat
  /// alone).
  const std::string& chat_template_source() const { return chat_template_source_; }
  const std::string& path() const { return path_; }
  ModelIdentity identity() const;

 protected:
  Model() = default;
  std::string path_;
  ModelConfig config_;
  ModelWeights weights_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  std::string chat_template_source_;
  std::string fingerprint_;
};

}  // namespace kascade
