// SPDX-License-Identifier: Apache-2.0
// The reference kernel against the definition written out once more, from the logical arrays alone: no
// addresses, no helpers of params.h. The edge cases of docs/method.md sit here too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/attention_test_case.h"

namespace kascade {
namespace {

/// One tile as the method states it: rows of the sequence, and where candidates end.
struct ExpectedTile {
  std::vector<int64_t> rows;
  int64_t start = 0, candidates = 0;
};

std::vector<ExpectedTile> expected_tiles(const Problem& problem, const SequenceData& s) {
  std::vector<ExpectedTile> tiles;
  const int64_t before = s.kv_len - s.q_len;
  const bool own = problem.budget.own_tile == OwnTile::kCandidate ||
                   (problem.tile_rule == TileRule::kStep && problem.budget.own_tile == OwnTile::kCharged);
  for (int64_t r = 0; r < s.q_len; ++r) {
    const int64_t position = before + r;
    int64_t start = position / problem.tile * problem.tile;
    if (problem.tile_rule == TileRule::kStep) start = own ? position : before;
    if (tiles.empty() || tiles.back().start != start)
      tiles.push_back({{}, start, own ? position + 1 : start});
    tiles.back().rows.push_back(r);
  }
  return tiles;
}

/// exp(score) of one row, head and key, unnormalised.
double weight(const Problem& problem, const SequenceData& s, int64_t row, int64_t h, int64_t j) {
  const int64_t d = problem.head_dim, g = h / (problem.query_heads / problem.kv_heads);
  double dot = 0;
  for (int64_t c = 0; c < d; ++c)
    dot += static_cast<double>(s.q[static_cast<size_t>((row * problem.query_heads + h) * d + c)]) *
           s.k[static_cast<size_t>((j * problem.kv_heads + g) * d + c)];
  const double scale =
      problem.softmax_scale != 0 ? problem.softmax_scale : 1 / std::sqrt(static_cast<double>(d));
  return std::exp(dot * scale * problem.k_scale);
}

int64_t owner_of(const Problem& problem, int64_t h) {
  if (problem.set_owner == SetOwner::kAllHeads) return 0;
  return problem.set_owner == SetOwner::kQueryHead ? h : h / (problem.query_heads / problem.kv_heads);
}

/// Pooled weights of the candidates, and the mass on the own keys behind them.
std::vector<double> expected_pooled(const Problem& problem, const SequenceData& s, const ExpectedTile& tile,
                                    int64_t set, double* own_mass) {
  std::vector<double> pooled(static_cast<size_t>(tile.candidates));
  *own_mass = 0;
  for (int64_t h = 0; h < problem.query_heads; ++h) {
    if (owner_of(problem, h) != set) continue;
    for (const int64_t row : tile.rows) {
      std::vector<double> p;
      for (int64_t j = 0; j <= s.kv_len - s.q_len + row; ++j) p.push_back(weight(problem, s, row, h, j));
      const double total = std::accumulate(p.begin(), p.end(), 0.0);
      for (size_t j = 0; j < p.size(); ++j) (j < pooled.size() ? pooled[j] : *own_mass) += p[j] / total;
    }
  }
  return pooled;
}

std::vector<int32_t> expected_members(const Problem& problem, const SequenceData& s, const ExpectedTile& tile,
                                      const std::vector<double>& pooled) {
  const int64_t length = s.budget_len >= 0 ? s.budget_len : s.kv_len;
  const SetBudget budget = evaluate_budget(problem.budget, tile.candidates, tile.start, length,
                                           problem.tile_rule == TileRule::kAligned ? length : 1);
  std::vector<int32_t> ranked(static_cast<size_t>(budget.recent_begin - budget.sinks));
  std::iota(ranked.begin(), ranked.end(), static_cast<int32_t>(budget.sinks));
  std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) {
    return static_cast<float>(pooled[static_cast<size_t>(a)]) >
           static_cast<float>(pooled[static_cast<size_t>(b)]);
  });
  ranked.resize(static_cast<size_t>(budget.ranked));
  for (int64_t j = 0; j < budget.sinks; ++j) ranked.push_back(static_cast<int32_t>(j));
  for (int64_t j = budget.recent_begin; j < budget.candidates; ++j) ranked.push_back(static_cast<int32_t>(j));
  std::sort(ranked.begin(), ranked.end());
  return ranked;
}

