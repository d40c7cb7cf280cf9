// SPDX-License-Identifier: Apache-2.0
// The GPU's operators on rows against plain loops in double, and dequantisation against base/dequantize.h.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/cuda/test/device_test.h"
#include "base/dequantize.h"
#include "kascade/dtype.h"
#include "kascade/error.h"
#include "ops/cuda/ops.h"

namespace kascade::cuda_test {
namespace {

using Bf16 = __nv_bfloat16;

float widen(uint16_t bits) { return to_float(BF16{bits}); }
uint16_t narrow(double value) { return to_bf16(static_cast<float>(value)).bits; }

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Half a unit in the last place of bf16 is 2^-9; fp32 arithmetic before the rounding adds far less.
bool near_bf16(float got, double exact, double slack = 0) {
  if (std::isnan(exact)) return std::isnan(got);
  return std::fabs(got - exact) <= std::fabs(exact) * 0x1.02p-8 + slack;
}

std::vector<uint16_t> random_bf16(Random& random, size_t count, float scale = 1) {
  std::vector<uint16_t> values(count);
  for (uint16_t& v : values) v = narrow(random.normal() * scale);
  return values;
}
std::vector<float> random_floats(Random& random, size_t count, float scale = 1) {
  std::vector<float> values(count);
  for (float& v : values) v = random.normal() * scale;
  return values;
}

void test_dequantize() {
  Random random(11);
  for (int t = 0; t < kWeightTypes; ++t) {
    const auto type = static_cast<WeightType>(t);
    const WeightTypeInfo& info = weight_type_info(type);
    for (const int64_t blocks : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1001}}) {
      current = text("dequantize %s, %d blocks", info.name, int(blocks));
      const int64_t count = blocks * info.block_elements;
      std::vector<uint8_t> stored(static_cast<size_t>(blocks * info.block_bytes));
      for (uint8_t& byte : stored) byte = static_cast<uint8_t>(random.bits() >> 40);
      std::vector<float> exact(static_cast<size_t>(count));
      dequantize_row(type, stored.data(), count, exact.data());
      // As files place them: aligned to 4 bytes for F32, else to 2.
      for (const size_t shift : {size_t{0}, size_t{type == WeightType::kF32 ? 4u : 2u}}) {
        DeviceBuffer bytes(stored.size() + 16), out(static_cast<size_t>(count) * 2 + 32);
        bytes.upload(shift, stored.data(), stored.size());
        const size_t skip = shift == 0 ? 0 : 1;
        cuda::dequantize(type, bytes.as<char>() + shift, count, out.as<Bf16>() + skip, nullptr);
        const auto got = out.download<uint16_t>(static_cast<size_t>(count) + skip + 1);
        for (size_t i = 0; i < exact.size(); ++i) {
          const uint16_t wanted = narrow(exact[i]);
          const bool fine = std::isnan(exact[i]) ? std::isnan(widen(got[i + skip])) : got[i + skip] == wanted;
          if (fine) continue;
          fail(text("element %zu is %g, exact %g", i, double{widen(got[i + skip])}, double{exact[i]}));
          break;
        }
        EXPECT(got.back() == 0xFFFF, "wrote past the end");
      }
    }
  }
  current = "dequantize refusals";
  try {
    cuda::dequantize(WeightType::kQ4_K, nullptr, 255, nullptr, nullptr);
    fail("half a block: no error");
  } catch (const BadArgument& error) {
    EXPECT(std::strstr(error.what(), "multiple of 256 for Q4_K, got 255") != nullptr, "message: %s",
           error.what());
  }
}

