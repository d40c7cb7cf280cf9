// SPDX-License-Identifier: Apache-2.0
// Results that must agree in every bit: across thread counts, memory layouts, batch mates and chunkings.
#include <gtest/gtest.h>

#include <algorithm>

#include "attention/attention_test_case.h"

namespace kascade {
namespace {

class AttentionIdentity : public testing::TestWithParam<KernelCase> {
 protected:
  Problem problem(Role role, TileRule rule, SetOwner owner = SetOwner::kKvHead) const {
    Problem p;
    p.role = role;
    p.tile_rule = rule;
    p.set_owner = owner;
    p.kv_dtype = GetParam().kv_dtype;
    p.query_heads = 6;
    p.kv_heads = 2;
    p.head_dim = 16;
    p.tile = 16;
    p.budget = Budget{.percent_hundredths = 1500, .round_up = true, .floor = 8, .recent = 5};
    return p;
  }

  Problem mixed_batch(Role role, TileRule rule, SetOwner owner = SetOwner::kKvHead) const {
    Random random(60);
    Problem p = problem(role, rule, owner);
    const bool step = rule == TileRule::kStep;
    p.add(random, step ? 1 : 50, 50);
    p.add(random, 0, 33);
    // Long enough for a kernel to split the keys of one row among its workers.
    p.add(random, step ? 4 : 21, step ? 1600 : 700);
    p.add(random, 1, 1);
    p.add(random, step ? 2 : 65, 260);
    p.add(random, 3, 0);
    return p;
  }

  const AttentionKernel& kernel() const { return *GetParam().kernel; }
};

void expect_same(const Result& a, const Result& b, const std::string& what) {
  EXPECT_EQ(first_difference(a.out, b.out), -1) << "out, " << what;
  EXPECT_EQ(first_difference(a.lse, b.lse), -1) << "lse, " << what;
  EXPECT_EQ(a.sets, b.sets) << what;
  ASSERT_EQ(a.pooled.size(), b.pooled.size()) << what;
  for (size_t i = 0; i < a.pooled.size(); ++i)
    EXPECT_EQ(first_difference(a.pooled[i], b.pooled[i]), -1)
        << "pooled weights of set " << i << ", " << what;
  EXPECT_EQ(first_difference(a.own_mass, b.own_mass), -1) << what;
}

const Role kRoles[] = {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse};
const TileRule kRules[] = {TileRule::kAligned, TileRule::kStep};

TEST_P(AttentionIdentity, ThreadCountsAndRepetition) {
  for (const TileRule rule : kRules) {
    for (const Role role : kRoles) {
      for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads}) {
        const Problem p = mixed_batch(role, rule, owner);
        Problem anchor = p;
        anchor.role = Role::kAnchor;
        const Sets sets = run(anchor, kernel()).sets;
        const Layout layout{.by_products = true};
        const Result once = run(p, kernel(), layout, 1, &sets);
        expect_same(run(p, kernel(), layout, 1, &sets), once, "the same call again");
        expect_same(run(p, kernel(), layout, 2, &sets), once, "2 threads");
        expect_same(run(p, kernel(), layout, 5, &sets), once, "5 threads");
      }
    }
  }
}

TEST_P(AttentionIdentity, PageLayoutsAndStrides) {
  using Keys = Layout::Keys;
  for (const TileRule rule : kRules) {
    for (const Role role : kRoles) {
      const Problem p = mixed_batch(role, rule);
      Problem anchor = p;
      anchor.role = Role::kAnchor;
      const Sets sets = run(anchor, kernel()).sets;
      const Result packed = run(p, kernel(), {.by_products = true}, 1, &sets);
      for (const Layout& layout : {
               Layout{.keys = Keys::kPacked, .pad = 1, .head_major = true},
               Layout{.keys = Keys::kPagesTokenMajor, .page_size = 16, .seed = 2},
               Layout{.keys = Keys::kPagesTokenMajor, .page_size = 16, .seed = 3, .pad = 1},
               Layout{.keys = Keys::kPagesHeadMajor, .page_size = 16, .seed = 4},
               Layout{.keys = Keys::kPagesHeadMajor, .page_size = 1, .seed = 5, .pad = 2},
               Layout{.keys = Keys::kPagesTokenMajor, .page_size = 7, .seed = 6, .head_major = true},
               Layout{.keys = Keys::kPagesHeadMajor, .page_size = 1024, .seed = 7, .spare_capacity = 3},
               Layout{.keys = Keys::kPagesTokenMajor, .seed = 8, .maxima = Layout::Maxima::kExact},
               Layout{.keys = Keys::kPagesTokenMajor, .seed = 9, .maxima = Layout::Maxima::kSlack},
           }) {
        Layout with_by_products = layout;
        with_by_products.by_products = true;
        expect_same(run(p, kernel(), with_by_products, 1, &sets), packed,
                    "layout " + std::to_string(layout.seed));
      }
    }
  }
}