/// Output (and log-sum-exp at the end) of one row and head over the keys given.
std::vector<double> expected_output(const Problem& problem, const SequenceData& s, int64_t row, int64_t h,
                                    const std::vector<int32_t>& keys) {
  const int64_t d = problem.head_dim, g = h / (problem.query_heads / problem.kv_heads);
  std::vector<double> out(static_cast<size_t>(d + 1));
  double total = 0;
  for (const int32_t j : keys) {
    const double w = weight(problem, s, row, h, j);
    total += w;
    for (int64_t c = 0; c < d; ++c)
      out[static_cast<size_t>(c)] +=
          w * problem.v_scale * s.v[static_cast<size_t>((j * problem.kv_heads + g) * d + c)];
  }
  for (int64_t c = 0; c < d; ++c) out[static_cast<size_t>(c)] /= total;
  out.back() = std::log(total);
  return out;
}

/// Runs the reference, then holds every by-product, set, output and log-sum-exp against the above.
void expect_as_defined(const Problem& problem) {
  Layout layout;
  layout.by_products = true;
  const Result result = run(problem, reference(), layout);
  const Sets shape = empty_sets(problem);
  int64_t first_row = 0;
  for (size_t b = 0; b < problem.sequences.size(); ++b) {
    const SequenceData& s = problem.sequences[b];
    const auto tiles = expected_tiles(problem, s);
    ASSERT_EQ(static_cast<int64_t>(tiles.size()), shape.tile_begin[b + 1] - shape.tile_begin[b])
        << "sequence " << b;
    for (size_t t = 0; t < tiles.size(); ++t) {
      for (int64_t h = 0; h < problem.query_heads; ++h) {
        const auto set = static_cast<int32_t>(owner_of(problem, h));
        const auto index = static_cast<size_t>(shape.tile_begin[b] + static_cast<int64_t>(t)) *
                               static_cast<size_t>(shape.per_tile) +
                           static_cast<size_t>(set);
        SCOPED_TRACE(testing::Message() << "sequence " << b << " tile " << t << " head " << h);
        double own_mass = 0;
        const auto pooled = expected_pooled(problem, s, tiles[t], set, &own_mass);
        ASSERT_EQ(pooled.size(), result.pooled[index].size());
        for (size_t j = 0; j < pooled.size(); ++j)
          ASSERT_NEAR(result.pooled[index][j], pooled[j], 1e-6 * (1 + pooled[j])) << "key " << j;
        ASSERT_NEAR(result.own_mass[index], own_mass, 1e-5);
        const auto members = expected_members(problem, s, tiles[t], pooled);
        ASSERT_EQ(result.sets.of(static_cast<int64_t>(b), static_cast<int64_t>(t), set), members);
        for (const int64_t row : tiles[t].rows) {
          const int64_t position = s.kv_len - s.q_len + row;
          std::vector<int32_t> keys;
          if (problem.role == Role::kAnchor) keys = members;
          const auto dense_begin = problem.role == Role::kAnchor ? tiles[t].candidates : 0;
          for (int64_t j = dense_begin; j <= position; ++j) keys.push_back(static_cast<int32_t>(j));
          const auto expected = expected_output(problem, s, row, h, keys);
          const auto at = static_cast<size_t>((first_row + row) * problem.query_heads + h);
          for (size_t c = 0; c < static_cast<size_t>(problem.head_dim); ++c)
            ASSERT_NEAR(result.out[at * static_cast<size_t>(problem.head_dim) + c], expected[c], 1e-6)
                << "row " << row;
          ASSERT_NEAR(result.lse[at], expected.back(), 1e-6) << "row " << row;
        }
      }
    }
    first_row += s.q_len;
  }
}

struct Defined {
  const char* name;
  TileRule rule;
  SetOwner owner;
  int32_t tile;
  Budget budget;
};

void PrintTo(const Defined& defined, std::ostream* out) { *out << defined.name; }

class ReferenceTest : public testing::TestWithParam<Defined> {};

TEST_P(ReferenceTest, IsAsDefined) {
  const Defined& c = GetParam();
  for (const Role role : {Role::kAnchor, Role::kLayer0}) {
    Random random(20);
    Problem problem;
    problem.role = role;
    problem.tile_rule = c.rule;
    problem.set_owner = c.owner;
    problem.tile = c.tile;
    problem.budget = c.budget;
    problem.query_heads = 6;
    problem.kv_heads = 2;
    problem.head_dim = 8;
    const bool step = c.rule == TileRule::kStep;
    problem.add(random, step ? 1 : 75, 75);
    problem.add(random, 0, 20);
    problem.add(random, step ? 3 : 40, 90);
    problem.add(random, step ? 2 : 5, 67).budget_len = 300;
    expect_as_defined(problem);
  }
}

constexpr Budget kForced{.percent_hundredths = 1200, .round_up = true, .floor = 3, .sinks = 2, .recent = 5};
constexpr Budget kForcedCharged{
    .percent_hundredths = 2000, .floor = 9, .sinks = 1, .recent = 4, .forced_charged = true};
