// SPDX-License-Identifier: Apache-2.0
// What must hold of any correct implementation (DESIGN.md, "The operator"; docs/method.md, "Edge cases"), for
// every kernel of the CPU and type of keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "attention/attention_test_case.h"

namespace kascade {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A budget small enough to leave most keys out at the lengths used here.
constexpr Budget kSmall{.percent_hundredths = 1000, .round_up = true, .floor = 6, .sinks = 1, .recent = 4};

class AttentionProperty : public testing::TestWithParam<KernelCase> {
 protected:
  Problem problem(Role role, TileRule rule = TileRule::kAligned) const {
    Problem p;
    p.role = role;
    p.tile_rule = rule;
    p.kv_dtype = GetParam().kv_dtype;
    p.query_heads = 6;
    p.kv_heads = 2;
    p.head_dim = 24;
    p.tile = 16;
    p.budget = kSmall;
    return p;
  }

  Result run(const Problem& p, const Layout& layout = {}, const Sets* given = nullptr) const {
    return kascade::run(p, *GetParam().kernel, layout, 1, given);
  }

  Tolerance allowed() const { return tolerance(*GetParam().kernel, GetParam().kv_dtype); }

  void expect_near(const Result& actual, const Result& expected) const {
    EXPECT_LE(max_difference(actual.out, expected.out), allowed().out);
    EXPECT_LE(max_difference(actual.lse, expected.lse), allowed().lse);
  }
};

Problem with_role(const Problem& problem, Role role) {
  Problem other = problem;
  other.role = role;
  return other;
}

/// All keys before every tile.
std::vector<int32_t> first_keys(int64_t count) {
  std::vector<int32_t> keys(static_cast<size_t>(std::max<int64_t>(count, 0)));
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

TEST_P(AttentionProperty, FullBudgetEqualsDense) {
  Random random(30);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead}) {
      for (const OwnTile own : {OwnTile::kOnTop, OwnTile::kCharged, OwnTile::kCandidate}) {
        Problem p = problem(Role::kAnchor, rule);
        p.set_owner = owner;
        p.budget = Budget{.percent_hundredths = 0, .floor = 1000, .own_tile = own, .tile = 16};
        if (own == OwnTile::kCandidate) p.tile = 1;
        p.add(random, rule == TileRule::kStep ? 3 : 70, 70);
        p.add(random, 2, 41);
        expect_near(run(p), run(with_role(p, Role::kDense)));
      }
    }
  }
}

TEST_P(AttentionProperty, PercentOf100EqualsDense) {
  Random random(31);
  Problem p = problem(Role::kAnchor);
  p.budget = Budget{.percent_hundredths = 10000, .floor = 0};
  p.add(random, 130, 130);
  expect_near(run(p), run(with_role(p, Role::kDense)));
}

TEST_P(AttentionProperty, FewerCandidatesThanTheBudgetAreAllTakenOnce) {
  Random random(32);
  Problem p = problem(Role::kAnchor);
  p.budget = Budget{.percent_hundredths = 0, .floor = 40, .recent = 3};
  p.add(random, 60, 60);
  const Result result = run(p, {.spare_capacity = 5});  // run() checks the padding with -1
  for (int64_t t = 0; t < 4; ++t)
    for (int32_t g = 0; g < 2; ++g) {
      const auto& members = result.sets.of(0, t, g);
      if (t * 16 <= 43) {
        EXPECT_EQ(members, first_keys(t * 16));
      } else {
        EXPECT_EQ(members.size(), 43u);
      }
    }
}

TEST_P(AttentionProperty, WeightsOfATileSumToItsRowsAndHeads) {
  // Every row and head votes with weight 1, the rows that a last tile lacks not at all.
  Random random(33);
  for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead}) {
    Problem p = problem(Role::kLayer0);
    p.set_owner = owner;
    p.add(random, 37, 37);
    p.add(random, 7, 50);
    const Result result = run(p, {.by_products = true});
    const float rows[] = {16, 16, 5, 5, 2};  // of tiles 0..2 of the first sequence, 2 and 3 of the second
    const auto per_tile = static_cast<size_t>(result.sets.per_tile);
    ASSERT_EQ(result.pooled.size(), 5 * per_tile);
    for (size_t i = 0; i < result.pooled.size(); ++i) {
      const double sum =
          std::accumulate(result.pooled[i].begin(), result.pooled[i].end(), 0.0) + result.own_mass[i];
      const double expected = rows[i / per_tile] * 6 / static_cast<float>(per_tile);
      EXPECT_NEAR(sum, expected, allowed().weight * expected) << "set " << i;
      for (const float w : result.pooled[i]) EXPECT_GE(w, 0);
    }
  }
}

