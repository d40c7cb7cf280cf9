// SPDX-License-Identifier: Apache-2.0
// Pages that sequences share: whose they are, when they are copied, and that none is lost.
#include "engine/page_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "kascade/error.h"

namespace kascade {
namespace {

using testing::ElementsAre;

constexpr int32_t kPageSize = 4;

/// Pages hold one number a token.
class NumberPool final : public PagePool {
 public:
  explicit NumberPool(int64_t pages)
      : PagePool({.layers = 1, .kv_heads = 1, .head_dim = 1, .pages = pages, .page_size = kPageSize}),
        numbers(static_cast<size_t>(pages * kPageSize), -1) {}

  std::vector<int> numbers;  // [pages, page_size]
  int copies = 0;
  bool fail_copies = false;

 private:
  void copy_page(int32_t from, int32_t to) override {
    if (fail_copies) throw DeviceError("copy");
    ++copies;
    std::copy_n(numbers.begin() + from * kPageSize, kPageSize, numbers.begin() + to * kPageSize);
  }
};

class PagePoolTest : public testing::Test {
 protected:
  void use(int64_t pages) { pool_ = std::make_shared<NumberPool>(pages); }

  void append(CachedSequence& sequence, std::span<const int> numbers) {
    const int64_t begin = sequence.length(), end = begin + std::ssize(numbers);
    try {
      sequence.reserve(end);
    } catch (...) {
      sequence.roll_back();
      throw;
    }
    for (int64_t i = begin; i < end; ++i)
      pool_->numbers[static_cast<size_t>(sequence.slot(i))] = numbers[static_cast<size_t>(i - begin)];
    sequence.commit(end, {});
  }
  void append(CachedSequence& sequence, int first, int count) {
    std::vector<int> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(first + i);
    append(sequence, numbers);
  }
  std::vector<int> content(const CachedSequence& sequence) const {
    std::vector<int> result;
    for (int64_t i = 0; i < sequence.length(); ++i)
      result.push_back(pool_->numbers[static_cast<size_t>(sequence.slot(i))]);
    return result;
  }

  std::shared_ptr<NumberPool> pool_;
};

TEST_F(PagePoolTest, APageIsCopiedByTheFirstToWriteAndThenOwnedAlone) {
  use(8);
  CachedSequence a(pool_);
  append(a, 0, 6);
  CachedSequence b(a, 5);
  EXPECT_EQ(pool_->live_pages(), 2);
  append(a, 6, 1);  // beside what b has of that page
  EXPECT_EQ(pool_->copies, 1);
  append(b, 50, 1);  // the old page is b's alone now
  EXPECT_EQ(pool_->copies, 1);
  EXPECT_THAT(content(a), ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 50));
  EXPECT_EQ(pool_->live_pages(), 3);
}

TEST_F(PagePoolTest, APrefixThatEndsWithAPageIsNeverCopied) {
  use(8);
  CachedSequence a(pool_);
  append(a, 0, 8);
  CachedSequence b(a, 8), c(a, 4);
  append(b, 10, 4);
  append(c, 20, 4);
  append(a, 30, 4);
  EXPECT_EQ(pool_->copies, 0);
  EXPECT_EQ(pool_->live_pages(), 5);
}

TEST_F(PagePoolTest, CutBackBelowASharedPageAndGrownAgain) {
  use(8);
  CachedSequence a(pool_);
  append(a, 0, 10);
  CachedSequence b(a, 10);
  a.truncate(2);
  append(a, 70, 8);  // over three pages that b reads
  EXPECT_THAT(content(a), ElementsAre(0, 1, 70, 71, 72, 73, 74, 75, 76, 77));
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_EQ(pool_->copies, 3);
}

TEST_F(PagePoolTest, AForkOfAForkOutlivesBoth) {
  use(4);
  auto a = std::make_unique<CachedSequence>(pool_);
  append(*a, 0, 6);
  auto b = std::make_unique<CachedSequence>(*a, 6);
  CachedSequence c(*b, 5);
  a.reset();
  append(*b, 6, 1);
  EXPECT_EQ(pool_->copies, 1);
  b.reset();
  EXPECT_EQ(pool_->live_pages(), 2);
  append(c, 90, 2);
  EXPECT_EQ(pool_->copies, 1);
  EXPECT_THAT(content(c), ElementsAre(0, 1, 2, 3, 4, 90, 91));
}

TEST_F(PagePoolTest, AnEmptyPrefixSharesNothing) {
  use(2);
  CachedSequence a(pool_);
  append(a, 0, 4);
  CachedSequence b(a, 0);
  EXPECT_TRUE(b.page_table().empty());
  EXPECT_THROW(CachedSequence(a, 5), BadArgument);
  EXPECT_THROW(CachedSequence(a, -1), BadArgument);
  EXPECT_EQ(pool_->live_pages(), 1);
  append(b, 9, 4);  // what was refused is not asked for spare pages any more
  EXPECT_THROW(append(b, 13, 1), OutOfMemory);
}

TEST_F(PagePoolTest, LastHiddenGoesWithAWholePrefixOnly) {
  use(2);
  CachedSequence a(pool_);
  a.reserve(3);
  a.commit(3, std::vector<float>{1, 2});
  EXPECT_THAT(CachedSequence(a, 3).last_hidden(), ElementsAre(1, 2));
  EXPECT_TRUE(CachedSequence(a, 2).last_hidden().empty());
}

TEST_F(PagePoolTest, NoPageForACopyIsAnErrorThatChangesNothing) {
  use(3);
  CachedSequence a(pool_);
  append(a, 0, 10);
  CachedSequence b(a, 6);
  EXPECT_THROW(append(b, 60, 1), OutOfMemory);
  EXPECT_EQ(pool_->live_pages(), 3);
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 5));
  a.truncate(8);  // its third page is spare
  append(b, 60, 1);
  EXPECT_THAT(content(a), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 5, 60));
}

