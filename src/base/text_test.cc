// SPDX-License-Identifier: Apache-2.0
#include "base/text.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace kascade {
namespace {

TEST(QuoteText, PrintableStaysOtherIsEscaped) {
  EXPECT_EQ(quote_text("blk.0 ~"), "'blk.0 ~'");
  EXPECT_EQ(quote_text(""), "''");
  EXPECT_EQ(quote_text(std::string_view("\0\n\x7F\xC3\xA9\x1B[2J", 9)),
            "'\\x00\\x0a\\x7f\\xc3\\xa9\\x1b[2J'");
}

TEST(QuoteText, LongTextIsCutAndSaysSo) {
  EXPECT_EQ(quote_text("abcd", 4), "'abcd'");
  EXPECT_EQ(quote_text("abcde", 4), "'abcd'...");
}

TEST(Require, ThrowsTheTypeWithTheValues) {
  EXPECT_NO_THROW(require<BadFile>(true, "{}", 1));
  try {
    require<Unsupported>(1 + 1 == 3, "x: expected {}, got {}", 3, 2);
    FAIL() << "no exception";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_STREQ(error.what(), "x: expected 3, got 2");
  }
}

TEST(CheckedArithmetic, NamesOverflow) {
  uint64_t result = 0;
  EXPECT_TRUE(checked_mul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1, &result));
  EXPECT_EQ(result, 0xFFFFFFFF00000000ull);
  EXPECT_FALSE(checked_mul(uint64_t{1} << 32, uint64_t{1} << 32, &result));
  EXPECT_TRUE(checked_add(~uint64_t{0} - 1, 1, &result));
  EXPECT_FALSE(checked_add(~uint64_t{0}, 1, &result));
}

}  // namespace
}  // namespace kascade
