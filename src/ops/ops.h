// SPDX-License-Identifier: Apache-2.0
// The model's operators besides attention, on the CPU. Rows are tokens; every matrix is row-major with its
// last dimension contiguous. Nothing here allocates after construction; no result depends on the number of
// threads, on the other rows of a call, or (within one path) on how many rows there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kascade/thread_pool.h"
#include "kascade/weight.h"

namespace kascade {

/// Numeric mode. kF32: weights dequantised once to fp32, fp32 activations (the reference). kFast: weights
/// stay as stored; decode multiplies them as such (activations in 8-bit blocks), prefill dequantises a panel
/// at a time.
enum class Compute : uint8_t { kF32, kFast };

/// The two ways to multiply. kDecode: few rows (1..8), bound by reading the weights. kPrefill: any number of
/// rows. They may differ in the last bits, so callers choose by phase, never by row count.
enum class MatmulPath : uint8_t { kDecode, kPrefill };

/// y = x W^T (+ bias) for one stored matrix. Immutable and shared between threads after construction.
class Linear {
 public:
  /// weight [outputs, inputs]; bias [outputs] or null (data == nullptr). Views must outlive the object.
  Linear(const WeightTensor& weight, const WeightTensor& bias, Compute compute);
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;

  int64_t inputs() const;
  int64_t outputs() const;
  uint64_t owned_bytes() const;  // memory besides the mapped file

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<const Impl> impl_;
};

/// One product of a group: out [rows, outputs] with row stride out_stride; accumulate adds to what out holds.
struct LinearTask {
  const Linear* linear = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  bool accumulate = false;
};

/// Scratch of linear(): grows when first used with a larger problem, then is stable (no allocation in steady
/// state).
class LinearScratch {
 public:
  LinearScratch();
  ~LinearScratch();
  LinearScratch(LinearScratch&&) noexcept;
  struct Impl;
  Impl& impl() { return *impl_; }
  uint64_t bytes() const;

 private:
  std::unique_ptr<Impl> impl_;
};

/// All products of one input x [rows, inputs] (row stride x_stride): q, k, v at once; gate and up at once.
/// One parallel region for the group on the decode path.
void linear(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
            MatmulPath path, LinearScratch& scratch, ThreadPool& pool);

/// out[r] = x[r] * weight / sqrt(mean(x[r]^2) + epsilon); x and out may be the same.
void rms_norm(const float* x, int64_t rows, int64_t columns, int64_t x_stride, const float* weight,
              float epsilon, float* out, int64_t out_stride, ThreadPool& pool);

/// gate[i] = silu(gate[i]) * up[i].
void silu_multiply(float* gate, const float* up, int64_t rows, int64_t columns, int64_t stride,
                   ThreadPool& pool);

/// x[i] += y[i].
void add_rows(float* x, const float* y, int64_t rows, int64_t columns, int64_t x_stride, int64_t y_stride,
              ThreadPool& pool);

/// Rows of the embedding table as fp32: out[r] = table[ids[r]]. ids are checked by the caller.
void embed_rows(const WeightTensor& table, std::span<const int32_t> ids, float* out, int64_t out_stride,
                ThreadPool& pool);

/// Rescaling of rotary frequencies for a longer context. kLinear divides all by factor. kLlama3 divides those
/// whose wavelength exceeds original_context / low_freq_factor by factor, keeps those below original_context
/// / high_freq_factor, and interpolates between.
struct RopeFrequencyScaling {
  enum class Kind : uint8_t { kNone, kLinear, kLlama3 } kind = Kind::kNone;
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_context = 8192;  // tokens
};

/// theta^(-2i / head_dim) for i < head_dim / 2, scaled, then divided by divisors[i] where there are any
/// (GGUF's rope_freqs.weight). Throws BadArgument naming the value for an odd head_dim and anything not
/// positive and finite.
std::vector<double> rope_inverse_frequencies(int head_dim, double theta,
                                             const RopeFrequencyScaling& scaling = {},
                                             std::span<const float> divisors = {});

/// Rotary embedding. Angles are computed in fp64 (at position 131,071 an fp32 angle is off by 0.01 rad),
/// cosines and sines kept in fp32 for `positions` positions; grows by doubling in prepare(), never in
/// apply().
class Rope {
 public:
  /// inverse_frequencies [head_dim/2], scaling already applied. adjacent: pairs (2i, 2i+1); else (i, i +
  /// head_dim/2).
  Rope(std::vector<double> inverse_frequencies, bool adjacent);
  void prepare(int64_t positions);
  /// Rotates `heads` heads of each row in place; row r sits at position positions[r].
  void apply(float* x, std::span<const int32_t> positions, int heads, int64_t row_stride,
             ThreadPool& pool) const;

 private:
  int half_;
  bool adjacent_;
  int64_t prepared_ = 0;
  std::vector<double> inverse_frequencies_;
  std::vector<float> cos_, sin_;  // [positions, half]
};

/// log-sum-exp of a row of logits, accumulated in fp64; a NaN gives NaN.
double log_sum_exp(std::span<const float> logits);

/// KL(p || q) in nats of two rows of logits, and whether their arg-max agree.
double kl_divergence(std::span<const float> p_logits, std::span<const float> q_logits);
int32_t arg_max(std::span<const float> logits);  // the smaller index on ties

/// Sampling settings; temperature 0 = greedy.
struct SamplingSettings {
  double temperature = 0;  // >= 0, finite
  int32_t top_k = 0;       // 0 = off
  double top_p = 1;        // (0, 1]; the token that crosses the mass stays
  uint64_t seed = 0;
};

/// Draws tokens; the same seed, settings and logits give the same tokens on every machine of one instruction
/// set.
class Sampler {
 public:
  /// Throws BadArgument naming the field for negative, NaN or infinite settings.
  explicit Sampler(const SamplingSettings& settings);
  /// Throws BadArgument when a logit is NaN or all are -inf: never a silent token 0.
  int32_t sample(std::span<const float> logits) {
    return sample(logits, settings_, settings_.temperature == 0 ? 0 : draw());
  }
  /// With settings (checked by the caller) and bits of the caller's; allocates only for a longer row than
  /// ever.
  int32_t sample(std::span<const float> logits, const SamplingSettings& settings, uint64_t random);
  /// The next 64 uniform bits of the seed.
  uint64_t draw();

 private:
  SamplingSettings settings_;
  uint64_t state_;
  std::vector<int32_t> order_;
  std::vector<double> weights_;
};

}  // namespace kascade
