// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "base/hash.h"
#include "kascade/calibrate.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using ::testing::HasSubstr;

constexpr int kLayers = 4, kHeads = 2;

PromptStatistics random_statistics(uint32_t seed, int layers = kLayers, int heads = kHeads) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0, 1);
  PromptStatistics out;
  out.layers = layers;
  out.kv_heads = heads;
  out.tiles = 10;
  out.tokens = 100 + seed;
  for (int i = 0; i < layers; ++i)
    for (int j = 0; j < layers; ++j)
      for (int n = 0; n < heads * heads; ++n) {
        const float value = i <= j ? uniform(random) : 0;
        out.similarity_min.push_back(value);
        out.similarity_mean.push_back(i <= j ? 1 - value / 4 : 0);
      }
  for (int i = 0; i < layers; ++i) out.importance.push_back(uniform(random));
  return out;
}

StatisticsSet set_of(std::initializer_list<uint32_t> prompts) {
  StatisticsSet set(kLayers, kHeads, "calibration A");
  for (const uint32_t prompt : prompts) set.insert(prompt, random_statistics(prompt));
  return set;
}

TEST(StatisticsSet, MeansOverPrompts) {
  const StatisticsSet set = set_of({3, 7});
  const PromptStatistics a = random_statistics(3), b = random_statistics(7);
  const HeadSimilarity min = set.similarity(Aggregation::kMin), mean = set.similarity(Aggregation::kMean);
  for (size_t i = 0; i < a.similarity_min.size(); ++i) {
    EXPECT_NEAR(min.values[i], (static_cast<double>(a.similarity_min[i]) + b.similarity_min[i]) / 2, 1e-11);
    EXPECT_NEAR(mean.values[i], (static_cast<double>(a.similarity_mean[i]) + b.similarity_mean[i]) / 2,
                1e-11);
  }
  EXPECT_NEAR(set.importance()[2], (static_cast<double>(a.importance[2]) + b.importance[2]) / 2, 1e-11);
  EXPECT_EQ(set.prompts(), 2);
  EXPECT_EQ(set.tokens(), 210);
  EXPECT_TRUE(set.contains(7));
  EXPECT_FALSE(set.contains(4));
}

TEST(StatisticsSet, OrderOfPromptsDoesNotMatter) {
  EXPECT_EQ(set_of({1, 2, 3, 4, 5}).serialize(), set_of({4, 2, 5, 1, 3}).serialize());
}

TEST(StatisticsSet, ResumesWhereItStopped) {
  const StatisticsSet whole = set_of({1, 2, 3, 4});
  StatisticsSet resumed =
      StatisticsSet::parse(set_of({3, 1}).serialize(), "S", kLayers, kHeads, "calibration A");
  for (const uint32_t prompt : {1, 2, 3, 4})
    if (!resumed.contains(prompt)) resumed.insert(prompt, random_statistics(prompt));
  EXPECT_EQ(resumed.serialize(), whole.serialize());
  EXPECT_EQ(resumed.similarity(Aggregation::kMin).values, whole.similarity(Aggregation::kMin).values);
  EXPECT_EQ(resumed.tokens(), whole.tokens());
}

TEST(StatisticsSet, AnEmptySetIsStoredToo) {
  const StatisticsSet empty =
      StatisticsSet::parse(set_of({}).serialize(), "S", kLayers, kHeads, "calibration A");
  EXPECT_EQ(empty.prompts(), 0);
  EXPECT_THROW(empty.similarity(Aggregation::kMin), BadArgument);
  EXPECT_THROW(empty.importance(), BadArgument);
}

TEST(StatisticsSet, RefusesWhatCannotBe) {
  StatisticsSet set = set_of({1});
  EXPECT_THROW(set.insert(1, random_statistics(1)), BadArgument);
  EXPECT_THROW(set.insert(-1, random_statistics(1)), BadArgument);
  EXPECT_THROW(set.insert(2, random_statistics(2, kLayers + 1)), BadArgument);
  EXPECT_THROW(set.insert(2, random_statistics(2, kLayers, kHeads + 1)), BadArgument);
  const auto spoiled = [](auto&& change) {
    PromptStatistics statistics = random_statistics(2);
    change(statistics);
    return statistics;
  };
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.similarity_min[5] = kNaN; })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.similarity_mean[5] = 1.5F; })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.similarity_mean[5] = -0.5F; })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.importance[1] = 2.5F; })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.importance.pop_back(); })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.similarity_min.pop_back(); })), BadArgument);
  EXPECT_THROW(set.insert(2, spoiled([&](auto& s) { s.tokens = -1; })), BadArgument);
  EXPECT_EQ(set.serialize(), set_of({1}).serialize());  // a refused prompt leaves nothing
  EXPECT_THROW(StatisticsSet(0, 1, ""), BadArgument);
}

