// SPDX-License-Identifier: Apache-2.0
// The engine on a GPU against the engine on the CPU, and what must not change a bit of its results.
#include "engine/cuda/cuda_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "engine/cuda/test/cuda_engine_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::copy;
using test::CudaEngineTest;
using test::decode;
using test::exact_engine;
using test::gpu_engine;
using test::kCudaVocabulary;
using test::prefill;
using test::shape;
using test::thrown;
using test::tiny;
using test::TinyModel;
using test::TinyModelOptions;
using testing::HasSubstr;

/// |a - b| / |b| as vectors.
double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    norm += std::pow(double{b[i]}, 2);
  }
  return a.size() == b.size() ? std::sqrt(difference / norm) : INFINITY;
}

struct Architecture {
  const char* name;
  TinyModelOptions options;
};

class CudaEngineArchitecture : public testing::TestWithParam<Architecture> {};

TEST_P(CudaEngineArchitecture, DenseIsNearTheExactEngine) {
  const auto model = tiny(shape(GetParam().options));
  const auto tokens = test::random_tokens(300, kCudaVocabulary, 3);
  const auto gpu = gpu_engine(model), exact = exact_engine(model);
  const auto a = gpu->make_sequence(), b = exact->make_sequence();
  // 8 mantissa bits in weights, activations and KV through six layers whose softmax peaks magnify them; a
  // wrong bias, norm, rotation or key is off by half the norm and more.
  EXPECT_LT(relative_error(prefill(*gpu, *a, std::span(tokens).first(290), nullptr),
                           prefill(*exact, *b, std::span(tokens).first(290), nullptr)),
            0.1);
  for (size_t i = 290; i < tokens.size(); ++i)
    EXPECT_LT(relative_error(decode(*gpu, *a, tokens[i], nullptr), decode(*exact, *b, tokens[i], nullptr)),
              0.1);
  EXPECT_LT(relative_error(gpu->logits(a->last_hidden()), exact->logits(b->last_hidden())), 0.1);
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaEngineArchitecture,
    testing::Values(
        Architecture{"llama_halves", {}},
        Architecture{"llama_adjacent", {.rope_layout = RopeLayout::kAdjacent}},
        Architecture{
            "llama3_scaling",
            {.rope_scaling = {.kind = RopeScaling::Kind::kLlama3, .factor = 8, .original_context = 64}}},
        Architecture{"qwen2_bias", {.architecture = "qwen2", .qkv_bias = true}},
        Architecture{"qwen3_norm", {.architecture = "qwen3", .qk_norm = true}},
        Architecture{"mistral_six_heads", {.architecture = "mistral", .query_heads = 6, .kv_heads = 2}}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST_F(CudaEngineTest, PoliciesAreNearTheExactEngine) {
  const auto gpu = gpu_engine(model_), exact = exact_engine(model_);
  for (const auto& [name, policy] : policies_) {
    const auto a = gpu->make_sequence(), b = exact->make_sequence();
    prefill(*gpu, *a, std::span(tokens_).first(600), policy.get());
    prefill(*exact, *b, std::span(tokens_).first(600), policy.get());
    double sum = 0;
    for (size_t i = 600; i < 632; ++i)
      sum += relative_error(decode(*gpu, *a, tokens_[i], policy.get()),
                            decode(*exact, *b, tokens_[i], policy.get()));
    // Keys at the cut of a set may differ where bf16 reverses two of them; another set altogether gives 0.5
    // and more.
    EXPECT_LT(sum / 32, 0.2) << name;
  }
}

TEST_F(CudaEngineTest, SparsePoliciesDifferFromDense) {
  const auto gpu = gpu_engine(model_);
  const auto dense = gpu->make_sequence();
  const auto expected = prefill(*gpu, *dense, tokens_, nullptr);
  for (const auto& [name, policy] : policies_) {
    if (policy == nullptr || name == "decode only") continue;
    const auto sequence = gpu->make_sequence();
    EXPECT_GT(relative_error(prefill(*gpu, *sequence, tokens_, policy.get()), expected), 1e-3) << name;
  }
}

// An observer, which keeps steps out of graphs.
class Watcher final : public LayerObserver {};

TEST_F(CudaEngineTest, GraphReplayChangesNoBit) {
  // Invariant: what is chosen by time may differ between two engines.
  const auto graphs = gpu_engine(model_, {.invariant = true}),
             plain = gpu_engine(model_, {.invariant = true});
  Watcher watcher;
  for (const auto& [name, policy] : policies_) {
    const auto a = graphs->make_sequence(), b = plain->make_sequence();
    prefill(*graphs, *a, std::span(tokens_).first(650), policy.get());
    prefill(*plain, *b, std::span(tokens_).first(650), policy.get());
    for (size_t i = 650; i < 660; ++i) {
      const ForwardItem item{b.get(), {&tokens_[i], 1}, 0};
      const auto expected = copy(plain->forward(
          {&item, 1}, {.phase = Phase::kDecode, .policy = policy.get(), .observer = &watcher}));
      EXPECT_EQ(decode(*graphs, *a, tokens_[i], policy.get()), expected) << name << " " << i;
    }
  }
}

TEST_F(CudaEngineTest, GraphsServeOtherLengthsAndSequences) {
  const auto engine = gpu_engine(model_);
  const Policy* policy = policies_[1].policy.get();
  // Steps of many lengths and sequences through one graph, against steps of fresh engines.
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(40), policy);
  prefill(*engine, *b, std::span(tokens_).first(500), policy);
  for (int step = 0; step < 4; ++step) {
    decode(*engine, *a, tokens_[40 + step], policy);
    decode(*engine, *b, tokens_[500 + step], policy);
  }
  for (const auto& [sequence, length] : {std::pair{a.get(), 44}, std::pair{b.get(), 504}}) {
    const auto fresh = gpu_engine(model_);
    const auto expected = fresh->make_sequence();
    const int first = length - 4;
    prefill(*fresh, *expected, std::span(tokens_).first(first), policy);
    std::vector<float> last;
    for (int i = first; i < length; ++i) last = decode(*fresh, *expected, tokens_[i], policy);
    // The products of either engine were chosen by time, so bits may differ; keys of another sequence would
    // show.
    EXPECT_LT(relative_error(sequence->last_hidden(), last), 0.05) << length;
  }
}

TEST_F(CudaEngineTest, GreedyIsTheLargestLogit) {
  const auto engine = gpu_engine(model_, {.invariant = true});
  const Policy* policy = policies_[1].policy.get();
  const auto a = engine->make_sequence(), b = engine->make_sequence(), idle = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(333), policy);
  prefill(*engine, *b, std::span(tokens_).first(64), policy);
  std::vector<int32_t> next = {tokens_[333], 0, tokens_[64]};
  for (int step = 0; step < 5; ++step) {
    const std::vector<int32_t> fed = next;
    const std::vector<ForwardItem> items = {
        {a.get(), {&fed[0], 1}}, {idle.get(), {}}, {b.get(), {&fed[2], 1}}};
    engine->forward_greedy(items, policy, next);
    EXPECT_EQ(next[1], -1);
    for (const auto& [sequence, token] : {std::pair{a.get(), next[0]}, std::pair{b.get(), next[2]}}) {
      const std::span<const float> logits = engine->logits(sequence->last_hidden());
      EXPECT_EQ(token, std::max_element(logits.begin(), logits.end()) - logits.begin()) << step;
    }
  }
  EXPECT_EQ(a->length(), 338);
}

