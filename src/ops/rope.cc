// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "base/check.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {
namespace {

void require_positive(double value, const char* name) {
  require<BadArgument>(std::isfinite(value) && value > 0, "rope: {}: expected a positive number, got {}",
                       name, value);
}

// Llama 3: long wavelengths are slowed by the factor, short ones kept, those between blended linearly in the
// number of turns that fit into the original context.
double llama3_frequency(double frequency, const RopeFrequencyScaling& scaling) {
  const double turns = scaling.original_context * frequency / (2 * std::numbers::pi);
  if (turns < scaling.low_freq_factor) return frequency / scaling.factor;
  if (turns > scaling.high_freq_factor) return frequency;
  const double kept =
      (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - kept) * frequency / scaling.factor + kept * frequency;
}

}  // namespace

std::vector<double> rope_inverse_frequencies(int head_dim, double theta, const RopeFrequencyScaling& scaling,
                                             std::span<const float> divisors) {
  require<BadArgument>(head_dim > 0 && head_dim % 2 == 0,
                       "rope: head_dim: expected a positive even number, got {}", head_dim);
  require_positive(theta, "theta");
  using Kind = RopeFrequencyScaling::Kind;
  if (scaling.kind != Kind::kNone) require_positive(scaling.factor, "factor");
  if (scaling.kind == Kind::kLlama3) {
    require_positive(scaling.low_freq_factor, "low_freq_factor");
    require_positive(scaling.original_context, "original_context");
    require<BadArgument>(
        std::isfinite(scaling.high_freq_factor) && scaling.high_freq_factor > scaling.low_freq_factor,
        "rope: high_freq_factor: expected more than low_freq_factor {}, got {}", scaling.low_freq_factor,
        scaling.high_freq_factor);
  }
  const auto half = static_cast<size_t>(head_dim / 2);
  require<BadArgument>(divisors.empty() || divisors.size() == half, "rope: divisors: expected {}, got {}",
                       half, divisors.size());

  std::vector<double> frequencies(half);
  for (size_t i = 0; i < half; ++i) {
    double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
    if (scaling.kind == Kind::kLinear) frequency /= scaling.factor;
    if (scaling.kind == Kind::kLlama3) frequency = llama3_frequency(frequency, scaling);
    if (!divisors.empty()) {
      require_positive(static_cast<double>(divisors[i]), "divisor");
      frequency /= static_cast<double>(divisors[i]);
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

Rope::Rope(std::vector<double> inverse_frequencies, bool adjacent)
    : half_(static_cast<int>(inverse_frequencies.size())),
      adjacent_(adjacent),
      inverse_frequencies_(std::move(inverse_frequencies)) {
  require<BadArgument>(half_ > 0, "rope: no frequencies");
}

void Rope::prepare(int64_t positions) {
  if (positions <= prepared_) return;
  const int64_t target = std::max(positions, 2 * prepared_);
  cos_.resize(static_cast<size_t>(target * half_));
  sin_.resize(static_cast<size_t>(target * half_));
  for (int64_t position = prepared_; position < target; ++position) {
    for (int i = 0; i < half_; ++i) {
      const double angle = static_cast<double>(position) * inverse_frequencies_[static_cast<size_t>(i)];
      const auto at = static_cast<size_t>(position * half_ + i);
      cos_[at] = static_cast<float>(std::cos(angle));
      sin_[at] = static_cast<float>(std::sin(angle));
    }
  }
  prepared_ = target;
}

void Rope::apply(float* x, std::span<const int32_t> positions, int heads, int64_t row_stride,
                 ThreadPool& pool) const {
  for (const int32_t position : positions)
    require<BadArgument>(position >= 0 && position < prepared_, "rope: position: expected 0..{}, got {}",
                         prepared_ - 1, position);
  constexpr int64_t kRowsPerIndex = 8;
  const OpKernels& kernels = op_kernels();
  const auto rows = static_cast<int64_t>(positions.size());
  pool.parallel_for((rows + kRowsPerIndex - 1) / kRowsPerIndex, [&](int64_t index, int) {
    const int64_t end = std::min(rows, (index + 1) * kRowsPerIndex);
    for (int64_t row = index * kRowsPerIndex; row < end; ++row) {
      const int64_t at = int64_t{positions[static_cast<size_t>(row)]} * half_;
      for (int head = 0; head < heads; ++head)
        kernels.rotate(x + row * row_stride + int64_t{head} * 2 * half_, cos_.data() + at, sin_.data() + at,
                       half_, adjacent_);
    }
  });
}

}  // namespace kascade
