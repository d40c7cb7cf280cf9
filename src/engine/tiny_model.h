// SPDX-License-Identifier: Apache-2.0
// Models made in memory, and a plain forward pass in double precision to hold the engine against.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kascade/engine.h"
#include "kascade/model.h"

namespace kascade::test {

/// Shape and features of a tiny model; weights are random from the seed.
struct TinyModelOptions {
  std::string architecture = "llama";
  int layers = 6;
  int hidden = 48;
  int ffn = 64;
  int query_heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int vocabulary = 61;
  int64_t context = 1024;
  RopeLayout rope_layout = RopeLayout::kHalves;
  RopeScaling rope_scaling{};
  bool frequency_factors = false;
  bool qkv_bias = false;
  bool qk_norm = false;
  uint64_t seed = 1;
};

/// A model whose weights live in it as fp32. Its tokenizer knows `vocabulary` tokens, spelled as given or
/// "<i>".
class TinyModel final : public Model {
 public:
  explicit TinyModel(const TinyModelOptions& options, std::vector<std::string> spellings = {},
                     int32_t end_id = -1);

  /// A model without layers whose next token is next[token], whatever came before.
  static std::shared_ptr<const TinyModel> successor(const std::vector<int32_t>& next,
                                                    std::vector<std::string> spellings, int32_t end_id = -1);

 private:
  TinyModel(std::vector<std::string> spellings, int32_t end_id, int vocabulary);
  WeightTensor tensor(int64_t rows, int64_t columns, double scale, double offset);
  void make_weights(const TinyModelOptions& options);

  std::vector<std::unique_ptr<std::vector<float>>> storage_;
  uint64_t random_ = 0;
};

/// Logits [tokens, vocabulary] of dense attention over tokens, in double precision and plain loops.
std::vector<double> reference_logits(const Model& model, std::span<const int32_t> tokens);

/// n token ids below vocabulary, from the seed.
std::vector<int32_t> random_tokens(int64_t n, int vocabulary, uint64_t seed);

/// An engine over model in fp32 with small pages.
std::unique_ptr<Engine> make_engine(std::shared_ptr<const Model> model, EngineOptions options = {},
                                    const std::string& compute = "f32");

/// Logits of every token of a prefill, [tokens, vocabulary], made row by row.
std::vector<float> prefill_logits(Engine& engine, Sequence& sequence, std::span<const int32_t> tokens,
                                  const Policy* policy = nullptr);

/// Logits of one decode step of one row.
std::vector<float> decode_logits(Engine& engine, Sequence& sequence, int32_t token,
                                 const Policy* policy = nullptr);

/// A plan of the model's shape; reuse layers read KV head (head + layer) % G.
Plan tiny_plan(const Model& model, std::vector<int> anchors, int tile = 32);

struct NamedPolicy {
  std::string name;
  std::shared_ptr<const Policy> policy;
};
/// Dense (null), then every policy of the registry under every preset that it knows; budgets of at least
/// floor keys.
std::vector<NamedPolicy> every_policy(const Model& model, const Plan& plan, int floor);

/// The largest |a - b|, infinite when the sizes differ or a value is not finite.
double largest_difference(std::span<const float> a, std::span<const float> b);

/// What the exception of type E that f throws says.
template <class E, class F>
std::string thrown(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "(nothing thrown)";
}

}  // namespace kascade::test
