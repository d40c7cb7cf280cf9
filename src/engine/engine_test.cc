// SPDX-License-Identifier: Apache-2.0
// The engine in fp32 against a plain double-precision forward pass, and what must not change a bit of its
// results.
#include "kascade/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>

#include "engine/tiny_model.h"
#include "kascade/error.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using test::TinyModel;
using test::TinyModelOptions;
using testing::HasSubstr;

// fp32 sums of some hundred terms over six layers, and softmax peaks that magnify them; logits are of
// order 10. The plain pass is some 1e-4 away at worst, a wrong key some 1e-1.
constexpr double kFloatTolerance = 3e-4;

std::shared_ptr<const Model> tiny(const TinyModelOptions& options = {}) {
  return std::make_shared<TinyModel>(options);
}

/// Every policy under every preset it knows, with budgets that bite at a few hundred tokens.
struct NamedPolicy {
  std::string name;
  std::shared_ptr<const Policy> policy;
};
std::vector<NamedPolicy> sparse_policies(const Model& model, int tile = 32) {
  const Plan plan = test::tiny_plan(model, {0, 2, 4}, tile);
  std::vector<NamedPolicy> result;
  const auto add = [&](const std::string& label, const std::string& name, PolicyOptions options) {
    options.floor = 9;
    result.push_back({label, make_policy(name, options, model.identity(), &plan)});
  };
  add("default", "kascade", {.recent = 5});
  add("default fixed", "kascade", {.recent = 5, .rolling = false});
  add("paper", "kascade", {.budget = BudgetPreset::kPaper, .percent = 25});
  add("paper rolling", "kascade", {.budget = BudgetPreset::kPaper, .percent = 25, .rolling = true});
  add("kernel", "kascade", {.budget = BudgetPreset::kKernel});
  add("pooled", "kascade-pooled", {.sinks = 2, .recent = 5});
  add("no remap", "kascade-no-remap", {.recent = 5});
  add("decode only", "kascade-decode-only", {.budget = BudgetPreset::kPaper});
  add("oracle", "oracle-topk", {});
  return result;
}

