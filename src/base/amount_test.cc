// SPDX-License-Identifier: Apache-2.0
#include "base/amount.h"

#include <gtest/gtest.h>

#include "kascade/error.h"

namespace kascade {
namespace {

TEST(Amount, CountsWithAndWithoutUnits) {
  EXPECT_EQ(parse_count("1", "n"), 1);
  EXPECT_EQ(parse_count("4096", "n"), 4096);
  EXPECT_EQ(parse_count("128K", "n"), 131072);
  EXPECT_EQ(parse_count("1M", "n"), 1048576);
  EXPECT_EQ(parse_count("2147483647", "n"), INT32_MAX);
}

TEST(Amount, CountsThatAreNone) {
  for (const char* text : {"", "K", "0", "-4", "+4", "4k", "4KB", "1.5K", " 4", "4 ", "2147483648", "2048M",
                           "99999999999999999999", "0x10"})
    EXPECT_THROW(parse_count(text, "n"), BadArgument) << text;
}

TEST(Amount, BytesInBothSystems) {
  EXPECT_EQ(parse_bytes("17", "n"), 17u);
  EXPECT_EQ(parse_bytes("17B", "n"), 17u);
  EXPECT_EQ(parse_bytes("80GB", "n"), 80000000000u);
  EXPECT_EQ(parse_bytes("80GiB", "n"), 85899345920u);
  EXPECT_EQ(parse_bytes("1.5KB", "n"), 1500u);
  EXPECT_EQ(parse_bytes("2TB", "n"), 2000000000000u);
}

TEST(Amount, BytesThatAreNone) {
  for (const char* text : {"", "GB", "0", "0GB", "-1GB", "80G", "80gb", "80 GB", "80GBs", "nan", "inf",
                           "1e300", "99999999999TB", "80iB"})
    EXPECT_THROW(parse_bytes(text, "n"), BadArgument) << text;
}

}  // namespace
}  // namespace kascade
