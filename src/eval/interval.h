// SPDX-License-Identifier: Apache-2.0
// Means with 95 % intervals.
#pragma once

#include <cstdint>
#include <span>

namespace kascade {

/// A mean and its 95 % interval.
struct Figure {
  double value = 0;
  double low = 0;
  double high = 0;
};

/// Mean and percentile bootstrap over the values: 1,000 resamples, fixed seed, so the same values give the
/// same interval. One value gives low = high = value; none gives zeros.
Figure bootstrap_mean(std::span<const double> values);

/// A share with its Wilson score interval. count >= 0, 0 <= hits <= count; count 0 gives {0, 0, 1}.
Figure wilson_share(int64_t hits, int64_t count);

}  // namespace kascade
