// SPDX-License-Identifier: Apache-2.0
// Rows of stored weights to fp32 (bit for bit base/dequantize.cc, which describes the formats) and to
// bfloat16.
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "ops/half.h"
#include "ops/isa_kernels.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace kascade::KASCADE_ISA {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
const DF df;
const hn::Rebind<int32_t, DF> di32;
const hn::Rebind<uint8_t, DF> du8;
const hn::Rebind<int8_t, DF> ds8;
using VF = hn::Vec<DF>;
using VI = hn::Vec<hn::Rebind<int32_t, DF>>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));

float load_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return half_to_float(bits);
}

// Where the floats go.
struct ToF32 {
  float* out;
  HWY_INLINE void store(VF v, int64_t i) const { hn::StoreU(v, df, out + i); }
  void store_one(float v, int64_t i) const { out[i] = v; }
};

#if defined(__AVX512BF16__)
struct ToBF16 {
  uint16_t* out;
  HWY_INLINE void store(VF v, int64_t i) const {
    const __m256bh half = _mm512_cvtneps_pbh(v.raw);
    std::memcpy(out + i, &half, sizeof(half));
  }
  void store_one(float v, int64_t i) const {
    const __m128bh half = _mm_cvtneps_pbh(_mm_set_ss(v));
    std::memcpy(out + i, &half, sizeof(uint16_t));
  }
};
#endif

// Bytes as integers.
HWY_INLINE VI load_bytes(const uint8_t* p) { return hn::PromoteTo(di32, hn::LoadU(du8, p)); }

// v >> shift, & mask.
HWY_INLINE VI bits(VI v, int shift, int mask) {
  return hn::And(hn::ShiftRightSame(v, shift), hn::Set(di32, mask));
}

// Bit `first` + i of word as 16 in lane i.
HWY_INLINE VI fifth_bits(uint32_t word, int first) {
  const VI shifted = hn::Shr(hn::Set(di32, static_cast<int32_t>(word)), hn::Iota(di32, first));
  return hn::ShiftLeft<4>(hn::And(shifted, hn::Set(di32, 1)));
}

// Blocks of 32 elements with nibbles; kFifth and kQuants are offsets, kFifth 0 for none. weight = scale * (q
// - kSubtract), or scale * q + minimum where there are two halves.
template <int kBytes, int kHalves, int kFifth, int kQuants, int kSubtract>
struct NibbleBlocks {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    for (int64_t element = 0; element < columns; element += 32, row += kBytes) {
      const VF scale = hn::Set(df, load_half(row));
      const VF minimum = hn::Set(df, kHalves == 2 ? load_half(row + 2) : 0.0f);
      uint32_t fifth = 0;
      if constexpr (kFifth != 0) std::memcpy(&fifth, row + kFifth, sizeof(fifth));
      for (int i = 0; i < 16; i += static_cast<int>(kLanes)) {
        const VI bytes = load_bytes(row + kQuants + i);
        VI low = bits(bytes, 0, 0x0F);
        VI high = bits(bytes, 4, 0x0F);
        if constexpr (kFifth != 0) {
          low = hn::Or(low, fifth_bits(fifth, i));
          high = hn::Or(high, fifth_bits(fifth, 16 + i));
        }
        out.store(weight(low, scale, minimum), element + i);
        out.store(weight(high, scale, minimum), element + 16 + i);
      }
    }
  }

  static HWY_INLINE VF weight(VI q, VF scale, VF minimum) {
    const VF value = hn::ConvertTo(df, q);
    if constexpr (kHalves == 2) return hn::Add(hn::Mul(value, scale), minimum);
    return hn::Mul(hn::Sub(value, hn::Set(df, static_cast<float>(kSubtract))), scale);
  }
};

struct Q8_0 {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    for (int64_t element = 0; element < columns; element += 32, row += 34) {
      const VF scale = hn::Set(df, load_half(row));
      for (int64_t i = 0; i < 32; i += kLanes) {
        const auto bytes = hn::LoadU(ds8, reinterpret_cast<const int8_t*>(row) + 2 + i);
        out.store(hn::Mul(hn::ConvertTo(df, hn::PromoteTo(di32, bytes)), scale), element + i);
      }
    }
  }
};

template <int kBytes, int kFifth, int kQuants>
struct NibbleSuperBlocks {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    for (int64_t element = 0; element < columns; element += 256, row += kBytes) {
      const float scale = load_half(row);
      const float minimum = load_half(row + 2);
      const uint8_t* packed = row + 4;
      for (int group = 0; group < 8; ++group) {
        const int g = group % 4;
        const int scale_bits = group < 4 ? packed[g] & 63 : (packed[g + 8] & 0xF) | (packed[g] >> 6) << 4;
        const int minimum_bits =
            group < 4 ? packed[g + 4] & 63 : (packed[g + 8] >> 4) | (packed[g + 4] >> 6) << 4;
        const VF group_scale = hn::Set(df, scale * static_cast<float>(scale_bits));
        const VF group_minimum = hn::Set(df, minimum * static_cast<float>(minimum_bits));
        for (int64_t i = 0; i < 32; i += kLanes) {
          VI q = bits(load_bytes(row + kQuants + group / 2 * 32 + i), group % 2 * 4, 0x0F);
          if constexpr (kFifth != 0)
            q = hn::Or(q, hn::ShiftLeft<4>(bits(load_bytes(row + kFifth + i), group, 1)));
          const VF scaled = hn::Mul(group_scale, hn::ConvertTo(df, q));
          out.store(hn::Sub(scaled, group_minimum), element + group * 32 + i);
        }
      }
    }
  }
};

