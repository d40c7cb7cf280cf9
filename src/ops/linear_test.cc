// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <new>

#include "kascade/error.h"
#include "ops/allocations_test.h"
#include "ops/ops_test_util.h"

namespace kascade {
namespace {

using testing::HasSubstr;

constexpr int64_t kMaxRows = 8;

int64_t block_of(WeightType type) { return weight_type_info(type).block_elements; }

// [rows, outputs] of one matrix through one path.
std::vector<float> product(const Linear& matrix, const float* x, int64_t rows, int64_t x_stride,
                           MatmulPath path, int threads) {
  std::vector<float> out(static_cast<size_t>(rows * matrix.outputs()),
                         std::numeric_limits<float>::quiet_NaN());
  LinearScratch scratch;
  ThreadPool pool(threads);
  const LinearTask task{.linear = &matrix, .out = out.data(), .out_stride = matrix.outputs()};
  linear({&task, 1}, x, rows, x_stride, path, scratch, pool);
  return out;
}

// Exact dot product, and the sum of the products' magnitudes.
struct Dot {
  double value = 0;
  double magnitude = 0;
};
Dot dot(const float* w, const double* x, int64_t columns) {
  Dot d;
  for (int64_t i = 0; i < columns; ++i) {
    d.value += static_cast<double>(w[i]) * x[i];
    d.magnitude += std::abs(static_cast<double>(w[i]) * x[i]);
  }
  return d;
}

TEST(QuantizeRow, StaysWithinHalfAStep) {
  for_each_isa([] {
    for (const int64_t columns : {32, 64, 96, 128, 160, 576}) {
      std::vector<float> x = random_floats(columns, 1);
      std::fill_n(x.begin(), 32, 0.0f);
      x[static_cast<size_t>(columns) - 1] = -50;
      const int64_t steps = (columns + kStep - 1) / kStep;
      alignas(64) int8_t q[5 * kStep];
      float scale[20];
      float sum[20];
      std::memset(q, 77, sizeof(q));
      op_kernels().quantize_row(x.data(), columns, q, scale, sum);
      for (int64_t group = 0; group < 4 * steps; ++group) {
        int total = 0;
        for (int64_t i = 0; i < kGroup; ++i) {
          const int value = q[group / 4 * kStep + i / 16 * 64 + group % 4 * 16 + i % 16];
          total += value;
          if (group * kGroup >= columns) {
            EXPECT_EQ(value, 0);
            continue;
          }
          // Rounding to the nearest step; the last bits of the inverse step may tip a value at the middle.
          EXPECT_NEAR(static_cast<float>(value) * scale[group], x[static_cast<size_t>(group * kGroup + i)],
                      scale[group] * 0.50001f);
        }
        EXPECT_FLOAT_EQ(sum[group], scale[group] * static_cast<float>(total));
      }
    }
  });
}

TEST(Dequantize, MatchesTheReferenceBitForBit) {
  for_each_isa([] {
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      const int64_t columns = block_of(type) == 1 ? 77 : 3 * block_of(type);
      const RandomWeights weights(type, 5, columns, 3);
      std::vector<float> out(static_cast<size_t>(columns));
      for (int64_t r = 0; r < 5; ++r) {
        const uint8_t* row = weights.bytes->data() + r * weights.tensor.row_bytes();
        op_kernels().dequantize_f32(type)(row, columns, out.data());
        EXPECT_EQ(std::memcmp(out.data(), weights.floats.data() + r * columns, out.size() * sizeof(float)),
                  0);
      }
    }
  });
}

TEST(Dequantize, Bfloat16IsTheReferenceRounded) {
  for_each_isa([] {
    if (!op_kernels().multiplies_bf16) return;
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      const int64_t columns = block_of(type) == 1 ? 77 : 3 * block_of(type);
      const RandomWeights weights(type, 5, columns, 4);
      std::vector<BF16> out(static_cast<size_t>(columns));
      for (int64_t r = 0; r < 5; ++r) {
        op_kernels().dequantize_bf16(type)(weights.bytes->data() + r * weights.tensor.row_bytes(), columns,
                                           out.data());
        for (int64_t i = 0; i < columns; ++i) {
          // A fused multiply-add may round a scale-and-minimum once less: half a unit of bfloat16 (2^-8) and
          // a little.
          const float exact = weights.floats[static_cast<size_t>(r * columns + i)];
          EXPECT_NEAR(to_float(out[static_cast<size_t>(i)]), exact, std::abs(exact) * 0x1.01p-8f + 1e-7f);
        }
      }
    }
  });
}

