// SPDX-License-Identifier: Apache-2.0
// The engine in fp32 against a plain double-precision forward pass, and what must not change a bit of its
// results.
#include "kascade/engine.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/tiny_model.h"

namespace kascade {
namespace {

using test::NamedPolicy;
using test::TinyModel;
using test::TinyModelOptions;

// fp32 sums of some hundred terms over six layers, and softmax peaks that magnify them; logits are of
// order 10. The plain pass is some 1e-4 away at worst, a wrong key some 1e-1.
constexpr double kFloatTolerance = 3e-4;

std::shared_ptr<const Model> tiny(const TinyModelOptions& options = {}) {
  return std::make_shared<TinyModel>(options);
}

/// Budgets that bite at a few hundred tokens.
std::vector<NamedPolicy> policies_of(const Model& model, int tile = 32) {
  return test::every_policy(model, test::tiny_plan(model, {0, 2, 4}, tile), 9);
}

std::vector<float> as_floats(const std::vector<double>& values) { return {values.begin(), values.end()}; }

// --- against the plain forward pass ---

struct Architecture {
  const char* name;
  TinyModelOptions options;
};
std::vector<Architecture> architectures() {
  const RopeScaling llama3{.kind = RopeScaling::Kind::kLlama3,
                           .factor = 8,
                           .low_freq_factor = 1,
                           .high_freq_factor = 4,
                           .original_context = 64};
  return {
      {"llama_adjacent", {.rope_layout = RopeLayout::kAdjacent}},
      {"llama3_scaling", {.rope_scaling = llama3}},
      {"linear_scaling", {.rope_scaling = {.kind = RopeScaling::Kind::kLinear, .factor = 4}}},
      {"frequency_factors", {.rope_layout = RopeLayout::kAdjacent, .frequency_factors = true}},
      {"mistral_wide_heads", {.architecture = "mistral", .query_heads = 6, .kv_heads = 2, .head_dim = 24}},
      {"qwen2_bias", {.architecture = "qwen2", .qkv_bias = true}},
      {"qwen3_norm", {.architecture = "qwen3", .head_dim = 32, .qk_norm = true}},
      {"one_layer_one_head", {.layers = 1, .query_heads = 1, .kv_heads = 1}}};
}

class EngineArchitecture : public testing::TestWithParam<Architecture> {};

TEST_P(EngineArchitecture, DensePrefillAndDecodeMatchThePlainForwardPass) {
  const auto model = tiny(GetParam().options);
  const auto tokens = test::random_tokens(150, model->config().vocabulary, 3);
  const std::vector<float> expected = as_floats(test::reference_logits(*model, tokens));
  const auto engine = test::make_engine(model, {.page_size = 16});
  const auto sequence = engine->make_sequence();
  std::vector<float> logits = test::prefill_logits(*engine, *sequence, std::span(tokens).first(140));
  for (size_t i = 140; i < tokens.size(); ++i) {
    const auto row = test::decode_logits(*engine, *sequence, tokens[i]);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  EXPECT_EQ(sequence->length(), 150);
  EXPECT_LT(test::largest_difference(logits, expected), kFloatTolerance);
}

TEST_P(EngineArchitecture, SixteenBitCacheStaysClose) {
  const auto model = tiny(GetParam().options);
  const auto tokens = test::random_tokens(60, model->config().vocabulary, 4);
  const auto engine = test::make_engine(model, {}, "auto"), exact = test::make_engine(model);
  const auto sequence = engine->make_sequence(), exact_sequence = exact->make_sequence();
  const auto fast = test::prefill_logits(*engine, *sequence, tokens);
  const auto slow = test::prefill_logits(*exact, *exact_sequence, tokens);
  // 8 mantissa bits in K, V and products, through peaked attention: a few tenths of logits of order 10.
  EXPECT_LT(test::largest_difference(fast, slow), 1.5);
  EXPECT_GT(test::largest_difference(fast, slow), 0);
}

INSTANTIATE_TEST_SUITE_P(All, EngineArchitecture, testing::ValuesIn(architectures()),
                         [](const auto& instance) { return std::string(instance.param.name); });

// --- what must not change a bit ---

class EngineBits : public testing::Test {
 protected:
  EngineBits() : model_(tiny()), policies_(policies_of(*model_)) {}

  /// Prefill of 330 tokens and three steps.
  std::vector<float> run(Engine& engine, const Policy* policy, std::span<const int32_t> tokens) {
    const auto sequence = engine.make_sequence();
    std::vector<float> all = test::prefill_logits(engine, *sequence, tokens.first(tokens.size() - 3), policy);
    for (const int32_t token : tokens.last(3)) {
      const auto row = test::decode_logits(engine, *sequence, token, policy);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }

  std::shared_ptr<const Model> model_;
  std::vector<NamedPolicy> policies_;
  std::vector<int32_t> tokens_ = test::random_tokens(333, 61, 5);
};

TEST_F(EngineBits, ChunkingAtTileBoundaries) {
  const auto whole = test::make_engine(model_, {.prefill_chunk = 512});
  const auto chunked = test::make_engine(model_, {.prefill_chunk = 128});
  for (const auto& [name, policy] : policies_)
    EXPECT_EQ(run(*whole, policy.get(), tokens_), run(*chunked, policy.get(), tokens_)) << name;
}

TEST_F(EngineBits, ChunkingWithATileThatDoesNotDivideTheChunk) {
  const auto whole = test::make_engine(model_, {.prefill_chunk = 512});
  const auto chunked = test::make_engine(model_, {.prefill_chunk = 128});
  for (const auto& [name, policy] : policies_of(*model_, 48))
    EXPECT_EQ(run(*whole, policy.get(), tokens_), run(*chunked, policy.get(), tokens_)) << name;
}

TEST_F(EngineBits, Threads) {
  for (const char* compute : {"f32", "auto"}) {
    const auto one = test::make_engine(model_, {.threads = 1}, compute);
    const auto three = test::make_engine(model_, {.threads = 3}, compute);
    for (const auto& [name, policy] : policies_)
      EXPECT_EQ(run(*one, policy.get(), tokens_), run(*three, policy.get(), tokens_))
          << name << " " << compute;
  }
}

TEST_F(EngineBits, PageSizeAndPageOrder) {
  const auto plain = test::make_engine(model_, {.page_size = 512});
  const auto paged = test::make_engine(model_, {.cache_tokens = 2048, .page_size = 16});
  // Pages of two sequences that grew by turns and ended in the other order: the next one's pages are
  // scattered.
  auto a = paged->make_sequence(), b = paged->make_sequence();
  for (int i = 0; i < 12; ++i) {
    test::prefill_logits(*paged, i % 2 == 0 ? *a : *b, std::span(tokens_).first(20 + i));
  }
  a.reset();
  b.reset();
  for (const auto& [name, policy] : policies_)
    EXPECT_EQ(run(*plain, policy.get(), tokens_), run(*paged, policy.get(), tokens_)) << name;
}

TEST_F(EngineBits, BatchMates) {
  for (const char* compute : {"f32", "auto"}) {
    const auto engine = test::make_engine(model_, {.cache_tokens = 4096}, compute);
    for (const auto& [name, policy] : policies_) {
      // Alone.
      const auto alone = engine->make_sequence();
      engine->prefill(*alone, std::span(tokens_).first(200), policy.get(), nullptr, {}, nullptr);
      const ForwardItem one{alone.get(), std::span(tokens_).subspan(200, 3), 0};
      const auto span = engine->forward({&one, 1}, {.phase = Phase::kDecode, .policy = policy.get()});
      const std::vector<float> expected(span.begin(), span.end());
      // Between an empty item, a longer and nine shorter mates: more rows than one product of the decode path
      // takes.
      std::vector<std::unique_ptr<Sequence>> sequences;
      std::vector<ForwardItem> items;
      for (const int64_t length : {0, 333, 200, 1, 2, 3, 31, 32, 33, 64, 65, 90}) {
        sequences.push_back(engine->make_sequence());
        Sequence& sequence = *sequences.back();
        engine->prefill(sequence, std::span(tokens_).first(length), policy.get(), nullptr, {}, nullptr);
        const bool subject = length == 200;
        items.push_back({&sequence,
                         std::span(tokens_).subspan(subject ? 200 : 0, length == 0 ? 0
                                                                       : subject   ? 3
                                                                                   : 1),
                         0});
      }
      const auto rows = engine->forward(items, {.phase = Phase::kDecode, .policy = policy.get()});
      const auto subject = rows.subspan(model_->config().hidden, expected.size());
      EXPECT_EQ(std::vector<float>(subject.begin(), subject.end()), expected) << name << " " << compute;
      EXPECT_EQ(sequences[0]->length(), 0);
    }
  }
}

TEST_F(EngineBits, PrefillBatchMates) {
  const auto engine = test::make_engine(model_, {.cache_tokens = 4096, .prefill_chunk = 512});
  for (const auto& [name, policy] : policies_) {
    std::vector<std::vector<float>> expected;
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<ForwardItem> items;
    for (const auto& [begin, length] : {std::pair{0, 150}, {7, 33}, {20, 300}}) {
      const auto alone = engine->make_sequence();
      const ForwardItem item{alone.get(), std::span(tokens_).subspan(begin, length), 0};
      const auto span = engine->forward({&item, 1}, {.policy = policy.get()});
      expected.emplace_back(span.begin(), span.end());
      sequences.push_back(engine->make_sequence());
      items.push_back({sequences.back().get(), item.tokens, 0});
    }
    const auto rows = engine->forward(items, {.policy = policy.get()});
    size_t begin = 0;
    for (const std::vector<float>& alone : expected) {
      const auto part = rows.subspan(begin, alone.size());
      EXPECT_EQ(std::vector<float>(part.begin(), part.end()), alone) << name;
      begin += alone.size();
    }
  }
}

TEST_F(EngineBits, TruncateAndReplay) {
  const auto engine = test::make_engine(model_, {.page_size = 16});
  for (const auto& [name, policy] : policies_) {
    const std::vector<float> expected = run(*engine, policy.get(), tokens_);
    const auto sequence = engine->make_sequence();
    // Other tokens, cut back to a tile boundary inside the shared part.
    std::vector<int32_t> other = tokens_;
    for (size_t i = 64; i < other.size(); ++i) other[i] = (other[i] + 1) % 61;
    const bool fixed = name != "dense" && name != "default" && name != "no remap" && name != "pooled";
    if (fixed) continue;  // their budgets depend on the final length, so a shared prefix needs the same one
    engine->prefill(*sequence, other, policy.get(), nullptr, {}, nullptr);
    sequence->truncate(64);
    EXPECT_EQ(sequence->length(), 64);
    EXPECT_TRUE(sequence->last_hidden().empty());
    std::vector<float> rest =
        test::prefill_logits(*engine, *sequence, std::span(tokens_).subspan(64, 266), policy.get());
    for (const int32_t token : std::span(tokens_).last(3)) {
      const auto row = test::decode_logits(*engine, *sequence, token, policy.get());
      rest.insert(rest.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), expected.end() - static_cast<ptrdiff_t>(rest.size())))
        << name;
  }
}

TEST_F(EngineBits, RunsDoNotDependOnWhatRanBefore) {
  const auto engine = test::make_engine(model_, {.page_size = 16}),
             fresh = test::make_engine(model_, {.page_size = 16});
  const Policy* oracle = policies_[8].policy.get();
  run(*engine, oracle, test::random_tokens(250, 61, 99));
  for (const auto& [name, policy] : policies_)
    EXPECT_EQ(run(*engine, policy.get(), tokens_), run(*fresh, policy.get(), tokens_)) << name;
}

// --- the method's own equalities ---

TEST(EnginePolicies, AFullBudgetIsDense) {
  const auto model = tiny();
  const Plan plan = test::tiny_plan(*model, {0, 2, 4});
  const auto tokens = test::random_tokens(200, 61, 6);
  const auto engine = test::make_engine(model);
  const auto run = [&](const Policy* policy) {
    const auto sequence = engine->make_sequence();
    auto all = test::prefill_logits(*engine, *sequence, std::span(tokens).first(197), policy);
    for (const int32_t token : std::span(tokens).last(3)) {
      const auto row = test::decode_logits(*engine, *sequence, token, policy);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  };
  const std::vector<float> dense = run(nullptr);
  for (const char* name : {"dense", "kascade", "kascade-no-remap", "kascade-pooled", "kascade-decode-only",
                           "oracle-topk", "oracle-topk-dense-layer0"})
    for (const double percent : {100.0, 20.0}) {
      const auto policy = make_policy(name, {.percent = percent}, model->identity(), &plan);
      const double difference = test::largest_difference(run(policy.get()), dense);
      if (percent == 100) {
        EXPECT_LT(difference, kFloatTolerance) << name;
      }
      // A policy that cannot differ would pass the first half whatever it did. 20 % with the floor of 128 and
      // the recent window covers 200 keys; the oracle's floor is 5.
      if (percent == 20 && std::string(name).starts_with("oracle")) {
        EXPECT_GT(difference, 1e-2) << name;
      }
    }
}

TEST(EnginePolicies, SparsePoliciesDifferFromDenseAndFromEachOther) {
  const auto model = tiny();
  const auto tokens = test::random_tokens(330, 61, 7);
  const auto engine = test::make_engine(model);
  std::vector<std::vector<float>> results;
  for (const auto& [name, policy] : policies_of(*model)) {
    const auto sequence = engine->make_sequence();
    engine->prefill(*sequence, std::span(tokens).first(320), policy.get(), nullptr, {}, nullptr);
    const std::vector<float> logits = test::decode_logits(*engine, *sequence, tokens[320], policy.get());
    for (const std::vector<float>& other : results)
      EXPECT_GT(test::largest_difference(logits, other), 1e-3) << name;
    results.push_back(logits);
  }
}

TEST(EnginePolicies, AnIdentityMapIsNoRemap) {
  const auto model = tiny();
  Plan plan = test::tiny_plan(*model, {0, 3});
  for (auto& row : plan.head_map) row = {0, 1};
  const auto tokens = test::random_tokens(300, 61, 8);
  const auto engine = test::make_engine(model);
  const PolicyOptions options{.floor = 9, .recent = 3};
  std::vector<std::vector<float>> results;
  for (const char* name : {"kascade", "kascade-no-remap"}) {
    const auto policy = make_policy(name, options, model->identity(), &plan);
    const auto sequence = engine->make_sequence();
    results.push_back(test::prefill_logits(*engine, *sequence, tokens, policy.get()));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(EnginePolicies, SetsOfLayer0ThatNobodyReadsChangeNothing) {
  struct SelectsAll final : Policy {
    explicit SelectsAll(std::shared_ptr<const Policy> policy) : policy_(std::move(policy)) {}
    const std::string& name() const override { return policy_->name(); }
    std::string describe() const override { return policy_->describe(); }
    LayerRule rule(int layer, Phase phase) const override {
      LayerRule rule = policy_->rule(layer, phase);
      if (rule.needed != nullptr) ++masked_;
      rule.needed = nullptr;
      return rule;
    }
    std::shared_ptr<const Policy> policy_;
    mutable int masked_ = 0;
  };
  const auto model = tiny();
  Plan plan = test::tiny_plan(*model, {0, 3});
  for (const int layer : {1, 2}) plan.head_map[layer] = {1, 1};
  const auto policy = make_policy("kascade", {.floor = 9, .recent = 3}, model->identity(), &plan);
  const SelectsAll selects_all(policy);
  const auto tokens = test::random_tokens(300, 61, 22);
  const auto engine = test::make_engine(model);
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  EXPECT_EQ(test::prefill_logits(*engine, *a, tokens, policy.get()),
            test::prefill_logits(*engine, *b, tokens, &selects_all));
  EXPECT_EQ(test::decode_logits(*engine, *a, 7, policy.get()),
            test::decode_logits(*engine, *b, 7, &selects_all));
  EXPECT_GT(selects_all.masked_, 0);
}

TEST(EnginePolicies, TeacherForcedRowsEqualSequentialDecoding) {
  const auto model = tiny();
  const auto tokens = test::random_tokens(330, 61, 9);
  const auto engine = test::make_engine(model, {.cache_tokens = 4096});
  for (const auto& [name, policy] : policies_of(*model)) {
    // Two sequences of different lengths at once: 40 rows after 290 tokens, 17 after 130.
    std::vector<std::unique_ptr<Sequence>> at_once;
    std::vector<ForwardItem> items;
    std::vector<float> expected;
    for (const auto& [begin, rows] : {std::pair<int64_t, int64_t>{290, 40}, {130, 17}}) {
      const auto one_by_one = engine->make_sequence();
      at_once.push_back(engine->make_sequence());
      for (Sequence* sequence : {one_by_one.get(), at_once.back().get()})
        engine->prefill(*sequence, std::span(tokens).first(begin), nullptr, nullptr, {}, nullptr);
      for (int64_t i = begin; i < begin + rows; ++i) {
        const auto row = test::decode_logits(*engine, *one_by_one, tokens[i], policy.get());
        expected.insert(expected.end(), row.begin(), row.end());
      }
      items.push_back({at_once.back().get(), std::span(tokens).subspan(begin, rows), 0});
    }
    const auto hidden = engine->forward(items, {.phase = Phase::kRows, .policy = policy.get()});
    const auto logits = engine->logits(hidden);
    ASSERT_EQ(logits.size(), expected.size());
    // The two ways to multiply differ in the last bits, which may swap two keys at the cut that weigh the
    // same: that shows in few rows. A rule that differs shows in most.
    int differing = 0;
    for (size_t row = 0; row < expected.size(); row += 61)
      differing += test::largest_difference(logits.subspan(row, 61), std::span(expected).subspan(row, 61)) >
                   kFloatTolerance;
    EXPECT_LE(differing, 6) << name;
  }
}

TEST(EnginePolicies, DecodeStepsOfSeveralRowsEqualOneByOneAtFullBudget) {
  const auto model = tiny();
  const Plan plan = test::tiny_plan(*model, {0, 2});
  const auto tokens = test::random_tokens(210, 61, 10);
  const auto engine = test::make_engine(model, {.cache_tokens = 4096});
  for (const BudgetPreset budget : {BudgetPreset::kDefault, BudgetPreset::kKernel}) {
    const auto policy = make_policy("kascade", {.budget = budget, .percent = 100}, model->identity(), &plan);
    const auto one_by_one = engine->make_sequence(), step = engine->make_sequence();
    for (Sequence* sequence : {one_by_one.get(), step.get()})
      engine->prefill(*sequence, std::span(tokens).first(200), policy.get(), nullptr, {}, nullptr);
    std::vector<float> expected;
    for (int i = 0; i < 8; ++i) {
      const auto row = test::decode_logits(*engine, *one_by_one, tokens[200 + i], policy.get());
      expected.insert(expected.end(), row.begin(), row.end());
    }
    const ForwardItem item{step.get(), std::span(tokens).subspan(200, 8), 0};
    const auto logits =
        engine->logits(engine->forward({&item, 1}, {.phase = Phase::kDecode, .policy = policy.get()}));
    EXPECT_LT(test::largest_difference({logits.begin(), logits.end()}, expected), kFloatTolerance);
  }
}

}  // namespace
}  // namespace kascade