TEST_P(AttentionIdentity, BatchMates) {
  for (const TileRule rule : kRules) {
    for (const Role role : kRoles) {
      const Problem together = mixed_batch(role, rule);
      Problem anchor = together;
      anchor.role = Role::kAnchor;
      const Sets sets = run(anchor, kernel()).sets;
      const Result all = run(together, kernel(), {}, 2, &sets);
      int64_t row = 0;
      for (size_t b = 0; b < together.sequences.size(); ++b) {
        Problem alone = together;
        alone.sequences = {together.sequences[b]};
        const auto begin = sets.members.begin() + sets.tile_begin[b] * sets.per_tile,
                   end = sets.members.begin() + sets.tile_begin[b + 1] * sets.per_tile;
        Sets own;
        own.tile_begin = {0, sets.tile_begin[b + 1] - sets.tile_begin[b]};
        own.per_tile = sets.per_tile;
        own.members.assign(begin, end);
        const Result one = run(alone, kernel(), {}, 1, &own);
        const int64_t rows = together.sequences[b].q_len;
        EXPECT_EQ(first_difference(one.out, rows_of(all.out, row, row + rows, 6 * 16)), -1)
            << "sequence " << b;
        EXPECT_EQ(first_difference(one.lse, rows_of(all.lse, row, row + rows, 6)), -1) << "sequence " << b;
        if (role == Role::kLayer0 || role == Role::kAnchor) {
          EXPECT_EQ(one.sets.members, own.members) << "sequence " << b;
        }
        row += rows;
      }
    }
  }
}

/// Every few sequences of a batch: alone they give what they give together.
void expect_alone_as_together(const Problem& together, const AttentionKernel& kernel, size_t every) {
  const Result all = run(together, kernel, {}, 2);
  int64_t row = 0;
  for (size_t b = 0; b < together.sequences.size(); ++b) {
    const int64_t rows = together.sequences[b].q_len;
    if (b % every == 0 || b + 1 == together.sequences.size()) {
      Problem alone = together;
      alone.sequences = {together.sequences[b]};
      const Result one = run(alone, kernel);
      const int64_t width = together.query_heads * together.head_dim;
      EXPECT_EQ(first_difference(one.out, rows_of(all.out, row, row + rows, width)), -1) << "sequence " << b;
      for (int32_t g = 0; g < together.kv_heads; ++g)
        EXPECT_EQ(one.sets.of(0, 0, g), all.sets.of(static_cast<int64_t>(b), 0, g)) << "sequence " << b;
    }
    row += rows;
  }
}

TEST_P(AttentionIdentity, MoreSequencesThanAKernelTakesAtOnce) {
  for (const TileRule rule : kRules) {
    Random random(64);
    Problem p = problem(Role::kAnchor, rule);
    p.query_heads = 4;
    for (int64_t b = 0; b < 1100; ++b) p.add(random, 1, 9 - b % 7);
    expect_alone_as_together(p, kernel(), 300);
  }
}

TEST_P(AttentionIdentity, MoreScoresThanAKernelKeepsAtOnce) {
  // 18 million: 9 steps of 8 rows, 32 heads and about 8,200 keys.
  if (!kThorough || &kernel() == &reference()) GTEST_SKIP() << "takes long";
  Random random(65);
  Problem p = problem(Role::kAnchor, TileRule::kStep);
  p.query_heads = 32;
  p.head_dim = 8;
  for (int64_t b = 0; b < 9; ++b) p.add(random, 8, 8200 - b);
  expect_alone_as_together(p, kernel(), 4);
}

/// The first `kv_len` tokens of one sequence as a call with the rows from `begin` on.
Problem chunk_of(const Problem& whole, int64_t begin, int64_t kv_len) {
  Problem p = whole;
  SequenceData& s = p.sequences[0];
  s.q = rows_of(s.q, begin, kv_len, whole.query_heads * whole.head_dim);
  s.k.resize(static_cast<size_t>(kv_len * whole.kv_heads * whole.head_dim));
  s.v.resize(s.k.size());
  s.q_len = kv_len - begin;
  s.kv_len = kv_len;
  return p;
}