// Integer sums are exact, so against fp64 over the same 8-bit activations only the float sums of a few dozen
// groups round: a few units of 2^-24 of the magnitudes.
TEST(LinearDecode, EqualsTheProductWithRoundedActivations) {
  for_each_isa([] {
    uint32_t seed = 10;
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      const int64_t block = block_of(type);
      for (const int64_t blocks : {1, 2, 3, 4, 5, 18}) {
        for (const int64_t outputs : {1, 3, 4, 7, 130}) {
          const int64_t columns = block == 1 ? blocks * 13 : blocks * block;
          const RandomWeights weights(type, outputs, columns, ++seed);
          const int64_t stride = columns + 3;
          const std::vector<float> x = random_floats(kMaxRows * stride, ++seed);
          const Linear matrix(weights.tensor, {}, Compute::kFast);
          EXPECT_EQ(matrix.owned_bytes(), 0u);
          const std::vector<float> out = product(matrix, x.data(), kMaxRows, stride, MatmulPath::kDecode, 2);
          for (int64_t n = 0; n < kMaxRows; ++n) {
            std::vector<double> used(x.begin() + n * stride, x.begin() + n * stride + columns);
            if (block > 1) {
              std::vector<int8_t> q(static_cast<size_t>((columns / kGroup + 3) / 4 * kStep));
              std::vector<float> scale(q.size() / kGroup);
              std::vector<float> sum(scale.size());
              op_kernels().quantize_row(x.data() + n * stride, columns, q.data(), scale.data(), sum.data());
              for (int64_t i = 0; i < columns; ++i) {
                const int64_t group = i / kGroup;
                const int64_t at = group / 4 * kStep + i % kGroup / 16 * 64 + group % 4 * 16 + i % 16;
                used[static_cast<size_t>(i)] =
                    static_cast<double>(scale[static_cast<size_t>(group)]) * q[static_cast<size_t>(at)];
              }
            }
            for (int64_t o = 0; o < outputs; ++o) {
              const Dot exact = dot(weights.floats.data() + o * columns, used.data(), columns);
              ASSERT_NEAR(out[static_cast<size_t>(n * outputs + o)], exact.value,
                          2e-6 * exact.magnitude + 1e-30)
                  << "row " << n << " output " << o << " columns " << columns;
            }
          }
        }
      }
    }
  });
}

// One activation costs at most half a step of its group, max / 254; the errors of a row are independent, so
// the error of an output is about |w| max / (254 sqrt(3)). Six times that is beyond chance.
TEST(LinearDecode, StaysNearTheExactProduct) {
  for_each_isa([] {
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      constexpr int64_t kColumns = 1536;
      constexpr int64_t kOutputs = 64;
      const RandomWeights weights(type, kOutputs, kColumns, 5);
      const std::vector<float> x = random_floats(kColumns, 6);
      const std::vector<double> exact_x(x.begin(), x.end());
      const Linear matrix(weights.tensor, {}, Compute::kFast);
      const std::vector<float> out = product(matrix, x.data(), 1, kColumns, MatmulPath::kDecode, 1);
      float largest = 0;
      for (const float value : x) largest = std::max(largest, std::abs(value));
      for (int64_t o = 0; o < kOutputs; ++o) {
        const float* w = weights.floats.data() + o * kColumns;
        double norm = 0;
        for (int64_t i = 0; i < kColumns; ++i) norm += static_cast<double>(w[i]) * static_cast<double>(w[i]);
        const double tolerance = 6 * std::sqrt(norm) * static_cast<double>(largest) / (254 * std::sqrt(3.0));
        EXPECT_NEAR(out[static_cast<size_t>(o)], dot(w, exact_x.data(), kColumns).value, tolerance);
      }
    }
  });
}

