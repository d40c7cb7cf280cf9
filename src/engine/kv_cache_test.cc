// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kascade/error.h"

namespace kascade {
namespace {

std::shared_ptr<KvCache> make_cache(int64_t pages, DType dtype = DType::kF32, int32_t page_size = 4) {
  return std::make_shared<KvCache>(KvCacheShape{
      .layers = 2, .kv_heads = 2, .head_dim = 8, .pages = pages, .page_size = page_size, .dtype = dtype});
}

TEST(KvCache, RowsLandWhereTheOperatorLooks) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const auto cache = make_cache(3, dtype);
    ThreadPool pool(1);
    const std::vector<int64_t> slots = {9, 0, 7};
    std::vector<float> k(3 * 16), v(3 * 16);
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] = static_cast<float>(i) - 20;  // small integers are exact in every type
      v[i] = static_cast<float>(i) * 2;
    }
    cache->append(1, k.data(), v.data(), slots, pool);
    AttentionParams params;
    cache->describe(1, params);
    EXPECT_EQ(params.kv_dtype, dtype);
    const auto value = [&](const void* base, int64_t index) {
      switch (dtype) {
        case DType::kF16:
          return to_float(static_cast<const F16*>(base)[index]);
        case DType::kBF16:
          return to_float(static_cast<const BF16*>(base)[index]);
        case DType::kF32:
          break;
      }
      return static_cast<const float*>(base)[index];
    };
    for (int row = 0; row < 3; ++row)
      for (int head = 0; head < 2; ++head)
        for (int i = 0; i < 8; ++i) {
          const int64_t offset = slots[row] / 4 * params.k_page_stride +
                                 slots[row] % 4 * params.k_token_stride + head * params.k_head_stride + i;
          EXPECT_EQ(value(params.k, offset), k[(row * 2 + head) * 8 + i]);
          EXPECT_EQ(value(params.v, offset), v[(row * 2 + head) * 8 + i]);
        }
  }
}

TEST(KvCache, PagesAreDistinctAndComeBack) {
  const auto cache = make_cache(5);
  auto a = std::make_unique<CachedSequence>(cache), b = std::make_unique<CachedSequence>(cache);
  a->reserve(9);
  a->commit(9, {});
  b->reserve(8);
  b->commit(8, {});
  std::set<int32_t> pages(a->page_table().begin(), a->page_table().end());
  pages.insert(b->page_table().begin(), b->page_table().end());
  EXPECT_EQ(pages.size(), 5u);
  EXPECT_EQ(cache->live_pages(), 5);
  EXPECT_THROW(b->reserve(9), OutOfMemory);
  b->roll_back();
  EXPECT_EQ(b->length(), 8);
  a.reset();
  EXPECT_EQ(cache->live_pages(), 2);
  b->reserve(20);
  b->commit(20, {});
  EXPECT_EQ(cache->live_pages(), 5);
}

TEST(KvCache, SparePagesStayUntilSomebodyNeedsThem) {
  const auto cache = make_cache(4);
  CachedSequence a(cache), b(cache);
  a.reserve(12);
  a.commit(12, {});
  const std::vector<int32_t> before = a.page_table();
  a.truncate(3);
  EXPECT_EQ(a.written(), 12);
  b.reserve(4);  // the fourth page is free
  b.commit(4, {});
  EXPECT_EQ(a.page_table(), before);
  b.reserve(8);  // now the last spare one of a goes
  b.commit(8, {});
  EXPECT_EQ(a.page_table(), std::vector<int32_t>(before.begin(), before.begin() + 2));
  EXPECT_EQ(a.written(), 8);
  // A sequence that is being filled keeps its pages, even from itself.
  a.reserve(8);
  EXPECT_THROW(b.reserve(12), OutOfMemory);
  EXPECT_THROW(a.reserve(12), OutOfMemory);
  a.roll_back();
  b.roll_back();
  EXPECT_EQ(a.written(), 3);
  b.reserve(12);
  b.commit(12, {});
  EXPECT_EQ(a.page_table().size(), 1u);
}

TEST(KvCache, AddressesThatCannotBeHadAreAnError) {
  EXPECT_THROW(make_cache(int64_t{1} << 60), OutOfMemory);
  EXPECT_THROW(make_cache(INT64_MAX / 2), OutOfMemory);
  EXPECT_THROW(make_cache(int64_t{1} << 40, DType::kF32, 1 << 20), OutOfMemory);
}

TEST(KvCache, LastHiddenGoesWithItsRow) {
  const auto cache = make_cache(4);
  CachedSequence sequence(cache);
  const std::vector<float> hidden = {1, 2};
  sequence.reserve(5);
  sequence.commit(5, hidden);
  sequence.truncate(5);
  EXPECT_THAT(sequence.last_hidden(), testing::ElementsAre(1, 2));
  sequence.truncate(4);
  EXPECT_TRUE(sequence.last_hidden().empty());
  EXPECT_THROW(sequence.truncate(5), BadArgument);
}

}  // namespace
}  // namespace kascade
