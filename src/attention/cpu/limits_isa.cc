// SPDX-License-Identifier: Apache-2.0
// Loops that do nothing but what a limit is made of: read memory, or multiply and add in registers.
#include "attention/cpu/entries.h"
#include "attention/cpu/math.h"

namespace kascade::KASCADE_ISA {
namespace {

// Independent sums: enough to hide the latency of a multiply-add, few enough that all stay in registers.
constexpr int kSums = 12;

template <class M>
double multiply(int64_t rounds, float* sink) {
  typename M::Vec a, b;
  if constexpr (M::kPair == 1) {
    a = broadcast(*sink);
    b = broadcast(1 - *sink);
  } else {
    a = round_to_bfloat(broadcast(*sink), broadcast(*sink));
    b = round_to_bfloat(broadcast(1 - *sink), broadcast(1 - *sink));
  }
  VecF sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = broadcast(*sink);
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kSums; ++i) sums[i] = M::multiply_add(sums[i], a, b);
  VecF total = zero();
  for (int i = 0; i < kSums; ++i) total = hn::Add(total, sums[i]);
  *sink = sum_of(total);
  return 2.0 * M::kPair * kLanes * kSums * static_cast<double>(rounds);
}

}  // namespace

void read_memory(const char* data, int64_t bytes, const cpu::ReadAhead& ahead, float* sink) {
  constexpr int64_t kVector = kLanes * static_cast<int64_t>(sizeof(float));
  VecU sums[4] = {broadcast(0u), broadcast(0u), broadcast(0u), broadcast(0u)};
  for (int64_t i = 0; i + 4 * kVector <= bytes; i += 4 * kVector) {
    for (int64_t line = i; line < i + 4 * kVector; line += 64) {
      if (ahead.far > 0) __builtin_prefetch(data + line + ahead.far, 0, 2);
      if (ahead.near > 0) __builtin_prefetch(data + line + ahead.near, 0, 3);
    }
    for (int v = 0; v < 4; ++v)
      sums[v] = hn::Xor(sums[v], load(reinterpret_cast<const uint32_t*>(data + i + v * kVector)));
  }
  const VecU all = hn::Xor(hn::Xor(sums[0], sums[1]), hn::Xor(sums[2], sums[3]));
  *sink += sum_of(hn::ConvertTo(TagF(), hn::And(hn::BitCast(TagI(), all), broadcast(int32_t{1}))));
}

double multiply_floats(int64_t rounds, float* sink) { return multiply<FloatMath<float>>(rounds, sink); }

double multiply_bfloats(int64_t rounds, float* sink) { return multiply<BestBfloatMath>(rounds, sink); }

}  // namespace kascade::KASCADE_ISA