TEST_F(PagePoolTest, ACopyThatFailsLosesNoPage) {
  use(4);
  CachedSequence a(pool_);
  append(a, 0, 6);
  CachedSequence b(a, 6);
  pool_->fail_copies = true;
  EXPECT_THROW(append(b, 60, 4), DeviceError);
  EXPECT_EQ(pool_->live_pages(), 2);
  pool_->fail_copies = false;
  append(b, 60, 4);
  EXPECT_EQ(pool_->live_pages(), 4);
  EXPECT_THAT(content(a), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(PagePoolTest, ASharedPagePastTheEndIsNobodysFreePage) {
  use(3);
  CachedSequence a(pool_);
  append(a, 0, 8);
  CachedSequence b(a, 8), c(pool_);
  a.truncate(3);  // its second page is spare, and b's
  append(c, 80, 4);
  EXPECT_THROW(append(c, 84, 1), OutOfMemory);
  EXPECT_EQ(a.page_table().size(), 1u);  // let go of, for nothing
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  b.truncate(4);
  append(c, 84, 1);
  EXPECT_THAT(content(c), ElementsAre(80, 81, 82, 83, 84));
}

TEST_F(PagePoolTest, APageThatIsSpareToAllOthersNeedsNoCopyInAFullPool) {
  use(2);
  CachedSequence a(pool_);
  append(a, 0, 6);
  CachedSequence b(a, 6);
  a.truncate(4);
  append(b, 60, 2);
  EXPECT_EQ(pool_->copies, 0);
  EXPECT_THAT(content(b), ElementsAre(0, 1, 2, 3, 4, 5, 60, 61));
  EXPECT_THAT(content(a), ElementsAre(0, 1, 2, 3));
}

TEST_F(PagePoolTest, ProtectedPagesAreNotSpare) {
  use(3);
  CachedSequence a(pool_), b(pool_);
  append(a, 0, 12);
  a.truncate(2);
  a.protect(8);
  append(b, 90, 4);
  EXPECT_THROW(append(b, 94, 1), OutOfMemory);
  EXPECT_EQ(a.written(), 8);
  a.roll_back();
  append(b, 94, 1);
  EXPECT_THAT(content(a), ElementsAre(0, 1));
}

// Any order of events against plain vectors: contents stay, no page is lost or held twice, and memory runs
// out only when it has.
TEST_F(PagePoolTest, RandomHistories) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    use(3 + below(12));
    std::vector<std::unique_ptr<CachedSequence>> sequences;
    std::vector<std::vector<int>> expected;
    for (int event = 0; event < 150; ++event) {
      const size_t i = sequences.empty() ? 0 : static_cast<size_t>(below(std::ssize(sequences)));
      const int64_t kind = sequences.empty() ? 0 : below(10);
      if (kind == 0) {
        sequences.push_back(std::make_unique<CachedSequence>(pool_));
        expected.emplace_back();
      } else if (kind == 1) {
        const int64_t length = below(sequences[i]->length() + 1);
        sequences.push_back(std::make_unique<CachedSequence>(*sequences[i], length));
        expected.push_back({expected[i].begin(), expected[i].begin() + length});
      } else if (kind == 2) {
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
        expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(i));
      } else if (kind < 5) {
        const int64_t length = below(sequences[i]->length() + 1);
        sequences[i]->truncate(length);
        expected[i].resize(static_cast<size_t>(length));
      } else {
        std::vector<int> numbers(static_cast<size_t>(1 + below(11)));
        for (int& number : numbers) number = static_cast<int>(random() >> 1);
        pool_->fail_copies = below(8) == 0;
        try {
          append(*sequences[i], numbers);
          expected[i].insert(expected[i].end(), numbers.begin(), numbers.end());
        } catch (const OutOfMemory&) {
          EXPECT_EQ(pool_->live_pages(), pool_->shape().pages);
          for (size_t j = 0; j < sequences.size(); ++j) {
            if (j == i) continue;
            EXPECT_LE(std::ssize(sequences[j]->page_table()),
                      (sequences[j]->length() + kPageSize - 1) / kPageSize);
          }
        } catch (const DeviceError&) {
          EXPECT_TRUE(pool_->fail_copies);
        }
      }
      std::set<int32_t> held;
      for (size_t j = 0; j < sequences.size(); ++j) {
        ASSERT_EQ(content(*sequences[j]), expected[j]) << "seed " << seed << ", event " << event;
        held.insert(sequences[j]->page_table().begin(), sequences[j]->page_table().end());
      }
      ASSERT_EQ(pool_->live_pages(), std::ssize(held)) << "seed " << seed << ", event " << event;
    }
    sequences.clear();
    EXPECT_EQ(pool_->live_pages(), 0);
  }
}

}  // namespace
}  // namespace kascade
