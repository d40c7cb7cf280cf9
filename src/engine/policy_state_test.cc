// SPDX-License-Identifier: Apache-2.0
// Policies that keep a state: what they hear, when, and that sets of their own are what layers attend to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/tiny_model.h"
#include "kascade/engine.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::TinyModel;

constexpr int kLayers = 6, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 16;

/// What the states of one policy saw, in order.
struct Log {
  std::vector<std::string> entries;
  int64_t live_states = 0;
};

/// The key at position j of the one sequence that params views, for one KV head.
const float* key_at(const AttentionParams& params, int64_t j, int head) {
  const int64_t page = params.page_table[j / params.page_size];
  return static_cast<const float*>(params.k) + page * params.k_page_stride +
         j % params.page_size * params.k_token_stride + head * params.k_head_stride;
}

/// Exact selection done by hand: every layer but 0 keeps, for each row and query head, the `keep` largest
/// scores of all visible keys. With dense_selectors, even layers are dense and select for the next, odd
/// layer.
class HandPicked final : public Policy {
 public:
  struct Options {
    int keep = 20;
    bool dense_selectors = false;
    Log* log = nullptr;
  };
  explicit HandPicked(const Options& options) : options_(options) {}

  const std::string& name() const override { return name_; }
  std::string describe() const override { return name_; }
  LayerRule rule(int layer, Phase phase) const override {
    LayerRule rule;
    if (!options_.dense_selectors && layer == 0) return rule;
    rule.role = options_.dense_selectors && layer % 2 == 0 ? Role::kDense : Role::kReuse;
    rule.selects_itself = !options_.dense_selectors || layer % 2 == 0;
    rule.needs_lse = rule.role == Role::kDense;
    rule.set_owner = SetOwner::kQueryHead;
    rule.tile = 1;
    rule.tile_rule = phase == Phase::kPrefill ? TileRule::kAligned : TileRule::kStep;
    rule.budget = Budget{.percent_hundredths = 0,
                         .floor = options_.keep,
                         .own_tile = OwnTile::kCandidate,
                         .tile = 1,
                         .rolling = false};
    return rule;
  }
  std::unique_ptr<PolicyState> make_state() const override { return std::make_unique<State>(options_); }

 private:
  class State final : public PolicyState {
   public:
    explicit State(const Options& options) : options_(options) {
      if (options_.log) ++options_.log->live_states;
    }
    ~State() override {
      if (options_.log) --options_.log->live_states;
    }
    void appended(int layer, const AttentionParams& params, int64_t begin, int64_t end) override {
      EXPECT_EQ(params.batch, 1);
      EXPECT_EQ(params.seq_lens_kv[0], end);
      EXPECT_EQ(heard_[layer], begin);
      heard_[layer] = end;
      note(fmt(layer, "appended", begin, end));
    }
    void select(int layer, Phase, const AttentionParams& params) override {
      const int64_t rows = params.cu_seqlens_q[1], length = params.seq_lens_kv[0];
      note(fmt(layer, "select", length - rows, length));
      ASSERT_EQ(params.tile_offsets[1], rows);
      for (int64_t row = 0; row < rows; ++row)
        for (int head = 0; head < kQueryHeads; ++head) pick(params, row, length - rows + row, head);
    }
    void attended(int layer, Phase, const AttentionParams& params) override {
      note(fmt(layer, "attended", params.seq_lens_kv[0] - params.cu_seqlens_q[1], params.seq_lens_kv[0]));
      if (params.lse != nullptr) {
        EXPECT_TRUE(std::isfinite(params.lse[0]));
      }
    }
    void truncated(int64_t length) override {
      note("truncated " + std::to_string(length));
      for (int64_t& heard : heard_) heard = std::min(heard, length);
    }

   private:
    static std::string fmt(int layer, const char* what, int64_t begin, int64_t end) {
      return std::to_string(layer) + " " + what + " " + std::to_string(begin) + ".." + std::to_string(end);
    }
    void note(const std::string& entry) {
      if (options_.log) options_.log->entries.push_back(entry);
    }
    void pick(const AttentionParams& params, int64_t row, int64_t position, int head) {
      const float* q =
          static_cast<const float*>(params.q) + row * params.q_row_stride + head * params.q_head_stride;
      std::vector<std::pair<float, int32_t>> ranked;
      for (int64_t j = 0; j <= position; ++j) {
        float score = 0;
        for (int i = 0; i < kHeadDim; ++i)
          score += q[i] * key_at(params, j, head / (kQueryHeads / kKvHeads))[i];
        ranked.emplace_back(-score, static_cast<int32_t>(j));
      }
      std::sort(ranked.begin(), ranked.end());
      ranked.resize(std::min<size_t>(ranked.size(), static_cast<size_t>(options_.keep)));
      const int64_t set = row * kQueryHeads + head;
      int32_t* positions = params.positions + set * params.capacity;
      ASSERT_LE(static_cast<int32_t>(ranked.size()), params.capacity);
      for (size_t i = 0; i < ranked.size(); ++i) positions[i] = ranked[i].second;
      std::sort(positions, positions + ranked.size());
      params.counts[set] = static_cast<int32_t>(ranked.size());
    }

