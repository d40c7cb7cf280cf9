// SPDX-License-Identifier: Apache-2.0
// Every kernel against the reference on random calls.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "attention/attention_test_case.h"

namespace kascade {
namespace {

constexpr int kCases = kThorough ? 150 : 40;

/// Weights this small may be zero in a kernel: the exponential of a score 69 below the largest.
constexpr float kUnderflow = 1e-30f;

Budget random_budget(Random& random, TileRule rule, int32_t* tile) {
  const auto percent = static_cast<int32_t>(random.of<int64_t>({500, 1000, 3333}));
  const bool step = rule == TileRule::kStep;
  switch (random.in(0, 7)) {
    case 0:
      return default_budget(percent);
    case 1:
      return paper_budget(percent, *tile, random.one_in(2));
    case 2:
      return step ? kernel_decode_budget(percent) : kernel_budget(percent, *tile);
    case 3:  // nothing is ranked, perhaps nothing selected at all
      return {.percent_hundredths = 0, .floor = 0, .sinks = static_cast<int32_t>(random.in(0, 3))};
    case 4:  // one-row tiles whose own key is a candidate, as the oracle policies have
      *tile = 1;
      return {.percent_hundredths = percent,
              .floor = 5,
              .own_tile = OwnTile::kCandidate,
              .tile = 1,
              .rolling = false};
    case 5:
      return {.percent_hundredths = 10000};
    default: {
      Budget budget{.percent_hundredths = percent, .round_up = random.one_in(2)};
      budget.floor = static_cast<int32_t>(random.in(1, 20));
      budget.round_to = static_cast<int32_t>(random.of<int64_t>({1, 1, 8}));
      budget.sinks = static_cast<int32_t>(random.in(0, 4));
      budget.recent = static_cast<int32_t>(random.of<int64_t>({0, 1, 9}));
      budget.forced_charged = random.one_in(2);
      budget.own_tile = random.one_in(3) ? OwnTile::kCharged : OwnTile::kOnTop;
      budget.tile = *tile;
      budget.rolling = random.one_in(2);
      return budget;
    }
  }
}

Problem random_problem(Random& random, DType kv_dtype, bool fine) {
  Problem p;
  p.kv_dtype = kv_dtype;
  p.q_dtype = random.of<DType>({DType::kF32, DType::kF32, DType::kF16, DType::kBF16});
  p.out_dtype = random.of<DType>({DType::kF32, DType::kF32, DType::kF16, DType::kBF16});
  p.role = random.of<Role>({Role::kDense, Role::kLayer0, Role::kAnchor, Role::kAnchor, Role::kReuse});
  p.tile_rule = random.one_in(2) ? TileRule::kStep : TileRule::kAligned;
  p.set_owner =
      random.of<SetOwner>({SetOwner::kKvHead, SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead});
  p.tile = static_cast<int32_t>(random.of<int64_t>({1, 2, 7, 16, 32, 32, 33, 64, 128}));
  const auto group = static_cast<int32_t>(random.of<int64_t>({1, 2, 3, 4, 5, 6, 7, 8, 12, 16}));
  p.kv_heads = static_cast<int32_t>(random.in(1, group > 6 ? 2 : 4));
  p.query_heads = group * p.kv_heads;
  p.head_dim = static_cast<int32_t>(random.of<int64_t>({8, 16, 24, 64, 80, 96, 128, 256}));
  p.budget = random_budget(random, p.tile_rule, &p.tile);
  if (random.one_in(3)) p.softmax_scale = 0.7f / std::sqrt(static_cast<float>(p.head_dim));
  if (random.one_in(4)) p.k_scale = 0.75f;
  if (random.one_in(4)) p.v_scale = 0.5f;
  if (random.one_in(2))
    for (int32_t g = 0; g < p.kv_heads; ++g)
      p.head_map.push_back(static_cast<int32_t>(random.in(0, p.kv_heads - 1)));
  if (random.one_in(3))
    for (int32_t g = 0; g < p.kv_heads; ++g) p.needed.push_back(random.one_in(2));
  // Work of the reference in score elements; keeps a case well below a second.
  int64_t affordable = 25'000'000;
  const int64_t sequences = random.in(1, 4);
  const int64_t t = p.tile;
  for (int64_t b = 0; b < sequences; ++b) {
    int64_t rows = random.of<int64_t>({0, 1, t - 1, t, t + 1, 2 * t + 3, 15, 16, 17, 63, 65, 300});
    int64_t cached = random.of<int64_t>({0, 0, 1, t - 1, t, t + 1, 16, 17, 127, 129, 260, 900});
    if (p.tile_rule == TileRule::kStep) {
      rows = random.of<int64_t>({0, 1, 1, 1, 2, 3, 8});
      cached = random.of<int64_t>({0, 1, 15, 16, 17, 127, 128, 129, 300, 511, 512, 1100, 2050});
    }
    const int64_t cost = rows * (cached + rows) * p.query_heads * p.head_dim;
    if (cost > affordable) {
      rows = std::min<int64_t>(rows, 3);
      cached = std::min<int64_t>(cached, 260);
    }
    affordable -= rows * (cached + rows) * p.query_heads * p.head_dim;
    int64_t keys = rows + cached;
    if (random.one_in(12)) keys = std::max<int64_t>(rows - 2, 0);
    const float peak = random.of<float>({0.2f, 1.5f, 4.0f});
    SequenceData& s = p.add(random, rows, keys, fine ? std::min(peak, 1.5f) : peak, fine);
    if (random.one_in(4)) s.budget_len = keys + random.in(0, 200);
  }
  return p;
}

std::string describe(const Problem& p) {
  std::string text = fmt::format(
      "role {} rule {} owner {} T {} H {} G {} D {} q {} out {} kv {} budget pct {} floor {} sinks {} recent "
      "{} own {} "
      "rolling {}; sequences",
      static_cast<int>(p.role), static_cast<int>(p.tile_rule), static_cast<int>(p.set_owner), p.tile,
      p.query_heads, p.kv_heads, p.head_dim, dtype_name(p.q_dtype), dtype_name(p.out_dtype),
      dtype_name(p.kv_dtype), p.budget.percent_hundredths, p.budget.floor, p.budget.sinks, p.budget.recent,
      static_cast<int>(p.budget.own_tile), p.budget.rolling);
  for (const SequenceData& s : p.sequences) text += fmt::format(" {}/{}/{}", s.q_len, s.kv_len, s.budget_len);
  return text;
}

/// Any subsets of the candidates, empty ones among them.
Sets random_sets(const Problem& problem, Random& random) {
  Sets sets = empty_sets(problem);
  AttentionParams params = problem_params(problem);
  const bool own = own_key_is_candidate(params);
  for (size_t b = 0; b < problem.sequences.size(); ++b) {
    const SequenceData& s = problem.sequences[b];
    const int64_t before = std::max<int64_t>(s.kv_len - s.q_len, 0);
    for (int64_t t = sets.tile_begin[b]; t < sets.tile_begin[b + 1]; ++t) {
      const int64_t i = t - sets.tile_begin[b];
      int64_t candidates = before;
      if (problem.tile_rule == TileRule::kAligned) {
        candidates = (before / problem.tile + i) * problem.tile + (own ? 1 : 0);
      } else if (own) {
        candidates = s.kv_len - s.q_len + i + 1;
      }
      for (int32_t set = 0; set < sets.per_tile; ++set) {
        const int64_t one_in = random.of<int64_t>({1, 2, 10, 1000});
        auto& members = sets.members[static_cast<size_t>(t * sets.per_tile + set)];
        for (int64_t j = 0; j < candidates; ++j)
          if (random.one_in(one_in)) members.push_back(static_cast<int32_t>(j));
      }
    }
  }
  return sets;
}

/// Sets may differ where weights are as good as equal, and lose no mass by it.
void expect_sets_alike(const Result& actual, const Result& expected, float tolerance) {
  ASSERT_EQ(actual.sets.members.size(), expected.sets.members.size());
  for (size_t i = 0; i < actual.sets.members.size(); ++i) {
    const auto &a = actual.sets.members[i], &e = expected.sets.members[i];
    ASSERT_EQ(a.size(), e.size()) << "members of set " << i;
    if (a == e) continue;
    const auto& weights = expected.pooled[i];
    const auto weight = [&](int32_t j) { return weights[static_cast<size_t>(j)]; };
    const auto lighter = [&](int32_t x, int32_t y) { return weight(x) < weight(y); };
    std::vector<int32_t> extra, missing;
    std::set_difference(a.begin(), a.end(), e.begin(), e.end(), std::back_inserter(extra));
    std::set_difference(e.begin(), e.end(), a.begin(), a.end(), std::back_inserter(missing));
    const float taken = weight(*std::min_element(extra.begin(), extra.end(), lighter));
    const float left = weight(*std::max_element(missing.begin(), missing.end(), lighter));
    ASSERT_GE(taken, left * (1 - tolerance) - kUnderflow)
        << "set " << i << " holds key " << extra.front() << " instead of " << missing.front();
    double mass = 0, best = 0;
    for (const int32_t j : a) mass += weight(j);
    for (const int32_t j : e) best += weight(j);
    ASSERT_GE(mass, 0.9999 * best) << "captured mass of set " << i;
  }
}

void expect_weights_near(const Result& actual, const Result& expected, const Problem& problem,
                         float tolerance) {
  for (size_t i = 0; i < expected.pooled.size(); ++i) {
    // By-products of sets that nobody reads are nobody's business.
    if (problem.role == Role::kLayer0 && !problem.needed.empty() && expected.sets.members[i].empty())
      continue;
    for (size_t j = 0; j < expected.pooled[i].size(); ++j)
      ASSERT_NEAR(actual.pooled[i][j], expected.pooled[i][j], tolerance * expected.pooled[i][j] + 1e-8f)
          << "pooled weight of set " << i << " key " << j;
    ASSERT_NEAR(actual.own_mass[i], expected.own_mass[i], tolerance * expected.own_mass[i] + 1e-6f)
        << "set " << i;
  }
}

void expect_rows_near(const Result& actual, const Result& expected, const Tolerance& allowed) {
  ASSERT_LE(max_difference(actual.out, expected.out), allowed.out) << "out";
  ASSERT_LE(max_difference(actual.lse, expected.lse), allowed.lse) << "lse";
}

class AttentionFuzz : public testing::TestWithParam<DType> {};

TEST_P(AttentionFuzz, KernelsAgreeWithTheReference) {
  for (int i = 0; i < kCases; ++i) {
    Random random(7000 + static_cast<uint64_t>(i) * 3 + static_cast<uint64_t>(GetParam()));
    const bool fine = random.one_in(3);
    const Problem problem = random_problem(random, GetParam(), fine);
    Layout layout = random_layout(random);
    layout.by_products = true;
    const int threads = static_cast<int>(random.in(1, 3));
    SCOPED_TRACE(fmt::format("case {}: {}", i, describe(problem)));
    const Sets given = problem.role == Role::kReuse ? random_sets(problem, random) : Sets{};
    const Result expected = run(problem, reference(), layout, 1, &given);
    for (const AttentionKernel* kernel : available_kernels()) {
      if (kernel == &reference() || !supports(*kernel, problem)) continue;
      SCOPED_TRACE(kernel->name);
      const Tolerance allowed = tolerance(*kernel, problem.kv_dtype, problem.out_dtype, fine);
      const Result actual = run(problem, *kernel, layout, threads, &given);
      if (HasFatalFailure() || HasNonfatalFailure()) return;
      if (problem.role == Role::kLayer0 || problem.role == Role::kAnchor) {
        expect_weights_near(actual, expected, problem, allowed.weight);
        expect_sets_alike(actual, expected, allowed.weight);
        if (HasFatalFailure()) return;
      }
      if (problem.role == Role::kAnchor) {
        // The reference over the sets that the kernel chose: a tie may have gone the other way.
        Problem reuse = problem;
        reuse.role = Role::kReuse;
        reuse.head_map.clear();
        expect_rows_near(actual, run(reuse, reference(), {}, 1, &actual.sets), allowed);
      } else {
        expect_rows_near(actual, expected, allowed);
      }
      if (HasFatalFailure()) return;
    }
  }
}

/// A fixed call that random ones would make too dear or too rarely.
void expect_agreement(const Problem& problem) {
  const Layout layout{.by_products = true};
  const Result expected = run(problem, reference(), layout);
  for (const AttentionKernel* kernel : available_kernels()) {
    if (kernel == &reference()) continue;
    SCOPED_TRACE(kernel->name);
    const Result actual = run(problem, *kernel, layout, 2);
    const Tolerance allowed = tolerance(*kernel, problem.kv_dtype);
    expect_weights_near(actual, expected, problem, allowed.weight);
    expect_sets_alike(actual, expected, allowed.weight);
    expect_rows_near(actual, expected, allowed);
  }
}

Problem tiles_of_many_rows(DType kv_dtype) {
  Problem p;
  p.role = Role::kLayer0;
  p.kv_dtype = kv_dtype;
  p.tile = 128;
  p.query_heads = 16;
  p.head_dim = 8;
  p.budget = Budget{.percent_hundredths = 1000, .floor = 5, .recent = 3};
  return p;
}

TEST_P(AttentionFuzz, TilesOf2048Rows) {
  Random random(90);
  Problem p = tiles_of_many_rows(GetParam());
  p.add(random, 200, 300);
  expect_agreement(p);
}

TEST(AttentionFuzzTest, TilesOf2048RowsOver8300Keys) {
  if (!kThorough) GTEST_SKIP() << "takes long";
  // 17 million probabilities in one tile: more than a kernel may want to keep.
  Random random(91);
  Problem p = tiles_of_many_rows(DType::kF32);
  p.add(random, 100, 8292);
  expect_agreement(p);
}

INSTANTIATE_TEST_SUITE_P(Keys, AttentionFuzz, testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                         [](const auto& parameter) { return std::string(dtype_name(parameter.param)); });

}  // namespace
}  // namespace kascade