constexpr Budget kFixed{.percent_hundredths = 1000, .floor = 3, .round_to = 4, .rolling = false};
constexpr Budget kCharged{.percent_hundredths = 3000,
                          .floor = 12,
                          .own_tile = OwnTile::kCharged,
                          .tile = 8,
                          .rolling_min_rows = 70,
                          .rolling_capped = true};
constexpr Budget kOracle{
    .percent_hundredths = 1000, .floor = 5, .own_tile = OwnTile::kCandidate, .tile = 1, .rolling = false};
constexpr Budget kOracleRolling{.percent_hundredths = 2500,
                                .floor = 2,
                                .sinks = 1,
                                .recent = 2,
                                .own_tile = OwnTile::kCandidate,
                                .tile = 1};

INSTANTIATE_TEST_SUITE_P(
    Calls, ReferenceTest,
    testing::Values(Defined{"forced", TileRule::kAligned, SetOwner::kKvHead, 16, kForced},
                    Defined{"forced_charged", TileRule::kAligned, SetOwner::kKvHead, 32, kForcedCharged},
                    Defined{"fixed", TileRule::kAligned, SetOwner::kKvHead, 7, kFixed},
                    Defined{"charged", TileRule::kAligned, SetOwner::kKvHead, 8, kCharged},
                    Defined{"all_heads", TileRule::kAligned, SetOwner::kAllHeads, 16, kForced},
                    Defined{"query_head", TileRule::kAligned, SetOwner::kQueryHead, 16, kForced},
                    Defined{"oracle", TileRule::kAligned, SetOwner::kQueryHead, 1, kOracle},
                    Defined{"oracle_rolling", TileRule::kAligned, SetOwner::kKvHead, 1, kOracleRolling},
                    Defined{"one_row_tiles", TileRule::kAligned, SetOwner::kKvHead, 1, kForced},
                    Defined{"step", TileRule::kStep, SetOwner::kKvHead, 32, kForced},
                    Defined{"step_all_heads", TileRule::kStep, SetOwner::kAllHeads, 32, kForcedCharged},
                    Defined{"step_charged", TileRule::kStep, SetOwner::kKvHead, 32, kCharged},
                    Defined{"step_oracle", TileRule::kStep, SetOwner::kQueryHead, 32, kOracle},
                    Defined{"step_oracle_rolling", TileRule::kStep, SetOwner::kKvHead, 32, kOracleRolling}),
    [](const auto& parameter) { return parameter.param.name; });

TEST(ReferenceExampleTest, PostSoftmaxPooling) {
  // Two rows, three keys before the tile, logits (4, 3, 0) and (-6, 1, 2): pooled weights .722, .534, .744
  // choose key 2. The tile's own keys get logits so low that they take nothing.
  Problem problem;
  problem.role = Role::kAnchor;
  problem.tile_rule = TileRule::kStep;
  problem.budget = Budget{.percent_hundredths = 0, .floor = 1};
  problem.query_heads = 1;
  problem.head_dim = 8;
  problem.softmax_scale = 1;
  SequenceData s;
  s.q_len = 2;
  s.kv_len = 5;
  s.q.assign(16, 0);
  s.k.assign(40, 0);
  s.v.assign(40, 0);
  const std::vector<float> first{4, 3, 0}, second{-6, 1, 2};
  s.q[0] = 1;      // row 0 reads component 0 of the keys
  s.q[8 + 1] = 1;  // row 1 reads component 1
  for (size_t j = 0; j < 5; ++j) {
    s.k[j * 8] = j < 3 ? first[j] : -100;
    s.k[j * 8 + 1] = j < 3 ? second[j] : -100;
  }
  problem.sequences.push_back(s);
  const Result result = run(problem, reference(), {.by_products = true});
  ASSERT_EQ(result.pooled.size(), 1u);
  EXPECT_NEAR(result.pooled[0][0], .722, 5e-4);
  EXPECT_NEAR(result.pooled[0][1], .534, 5e-4);
  EXPECT_NEAR(result.pooled[0][2], .744, 5e-4);
  EXPECT_EQ(result.sets.members[0], std::vector<int32_t>{2});
}

TEST(ReferenceExampleTest, ScalesMultiplyKeysAndValues) {
  Random random(21);
  Problem problem;
  problem.add(random, 9, 30);
  Problem scaled = problem;
  scaled.k_scale = 4;
  scaled.v_scale = 0.5f;
  for (float& x : scaled.sequences[0].k) x /= 4;
  for (float& x : scaled.sequences[0].v) x *= 2;
  const Result a = run(problem, reference()), b = run(scaled, reference());
  EXPECT_EQ(first_difference(a.out, b.out), -1);
  EXPECT_EQ(first_difference(a.lse, b.lse), -1);
}

}  // namespace
}  // namespace kascade
