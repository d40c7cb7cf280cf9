// SPDX-License-Identifier: Apache-2.0
// What the files of the device test program share: registered tests, failures, random numbers, device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/cuda/device_bytes.h"

namespace kascade::cuda_test {

/// A test of the suites named in one string, made before main. Tests run in the order of their places, those
/// of one place and file in the order made.
struct Registered {
  Registered(int place, const char* name, void (*run)(), const char* suites);
};

// Name of the running case, printed with failures.
extern std::string current;
void fail(const std::string& message);

template <class... Args>
std::string text(const char* format, Args... args) {
  char line[400];
  std::snprintf(line, sizeof line, format, args...);
  return line;
}

#define EXPECT(condition, ...)                 \
  do {                                         \
    if (!(condition)) fail(text(__VA_ARGS__)); \
  } while (false)

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

/// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t in(int64_t low, int64_t high);  // inclusive
  float normal();

 private:
  uint64_t state_;
};

/// Device memory filled with 0xFF (NaN in every float type, -1 in integers).
class DeviceBuffer : public cuda::DeviceBytes {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);

  template <class T>
  static DeviceBuffer of(const std::vector<T>& values) {
    DeviceBuffer buffer(values.size() * sizeof(T));
    buffer.upload(0, values.data(), values.size() * sizeof(T));
    return buffer;
  }
};

}  // namespace kascade::cuda_test
