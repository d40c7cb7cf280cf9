// SPDX-License-Identifier: Apache-2.0
// Where calls read and write: offsets past 2^31 elements and 2^32 bytes, lengths above the stated maxima,
// sets from elsewhere. (Canaries and unreadable pages around every buffer are part of run().)
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "attention/attention_test_case.h"

namespace kascade {
namespace {

/// Address space of which only the touched pages become memory.
class Vast {
 public:
  explicit Vast(size_t bytes)
      : bytes_(bytes),
        map_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                  0)) {}
  ~Vast() {
    if (ok()) munmap(map_, bytes_);
  }
  Vast(const Vast&) = delete;
  Vast& operator=(const Vast&) = delete;
  bool ok() const { return map_ != MAP_FAILED; }
  char* data() const { return static_cast<char*>(map_); }

 private:
  size_t bytes_;
  void* map_;
};

constexpr int64_t kFar = int64_t{1} << 31;  // elements

class AttentionMemory : public testing::TestWithParam<KernelCase> {
 protected:
  Problem problem(Role role, TileRule rule = TileRule::kAligned) const {
    Problem p;
    p.role = role;
    p.tile_rule = rule;
    p.kv_dtype = GetParam().kv_dtype;
    p.query_heads = 4;
    p.kv_heads = 2;
    p.head_dim = 16;
    p.tile = 8;
    p.budget = Budget{.percent_hundredths = 1000, .floor = 3};
    return p;
  }

  const AttentionKernel& kernel() const { return *GetParam().kernel; }
};

Problem with_role(const Problem& problem, Role role) {
  Problem other = problem;
  other.role = role;
  return other;
}

/// Moves packed keys [tokens, heads, 16] to other strides.
void spread(const void*& base, int64_t& token_stride, int64_t& head_stride, int64_t tokens,
            size_t element_bytes, int64_t new_token_stride, int64_t new_head_stride, const Vast& vast) {
  const char* from = static_cast<const char*>(base);
  const auto bytes = static_cast<int64_t>(element_bytes);
  for (int64_t j = 0; j < tokens; ++j)
    for (int64_t g = 0; g < 2; ++g)
      std::memcpy(vast.data() + (j * new_token_stride + g * new_head_stride) * bytes,
                  from + (j * token_stride + g * head_stride) * bytes, 16 * element_bytes);
  base = vast.data();
  token_stride = new_token_stride;
  head_stride = new_head_stride;
}

TEST_P(AttentionMemory, KeysAndValuesFarApart) {
  struct Case {
    int64_t token_stride, head_stride;
  };
  constexpr int64_t kTokens = 20;
  for (const Case& c : {Case{kFar / 16 + 8, 16}, Case{16, kFar + 8}}) {
    const int64_t elements = (kTokens - 1) * c.token_stride + c.head_stride + 16;
    const size_t element_bytes = dtype_bytes(GetParam().kv_dtype);
    const Vast k(static_cast<size_t>(elements) * element_bytes),
        v(static_cast<size_t>(elements) * element_bytes);
    if (!k.ok() || !v.ok()) GTEST_SKIP() << "no address space";
    Random random(70);
    for (const Role role : {Role::kDense, Role::kAnchor, Role::kReuse}) {
      for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
        Problem p = problem(role, rule);
        p.add(random, rule == TileRule::kStep ? 1 : kTokens, kTokens);
        const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
        Layout layout;
        layout.before = [&](AttentionParams& params) {
          spread(params.k, params.k_token_stride, params.k_head_stride, kTokens, element_bytes,
                 c.token_stride, c.head_stride, k);
          spread(params.v, params.v_token_stride, params.v_head_stride, kTokens, element_bytes,
                 c.token_stride, c.head_stride, v);
        };
        EXPECT_EQ(
            first_difference(run(p, kernel(), layout, 1, &sets).out, run(p, kernel(), {}, 1, &sets).out), -1);
      }
    }
  }
}