    Options options_;
    int64_t heard_[kLayers] = {};
  };

  std::string name_ = "hand-picked";
  Options options_;
};

class PolicyStates : public testing::Test {
 protected:
  std::shared_ptr<const Model> model_ = std::make_shared<TinyModel>(test::TinyModelOptions{});
  std::unique_ptr<Engine> engine_ = test::make_engine(model_, {.cache_tokens = 4096, .page_size = 16});
  std::vector<int32_t> tokens_ = test::random_tokens(160, 61, 21);
};

TEST_F(PolicyStates, SetsOfItsOwnEqualTheOracleThatSelectsTheSame) {
  // One row's exact top-k by score is its top-k by probability. 20 of 160 keys at every length: a floor
  // without percent.
  const HandPicked by_hand({.keep = 20});
  const auto oracle =
      make_policy("oracle-topk-dense-layer0", {.percent = 0.01, .floor = 20}, model_->identity(), nullptr);
  const auto a = engine_->make_sequence(), b = engine_->make_sequence();
  const auto expected = test::prefill_logits(*engine_, *a, std::span(tokens_).first(150), oracle.get());
  const auto actual = test::prefill_logits(*engine_, *b, std::span(tokens_).first(150), &by_hand);
  EXPECT_LT(test::largest_difference(actual, expected), 1e-3);
  for (const int32_t token : std::span(tokens_).last(10))
    EXPECT_LT(test::largest_difference(test::decode_logits(*engine_, *b, token, &by_hand),
                                       test::decode_logits(*engine_, *a, token, oracle.get())),
              1e-3);
}

TEST_F(PolicyStates, ADenseLayerMaySelectForTheNextOnes) {
  Log log;
  const HandPicked all({.keep = 1000, .dense_selectors = true, .log = &log}),
      few({.keep = 5, .dense_selectors = true});
  const auto dense = engine_->make_sequence(), selecting = engine_->make_sequence(),
             sparse = engine_->make_sequence();
  const auto prompt = std::span(tokens_).first(100);
  const auto expected = test::prefill_logits(*engine_, *dense, prompt);
  EXPECT_LT(test::largest_difference(test::prefill_logits(*engine_, *selecting, prompt, &all), expected),
            3e-4);
  EXPECT_GT(test::largest_difference(test::prefill_logits(*engine_, *sparse, prompt, &few), expected), 1e-1);
  // The selecting layer's choice falls after its attention, that of a layer for itself would before.
  EXPECT_THAT(log.entries,
              testing::ElementsAreArray({"0 appended 0..100", "0 select 0..100", "0 attended 0..100",
                                         "1 appended 0..100", "1 attended 0..100", "2 appended 0..100",
                                         "2 select 0..100", "2 attended 0..100", "3 appended 0..100",
                                         "3 attended 0..100", "4 appended 0..100", "4 select 0..100",
                                         "4 attended 0..100", "5 appended 0..100", "5 attended 0..100"}));
}

TEST_F(PolicyStates, HearsOfKeysFromBeforeItsTime) {
  Log log;
  const HandPicked policy({.log = &log});
  auto sequence = engine_->make_sequence();
  engine_->prefill(*sequence, std::span(tokens_).first(50), nullptr, nullptr, {}, nullptr);
  test::decode_logits(*engine_, *sequence, tokens_[50], &policy);
  EXPECT_EQ(log.live_states, 1);
  EXPECT_EQ(log.entries[0], "0 appended 0..51");
  EXPECT_EQ(log.entries[2], "1 appended 0..51");
  EXPECT_EQ(log.entries[3], "1 select 50..51");
  log.entries.clear();
  test::decode_logits(*engine_, *sequence, tokens_[51], &policy);
  EXPECT_EQ(log.entries[0], "0 appended 51..52");
  log.entries.clear();
  sequence->truncate(40);
  EXPECT_EQ(log.entries, std::vector<std::string>{"truncated 40"});
  test::decode_logits(*engine_, *sequence, tokens_[52], &policy);
  EXPECT_EQ(log.entries[1], "0 appended 40..41");
  // Another policy takes over; the state goes, and comes back with everything to hear again.
  test::decode_logits(*engine_, *sequence, tokens_[53]);
  EXPECT_EQ(log.live_states, 0);
  log.entries.clear();
  test::decode_logits(*engine_, *sequence, tokens_[54], &policy);
  EXPECT_EQ(log.entries[0], "0 appended 0..43");
  sequence.reset();
  EXPECT_EQ(log.live_states, 0);
}

