// SPDX-License-Identifier: Apache-2.0
#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>

#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

std::shared_ptr<const Policy> kascade_policy(double percent, int floor) {
  const ModelIdentity identity = test::tiny_model()->model().identity();
  Plan plan;
  plan.model = identity;
  plan.anchors = {0, 1};
  plan.head_map.assign(identity.layers, {0, 1});
  return make_policy("kascade", PolicyOptions{.percent = percent, .floor = floor, .recent = 0}, identity,
                     &plan);
}

// Residual rows of a whole text in one prefill.
std::vector<float> residual(Engine& engine, std::span<const int32_t> ids) {
  std::vector<float> rows;
  const auto sequence = engine.make_sequence();
  engine.prefill(
      *sequence, ids, nullptr, nullptr,
      [&](int64_t, std::span<const float> chunk) { rows.insert(rows.end(), chunk.begin(), chunk.end()); },
      nullptr);
  return rows;
}

TEST(Perplexity, ScoresEveryRegionAsDefined) {
  const auto engine = test::tiny_engine();
  const auto ids = test::random_ids(60, 1);
  PerplexityOptions options;
  options.prefill = 40;
  options.score_last = 25;
  const PerplexityResult result = perplexity(*engine, ids, nullptr, options);
  EXPECT_EQ(result.tokens, 60);
  EXPECT_EQ(result.prefill_tokens, 40);
  ASSERT_EQ(result.prefill.positions, 25);
  ASSERT_EQ(result.first.positions, 1);
  ASSERT_EQ(result.decode.positions, 19);

  const std::vector<float> rows = residual(*engine, ids);
  const int64_t width = engine->model().config().hidden;
  const auto nll = [&](int64_t token) {
    const auto logits = engine->logits(std::span<const float>(rows).subspan((token - 1) * width, width));
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    return std::log(sum) - static_cast<double>(logits[ids[token]]);
  };
  // fp32 sums in another order (decode against prefill, blocks of logits against one): a few units of logits
  // near 10.
  for (int64_t i = 0; i < 25; ++i) EXPECT_NEAR(result.prefill.nlls[i], nll(15 + i), 1e-4) << i;
  EXPECT_NEAR(result.first.nlls[0], nll(40), 1e-4);
  for (int64_t i = 0; i < 19; ++i) EXPECT_NEAR(result.decode.nlls[i], nll(41 + i), 1e-4) << i;
  EXPECT_EQ(result.decode.kl.value, 0);
  EXPECT_EQ(result.decode.top1.value, 1);
  EXPECT_EQ(result.decode.nll.value, result.decode.dense_nll.value);
}

TEST(Perplexity, DefaultsToTheWholeTextButItsFirstToken) {
  const auto engine = test::tiny_engine();
  const PerplexityResult result = perplexity(*engine, test::random_ids(33, 2), nullptr, {});
  EXPECT_EQ(result.prefill.positions, 32);
  EXPECT_EQ(result.first.positions, 0);
  EXPECT_EQ(result.decode.positions, 0);
}

TEST(Perplexity, DenseAndSparseScoreTheSamePositionsOverTheirOwnCaches) {
  const auto engine = test::tiny_engine();
  const auto ids = test::random_ids(300, 3);
  PerplexityOptions options;
  options.prefill = 280;
  const auto policy = kascade_policy(1, 8);
  const PerplexityResult sparse = perplexity(*engine, ids, policy.get(), options);
  const PerplexityResult dense = perplexity(*engine, ids, nullptr, options);
  EXPECT_EQ(sparse.prefill.dense_nlls, dense.prefill.nlls);
  EXPECT_EQ(sparse.decode.dense_nlls, dense.decode.nlls);
  EXPECT_EQ(sparse.first.dense_nlls, dense.first.nlls);
  // Eight keys of up to 299 leave a mark, in decode and already in prefill.
  EXPECT_GT(sparse.prefill.kl.value, 1e-3);
  EXPECT_GT(sparse.decode.kl.value, 1e-3);
  EXPECT_LE(sparse.decode.kl.low, sparse.decode.kl.value);
  EXPECT_GE(sparse.decode.kl.high, sparse.decode.kl.value);
  for (const double kl : sparse.prefill.kls) EXPECT_GE(kl, 0);
}

TEST(Perplexity, AFullBudgetIsDense) {
  const auto engine = test::tiny_engine();
  const auto ids = test::random_ids(200, 4);
  PerplexityOptions options;
  options.prefill = 150;
  const auto policy = kascade_policy(100, 0);
  const PerplexityResult result = perplexity(*engine, ids, policy.get(), options);
  // Rounding of another summation order only.
  EXPECT_LT(result.prefill.kl.value, 1e-6);
  EXPECT_LT(result.decode.kl.value, 1e-6);
  EXPECT_EQ(result.decode.top1.value, 1);
}

TEST(Perplexity, DoesNotDependOnChunkingOrThreads) {
  const auto ids = test::random_ids(400, 5);
  const auto policy = kascade_policy(5, 16);
  const auto run = [&](int threads, int32_t chunk) {
    const auto engine = test::tiny_engine(threads);
    PerplexityOptions options;
    options.prefill = 380;
    options.prefill_chunk = chunk;
    return perplexity(*engine, ids, policy.get(), options);
  };
  const PerplexityResult one = run(1, 512), two = run(2, 128);
  // Same residual rows; only blocks of logits are cut elsewhere, which may take another path of the product.
  ASSERT_EQ(one.prefill.nlls.size(), two.prefill.nlls.size());
  for (size_t i = 0; i < one.prefill.nlls.size(); ++i)
    EXPECT_NEAR(one.prefill.nlls[i], two.prefill.nlls[i], 1e-4);
  EXPECT_EQ(one.decode.nlls, two.decode.nlls);
}

TEST(Perplexity, NamesOptionsOutOfRange) {
  const auto engine = test::tiny_engine();
  const auto run = [&](int64_t tokens, std::optional<int64_t> prefill, std::optional<int64_t> score_last) {
    PerplexityOptions options;
    options.prefill = prefill;
    options.score_last = score_last;
    return message_of<BadArgument>(
        [&] { perplexity(*engine, test::random_ids(tokens, 6), nullptr, options); });
  };
  EXPECT_THAT(run(1, {}, {}), HasSubstr("2 tokens"));
  EXPECT_THAT(run(10, 0, {}), AllOf(HasSubstr("prefill"), HasSubstr("10")));
  EXPECT_THAT(run(10, 11, {}), AllOf(HasSubstr("prefill"), HasSubstr("11")));
  EXPECT_THAT(run(10, 5, 5), AllOf(HasSubstr("score-last"), HasSubstr("4")));
  EXPECT_THAT(run(10, {}, -1), HasSubstr("score-last"));
}

TEST(Perplexity, StopsWhenCancelled) {
  const auto engine = test::tiny_engine();
  std::atomic<bool> cancel = false;
  PerplexityOptions options;
  options.prefill = 10;
  options.cancel = &cancel;
  options.progress = [&](int64_t done, int64_t) { cancel = done >= 15; };
  EXPECT_THROW(perplexity(*engine, test::random_ids(60, 7), nullptr, options), Cancelled);
}

}  // namespace
}  // namespace kascade
