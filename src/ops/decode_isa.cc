// SPDX-License-Identifier: Apache-2.0
// Products of stored block weights with a few rows of 8-bit activations, four weight rows at a time. Integer
// sums of a group are exact; a group's float contribution is added in a fixed order per weight row, so an
// output's bits do not depend on its neighbours.
#include <cstdint>
#include <cstring>

#include "ops/decode_simd.h"
#include "ops/isa_kernels.h"

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kParts = 4 / kLaneBlocks;  // vectors for four groups
constexpr int kRows = 4;

alignas(64) constexpr uint8_t kZeroBlock[256] = {};

uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Formats. Of one step (four groups of 32 elements) of a row:
//   advance(row, step)        where its bytes are
//   scales(row, step, valid)  of four rows: weight = scale * (byte - kOffset) + minimum; scale[1] is for the
//   last 16
//                             elements of each group where kTwoScales
//   unpack(p, ...)            bytes of the groups of one part: first and last 16 elements of each
// kSigned: bytes are signed, else unsigned. kPartial: only the first `valid` groups exist.

// Blocks of 32 elements. Quants is the offset of the nibbles in a block, fifth that of the fifth bits.
template <int kBytes, int kHalves, int kFifth, int kQuants, int kSubtract>
struct NibbleBlocks {
  static constexpr bool kSigned = false;
  static constexpr bool kTwoScales = false;
  static constexpr bool kMinimum = kHalves == 2;
  static constexpr uint8_t kOffset = kSubtract;

  static const uint8_t* advance(const uint8_t* row, int64_t step) { return row + step * 4 * kBytes; }

  template <bool kPartial>
  static void scales(const uint8_t* const* p, int64_t /*step*/, int valid, Scales* scale, Scales& minimum) {
    load_headers<kBytes, kHalves, kPartial>(p, valid, scale[0], minimum);
  }

  template <bool kPartial>
  static void unpack(const uint8_t* p, int64_t /*step*/, int part, int valid, Bytes& first, Bytes& last) {
    const uint8_t* block[kLaneBlocks];
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int b = part * kLaneBlocks + i;
      block[i] = kPartial && b >= valid ? kZeroBlock : p + b * kBytes;
    }
    const Bytes nibbles = load_lanes(block, kQuants);
    first = low_nibbles(nibbles);
    last = high_nibbles(nibbles);
    if constexpr (kFifth != 0) {
      first = add_fifth_bits<0>(first, block, kFifth);
      last = add_fifth_bits<16>(last, block, kFifth);
    }
  }
};

using Q4_0 = NibbleBlocks<18, 1, 0, 2, 8>;
using Q4_1 = NibbleBlocks<20, 2, 0, 4, 0>;
using Q5_0 = NibbleBlocks<22, 1, 2, 6, 16>;
using Q5_1 = NibbleBlocks<24, 2, 4, 8, 0>;

struct Q8_0 {
  // Signed bytes as they are, or plus 128 as unsigned ones.
  static constexpr bool kSigned = !kDotTakesAnyByte;
  static constexpr bool kTwoScales = false;
  static constexpr bool kMinimum = false;
  static constexpr uint8_t kOffset = kDotTakesAnyByte ? 128 : 0;
  static constexpr int kBytes = 34;

  static const uint8_t* advance(const uint8_t* row, int64_t step) { return row + step * 4 * kBytes; }

  template <bool kPartial>
  static void scales(const uint8_t* const* p, int64_t /*step*/, int valid, Scales* scale, Scales& minimum) {
    load_headers<kBytes, 1, kPartial>(p, valid, scale[0], minimum);
  }

  template <bool kPartial>
  static void unpack(const uint8_t* p, int64_t /*step*/, int part, int valid, Bytes& first, Bytes& last) {
    const uint8_t* block[kLaneBlocks];
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int b = part * kLaneBlocks + i;
      block[i] = kPartial && b >= valid ? kZeroBlock : p + b * kBytes;
    }
    first = load_lanes(block, 2);
    last = load_lanes(block, 18);
    if constexpr (kDotTakesAnyByte) {
      first = flip_sign_bits(first);
      last = flip_sign_bits(last);
    }
  }
};

// Blocks of 256 elements: a step is one half of a block, so steps are never partial. kFifth and kQuants are
// offsets.
template <int kBytes, int kFifth, int kQuants>
struct NibbleSuperBlocks {
  static constexpr bool kSigned = false;
  static constexpr bool kTwoScales = false;
  static constexpr bool kMinimum = true;
  static constexpr uint8_t kOffset = 0;

  static const uint8_t* advance(const uint8_t* row, int64_t step) { return row + step / 2 * kBytes; }

