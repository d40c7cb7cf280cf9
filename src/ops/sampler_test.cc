// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>

#include "kascade/error.h"
#include "ops/ops_test_util.h"

namespace kascade {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kSeeds = 10000;

// How often each token comes first, over 10,000 seeds.
std::map<int32_t, int> first_tokens(SamplingSettings settings, const std::vector<float>& logits) {
  std::map<int32_t, int> counts;
  for (int seed = 0; seed < kSeeds; ++seed) {
    settings.seed = static_cast<uint64_t>(seed);
    Sampler sampler(settings);
    ++counts[sampler.sample(logits)];
  }
  return counts;
}

// Counts of a token of probability p lie within 5 standard deviations (one failure in a million).
void expect_share(const std::map<int32_t, int>& counts, int32_t token, double p) {
  const auto found = counts.find(token);
  const int count = found == counts.end() ? 0 : found->second;
  EXPECT_NEAR(count, p * kSeeds, 5 * std::sqrt(p * (1 - p) * kSeeds) + 1e-9) << "token " << token;
}

std::vector<float> logs(std::initializer_list<double> probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

TEST(Sampler, FrequenciesAreTheProbabilities) {
  const auto counts = first_tokens({.temperature = 1}, logs({0.1, 0.5, 0.05, 0.35}));
  expect_share(counts, 0, 0.1);
  expect_share(counts, 1, 0.5);
  expect_share(counts, 2, 0.05);
  expect_share(counts, 3, 0.35);
}

TEST(Sampler, TemperatureSharpensAndFlattens) {
  // 0.2 : 0.8 becomes 0.04 : 0.64 at 1/2, and 1 : 2 at 2.
  auto counts = first_tokens({.temperature = 0.5}, logs({0.2, 0.8}));
  expect_share(counts, 0, 0.04 / 0.68);
  counts = first_tokens({.temperature = 2}, logs({0.2, 0.8}));
  expect_share(counts, 0, 1.0 / 3);
}

TEST(Sampler, GreedyTinyAndHugeTemperatures) {
  const std::vector<float> logits = {1, 3, 3, -kInf, 2};
  Sampler greedy({.temperature = 0});
  EXPECT_EQ(greedy.sample(logits), 1);
  // The two largest tie: at any tiny temperature they alone remain, at even odds.
  for (const double tiny : {1e-300, std::numeric_limits<double>::denorm_min(), 1e-6}) {
    const auto counts = first_tokens({.temperature = tiny}, logits);
    EXPECT_EQ(counts.size(), 2u);
    expect_share(counts, 1, 0.5);
  }
  // At a huge one all finite logits are alike; an excluded token stays excluded.
  const auto counts = first_tokens({.temperature = 1e308}, logits);
  EXPECT_EQ(counts.count(3), 0u);
  for (const int32_t token : {0, 1, 2, 4}) expect_share(counts, token, 0.25);
}

TEST(Sampler, TopKKeepsTheSmallerIndexOnTies) {
  const auto counts = first_tokens({.temperature = 1, .top_k = 2}, logs({0.1, 0.3, 0.3, 0.3}));
  EXPECT_EQ(counts.size(), 2u);
  expect_share(counts, 1, 0.5);
  expect_share(counts, 2, 0.5);
  const auto all = first_tokens({.temperature = 1, .top_k = 99}, logs({0.25, 0.75}));
  expect_share(all, 0, 0.25);
  const auto one = first_tokens({.temperature = 1, .top_k = 1}, logs({0.25, 0.75}));
  EXPECT_EQ(one.size(), 1u);
}

TEST(Sampler, TheTokenThatCrossesTheMassStays) {
  // 0.5 is short of 0.6; 0.5 + 0.3 crosses it: two tokens, renormalised.
  auto counts = first_tokens({.temperature = 1, .top_p = 0.6}, logs({0.05, 0.3, 0.5, 0.15}));
  EXPECT_EQ(counts.size(), 2u);
  expect_share(counts, 2, 0.625);
  expect_share(counts, 1, 0.375);
  counts = first_tokens({.temperature = 1, .top_p = 1e-9}, logs({0.2, 0.8}));
  EXPECT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts.begin()->first, 1);
}

TEST(Sampler, TopPOverAFlatRowOfHundreds) {
  // 700 equal tokens: half the mass is the first 350 by index.
  const std::vector<float> logits(700, 1.5f);
  const auto counts = first_tokens({.temperature = 1, .top_p = 0.5}, logits);
  EXPECT_LE(counts.rbegin()->first, 350);
  int low = 0;
  for (const auto& [token, count] : counts) low += token < 175 ? count : 0;
  EXPECT_NEAR(low, kSeeds / 2, 5 * std::sqrt(kSeeds / 4.0));
}

TEST(Sampler, TopPIsAppliedAfterTopK) {
  // Of the two kept, 0.4 and 0.3, the first holds 0.4 / 0.7 = 0.57 of the mass.
  const auto counts = first_tokens({.temperature = 1, .top_k = 2, .top_p = 0.56}, logs({0.1, 0.4, 0.3, 0.2}));
  EXPECT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts.begin()->first, 1);
}

TEST(Sampler, SameSeedSameTokens) {
  const std::vector<float> logits = random_floats(5000, 1, 2);
  const SamplingSettings settings = {.temperature = 0.8, .top_k = 100, .top_p = 0.95, .seed = 42};
  Sampler a(settings);
  Sampler b(settings);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 50; ++i) {
    tokens.push_back(a.sample(logits));
    EXPECT_EQ(b.sample(logits), tokens.back());
  }
  EXPECT_GT(std::count(tokens.begin(), tokens.end(), tokens[0]), 0);
  EXPECT_LT(std::count(tokens.begin(), tokens.end(), tokens[0]), 50);
}

TEST(Sampler, NonFiniteLogitsAreAnErrorNotTokenZero) {
  for_each_isa([] {
    for (const double temperature : {0.0, 1.0}) {
      Sampler sampler({.temperature = temperature});
      EXPECT_THROW(sampler.sample(std::vector<float>{0, 1, kNan}), BadArgument);
      EXPECT_THROW(sampler.sample(std::vector<float>{-kInf, -kInf}), BadArgument);
      EXPECT_THROW(sampler.sample(std::vector<float>{0, kInf}), BadArgument);
      EXPECT_THROW(sampler.sample({}), BadArgument);
      EXPECT_EQ(sampler.sample(std::vector<float>{-kInf, 1, -kInf}), 1);
    }
  });
}

TEST(Sampler, SettingsAreChecked) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const auto message = [](const SamplingSettings& settings) -> std::string {
    try {
      Sampler sampler(settings);
    } catch (const BadArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  for (const double bad : {-1.0, -1e-300, nan, inf, -inf})
    EXPECT_NE(message({.temperature = bad}).find("temperature"), std::string::npos) << bad;
  EXPECT_NE(message({.top_k = -1}).find("top_k"), std::string::npos);
  for (const double bad : {0.0, -0.5, 1.0001, nan, inf})
    EXPECT_NE(message({.top_p = bad}).find("top_p"), std::string::npos) << bad;
  EXPECT_EQ(message({}), "accepted");
}

}  // namespace
}  // namespace kascade