void test_fill_normal() {
  constexpr size_t kCount = 1000001;
  const auto filled = [](size_t count, float deviation, uint64_t seed) {
    DeviceBuffer out(count * 2 + 2);
    cuda::fill_normal(out.as<Bf16>(), static_cast<int64_t>(count), deviation, seed, nullptr);
    return out.download<uint16_t>(count + 1);
  };
  const auto values = filled(kCount, 0.5f, 42);
  EXPECT(values.back() == 0xFFFF, "wrote past the end");
  double sum = 0, squares = 0, fourth = 0, neighbours = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const double v = widen(values[i]) / 0.5;
    sum += v;
    squares += v * v;
    fourth += v * v * v * v;
    if (i > 0) neighbours += v * widen(values[i - 1]) / 0.5;
  }
  // Each is a mean of a million draws: five of its deviations are allowed.
  EXPECT(std::fabs(sum / kCount) < 0.005, "mean is %g", sum / kCount);
  EXPECT(std::fabs(squares / kCount - 1) < 0.01, "variance is %g", squares / kCount);
  EXPECT(std::fabs(fourth / kCount - 3) < 0.06, "fourth moment is %g", fourth / kCount);
  EXPECT(std::fabs(neighbours / kCount) < 0.005, "neighbours correlate by %g", neighbours / kCount);
  auto prefix = filled(1001, 0.5f, 42);
  prefix.pop_back();
  EXPECT(std::equal(prefix.begin(), prefix.end(), values.begin()), "an element depends on the count");
  const auto other = filled(kCount, 0.5f, 43);
  size_t equal = 0;
  for (size_t i = 0; i < kCount; ++i) equal += other[i] == values[i];
  EXPECT(equal < kCount / 50, "another seed gives %zu equal elements", equal);
  cuda::fill_normal(nullptr, 0, 1, 1, nullptr);
}

void test_rows_by_index() {
  Random random(12);
  for (const int64_t width : {1, 7, 8, 576, 577, 4096})
    for (const int64_t rows : {0, 1, 33}) {
      current = text("embed and gather, width %d, %d rows", int(width), int(rows));
      constexpr int64_t kTable = 50;
      const auto table = random_bf16(random, static_cast<size_t>(kTable * width));
      const auto floats = random_floats(random, static_cast<size_t>(kTable * width));
      std::vector<int32_t> indices;
      for (int64_t r = 0; r < rows; ++r) indices.push_back(static_cast<int32_t>(random.in(0, kTable - 1)));
      const DeviceBuffer d_table = DeviceBuffer::of(table), d_floats = DeviceBuffer::of(floats),
                         d_indices = DeviceBuffer::of(indices);
      const auto count = static_cast<size_t>(rows * width);
      const DeviceBuffer embedded(count * 4 + 4), gathered(count * 4 + 4);
      cuda::embed(d_table.as<Bf16>(), d_indices.as<int32_t>(), rows, width, embedded.as<float>(), nullptr);
      cuda::gather_rows(d_floats.as<float>(), d_indices.as<int32_t>(), rows, width, gathered.as<float>(),
                        nullptr);
      const auto a = embedded.download<float>(count + 1), b = gathered.download<float>(count + 1);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; ++i) {
          const auto at = static_cast<size_t>(r * width + i);
          const auto from = static_cast<size_t>(indices[static_cast<size_t>(r)] * width + i);
          EXPECT(a[at] == widen(table[from]), "embedded element %zu is %g", at, double{a[at]});
          EXPECT(b[at] == floats[from], "gathered element %zu is %g", at, double{b[at]});
        }
      EXPECT(std::isnan(a.back()) && std::isnan(b.back()), "wrote past the end");
    }
}