TEST_F(CudaEngineTest, SamplingFollowsTheBitsThroughGraphs) {
  const auto engine = gpu_engine(model_, {.invariant = true});
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(333), nullptr);
  prefill(*engine, *b, std::span(tokens_).first(64), nullptr);
  const std::vector<ForwardItem> items = {{a.get(), {&tokens_[333], 1}}, {b.get(), {&tokens_[64], 1}}};
  std::vector<int32_t> next(2), first;
  std::set<int32_t> drawn;
  for (const int round : {0, 1}) {
    for (uint64_t i = 0; i < 16; ++i) {
      a->truncate(333);
      b->truncate(64);
      const std::vector<TokenSampling> sampling = {{.temperature = 2, .random = i << 60}, {}};
      engine->forward_next(items, nullptr, sampling, next);
      const std::span<const float> logits = engine->logits(b->last_hidden());
      EXPECT_EQ(next[1], std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (round == 0) {
        first.push_back(next[0]);
        drawn.insert(next[0]);
      } else {
        EXPECT_EQ(next[0], first[i]) << i;
      }
    }
  }
  EXPECT_GT(drawn.size(), 2u);
  EXPECT_TRUE(std::is_sorted(first.begin(), first.end()));  // more of the mass, a later token
}

TEST_F(CudaEngineTest, InvariantModeHidesChunksAndSharedPrefixes) {
  const auto whole = gpu_engine(model_, {.invariant = true});
  const auto chunked = gpu_engine(model_, {.prefill_chunk = 128, .invariant = true});
  for (const auto& [name, policy] : policies_) {
    // Budgets of the final length belong to one prompt; prefixes are shared between prompts of any length.
    const bool rolling = name == "dense" || name == "default" || name == "pooled" || name == "no remap";
    const auto a = whole->make_sequence(), b = chunked->make_sequence();
    const auto expected = prefill(*whole, *a, tokens_, policy.get());
    EXPECT_EQ(prefill(*chunked, *b, tokens_, policy.get()), expected) << name;
    if (!rolling) continue;
    const auto c = whole->make_sequence(*a, 352);
    EXPECT_EQ(prefill(*whole, *c, std::span(tokens_).subspan(352), policy.get()), expected) << name;
    a->truncate(96);
    EXPECT_EQ(prefill(*whole, *a, std::span(tokens_).subspan(96), policy.get()), expected) << name;
  }
}

