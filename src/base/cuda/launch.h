// SPDX-License-Identifier: Apache-2.0
// Launches with their errors checked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kascade/error.h"

namespace kascade::cuda {

/// Throws DeviceError naming the call, and the kernel if it is for one.
inline void check_cuda(cudaError_t error, const char* call, const char* kernel = nullptr) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // told here: who asks for the last error later is not to meet this one
  throw DeviceError(call + (kernel != nullptr ? std::string(" for kernel ") + kernel : "") + ": " +
                    cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

/// Multiprocessors of the current device.
inline int multiprocessors(const char* kernel) {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice", kernel);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute",
             kernel);
  return count;
}

struct LaunchShape {
  int64_t blocks = 0;
  int threads = 0;
  size_t shared_bytes = 0;
  int cluster = 1;
  // The kernel begins with wait_for_previous_kernel(), so it may be scheduled while its predecessor drains.
  bool chained = true;
};

/// Whether the current device runs clusters of this shape, which may be larger than those that all devices
/// run.
template <class... Parameters>
bool fits(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "cudaFuncSetAttribute", name);
  if (shape.shared_bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               "cudaFuncSetAttribute", name);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.cluster));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess) return clusters > 0;
  cudaGetLastError();  // the query's failure is no launch's
  return false;
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
            const Arguments&... arguments) {
  if (shape.blocks <= 0) return;
  if (shape.blocks > INT32_MAX)
    throw Unsupported(std::string("kernel ") + name + " would need " + std::to_string(shape.blocks) +
                      " blocks; a grid has at most 2147483647");
  if (shape.shared_bytes > 48 * 1024)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               "cudaFuncSetAttribute", name);
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    ++count;
  }
  if (shape.chained) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cudaLaunchKernelEx", name);
}

#if defined(__CUDACC__)
/// Until the kernel before this one in the stream has finished and its writes are visible.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Lets the next kernel of the stream be scheduled; its wait still covers all of this one.
__device__ inline void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

}  // namespace kascade::cuda