TEST_P(AttentionMemory, PagesAndPageTablesFarApart) {
  const size_t element_bytes = dtype_bytes(GetParam().kv_dtype);
  constexpr int64_t kPageStride = kFar / 2 + 8, kTableStride = kFar + 3;
  const Vast k(static_cast<size_t>(4 * kPageStride) * element_bytes),
      table(static_cast<size_t>(kTableStride + 2) * sizeof(int32_t));
  if (!k.ok() || !table.ok()) GTEST_SKIP() << "no address space";
  Random random(71);
  for (const Role role : {Role::kDense, Role::kAnchor, Role::kReuse}) {
    Problem p = problem(role);
    p.add(random, 3, 16);
    p.add(random, 16, 16);
    const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
    Layout layout{.keys = Layout::Keys::kPagesTokenMajor, .page_size = 8};
    layout.before = [&](AttentionParams& params) {
      for (int64_t page = 0; page < 4; ++page)
        std::memcpy(k.data() + page * kPageStride * static_cast<int64_t>(element_bytes),
                    static_cast<const char*>(params.k) +
                        page * params.k_page_stride * static_cast<int64_t>(element_bytes),
                    static_cast<size_t>(8 * params.k_token_stride) * element_bytes);
      params.k = k.data();
      params.k_page_stride = kPageStride;
      auto* far = reinterpret_cast<int32_t*>(table.data());
      for (int64_t b = 0; b < 2; ++b)
        std::copy_n(params.page_table + b * params.page_table_stride, 2, far + b * kTableStride);
      params.page_table = far;
      params.page_table_stride = kTableStride;
    };
    EXPECT_EQ(first_difference(run(p, kernel(), layout, 1, &sets).out, run(p, kernel(), {}, 1, &sets).out),
              -1);
  }
}

TEST_P(AttentionMemory, RowsFarApart) {
  constexpr int64_t kRows = 20, kRowStride = kFar / 16 + 8;
  const Vast q(kRows * kRowStride * sizeof(float)), out(kRows * kRowStride * sizeof(float)),
      lse(kRows * kRowStride * sizeof(float));
  if (!q.ok() || !out.ok() || !lse.ok()) GTEST_SKIP() << "no address space";
  Random random(72);
  for (const Role role : {Role::kDense, Role::kAnchor, Role::kReuse}) {
    Problem p = problem(role);
    p.add(random, kRows, 25);
    const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
    Layout layout;
    AttentionParams near;
    layout.before = [&](AttentionParams& params) {
      near = params;
      params.q = q.data();
      params.out = out.data();
      params.lse = reinterpret_cast<float*>(lse.data());
      params.q_row_stride = params.out_row_stride = params.lse_row_stride = kRowStride;
      params.q_head_stride = params.out_head_stride = 16;
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t h = 0; h < 4; ++h)
          std::copy_n(static_cast<const float*>(near.q) + r * near.q_row_stride + h * near.q_head_stride, 16,
                      reinterpret_cast<float*>(q.data()) + r * kRowStride + h * 16);
    };
    layout.after = [&](AttentionParams& params) {
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t h = 0; h < 4; ++h)
          std::copy_n(reinterpret_cast<const float*>(out.data()) + r * kRowStride + h * 16, 16,
                      static_cast<float*>(near.out) + r * near.out_row_stride + h * near.out_head_stride);
        std::copy_n(reinterpret_cast<const float*>(lse.data()) + r * kRowStride, 4,
                    near.lse + r * near.lse_row_stride);
      }
      params = near;
    };
    const Result far = run(p, kernel(), layout, 1, &sets), expected = run(p, kernel(), {}, 1, &sets);
    EXPECT_EQ(first_difference(far.out, expected.out), -1);
    EXPECT_EQ(first_difference(far.lse, expected.lse), -1);
  }
}

