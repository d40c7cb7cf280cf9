// SPDX-License-Identifier: Apache-2.0
#include "model/bpe_merge.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

namespace kascade {
namespace {

using Pairs = std::map<std::pair<int32_t, int32_t>, MergeTable::Merge>;

// The definition: as long as any pair merges, the leftmost of lowest rank does.
std::vector<int32_t> merge_by_definition(const Pairs& pairs, std::vector<int32_t> symbols) {
  for (;;) {
    size_t best = symbols.size();
    MergeTable::Merge merge{};
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = pairs.find({symbols[i], symbols[i + 1]});
      if (found != pairs.end() && (best == symbols.size() || found->second.rank < merge.rank)) {
        best = i;
        merge = found->second;
      }
    }
    if (best == symbols.size()) return symbols;
    symbols[best] = merge.result;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}

MergeTable table_of(const Pairs& pairs) {
  MergeTable table;
  table.reserve(pairs.size());
  for (const auto& [pair, merge] : pairs) table.insert(pair.first, pair.second, merge);
  return table;
}

TEST(MergeTable, FindsWhatWasInsertedAndNothingElse) {
  std::mt19937 random(1);
  Pairs pairs;
  for (uint32_t i = 0; i < 5000; ++i) {
    pairs.try_emplace({static_cast<int32_t>(random() % 300), static_cast<int32_t>(random() % 300)},
                      MergeTable::Merge{i, static_cast<int32_t>(i)});
  }
  const MergeTable table = table_of(pairs);
  for (int32_t left = -2; left < 302; ++left) {
    for (int32_t right = -2; right < 302; ++right) {
      const auto expected = pairs.find({left, right});
      const MergeTable::Merge* found = table.find(left, right);
      ASSERT_EQ(found != nullptr, expected != pairs.end());
      if (found != nullptr) {
        ASSERT_EQ(found->rank, expected->second.rank);
      }
    }
  }
}

TEST(MergeTable, AnEmptyOneFindsNothingAndTheFirstOfEqualPairsStays) {
  MergeTable table;
  EXPECT_EQ(table.find(0, 0), nullptr);
  table.reserve(0);
  EXPECT_EQ(table.find(0, 0), nullptr);
  table.reserve(2);
  table.insert(1, 2, {7, 3});
  table.insert(1, 2, {5, 4});
  EXPECT_EQ(table.find(1, 2)->rank, 7u);
  EXPECT_EQ(table.find(2, 1), nullptr);
}

TEST(Merger, AgreesWithTheDefinition) {
  std::mt19937 random(2);
  for (int round = 0; round < 300; ++round) {
    // A few symbols and many merges among them and their results, some of equal rank: long chains of
    // dependent merges.
    const int32_t letters = 2 + static_cast<int32_t>(random() % 4);
    Pairs pairs;
    int32_t next = letters;
    for (uint32_t i = 0; i < 40; ++i) {
      const auto symbol = [&] { return static_cast<int32_t>(random() % next); };
      if (pairs.try_emplace({symbol(), symbol()}, MergeTable::Merge{round % 2 == 0 ? i : i / 5, next}).second)
        ++next;
    }
    const MergeTable table = table_of(pairs);
    Merger merger(table);
    for (int i = 0; i < 20; ++i) {
      std::vector<int32_t> symbols(random() % 60);
      for (int32_t& symbol : symbols)
        symbol = random() % 12 == 0 ? -1 : static_cast<int32_t>(random() % letters);
      std::vector<int32_t> merged = symbols;
      merger.merge(merged);
      ASSERT_EQ(merged, merge_by_definition(pairs, symbols));
    }
  }
}

TEST(Merger, MergesLongSequences) {
  Pairs pairs;  // 0 0 -> 1, 1 1 -> 2, ...
  for (uint32_t i = 0; i < 17; ++i) pairs[{i, i}] = {i, static_cast<int32_t>(i) + 1};
  const MergeTable table = table_of(pairs);
  std::vector<int32_t> symbols(1 << 17, 0);
  Merger(table).merge(symbols);
  EXPECT_EQ(symbols, std::vector<int32_t>{17});
}

}  // namespace
}  // namespace kascade
