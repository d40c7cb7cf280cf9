// SPDX-License-Identifier: Apache-2.0
// Row operators: norms, activation functions, rotary embedding, conversions of activations, statistics of
// logits. A row's bits depend on the row alone.
#include <hwy/highway.h>
// After highway.h, which it needs.
#include <hwy/contrib/math/math-inl.h>

#include <cstdint>
#include <cstring>

#include "ops/isa_kernels.h"

namespace kascade::KASCADE_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

const hn::ScalableTag<float> df;
const hn::ScalableTag<double> dd;
using DF = decltype(df);
using VF = hn::Vec<DF>;
using VD = hn::Vec<decltype(dd)>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
constexpr int64_t kDoubleLanes = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<double>()));
const hn::Rebind<float, hn::ScalableTag<double>> df_half;

// Loads the first `count` < kLanes elements; the rest is `fill`.
VF load_part(const float* x, int64_t count, float fill) {
  HWY_ALIGN float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? x[i] : fill;
  return hn::Load(df, lanes);
}

// The same for doubles.
VD widen_part(const float* x, int64_t count, float fill) {
  HWY_ALIGN double lanes[kDoubleLanes];
  for (int64_t i = 0; i < kDoubleLanes; ++i) lanes[i] = static_cast<double>(i < count ? x[i] : fill);
  return hn::Load(dd, lanes);
}

void store_part(VF v, float* x, int64_t count) {
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, df, lanes);
  for (int64_t i = 0; i < count; ++i) x[i] = lanes[i];
}

// f(kDoubleLanes elements of x, widened; their index) for all of x, the last ones padded with fill.
template <class F>
HWY_INLINE void for_each_widened(const float* x, int64_t count, float fill, F f) {
  int64_t i = 0;
  for (; i + kDoubleLanes <= count; i += kDoubleLanes) f(hn::PromoteTo(dd, hn::LoadU(df_half, x + i)), i);
  if (i < count) f(widen_part(x + i, count - i, fill), i);
}

// x / (1 + exp(-x)). Below -88 the exponential would overflow; the value is below 1e-36 there and is kept at
// that.
HWY_INLINE VF silu(VF x) {
  const VF lowest = hn::Set(df, -88.0f);
  const VF bounded = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // a NaN stays
  return hn::Div(bounded, hn::Add(hn::Set(df, 1.0f), hn::Exp(df, hn::Neg(bounded))));
}

}  // namespace

void rms_norm(const float* x, int64_t columns, const float* weight, float epsilon, float* out) {
  VD squares = hn::Zero(dd);
  for_each_widened(x, columns, 0.0f, [&](VD v, int64_t) { squares = hn::MulAdd(v, v, squares); });
  const double mean = hn::GetLane(hn::SumOfLanes(dd, squares)) / static_cast<double>(columns);
  const auto scale =
      static_cast<float>(1.0 / hn::GetLane(hn::Sqrt(hn::Set(dd, mean + static_cast<double>(epsilon)))));
  const VF factor = hn::Set(df, scale);
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes)
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(df, x + i), factor), hn::LoadU(df, weight + i)), df, out + i);
  for (; i < columns; ++i) out[i] = x[i] * scale * weight[i];
}

void silu_multiply(float* gate, const float* up, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    hn::StoreU(hn::Mul(silu(hn::LoadU(df, gate + i)), hn::LoadU(df, up + i)), df, gate + i);
  if (i < count)
    store_part(hn::Mul(silu(load_part(gate + i, count - i, 0.0f)), load_part(up + i, count - i, 0.0f)),
               gate + i, count - i);
}

void add(float* x, const float* y, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    hn::StoreU(hn::Add(hn::LoadU(df, x + i), hn::LoadU(df, y + i)), df, x + i);
  for (; i < count; ++i) x[i] += y[i];
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, bool adjacent) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const VF c = hn::LoadU(df, cosines + i);
    const VF s = hn::LoadU(df, sines + i);
    VF a;
    VF b;
    if (adjacent) {
      hn::LoadInterleaved2(df, x + 2 * i, a, b);
    } else {
      a = hn::LoadU(df, x + i);
      b = hn::LoadU(df, x + half + i);
    }
    const VF rotated_a = hn::Sub(hn::Mul(a, c), hn::Mul(b, s));
    const VF rotated_b = hn::Add(hn::Mul(b, c), hn::Mul(a, s));
    if (adjacent) {
      hn::StoreInterleaved2(rotated_a, rotated_b, df, x + 2 * i);
    } else {
      hn::StoreU(rotated_a, df, x + i);
      hn::StoreU(rotated_b, df, x + half + i);
    }
  }
  for (; i < half; ++i) {
    float* first = adjacent ? x + 2 * i : x + i;
    float* second = adjacent ? first + 1 : x + half + i;
    const float a = *first;
    const float b = *second;
    *first = a * cosines[i] - b * sines[i];
    *second = b * cosines[i] + a * sines[i];
  }
}