void check_rms_norm(int64_t width, int64_t rows) {
  current = text("rms_norm, width %d, %d rows", int(width), int(rows));
  Random random(static_cast<uint64_t>(width * 7 + rows));
  auto x = random_floats(random, static_cast<size_t>(rows * width), 3);
  const auto weight = random_floats(random, static_cast<size_t>(width));
  // A row of NaN and a row of zeros concern themselves alone.
  if (rows > 2) x[static_cast<size_t>(width)] = kNan;
  if (rows > 2) std::fill_n(x.begin() + 2 * width, width, 0.0f);
  const DeviceBuffer d_x = DeviceBuffer::of(x), d_weight = DeviceBuffer::of(weight);
  const DeviceBuffer out(x.size() * 2 + 2), alone(static_cast<size_t>(width) * 2);
  cuda::rms_norm(d_x.as<float>(), d_weight.as<float>(), 1e-5f, rows, width, out.as<Bf16>(), nullptr);
  const auto got = out.download<uint16_t>(x.size() + 1);
  EXPECT(got.back() == 0xFFFF, "wrote past the end");
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    const float* row = x.data() + r * width;
    for (int64_t i = 0; i < width; ++i) squares += double{row[i]} * row[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + double{1e-5f});
    for (int64_t i = 0; i < width; ++i) {
      const double exact = row[i] * scale * weight[static_cast<size_t>(i)];
      const float value = widen(got[static_cast<size_t>(r * width + i)]);
      if (near_bf16(value, exact)) continue;
      fail(text("row %d, element %d is %g, exact %g", int(r), int(i), double{value}, exact));
      return;
    }
  }
  if (rows == 0) return;
  const int64_t last = rows - 1;
  cuda::rms_norm(d_x.as<float>() + last * width, d_weight.as<float>(), 1e-5f, 1, width, alone.as<Bf16>(),
                 nullptr);
  const auto same = alone.download<uint16_t>(static_cast<size_t>(width));
  EXPECT(std::equal(same.begin(), same.end(), got.begin() + last * width), "a row alone has other bits");
}

void test_rms_norm() {
  for (const int64_t width : {1, 3, 4, 64, 100, 576, 577, 1536, 4096, 16384, 20000})
    for (const int64_t rows : {0, 1, 5}) check_rms_norm(width, rows);
  check_rms_norm(576, 8192);
}

void test_rope_table() {
  std::vector<double> frequencies;
  for (int i = 0; i < 5; ++i) frequencies.push_back(std::pow(500000.0, -i / 5.0));
  const DeviceBuffer d_frequencies = DeviceBuffer::of(frequencies);
  constexpr int64_t kPositions = 1000003;
  const DeviceBuffer table(static_cast<size_t>(kPositions) * 5 * 8);
  cuda::rope_table(d_frequencies.as<double>(), 5, 0, 10, table.as<float2>(), nullptr);
  cuda::rope_table(d_frequencies.as<double>(), 5, 131000, 131073, table.as<float2>(), nullptr);
  cuda::rope_table(d_frequencies.as<double>(), 5, kPositions - 1, kPositions, table.as<float2>(), nullptr);
  cuda::rope_table(d_frequencies.as<double>(), 5, 7, 7, table.as<float2>(), nullptr);
  const auto got = table.download<float>(static_cast<size_t>(kPositions) * 10);
  for (const int64_t position : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{131000}, int64_t{131071},
                                 int64_t{131072}, kPositions - 1})
    for (int i = 0; i < 5; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<size_t>(i)];
      const auto at = static_cast<size_t>((position * 5 + i) * 2);
      // A double angle of 1e6 is known to 1e-10, fp32 rounds by 6e-8.
      EXPECT(std::fabs(got[at] - std::cos(angle)) < 1e-7 && std::fabs(got[at + 1] - std::sin(angle)) < 1e-7,
             "position %d, pair %d: (%g, %g)", int(position), i, double{got[at]}, double{got[at + 1]});
    }
  EXPECT(std::isnan(got[100]) && std::isnan(got[130999 * 10]) && std::isnan(got[131073 * 10]),
         "wrote outside the positions");
}

struct RopeCase {
  int query_heads, kv_heads, head_dim, page_size;
  bool adjacent, bias, norm;
  int64_t rows, spare_stride;
};