TEST_P(AttentionMemory, SetsFarApart) {
  constexpr int32_t kFirstTile = 1 << 24, kCapacity = 80, kTiles = 4, kPooledStride = 100;
  constexpr auto kSets = static_cast<size_t>(kFirstTile + kTiles) * 2;
  const Vast positions(kSets * kCapacity * sizeof(int32_t)), counts(kSets * sizeof(int32_t)),
      pooled(kSets * kPooledStride * sizeof(float)), mass(kSets * sizeof(float));
  if (!positions.ok() || !counts.ok() || !pooled.ok() || !mass.ok()) GTEST_SKIP() << "no address space";
  Random random(73);
  for (const Role role : {Role::kLayer0, Role::kAnchor, Role::kReuse}) {
    Problem p = problem(role);
    p.add(random, 32, 32);
    const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
    Layout layout{.by_products = true};
    AttentionParams near;
    int32_t tile_offsets[2] = {kFirstTile, kFirstTile + kTiles};
    const auto far_positions = reinterpret_cast<int32_t*>(positions.data()),
               far_counts = reinterpret_cast<int32_t*>(counts.data());
    layout.before = [&](AttentionParams& params) {
      near = params;
      params.tile_offsets = tile_offsets;
      params.positions = far_positions;
      params.counts = far_counts;
      params.capacity = kCapacity;
      if (role != Role::kReuse) {
        params.pooled_weights = reinterpret_cast<float*>(pooled.data());
        params.pooled_head_stride = kPooledStride;
        params.pooled_tile_stride = 2 * kPooledStride;
        params.own_tile_mass = reinterpret_cast<float*>(mass.data());
        return;
      }
      for (int64_t set = 0; set < 2 * kTiles; ++set) {
        far_counts[2 * int64_t{kFirstTile} + set] = near.counts[set];
        std::copy_n(near.positions + set * near.capacity, near.counts[set],
                    far_positions + (2 * int64_t{kFirstTile} + set) * kCapacity);
      }
    };
    layout.after = [&](AttentionParams& params) {
      for (int64_t set = 0; role != Role::kReuse && set < 2 * kTiles; ++set) {
        const int64_t far = 2 * int64_t{kFirstTile} + set;
        near.counts[set] = far_counts[far];
        ASSERT_LE(far_counts[far], near.capacity);
        std::copy_n(far_positions + far * kCapacity, near.capacity, near.positions + set * near.capacity);
        for (int32_t m = far_counts[far]; m < kCapacity; ++m)
          ASSERT_EQ(far_positions[far * kCapacity + m], -1);
        near.own_tile_mass[set] = params.own_tile_mass[far];
        std::copy_n(
            params.pooled_weights + far * kPooledStride, set / 2 * 8,
            near.pooled_weights + set / 2 * near.pooled_tile_stride + set % 2 * near.pooled_head_stride);
      }
      params = near;
    };
    const Result far = run(p, kernel(), layout, 1, &sets),
                 expected = run(p, kernel(), {.by_products = true}, 1, &sets);
    EXPECT_EQ(first_difference(far.out, expected.out), -1);
    EXPECT_EQ(far.sets, expected.sets);
    for (size_t i = 0; i < expected.pooled.size(); ++i)
      EXPECT_EQ(first_difference(far.pooled[i], expected.pooled[i]), -1) << "set " << i;
    EXPECT_EQ(first_difference(far.own_mass, expected.own_mass), -1);
  }
}

TEST_P(AttentionMemory, LengthsAboveTheMaximaAreClampedAndReported) {
  const Role roles[] = {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse};
  for (const Role role : roles) {
    Random random(74);
    Problem p = problem(role);
    p.add(random, 5, 30);
    p.add(random, 6, 40);
    const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
    const auto clamped = [&](const AttentionKernel& on, const std::function<void(AttentionParams&)>& lower) {
      Layout layout{.keys = Layout::Keys::kPagesTokenMajor, .page_size = 8, .maxima = Layout::Maxima::kExact};
      layout.before = lower;
      return run(p, on, layout, 1, &sets);
    };
    const Tolerance allowed = tolerance(kernel(), p.kv_dtype);
    EXPECT_EQ(clamped(kernel(), [](AttentionParams&) {}).status, 0u);
    struct Case {
      uint32_t status;
      int32_t AttentionParams::*maximum;
      int32_t value;
    };
    for (const Case& c : {Case{kStatusQueryClamped, &AttentionParams::max_q_len, 5},
                          Case{kStatusQueryClamped, &AttentionParams::max_total_q, 8},
                          Case{kStatusKvClamped, &AttentionParams::max_kv_len, 32}}) {
      const auto lower = [&](AttentionParams& params) { params.*c.maximum = c.value; };
      const Result actual = clamped(kernel(), lower), expected = clamped(reference(), lower);
      EXPECT_EQ(actual.status, c.status) << "maximum " << c.value;
      // Rows past the maximum are not written: NaN bits on both sides.
      for (size_t i = 0; i < expected.out.size(); ++i) {
        if (std::isnan(expected.out[i])) {
          ASSERT_TRUE(std::isnan(actual.out[i])) << "element " << i;
        } else if (role != Role::kAnchor) {  // whose sets may differ in a tie
          ASSERT_NEAR(actual.out[i], expected.out[i], allowed.out) << "element " << i;
        }
      }
    }
  }
}

