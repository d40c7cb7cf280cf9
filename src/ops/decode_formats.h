// SPDX-License-Identifier: Apache-2.0
// The block formats as decode_isa.cc sees them, four weight rows at a time; base/dequantize.cc describes
// their bytes. A step is four groups of 32 elements of a row; a block is kSteps steps. A format provides
//   Header, load_header<kPartial>(block of each row, valid)   what holds the scales
//   scales<kStep>(header, scale, minimum)                     weight = scale * (byte - kOffset) + minimum;
//   where
//                                                             kTwoScales, scale[1] is for the last 16
//                                                             elements of a group
//   unpack<kStep, kPartial>(block, part, valid, first, last)  the bytes of one part: first and last 16 of
//   each group
// kSigned: bytes are signed, else unsigned. kPartial: only the first `valid` groups exist; nothing past them
// is read. Included by *_isa.cc files only.
#pragma once

#include <cstdint>

#include "ops/decode_simd.h"

namespace kascade::KASCADE_ISA {
namespace {

alignas(64) constexpr uint8_t kZeroBlock[64] = {};

// Addresses of the blocks of one part; a block that does not exist reads as zeros.
template <int kBytes, bool kPartial>
inline void find_blocks(const uint8_t* p, int part, int valid, const uint8_t** block) {
  for (int i = 0; i < kLaneBlocks; ++i) {
    const int b = part * kLaneBlocks + i;
    block[i] = kPartial && b >= valid ? kZeroBlock : p + b * kBytes;
  }
}

// Four blocks of 32 elements whose halves come first.
template <int kBytes, int kHalves>
struct SmallBlocks {
  static constexpr int kSteps = 1;
  static constexpr int64_t kBlockBytes = 4 * kBytes;
  static constexpr bool kTwoScales = false;
  static constexpr bool kMinimum = kHalves == 2;
  struct Header {
    Scales scale, minimum;
  };

  template <bool kPartial>
  static Header load_header(const uint8_t* const* p, int valid) {
    Header header;
    load_headers<kBytes, kHalves, kPartial>(p, valid, header.scale, header.minimum);
    return header;
  }

  template <int kStep>
  static void scales(const Header& header, Scales* scale, Scales& minimum) {
    scale[0] = header.scale;
    if constexpr (kMinimum) minimum = header.minimum;
  }
};

// With nibbles at kQuants and, unless 0, fifth bits at kFifth.
template <int kBytes, int kHalves, int kFifth, int kQuants, int kSubtract>
struct NibbleBlocks : SmallBlocks<kBytes, kHalves> {
  static constexpr bool kSigned = false;
  static constexpr uint8_t kOffset = kSubtract;

  template <int kStep, bool kPartial>
  static void unpack(const uint8_t* p, int part, int valid, Bytes& first, Bytes& last) {
    const uint8_t* block[kLaneBlocks];
    find_blocks<kBytes, kPartial>(p, part, valid, block);
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

struct Q8_0 : SmallBlocks<34, 1> {
  // Signed bytes as they are, or plus 128 as unsigned ones.
  static constexpr bool kSigned = !kDotTakesAnyByte;
  static constexpr uint8_t kOffset = kDotTakesAnyByte ? 128 : 0;

  template <int kStep, bool kPartial>
  static void unpack(const uint8_t* p, int part, int valid, Bytes& first, Bytes& last) {
    const uint8_t* block[kLaneBlocks];
    find_blocks<34, kPartial>(p, part, valid, block);
    first = load_lanes(block, 2);
    last = load_lanes(block, 18);
    if constexpr (kDotTakesAnyByte) {
      first = flip_sign_bits(first);
      last = flip_sign_bits(last);
    }
  }
};

// Blocks of 256 elements: groups 2c and 2c + 1 are the low and high nibbles of 32 bytes; no step is partial.
template <int kBytes, int kFifth, int kQuants>
struct NibbleSuperBlocks {
  static constexpr int kSteps = 2;
  static constexpr int64_t kBlockBytes = kBytes;
  static constexpr bool kSigned = false;
  static constexpr bool kTwoScales = false;
  static constexpr bool kMinimum = true;
  static constexpr uint8_t kOffset = 0;
  using Header = PackedScales;

  template <bool kPartial>
  static Header load_header(const uint8_t* const* p, int /*valid*/) {
    return load_packed_scales(p);
  }

  template <int kStep>
  static void scales(const Header& header, Scales* scale, Scales& minimum) {
    unpack_scales<kStep>(header, scale[0], minimum);
  }

  template <int kStep, bool kPartial>
  static void unpack(const uint8_t* p, int part, int /*valid*/, Bytes& first, Bytes& last) {
    const uint8_t* quants = p + kQuants + kStep * 64;
    first = extract_bits<0, 4, 0, 4, 4, 0>(load_chunks<0, 0, 2, 2>(quants, part), part);
    last = extract_bits<0, 4, 0, 4, 4, 0>(load_chunks<1, 1, 3, 3>(quants, part), part);
    if constexpr (kFifth != 0) {
      constexpr int kBit = 4 * kStep;
      const Bytes fifth_first = load_chunks<0, 0, 0, 0>(p + kFifth, part);
      const Bytes fifth_last = load_chunks<1, 1, 1, 1>(p + kFifth, part);
      first = or_bytes(first, extract_bits<kBit, kBit + 1, kBit + 2, kBit + 3, 1, 4>(fifth_first, part));
      last = or_bytes(last, extract_bits<kBit, kBit + 1, kBit + 2, kBit + 3, 1, 4>(fifth_last, part));
    }
  }
};

using Q4_K = NibbleSuperBlocks<144, 0, 16>;
using Q5_K = NibbleSuperBlocks<176, 16, 48>;

struct Q6_K {
  static constexpr int kSteps = 2;
  static constexpr int64_t kBlockBytes = 210;
  static constexpr bool kTwoScales = true;
  static constexpr bool kMinimum = false;
  static constexpr uint8_t kOffset = 32;
  using Header = SignedScales;

  template <bool kPartial>
  static Header load_header(const uint8_t* const* p, int /*valid*/) {
    return load_signed_scales(p, 192, 208);
  }

  template <int kStep>
  static void scales(const Header& header, Scales* scale, Scales& /*minimum*/) {
    scale[0] = unpack_signed_scales<kStep, 0>(header);
    scale[1] = unpack_signed_scales<kStep, 1>(header);
  }

  template <int kStep, bool kPartial>
  static void unpack(const uint8_t* p, int part, int /*valid*/, Bytes& first, Bytes& last) {
    const uint8_t* low = p + kStep * 64;
    const uint8_t* high = p + 128 + kStep * 32;
    first = or_bytes(extract_bits<0, 0, 4, 4, 4, 0>(load_chunks<0, 2, 0, 2>(low, part), part),
                     extract_bits<0, 2, 4, 6, 2, 4>(load_chunks<0, 0, 0, 0>(high, part), part));
    last = or_bytes(extract_bits<0, 0, 4, 4, 4, 0>(load_chunks<1, 3, 1, 3>(low, part), part),
                    extract_bits<0, 2, 4, 6, 2, 4>(load_chunks<1, 1, 1, 1>(high, part), part));
  }
};

}  // namespace
}  // namespace kascade::KASCADE_ISA