// The reference mode: fp32 all through, on both paths.
TEST(LinearF32, IsExactToFp32) {
  for_each_isa([] {
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      const int64_t columns = block_of(type) == 1 ? 301 : 3 * block_of(type);
      constexpr int64_t kOutputs = 70;
      const RandomWeights weights(type, kOutputs, columns, 7);
      const RandomWeights bias(WeightType::kF16, 1, kOutputs, 8);
      const std::vector<float> x = random_floats(kMaxRows * columns, 9);
      const std::vector<double> exact_x(x.begin(), x.end());
      const Linear matrix(weights.tensor, bias.tensor, Compute::kF32);
      for (const MatmulPath path : {MatmulPath::kDecode, MatmulPath::kPrefill}) {
        const std::vector<float> out = product(matrix, x.data(), kMaxRows, columns, path, 2);
        for (int64_t n = 0; n < kMaxRows; ++n) {
          for (int64_t o = 0; o < kOutputs; ++o) {
            const Dot exact = dot(weights.floats.data() + o * columns, exact_x.data() + n * columns, columns);
            // A sequential fp32 sum of `columns` terms: sqrt(columns) half units of its magnitude, four times
            // over.
            ASSERT_NEAR(out[static_cast<size_t>(n * kOutputs + o)],
                        exact.value + static_cast<double>(bias.floats[static_cast<size_t>(o)]),
                        exact.magnitude * 0x1p-24 * 4 * std::sqrt(static_cast<double>(columns)) + 1e-6);
          }
        }
      }
    }
  });
}

// Rounding weights and activations to bfloat16 (at most 2^-8 each, relative) is all that the fast path loses.
TEST(LinearPrefill, StaysWithinTheRoundingOfItsType) {
  for_each_isa([] {
    for (const WeightType type : kAllWeightTypes) {
      SCOPED_TRACE(weight_type_info(type).name);
      const int64_t columns = block_of(type) == 1 ? 202 : 2 * block_of(type);
      constexpr int64_t kRows = 70;
      constexpr int64_t kOutputs = 150;
      const RandomWeights weights(type, kOutputs, columns, 11);
      const std::vector<float> x = random_floats(kRows * columns, 12);
      const std::vector<double> exact_x(x.begin(), x.end());
      const Linear matrix(weights.tensor, {}, Compute::kFast);
      EXPECT_EQ(matrix.owned_bytes(), 0u);
      const std::vector<float> out = product(matrix, x.data(), kRows, columns, MatmulPath::kPrefill, 2);
      const double unit = op_kernels().multiplies_bf16 ? 2.1 * 0x1p-8 : 0x1p-20;
      for (int64_t n = 0; n < kRows; ++n) {
        for (int64_t o = 0; o < kOutputs; ++o) {
          const Dot exact = dot(weights.floats.data() + o * columns, exact_x.data() + n * columns, columns);
          ASSERT_NEAR(out[static_cast<size_t>(n * kOutputs + o)], exact.value,
                      unit * exact.magnitude + 1e-30);
        }
      }
    }
  });
}

// Bits do not depend on the other rows, their number, the number of threads or a row's place.
TEST(Linear, ARowAloneEqualsTheRowAmongMates) {
  for_each_isa([] {
    for (const Compute compute : {Compute::kFast, Compute::kF32}) {
      for (const WeightType type : {WeightType::kQ4_1, WeightType::kQ6_K, WeightType::kBF16}) {
        SCOPED_TRACE(weight_type_info(type).name);
        constexpr int64_t kColumns = 768;
        constexpr int64_t kOutputs = 197;
        constexpr int64_t kRows = 331;
        const RandomWeights weights(type, kOutputs, kColumns, 13);
        const std::vector<float> x = random_floats(kRows * kColumns, 14);
        const Linear matrix(weights.tensor, {}, compute);
        const auto same = [&](const std::vector<float>& all, int64_t row, int64_t rows, MatmulPath path,
                              int threads) {
          const std::vector<float> part =
              product(matrix, x.data() + row * kColumns, rows, kColumns, path, threads);
          EXPECT_EQ(std::memcmp(part.data(), all.data() + row * kOutputs, part.size() * sizeof(float)), 0)
              << "rows " << row << " to " << row + rows << ", threads " << threads;
        };
        const std::vector<float> prefill =
            product(matrix, x.data(), kRows, kColumns, MatmulPath::kPrefill, 1);
        for (const auto& [row, rows] : std::vector<std::pair<int64_t, int64_t>>{
                 {0, 331}, {0, 1}, {1, 1}, {62, 1}, {63, 2}, {64, 64}, {5, 65}, {200, 131}, {330, 1}}) {
          same(prefill, row, rows, MatmulPath::kPrefill, 1);
          same(prefill, row, rows, MatmulPath::kPrefill, 3);
        }
        const std::vector<float> decode =
            product(matrix, x.data(), kMaxRows, kColumns, MatmulPath::kDecode, 1);
        for (const auto& [row, rows] :
             std::vector<std::pair<int64_t, int64_t>>{{0, 8}, {0, 1}, {7, 1}, {2, 3}, {1, 7}}) {
          same(decode, row, rows, MatmulPath::kDecode, 1);
          same(decode, row, rows, MatmulPath::kDecode, 3);
        }
      }
    }
  });
}

