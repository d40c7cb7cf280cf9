// SPDX-License-Identifier: Apache-2.0
// Products of stored block weights with a few rows of 8-bit activations, four weight rows at a time. Integer
// sums of a group are exact; a group's float contribution is added in a fixed order per weight row, so an
// output's bits do not depend on its neighbours.
#include <cstdint>

#include "ops/decode_formats.h"
#include "ops/isa_kernels.h"

namespace kascade::KASCADE_ISA {
namespace {

constexpr int kParts = 4 / kLaneBlocks;  // vectors for four groups
constexpr int kRows = 4;

// A strip of four short rows is over before the hardware has found its streams: without this, 2,048 columns
// of Q4_1 came from memory at 6.7 GB/s where plain reading reached 19.
constexpr int64_t kAheadBytes = 4096;

struct Accumulators {
  Floats row[kRows];
  Scales minimum;
};

// Adds step kStep of the block at p[row] to the sums of kX activation rows.
template <class Format, int kStep, bool kPartial, int kX>
inline void add_step(const uint8_t* const* p, const typename Format::Header& header, int valid, int64_t step,
                     const QuantizedRow* x, Accumulators* acc) {
  Scales stored[2];
  Scales minimum;
  Format::template scales<kStep>(header, stored, minimum);
  Scales scale[kX][2];
  for (int n = 0; n < kX; ++n) {
    if constexpr (Format::kMinimum) mul_add(acc[n].minimum, minimum, x[n].scaled_sum + 4 * step);
    scale[n][0] = multiply(stored[0], x[n].scale + 4 * step);
    if constexpr (Format::kTwoScales) scale[n][1] = multiply(stored[1], x[n].scale + 4 * step);
  }

  for (int part = 0; part < kParts; ++part) {
    Bytes x_first[kX];
    Bytes x_last[kX];
    // The format's offset times the sum of the activations, exact and the same for all rows.
    Ints bias_first[kX];
    Ints bias_last[kX];
    for (int n = 0; n < kX; ++n) {
      const int8_t* q = x[n].q + kascade::kStep * step + part * kLaneBlocks * 16;
      x_first[n] = load_activations(q);
      x_last[n] = load_activations(q + 64);
      bias_first[n] = zero_ints();
      bias_last[n] = zero_ints();
      if constexpr (Format::kOffset != 0) {
        const Bytes offset = broadcast_byte(Format::kOffset);
        const Ints sum_first = dot(zero_ints(), offset, x_first[n]);
        if constexpr (Format::kTwoScales) {
          bias_first[n] = subtract(zero_ints(), sum_first);
          bias_last[n] = subtract(zero_ints(), dot(zero_ints(), offset, x_last[n]));
        } else {
          bias_first[n] = subtract(zero_ints(), dot(sum_first, offset, x_last[n]));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      Bytes first;
      Bytes last;
      Format::template unpack<kStep, kPartial>(p[r], part, valid, first, last);
      for (int n = 0; n < kX; ++n) {
        Floats& sum = acc[n].row[r];
        if constexpr (Format::kTwoScales) {
          sum = mul_add(to_floats(dot(bias_first[n], first, x_first[n])), expand(scale[n][0], r, part), sum);
          sum = mul_add(to_floats(dot(bias_last[n], last, x_last[n])), expand(scale[n][1], r, part), sum);
        } else if constexpr (Format::kSigned) {
          const Ints products = dot_signed(dot_signed(bias_first[n], first, x_first[n]), last, x_last[n]);
          sum = mul_add(to_floats(products), expand(scale[n][0], r, part), sum);
        } else {
          const Ints products = dot(dot(bias_first[n], first, x_first[n]), last, x_last[n]);
          sum = mul_add(to_floats(products), expand(scale[n][0], r, part), sum);
        }
      }
    }
  }
}

inline void prefetch_lines(const uint8_t* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) prefetch(p + line);
}

// Four rows with activation rows x[0..kX). ahead: the strip to prefetch, null for none.
template <class Format, int kX>
inline void add_strip(const uint8_t* const* rows, int64_t row_bytes, int64_t groups, const uint8_t* ahead,
                      const QuantizedRow* x, Accumulators* acc) {
  for (int n = 0; n < kX; ++n) {
    for (Floats& row : acc[n].row) row = zero_floats();
    acc[n].minimum = zero_scales();
  }
  const int64_t blocks = groups / (4 * Format::kSteps);
  const uint8_t* p[kRows] = {rows[0], rows[1], rows[2], rows[3]};
  for (int64_t block = 0; block < blocks; ++block) {
    if (ahead != nullptr)
      prefetch_lines(ahead + kRows * block * Format::kBlockBytes, kRows * Format::kBlockBytes);
    const auto header = Format::template load_header<false>(p, 4);
    add_step<Format, 0, false, kX>(p, header, 4, block * Format::kSteps, x, acc);
    if constexpr (Format::kSteps == 2) add_step<Format, 1, false, kX>(p, header, 4, block * 2 + 1, x, acc);
    for (const uint8_t*& row : p) row += Format::kBlockBytes;
  }
  const int rest = static_cast<int>(groups % (4 * Format::kSteps));
  if constexpr (Format::kSteps == 1) {
    if (rest != 0) {
      const int64_t done = blocks * Format::kBlockBytes;
      if (ahead != nullptr) prefetch_lines(ahead + kRows * done, kRows * (row_bytes - done));
      add_step<Format, 0, true, kX>(p, Format::template load_header<true>(p, rest), rest, blocks, x, acc);
    }
  }
}

template <class Format, int kX>
inline void store_strip(const DecodeArgs& args, int64_t n, int64_t output, int64_t end,
                        const Accumulators* acc) {
  for (int i = 0; i < kX; ++i) {
    float sums[kRows];
    sum_rows(acc[i].row, acc[i].minimum, sums);
    for (int r = 0; r < kRows && output + r < end; ++r) store_output(args, n + i, output + r, sums[r]);
  }
}

template <class Format>
void decode_blocks(const DecodeArgs& args, int64_t begin, int64_t end) {
  const int64_t groups = args.columns / kGroup;
  const int64_t strip_bytes = kRows * args.row_bytes;
  const int64_t ahead_bytes = (kAheadBytes + strip_bytes - 1) / strip_bytes * strip_bytes;
  for (int64_t output = begin; output < end; output += kRows) {
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      // A strip with fewer rows computes its last row again instead of taking another path.
      const int64_t row = output + r < end ? output + r : end - 1;
      rows[r] = args.weights + row * args.row_bytes;
    }
    const uint8_t* ahead = rows[0] + ahead_bytes;
    int64_t n = 0;
    // Two activation rows share the unpacking; four would not fit the registers.
    for (; n + 2 <= args.rows; n += 2, ahead = nullptr) {
      Accumulators acc[2];
      add_strip<Format, 2>(rows, args.row_bytes, groups, ahead, args.quantized + n, acc);
      store_strip<Format, 2>(args, n, output, end, acc);
    }
    if (n < args.rows) {
      Accumulators acc[1];
      add_strip<Format, 1>(rows, args.row_bytes, groups, ahead, args.quantized + n, acc);
      store_strip<Format, 1>(args, n, output, end, acc);
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
