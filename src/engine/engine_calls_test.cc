// SPDX-License-Identifier: Apache-2.0
// The engine's calls: starting in the middle of the layers, shared pages, next tokens, errors and what they
// leave, observers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <set>

#include "engine/tiny_model.h"
#include "kascade/engine.h"
#include "kascade/error.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using test::thrown;
using test::TinyModel;
using test::TinyModelOptions;
using testing::HasSubstr;

// fp32 sums in another order over six layers; a wrong key is off by 0.1 (engine_test.cc).
constexpr double kFloatTolerance = 3e-4;

std::shared_ptr<const Model> tiny(const TinyModelOptions& options = {}) {
  return std::make_shared<TinyModel>(options);
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