TEST_P(AttentionProperty, LaterTilesDoNotChangeEarlierOnes) {
  // Causality of selection and output, and of the keys themselves: position 48 starts a tile.
  Random random(34);
  Problem shorter = problem(Role::kAnchor);
  const SequenceData full = shorter.add(random, 80, 80);
  Problem changed = shorter;
  for (size_t i = 48 * 2 * 24; i < full.k.size(); ++i) {
    changed.sequences[0].k[i] = round_to_dtype(random.normal(), changed.kv_dtype);
    changed.sequences[0].v[i] = round_to_dtype(random.normal(), changed.kv_dtype);
  }
  const Result a = run(shorter), b = run(changed);
  EXPECT_EQ(first_difference(rows_of(a.out, 0, 48, 6 * 24), rows_of(b.out, 0, 48, 6 * 24)), -1);
  EXPECT_EQ(first_difference(rows_of(a.lse, 0, 48, 6), rows_of(b.lse, 0, 48, 6)), -1);
  EXPECT_NE(first_difference(rows_of(a.out, 48, 80, 6 * 24), rows_of(b.out, 48, 80, 6 * 24)), -1);
  for (int64_t t = 0; t < 3; ++t)
    for (int32_t g = 0; g < 2; ++g) EXPECT_EQ(a.sets.of(0, t, g), b.sets.of(0, t, g)) << "tile " << t;
}

TEST_P(AttentionProperty, NoRowAttendsToALaterKey) {
  // Key j alone has another value: exactly the rows from position j on may change, whatever the role.
  Random random(35);
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse}) {
    Problem p = problem(role);
    p.add(random, 40, 56);
    const Sets sets = run(with_role(p, Role::kAnchor)).sets;
    const Result before = run(p, {}, &sets);
    for (const int64_t j : {0, 20, 31, 32, 45, 55}) {
      Problem changed = p;
      for (size_t c = 0; c < 2 * 24; ++c) changed.sequences[0].v[static_cast<size_t>(j) * 2 * 24 + c] = 3;
      const Result after = run(changed, {}, &sets);
      const int64_t rows = std::clamp<int64_t>(j - 16, 0, 40);
      EXPECT_EQ(first_difference(rows_of(before.out, 0, rows, 6 * 24), rows_of(after.out, 0, rows, 6 * 24)),
                -1)
          << "key " << j;
      if (j < 16) continue;
      // In the row's own tile, so always attended by it.
      EXPECT_NE(first_difference(rows_of(before.out, rows, rows + 1, 6 * 24),
                                 rows_of(after.out, rows, rows + 1, 6 * 24)),
                -1)
          << "key " << j;
    }
  }
}

TEST_P(AttentionProperty, SetsHoldOnlyKeysBeforeTheTileAndTheForcedOnes) {
  Random random(36);
  Problem p = problem(Role::kAnchor);
  p.add(random, 100, 100);
  const Result result = run(p);
  for (int64_t t = 0; t < 7; ++t) {
    for (int32_t g = 0; g < 2; ++g) {
      const auto& members = result.sets.of(0, t, g);
      const int64_t x = t * 16;
      const SetBudget budget = evaluate_budget(kSmall, x, x, 100, 100);
      ASSERT_EQ(static_cast<int64_t>(members.size()), budget.members()) << "tile " << t;
      for (const int32_t j : members) EXPECT_LT(j, x);
      if (x == 0) continue;
      EXPECT_EQ(members.front(), 0);
      for (int64_t j = budget.recent_begin; j < x; ++j)
        EXPECT_TRUE(std::binary_search(members.begin(), members.end(), static_cast<int32_t>(j))) << j;
    }
  }
}

