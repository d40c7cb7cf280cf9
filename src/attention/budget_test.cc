// SPDX-License-Identifier: Apache-2.0
#include "kascade/budget.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace kascade {
namespace {

/// k of a one-row decode step over L keys, its own included.
int64_t decode_members(const Budget& budget, int64_t length) {
  const bool own = budget.own_tile != OwnTile::kOnTop;
  return evaluate_budget(budget, own ? length : length - 1, length - 1, length, 1).members();
}

/// k of the prefill tile at x of a prompt of L tokens.
int64_t tile_members(const Budget& budget, int64_t x, int64_t length) {
  return evaluate_budget(budget, x, x, length, length).members();
}

struct Row {
  int64_t length, k0, paper, kernel;
};

// What the rules of docs/method.md, "Budgets", come to. Where `kernel` is dense it selects everything.
constexpr Row kTable[] = {{100, 100, 68, 100},          {128, 128, 96, 128},   {1000, 128, 96, 128},
                          {2304, 230, 198, 256},        {8192, 819, 787, 896}, {32768, 3276, 3244, 3328},
                          {131072, 13107, 13075, 13184}};

TEST(BudgetTest, PublishedTable) {
  for (const Row& row : kTable) {
    EXPECT_EQ(decode_members(paper_budget(), row.length), row.paper) << row.length;
    EXPECT_EQ(decode_members(paper_budget(1000, 1), row.length), row.k0) << row.length;
    EXPECT_EQ(decode_members(kernel_decode_budget(), row.length), row.kernel) << row.length;
  }
}

TEST(BudgetTest, PublishedTableInPrefill) {
  for (const Row& row : kTable) {
    // The last tile has all keys before it as candidates, which at L = 100 and 128 are fewer than the rule
    // gives.
    const int64_t x = (row.length - 1) / 32 * 32;
    EXPECT_EQ(tile_members(paper_budget(), x, row.length), std::min(row.paper, x)) << row.length;
    EXPECT_EQ(tile_members(kernel_budget(1000, 32, false), x, row.length), std::min(row.kernel, x))
        << row.length;
  }
}

TEST(BudgetTest, KernelIsDenseUpTo128Keys) {
  for (int64_t length = 1; length <= 128; ++length) {
    EXPECT_TRUE(evaluate_budget(kernel_decode_budget(), length, length - 1, length, 1).covers_all())
        << length;
    EXPECT_TRUE(
        evaluate_budget(kernel_budget(), length / 32 * 32, length / 32 * 32, length, length).covers_all());
  }
  EXPECT_FALSE(evaluate_budget(kernel_decode_budget(), 129, 128, 129, 1).covers_all());
}

TEST(BudgetTest, RollingTileAt4096Of8192) {
  EXPECT_EQ(tile_members(paper_budget(1000, 32, true), 4096, 8192), 409);
  EXPECT_EQ(tile_members(kernel_budget(), 4096, 8192), 512);
  EXPECT_EQ(tile_members(default_budget(), 4096, 8192), 128 + 410);
  EXPECT_EQ(tile_members(paper_budget(), 4096, 8192), 787);
}

TEST(BudgetTest, RollingPaperNeverExceedsItsFixedCount) {
  // Near the end floor(x/10) is above k0 - T.
  EXPECT_EQ(tile_members(paper_budget(1000, 32, true), 8160, 8192), 787);
  EXPECT_EQ(tile_members(paper_budget(1000, 32, true), 7869, 8192), 786);
}

TEST(BudgetTest, RollingNeedsMoreThan128Rows) {
  // Fixed at 128 rows: k0 - T = 96. Rolling at 129: max(128, 10 % of x) capped by the fixed 96.
  const Budget rolling = paper_budget(9000, 32, true);
  EXPECT_EQ(tile_members(rolling, 96, 128), 96);
  EXPECT_EQ(evaluate_budget(rolling, 1000, 1000, 128, 128).members(), 96);
  EXPECT_EQ(evaluate_budget(rolling, 1000, 100, 1000, 129).members(), 128);
  EXPECT_EQ(evaluate_budget(rolling, 1000, 100, 1000, 128).members(), 900 - 32);
}

TEST(BudgetTest, PaperKeepsAtLeastOneKey) {
  for (int64_t length = 1; length <= 33; ++length)
    EXPECT_EQ(decode_members(paper_budget(), length), 1) << length;
  EXPECT_EQ(decode_members(paper_budget(), 34), 2);
}

TEST(BudgetTest, DefaultIsTheLast128AndTheHeaviestOfTheOthers) {
  struct Case {
    int64_t x, ranked;
  };
  // ceil(x / 10), at least 128, of the x - 128 keys before the recent ones.
  for (const Case& c : {Case{0, 0},
                        {1, 0},
                        {127, 0},
                        {128, 0},
                        {129, 1},
                        {256, 128},
                        {257, 128},
                        {1280, 128},
                        {1281, 129},
                        {2303, 231},
                        {32767, 3277},
                        {131071, 13108}}) {
    for (const int64_t length : {c.x + 1, c.x + 5000}) {
      const SetBudget set = evaluate_budget(default_budget(), c.x, c.x, length, 1);
      EXPECT_EQ(set.ranked, c.ranked) << c.x;
      EXPECT_EQ(set.sinks, 0);
      EXPECT_EQ(set.recent_begin, std::max<int64_t>(c.x - 128, 0)) << c.x;
      EXPECT_EQ(set.covers_all(), c.x <= 256) << c.x;
    }
  }
}

TEST(BudgetTest, ThirdOfAPercentRoundsInIntegers) {
  const Budget down{.percent_hundredths = 33, .floor = 0};
  const Budget up{.percent_hundredths = 33, .round_up = true, .floor = 0};
  EXPECT_EQ(tile_members(down, 10000, 10000), 33);
  EXPECT_EQ(tile_members(up, 10000, 10000), 33);
  EXPECT_EQ(tile_members(down, 10001, 10001), 33);
  EXPECT_EQ(tile_members(up, 10001, 10001), 34);
  EXPECT_EQ(tile_members(down, 303, 303), 0);
  EXPECT_EQ(tile_members(up, 1, 1), 1);
}

TEST(BudgetTest, ForcedKeysOnTopOrCharged) {
  const Budget on_top{.percent_hundredths = 0, .floor = 10, .sinks = 4, .recent = 3};
  Budget charged = on_top;
  charged.forced_charged = true;
  EXPECT_EQ(tile_members(on_top, 100, 100), 17);
  EXPECT_EQ(tile_members(charged, 100, 100), 10);
  // More forced keys than the count: they stay, nothing is ranked.
  charged.floor = 5;
  EXPECT_EQ(tile_members(charged, 100, 100), 7);
  EXPECT_EQ(evaluate_budget(charged, 100, 100, 100, 1).ranked, 0);
}

TEST(BudgetTest, ForcedKeysNeverOverlapOrPassTheCandidates) {
  const Budget budget{.percent_hundredths = 0, .floor = 2, .sinks = 4, .recent = 6};
  for (int64_t x = 0; x <= 14; ++x) {
    const SetBudget set = evaluate_budget(budget, x, x, x, 1);
    EXPECT_EQ(set.members(), std::min<int64_t>(x, 12)) << x;
    EXPECT_LE(set.sinks, set.recent_begin) << x;
    EXPECT_LE(set.recent_begin, set.candidates) << x;
    EXPECT_EQ(set.covers_all(), x <= 12) << x;
  }
}

TEST(BudgetTest, NegativeCandidatesCountAsNone) {
  const SetBudget set = evaluate_budget(default_budget(), -3, 0, 0, 1);
  EXPECT_EQ(set.candidates, 0);
  EXPECT_EQ(set.members(), 0);
}

TEST(BudgetTest, LargestLengthsDoNotOverflow) {
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();
  Budget budget{
      .percent_hundredths = 10000, .round_up = true, .round_to = std::numeric_limits<int32_t>::max()};
  EXPECT_EQ(tile_members(budget, kLongest, kLongest), kLongest);
  budget.sinks = budget.recent = budget.floor = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(tile_members(budget, kLongest, kLongest), kLongest);
}

}  // namespace
}  // namespace kascade