void check_rope_append(const RopeCase& c) {
  current = text("rope_append, heads %d/%d, d %d, pages of %d, adjacent %d, bias %d, norm %d, %d rows",
                 c.query_heads, c.kv_heads, c.head_dim, c.page_size, c.adjacent, c.bias, c.norm, int(c.rows));
  Random random(77 + static_cast<uint64_t>(c.head_dim));
  const int heads = c.query_heads + 2 * c.kv_heads, half = c.head_dim / 2;
  const int64_t width = int64_t{heads} * c.head_dim, stride = width + c.spare_stride;
  constexpr int64_t kPositions = 300;
  const auto qkv = random_bf16(random, static_cast<size_t>(c.rows * stride), 2);
  const auto bias = random_floats(random, static_cast<size_t>(width));
  const auto q_norm = random_floats(random, static_cast<size_t>(c.head_dim));
  const auto k_norm = random_floats(random, static_cast<size_t>(c.head_dim));
  std::vector<float> turns;
  for (int64_t p = 0; p < kPositions; ++p)
    for (int i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * i / c.head_dim);
      turns.push_back(static_cast<float>(std::cos(angle)));
      turns.push_back(static_cast<float>(std::sin(angle)));
    }
  const int64_t pages = (2 * c.rows + c.page_size) / c.page_size + 1;
  std::vector<int32_t> positions;
  std::vector<int64_t> slots(static_cast<size_t>(pages * c.page_size));
  std::iota(slots.begin(), slots.end(), int64_t{0});
  for (size_t i = slots.size() - 1; i > 0; --i)
    std::swap(slots[i], slots[static_cast<size_t>(random.in(0, static_cast<int64_t>(i)))]);
  slots.resize(static_cast<size_t>(c.rows));
  if (c.rows > 2) slots[1] = -1;
  for (int64_t r = 0; r < c.rows; ++r)
    positions.push_back(static_cast<int32_t>(random.in(0, kPositions - 1)));
  const auto cache = static_cast<size_t>(pages * c.kv_heads * c.page_size * c.head_dim);

  const DeviceBuffer d_qkv = DeviceBuffer::of(qkv), d_bias = DeviceBuffer::of(bias),
                     d_q_norm = DeviceBuffer::of(q_norm), d_k_norm = DeviceBuffer::of(k_norm),
                     d_turns = DeviceBuffer::of(turns), d_positions = DeviceBuffer::of(positions),
                     d_slots = DeviceBuffer::of(slots), keys(cache * 2), values(cache * 2);
  cuda::RopeAppend call;
  call.qkv = d_qkv.as<Bf16>();
  call.row_stride = stride;
  call.bias = c.bias ? d_bias.as<float>() : nullptr;
  call.q_norm = c.norm ? d_q_norm.as<float>() : nullptr;
  call.k_norm = c.norm ? d_k_norm.as<float>() : nullptr;
  call.norm_epsilon = 1e-6f;
  call.rope_table = d_turns.as<float2>();
  call.adjacent = c.adjacent;
  call.positions = d_positions.as<int32_t>();
  call.slots = d_slots.as<int64_t>();
  call.k_pages = keys.as<Bf16>();
  call.v_pages = values.as<Bf16>();
  call.page_size = c.page_size;
  call.query_heads = c.query_heads;
  call.kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  cuda::rope_append(call, c.rows, nullptr);

  const auto got = d_qkv.download<uint16_t>(qkv.size());
  const auto got_keys = keys.download<uint16_t>(cache), got_values = values.download<uint16_t>(cache);
  std::vector<uint8_t> written(cache, 0);
  for (int64_t r = 0; r < c.rows; ++r)
    for (int head = 0; head < heads; ++head) {
      const bool is_query = head < c.query_heads, is_key = !is_query && head < c.query_heads + c.kv_heads;
      const auto first = static_cast<size_t>(r * stride + int64_t{head} * c.head_dim);
      std::vector<double> x(static_cast<size_t>(c.head_dim));
      double squares = 0;
      for (size_t d = 0; d < x.size(); ++d) {
        x[d] = widen(qkv[first + d]) + (c.bias ? bias[static_cast<size_t>(head * c.head_dim) + d] : 0);
        squares += x[d] * x[d];
      }
      double most = 0;
      if (is_query || is_key) {
        const double scale = 1 / std::sqrt(squares / c.head_dim + double{1e-6f});
        for (size_t d = 0; d < x.size(); ++d) {
          if (c.norm) x[d] *= scale * (is_query ? q_norm : k_norm)[d];
          most = std::max(most, std::fabs(x[d]));
        }
        for (int i = 0; i < half; ++i) {
          const auto a = static_cast<size_t>(c.adjacent ? 2 * i : i);
          const auto b = static_cast<size_t>(c.adjacent ? 2 * i + 1 : i + half);
          const auto turn = static_cast<size_t>((positions[static_cast<size_t>(r)] * half + i) * 2);
          const double cosine = turns[turn], sine = turns[turn + 1], p = x[a], q = x[b];
          x[a] = p * cosine - q * sine;
          x[b] = p * sine + q * cosine;
        }
      }
      const int64_t slot = slots[static_cast<size_t>(r)];
      const int kv_head = head - c.query_heads - (is_key ? 0 : c.kv_heads);
      for (size_t d = 0; d < x.size(); ++d) {
        // The difference of two products loses what fp32 rounds off them.
        const double slack = most * 0x1p-20;
        if (is_query) {
          EXPECT(near_bf16(widen(got[first + d]), x[d], slack), "row %d, head %d, q[%zu] is %g, exact %g",
                 int(r), head, d, double{widen(got[first + d])}, x[d]);
          continue;
        }
        EXPECT(got[first + d] == qkv[first + d], "row %d, head %d: k or v changed in place", int(r), head);
        if (slot < 0) continue;
        const auto at = static_cast<size_t>(
            ((slot / c.page_size * c.kv_heads + kv_head) * c.page_size + slot % c.page_size) * c.head_dim +
            static_cast<int64_t>(d));
        const float value = widen((is_key ? got_keys : got_values)[at]);
        EXPECT(near_bf16(value, x[d], slack), "row %d, head %d, cached [%zu] is %g, exact %g", int(r), head,
               d, double{value}, x[d]);
        written[at] = 1;
      }
    }
  for (size_t i = 0; i < cache; ++i)
    if (written[i] == 0 && (got_keys[i] != 0xFFFF || got_values[i] != 0xFFFF)) {
      fail(text("cache element %zu has no row, yet was written", i));
      break;
    }
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t i = width; i < stride; ++i)
      EXPECT(got[static_cast<size_t>(r * stride + i)] == qkv[static_cast<size_t>(r * stride + i)],
             "wrote between rows");
}