struct Q6_K {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    for (int64_t element = 0; element < columns; element += 256, row += 210) {
      const float scale = load_half(row + 208);
      for (int sixteenth = 0; sixteenth < 16; ++sixteenth) {
        const int half = sixteenth / 8;
        const int part = sixteenth % 8 / 2;
        const int first = sixteenth % 2 * 16;
        const uint8_t* low = row + half * 64 + part % 2 * 32 + first;
        const uint8_t* high = row + 128 + half * 32 + first;
        const VF group_scale =
            hn::Set(df, scale * static_cast<float>(static_cast<int8_t>(row[192 + sixteenth])));
        for (int64_t i = 0; i < 16; i += kLanes) {
          const VI q = hn::Or(bits(load_bytes(low + i), part / 2 * 4, 0x0F),
                              hn::ShiftLeft<4>(bits(load_bytes(high + i), part * 2, 3)));
          const VF centred = hn::ConvertTo(df, hn::Sub(q, hn::Set(di32, 32)));
          out.store(hn::Mul(group_scale, centred), element + sixteenth * 16 + i);
        }
      }
    }
  }
};

// Plain types: kLanes at a time, then one by one.
struct F32 {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    const auto* x = reinterpret_cast<const float*>(row);
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) out.store(hn::LoadU(df, x + i), i);
    for (; i < columns; ++i) out.store_one(x[i], i);
  }
};

struct F16 {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    const hn::Rebind<uint16_t, DF> du16;
    const hn::Rebind<hwy::float16_t, DF> df16;
    const auto* x = reinterpret_cast<const uint16_t*>(row);
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes)
      out.store(hn::PromoteTo(df, hn::BitCast(df16, hn::LoadU(du16, x + i))), i);
    for (; i < columns; ++i) out.store_one(half_to_float(x[i]), i);
  }
};

struct BF16 {
  template <class Out>
  static void dequantize(const uint8_t* row, int64_t columns, const Out& out) {
    const hn::Rebind<uint16_t, DF> du16;
    const hn::Rebind<uint32_t, DF> du32;
    const auto* x = reinterpret_cast<const uint16_t*>(row);
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes)
      out.store(hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, x + i)))), i);
    for (; i < columns; ++i) {
      const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      out.store_one(value, i);
    }
  }
};

template <class Format>
void to_f32_row(const uint8_t* row, int64_t columns, void* out) {
  Format::dequantize(row, columns, ToF32{static_cast<float*>(out)});
}

#if defined(__AVX512BF16__)
template <class Format>
void to_bf16_row(const uint8_t* row, int64_t columns, void* out) {
  Format::dequantize(row, columns, ToBF16{static_cast<uint16_t*>(out)});
}
#define KASCADE_DEQUANTIZE(...) \
  { to_f32_row<__VA_ARGS__>, to_bf16_row<__VA_ARGS__> }
#else
#define KASCADE_DEQUANTIZE(...) \
  { to_f32_row<__VA_ARGS__>, nullptr }
#endif

// In the order of WeightType.
constexpr DequantizeKernel kDequantize[kWeightTypes][2] = {
    KASCADE_DEQUANTIZE(F32),
    KASCADE_DEQUANTIZE(F16),
    KASCADE_DEQUANTIZE(BF16),
    KASCADE_DEQUANTIZE(NibbleBlocks<18, 1, 0, 2, 8>),   // Q4_0
    KASCADE_DEQUANTIZE(NibbleBlocks<20, 2, 0, 4, 0>),   // Q4_1
    KASCADE_DEQUANTIZE(NibbleBlocks<22, 1, 2, 6, 16>),  // Q5_0
    KASCADE_DEQUANTIZE(NibbleBlocks<24, 2, 4, 8, 0>),   // Q5_1
    KASCADE_DEQUANTIZE(Q8_0),
    KASCADE_DEQUANTIZE(NibbleSuperBlocks<144, 0, 16>),   // Q4_K
    KASCADE_DEQUANTIZE(NibbleSuperBlocks<176, 16, 48>),  // Q5_K
    KASCADE_DEQUANTIZE(Q6_K),
};
#undef KASCADE_DEQUANTIZE

}  // namespace

DequantizeKernel dequantize_f32_kernel(WeightType type) { return kDequantize[static_cast<int>(type)][0]; }

DequantizeKernel dequantize_bf16_kernel(WeightType type) { return kDequantize[static_cast<int>(type)][1]; }

#if defined(__AVX512BF16__)
void to_bf16(const float* x, int64_t count, uint16_t* out) {
  to_bf16_row<F32>(reinterpret_cast<const uint8_t*>(x), count, out);
}
#endif

}  // namespace kascade::KASCADE_ISA