// A group of products of different types, strided, accumulating or not: the same bits as one by one, and
// nothing written beside the outputs.
TEST(Linear, AGroupEqualsItsMembersAndKeepsToItsRows) {
  for_each_isa([] {
    constexpr int64_t kColumns = 512;
    const RandomWeights a(WeightType::kQ4_1, 96, kColumns, 20);
    const RandomWeights b(WeightType::kF16, 33, kColumns, 21);
    const RandomWeights c(WeightType::kQ5_K, 65, kColumns, 22);
    const RandomWeights bias(WeightType::kF32, 1, 33, 23);
    const Linear matrices[] = {Linear(a.tensor, {}, Compute::kFast),
                               Linear(b.tensor, bias.tensor, Compute::kFast),
                               Linear(c.tensor, {}, Compute::kFast)};
    constexpr int64_t kStride = 101;
    constexpr float kCanary = 12345;
    for (const auto& [path, rows] :
         {std::pair{MatmulPath::kDecode, int64_t{5}}, std::pair{MatmulPath::kPrefill, int64_t{67}}}) {
      const std::vector<float> x = random_floats(rows * (kColumns + 7), 24);
      std::vector<std::vector<float>> outs(3,
                                           std::vector<float>(static_cast<size_t>(rows * kStride), kCanary));
      std::vector<LinearTask> tasks;
      for (size_t i = 0; i < 3; ++i)
        tasks.push_back(
            {.linear = &matrices[i], .out = outs[i].data(), .out_stride = kStride, .accumulate = i == 2});
      LinearScratch scratch;
      ThreadPool pool(2);
      linear(tasks, x.data(), rows, kColumns + 7, path, scratch, pool);
      for (size_t i = 0; i < 3; ++i) {
        const std::vector<float> alone = product(matrices[i], x.data(), rows, kColumns + 7, path, 1);
        const int64_t outputs = matrices[i].outputs();
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t o = 0; o < kStride; ++o) {
            const float value = outs[i][static_cast<size_t>(r * kStride + o)];
            if (o >= outputs) {
              ASSERT_EQ(value, kCanary);
            } else {
              const float own = alone[static_cast<size_t>(r * outputs + o)];
              ASSERT_EQ(value, i == 2 ? kCanary + own : own) << i << ' ' << r << ' ' << o;
            }
          }
        }
      }
    }
  });
}

TEST(Linear, ANonFiniteActivationIsNotHidden) {
  for_each_isa([] {
    const RandomWeights weights(WeightType::kQ4_0, 8, 128, 30);
    const Linear matrix(weights.tensor, {}, Compute::kFast);
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = random_floats(2 * 128, 31);
      x[128 + 77] = bad;
      for (const MatmulPath path : {MatmulPath::kDecode, MatmulPath::kPrefill}) {
        const std::vector<float> out = product(matrix, x.data(), 2, 128, path, 1);
        for (size_t o = 0; o < 8; ++o) {
          EXPECT_TRUE(std::isfinite(out[o]));
          EXPECT_FALSE(std::isfinite(out[8 + o]));
        }
      }
    }
  });
}

TEST(Linear, HugeAndTinyActivationsStayFinite) {
  for_each_isa([] {
    const RandomWeights weights(WeightType::kQ8_0, 4, 64, 32);
    const Linear matrix(weights.tensor, {}, Compute::kFast);
    for (const float scale : {0.0f, 1e-40f, 1e-32f, 1e-25f, 1e30f}) {
      const std::vector<float> x = random_floats(64, 33, 1);
      std::vector<float> scaled;
      for (const float value : x) scaled.push_back(value * scale);
      const std::vector<float> out = product(matrix, scaled.data(), 1, 64, MatmulPath::kDecode, 1);
      for (const float value : out) {
        EXPECT_TRUE(std::isfinite(value)) << scale;
        if (scale == 0) {
          EXPECT_EQ(value, 0);
        } else if (scale >= 1e-25f) {
          EXPECT_NE(value, 0);
        }
      }
    }
  });
}