TEST_P(AttentionProperty, FirstTileIsPlainCausal) {
  Random random(37);
  Problem p = problem(Role::kAnchor);
  p.add(random, 50, 50);
  p.add(random, 5, 5);  // shorter than a tile
  const Result sparse = run(p), dense = run(with_role(p, Role::kDense));
  for (const auto& [begin, end] : {std::pair{0, 16}, std::pair{50, 55}}) {
    EXPECT_LE(max_difference(rows_of(sparse.out, begin, end, 6 * 24), rows_of(dense.out, begin, end, 6 * 24)),
              allowed().out);
    EXPECT_LE(max_difference(rows_of(sparse.lse, begin, end, 6), rows_of(dense.lse, begin, end, 6)),
              allowed().lse);
  }
  for (int64_t b = 0; b < 2; ++b)
    for (int32_t g = 0; g < 2; ++g)
      EXPECT_TRUE(sparse.sets.of(b, 0, g).empty()) << "tile 0 has no candidates";
}

TEST_P(AttentionProperty, Layer0IsDenseAndSelectsLikeAnAnchor) {
  Random random(38);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    Problem p = problem(Role::kLayer0, rule);
    p.add(random, rule == TileRule::kStep ? 2 : 66, 90);
    const Result layer0 = run(p);
    expect_near(layer0, run(with_role(p, Role::kDense)));
    EXPECT_EQ(layer0.sets, run(with_role(p, Role::kAnchor)).sets);
  }
}

TEST_P(AttentionProperty, ReuseWithItsOwnSetsReproducesTheAnchor) {
  Random random(39);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    for (const OwnTile own : {OwnTile::kOnTop, OwnTile::kCharged}) {
      for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead}) {
        Problem p = problem(Role::kAnchor, rule);
        p.budget.own_tile = own;
        p.budget.tile = 4;
        p.set_owner = owner;
        p.add(random, rule == TileRule::kStep ? 3 : 70, 101);
        const Result anchor = run(p);
        expect_near(run(with_role(p, Role::kReuse), {}, &anchor.sets), anchor);
      }
    }
  }
}

TEST_P(AttentionProperty, ReuseAttendsToTheSetAndTheOwnKeysAlone) {
  // Values of all other keys may be anything, infinite included.
  Random random(40);
  Problem p = problem(Role::kReuse);
  p.kv_heads = 1;
  p.query_heads = 3;
  p.add(random, 10, 42);  // tile 2 alone, positions 32..41
  Sets sets = empty_sets(p);
  sets.members[0] = {0, 3, 4, 17, 31};
  const Result before = run(p, {}, &sets);
  for (int32_t j = 0; j < 32; ++j) {
    if (std::binary_search(sets.members[0].begin(), sets.members[0].end(), j)) continue;
    for (size_t c = 0; c < 24; ++c) {
      p.sequences[0].k[static_cast<size_t>(j) * 24 + c] = std::numeric_limits<float>::quiet_NaN();
      p.sequences[0].v[static_cast<size_t>(j) * 24 + c] = kInfinity;
    }
  }
  const Result after = run(p, {}, &sets);
  EXPECT_EQ(first_difference(before.out, after.out), -1);
  EXPECT_EQ(first_difference(before.lse, after.lse), -1);
}

TEST_P(AttentionProperty, HeadMapPicksTheSetAndNotTheKeys) {
  Random random(41);
  for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kQueryHead}) {
    Problem p = problem(Role::kAnchor);
    p.kv_heads = 3;
    p.set_owner = owner;
    p.add(random, 48, 64);
    const Sets own = run(p).sets;
    const std::vector<int32_t> map{2, 0, 0};  // two heads share a set, and one set has no reader
    Sets moved = own;
    const size_t group = owner == SetOwner::kQueryHead ? 2 : 1, per_tile = 3 * group;
    for (size_t i = 0; i < moved.members.size(); ++i) {
      const size_t head = i % per_tile / group;
      moved.members[i] =
          own.members[i / per_tile * per_tile + static_cast<size_t>(map[head]) * group + i % group];
    }
    Problem mapped = with_role(p, Role::kReuse);
    mapped.head_map = map;
    const Result a = run(mapped, {}, &own), b = run(with_role(p, Role::kReuse), {}, &moved);
    EXPECT_EQ(first_difference(a.out, b.out), -1);
    EXPECT_EQ(first_difference(a.lse, b.lse), -1);
    EXPECT_NE(first_difference(a.out, run(with_role(p, Role::kReuse), {}, &own).out), -1);
  }
}

