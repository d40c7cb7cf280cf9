// SPDX-License-Identifier: Apache-2.0
// Every parameter that attention() checks, refused with its name and value before anything runs.
#include "attention/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>

#include "attention/attention_test_case.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A valid anchor call of two sequences (3 rows over 5 keys, 2 over 2) whose fields a test spoils.
class CheckTest : public testing::Test {
 protected:
  CheckTest() {
    p.role = Role::kAnchor;
    p.tile = 4;
    p.batch = 2;
    p.query_heads = 4;
    p.kv_heads = 2;
    p.head_dim = 8;
    p.q = p.out = buffer.as<float>();
    p.q_head_stride = p.out_head_stride = 8;
    p.q_row_stride = p.out_row_stride = 32;
    p.k = p.v = buffer.as<float>();
    p.k_head_stride = p.v_head_stride = 8;
    p.k_token_stride = p.v_token_stride = 16;
    p.lse = lse;
    p.lse_row_stride = 4;
    p.cu_seqlens_q = cu_q;
    p.seq_lens_kv = lens;
    p.cu_seqlens_kv = cu_kv;
    p.tile_offsets = tile_offsets;
    p.positions = positions;
    p.counts = counts;
    p.capacity = 4;
    p.budget = Budget{.percent_hundredths = 1000, .floor = 10};
  }

  std::string refusal(const std::function<void()>& spoil) {
    const AttentionParams valid = p;
    spoil();
    std::string message = "accepted";
    try {
      check_params(p);
    } catch (const BadArgument& error) {
      message = error.what();
    }
    p = valid;
    return message;
  }

  /// The refusal names the parameter, its value and what is legal.
  void expect_refused(const std::string& name, const std::string& value, const std::string& legal,
                      const std::function<void()>& spoil) {
    EXPECT_THAT(refusal(spoil), AllOf(testing::StartsWith(name), HasSubstr(value), HasSubstr(legal)));
  }

  void expect_accepted(const std::function<void()>& change) { EXPECT_EQ(refusal(change), "accepted"); }

  void use_pages() {
    p.page_table = page_table;
    p.page_table_stride = 2;
    p.page_size = 4;
    p.cu_seqlens_kv = nullptr;
    p.k_page_stride = p.v_page_stride = 64;
  }

  GuardedBuffer buffer{4096};
  float lse[32] = {};
  int32_t cu_q[3] = {0, 3, 5}, lens[2] = {5, 2}, cu_kv[3] = {0, 5, 7}, budget_lens[2] = {5, 2};
  int32_t tile_offsets[3] = {0, 2, 3}, positions[64] = {}, counts[16] = {}, page_table[4] = {};
  AttentionParams p;
};

TEST_F(CheckTest, TheCallItselfIsValid) {
  expect_accepted([] {});
  expect_accepted([&] { use_pages(); });
}

TEST_F(CheckTest, Shape) {
  expect_refused("batch", "-1", "0 or more", [&] { p.batch = -1; });
  expect_refused("kv_heads", "0", "1 or more", [&] { p.kv_heads = 0; });
  expect_refused("kv_heads", "-2", "1 or more", [&] { p.kv_heads = -2; });
  expect_refused("query_heads", "5", "multiple of kv_heads, 2", [&] { p.query_heads = 5; });
  expect_refused("query_heads", "0", "multiple of kv_heads", [&] { p.query_heads = 0; });
  expect_refused("query_heads", "34", "1..16", [&] { p.query_heads = 34; });
  for (const int32_t dim : {0, -8, 7, 12})
    expect_refused("head_dim", std::to_string(dim), "8", [&] { p.head_dim = dim; });
  for (const int32_t tile : {0, -1, 129})
    expect_refused("tile", std::to_string(tile), "1..128", [&] { p.tile = tile; });
  expect_accepted([&] {
    p.tile_rule = TileRule::kStep;
    p.tile = 0;
    cu_q[0] = 0;
  });
}

TEST_F(CheckTest, Enumerations) {
  expect_refused("role", "4", "0..3", [&] { p.role = static_cast<Role>(4); });
  expect_refused("tile_rule", "2", "0..1", [&] { p.tile_rule = static_cast<TileRule>(2); });
  expect_refused("set_owner", "3", "0..2", [&] { p.set_owner = static_cast<SetOwner>(3); });
  expect_refused("budget.own_tile", "3", "0..2", [&] { p.budget.own_tile = static_cast<OwnTile>(3); });
  expect_refused("q_dtype", "9", "bf16", [&] { p.q_dtype = static_cast<DType>(9); });
  expect_refused("out_dtype", "9", "bf16", [&] { p.out_dtype = static_cast<DType>(9); });
  expect_refused("kv_dtype", "9", "bf16", [&] { p.kv_dtype = static_cast<DType>(9); });
}