TEST_P(AttentionMemory, TilesWithoutAPlaceAreDroppedAndReported) {
  for (const Role role : {Role::kLayer0, Role::kAnchor, Role::kReuse}) {
    Random random(75);
    Problem p = problem(role);
    p.add(random, 24, 24);
    const Sets sets = run(with_role(p, Role::kAnchor), kernel()).sets;
    Layout layout{.maxima = Layout::Maxima::kExact};
    layout.before = [](AttentionParams& params) { params.max_tiles = 2; };
    layout.after = [&](AttentionParams& params) {
      if (role == Role::kReuse) return;
      for (int64_t set = 4; set < 6; ++set) {
        ASSERT_EQ(params.counts[set], -1) << "the third tile's counts were written";
        for (int64_t m = 0; m < params.capacity; ++m)
          ASSERT_EQ(params.positions[set * params.capacity + m], -1);
        params.counts[set] = 0;
      }
    };
    const Result result = run(p, kernel(), layout, 1, &sets), whole = run(p, kernel(), {}, 1, &sets);
    EXPECT_EQ(result.status, static_cast<uint32_t>(kStatusTilesClamped));
    EXPECT_EQ(first_difference(rows_of(result.out, 0, 16, 64), rows_of(whole.out, 0, 16, 64)), -1);
  }
}

TEST_P(AttentionMemory, TilesStayWithinTheirSequencesShare) {
  // tile_offsets leaves two places to a sequence of three tiles: its third would be the first of the next
  // sequence.
  Random random(82);
  Problem p = problem(Role::kAnchor);
  p.add(random, 24, 24);
  p.add(random, 1, 60);
  int32_t tile_offsets[3] = {0, 2, 3};
  const int32_t* given = nullptr;
  Layout layout{.maxima = Layout::Maxima::kExact};
  layout.before = [&](AttentionParams& params) {
    given = params.tile_offsets;
    params.tile_offsets = tile_offsets;
  };
  layout.after = [&](AttentionParams& params) {
    // The next sequence's sets go to where run() expects them.
    for (int64_t set = 6; set < 8; ++set) {
      ASSERT_EQ(params.counts[set], -1);
      params.counts[set] = params.counts[set - 2];
      params.counts[set - 2] = 0;
      const auto list = params.positions + set * params.capacity, from = list - 2 * params.capacity;
      std::copy_n(from, params.capacity, list);
      std::fill_n(from, params.capacity, -1);
    }
    params.tile_offsets = given;
  };
  const Result result = run(p, kernel(), layout, 2), whole = run(p, kernel());
  EXPECT_EQ(result.status, static_cast<uint32_t>(kStatusTilesClamped));
  EXPECT_EQ(first_difference(rows_of(result.out, 0, 16, 64), rows_of(whole.out, 0, 16, 64)), -1);
  EXPECT_EQ(first_difference(rows_of(result.out, 24, 25, 64), rows_of(whole.out, 24, 25, 64)), -1);
  for (int32_t g = 0; g < 2; ++g) EXPECT_EQ(result.sets.of(1, 0, g), whole.sets.of(1, 0, g));
}

