// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_statistics.h"

#include <cmath>

#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using testing::HasSubstr;

CollectedPrompt collect(const StatisticsSettings& settings, int threads = 1, int64_t tokens = 300) {
  const auto engine = test::tiny_engine(threads);
  return collect_statistics(*engine, test::random_ids(tokens, 21), settings);
}

void expect_same(const PromptStatistics& a, const PromptStatistics& b) {
  EXPECT_EQ(a.similarity_min, b.similarity_min);
  EXPECT_EQ(a.similarity_mean, b.similarity_mean);
  EXPECT_EQ(a.importance, b.importance);
  EXPECT_EQ(a.tiles, b.tiles);
}

float at(const PromptStatistics& s, const std::vector<float>& values, int i, int j, int r, int a) {
  return values[((i * s.layers + j) * s.kv_heads + r) * s.kv_heads + a];
}

TEST(CollectStatistics, CountsPromptTilesAndDecodedTokens) {
  for (const int64_t tokens : {1, 31, 32, 33, 300}) {
    StatisticsSettings settings;
    settings.max_new_tokens = 4;
    const CollectedPrompt collected = collect(settings, 1, tokens);
    EXPECT_EQ(collected.statistics.tiles,
              (tokens + 31) / 32 + static_cast<int64_t>(collected.generated.size()) - 1)
        << tokens;
    EXPECT_EQ(collected.statistics.tokens, tokens);
  }
}

TEST(CollectStatistics, DoesNotDependOnThreadsOrChunking) {
  for (const bool sparse : {false, true}) {
    for (const int tile : {32, 48}) {
      StatisticsSettings settings;
      settings.tile = tile;
      settings.similarity_k = 16;
      settings.sparse_forward = sparse;
      const CollectedPrompt reference = collect(settings);
      StatisticsSettings chunked = settings;
      chunked.prefill_chunk = 128;
      const CollectedPrompt other = collect(chunked, 2);
      expect_same(other.statistics, reference.statistics);
      EXPECT_EQ(other.generated, reference.generated);
    }
  }
}

TEST(CollectStatistics, MeanIsNotBelowMinimumAndTheDiagonalIsOne) {
  StatisticsSettings settings;
  settings.similarity_k = 8;
  const PromptStatistics s = collect(settings).statistics;
  bool below_one = false;
  for (int i = 0; i < s.layers; ++i) {
    for (int j = 0; j < s.layers; ++j) {
      for (int r = 0; r < s.kv_heads; ++r) {
        for (int a = 0; a < s.kv_heads; ++a) {
          const float low = at(s, s.similarity_min, i, j, r, a), mean = at(s, s.similarity_mean, i, j, r, a);
          EXPECT_LE(low, mean + 1e-6f);
          if (j < i) {
            EXPECT_EQ(mean, 0);
          }
          if (i == j && r == a) {
            EXPECT_EQ(low, 1);
          }
          below_one |= i < j && low < 0.99f;
        }
      }
    }
  }
  EXPECT_TRUE(below_one);
  for (const float e : s.importance) EXPECT_GT(e, 0);
}

TEST(CollectStatistics, ASetOfEverythingCapturesEverything) {
  StatisticsSettings settings;
  settings.similarity_k = 512;
  const PromptStatistics s = collect(settings).statistics;
  for (int i = 0; i < s.layers; ++i)
    for (int j = i; j < s.layers; ++j) EXPECT_EQ(at(s, s.similarity_min, i, j, 0, 1), 1);
}

TEST(CollectStatistics, SparseForwardPerturbsTheModel) {
  StatisticsSettings settings;
  settings.similarity_k = 8;
  const CollectedPrompt dense = collect(settings);
  settings.sparse_forward = true;
  const CollectedPrompt sparse = collect(settings);
  EXPECT_NE(sparse.statistics.importance[1], dense.statistics.importance[1]);
  // The first layer sees the same input either way, so its own statistics but for decoded tokens are the
  // same.
  settings.max_new_tokens = 1;
  const CollectedPrompt sparse_prompt = collect(settings);
  settings.sparse_forward = false;
  const CollectedPrompt dense_prompt = collect(settings);
  EXPECT_EQ(at(sparse_prompt.statistics, sparse_prompt.statistics.similarity_min, 0, 0, 0, 1),
            at(dense_prompt.statistics, dense_prompt.statistics.similarity_min, 0, 0, 0, 1));
}

TEST(CollectStatistics, TheRunTimeBudgetIsReadWhenKIsZero) {
  StatisticsSettings settings;
  settings.similarity_k = 0;
  settings.budget = Budget{.percent_hundredths = 0, .floor = 8};
  settings.decode_budget =
      Budget{.percent_hundredths = 0, .floor = 8, .own_tile = OwnTile::kCandidate, .tile = 1};
  StatisticsSettings same;
  same.similarity_k = 8;
  expect_same(collect(settings).statistics, collect(same).statistics);
  settings.budget = settings.decode_budget = default_budget();
  EXPECT_NE(collect(settings).statistics.similarity_min, collect(same).statistics.similarity_min);
}

TEST(CollectStatistics, ADenseForwardContinuesAsDenseAttentionDoes) {
  const auto engine = test::tiny_engine();
  const auto ids = test::random_ids(300, 22);
  StatisticsSettings settings;
  settings.max_new_tokens = 6;
  const DensePrompt dense = prefill_dense(*engine, ids, 6);
  EXPECT_EQ(collect_statistics(*engine, ids, settings).generated, dense.generated);
  EXPECT_EQ(dense.sequence->length(), 300 + static_cast<int64_t>(dense.generated.size()) - 1);
  EXPECT_TRUE(prefill_dense(*engine, ids, 0).generated.empty());
}

TEST(CollectStatistics, RefusesWhatItCannotRun) {
  const auto engine = test::tiny_engine();
  EXPECT_THAT(message_of<BadArgument>([&] { collect_statistics(*engine, {}, {}); }), HasSubstr("token"));
  StatisticsSettings settings;
  settings.tile = 0;
  EXPECT_THAT(message_of<BadArgument>([&] { collect_statistics(*engine, test::random_ids(5, 1), settings); }),
              HasSubstr("tile"));
  settings.tile = 32;
  std::atomic<bool> cancel = true;
  EXPECT_THROW(collect_statistics(*engine, test::random_ids(5, 1), settings, &cancel), Cancelled);
}

}  // namespace
}  // namespace kascade