TEST_F(CheckTest, Scales) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {-0.5f, nan, inf}) {
    expect_refused("softmax_scale", "", "positive and finite", [&] { p.softmax_scale = bad; });
    expect_refused("k_scale", "", "positive and finite", [&] { p.k_scale = bad; });
    expect_refused("v_scale", "", "positive and finite", [&] { p.v_scale = bad; });
  }
  expect_refused("k_scale", "0", "positive", [&] { p.k_scale = 0; });
  expect_refused("v_scale", "0", "positive", [&] { p.v_scale = 0; });
}

TEST_F(CheckTest, BudgetFields) {
  expect_refused("budget.percent_hundredths", "-1", "0..10000", [&] { p.budget.percent_hundredths = -1; });
  expect_refused("budget.percent_hundredths", "10001", "0..10000",
                 [&] { p.budget.percent_hundredths = 10001; });
  expect_refused("budget.floor", "-1", "0 or more", [&] { p.budget.floor = -1; });
  expect_refused("budget.round_to", "0", "1 or more", [&] { p.budget.round_to = 0; });
  expect_refused("budget.sinks", "-1", "0 or more", [&] { p.budget.sinks = -1; });
  expect_refused("budget.recent", "-1", "0 or more", [&] { p.budget.recent = -1; });
  expect_refused("budget.tile", "0", "1..128", [&] { p.budget.tile = 0; });
  expect_refused("budget.tile", "129", "1..128", [&] { p.budget.tile = 129; });
  expect_refused("budget.rolling_min_rows", "-1", "0 or more", [&] { p.budget.rolling_min_rows = -1; });
  expect_refused("budget.own_tile", "kCandidate", "tile is 1",
                 [&] { p.budget.own_tile = OwnTile::kCandidate; });
  // A dense call reads no budget.
  expect_accepted([&] {
    p.role = Role::kDense;
    p.budget.floor = -1;
  });
}

TEST_F(CheckTest, Maxima) {
  expect_refused("max_q_len", "-1", "0 or more", [&] { p.max_q_len = -1; });
  expect_refused("max_kv_len", "-1", "0 or more", [&] { p.max_kv_len = -1; });
  expect_refused("max_total_q", "-1", "0 or more", [&] { p.max_total_q = -1; });
  expect_refused("max_tiles", "-1", "0 or more", [&] { p.max_tiles = -1; });
}

TEST_F(CheckTest, MissingPointers) {
  expect_refused("q ", "null", "query rows", [&] { p.q = nullptr; });
  expect_refused("out ", "null", "query rows", [&] { p.out = nullptr; });
  expect_refused("k ", "null", "keys", [&] { p.k = nullptr; });
  expect_refused("v ", "null", "keys", [&] { p.v = nullptr; });
  expect_refused("cu_seqlens_q", "null", "given", [&] { p.cu_seqlens_q = nullptr; });
  expect_refused("seq_lens_kv", "null", "given", [&] { p.seq_lens_kv = nullptr; });
  expect_refused("cu_seqlens_kv", "null", "page_table is null", [&] { p.cu_seqlens_kv = nullptr; });
  expect_refused("counts", "null", "dense", [&] { p.counts = nullptr; });
  expect_refused("positions", "null", "dense", [&] { p.positions = nullptr; });
  expect_refused("tile_offsets", "null", "dense", [&] { p.tile_offsets = nullptr; });
  // Nor do stated maxima make up for them.
  const auto state = [&] {
    p.max_q_len = p.max_kv_len = p.max_total_q = p.max_tiles = 5;
    p.capacity = 5;
  };
  expect_accepted(state);
  expect_refused("cu_seqlens_q", "null", "given", [&] {
    state();
    p.cu_seqlens_q = nullptr;
  });
  expect_refused("tile_offsets", "null", "given", [&] {
    state();
    p.tile_offsets = nullptr;
  });
}

