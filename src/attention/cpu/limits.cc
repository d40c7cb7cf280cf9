// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/limits.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

namespace kascade::cpu {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Small enough to share evenly, large enough that a prefetcher gets under way.
constexpr int64_t kReadPiece = int64_t{1} << 20;
constexpr int kRuns = 5;
// What reads fastest differs between machines: the hardware's own prefetchers, or one of these.
constexpr ReadAhead kReadAheads[] = {{0, 0}, {0, 2 << 10}, {12 << 10, 0}, {12 << 10, 2 << 10}};

double best_read_rate(const Kernels& kernels, ThreadPool& pool, const char* data, int64_t bytes) {
  const int64_t pieces = bytes / kReadPiece;
  std::vector<float> sinks(static_cast<size_t>(pool.threads()) * 16);
  double best = 0;
  for (const ReadAhead& ahead : kReadAheads) {
    for (int run = 0; run < kRuns; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      pool.parallel_for(pieces, [&](int64_t piece, int worker) {
        kernels.read_memory(data + piece * kReadPiece, kReadPiece, ahead,
                            &sinks[static_cast<size_t>(worker) * 16]);
      });
      best = std::max(best, static_cast<double>(pieces * kReadPiece) / seconds_since(begin));
    }
  }
  return best;
}

double best_multiply_rate(double (*multiply)(int64_t, float*), ThreadPool& pool) {
  constexpr int64_t kRounds = 100'000;
  constexpr int64_t kPieces = 16;
  std::vector<float> sinks(static_cast<size_t>(pool.threads()) * 16, 0.5f);
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<double> operations(static_cast<size_t>(pool.threads()) * 8);
    const auto begin = std::chrono::steady_clock::now();
    pool.parallel_for(kPieces, [&](int64_t, int worker) {
      float& sink = sinks[static_cast<size_t>(worker) * 16];
      sink = 0.5f;
      operations[static_cast<size_t>(worker) * 8] += multiply(kRounds, &sink);
    });
    double total = 0;
    for (const double count : operations) total += count;
    best = std::max(best, total / seconds_since(begin));
  }
  return best;
}

}  // namespace

Limits measure_limits(const Kernels& kernels, ThreadPool& pool, const void* buffer, int64_t buffer_bytes) {
  Limits limits;
  limits.read_gb_per_s = best_read_rate(kernels, pool, static_cast<const char*>(buffer), buffer_bytes) * 1e-9;
  limits.f32_tflop_per_s = best_multiply_rate(kernels.multiply_floats, pool) * 1e-12;
  limits.bf16_tflop_per_s = best_multiply_rate(kernels.multiply_bfloats, pool) * 1e-12;
  return limits;
}

int64_t last_level_cache_bytes() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    int64_t size = 0;
    std::string unit;
    if (!(file >> size)) continue;
    file >> unit;
    if (unit == "K") size <<= 10;
    if (unit == "M") size <<= 20;
    largest = std::max(largest, size);
  }
#if defined(_SC_LEVEL3_CACHE_SIZE)
  if (largest == 0) largest = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
#endif
  return largest > 0 ? largest : int64_t{32} << 20;
}

}  // namespace kascade::cpu