TEST_P(AttentionMemory, BudgetsAboveTheCapacityAreCutAndReported) {
  // A budget length that the stated maxima do not cover.
  for (const TileRule rule : {TileRule::kAligned, TileRule::kStep}) {
    Random random(76);
    Problem p = problem(Role::kAnchor, rule);
    p.budget = Budget{.percent_hundredths = 1000, .floor = 2, .sinks = 1, .recent = 2, .rolling = false};
    p.add(random, 1, 80).budget_len = 300;
    Layout layout;
    int32_t capacity = 0;
    layout.before = [&](AttentionParams& params) {
      params.max_kv_len = 80;
      params.capacity = capacity = static_cast<int32_t>(required_capacity(params));
    };
    layout.after = [&](AttentionParams& params) {
      for (int64_t i = 2 * params.capacity; i < 2 * 33; ++i) ASSERT_EQ(params.positions[i], -1);
    };
    const Result result = run(p, kernel(), layout);
    EXPECT_EQ(capacity, 11);
    EXPECT_EQ(result.status, static_cast<uint32_t>(kStatusCapacityClamped));
    for (const auto& members : result.sets.members) {
      ASSERT_EQ(static_cast<int32_t>(members.size()), capacity);
      EXPECT_EQ(members.front(), 0) << "the sink stays";
      EXPECT_EQ(members.back(), rule == TileRule::kStep ? 78 : 71) << "the recent keys stay";
    }
  }
}

TEST_P(AttentionMemory, StatusIsOptional) {
  Random random(77);
  Problem p = problem(Role::kAnchor);
  p.add(random, 5, 30);
  Layout layout;
  layout.before = [](AttentionParams& params) {
    params.status = nullptr;
    params.max_kv_len = 20;
    params.capacity = static_cast<int32_t>(required_capacity(params));
  };
  EXPECT_EQ(run(p, kernel(), layout).status, 0u);
}

TEST_P(AttentionMemory, LseIsOptional) {
  Random random(78);
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor}) {
    Problem p = problem(role);
    p.add(random, 20, 30);
    Layout layout;
    layout.before = [](AttentionParams& params) { params.lse = nullptr; };
    EXPECT_EQ(first_difference(run(p, kernel(), layout).out, run(p, kernel()).out), -1);
  }
}

TEST_P(AttentionMemory, KeysOutsideTheCandidatesAreNotAttended) {
  // Sets are data from elsewhere: positions of the own tile, past the row, past the end and negative ones are
  // passed over.
  Random random(79);
  Problem p = problem(Role::kReuse);
  p.add(random, 4, 20);  // the tile at 16
  Sets good = empty_sets(p), bad = good;
  for (auto& members : good.members) members = {2, 9, 15};
  for (auto& members : bad.members) members = {-7, -1, 2, 9, 15, 16, 18, 20, 1000};
  const Result expected = run(p, kernel(), {}, 1, &good), actual = run(p, kernel(), {}, 1, &bad);
  EXPECT_EQ(first_difference(actual.out, expected.out), -1);
  EXPECT_EQ(first_difference(actual.lse, expected.lse), -1);
}

TEST_P(AttentionMemory, CountsAboveTheCapacityOrBelowZero) {
  Random random(80);
  Problem p = problem(Role::kReuse);
  p.add(random, 4, 20);
  Sets sets = empty_sets(p);
  for (auto& members : sets.members) members = {1, 4, 11};
  const Result expected = run(p, kernel(), {}, 1, &sets);
  Layout layout;
  layout.before = [](AttentionParams& params) { params.counts[0] = params.counts[1] = 4000; };
  EXPECT_EQ(first_difference(run(p, kernel(), layout, 1, &sets).out, expected.out), -1);
  layout.before = [](AttentionParams& params) { params.counts[0] = params.counts[1] = -5; };
  const Sets none = empty_sets(p);
  EXPECT_EQ(first_difference(run(p, kernel(), layout, 1, &sets).out, run(p, kernel(), {}, 1, &none).out), -1);
}

TEST_P(AttentionMemory, HeadMapEntriesAreClamped) {
  Random random(81);
  Problem p = problem(Role::kReuse);
  p.add(random, 4, 20);
  Sets sets = empty_sets(p);
  sets.members = {{1, 4, 11}, {2, 3}};
  p.head_map = {0, 1};
  const Result expected = run(p, kernel(), {}, 1, &sets);
  p.head_map = {-1000000, 1000000};
  EXPECT_EQ(first_difference(run(p, kernel(), {}, 1, &sets).out, expected.out), -1);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionMemory, testing::ValuesIn(kernel_cases()), case_name);

}  // namespace
}  // namespace kascade