TEST(Linear, NothingToDo) {
  const RandomWeights weights(WeightType::kF32, 4, 8, 34);
  const Linear matrix(weights.tensor, {}, Compute::kFast);
  LinearScratch scratch;
  ThreadPool pool(1);
  float out = 7;
  const float x = 1;
  const LinearTask task{.linear = &matrix, .out = &out, .out_stride = 4};
  linear({&task, 1}, &x, 0, 8, MatmulPath::kDecode, scratch, pool);
  linear({&task, 1}, &x, 0, 8, MatmulPath::kPrefill, scratch, pool);
  linear({}, &x, 1, 8, MatmulPath::kDecode, scratch, pool);
  EXPECT_EQ(out, 7);
}

TEST(Linear, SteadyStateKeepsItsMemory) {
  const RandomWeights weights(WeightType::kQ4_1, 300, 576, 35);
  const Linear matrix(weights.tensor, {}, Compute::kFast);
  LinearScratch scratch;
  ThreadPool pool(2);
  const std::vector<float> x = random_floats(100 * 576, 36);
  std::vector<float> out(100 * 300);
  const LinearTask task{.linear = &matrix, .out = out.data(), .out_stride = 300};
  linear({&task, 1}, x.data(), 100, 576, MatmulPath::kPrefill, scratch, pool);
  linear({&task, 1}, x.data(), 8, 576, MatmulPath::kDecode, scratch, pool);
  const uint64_t bytes = scratch.bytes();
  const int64_t unused = allocations_so_far();
  ::operator delete(::operator new(1));
  ASSERT_EQ(allocations_so_far(), unused + 1) << "allocations are not counted";
  const int64_t before = allocations_so_far();
  for (int i = 0; i < 10; ++i)
    linear({&task, 1}, x.data(), 1 + i % 8, 576, MatmulPath::kDecode, scratch, pool);
  EXPECT_EQ(allocations_so_far(), before);
  linear({&task, 1}, x.data(), 100, 576, MatmulPath::kPrefill, scratch, pool);
  EXPECT_EQ(scratch.bytes(), bytes);
}

template <class F>
void expect_bad_argument(F f, const char* text) {
  try {
    f();
    ADD_FAILURE() << "expected an error with: " << text;
  } catch (const BadArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

TEST(Linear, RefusesBadArguments) {
  const RandomWeights weights(WeightType::kQ4_0, 6, 64, 37);
  const RandomWeights wide(WeightType::kQ4_0, 6, 96, 38);
  const RandomWeights bias(WeightType::kF32, 1, 5, 39);
  expect_bad_argument([&] { Linear(WeightTensor{}, {}, Compute::kFast); }, "without data");
  WeightTensor broken = weights.tensor;
  broken.columns = 63;
  expect_bad_argument([&] { Linear(broken, {}, Compute::kFast); }, "multiple of 32");
  expect_bad_argument([&] { Linear(weights.tensor, bias.tensor, Compute::kFast); }, "bias: expected 6");

  const Linear matrix(weights.tensor, {}, Compute::kFast);
  const Linear other(wide.tensor, {}, Compute::kFast);
  LinearScratch scratch;
  ThreadPool pool(1);
  std::vector<float> x(9 * 64);
  std::vector<float> out(9 * 6);
  const auto call = [&](std::vector<LinearTask> tasks, int64_t rows, int64_t stride, MatmulPath path) {
    linear(tasks, x.data(), rows, stride, path, scratch, pool);
  };
  const LinearTask task{.linear = &matrix, .out = out.data(), .out_stride = 6};
  expect_bad_argument([&] { call({task}, 9, 64, MatmulPath::kDecode); }, "expected 0..8, got 9");
  expect_bad_argument([&] { call({task}, -1, 64, MatmulPath::kPrefill); }, "got -1");
  expect_bad_argument([&] { call({task}, 1, 63, MatmulPath::kDecode); }, "strides");
  expect_bad_argument(
      [&] { call({{.linear = &matrix, .out = out.data(), .out_stride = 5}}, 1, 64, MatmulPath::kDecode); },
      "strides");
  expect_bad_argument(
      [&] { call({{.linear = &matrix, .out = nullptr, .out_stride = 6}}, 1, 64, MatmulPath::kDecode); },
      "without");
  expect_bad_argument(
      [&] {
        call({task, {.linear = &other, .out = out.data(), .out_stride = 6}}, 1, 96, MatmulPath::kDecode);
      },
      "96 inputs against 64");
}

}  // namespace
}  // namespace kascade
