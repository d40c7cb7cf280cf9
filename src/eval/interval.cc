// SPDX-License-Identifier: Apache-2.0
#include "eval/interval.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "eval/random.h"

namespace kascade {
namespace {

constexpr int kResamples = 1000;
constexpr double kNormal95 = 1.959963984540054;  // two-sided 95 % quantile of the normal distribution

}  // namespace

Figure bootstrap_mean(std::span<const double> values) {
  if (values.empty()) return {};
  const auto n = static_cast<int64_t>(values.size());
  double sum = 0;
  for (const double value : values) sum += value;
  const double mean = sum / static_cast<double>(n);
  if (n == 1) return {mean, mean, mean};

  SplitMix random(0x4B41534341444521ull);
  std::vector<double> means(kResamples);
  for (double& resampled : means) {
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += values[random.below(n)];
    resampled = total / static_cast<double>(n);
  }
  std::sort(means.begin(), means.end());
  // The 2.5th and 97.5th percentiles; the mean itself never lies outside its interval.
  return {mean, std::min(mean, means[kResamples / 40 - 1]),
          std::max(mean, means[kResamples - kResamples / 40])};
}

Figure wilson_share(int64_t hits, int64_t count) {
  if (count == 0) return {0, 0, 1};
  const double n = static_cast<double>(count);
  const double share = static_cast<double>(hits) / n;
  const double z2 = kNormal95 * kNormal95;
  const double centre = (share + z2 / (2 * n)) / (1 + z2 / n);
  const double half = kNormal95 / (1 + z2 / n) * std::sqrt(share * (1 - share) / n + z2 / (4 * n * n));
  return {share, std::max(0.0, std::min(share, centre - half)),
          std::min(1.0, std::max(share, centre + half))};
}

}  // namespace kascade