TEST_P(AttentionProperty, HeadMapDoesNotMatterWithOneSetForAllHeads) {
  Random random(42);
  Problem p = problem(Role::kAnchor);
  p.set_owner = SetOwner::kAllHeads;
  p.add(random, 40, 60);
  const Sets sets = run(p).sets;
  Problem reuse = with_role(p, Role::kReuse);
  const Result plain = run(reuse, {}, &sets);
  reuse.head_map = {1, 0};
  EXPECT_EQ(first_difference(run(reuse, {}, &sets).out, plain.out), -1);
}

TEST_P(AttentionProperty, HeadsThatNobodyReadsGetEmptySets) {
  Random random(43);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kQueryHead}) {
      Problem p = problem(Role::kLayer0, rule);
      p.kv_heads = 3;
      p.set_owner = owner;
      p.add(random, rule == TileRule::kStep ? 1 : 40, 70);
      const Result all = run(p);
      p.needed = {0, 1, 0};
      const Result some = run(p);
      EXPECT_EQ(first_difference(some.out, all.out), -1);
      const size_t group = owner == SetOwner::kQueryHead ? 2 : 1;
      for (size_t i = 0; i < all.sets.members.size(); ++i)
        EXPECT_EQ(some.sets.members[i], i / group % 3 == 1 ? all.sets.members[i] : std::vector<int32_t>{})
            << "set " << i;
    }
  }
}

TEST_P(AttentionProperty, NeededConcernsLayer0Alone) {
  Random random(44);
  Problem p = problem(Role::kAnchor);
  p.add(random, 40, 70);
  const Result all = run(p);
  p.needed = {0, 0};
  const Result masked = run(p);
  EXPECT_EQ(masked.sets, all.sets);
  EXPECT_EQ(first_difference(masked.out, all.out), -1);
}

TEST_P(AttentionProperty, RowsBeforeTheFirstKeyAreZero) {
  Random random(45);
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse}) {
    for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
      for (const OwnTile own : {OwnTile::kOnTop, OwnTile::kCharged}) {
        Problem p = problem(role, rule);
        p.budget.own_tile = own;
        p.add(random, 5, 0);
        p.add(random, 7, 3);  // rows 0..3 come before key 0
        p.add(random, 4, 4);
        const Sets sets = run(with_role(p, Role::kAnchor)).sets;
        const Result result = run(p, {}, &sets);
        for (size_t row = 0; row < 16; ++row) {
          const bool sees_keys = row >= 5 + 4;
          for (size_t h = 0; h < 6; ++h) {
            EXPECT_EQ(std::isfinite(result.lse[row * 6 + h]), sees_keys) << "row " << row;
            if (sees_keys) continue;
            EXPECT_EQ(result.lse[row * 6 + h], -kInfinity);
            for (size_t c = 0; c < 24; ++c) EXPECT_EQ(result.out[(row * 6 + h) * 24 + c], 0) << "row " << row;
          }
        }
      }
    }
  }
}

TEST_P(AttentionProperty, EmptySetsLeaveTheOwnKeys) {
  Random random(46);
  Problem p = problem(Role::kReuse);
  p.add(random, 1, 33);   // position 32 starts a tile: one key
  p.add(random, 10, 42);  // positions 32..41: own keys from 32 on
  const Sets none = empty_sets(p);
  const Result result = run(p, {}, &none);
  Problem own = problem(Role::kDense);
  for (const auto& s : p.sequences) {
    SequenceData tail = s;
    tail.kv_len -= 32;
    tail.k.erase(tail.k.begin(), tail.k.begin() + 32 * 2 * 24);
    tail.v.erase(tail.v.begin(), tail.v.begin() + 32 * 2 * 24);
    own.sequences.push_back(tail);
  }
  expect_near(result, run(own));
  // A one-row tile whose own key is a candidate sees nothing without a set.
  Problem step = problem(Role::kReuse, TileRule::kStep);
  step.budget = kernel_decode_budget();
  step.add(random, 2, 33);
  const Sets no_keys = empty_sets(step);
  const Result nothing = run(step, {}, &no_keys);
  for (const float x : nothing.out) EXPECT_EQ(x, 0);
  for (const float x : nothing.lse) EXPECT_EQ(x, -kInfinity);
}