TEST_F(CudaEngineTest, TeacherForcedRowsEqualDecodeSteps) {
  const auto engine = gpu_engine(model_, {.invariant = true});
  for (const auto& [name, policy] : policies_) {
    const auto a = engine->make_sequence(), b = engine->make_sequence();
    prefill(*engine, *a, std::span(tokens_).first(600), nullptr);
    prefill(*engine, *b, std::span(tokens_).first(600), nullptr);
    const ForwardItem item{a.get(), std::span(tokens_).subspan(600, 40), 0};
    const auto rows = copy(engine->forward({&item, 1}, {.phase = Phase::kRows, .policy = policy.get()}));
    double sum = 0;
    for (int i = 0; i < 40; ++i) {
      const auto step = decode(*engine, *b, tokens_[600 + i], policy.get());
      sum += relative_error(std::span(rows).subspan(i * step.size(), step.size()), step);
    }
    // Dense rows go through the tiles' kernel here and the steps' there: rounding alone.
    EXPECT_LT(sum / 40, 0.05) << name;
  }
}

// Asks for what calibration asks for.
class Collector final : public LayerObserver {
 public:
  void before_attention(int, Phase, AttentionParams& params) override {
    const int64_t keys = params.seq_lens_kv[0], rows = params.cu_seqlens_q[1];
    tiles_ = tiles_of(params, rows, keys);
    weights_.assign(static_cast<size_t>(tiles_ * params.kv_heads * keys), -1);
    mass_.assign(static_cast<size_t>(tiles_ * params.kv_heads), -1);
    params.pooled_weights = weights_.data();
    params.pooled_head_stride = keys;
    params.pooled_tile_stride = keys * params.kv_heads;
    params.own_tile_mass = mass_.data();
  }
  void after_attention(const LayerEvent& event) override {
    const AttentionParams& params = *event.attention;
    weights.push_back(weights_);
    mass.push_back(mass_);
    counts.emplace_back(params.counts, params.counts + tiles_ * params.kv_heads);
    members.emplace_back(params.positions, params.positions + tiles_ * params.kv_heads * params.capacity);
    residuals.emplace_back(event.residual_out, event.residual_out + event.rows * 96);
  }
  std::vector<std::vector<float>> weights, mass, residuals;
  std::vector<std::vector<int32_t>> counts, members;

 private:
  int64_t tiles_ = 0;
  std::vector<float> weights_, mass_;
};

