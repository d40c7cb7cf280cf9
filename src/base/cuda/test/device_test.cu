// SPDX-License-Identifier: Apache-2.0
// The device test program: kascade_cuda_test --suite all|sanitize|host|bench_ops [--filter TEXT]. host needs
// no GPU; sanitize runs every kernel once at small shapes, for compute-sanitizer.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/cuda/launch.h"
#include "base/cuda/mix.cuh"
#include "base/cuda/test/device_test.h"

namespace kascade::cuda_test {

std::string current;

namespace {

int failures = 0;

struct Test {
  int place;
  std::string name;
  void (*run)();
  std::string suites;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

bool has_device() {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess) return major == 9;
  cudaGetLastError();
  return false;
}

bool is_word_of(const std::string& word, const std::string& words) {
  return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

int run(int argc, char** argv) {
  std::string suite = "all", filter;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--suite") == 0) suite = argv[i + 1];
    if (std::strcmp(argv[i], "--filter") == 0) filter = argv[i + 1];
  }
  if (suite != "host" && !has_device()) {
    std::printf("no CUDA device of compute capability 9.0\n");
    return 77;
  }
  std::stable_sort(tests().begin(), tests().end(),
                   [](const Test& a, const Test& b) { return a.place < b.place; });
  int ran = 0;
  for (const Test& test : tests()) {
    if (!is_word_of(suite, test.suites) || test.name.find(filter) == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    const int before = failures;
    current = test.name;
    std::printf("== %s\n", test.name.c_str());
    std::fflush(stdout);
    try {
      test.run();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    ++ran;
    std::printf("== %s: %s, %.1f s\n", test.name.c_str(), failures == before ? "passed" : "FAILED",
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failures\n", ran, failures);
  return failures == 0 && ran > 0 ? 0 : 1;
}

}  // namespace

Registered::Registered(int place, const char* name, void (*run)(), const char* suites) {
  tests().push_back({place, name, run, suites});
}

void fail(const std::string& message) {
  if (++failures <= 40) std::printf("FAIL %s: %s\n", current.c_str(), message.c_str());
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

uint64_t Random::bits() { return cuda::mix(state_ += cuda::kMixStep); }

int64_t Random::in(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
}

float Random::normal() {
  // Irwin-Hall with four uniforms, scaled to unit variance.
  float sum = 0;
  const uint64_t x = bits();
  for (int i = 0; i < 4; ++i) sum += static_cast<float>((x >> (16 * i)) & 0xFFFFu) / 65536.0f;
  return (sum - 2.0f) * 1.7320508f;
}

DeviceBuffer::DeviceBuffer(size_t bytes) : DeviceBytes(bytes, "test") {
  if (bytes > 0) cuda::check_cuda(cudaMemset(as(), 0xFF, bytes), "cudaMemset", "test");
}

}  // namespace kascade::cuda_test

int main(int argc, char** argv) { return kascade::cuda_test::run(argc, argv); }
