// SPDX-License-Identifier: Apache-2.0
// Drawing tokens: which may be drawn, by sorting on the host, and how often.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/cuda/test/device_test.h"
#include "ops/cuda/sample.h"

namespace kascade::cuda_test {
namespace {

using cuda::SampleRow;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int32_t> draw(const std::vector<std::vector<float>>& rows,
                          const std::vector<SampleRow>& settings) {
  std::vector<float> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  const DeviceBuffer logits = DeviceBuffer::of(all), how = DeviceBuffer::of(settings),
                     tokens(rows.size() * 4);
  cuda::sample(logits.as<float>(), static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size()),
               how.as<SampleRow>(), tokens.as<int32_t>(), nullptr);
  return tokens.download<int32_t>(rows.size());
}

/// The smallest and the largest token that may be drawn: random bits of all zeros and all ones name them.
struct Bounds {
  int32_t first, last;
};
Bounds bounds(const std::vector<float>& row, const SampleRow& how) {
  std::vector<int32_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
  if (how.top_k > 0 && static_cast<size_t>(how.top_k) < order.size()) order.resize(how.top_k);
  const auto weight = [&](int32_t i) {
    return std::round(std::exp2((double{row[i]} - double{row[order[0]]}) * double{how.scale}) * 0x1p40);
  };
  while (!order.empty() && weight(order.back()) == 0) order.pop_back();
  if (how.top_p < 1) {
    double total = 0, mass = 0;
    for (const int32_t i : order) total += weight(i);
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || mass < how.top_p * total)) mass += weight(order[kept++]);
    order.resize(kept);
  }
  return {*std::min_element(order.begin(), order.end()), *std::max_element(order.begin(), order.end())};
}

void test_kept_tokens() {
  Random random(5);
  for (const int vocabulary : {1, 2, 31, 1000, 1024, 1025, 5000, 151936}) {
    std::vector<float> plain(vocabulary), ties(vocabulary), equal(vocabulary, 3.5f), ramp(vocabulary);
    for (int i = 0; i < vocabulary; ++i) {
      plain[i] = 3 * random.normal();
      ties[i] = std::floor(2 * random.normal());
      ramp[i] = static_cast<float>(-i) / 64;
    }
    std::vector<float> holes = plain;
    for (int i = 0; i < vocabulary; i += 2) holes[i] = -kInfinity;
    if (vocabulary == 1) holes[0] = 1;
    for (const auto* row : {&plain, &ties, &equal, &ramp, &holes})
      // Cuts of irregular shares, which rounding of an exponential does not move across a token.
      for (const auto& [k, p] : {std::pair{0, 1.0},
                                 {1, 1.0},
                                 {5, 1.0},
                                 {40, 1.0},
                                 {0, 0.1234567},
                                 {0, 0.7654321},
                                 {40, 0.7654321},
                                 {7, 1e-9},
                                 {vocabulary, 0.51234567}}) {
        if (row == &equal && p < 1 && k == 0) continue;  // checked by count below
        SampleRow low{.scale = 1.3f, .top_k = k, .top_p = p, .random = 0}, high = low;
        high.random = ~uint64_t{0};
        current = text("sample, vocabulary %d, row %d, top_k %d, top_p %g", vocabulary,
                       int(row == &plain   ? 0
                           : row == &ties  ? 1
                           : row == &equal ? 2
                           : row == &ramp  ? 3
                                           : 4),
                       k, p);
        const auto got = draw({*row, *row}, {low, high});
        const Bounds wanted = bounds(*row, low);
        EXPECT(got[0] == wanted.first && got[1] == wanted.last, "drew %d and %d, expected %d and %d", got[0],
               got[1], wanted.first, wanted.last);
      }
    current = text("sample, vocabulary %d, equal logits", vocabulary);
    const SampleRow half{.scale = 1, .top_p = 0.5, .random = ~uint64_t{0}};
    const int32_t last = draw({equal}, {half})[0];
    EXPECT(last == (vocabulary + 1) / 2 - 1, "half of the mass ends at %d", last);
  }
}

void test_frequencies() {
  current = "sample, frequencies";
  const std::vector<float> row = {0, 1, 2, -1, 0.5f, -kInfinity, 1.5f};
  constexpr int kDraws = 20000;
  Random random(9);
  std::vector<SampleRow> settings(kDraws);
  for (SampleRow& how : settings) how = {.scale = 1.44269504f / 0.7f, .top_k = 5, .random = random.bits()};
  const auto got = draw(std::vector<std::vector<float>>(kDraws, row), settings);
  std::vector<double> expected = {
      std::exp(0 / .7), std::exp(1 / .7), std::exp(2 / .7), 0, std::exp(.5 / .7), 0, std::exp(1.5 / .7)};
  const double total = std::accumulate(expected.begin(), expected.end(), 0.0);
  for (size_t i = 0; i < row.size(); ++i) {
    const double share = expected[i] / total;
    const double seen = static_cast<double>(std::count(got.begin(), got.end(), i)) / kDraws;
    // Five standard deviations.
    EXPECT(std::fabs(seen - share) <= 5 * std::sqrt(share * (1 - share) / kDraws),
           "token %zu: %g, expected %g", i, seen, share);
  }
}

void test_extremes() {
  current = "sample, extremes";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> good = {1, 5, 5, -2}, with_nan = {1, nan, 5, 0}, nothing(4, -kInfinity),
                           infinite = {0, kInfinity, 1, 1}, zeros = {-0.0f, 0.0f, -1, -0.0f};
  const SampleRow greedy, hot{.scale = 1e30f, .random = ~uint64_t{0}},
      cold{.scale = 1e-30f, .random = ~uint64_t{0}};
  const auto got = draw({good, with_nan, nothing, infinite, zeros, good, good},
                        {greedy, greedy, hot, hot, greedy, hot, cold});
  const std::vector<int32_t> expected = {1, -1, -1, -1, 0, 2, 3};
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT(got[i] == expected[i], "row %zu: %d, expected %d", i, got[i], expected[i]);
}

const Registered kTests[] = {{21, "sample: kept tokens", test_kept_tokens, "all"},
                             {21, "sample: frequencies", test_frequencies, "all"},
                             {21, "sample: extremes", test_extremes, "all sanitize"}};

}  // namespace
}  // namespace kascade::cuda_test
