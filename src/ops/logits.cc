// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "base/check.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {
namespace {

int64_t size_of(std::span<const float> logits) { return static_cast<int64_t>(logits.size()); }

}  // namespace

double log_sum_exp(std::span<const float> logits) {
  const OpKernels& kernels = op_kernels();
  float max = 0;
  if (!kernels.row_max(logits.data(), size_of(logits), &max)) return std::numeric_limits<double>::quiet_NaN();
  // All -inf (or none), or a +inf, which outweighs the rest.
  if (std::isinf(max)) return static_cast<double>(max);
  return static_cast<double>(max) + std::log(kernels.sum_exp(logits.data(), size_of(logits), max));
}

double kl_divergence(std::span<const float> p_logits, std::span<const float> q_logits) {
  require<BadArgument>(p_logits.size() == q_logits.size() && !p_logits.empty(),
                       "kl_divergence: expected two rows of one size, got {} and {}", p_logits.size(),
                       q_logits.size());
  const OpKernels& kernels = op_kernels();
  const double p_sum = log_sum_exp(p_logits);
  const double q_sum = log_sum_exp(q_logits);
  if (!std::isfinite(p_sum) || !std::isfinite(q_sum)) return std::numeric_limits<double>::quiet_NaN();
  float p_max = 0;
  kernels.row_max(p_logits.data(), size_of(p_logits), &p_max);
  // sum over i of p_i (p_logit_i - q_logit_i) - (p_sum - q_sum), with p_i = exp(p_logit_i - p_max) /
  // exp(p_sum - p_max).
  const double weighted =
      kernels.sum_exp_difference(p_logits.data(), q_logits.data(), size_of(p_logits), p_max);
  return weighted / std::exp(p_sum - static_cast<double>(p_max)) - (p_sum - q_sum);
}

int32_t arg_max(std::span<const float> logits) {
  require<BadArgument>(!logits.empty(), "arg_max: no logits");
  const OpKernels& kernels = op_kernels();
  float max = 0;
  require<BadArgument>(kernels.row_max(logits.data(), size_of(logits), &max), "arg_max: a logit is NaN");
  return static_cast<int32_t>(kernels.find(logits.data(), size_of(logits), max));
}

}  // namespace kascade
