// SPDX-License-Identifier: Apache-2.0
// Refused memory and failed calls: what the message says, with a device or without.
#include <limits>

#include "base/cuda/launch.h"
#include "base/cuda/memory.h"
#include "base/cuda/test/device_test.h"

namespace kascade::cuda_test {
namespace {

void test_memory_refused() {
  const std::pair<uint64_t, const char*> amounts[] = {
      {0, "0.00 GB"},
      {1, "0.000 MB"},
      {9'999'999, "10.000 MB"},
      {10'000'000, "0.01 GB"},
      {150'754'820'096, "150.75 GB"},
      {std::numeric_limits<uint64_t>::max(), "18446744073.71 GB"}};
  for (const auto& [bytes, expected] : amounts)
    EXPECT(cuda::gigabytes(bytes) == expected, "%llu bytes: %s", static_cast<unsigned long long>(bytes),
           cuda::gigabytes(bytes).c_str());

  void* memory = nullptr;
  EXPECT(cudaMalloc(&memory, size_t{1} << 50) != cudaSuccess, "a petabyte was allocated");
  std::string message;
  try {
    cuda::throw_memory_refused("cache", uint64_t{1} << 50, cuda::Place::kDevice);
  } catch (const OutOfMemory& error) {
    message = error.what();
  }
  EXPECT(message.starts_with("cache: cannot allocate 1125899.91 GB of device memory ("), "%s",
         message.c_str());
  EXPECT(message.ends_with("free on the device)") || message.ends_with("free on the device is not known)"),
         "%s", message.c_str());
  EXPECT(cudaGetLastError() != cudaErrorMemoryAllocation,
         "the refused allocation is left for the next launch to report");
}

void test_failed_call() {
  const auto message_of = [](auto check) -> std::string {
    try {
      check();
    } catch (const DeviceError& error) {
      return error.what();
    }
    return "no error";
  };
  for (const char* kernel : {static_cast<const char*>(nullptr), "some_kernel"}) {
    // Refused with a device or without, and left as the last error.
    const cudaError_t error = cudaSetDevice(1 << 20);
    const std::string message = message_of([&] { cuda::check_cuda(error, "cudaSetDevice", kernel); });
    const std::string expected =
        std::string(kernel == nullptr ? "cudaSetDevice: " : "cudaSetDevice for kernel some_kernel: ") +
        cudaGetErrorName(error) + " (";
    EXPECT(message.starts_with(expected), "%s, expected %s", message.c_str(), expected.c_str());
    // Without a driver every call leaves an error of its own, that of asking for the last one too.
    EXPECT(cudaPeekAtLastError() != cudaErrorInvalidDevice,
           "the error is left for the next launch to report");
  }
}

const Registered kTests[] = {{5, "memory refused", test_memory_refused, "host all"},
                             {5, "failed call", test_failed_call, "host all"}};

}  // namespace
}  // namespace kascade::cuda_test