TEST_F(CheckTest, AlignmentOfRows) {
  float* odd = buffer.as<float>() + 1;
  expect_refused("q ", "", "16-byte aligned", [&] { p.q = odd; });
  expect_refused("out ", "", "16-byte aligned", [&] { p.out = odd; });
  expect_refused("k ", "", "16-byte aligned", [&] { p.k = odd; });
  expect_refused("v ", "", "16-byte aligned", [&] { p.v = odd; });
  expect_refused("q_row_stride", "34", "multiple of 4", [&] { p.q_row_stride = 34; });
  expect_refused("q_head_stride", "9", "multiple of 4", [&] { p.q_head_stride = 9; });
  expect_refused("out_row_stride", "35", "multiple of 4", [&] { p.out_row_stride = 35; });
  expect_refused("out_head_stride", "10", "multiple of 4", [&] { p.out_head_stride = 10; });
  expect_refused("k_token_stride", "17", "multiple of 4", [&] { p.k_token_stride = 17; });
  expect_refused("v_head_stride", "12", "multiple of 8", [&] {
    p.kv_dtype = DType::kBF16;
    p.v_head_stride = 12;
  });
  expect_refused("k_page_stride", "66", "multiple of 4", [&] {
    use_pages();
    p.k_page_stride = 66;
  });
}

TEST_F(CheckTest, Strides) {
  expect_refused("q_row_stride", "-32", "at least 0", [&] { p.q_row_stride = -32; });
  expect_refused("out_row_stride", "4", "at least 8", [&] { p.out_row_stride = 4; });
  expect_refused("out_head_stride", "0", "at least 8", [&] { p.out_head_stride = 0; });
  expect_refused("lse_row_stride", "3", "at least query_heads, 4", [&] { p.lse_row_stride = 3; });
  expect_refused("k_token_stride", "-16", "at least 0", [&] { p.k_token_stride = -16; });
  expect_refused("v_page_stride", "-64", "at least 0", [&] {
    use_pages();
    p.v_page_stride = -64;
  });
  expect_refused("page_table_stride", "-1", "0 or more", [&] {
    use_pages();
    p.page_table_stride = -1;
  });
  // Without a reader a stride may be anything.
  expect_accepted([&] { p.k_page_stride = -3; });
  expect_accepted([&] {
    p.lse = nullptr;
    p.lse_row_stride = -1;
  });
}

TEST_F(CheckTest, Lengths) {
  const auto with = [&](int32_t& field, int32_t value, const std::string& name, const std::string& shown,
                        const std::string& legal) {
    const int32_t valid = field;
    expect_refused(name, shown, legal, [&] { field = value; });
    field = valid;
  };
  with(cu_q[0], -1, "cu_seqlens_q", "-1", "0 or more");
  with(cu_q[2], 2, "cu_seqlens_q[2]", "2", "at least cu_seqlens_q[1], 3");
  with(lens[1], -4, "seq_lens_kv[1]", "-4", "0 or more");
  with(cu_kv[1], 9, "cu_seqlens_kv[2]", "7", "at least cu_seqlens_kv[1], 9");
  with(lens[1], 3, "seq_lens_kv[1]", "3", "cu_seqlens_kv, 2");
  with(tile_offsets[0], -1, "tile_offsets", "-1", "0 or more");
  with(tile_offsets[1], 1, "tile_offsets[1]", "1", "sequence 0 owns 2 tiles");
  p.budget_lens = budget_lens;
  with(budget_lens[0], -1, "budget_lens[0]", "-1", "0 or more");
}

TEST_F(CheckTest, PagesOrPacked) {
  expect_refused("cu_seqlens_kv", "given", "null with a page_table", [&] {
    use_pages();
    p.cu_seqlens_kv = cu_kv;
  });
  for (const int32_t size : {0, -16})
    expect_refused("page_size", std::to_string(size), "1 or more", [&] {
      use_pages();
      p.page_size = size;
    });
}

TEST_F(CheckTest, CapacityBelowTheBudget) {
  // Sequence 0 ends in the tile at 4: four candidates, all within the floor.
  expect_refused("capacity", "3", "at least 4", [&] { p.capacity = 3; });
  expect_refused("capacity", "-1", "0 or more", [&] { p.capacity = -1; });
  // At a stated maximum of 1000 keys the largest set is 10 % of 996: the stated length decides, not the
  // present one.
  expect_refused("capacity", "98", "at least 99", [&] {
    p.max_kv_len = 1000;
    p.capacity = 98;
  });
  expect_accepted([&] {
    p.max_kv_len = 1000;
    p.capacity = 99;
  });
  // A reader goes by the counts.
  expect_accepted([&] {
    p.role = Role::kReuse;
    p.capacity = 0;
    p.positions = nullptr;
  });
}