/// Runs a prompt in chunks that end at `ends`, with reuse sets that come from its own anchor calls.
Result run_in_chunks(const Problem& whole, const AttentionKernel& kernel, const std::vector<int64_t>& ends) {
  Result result;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    Problem chunk = chunk_of(whole, begin, end), anchor = chunk;
    anchor.role = Role::kAnchor;
    const Sets sets = run(anchor, kernel).sets;
    const Result part = run(chunk, kernel, {}, 1, &sets);
    result.out.insert(result.out.end(), part.out.begin(), part.out.end());
    result.lse.insert(result.lse.end(), part.lse.begin(), part.lse.end());
    result.sets.members.insert(result.sets.members.end(), sets.members.begin(), sets.members.end());
    begin = end;
  }
  return result;
}

TEST_P(AttentionIdentity, ChunksAtTileBoundaries) {
  const Budget rolling{.percent_hundredths = 1500, .round_up = true, .floor = 8, .recent = 5};
  for (const bool fixed : {false, true}) {
    for (const Role role : kRoles) {
      Random random(61);
      Problem p = problem(role, TileRule::kAligned);
      p.budget = fixed ? paper_budget(2000, 16) : rolling;
      p.budget.floor = 20;
      SequenceData& s = p.add(random, 275, 275);
      // A fixed budget goes by the whole prompt, which a chunk has to be told.
      if (fixed) s.budget_len = 275;
      const Result whole = run_in_chunks(p, kernel(), {275});
      for (const auto& ends : {std::vector<int64_t>{16, 275}, {160, 240, 275}, {64, 128, 256, 272, 275}}) {
        const Result chunks = run_in_chunks(p, kernel(), ends);
        EXPECT_EQ(first_difference(chunks.out, whole.out), -1) << ends.size() << " chunks";
        EXPECT_EQ(first_difference(chunks.lse, whole.lse), -1) << ends.size() << " chunks";
        EXPECT_EQ(chunks.sets.members, whole.sets.members) << ends.size() << " chunks";
      }
    }
  }
}

TEST_P(AttentionIdentity, PublishedRollingBudgetInChunks) {
  // Whether it rolls (over 128 rows) goes by the whole prompt, never by the chunk.
  Random random(62);
  Problem p = problem(Role::kAnchor, TileRule::kAligned);
  p.budget = paper_budget(6000, 16, true);
  p.add(random, 250, 250).budget_len = 250;
  const Result whole = run_in_chunks(p, kernel(), {250}), chunks = run_in_chunks(p, kernel(), {48, 96, 250});
  EXPECT_EQ(chunks.sets.members, whole.sets.members);
  EXPECT_EQ(first_difference(chunks.out, whole.out), -1);
}

TEST_P(AttentionIdentity, ChunksInsideATileStayValid) {
  // The tile's votes are split, so sets may differ; own keys in the cache are own keys still, and a whole
  // budget is dense.
  Random random(63);
  Problem p = problem(Role::kAnchor, TileRule::kAligned);
  p.add(random, 90, 90);
  for (const auto& ends : {std::vector<int64_t>{3, 90}, {20, 21, 47, 90}}) {
    const Result chunks = run_in_chunks(p, kernel(), ends);
    int64_t begin = 0;
    size_t at = 0;
    for (const int64_t end : ends) {
      for (int64_t tile = begin / 16; tile <= (end - 1) / 16; ++tile)
        for (int32_t g = 0; g < 2; ++g) {
          const auto& members = chunks.sets.members[at++];
          EXPECT_EQ(static_cast<int64_t>(members.size()),
                    evaluate_budget(p.budget, tile * 16, tile * 16, end, end).members());
          for (const int32_t j : members) EXPECT_LT(j, tile * 16) << "a key of the tile itself was selected";
        }
      begin = end;
    }
    ASSERT_EQ(at, chunks.sets.members.size());
    Problem full = p, dense = p;
    full.budget = Budget{.percent_hundredths = 0, .floor = 1000};
    dense.role = Role::kDense;
    const Tolerance allowed = tolerance(kernel(), p.kv_dtype);
    const Result sparse = run_in_chunks(full, kernel(), ends), plain = run_in_chunks(dense, kernel(), {90});
    EXPECT_LE(max_difference(sparse.out, plain.out), allowed.out);
    EXPECT_LE(max_difference(sparse.lse, plain.lse), allowed.lse);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionIdentity, testing::ValuesIn(kernel_cases()), case_name);

}  // namespace
}  // namespace kascade