std::string error_of(const std::string& bytes, int layers = kLayers, int heads = kHeads,
                     const std::string& identity = "calibration A") {
  try {
    StatisticsSet::parse(bytes, "S", layers, heads, identity);
  } catch (const BadFile& error) {
    return error.what();
  }
  ADD_FAILURE() << "no BadFile";
  return {};
}

TEST(StatisticsSet, DamagedFilesNameTheField) {
  const std::string good = set_of({1, 2}).serialize();
  EXPECT_THAT(error_of(""), HasSubstr("S: field 'magic': expected 'KASCSTAT'"));
  EXPECT_THAT(error_of("{\"format\": 1}"), HasSubstr("field 'magic'"));
  EXPECT_THAT(error_of(good, kLayers + 1), HasSubstr("field 'layers': expected 5, got 4"));
  EXPECT_THAT(error_of(good, kLayers, 3), HasSubstr("field 'kv_heads': expected 3, got 2"));
  EXPECT_THAT(
      error_of(good, kLayers, kHeads, "calibration B"),
      HasSubstr("field 'identity': expected 'calibration B' (this calibration), got 'calibration A'"));
  std::string version = good;
  version[8] = 9;
  EXPECT_THAT(error_of(version), HasSubstr("field 'version': expected 1, got 9"));
  std::string length = good;
  length.replace(20, 8, 8, '\xff');  // an identity of 2^64 - 1 bytes
  EXPECT_THAT(error_of(length), HasSubstr("field 'identity'"));
  std::string count = good;
  count.replace(28 + 13, 8, 8, '\x7f');
  EXPECT_THAT(error_of(count), HasSubstr("field 'prompts': expected at most"));
  EXPECT_THAT(error_of(good + "x"), HasSubstr("more bytes"));
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_THROW(StatisticsSet::parse(good.substr(0, size), "S", kLayers, kHeads, "calibration A"), BadFile)
        << size;
  for (size_t i = 0; i < good.size(); ++i) {  // the checksum sees every bit
    std::string flipped = good;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    EXPECT_THROW(StatisticsSet::parse(flipped, "S", kLayers, kHeads, "calibration A"), BadFile) << i;
  }
}

// The bytes with 8 of them replaced at a place, and the checksum that belongs to them.
std::string forged(std::string bytes, size_t at, int64_t value) {
  const auto put = [&](size_t place, uint64_t bits) {
    for (size_t i = 0; i < 8; ++i) bytes[place + i] = static_cast<char>(bits >> (8 * i) & 0xFF);
  };
  put(at, static_cast<uint64_t>(value));
  const size_t end = bytes.size() - 8;
  put(end, fnv1a(std::as_bytes(std::span(bytes)).first(end)));
  return bytes;
}

TEST(StatisticsSet, WhatCannotBeIsRefusedEvenWithAChecksum) {
  const std::string good = set_of({1, 2}).serialize();
  const size_t prompts_at = 28 + 13 + 8, tokens_at = prompts_at + 2 * 8, min_at = tokens_at + 8;
  EXPECT_EQ(StatisticsSet::parse(forged(good, tokens_at, 7), "S", kLayers, kHeads, "calibration A").tokens(),
            7);
  EXPECT_THAT(error_of(forged(good, prompts_at + 8, 1)), HasSubstr("field 'prompts[1]': expected above 1"));
  EXPECT_THAT(error_of(forged(good, prompts_at, -1)), HasSubstr("field 'prompts[0]'"));
  EXPECT_THAT(error_of(forged(good, tokens_at, -1)), HasSubstr("field 'tokens'"));
  EXPECT_THAT(error_of(forged(good, tokens_at, INT64_MAX)), HasSubstr("field 'tokens'"));
  EXPECT_THAT(error_of(forged(good, min_at + 8, INT64_MAX)), HasSubstr("field 'similarity_min[1]'"));
  EXPECT_THAT(error_of(forged(good, min_at, INT64_MIN)), HasSubstr("field 'similarity_min[0]'"));
  EXPECT_THAT(error_of(forged(good, good.size() - 16, INT64_MAX)), HasSubstr("field 'importance[3]'"));
}

TEST(Aggregation, Names) {
  EXPECT_EQ(aggregation_from_name("min"), Aggregation::kMin);
  EXPECT_EQ(aggregation_from_name("mean"), Aggregation::kMean);
  EXPECT_THROW(aggregation_from_name("max"), BadArgument);
}

}  // namespace
}  // namespace kascade