TEST_P(AttentionProperty, DecodeRowsEqualOneByOneAtFullBudget) {
  Random random(47);
  for (const Role role : {Role::kDense, Role::kAnchor}) {
    for (const OwnTile own : {OwnTile::kOnTop, OwnTile::kCandidate}) {
      for (int64_t rows = 2; rows <= 8; ++rows) {
        Problem together = problem(role, TileRule::kStep);
        together.budget = Budget{.percent_hundredths = 0, .floor = 1000, .own_tile = own, .tile = 1};
        const SequenceData data = together.add(random, rows, 60);
        const Result all = run(together);
        for (int64_t r = 0; r < rows; ++r) {
          Problem alone = together;
          SequenceData& s = alone.sequences[0];
          s.q_len = 1;
          s.kv_len = 60 - rows + r + 1;
          s.q = rows_of(data.q, r, r + 1, 6 * 24);
          s.k.resize(static_cast<size_t>(s.kv_len) * 2 * 24);
          s.v.resize(s.k.size());
          const Result one = run(alone);
          EXPECT_LE(max_difference(one.out, rows_of(all.out, r, r + 1, 6 * 24)), allowed().out)
              << rows << " rows";
          EXPECT_LE(max_difference(one.lse, rows_of(all.lse, r, r + 1, 6)), allowed().lse) << rows << " rows";
        }
      }
    }
  }
}

TEST_P(AttentionProperty, DecodeRowsAreOneTileUnlessTheirOwnKeyIsACandidate) {
  Random random(48);
  Problem p = problem(Role::kAnchor, TileRule::kStep);
  p.add(random, 3, 80);
  const Result on_top = run(p);
  ASSERT_EQ(on_top.sets.members.size(), 2u);
  EXPECT_EQ(on_top.sets.of(0, 0, 0).back(), 76) << "the step's own rows, 77 to 79, are on top; 76 is recent";
  p.budget = Budget{.percent_hundredths = 0, .floor = 6, .own_tile = OwnTile::kCandidate, .tile = 1};
  const Result each = run(p);
  ASSERT_EQ(each.sets.members.size(), 6u);
  for (const auto& members : each.sets.members) EXPECT_EQ(members.size(), 6u);
}

TEST_P(AttentionProperty, OwnKeyIsSelectedByWeightInPublishedDecode) {
  // The own key of one sequence matches its query, that of the other opposes it.
  Random random(49);
  Problem p = problem(Role::kAnchor, TileRule::kStep);
  p.query_heads = p.kv_heads = 1;
  p.budget = Budget{.percent_hundredths = 0, .floor = 5, .own_tile = OwnTile::kCharged, .tile = 1};
  for (const float sign : {1.0f, -1.0f}) {
    SequenceData& s = p.add(random, 1, 50);
    for (size_t c = 0; c < 24; ++c) s.k[49 * 24 + c] = round_to_dtype(sign * s.q[c], p.kv_dtype);
  }
  const Result result = run(p);
  EXPECT_EQ(result.sets.of(0, 0, 0).back(), 49);
  EXPECT_LT(result.sets.of(1, 0, 0).back(), 49);
}

TEST_P(AttentionProperty, LogSumExpMergesTwoHalves) {
  Random random(50);
  Problem p = problem(Role::kReuse, TileRule::kStep);
  p.budget = kernel_decode_budget();  // no own keys: the sets alone are attended
  p.add(random, 1, 64);
  Sets whole = empty_sets(p), first = whole, second = whole;
  for (size_t g = 0; g < 2; ++g)
    for (int32_t j = static_cast<int32_t>(g); j < 64; j += 2) {
      whole.members[g].push_back(j);
      (j < 20 ? first : second).members[g].push_back(j);
    }
  const Result all = run(p, {}, &whole), a = run(p, {}, &first), b = run(p, {}, &second);
  for (size_t h = 0; h < 6; ++h) {
    const double wa = std::exp(static_cast<double>(a.lse[h])), wb = std::exp(static_cast<double>(b.lse[h]));
    EXPECT_NEAR(all.lse[h], std::log(wa + wb), allowed().lse);
    for (size_t c = 0; c < 24; ++c)
      EXPECT_NEAR(all.out[h * 24 + c], (wa * a.out[h * 24 + c] + wb * b.out[h * 24 + c]) / (wa + wb),
                  allowed().out);
  }
}

