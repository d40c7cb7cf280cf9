// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): one 64-bit state, any seed is a good one.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// In [0, 1), 53 bits.
double uniform(uint64_t random) { return static_cast<double>(random >> 11) * 0x1p-53; }

}  // namespace

Sampler::Sampler(const SamplingSettings& settings) : settings_(settings), state_(settings.seed) {
  require<BadArgument>(std::isfinite(settings.temperature) && settings.temperature >= 0,
                       "temperature: expected a finite number >= 0, got {}", settings.temperature);
  require<BadArgument>(settings.top_k >= 0, "top_k: expected >= 0, got {}", settings.top_k);
  require<BadArgument>(settings.top_p > 0 && settings.top_p <= 1,
                       "top_p: expected a number in (0, 1], got {}", settings.top_p);
}

uint64_t Sampler::draw() { return next_random(state_); }

int32_t Sampler::sample(std::span<const float> logits, const SamplingSettings& settings, uint64_t random) {
  const OpKernels& kernels = op_kernels();
  const auto count = static_cast<int64_t>(logits.size());
  float max = 0;
  require<BadArgument>(kernels.row_max(logits.data(), count, &max), "sampling: a logit is NaN");
  require<BadArgument>(std::isfinite(max), "sampling: the largest of {} logits is {}", count, max);
  if (settings.temperature == 0) return static_cast<int32_t>(kernels.find(logits.data(), count, max));

  // Candidates, heaviest first as far as needed; ties go to the smaller index.
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto heavier = [logits](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)];
    const float y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const auto at = [this](int64_t i) { return order_.begin() + i; };
  int64_t kept = count;
  if (settings.top_k > 0 && settings.top_k < count) {
    kept = settings.top_k;
    std::nth_element(at(0), at(kept - 1), order_.end(), heavier);
  }
  weights_.resize(static_cast<size_t>(kept));
  const auto weigh = [&](int64_t i) {
    const double difference =
        static_cast<double>(logits[static_cast<size_t>(order_[static_cast<size_t>(i)])]) -
        static_cast<double>(max);
    // A difference of 0 stays 0 at any temperature; -inf / T is -inf.
    return std::exp(difference / settings.temperature);
  };
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) total += weights_[static_cast<size_t>(i)] = weigh(i);

  if (settings.top_p < 1) {
    // Sort a growing head of the candidates until it holds the mass; the one that crosses stays.
    const double wanted = settings.top_p * total;
    double mass = 0;
    int64_t sorted = 0;
    int64_t nucleus = kept;
    for (int64_t head = 256; sorted < kept && nucleus == kept; head *= 4) {
      const int64_t end = std::min(head, kept);
      if (end < kept) std::nth_element(at(sorted), at(end - 1), at(kept), heavier);
      std::sort(at(sorted), at(end), heavier);
      for (int64_t i = sorted; i < end; ++i) {
        mass += weights_[static_cast<size_t>(i)] = weigh(i);
        if (mass >= wanted) {
          nucleus = i + 1;
          break;
        }
      }
      sorted = end;
    }
    kept = nucleus;
    total = mass;
  }

  const double target = uniform(random) * total;
  double mass = 0;
  int64_t chosen = 0;
  for (int64_t i = 0; i < kept; ++i) {
    const double weight = weights_[static_cast<size_t>(i)];
    if (weight == 0) continue;
    chosen = i;  // rounding may leave the last candidate's mass short of target
    mass += weight;
    if (mass > target) break;
  }
  return order_[static_cast<size_t>(chosen)];
}

}  // namespace kascade
