// SPDX-License-Identifier: Apache-2.0
#include "base/hash.h"

#include <gtest/gtest.h>

#include <string_view>

namespace kascade {
namespace {

uint64_t hash_of(std::string_view text, uint64_t seed = kFnvOffset) {
  return fnv1a({reinterpret_cast<const std::byte*>(text.data()), text.size()}, seed);
}

// Published test vectors of FNV-1a.
TEST(Fnv1a, PublishedVectors) {
  EXPECT_EQ(hash_of(""), 0xcbf29ce484222325ull);
  EXPECT_EQ(hash_of("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(hash_of("foobar"), 0x85944171f73967e8ull);
}

TEST(Fnv1a, SeedContinues) { EXPECT_EQ(hash_of("bar", hash_of("foo")), hash_of("foobar")); }

TEST(HashHex, SixteenDigits) {
  EXPECT_EQ(hash_hex(0), "0000000000000000");
  EXPECT_EQ(hash_hex(0xABCDEF), "0000000000abcdef");
  EXPECT_EQ(hash_hex(~0ull), "ffffffffffffffff");
}

}  // namespace
}  // namespace kascade