TEST_F(CheckTest, PooledWeights) {
  float weights[64];
  expect_refused("pooled_head_stride", "4", "at least 5", [&] {
    p.pooled_weights = weights;
    p.pooled_head_stride = 4;
    p.pooled_tile_stride = 16;
  });
  expect_refused("pooled_tile_stride", "9", "at least 10", [&] {
    p.pooled_weights = weights;
    p.pooled_head_stride = 5;
    p.pooled_tile_stride = 9;
  });
}

TEST_F(CheckTest, RequiredCapacityOfTheBudgets) {
  p.tile = 32;
  const auto required = [&](TileRule rule, const Budget& budget, int32_t keys) {
    AttentionParams q = p;
    q.tile_rule = rule;
    q.budget = budget;
    q.max_kv_len = keys;
    return required_capacity(q);
  };
  EXPECT_EQ(required(TileRule::kAligned, default_budget(), 8192), 128 + 816);  // the tile at 8160
  EXPECT_EQ(required(TileRule::kStep, default_budget(), 8192), 128 + 820);     // 8191 keys before the step
  EXPECT_EQ(required(TileRule::kAligned, paper_budget(), 8192), 787);
  EXPECT_EQ(required(TileRule::kStep, paper_budget(), 8192), 787);
  EXPECT_EQ(required(TileRule::kAligned, kernel_budget(), 8192), 896);
  EXPECT_EQ(required(TileRule::kStep, kernel_decode_budget(), 8192), 896);
  EXPECT_EQ(required(TileRule::kStep, kernel_decode_budget(), 100), 100);
  EXPECT_EQ(required(TileRule::kAligned, default_budget(), 32), 0);
  // At most rolling_min_rows rows have the fixed budget, here the larger one: 90 % of 100, against 10 % of 96
  // and more.
  const Budget switching{
      .percent_hundredths = 9000, .floor = 0, .rolling_min_rows = 100, .rolling_capped = true};
  EXPECT_EQ(required(TileRule::kAligned, switching, 101), 90);
}

TEST_F(CheckTest, CapacitySufficesForEveryShorterCall) {
  // What the stated maxima promise: no set of any call within them is larger.
  for (const Budget& budget : {default_budget(500), paper_budget(1000, 16, true), kernel_budget(700, 16),
                               Budget{.percent_hundredths = 5000,
                               .floor = 3,
                               .sinks = 2,
                               .recent = 9,
                               .forced_charged = true,
                               .rolling_min_rows = 77}}) {
    for (const int32_t most : {1, 16, 17, 78, 130, 400}) {
      p.budget = budget;
      p.tile = 16;
      p.max_kv_len = most;
      const int64_t capacity = required_capacity(p);
      for (int64_t length = 1; length <= most; ++length)
        for (int64_t x = 0; x < length; x += 16)
          ASSERT_LE(evaluate_budget(budget, x, x, length, length).members(), capacity) << length << " " << x;
    }
  }
}

TEST_F(CheckTest, TilesOfASequence) {
  p.tile = 32;
  EXPECT_EQ(tiles_of(p, 0, 100), 0);
  EXPECT_EQ(tiles_of(p, 1, 1), 1);
  EXPECT_EQ(tiles_of(p, 32, 32), 1);
  EXPECT_EQ(tiles_of(p, 33, 33), 2);
  EXPECT_EQ(tiles_of(p, 1, 33), 1);
  EXPECT_EQ(tiles_of(p, 2, 33), 2) << "positions 31 and 32";
  EXPECT_EQ(tiles_of(p, 5, 0), 0) << "rows before the first key belong to no tile";
  EXPECT_EQ(tiles_of(p, 40, 8), 1);
  p.tile_rule = TileRule::kStep;
  EXPECT_EQ(tiles_of(p, 5, 100), 1);
  EXPECT_EQ(tiles_of(p, 0, 100), 0);
  p.budget = kernel_decode_budget();
  EXPECT_EQ(tiles_of(p, 5, 100), 5);
  p.budget = paper_budget();
  EXPECT_EQ(tiles_of(p, 5, 100), 5);
}

