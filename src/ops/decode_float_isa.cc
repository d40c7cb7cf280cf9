// SPDX-License-Identifier: Apache-2.0
// Products of plain weights (fp32, binary16, bfloat16) with a few fp32 rows, accumulated in fp32.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "ops/half.h"
#include "ops/isa_kernels.h"

namespace kascade::KASCADE_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

const hn::ScalableTag<float> df;
using VF = hn::Vec<hn::ScalableTag<float>>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<float>()));
constexpr int kRows = 4;
constexpr int64_t kAheadBytes = 8192;

struct F32 {
  using Stored = float;
  static HWY_INLINE VF load(const float* p) { return hn::LoadU(df, p); }
  static float widen(float x) { return x; }
};

struct F16 {
  using Stored = uint16_t;
  static HWY_INLINE VF load(const uint16_t* p) {
    const hn::Rebind<uint16_t, hn::ScalableTag<float>> du16;
    const hn::Rebind<hwy::float16_t, hn::ScalableTag<float>> df16;
    return hn::PromoteTo(df, hn::BitCast(df16, hn::LoadU(du16, p)));
  }
  static float widen(uint16_t x) { return half_to_float(x); }
};

struct BF16 {
  using Stored = uint16_t;
  static HWY_INLINE VF load(const uint16_t* p) {
    const hn::Rebind<uint16_t, hn::ScalableTag<float>> du16;
    const hn::Rebind<uint32_t, hn::ScalableTag<float>> du32;
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, p))));
  }
  static float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

template <class Type>
void decode_floats(const DecodeArgs& args, int64_t begin, int64_t end) {
  using Stored = typename Type::Stored;
  const int64_t columns = args.columns;
  for (int64_t output = begin; output < end; output += kRows) {
    const Stored* w[kRows];
    for (int r = 0; r < kRows; ++r) {
      // A strip with fewer rows computes its last row again instead of taking another path.
      const int64_t row = output + r < end ? output + r : end - 1;
      w[r] = reinterpret_cast<const Stored*>(args.weights + row * args.row_bytes);
    }
    // Four streams of one short row each are over before the hardware has found them.
    const int64_t strip_bytes = kRows * args.row_bytes;
    const uint8_t* ahead =
        reinterpret_cast<const uint8_t*>(w[0]) + (kAheadBytes + strip_bytes - 1) / strip_bytes * strip_bytes;
    for (int64_t n = 0; n < args.rows; ++n) {
      const float* x = args.x[n];
      // Two sums a row: four rows then keep eight multiply-adds in flight, two a cycle at four cycles'
      // latency.
      VF even[kRows];
      VF odd[kRows];
      for (int r = 0; r < kRows; ++r) even[r] = odd[r] = hn::Zero(df);
      int64_t i = 0;
      for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
        if (n == 0) {
          constexpr int64_t kBytes = 2 * kLanes * kRows * int64_t{sizeof(Stored)};
          for (int64_t line = 0; line < kBytes; line += 64) hwy::Prefetch(ahead + line);
          ahead += kBytes;
        }
        const VF x0 = hn::LoadU(df, x + i);
        const VF x1 = hn::LoadU(df, x + i + kLanes);
        for (int r = 0; r < kRows; ++r) {
          even[r] = hn::MulAdd(Type::load(w[r] + i), x0, even[r]);
          odd[r] = hn::MulAdd(Type::load(w[r] + i + kLanes), x1, odd[r]);
        }
      }
      for (int r = 0; r < kRows && output + r < end; ++r) {
        float sum = hn::GetLane(hn::SumOfLanes(df, hn::Add(even[r], odd[r])));
        for (int64_t j = i; j < columns; ++j) sum += Type::widen(w[r][j]) * x[j];
        store_output(args, n, output + r, sum);
      }
    }
  }
}

}  // namespace

void decode_f32(const DecodeArgs& args, int64_t begin, int64_t end) { decode_floats<F32>(args, begin, end); }
void decode_f16(const DecodeArgs& args, int64_t begin, int64_t end) { decode_floats<F16>(args, begin, end); }
void decode_bf16(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_floats<BF16>(args, begin, end);
}

}  // namespace kascade::KASCADE_ISA
