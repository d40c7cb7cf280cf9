// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/device_memory.h"

namespace kascade::cuda {
namespace {

constexpr int kHopperMajor = 9;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

DeviceInfo usable_device() {
  int count = 0, driver = 0, runtime = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  require<Unsupported>(driver > 0, "device: no NVIDIA driver, so no CUDA device");
  require<Unsupported>(error != cudaErrorInsufficientDriver,
                       "device: the NVIDIA driver supports CUDA {}, but this build needs CUDA {}",
                       version_text(driver), version_text(runtime));
  require<Unsupported>(error == cudaSuccess && count > 0, "device: no CUDA device ({})",
                       error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error));
  DeviceInfo info;
  check_call(cudaGetDevice(&info.index), "cudaGetDevice");
  cudaDeviceProp properties{};
  check_call(cudaGetDeviceProperties(&properties, info.index), "cudaGetDeviceProperties");
  require<Unsupported>(properties.major == kHopperMajor && properties.minor == 0,
                       "device: {} has compute capability {}.{}; supported: 9.0 (Hopper)", properties.name,
                       properties.major, properties.minor);
  info.name = properties.name;
  size_t free = 0, total = 0;
  check_call(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  info.free_bytes = free;
  info.total_bytes = total;
  return info;
}

}  // namespace kascade::cuda