void test_rope_append() {
  for (const int head_dim : {128, 64, 256, 96, 80, 2, 6})
    for (int kind = 0; kind < 8; ++kind)
      check_rope_append({.query_heads = head_dim == 96 ? 3 : 4,
                         .kv_heads = kind % 3 == 0 ? 1 : 2,
                         .head_dim = head_dim,
                         .page_size = kind % 2 == 0 ? 16 : 7,
                         .adjacent = (kind & 1) != 0,
                         .bias = (kind & 2) != 0,
                         .norm = (kind & 4) != 0,
                         .rows = 5,
                         .spare_stride = kind == 3   ? 1
                                         : kind == 5 ? 8
                                                     : 0});
  for (const int64_t rows : {0, 1, 700})
    check_rope_append({.query_heads = 7,
                       .kv_heads = 1,
                       .head_dim = 64,
                       .page_size = 64,
                       .adjacent = false,
                       .bias = true,
                       .norm = true,
                       .rows = rows,
                       .spare_stride = 0});
  current = "rope_append refusals";
  for (const int head_dim : {0, 7, 258}) {
    cuda::RopeAppend call;
    call.page_size = 16;
    call.head_dim = head_dim;
    try {
      cuda::rope_append(call, 1, nullptr);
      fail("no error");
    } catch (const BadArgument& error) {
      EXPECT(std::strstr(error.what(), "head_dim is") != nullptr, "message: %s", error.what());
    }
  }
}

