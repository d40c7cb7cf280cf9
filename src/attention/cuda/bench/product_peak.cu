// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "attention/cuda/bench/product_peak.h"
#include "base/cuda/launch.h"
#include "base/cuda/ptx/async_copy.cuh"
#include "base/cuda/ptx/barrier.cuh"
#include "base/cuda/ptx/wgmma.cuh"

namespace kascade {
namespace {

using cuda::check_cuda;

constexpr const char* kName = "product_peak";
constexpr int kGroups = 2;                  // warpgroups of a block, 64 rows each
constexpr int kColumns = 256, kDepth = 64;  // of a product of four steps
constexpr int kBytes = (kGroups * 64 + kColumns) * kDepth * 2;
constexpr int kRounds = 40000;
constexpr double kOperations = 2.0 * kGroups * 64 * kColumns * kDepth * kRounds;

/// Random numbers of about 1 in both matrices, so that the multipliers draw the power that they draw at work.
__global__ void __launch_bounds__(kGroups * 128, 1) product_kernel(float* out) {
  extern __shared__ __align__(1024) unsigned char shared[];
  uint32_t state = threadIdx.x * 747796405u + blockIdx.x + 1;
  for (int i = static_cast<int>(threadIdx.x); i < kBytes / 4; i += kGroups * 128) {
    state = state * 1664525u + 1013904223u;
    // Signs and fractions at random, exponents of 1/2 and 1.
    reinterpret_cast<uint32_t*>(shared)[i] = (state & 0x80FF80FFu) | 0x3F003F00u;
  }
  cuda::fence_async_proxy();
  __syncthreads();
  const uint32_t group = threadIdx.x / 128, base = cuda::shared_address(shared);
  const uint64_t a = cuda::matrix_descriptor(base + group * 64 * 128, 0);
  const uint64_t b = cuda::matrix_descriptor(base + kGroups * 64 * 128, 0);
  float sums[kColumns / 2] = {};
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    cuda::begin_products();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step)
      cuda::Product<__nv_bfloat16, kColumns>::shared(sums, cuda::advance(a, step * 32),
                                                     cuda::advance(b, step * 32), 1);
    cuda::commit_products();
    cuda::wait_products<0>();
    cuda::pin(sums);
  }
  float sum = 0;
  for (const float x : sums) sum += x;
  if (sum == 0.5f) *out = sum;  // products of a whole number of steps of 2^-16 hardly add up to this
}

}  // namespace

double measure_cuda_bf16_tflop_per_s() {
  const int blocks = cuda::multiprocessors(kName);
  float* out = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaMalloc(&out, sizeof(float)), "cudaMalloc", kName);
  const auto free_all = [&] {
    cudaFree(out);
    if (begin != nullptr) cudaEventDestroy(begin);
    if (end != nullptr) cudaEventDestroy(end);
  };
  std::array<float, 5> milliseconds{};
  try {
    check_cuda(cudaEventCreate(&begin), "cudaEventCreate", kName);
    check_cuda(cudaEventCreate(&end), "cudaEventCreate", kName);
    cuda::LaunchShape shape;
    shape.blocks = blocks;
    shape.threads = kGroups * 128;
    shape.shared_bytes = kBytes;
    shape.chained = false;
    for (float& ms : milliseconds) {
      check_cuda(cudaEventRecord(begin, nullptr), "cudaEventRecord", kName);
      cuda::launch(kName, product_kernel, shape, nullptr, out);
      check_cuda(cudaEventRecord(end, nullptr), "cudaEventRecord", kName);
      check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize", kName);
      check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime", kName);
    }
  } catch (...) {
    free_all();
    throw;
  }
  free_all();
  std::sort(milliseconds.begin(), milliseconds.end());
  return kOperations * blocks / milliseconds[milliseconds.size() / 2] * 1e-9;
}

}  // namespace kascade