void quantize_row(const float* x, int64_t columns, int8_t* q, float* scale, float* scaled_sum) {
  const hn::Rebind<int32_t, DF> di;
  const hn::Rebind<int8_t, DF> d8;
  const int64_t groups = columns / kGroup;
  for (int64_t group = 0; group < (groups + 3) / 4 * 4; ++group) {
    // The first 16 elements of a group, then 64 bytes on, the last 16 (QuantizedRow).
    int8_t* first = q + group / 4 * kStep + group % 4 * 16;
    if (group >= groups) {
      std::memset(first, 0, 16);
      std::memset(first + 64, 0, 16);
      scale[group] = 0;
      scaled_sum[group] = 0;
      continue;
    }
    const float* values = x + group * kGroup;
    VF largest = hn::Zero(df);
    VF poison = hn::Zero(df);  // NaN once a NaN or an infinity was seen
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const VF v = hn::LoadU(df, values + i);
      largest = hn::Max(largest, hn::Abs(v));
      poison = hn::MulAdd(v, hn::Zero(df), poison);
    }
    const float bad = hn::GetLane(hn::SumOfLanes(df, poison));
    if (bad != bad) {
      std::memset(first, 0, 16);
      std::memset(first + 64, 0, 16);
      scale[group] = bad;
      scaled_sum[group] = bad;
      continue;
    }
    const float max = hn::GetLane(hn::MaxOfLanes(df, largest));
    // Far below what matters in a model, and safely above where the inverse would overflow.
    const float step = max < 1e-30f ? 0.0f : max / 127.0f;
    const VF inverse = hn::Set(df, step > 0 ? 1.0f / step : 0.0f);
    hn::Vec<decltype(di)> total = hn::Zero(di);
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const auto rounded = hn::NearestInt(hn::Mul(hn::LoadU(df, values + i), inverse));
      total = hn::Add(total, rounded);
      hn::StoreU(hn::DemoteTo(d8, rounded), d8, i < 16 ? first + i : first + 64 + (i - 16));
    }
    scale[group] = step;
    scaled_sum[group] = scale[group] * static_cast<float>(hn::GetLane(hn::SumOfLanes(di, total)));
  }
}

bool row_max(const float* x, int64_t count, float* max) {
  VF largest = hn::Set(df, -__builtin_inff());
  VF poison = hn::Zero(df);  // NaN once a NaN was seen
  const auto add = [&](VF v) {
    poison = hn::IfThenElse(hn::IsNaN(v), v, poison);
    largest = hn::Max(largest, v);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add(hn::LoadU(df, x + i));
  if (i < count) add(load_part(x + i, count - i, -__builtin_inff()));
  // By hand: Highway's emulated MaxOfLanes knows nothing below the lowest finite value.
  HWY_ALIGN float lanes[kLanes];
  hn::Store(largest, df, lanes);
  *max = lanes[0];
  for (const float lane : lanes) *max = lane > *max ? lane : *max;
  return hn::AllFalse(df, hn::IsNaN(poison));
}

int64_t find(const float* x, int64_t count, float value) {
  const VF wanted = hn::Set(df, value);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const intptr_t lane = hn::FindFirstTrue(df, hn::Eq(hn::LoadU(df, x + i), wanted));
    if (lane >= 0) return i + lane;
  }
  for (; i < count; ++i)
    if (x[i] == value) return i;
  return count;
}

namespace {

// exp(x - max), 0 far below; the bound keeps -inf out of the argument reduction, which would make a NaN of
// it.
HWY_INLINE VD exp_difference(VD x, VD max) {
  return hn::Exp(dd, hn::Max(hn::Sub(x, max), hn::Set(dd, -1000.0)));
}

}  // namespace

double sum_exp(const float* x, int64_t count, float max) {
  const VD shift = hn::Set(dd, static_cast<double>(max));
  VD sum = hn::Zero(dd);
  for_each_widened(x, count, -__builtin_inff(),
                   [&](VD v, int64_t) { sum = hn::Add(sum, exp_difference(v, shift)); });
  return hn::GetLane(hn::SumOfLanes(dd, sum));
}

double sum_exp_difference(const float* p, const float* q, int64_t count, float p_max) {
  const VD shift = hn::Set(dd, static_cast<double>(p_max));
  VD sum = hn::Zero(dd);
  for_each_widened(p, count, -__builtin_inff(), [&](VD a, int64_t i) {
    const VD b = i + kDoubleLanes <= count ? hn::PromoteTo(dd, hn::LoadU(df_half, q + i))
                                           : widen_part(q + i, count - i, 0.0f);
    const VD weight = exp_difference(a, shift);
    sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(dd)), hn::Mul(weight, hn::Sub(a, b))));
  });
  return hn::GetLane(hn::SumOfLanes(dd, sum));
}

}  // namespace kascade::KASCADE_ISA