  template <bool kPartial>
  static void scales(const uint8_t* const* p, int64_t step, int /*valid*/, Scales* scale, Scales& minimum) {
    uint32_t scale_bytes_of[kRows];
    uint32_t minimum_bytes_of[kRows];
    uint16_t scale_half[kRows];
    uint16_t minimum_half[kRows];
    for (int r = 0; r < kRows; ++r) {
      scale_half[r] = load_u16(p[r]);
      // Subtracted, so the sign bit is flipped.
      minimum_half[r] = load_u16(p[r] + 2) ^ 0x8000u;
      // base/dequantize.cc describes the packing of the 6-bit scales and minima.
      const uint32_t s = load_u32(p[r] + 4);
      const uint32_t m = load_u32(p[r] + 8);
      if (step % 2 == 0) {
        scale_bytes_of[r] = s & 0x3F3F3F3Fu;
        minimum_bytes_of[r] = m & 0x3F3F3F3Fu;
      } else {
        const uint32_t low = load_u32(p[r] + 12);
        scale_bytes_of[r] = (low & 0x0F0F0F0Fu) | (s >> 6 & 0x03030303u) << 4;
        minimum_bytes_of[r] = (low >> 4 & 0x0F0F0F0Fu) | (m >> 6 & 0x03030303u) << 4;
      }
    }
    scale[0] = scale_bytes<false>(scale_bytes_of, scale_half);
    minimum = scale_bytes<false>(minimum_bytes_of, minimum_half);
  }

  template <bool kPartial>
  static void unpack(const uint8_t* p, int64_t step, int part, int /*valid*/, Bytes& first, Bytes& last) {
    // Groups 2c and 2c + 1 are the low and high nibbles of the same 32 bytes.
    const uint8_t* bytes[kLaneBlocks];
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int group = static_cast<int>(step % 2) * 4 + part * kLaneBlocks + i;
      bytes[i] = p + kQuants + group / 2 * 32;
    }
    first = shift_lanes(load_lanes(bytes, 0), 0, 4, 0, 4, part, 0x0F);
    last = shift_lanes(load_lanes(bytes, 16), 0, 4, 0, 4, part, 0x0F);
    if constexpr (kFifth != 0) {
      const uint8_t* fifth[kLaneBlocks];
      for (const uint8_t*& lane : fifth) lane = p + kFifth;
      const int bit = static_cast<int>(step % 2) * 4;
      first = or_high(first, shift_lanes(load_lanes(fifth, 0), bit, bit + 1, bit + 2, bit + 3, part, 1));
      last = or_high(last, shift_lanes(load_lanes(fifth, 16), bit, bit + 1, bit + 2, bit + 3, part, 1));
    }
  }
};

using Q4_K = NibbleSuperBlocks<144, 0, 16>;
using Q5_K = NibbleSuperBlocks<176, 16, 48>;

struct Q6_K {
  static constexpr bool kTwoScales = true;
  static constexpr bool kMinimum = false;
  static constexpr uint8_t kOffset = 32;

  static const uint8_t* advance(const uint8_t* row, int64_t step) { return row + step / 2 * 210; }

  template <bool kPartial>
  static void scales(const uint8_t* const* p, int64_t step, int /*valid*/, Scales* scale,
                     Scales& /*minimum*/) {
    uint32_t even[kRows];
    uint32_t odd[kRows];
    uint16_t half[kRows];
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* bytes = p[r] + 192 + step % 2 * 8;
      even[r] = 0;
      odd[r] = 0;
      for (int g = 0; g < 4; ++g) {
        even[r] |= static_cast<uint32_t>(bytes[2 * g]) << (8 * g);
        odd[r] |= static_cast<uint32_t>(bytes[2 * g + 1]) << (8 * g);
      }
      half[r] = load_u16(p[r] + 208);
    }
    scale[0] = scale_bytes<true>(even, half);
    scale[1] = scale_bytes<true>(odd, half);
  }

  template <bool kPartial>
  static void unpack(const uint8_t* p, int64_t step, int part, int /*valid*/, Bytes& first, Bytes& last) {
    const uint8_t* low[kLaneBlocks];
    const uint8_t* high[kLaneBlocks];
    for (int i = 0; i < kLaneBlocks; ++i) {
      const int group = part * kLaneBlocks + i;
      low[i] = p + step % 2 * 64 + group % 2 * 32;
      high[i] = p + 128 + step % 2 * 32;
    }
    first = or_high(shift_lanes(load_lanes(low, 0), 0, 0, 4, 4, part, 0x0F),
                    shift_lanes(load_lanes(high, 0), 0, 2, 4, 6, part, 3));
    last = or_high(shift_lanes(load_lanes(low, 16), 0, 0, 4, 4, part, 0x0F),
                   shift_lanes(load_lanes(high, 16), 0, 2, 4, 6, part, 3));
  }
};