class DispatchTest : public CheckTest {
 protected:
  size_t bytes() { return attention_workspace_bytes(p, reference(), 1); }
  std::string failure(void* workspace, size_t workspace_bytes) {
    try {
      attention(p, reference(), workspace, workspace_bytes, {});
    } catch (const BadArgument& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(DispatchTest, Workspace) {
  GuardedBuffer workspace((bytes() + 127) / 64 * 64);
  EXPECT_EQ(failure(workspace.as<void>(), workspace.size()), "accepted");
  EXPECT_EQ(failure(workspace.as<void>(), bytes()), "accepted");
  EXPECT_THAT(failure(workspace.as<void>(), bytes() - 1),
              AllOf(HasSubstr("workspace_bytes is"), HasSubstr(std::to_string(bytes()))));
  EXPECT_THAT(failure(nullptr, workspace.size()), HasSubstr("workspace is null"));
  EXPECT_THAT(failure(workspace.as<char>() + 8, workspace.size() - 8), HasSubstr("64-byte aligned"));
}

TEST_F(DispatchTest, WorkspaceOfStatedMaximaNeedsNoData) {
  p.max_q_len = 100;
  p.max_kv_len = 100;
  p.max_total_q = 200;
  p.max_tiles = 200;
  p.q = p.k = p.v = p.cu_seqlens_q = p.seq_lens_kv = p.cu_seqlens_kv = p.tile_offsets = p.positions = nullptr;
  EXPECT_GT(bytes(), 0u);
  EXPECT_THROW(attention_workspace_bytes(p, reference(), 0), BadArgument);
  p.max_kv_len = 0;
  EXPECT_THROW(bytes(), BadArgument);
}

TEST_F(DispatchTest, AFaultLeavesTheOutputAlone) {
  GuardedBuffer workspace(bytes() + 64), out(5 * 32 * sizeof(float));
  p.out = out.as<float>();
  p.capacity = 3;
  EXPECT_THAT(failure(workspace.as<void>(), workspace.size()), HasSubstr("capacity"));
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out.as<unsigned char>()[i], 0xFF);
}

TEST_F(DispatchTest, UnsupportedIsSaidByTheKernel) {
  p.selection_k = buffer.as<float>();
  GuardedBuffer workspace(1 << 16);
  try {
    attention(p, reference(), workspace.as<void>(), workspace.size(), {});
    FAIL() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'reference'"), HasSubstr("selection_k")));
  }
}

TEST_F(DispatchTest, KernelsByName) {
  EXPECT_STREQ(select_attention_kernel("reference").name, "reference");
  EXPECT_STREQ(attention_kernels().back().name, "reference");
  EXPECT_TRUE(select_attention_kernel().available());
  try {
    select_attention_kernel("cpu-abacus");
    FAIL() << "accepted";
  } catch (const BadArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'cpu-abacus'"), HasSubstr("reference")));
  }
  for (const AttentionKernel& kernel : attention_kernels()) {
    if (kernel.available()) {
      EXPECT_STREQ(select_attention_kernel(kernel.name).name, kernel.name);
    } else {
      EXPECT_THROW(select_attention_kernel(kernel.name), Unsupported);
    }
  }
}

TEST(DispatchDeathTest, TheEnvironmentForcesTheChoice) {
  // In a process of its own: the variable is read once.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("KASCADE_ATTENTION", "reference", 1);
        std::exit(std::string(select_attention_kernel().name) == "reference" ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EXIT(
      {
        setenv("KASCADE_ATTENTION", "cpu-abacus", 1);
        try {
          select_attention_kernel();
        } catch (const BadArgument& error) {
          std::fputs(error.what(), stderr);
          std::exit(3);
        }
      },
      testing::ExitedWithCode(3), "KASCADE_ATTENTION.*'cpu-abacus' is unknown");
  // Whoever names no kernel has pointers of the host.
  for (const AttentionKernel& kernel : attention_kernels()) {
    if (!kernel.on_device) continue;
    EXPECT_EXIT(
        {
          setenv("KASCADE_ATTENTION", kernel.name, 1);
          try {
            select_attention_kernel();
          } catch (const BadArgument& error) {
            std::fputs(error.what(), stderr);
            std::exit(3);
          }
        },
        testing::ExitedWithCode(3),
        std::string("KASCADE_ATTENTION.*'") + kernel.name + "' takes pointers of a GPU");
  }
}

}  // namespace
}  // namespace kascade