TEST_P(AttentionProperty, LogSumExpOfEqualScoresIsTheLogOfTheCount) {
  Random random(51);
  Problem p = problem(Role::kDense);
  SequenceData& s = p.add(random, 50, 50);
  std::fill(s.q.begin(), s.q.end(), 0.0f);
  const Result result = run(p);
  for (size_t row = 0; row < 50; ++row)
    EXPECT_NEAR(result.lse[row * 6], std::log(static_cast<double>(row + 1)), allowed().lse)
        << "natural logarithm";
}

TEST_P(AttentionProperty, ScoresBeyond65504) {
  // Integers that every kernel multiplies exactly: scores reach 4096 * 8 * 24 / sqrt(24), and neighbours
  // differ by 800.
  Random random(52);
  for (const Role role : {Role::kDense, Role::kAnchor}) {
    Problem p = problem(role);
    p.budget = Budget{.percent_hundredths = 0, .floor = 3};
    SequenceData& s = p.add(random, 20, 60);
    for (float& x : s.q) x = 4096;
    for (size_t j = 0; j < 60; ++j)
      for (size_t i = 0; i < 2 * 24; ++i) s.k[j * 2 * 24 + i] = static_cast<float>((j * 7) % 17) - 8;
    const Result result = run(p), expected = kascade::run(p, reference());
    EXPECT_LE(max_difference(result.out, expected.out), allowed().out);
    for (size_t i = 0; i < result.lse.size(); ++i) {
      EXPECT_TRUE(std::isfinite(result.lse[i]));
      EXPECT_NEAR(result.lse[i], expected.lse[i], 1e-6 * std::abs(expected.lse[i]) + allowed().lse);
    }
    EXPECT_GT(*std::max_element(result.lse.begin(), result.lse.end()), 65504);
  }
}

TEST_P(AttentionProperty, EqualWeightsGoToTheSmallerPositions) {
  // All scores are 0, so every candidate has the same weight.
  Random random(53);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    Problem p = problem(Role::kAnchor, rule);
    p.budget = Budget{.percent_hundredths = 0, .floor = 9};
    SequenceData& s = p.add(random, rule == TileRule::kStep ? 1 : 3, 80);
    std::fill(s.q.begin(), s.q.end(), 0.0f);
    for (const auto& members : run(p).sets.members) EXPECT_EQ(members, first_keys(9));
  }
}

TEST_P(AttentionProperty, NanKeysRankLast) {
  // The softmax of a row with a NaN score is NaN or ignores the key; either way the set is whole and without
  // it.
  Random random(54);
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    Problem p = problem(Role::kLayer0, rule);
    p.budget = Budget{.percent_hundredths = 0, .floor = 5};
    SequenceData& s = p.add(random, 1, 65);
    s.k[20 * 2 * 24] = std::numeric_limits<float>::quiet_NaN();
    const auto members = run(p).sets.of(0, 0, 0);
    EXPECT_EQ(members.size(), 5u);
    EXPECT_FALSE(std::binary_search(members.begin(), members.end(), 20));
  }
}

TEST_P(AttentionProperty, EmptyCalls) {
  Random random(55);
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse}) {
    for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
      Problem p = problem(role, rule);
      Sets sets = empty_sets(p);
      EXPECT_TRUE(run(p, {}, &sets).out.empty()) << "no sequences";
      p.add(random, 0, 0);
      p.add(random, 0, 30);  // wholly cached
      sets = empty_sets(p);
      EXPECT_TRUE(sets.members.empty()) << "sequences without rows own no sets";
      EXPECT_TRUE(run(p, {}, &sets).out.empty()) << "no rows";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionProperty, testing::ValuesIn(kernel_cases()), case_name);

}  // namespace
}  // namespace kascade
