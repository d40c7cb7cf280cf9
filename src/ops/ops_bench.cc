// SPDX-License-Identifier: Apache-2.0
// Speed of the linear layers against what the machine can do: decode against its read bandwidth, prefill
// against its multiply-add peak. Prints one line per case: the best of several rounds, and its share of the
// limit.
//   ops_bench [threads [type]]      KASCADE_ISA forces an instruction set
#include <fmt/format.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <random>
#include <string_view>
#include <vector>

#include "kascade/dtype.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Over four times a last-level cache of 32 MB, so that weights come from memory.
constexpr int64_t kWeightBytes = int64_t{160} << 20;
constexpr int kRounds = 5;

// With one thread its processor time, which other processes disturb less; else time of day.
bool one_thread = false;

double seconds_now() {
  timespec now;
  clock_gettime(one_thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of one call f(i), i < count: the lower quartile over all calls of some rounds after a first one.
// Calls are short, so those that another process interrupted fall out.
template <class F>
double call_seconds(int64_t count, F f) {
  std::vector<double> seconds;
  for (int round = 0; round <= kRounds; ++round) {
    for (int64_t i = 0; i < count; ++i) {
      const double start = seconds_now();
      f(i);
      if (round > 0) seconds.push_back(seconds_now() - start);
    }
  }
  const auto quartile = seconds.begin() + static_cast<int64_t>(seconds.size()) / 4;
  std::nth_element(seconds.begin(), quartile, seconds.end());
  return *quartile;
}

double read_gb_per_s(ThreadPool& pool) {
  const std::vector<uint64_t> data(kWeightBytes / sizeof(uint64_t), 1);
  constexpr int64_t kPart = 1 << 17;  // 1 MB a call
  constexpr int64_t kCut = 1 << 12;
  std::vector<uint64_t> sums(kPart / kCut);
  uint64_t total = 0;
  const double seconds = call_seconds(static_cast<int64_t>(data.size()) / kPart, [&](int64_t part) {
    pool.parallel_for(kPart / kCut, [&](int64_t cut, int) {
      uint64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      const uint64_t* begin = data.data() + part * kPart + cut * kCut;
      for (const uint64_t* p = begin; p < begin + kCut; p += 32) {
        // One word of each line: the lines travel whole.
        s0 += p[0];
        s1 += p[8];
        s2 += p[16];
        s3 += p[24];
      }
      sums[static_cast<size_t>(cut)] = s0 + s1 + s2 + s3;
    });
    for (const uint64_t sum : sums) total += sum;
  });
  if (total == 0) std::puts("");  // keeps the sums alive
  return static_cast<double>(kPart * 8) / seconds * 1e-9;
}

#if defined(__x86_64__)
constexpr int64_t kPeakSteps = 1 << 14;

// Twelve independent chains hide the latency of the instruction; one statement, so that all stay in
// registers.
#define KASCADE_TWELVE(op, reg, sum, x)                                                               \
  asm volatile(op " %12, %12, %0\n" op " %12, %12, %1\n" op " %12, %12, %2\n" op " %12, %12, %3\n" op \
                  " %12, %12, %4\n" op " %12, %12, %5\n" op " %12, %12, %6\n" op " %12, %12, %7\n" op \
                  " %12, %12, %8\n" op " %12, %12, %9\n" op " %12, %12, %10\n" op " %12, %12, %11\n"  \
               : "+" reg(sum[0]), "+" reg(sum[1]), "+" reg(sum[2]), "+" reg(sum[3]), "+" reg(sum[4]), \
                 "+" reg(sum[5]), "+" reg(sum[6]), "+" reg(sum[7]), "+" reg(sum[8]), "+" reg(sum[9]), \
                 "+" reg(sum[10]), "+" reg(sum[11])                                                   \
               : reg(x))

__attribute__((target("avx512f"))) double peak_512(bool bf16) {
  const double seconds = call_seconds(
      100, [&](int64_t) __attribute__((target("avx512f"))) {
        __m512 sum[12] = {};
        const __m512 x = _mm512_set1_ps(1e-3f);
        for (int64_t step = 0; step < kPeakSteps; ++step) {
          if (bf16)
            KASCADE_TWELVE("vdpbf16ps", "v", sum, x);
          else
            KASCADE_TWELVE("vfmadd231ps", "v", sum, x);
        }
      });
  return static_cast<double>(kPeakSteps * 12 * (bf16 ? 64 : 32)) / seconds * 1e-9;
}

__attribute__((target("avx2,fma"))) double peak_256() {
  const double seconds = call_seconds(
      100, [&](int64_t) __attribute__((target("avx2,fma"))) {
        __m256 sum[12] = {};
        const __m256 x = _mm256_set1_ps(1e-3f);
        for (int64_t step = 0; step < kPeakSteps; ++step) KASCADE_TWELVE("vfmadd231ps", "x", sum, x);
      });
  return static_cast<double>(kPeakSteps * 12 * 16) / seconds * 1e-9;
}
#undef KASCADE_TWELVE
#endif

// Of one thread, in GFLOP/s, for the type that prefill multiplies; 0 where unknown.
double peak_gflop_per_s(bool bf16) {
#if defined(__x86_64__)
  const std::string_view isa = op_kernels().name;
  if (isa == "avx512_bf16") return peak_512(bf16);
  if (isa == "avx512") return peak_512(false);
  if (isa == "avx2") return peak_256();
#endif
  static_cast<void>(bf16);
  return 0;
}

// Matrices of random weights with sane scales, together kWeightBytes.
struct Weights {
  int64_t row_bytes = 0;
  std::vector<uint8_t> bytes;
  std::vector<Linear> matrices;

  Weights(WeightType type, int64_t rows, int64_t columns, int64_t total_bytes, Compute compute) {
    WeightTensor tensor{.data = nullptr, .type = type, .rows = rows, .columns = columns};
    const WeightTypeInfo& info = weight_type_info(type);
    row_bytes = tensor.row_bytes();
    const int64_t count = std::max<int64_t>(1, total_bytes / tensor.bytes());
    bytes.resize(static_cast<size_t>(count * tensor.bytes()));
    std::mt19937_64 random(1);
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(bytes.data() + i, &word, sizeof(word));
    }
    // Every half, wherever it is, in (-2, 2): no type then sees a NaN or an infinity.
    if (info.block_elements == 1) {
      for (size_t i = 1; i < bytes.size(); i += 2) bytes[i] &= 0xBF;
    } else {
      for (size_t block = 0; block < bytes.size(); block += static_cast<size_t>(info.block_bytes)) {
        const size_t at = type == WeightType::kQ6_K ? block + 208 : block;
        bytes[at + 1] &= 0xBF;
        if (type != WeightType::kQ6_K) bytes[at + 3] &= 0xBF;
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      tensor.data = bytes.data() + i * tensor.bytes();
      matrices.emplace_back(tensor, WeightTensor{}, compute);
    }
  }
};

// All linear layers of SmolLM2-135M as its Q4_1 file stores them: tokens a second if there were nothing else.
void run_small_model(ThreadPool& pool, LinearScratch& scratch) {
  constexpr int kLayers = 30;
  constexpr int64_t kHidden = 576;
  constexpr int64_t kFfn = 1536;
  constexpr int64_t kRows = 512;
  const WeightType type = WeightType::kQ4_1;
  // Each holds one matrix a layer.
  const auto layers = [&](int64_t rows, int64_t columns) {
    return Weights(type, rows, columns, kLayers * rows * columns / 32 * 20, Compute::kFast);
  };
  const Weights q = layers(kHidden, kHidden), k = layers(192, kHidden), v = layers(192, kHidden);
  const Weights o = layers(kHidden, kHidden), gate = layers(kFfn, kHidden), up = layers(kFfn, kHidden);
  const Weights down = layers(kHidden, kFfn);
  const Weights head(WeightType::kQ8_0, 49152, kHidden, 1, Compute::kFast);
  std::vector<float> x(kRows * kFfn, 0.25f);
  std::vector<float> out(kRows * 2 * kFfn);
  std::vector<float> logits(49152);
  const auto task = [&](const Weights& weights, size_t layer, int64_t column) {
    return LinearTask{.linear = &weights.matrices[layer], .out = out.data() + column, .out_stride = 2 * kFfn};
  };
  const auto forward = [&](int64_t rows, MatmulPath path) {
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const LinearTask qkv[] = {task(q, layer, 0), task(k, layer, kHidden), task(v, layer, kHidden + 192)};
      linear(qkv, x.data(), rows, kFfn, path, scratch, pool);
      const LinearTask output[] = {task(o, layer, 0)};
      linear(output, x.data(), rows, kFfn, path, scratch, pool);
      const LinearTask ffn[] = {task(gate, layer, 0), task(up, layer, kFfn)};
      linear(ffn, x.data(), rows, kFfn, path, scratch, pool);
      const LinearTask back[] = {task(down, layer, 0)};
      linear(back, x.data(), rows, kFfn, path, scratch, pool);
    }
  };
  const double decode = call_seconds(20, [&](int64_t) {
    forward(1, MatmulPath::kDecode);
    const LinearTask last{.linear = head.matrices.data(), .out = logits.data(), .out_stride = 49152};
    linear({&last, 1}, x.data(), 1, kFfn, MatmulPath::kDecode, scratch, pool);
  });
  const double prefill = call_seconds(1, [&](int64_t) { forward(kRows, MatmulPath::kPrefill); });
  fmt::print("linear layers of SmolLM2-135M, Q4_1: decode {:.0f} tokens/s, prefill {:.0f} tokens/s\n",
             1 / decode, kRows / prefill);
}

void run(int threads, std::string_view only) {
  ThreadPool pool(threads);
  one_thread = pool.threads() == 1;
  LinearScratch scratch;
  const double read = read_gb_per_s(pool);
  const bool bf16 = op_kernels().multiplies_bf16;
  const double peak = peak_gflop_per_s(bf16) * pool.threads();
  const double peak_f32 = peak_gflop_per_s(false) * pool.threads();
  fmt::print("{} threads, {}: reads {:.1f} GB/s, multiplies {:.0f} GFLOP/s in {}, {:.0f} in f32\n",
             pool.threads(), op_kernels().name, read, peak, bf16 ? "bf16" : "f32", peak_f32);

  run_small_model(pool, scratch);
  for (int type = 0; type < kWeightTypes; ++type) {
    const auto weight_type = static_cast<WeightType>(type);
    const WeightTypeInfo& info = weight_type_info(weight_type);
    if (!only.empty() && only != info.name) continue;
    for (const int64_t columns : {576, 2048}) {
      if (columns % info.block_elements != 0) continue;
      const Weights weights(weight_type, 1536, columns, kWeightBytes, Compute::kFast);
      const std::vector<float> x(static_cast<size_t>(8 * columns), 0.5f);
      std::vector<float> out(8 * 1536);
      for (const int64_t rows : {1, 4}) {
        const double seconds = call_seconds(static_cast<int64_t>(weights.matrices.size()), [&](int64_t i) {
          const LinearTask task{
              .linear = &weights.matrices[static_cast<size_t>(i)], .out = out.data(), .out_stride = 1536};
          linear({&task, 1}, x.data(), rows, columns, MatmulPath::kDecode, scratch, pool);
        });
        const double rate = static_cast<double>(1536 * weights.row_bytes) / seconds * 1e-9;
        fmt::print("decode  {:5} 1536 x {:4}, {} rows: {:6.1f} GB/s, {:3.0f} % of reading\n", info.name,
                   columns, rows, rate, 100 * rate / read);
      }
    }
  }
  for (const Compute compute : {Compute::kFast, Compute::kF32}) {
    for (int type = 0; type < kWeightTypes; ++type) {
      const auto weight_type = static_cast<WeightType>(type);
      const WeightTypeInfo& info = weight_type_info(weight_type);
      if (!only.empty() && only != info.name) continue;
      const int64_t columns = info.block_elements == 256 ? 512 : 576;
      const Weights weights(weight_type, 1536, columns, 8 << 20, compute);
      constexpr int64_t kRows = 512;
      const std::vector<float> x(static_cast<size_t>(kRows * columns), 0.5f);
      std::vector<float> out(static_cast<size_t>(kRows * 1536));
      const double seconds = call_seconds(static_cast<int64_t>(weights.matrices.size()), [&](int64_t i) {
        const LinearTask task{
            .linear = &weights.matrices[static_cast<size_t>(i)], .out = out.data(), .out_stride = 1536};
        linear({&task, 1}, x.data(), kRows, columns, MatmulPath::kPrefill, scratch, pool);
      });
      const double rate = 2.0 * kRows * 1536 * static_cast<double>(columns) / seconds * 1e-9;
      const double limit = compute == Compute::kFast ? peak : peak_f32;
      fmt::print("prefill {:5} 1536 x {:4}, {} rows, {}: {:6.0f} GFLOP/s", info.name, columns, kRows,
                 compute == Compute::kFast ? "fast" : "f32 ", rate);
      if (limit > 0) fmt::print(", {:3.0f} % of the peak", 100 * rate / limit);
      fmt::print("\n");
    }
  }
}

}  // namespace
}  // namespace kascade

int main(int argc, char** argv) {
  try {
    kascade::run(argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "ops_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