/// The share of expected's members that seen chose too, over all sets of a layer; 0 for lists of other sizes.
double shared_members(const Collector& seen, const Collector& expected, size_t layer) {
  const std::vector<int32_t>&counts = expected.counts[layer], &a = seen.members[layer],
        &b = expected.members[layer];
  if (a.size() != b.size() || counts != seen.counts[layer]) return 0;
  const size_t capacity = b.size() / counts.size();
  double shared = 0, all = 0;
  for (size_t set = 0; set < counts.size(); ++set) {
    const auto members = [&](const std::vector<int32_t>& list) {
      const auto first = list.begin() + static_cast<int64_t>(set * capacity);
      return std::set<int32_t>(first, first + counts[set]);
    };
    const std::set<int32_t> wanted = members(b);
    for (const int32_t key : members(a)) shared += wanted.contains(key) ? 1 : 0;
    all += static_cast<double>(wanted.size());
  }
  return all > 0 ? shared / all : 0;
}

class SelectEverywhere final : public Policy {
 public:
  const std::string& name() const override { return name_; }
  std::string describe() const override { return name_; }
  LayerRule rule(int, Phase) const override {
    LayerRule rule;
    rule.role = Role::kLayer0;
    rule.budget = Budget{.percent_hundredths = 0, .floor = 16};
    return rule;
  }

 private:
  std::string name_ = "select everywhere";
};

TEST_F(CudaEngineTest, ObserversSeeWhatTheCpuShows) {
  const auto gpu = gpu_engine(model_), exact = exact_engine(model_);
  const SelectEverywhere policy;
  Collector seen, expected;
  const auto a = gpu->make_sequence(), b = exact->make_sequence();
  const std::span<const int32_t> prompt = std::span(tokens_).first(200);
  gpu->prefill(*a, prompt, &policy, &seen, {}, nullptr);
  exact->prefill(*b, prompt, &policy, &expected, {}, nullptr);
  ASSERT_EQ(seen.weights.size(), 4u);
  for (size_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(seen.counts[layer], expected.counts[layer]) << layer;
    EXPECT_LT(relative_error(seen.mass[layer], expected.mass[layer]), 0.05) << layer;
    EXPECT_LT(relative_error(seen.residuals[layer], expected.residuals[layer]), 0.1) << layer;
    // Weights of the last tile's candidates.
    const size_t count = 192, at = (6 * 2 + 1) * 200;
    EXPECT_LT(relative_error(std::span(seen.weights[layer]).subspan(at, count),
                             std::span(expected.weights[layer]).subspan(at, count)),
              0.1)
        << layer;
  }
  // Keys at the cut of a set may differ where bf16 reverses two of them.
  for (size_t layer = 0; layer < 4; ++layer) EXPECT_GE(shared_members(seen, expected, layer), 0.95) << layer;
}

TEST(CudaEngineErrors, WhatAGpuDoesNotRunIsNamed) {
  EXPECT_THAT(thrown<Unsupported>([] { PreparedModel::create(tiny(), "f32", "cuda"); }),
              HasSubstr("compute"));
  EXPECT_THAT(thrown<BadArgument>([] { PreparedModel::create(tiny(), "auto", "tpu"); }), HasSubstr("device"));
  EXPECT_THAT(thrown<Unsupported>([] {
                PreparedModel::create(std::make_shared<TinyModel>(TinyModelOptions{}), "auto", "cuda");
              }),
              HasSubstr("head_dim is 16"));
}

TEST(CudaEngineSynthetic, RandomWeightsAndFilledCachesRun) {
  const auto prepared = std::make_shared<CudaModel>(tiny(), 7);
  const auto engine = Engine::create(prepared, {.cache_tokens = 4096, .prefill_chunk = 512});
  const auto sequence = engine->make_sequence();
  dynamic_cast<CudaEngine&>(*engine).fill_cache(*sequence, 1000, 5);
  EXPECT_EQ(sequence->length(), 1000);
  const std::vector<float> hidden = decode(*engine, *sequence, 3, nullptr);
  EXPECT_TRUE(std::all_of(hidden.begin(), hidden.end(), [](float x) { return std::isfinite(x); }));
  EXPECT_GT(engine->memory_bytes(), prepared->bytes());
}

}  // namespace
}  // namespace kascade