struct Accumulators {
  Floats row[kRows];
  Scales minimum;
};

template <class Format, bool kPartial>
inline void add_step(const uint8_t* const* rows, int64_t step, int valid, const QuantizedRow& x,
                     Accumulators& acc) {
  const uint8_t* p[kRows];
  for (int r = 0; r < kRows; ++r) p[r] = Format::advance(rows[r], step);
  const float* x_scale = x.scale + 4 * step;
  Scales scale[2];
  Scales minimum;
  Format::template scales<kPartial>(p, step, valid, scale, minimum);
  if constexpr (Format::kMinimum) mul_add(acc.minimum, minimum, x.scaled_sum + 4 * step);
  scale[0] = multiply(scale[0], x_scale);
  if constexpr (Format::kTwoScales) scale[1] = multiply(scale[1], x_scale);

  for (int part = 0; part < kParts; ++part) {
    const int8_t* q = x.q + kStep * step + part * kLaneBlocks * 16;
    const Bytes x_first = load_activations(q);
    const Bytes x_last = load_activations(q + 64);
    // The format's offset times the sum of the activations, exact and the same for all rows.
    Ints bias_first = zero_ints();
    Ints bias_last = zero_ints();
    if constexpr (Format::kOffset != 0) {
      bias_first = subtract(zero_ints(), dot(zero_ints(), broadcast_byte(Format::kOffset), x_first));
      bias_last = subtract(zero_ints(), dot(zero_ints(), broadcast_byte(Format::kOffset), x_last));
      if constexpr (!Format::kTwoScales)
        bias_first = subtract(bias_first, dot(zero_ints(), broadcast_byte(Format::kOffset), x_last));
    }
    for (int r = 0; r < kRows; ++r) {
      Bytes first;
      Bytes last;
      Format::template unpack<kPartial>(p[r], step, part, valid, first, last);
      Floats& sum_of_row = acc.row[r];
      if constexpr (Format::kTwoScales) {
        sum_of_row =
            mul_add(to_floats(dot(bias_first, first, x_first)), expand(scale[0], r, part), sum_of_row);
        sum_of_row = mul_add(to_floats(dot(bias_last, last, x_last)), expand(scale[1], r, part), sum_of_row);
      } else if constexpr (Format::kSigned) {
        const Ints products = dot_signed(dot_signed(bias_first, first, x_first), last, x_last);
        sum_of_row = mul_add(to_floats(products), expand(scale[0], r, part), sum_of_row);
      } else {
        const Ints products = dot(dot(bias_first, first, x_first), last, x_last);
        sum_of_row = mul_add(to_floats(products), expand(scale[0], r, part), sum_of_row);
      }
    }
  }
}

template <class Format>
void decode_blocks(const DecodeArgs& args, int64_t begin, int64_t end) {
  const int64_t groups = args.columns / kGroup;
  for (int64_t output = begin; output < end; output += kRows) {
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      // A strip with fewer rows computes its last row again instead of taking another path.
      const int64_t row = output + r < end ? output + r : end - 1;
      rows[r] = args.weights + row * args.row_bytes;
    }
    for (int64_t n = 0; n < args.rows; ++n) {
      Accumulators acc;
      for (Floats& row : acc.row) row = zero_floats();
      acc.minimum = zero_scales();
      int64_t step = 0;
      for (; step < groups / 4; ++step) add_step<Format, false>(rows, step, 4, args.quantized[n], acc);
      const int rest = static_cast<int>(groups % 4);
      if (rest != 0) add_step<Format, true>(rows, step, rest, args.quantized[n], acc);
      float sums[kRows];
      sum_rows(acc.row, acc.minimum, sums);
      for (int r = 0; r < kRows && output + r < end; ++r) store_output(args, n, output + r, sums[r]);
    }
  }
}

}  // namespace

void decode_q4_0(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q4_0>(args, begin, end);
}
void decode_q4_1(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q4_1>(args, begin, end);
}
void decode_q5_0(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q5_0>(args, begin, end);
}
void decode_q5_1(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q5_1>(args, begin, end);
}
void decode_q8_0(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q8_0>(args, begin, end);
}
void decode_q4_k(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q4_K>(args, begin, end);
}
void decode_q5_k(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q5_K>(args, begin, end);
}
void decode_q6_k(const DecodeArgs& args, int64_t begin, int64_t end) {
  decode_blocks<Q6_K>(args, begin, end);
}

}  // namespace kascade::KASCADE_ISA