TEST_F(PolicyStates, AFailedCallIsTakenBack) {
  struct Thrower final : LayerObserver {
    void after_layer(int layer, const float*, int64_t) override {
      if (layer == 2) throw BadArgument("observer");
    }
  } thrower;
  Log log;
  const HandPicked policy({.log = &log});
  const auto sequence = engine_->make_sequence();
  const ForwardItem item{sequence.get(), std::span(tokens_).first(20), 0};
  EXPECT_THROW(engine_->forward({&item, 1}, {.policy = &policy, .observer = &thrower}), BadArgument);
  EXPECT_EQ(log.entries.back(), "truncated 0");
  engine_->forward({&item, 1}, {.policy = &policy});  // the state itself checks that it hears everything once
  EXPECT_EQ(sequence->length(), 20);
}

TEST_F(PolicyStates, TeacherForcedRowsNeverHearOfLaterOnes) {
  Log log;
  const HandPicked policy({.log = &log});
  const auto rows = engine_->make_sequence(), steps = engine_->make_sequence();
  for (Sequence* sequence : {rows.get(), steps.get()})
    engine_->prefill(*sequence, std::span(tokens_).first(60), nullptr, nullptr, {}, nullptr);
  const ForwardItem item{rows.get(), std::span(tokens_).subspan(60, 3), 0};
  const auto hidden = engine_->forward({&item, 1}, {.phase = Phase::kRows, .policy = &policy});
  const auto logits = engine_->logits(hidden);
  const std::vector<float> actual(logits.begin(), logits.end());
  EXPECT_THAT(std::span(log.entries).first(6),
              testing::ElementsAre("0 appended 0..61", "0 attended 60..61", "0 appended 61..62",
                                   "0 attended 61..62", "0 appended 62..63", "0 attended 62..63"));
  EXPECT_THAT(std::span(log.entries).subspan(6, 3),
              testing::ElementsAre("1 appended 0..61", "1 select 60..61", "1 attended 60..61"));
  std::vector<float> expected;
  for (int i = 60; i < 63; ++i) {
    const auto row = test::decode_logits(*engine_, *steps, tokens_[i], &policy);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  EXPECT_LT(test::largest_difference(actual, expected), 1e-3);
}

TEST_F(PolicyStates, BatchesViewEachSequenceAlone) {
  const HandPicked policy({});
  const auto a = engine_->make_sequence(), b = engine_->make_sequence(), alone = engine_->make_sequence();
  engine_->prefill(*a, std::span(tokens_).first(33), &policy, nullptr, {}, nullptr);
  engine_->prefill(*b, std::span(tokens_).first(70), &policy, nullptr, {}, nullptr);
  engine_->prefill(*alone, std::span(tokens_).first(70), &policy, nullptr, {}, nullptr);
  const ForwardItem single{alone.get(), std::span(tokens_).subspan(70, 4), 0};
  const auto span = engine_->forward({&single, 1}, {.phase = Phase::kDecode, .policy = &policy});
  const std::vector<float> expected(span.begin(), span.end());
  const ForwardItem items[] = {{a.get(), std::span(tokens_).subspan(33, 2), 0},
                               {b.get(), std::span(tokens_).subspan(70, 4), 0}};
  const auto both = engine_->forward(items, {.phase = Phase::kDecode, .policy = &policy}).subspan(2 * 48);
  EXPECT_EQ(std::vector<float>(both.begin(), both.end()), expected);
}

TEST_F(PolicyStates, SetsOfAnotherShapeCannotBeReused) {
  struct Mixed final : Policy {
    const std::string& name() const override { return name_; }
    std::string describe() const override { return name_; }
    LayerRule rule(int layer, Phase) const override {
      LayerRule rule;
      rule.role = layer == 0 ? Role::kLayer0 : Role::kReuse;
      rule.set_owner = layer == 0 ? SetOwner::kAllHeads : SetOwner::kKvHead;
      return rule;
    }
    std::string name_ = "mixed";
  } policy;
  const auto sequence = engine_->make_sequence();
  EXPECT_THROW(engine_->prefill(*sequence, tokens_, &policy, nullptr, {}, nullptr), BadArgument);
  EXPECT_EQ(sequence->length(), 0);
}

}  // namespace
}  // namespace kascade
