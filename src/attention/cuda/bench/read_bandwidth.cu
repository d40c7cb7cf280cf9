// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <string>

#include "attention/cuda/bench/read_bandwidth.h"
#include "base/cuda/launch.h"
#include "base/cuda/memory.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using cuda::check_cuda;

constexpr const char* kName = "read bandwidth";
constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;
constexpr size_t kBytes = size_t{4} << 30;

__global__ void read_kernel(const uint4* data, int64_t count, uint32_t* out) {
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 8
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint4 x = data[i];
    sum |= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 0x12345679u) *out = sum;
}

}  // namespace

void enqueue_read(const void* data, size_t bytes, uint32_t* out, cudaStream_t stream) {
  const int blocks = cuda::multiprocessors(kName) * kBlocksPerProcessor;
  read_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint4*>(data),
                                               static_cast<int64_t>(bytes / 16), out);
  check_cuda(cudaGetLastError(), "launch", kName);
}

double measure_cuda_read_gb_per_s() {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, kBytes);
  if (error == cudaErrorMemoryAllocation) cuda::throw_memory_refused(kName, kBytes, cuda::Place::kDevice);
  check_cuda(error, "cudaMalloc", kName);
  cudaEvent_t begin = nullptr, end = nullptr;
  const auto free_all = [&] {
    cudaFree(data);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  };
  std::array<double, 9> milliseconds{};
  try {
    check_cuda(cudaEventCreate(&begin), "cudaEventCreate", kName);
    check_cuda(cudaEventCreate(&end), "cudaEventCreate", kName);
    check_cuda(cudaMemset(data, 1, kBytes), "cudaMemset", kName);
    enqueue_read(data, kBytes, static_cast<uint32_t*>(data), nullptr);
    for (double& time : milliseconds) {
      check_cuda(cudaEventRecord(begin, nullptr), "cudaEventRecord", kName);
      enqueue_read(data, kBytes, static_cast<uint32_t*>(data), nullptr);
      check_cuda(cudaEventRecord(end, nullptr), "cudaEventRecord", kName);
      check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize", kName);
      float elapsed = 0;
      check_cuda(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime", kName);
      time = elapsed;
    }
  } catch (...) {
    free_all();
    throw;
  }
  free_all();
  std::sort(milliseconds.begin(), milliseconds.end());
  return static_cast<double>(kBytes) / milliseconds[milliseconds.size() / 2] * 1e-6;
}

}  // namespace kascade
