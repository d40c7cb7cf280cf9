// SPDX-License-Identifier: Apache-2.0
#include "base/dequantize.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "kascade/dtype.h"

namespace kascade {
namespace {

static_assert(std::endian::native == std::endian::little, "weights are mapped from little-endian files");

template <class T>
T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

float load_half(const uint8_t* bytes) { return to_float(load<F16>(bytes)); }

template <class T>
void widen(const uint8_t* row, int64_t columns, float* out) {
  for (int64_t i = 0; i < columns; ++i) out[i] = to_float(load<T>(row + i * int64_t{sizeof(T)}));
}

// The 32-element blocks hold element i in the low and element i + 16 in the high four bits of byte i.

// { f16 scale; u8 quants[16] }: scale * (q - 8)
void block_q4_0(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  const uint8_t* quants = block + 2;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>((quants[i] & 0xF) - 8) * scale;
    out[i + 16] = static_cast<float>((quants[i] >> 4) - 8) * scale;
  }
}

// { f16 scale; f16 minimum; u8 quants[16] }: scale * q + minimum
void block_q4_1(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  const float minimum = load_half(block + 2);
  const uint8_t* quants = block + 4;
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<float>(quants[i] & 0xF) * scale + minimum;
    out[i + 16] = static_cast<float>(quants[i] >> 4) * scale + minimum;
  }
}

// { f16 scale; u32 fifth bits, bit i for element i; u8 quants[16] }: scale * (q - 16)
void block_q5_0(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  const auto fifth = load<uint32_t>(block + 2);
  const uint8_t* quants = block + 6;
  for (int i = 0; i < 16; ++i) {
    const int low = (quants[i] & 0xF) | static_cast<int>(fifth >> i & 1) << 4;
    const int high = (quants[i] >> 4) | static_cast<int>(fifth >> (i + 16) & 1) << 4;
    out[i] = static_cast<float>(low - 16) * scale;
    out[i + 16] = static_cast<float>(high - 16) * scale;
  }
}

// { f16 scale; f16 minimum; u32 fifth bits; u8 quants[16] }: scale * q + minimum
void block_q5_1(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  const float minimum = load_half(block + 2);
  const auto fifth = load<uint32_t>(block + 4);
  const uint8_t* quants = block + 8;
  for (int i = 0; i < 16; ++i) {
    const int low = (quants[i] & 0xF) | static_cast<int>(fifth >> i & 1) << 4;
    const int high = (quants[i] >> 4) | static_cast<int>(fifth >> (i + 16) & 1) << 4;
    out[i] = static_cast<float>(low) * scale + minimum;
    out[i + 16] = static_cast<float>(high) * scale + minimum;
  }
}

// { f16 scale; i8 quants[32] }: scale * q
void block_q8_0(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

struct ScaleMin {
  int scale;
  int minimum;
};

// Eight 6-bit scales and minima in 12 bytes: those of groups 0..3 in the low six bits of bytes 0..3 and 4..7;
// those of groups 4..7 have their low four bits in the nibbles of bytes 8..11 and their high two on top of
// bytes 0..3 and 4..7.
ScaleMin group_scale_min(const uint8_t* packed, int group) {
  if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
  return {(packed[group + 4] & 0xF) | (packed[group - 4] >> 6) << 4,
          (packed[group + 4] >> 4) | (packed[group] >> 6) << 4};
}

// 256 elements in eight groups of 32; groups 2p and 2p + 1 share 32 bytes of quants, as low and high four
// bits. fifth holds one more bit for each element: bit `group` of byte i; null when there is none.
void k_block(const uint8_t* block, const uint8_t* fifth, const uint8_t* quants, float* out) {
  const float scale = load_half(block);
  const float minimum = load_half(block + 2);
  for (int group = 0; group < 8; ++group) {
    const ScaleMin packed = group_scale_min(block + 4, group);
    const float group_scale = scale * static_cast<float>(packed.scale);
    const float group_minimum = minimum * static_cast<float>(packed.minimum);
    const uint8_t* bytes = quants + group / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      int quant = group % 2 == 0 ? bytes[i] & 0xF : bytes[i] >> 4;
      if (fifth != nullptr) quant |= (fifth[i] >> group & 1) << 4;
      out[group * 32 + i] = group_scale * static_cast<float>(quant) - group_minimum;
    }
  }
}

// { f16 scale; f16 minimum; u8 group scales and minima[12]; u8 quants[128] }
void block_q4_k(const uint8_t* block, float* out) { k_block(block, nullptr, block + 16, out); }

// { f16 scale; f16 minimum; u8 group scales and minima[12]; u8 fifth bits[32]; u8 quants[128] }
void block_q5_k(const uint8_t* block, float* out) { k_block(block, block + 16, block + 48, out); }

// { u8 low four bits[128]; u8 high two bits[64]; i8 scales[16], one for 16 elements; f16 scale }: scales * (q
// - 32). Each half of 128 elements has 64 bytes of low bits and 32 of high bits; element 32 * part + i of a
// half finds its low bits in byte 32 * (part % 2) + i, the high nibble for parts 2 and 3, and its high bits
// at bit 2 * part of byte i.
void block_q6_k(const uint8_t* block, float* out) {
  const float scale = load_half(block + 208);
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + half * 64;
    const uint8_t* high = block + 128 + half * 32;
    const uint8_t* scales = block + 192 + half * 8;
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) {
        const int byte = low[part % 2 * 32 + i];
        const int quant = (part < 2 ? byte & 0xF : byte >> 4) | (high[i] >> (2 * part) & 3) << 4;
        const float group_scale = scale * static_cast<float>(static_cast<int8_t>(scales[part * 2 + i / 16]));
        out[half * 128 + part * 32 + i] = group_scale * static_cast<float>(quant - 32);
      }
    }
  }
}

void blocks(WeightType type, const uint8_t* row, int64_t columns, float* out,
            void (*block)(const uint8_t*, float*)) {
  const WeightTypeInfo& info = weight_type_info(type);
  for (int64_t i = 0; i < columns / info.block_elements; ++i)
    block(row + i * info.block_bytes, out + i * info.block_elements);
}

}  // namespace

void dequantize_row(WeightType type, const void* row, int64_t columns, float* out) {
  const WeightTypeInfo& info = weight_type_info(type);
  require<BadArgument>(columns >= 0 && columns % info.block_elements == 0,
                       "dequantize_row: columns: expected a multiple of {} for {}, got {}",
                       info.block_elements, info.name, columns);
  const auto* bytes = static_cast<const uint8_t*>(row);
  switch (type) {
    case WeightType::kF32:
      return widen<float>(bytes, columns, out);
    case WeightType::kF16:
      return widen<F16>(bytes, columns, out);
    case WeightType::kBF16:
      return widen<BF16>(bytes, columns, out);
    case WeightType::kQ4_0:
      return blocks(type, bytes, columns, out, block_q4_0);
    case WeightType::kQ4_1:
      return blocks(type, bytes, columns, out, block_q4_1);
    case WeightType::kQ5_0:
      return blocks(type, bytes, columns, out, block_q5_0);
    case WeightType::kQ5_1:
      return blocks(type, bytes, columns, out, block_q5_1);
    case WeightType::kQ8_0:
      return blocks(type, bytes, columns, out, block_q8_0);
    case WeightType::kQ4_K:
      return blocks(type, bytes, columns, out, block_q4_k);
    case WeightType::kQ5_K:
      return blocks(type, bytes, columns, out, block_q5_k);
    case WeightType::kQ6_K:
      return blocks(type, bytes, columns, out, block_q6_k);
  }
}

}  // namespace kascade