template <class E, class F>
std::string thrown(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "(nothing thrown)";
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
  EngineBits() : model_(tiny()), policies_(sparse_policies(*model_)) {
    policies_.push_back({"dense", nullptr});
  }

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
  for (const auto& [name, policy] : sparse_policies(*model_, 48))
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
  auto policies = sparse_policies(*model);
  policies.push_back({"dense", nullptr});
  for (const auto& [name, policy] : policies) {
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
  auto policies = sparse_policies(*model);
  policies.push_back({"dense", nullptr});
  for (const auto& [name, policy] : policies) {
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

// --- starting in the middle ---

class Recorder final : public LayerObserver {
 public:
  void after_layer(int layer, const float* residual, int64_t rows) override {
    if (static_cast<int>(after.size()) <= layer) after.resize(layer + 1);
    after[layer].assign(residual, residual + rows * 48);
  }
  std::vector<std::vector<float>> after;  // [layers] of [rows, hidden]
};

TEST(EngineFirstLayer, AnAnchorCanBeTriedWithoutTheLayersBelowIt) {
  const auto model = tiny();
  const auto tokens = test::random_tokens(300, 61, 11);
  const auto engine = test::make_engine(model, {.cache_tokens = 4096, .page_size = 16});
  const PolicyOptions options{.floor = 9, .recent = 3};
  const Plan base_plan = test::tiny_plan(*model, {0, 2}), other_plan = test::tiny_plan(*model, {0, 2, 4});
  const auto base = make_policy("kascade", options, model->identity(), &base_plan);
  const auto other = make_policy("kascade", options, model->identity(), &other_plan);
  const auto rows_of = [&](Sequence& sequence) {
    return ForwardItem{&sequence, std::span(tokens).subspan(250, 50), 0};
  };

  const auto sequence = engine->make_sequence(), fresh = engine->make_sequence(),
             bystander = engine->make_sequence();
  for (Sequence* s : {sequence.get(), fresh.get()})
    engine->prefill(*s, std::span(tokens).first(250), nullptr, nullptr, {}, nullptr);
  ForwardItem item = rows_of(*fresh);
  const auto span = engine->forward({&item, 1}, {.phase = Phase::kRows, .policy = other.get()});
  const std::vector<float> expected(span.begin(), span.end());

  Recorder recorder;
  item = rows_of(*sequence);
  engine->forward({&item, 1}, {.phase = Phase::kRows, .policy = base.get(), .observer = &recorder});
  for (int repeat = 0; repeat < 2; ++repeat) {
    sequence->truncate(250);
    // Another sequence comes and goes meanwhile, with room enough not to need the pages of the rows.
    engine->prefill(*bystander, std::span(tokens).first(100), nullptr, nullptr, {}, nullptr);
    bystander->truncate(0);
    const auto rows = engine->forward({&item, 1}, {.phase = Phase::kRows,
                                                   .policy = other.get(),
                                                   .first_layer = 4,
                                                   .hidden_in = recorder.after[3].data()});
    EXPECT_EQ(std::vector<float>(rows.begin(), rows.end()), expected);
  }
}

TEST(EngineFirstLayer, RefusesWhatItCannotKnow) {
  const auto model = tiny();
  const auto tokens = test::random_tokens(100, 61, 12);
  const auto engine = test::make_engine(model, {.cache_tokens = 160, .page_size = 16});
  const Plan plan = test::tiny_plan(*model, {0, 2});
  const auto policy = make_policy("kascade", {.floor = 9}, model->identity(), &plan);
  const auto sequence = engine->make_sequence();
  engine->prefill(*sequence, std::span(tokens).first(50), nullptr, nullptr, {}, nullptr);
  const std::vector<float> hidden(10 * 48, 0.5f);
  const ForwardItem item{sequence.get(), std::span(tokens).subspan(50, 10), 0};
  const auto from = [&](int layer, const float* in, const Policy* p = nullptr) {
    return thrown<BadArgument>([&] {
      engine->forward({&item, 1},
                      {.phase = Phase::kRows, .policy = p, .first_layer = layer, .hidden_in = in});
    });
  };
  EXPECT_THAT(from(3, hidden.data()), HasSubstr("hold the keys of 50 rows"));
  EXPECT_THAT(from(3, nullptr), HasSubstr("hidden_in"));
  EXPECT_THAT(from(0, hidden.data()), HasSubstr("hidden_in"));
  EXPECT_THAT(from(7, hidden.data()), HasSubstr("first_layer"));
  EXPECT_THAT(from(-1, hidden.data()), HasSubstr("first_layer"));
  engine->forward({&item, 1}, {.phase = Phase::kRows});
  sequence->truncate(50);
  EXPECT_THAT(from(3, hidden.data(), policy.get()), HasSubstr("layer 3 reuses index sets"));
  EXPECT_EQ(sequence->length(), 50);
  // That failed call said nothing about the rows' keys any more; the whole pass is needed again.
  EXPECT_THAT(from(3, hidden.data()), HasSubstr("hold the keys of 50 rows"));
  engine->forward({&item, 1}, {.phase = Phase::kRows});
  sequence->truncate(50);
  EXPECT_EQ(from(3, hidden.data()), "(nothing thrown)");
  sequence->truncate(40);
  // Another sequence takes every spare page: 160 tokens less the 48 of three pages.
  const auto hungry = engine->make_sequence();
  engine->prefill(*hungry, std::span(tokens).first(100), nullptr, nullptr, {}, nullptr);
  const ForwardItem longer{sequence.get(), std::span(tokens).subspan(40, 20), 0};
  EXPECT_THAT(
      thrown<BadArgument>([&] {
        engine->forward({&longer, 1}, {.phase = Phase::kRows, .first_layer = 3, .hidden_in = hidden.data()});
      }),
      HasSubstr("hold the keys of 48 rows"));
}

TEST(EngineFirstLayer, PagesOfTheRowsAreNotTakenByOthersOfTheCall) {
  const auto model = tiny();
  const auto tokens = test::random_tokens(40, 61, 25), other = test::random_tokens(40, 61, 26);
  const std::span<const int32_t> a_tokens(tokens), b_tokens(other);
  // Seven pages: three of a, three of b, one of c. Their rows, 24..39, reach into the third.
  const auto engine = test::make_engine(model, {.cache_tokens = 112, .page_size = 16});
  const auto a = engine->make_sequence(), b = engine->make_sequence(), c = engine->make_sequence();
  engine->prefill(*a, a_tokens.first(24), nullptr, nullptr, {}, nullptr);
  engine->prefill(*b, b_tokens.first(24), nullptr, nullptr, {}, nullptr);
  const std::vector<ForwardItem> items = {{a.get(), a_tokens.subspan(24), 0},
                                          {b.get(), b_tokens.subspan(24), 0}};
  Recorder recorder;
  const auto span = engine->forward(items, {.phase = Phase::kRows, .observer = &recorder});
  const std::vector<float> expected(span.begin(), span.end());
  const std::vector<float> expected_step = test::decode_logits(*engine, *b, 5);
  engine->prefill(*c, a_tokens.first(16), nullptr, nullptr, {}, nullptr);
  a->truncate(24);
  b->truncate(24);
  c->truncate(0);
  const auto fork = engine->make_sequence(*a, 24);
  // a needs a page to copy the one it shares: that of c, not the last of b with its keys of the layers below.
  const auto rows = engine->forward(
      items, {.phase = Phase::kRows, .first_layer = 3, .hidden_in = recorder.after[2].data()});
  EXPECT_EQ(std::vector<float>(rows.begin(), rows.end()), expected);
  EXPECT_EQ(test::decode_logits(*engine, *b, 5), expected_step);
}

// --- sequences that share pages ---

TEST(EnginePrefix, SharedPagesServeEverySequenceAndAreCopiedWhenWritten) {
  const auto model = tiny();
  const Plan plan = test::tiny_plan(*model, {0, 2, 4});
  const auto policy = make_policy("kascade", {.floor = 9, .recent = 5}, model->identity(), &plan);
  const auto tokens = test::random_tokens(150, 61, 21);
  const std::span<const int32_t> all(tokens), start = all.first(100), rest = all.subspan(100);
  const auto alone = test::make_engine(model, {.page_size = 16});
  const auto whole = alone->make_sequence();
  test::prefill_logits(*alone, *whole, all.first(96), policy.get());
  const std::vector<float> expected = test::prefill_logits(*alone, *whole, all.subspan(96), policy.get());

  const auto engine = test::make_engine(model, {.page_size = 16});
  const auto first = engine->make_sequence();
  test::prefill_logits(*engine, *first, start, policy.get());
  const uint64_t bytes = engine->memory_bytes();
  auto second = engine->make_sequence(*first, 96);
  EXPECT_EQ(second->length(), 96);
  EXPECT_EQ(engine->memory_bytes(), bytes);  // no page of its own yet
  // Both write behind position 96, one of them into the page that holds 96..111 of the other.
  EXPECT_EQ(test::prefill_logits(*engine, *second, all.subspan(96), policy.get()), expected);
  first->truncate(96);
  EXPECT_EQ(test::prefill_logits(*engine, *first, all.subspan(96), policy.get()), expected);
  // In the middle of a page.
  auto third = engine->make_sequence(*second, 100);
  const auto other = test::random_tokens(50, 61, 22);
  test::prefill_logits(*engine, *third, other, policy.get());
  second->truncate(96);
  EXPECT_EQ(test::prefill_logits(*engine, *second, all.subspan(96), policy.get()), expected);
  third.reset();
  second.reset();
  first->truncate(96);
  EXPECT_EQ(test::prefill_logits(*engine, *first, all.subspan(96), policy.get()), expected);
  EXPECT_THAT(thrown<BadArgument>([&] { engine->make_sequence(*first, 151); }), HasSubstr("0..150"));
  EXPECT_THAT(thrown<BadArgument>([&] { engine->make_sequence(*whole, 1); }), HasSubstr("prefix"));
}

TEST(EngineGreedy, EqualsTheLargestLogitOfEachSequence) {
  const auto model = tiny();
  const auto engine = test::make_engine(model);
  const auto a = engine->make_sequence(), b = engine->make_sequence(), idle = engine->make_sequence();
  engine->prefill(*a, test::random_tokens(40, 61, 23), nullptr, nullptr, {}, nullptr);
  engine->prefill(*b, test::random_tokens(70, 61, 24), nullptr, nullptr, {}, nullptr);
  const std::vector<int32_t> one = {5}, two = {7, 9};
  const std::vector<ForwardItem> items = {{a.get(), one}, {idle.get(), {}}, {b.get(), two}};
  std::vector<int32_t> next(3);
  engine->forward_greedy(items, nullptr, next);
  EXPECT_EQ(next[1], -1);
  EXPECT_EQ(a->length(), 41);
  EXPECT_EQ(b->length(), 72);
  const auto best = [&](const Sequence& sequence) {
    const std::span<const float> logits = engine->logits(sequence.last_hidden());
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  };
  EXPECT_EQ(next[0], best(*a));
  EXPECT_EQ(next[2], best(*b));
  next.pop_back();
  EXPECT_THAT(thrown<BadArgument>([&] { engine->forward_greedy(items, nullptr, next); }),
              HasSubstr("3 items"));
}

TEST(EngineSampling, DrawsWithTheCallersBits) {
  const auto model = tiny();
  const auto engine = test::make_engine(model);
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  engine->prefill(*a, test::random_tokens(40, 61, 23), nullptr, nullptr, {}, nullptr);
  engine->prefill(*b, test::random_tokens(70, 61, 24), nullptr, nullptr, {}, nullptr);
  const std::vector<int32_t> one = {5}, two = {7};
  const std::vector<ForwardItem> items = {{a.get(), one}, {b.get(), two}};
  std::vector<TokenSampling> sampling = {{.temperature = 1.5, .top_k = 20, .random = 77}, {}};
  std::vector<int32_t> next(2);
  engine->forward_next(items, nullptr, sampling, next);
  Sampler sampler(SamplingSettings{});
  EXPECT_EQ(next[0], sampler.sample(engine->logits(a->last_hidden()), {.temperature = 1.5, .top_k = 20}, 77));
  EXPECT_EQ(next[1], sampler.sample(engine->logits(b->last_hidden())));
  std::set<int32_t> drawn;
  for (uint64_t i = 0; i < 16; ++i) {
    a->truncate(40);
    b->truncate(70);
    sampling[0].random = i << 60;
    engine->forward_next(items, nullptr, sampling, next);
    drawn.insert(next[0]);
  }
  EXPECT_GT(drawn.size(), 2u);
  sampling[0].top_p = 0;
  EXPECT_THAT(thrown<BadArgument>([&] { engine->forward_next(items, nullptr, sampling, next); }),
              HasSubstr("top_p"));
}

TEST(EngineSampling, ForwardNextAtItsEnds) {
  const auto model = tiny({.context = 64});
  const auto engine = test::make_engine(model, {.cache_tokens = 128});
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  engine->prefill(*a, test::random_tokens(60, 61, 27), nullptr, nullptr, {}, nullptr);
  std::vector<int32_t> next(2, 7);
  // Nothing to do is legal, and says that nothing was drawn.
  engine->forward_greedy({}, nullptr, {});
  const std::vector<ForwardItem> idle = {{a.get(), {}}, {b.get(), {}}};
  engine->forward_greedy(idle, nullptr, next);
  EXPECT_THAT(next, testing::ElementsAre(-1, -1));
  // What is refused changes no sequence, whichever item is at fault.
  const auto tokens = test::random_tokens(9, 61, 28);
  const auto refused = [&](std::span<const int32_t> of_a, std::span<const int32_t> of_b,
                           TokenSampling how = {}) {
    const std::vector<ForwardItem> items = {{b.get(), of_b}, {a.get(), of_a}};
    const std::vector<TokenSampling> sampling = {how, {}};
    const std::string error = thrown<Error>([&] { engine->forward_next(items, nullptr, sampling, next); });
    EXPECT_EQ(a->length(), 60);
    EXPECT_EQ(b->length(), 0);
    return error;
  };
  const std::span<const int32_t> all(tokens);
  EXPECT_THAT(refused(all.first(5), all.first(1)), HasSubstr("context"));
  EXPECT_THAT(refused(all.first(1), all.first(9)), HasSubstr("at most 8"));
  const int32_t outside = 61;
  EXPECT_THAT(refused({&outside, 1}, all.first(1)), HasSubstr("vocabulary"));
  for (const double bad :
       {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    EXPECT_THAT(refused(all.first(1), all.first(1), {.temperature = bad}), HasSubstr("temperature"));
  EXPECT_THAT(refused(all.first(1), all.first(1), {.temperature = 1, .top_k = -1}), HasSubstr("top_k"));
  for (const double bad : {0.0, -0.5, 1.01, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THAT(refused(all.first(1), all.first(1), {.temperature = 1, .top_p = bad}), HasSubstr("top_p"));
  const std::vector<ForwardItem> items = {{b.get(), all.first(8)}, {a.get(), all.first(4)}};
  EXPECT_THAT(
      thrown<BadArgument>([&] { engine->forward_next(items, nullptr, std::vector<TokenSampling>(3), next); }),
      HasSubstr("3 ways"));
  // The largest step, and the last that the context has room for.
  engine->forward_greedy(items, nullptr, next);
  EXPECT_EQ(a->length(), 64);
  EXPECT_EQ(b->length(), 8);
  EXPECT_GE(next[0], 0);
  EXPECT_GE(next[1], 0);
}

TEST(EngineSampling, LogitsThatAreNoNumbersDrawNothingAndHarmNoMate) {
  const auto model = test::TinyModel::successor({1, 2, 0}, {});
  auto* embedding = const_cast<float*>(static_cast<const float*>(model->weights().embedding.data));
  embedding[2 * model->config().hidden] = std::numeric_limits<float>::quiet_NaN();
  const auto engine = test::make_engine(model);
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  const std::vector<int32_t> good = {0}, bad = {2};
  const std::vector<ForwardItem> items = {{a.get(), bad}, {b.get(), good}};
  for (const double temperature : {0.0, 1e-300}) {
    std::vector<int32_t> next(2, 7);
    engine->forward_next(items, nullptr, std::vector<TokenSampling>(2, {.temperature = temperature}), next);
    EXPECT_THAT(next, testing::ElementsAre(-1, 1));
  }
  EXPECT_EQ(a->length(), 2);
  EXPECT_EQ(b->length(), 2);
}

// --- errors, and that the engine goes on after them ---

TEST(EngineErrors, ItemsWithoutRowsHoldAndTakeNoPages) {
  const auto model = tiny();
  const auto engine = test::make_engine(model, {.cache_tokens = 112, .page_size = 16});  // 7 pages
  const auto tokens = test::random_tokens(112, 61, 30);
  const std::span<const int32_t> all(tokens);
  const auto idle = engine->make_sequence(), busy = engine->make_sequence();
  engine->prefill(*idle, all.first(40), nullptr, nullptr, {}, nullptr);
  const auto fork = engine->make_sequence(*idle, 40);
  engine->prefill(*busy, all.first(15), nullptr, nullptr, {}, nullptr);
  const uint64_t bytes = engine->memory_bytes();
  const std::vector<ForwardItem> items = {{idle.get(), {}}, {busy.get(), all.subspan(15, 1)}};
  engine->forward(items, {.phase = Phase::kDecode});
  EXPECT_EQ(engine->memory_bytes(), bytes);  // the page that idle shares is not copied
  idle->truncate(0);
  fork->truncate(0);
  EXPECT_EQ(test::prefill_logits(*engine, *busy, all.subspan(16)).size(), 96u * 61);
}

TEST(EngineErrors, OptionsOutOfRangeAreRefusedByName) {
  const auto model = tiny();
  for (const int32_t chunk : {-128, 100, 129})
    EXPECT_THAT(thrown<BadArgument>([&] { test::make_engine(model, {.prefill_chunk = chunk}); }),
                HasSubstr("prefill_chunk"));
  for (const int32_t page : {0, -1, 1 << 20})
    EXPECT_THAT(thrown<BadArgument>([&] { test::make_engine(model, {.page_size = page}); }),
                HasSubstr("page_size"));
  EXPECT_THAT(thrown<BadArgument>([&] { test::make_engine(model, {.cache_tokens = -1}); }),
              HasSubstr("cache_tokens"));
  EXPECT_THAT(
      thrown<BadArgument>([&] { test::make_engine(model, {.cache_tokens = INT64_MAX, .page_size = 1}); }),
      HasSubstr("cache_tokens"));
  EXPECT_THAT(thrown<OutOfMemory>(
                  [&] { test::make_engine(model, {.cache_tokens = int64_t{1} << 46, .page_size = 65536}); }),
              HasSubstr("KV cache"));
  EXPECT_THAT(thrown<BadArgument>([&] { test::make_engine(model, {.attention_kernel = "none"}); }),
              HasSubstr("none"));
  EXPECT_THAT(thrown<BadArgument>([&] { PreparedModel::create(model, "f16"); }), HasSubstr("compute"));
  EXPECT_THAT(thrown<BadArgument>([&] { PreparedModel::create(nullptr, "f32"); }), HasSubstr("model"));
  EXPECT_THAT(thrown<BadArgument>([&] { Engine::create(nullptr, {}); }), HasSubstr("model"));
}

TEST(EngineErrors, BadItemsAreRefusedAndChangeNothing) {
  const auto model = tiny({.context = 256});
  const auto engine = test::make_engine(model, {.prefill_chunk = 128}), other = test::make_engine(model);
  const auto sequence = engine->make_sequence(), second = engine->make_sequence(),
             foreign = other->make_sequence();
  const auto tokens = test::random_tokens(257, 61, 13);
  const std::vector<float> expected = test::prefill_logits(*engine, *second, std::span(tokens).first(31));
  second->truncate(0);
  test::prefill_logits(*engine, *sequence, std::span(tokens).first(30));

  const auto error = [&](std::vector<ForwardItem> items, ForwardOptions options = {}) {
    return thrown<BadArgument>([&] { engine->forward(items, options); });
  };
  const std::span<const int32_t> some = std::span(tokens).first(9);
  for (const int32_t bad : {-1, 61, INT32_MIN, INT32_MAX})
    EXPECT_THAT(error({{sequence.get(), {&bad, 1}, 0}}), HasSubstr("token"));
  EXPECT_THAT(error({{nullptr, some, 0}}), HasSubstr("sequence"));
  EXPECT_THAT(error({{foreign.get(), some, 0}}), HasSubstr("sequence"));
  EXPECT_THAT(error({{sequence.get(), some, 0}, {sequence.get(), some, 0}}), HasSubstr("same sequence"));
  EXPECT_THAT(error({{sequence.get(), std::span(tokens).first(129), 0}}), HasSubstr("129 rows"));
  EXPECT_THAT(error({{sequence.get(), some, 0}}, {.phase = Phase::kDecode}), HasSubstr("at most 8"));
  EXPECT_THAT(error({{sequence.get(), some, 38}}), HasSubstr("budget_length"));
  EXPECT_THAT(error({{sequence.get(), some, 257}}), HasSubstr("budget_length"));
  EXPECT_THAT(thrown<BadArgument>([&] { sequence->truncate(31); }), HasSubstr("31"));
  EXPECT_THAT(thrown<BadArgument>([&] { sequence->truncate(-1); }), HasSubstr("-1"));
  EXPECT_THAT(thrown<BadArgument>([&] { engine->logits(std::vector<float>(47)); }), HasSubstr("47"));
  const std::string past = thrown<Unsupported>(
      [&] { engine->prefill(*sequence, std::span(tokens).first(227), nullptr, nullptr, {}, nullptr); });
  EXPECT_THAT(past, HasSubstr("257"));
  EXPECT_THAT(past, HasSubstr("256"));
  EXPECT_EQ(sequence->length(), 30);
  const std::vector<float> after = test::decode_logits(*engine, *sequence, tokens[30]);
  EXPECT_LT(test::largest_difference(after, std::span(expected).last(61)), kFloatTolerance);
}

TEST(EngineErrors, NothingIsLegal) {
  const auto model = tiny();
  const auto engine = test::make_engine(model);
  const auto sequence = engine->make_sequence();
  EXPECT_TRUE(engine->forward({}, {}).empty());
  const ForwardItem empty{sequence.get(), {}, 0};
  EXPECT_TRUE(engine->forward({&empty, 1}, {}).empty());
  EXPECT_TRUE(engine->prefill(*sequence, {}, nullptr, nullptr, {}, nullptr).empty());
  EXPECT_TRUE(engine->logits({}).empty());
  sequence->truncate(0);
  EXPECT_EQ(sequence->length(), 0);
}

TEST(EngineErrors, AFullCacheSaysSoAndServesWhatFits) {
  const auto model = tiny();
  const auto engine = test::make_engine(model, {.cache_tokens = 100, .page_size = 16});  // 7 pages
  const auto tokens = test::random_tokens(120, 61, 14);
  auto first = engine->make_sequence();
  const auto second = engine->make_sequence();
  engine->prefill(*first, std::span(tokens).first(60), nullptr, nullptr, {}, nullptr);
  const std::string message = thrown<OutOfMemory>(
      [&] { engine->prefill(*second, std::span(tokens).first(80), nullptr, nullptr, {}, nullptr); });
  EXPECT_THAT(message, HasSubstr("80 tokens"));
  EXPECT_THAT(message, HasSubstr("7 pages"));
  EXPECT_EQ(second->length(), 0);
  // What the failed call had taken is there for the first sequence.
  engine->prefill(*first, std::span(tokens).subspan(60, 50), nullptr, nullptr, {}, nullptr);
  EXPECT_EQ(first->length(), 110);
  first.reset();
  EXPECT_EQ(test::prefill_logits(*engine, *second, std::span(tokens).first(112)).size(), 112u * 61);
}

TEST(EngineErrors, CancelLeavesTheSequenceAsItWas) {
  const auto model = tiny();
  const auto engine = test::make_engine(model, {.prefill_chunk = 128});
  const auto tokens = test::random_tokens(400, 61, 15);
  const auto sequence = engine->make_sequence();
  engine->prefill(*sequence, std::span(tokens).first(10), nullptr, nullptr, {}, nullptr);
  const std::vector<float> last(sequence->last_hidden().begin(), sequence->last_hidden().end());
  std::atomic<bool> cancel = false;
  int chunks = 0;
  EXPECT_THAT(thrown<Cancelled>([&] {
                engine->prefill(
                    *sequence, std::span(tokens).subspan(10), nullptr, nullptr,
                    [&](int64_t, std::span<const float>) { cancel = ++chunks == 2; }, &cancel);
              }),
              HasSubstr("246 of 390"));
  EXPECT_EQ(chunks, 2);
  EXPECT_EQ(sequence->length(), 10);
  EXPECT_THAT(sequence->last_hidden(), testing::ElementsAreArray(last));
}

TEST(EngineErrors, AnObserverThatThrowsRollsBack) {
  struct Thrower final : LayerObserver {
    void after_layer(int layer, const float*, int64_t) override {
      if (layer == 3) throw BadArgument("observer");
    }
  } thrower;
  const auto model = tiny();
  const auto engine = test::make_engine(model);
  const auto tokens = test::random_tokens(50, 61, 16);
  const auto sequence = engine->make_sequence(), fresh = engine->make_sequence();
  EXPECT_THROW(engine->prefill(*sequence, tokens, nullptr, &thrower, {}, nullptr), BadArgument);
  EXPECT_EQ(sequence->length(), 0);
  EXPECT_EQ(test::prefill_logits(*engine, *sequence, tokens), test::prefill_logits(*engine, *fresh, tokens));
}

// --- observers, memory ---

TEST(EngineObserver, SeesTheResidualAroundAttentionAndMayAskForWeights) {
  struct Watcher final : LayerObserver {
    void before_attention(int layer, Phase, AttentionParams& params) override {
      if (layer != 2) return;
      ASSERT_EQ(params.role, Role::kAnchor);
      const int64_t tiles = params.tile_offsets[params.batch];
      weights.assign(tiles * 2 * 200, -1);
      mass.assign(tiles * 2, -1);
      params.pooled_weights = weights.data();
      params.pooled_head_stride = 200;
      params.pooled_tile_stride = 400;
      params.own_tile_mass = mass.data();
    }
    void after_attention(const LayerEvent& event) override {
      ++events;
      EXPECT_EQ(event.rows, 100);
      EXPECT_EQ(event.attention->cu_seqlens_q[1], 100);
      if (event.layer == 0) {
        first_in.assign(event.residual_in, event.residual_in + event.rows * 48);
        EXPECT_NE(std::vector<float>(event.residual_out, event.residual_out + event.rows * 48), first_in);
      }
    }
    std::vector<float> weights, mass, first_in;
    int events = 0;
  } watcher;
  const auto model = tiny();
  const Plan plan = test::tiny_plan(*model, {0, 2});
  const auto policy = make_policy("kascade", {.floor = 9, .recent = 3}, model->identity(), &plan);
  const auto engine = test::make_engine(model);
  const auto tokens = test::random_tokens(100, 61, 17);
  const auto sequence = engine->make_sequence(), plain = engine->make_sequence();
  engine->prefill(*sequence, tokens, policy.get(), &watcher, {}, nullptr);
  EXPECT_EQ(watcher.events, 6);
  // The first residual is the embedding.
  const auto* embedding = static_cast<const float*>(model->weights().embedding.data);
  EXPECT_TRUE(
      std::equal(watcher.first_in.begin(), watcher.first_in.begin() + 48, embedding + tokens[0] * 48));
  // The last tile's candidates and own keys hold all of its rows' probability: 2 query heads a group, 4 rows.
  double sum = watcher.mass[3 * 2];
  for (int key = 0; key < 96; ++key) sum += watcher.weights[3 * 400 + key];
  EXPECT_NEAR(sum, 8, 1e-4);
  // Watching changes nothing.
  const auto a = engine->logits(sequence->last_hidden());
  const std::vector<float> watched(a.begin(), a.end());
  engine->prefill(*plain, tokens, policy.get(), nullptr, {}, nullptr);
  const auto b = engine->logits(plain->last_hidden());
  EXPECT_EQ(watched, std::vector<float>(b.begin(), b.end()));
}

TEST(EngineMemory, CountsLivePagesAndStaysBoundedInTheContext) {
  const auto model = tiny({.context = 8192});
  const auto engine = test::make_engine(model);
  const uint64_t empty = engine->memory_bytes();
  const auto tokens = test::random_tokens(640, 61, 18);
  auto sequence = engine->make_sequence();
  engine->prefill(*sequence, tokens, nullptr, nullptr, {}, nullptr);
  const uint64_t kv = 640ull * 2 * 6 * 2 * 16 * sizeof(float);
  EXPECT_GE(engine->memory_bytes(), empty + kv);
  const uint64_t full = engine->memory_bytes();
  sequence.reset();
  EXPECT_EQ(engine->memory_bytes(), full - kv);
}

}  // namespace
}  // namespace kascade