void test_silu_multiply() {
  Random random(5);
  for (const int64_t ffn : {1, 33, 1536, 8960})
    for (const int64_t rows : {0, 1, 6}) {
      current = text("silu_multiply, ffn %d, %d rows", int(ffn), int(rows));
      auto x = random_bf16(random, static_cast<size_t>(rows * 2 * ffn), 4);
      if (rows > 1 && ffn > 8) {
        const float extremes[] = {0, -0.0f, 1e4f, -1e4f, -88, -90, 3e38f, -3e38f, kNan};
        for (size_t i = 0; i < std::size(extremes); ++i) x[i] = narrow(extremes[i]);
      }
      const DeviceBuffer d_x = DeviceBuffer::of(x), out(static_cast<size_t>(rows * ffn) * 2 + 2);
      cuda::silu_multiply(d_x.as<Bf16>(), rows, ffn, out.as<Bf16>(), nullptr);
      const auto got = out.download<uint16_t>(static_cast<size_t>(rows * ffn) + 1);
      EXPECT(got.back() == 0xFFFF, "wrote past the end");
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < ffn; ++i) {
          const double gate = widen(x[static_cast<size_t>(r * 2 * ffn + i)]);
          const double up = widen(x[static_cast<size_t>(r * 2 * ffn + ffn + i)]);
          const double exact = gate / (1 + std::exp(-gate)) * up;
          const float value = widen(got[static_cast<size_t>(r * ffn + i)]);
          if (std::fabs(exact) > 3.3e38 && std::isinf(value)) continue;
          EXPECT(near_bf16(value, exact, 1e-30), "row %d, element %d is %g, exact %g", int(r), int(i),
                 double{value}, exact);
        }
    }
}

void test_arg_max() {
  Random random(6);
  for (const int64_t vocabulary : {1, 2, 31, 1000, 4097, 49152, 128256}) {
    current = text("arg_max, vocabulary %d", int(vocabulary));
    std::vector<std::vector<float>> rows;
    std::vector<int32_t> wanted;
    const auto add = [&](std::vector<float> row, int64_t best) {
      rows.push_back(std::move(row));
      wanted.push_back(static_cast<int32_t>(best));
    };
    const auto size = static_cast<size_t>(vocabulary);
    for (int n = 0; n < 5; ++n) {
      auto row = random_floats(random, size);
      for (float& x : row) x -= 100;  // all negative
      const int64_t best = random.in(0, vocabulary - 1);
      row[static_cast<size_t>(best)] = n == 0 ? kInfinity : -90.0f;
      add(row, n == 0 ? -1 : best);
    }
    add(std::vector<float>(size, 1.5f), 0);
    add(std::vector<float>(size, -kInfinity), -1);
    std::vector<float> zeros(size, -1.0f);
    zeros.back() = 0.0f;
    zeros[size / 2] = -0.0f;
    add(zeros, vocabulary / 2);
    auto tie = random_floats(random, size);
    for (float& x : tie) x = std::min(x, 3.0f);
    tie[size / 3] = tie[size - 1] = 4;
    add(tie, static_cast<int64_t>(size / 3));
    auto bad = random_floats(random, size);
    bad[size / 2] = kNan;
    add(bad, -1);
    auto negative_nan = random_floats(random, size);
    negative_nan.back() = -kNan;
    add(negative_nan, -1);
    std::vector<float> lowest(size, -kInfinity);
    lowest.back() = std::numeric_limits<float>::lowest();
    add(lowest, vocabulary - 1);
    std::vector<float> all;
    for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
    const DeviceBuffer logits = DeviceBuffer::of(all), tokens(rows.size() * 4 + 4);
    cuda::arg_max(logits.as<float>(), static_cast<int64_t>(rows.size()), vocabulary, tokens.as<int32_t>(),
                  nullptr);
    const auto got = tokens.download<int32_t>(rows.size());
    for (size_t r = 0; r < rows.size(); ++r)
      EXPECT(got[r] == wanted[r], "row %zu gives %d, expected %d", r, got[r], wanted[r]);
    cuda::arg_max(logits.as<float>(), 0, vocabulary, tokens.as<int32_t>(), nullptr);
  }
}

const Registered kTests[] = {{20, "ops: dequantize", test_dequantize, "all sanitize"},
                             {20, "ops: fill_normal", test_fill_normal, "all"},
                             {20, "ops: embed, gather", test_rows_by_index, "all sanitize"},
                             {20, "ops: rms_norm", test_rms_norm, "all sanitize"},
                             {20, "ops: rope_table", test_rope_table, "all"},
                             {20, "ops: rope_append", test_rope_append, "all sanitize"},
                             {20, "ops: silu_multiply", test_silu_multiply, "all sanitize"},
                             {20, "ops: arg_max", test_arg_max, "all sanitize"}};

}  // namespace
}  // namespace kascade::cuda_test
