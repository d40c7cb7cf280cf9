// SPDX-License-Identifier: Apache-2.0
// What the tests of the engine on a GPU share: a small model on either device, policies whose budgets bite.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/tiny_model.h"
#include "kascade/engine.h"

namespace kascade::test {

constexpr int kCudaVocabulary = 61;

inline TinyModelOptions shape(TinyModelOptions options = {}) {
  options.layers = 4;
  options.hidden = 96;
  options.ffn = 128;
  options.head_dim = 64;
  options.vocabulary = kCudaVocabulary;
  options.context = 4096;
  return options;
}

inline std::shared_ptr<const Model> tiny(const TinyModelOptions& options = shape()) {
  return std::make_shared<TinyModel>(options);
}

inline std::unique_ptr<Engine> gpu_engine(const std::shared_ptr<const Model>& model,
                                          EngineOptions options = {}) {
  if (options.cache_tokens == 0) options.cache_tokens = 16384;
  if (options.prefill_chunk == 0) options.prefill_chunk = 1024;
  return Engine::create(PreparedModel::create(model, "auto", "cuda"), options);
}

inline std::unique_ptr<Engine> exact_engine(const std::shared_ptr<const Model>& model) {
  return make_engine(model, {.cache_tokens = 16384, .prefill_chunk = 1024});
}

/// Budgets that bite at a few hundred tokens.
inline std::vector<NamedPolicy> policies_of(const Model& model) {
  return every_policy(model, tiny_plan(model, {0, 2}), 24);
}

inline std::vector<float> copy(std::span<const float> values) { return {values.begin(), values.end()}; }

/// Residual of the last row after a prefill of tokens.
inline std::vector<float> prefill(Engine& engine, Sequence& sequence, std::span<const int32_t> tokens,
                                  const Policy* policy) {
  return copy(engine.prefill(sequence, tokens, policy, nullptr, {}, nullptr));
}

inline std::vector<float> decode(Engine& engine, Sequence& sequence, int32_t token, const Policy* policy) {
  const ForwardItem item{&sequence, {&token, 1}, 0};
  return copy(engine.forward({&item, 1}, {.phase = Phase::kDecode, .policy = policy}));
}

class CudaEngineTest : public testing::Test {
 protected:
  std::shared_ptr<const Model> model_ = tiny();
  std::vector<NamedPolicy> policies_ = policies_of(*model_);
  std::vector<int32_t> tokens_ = random_tokens(700, kCudaVocabulary, 3);
};

}  // namespace kascade::test
