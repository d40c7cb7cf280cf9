// SPDX-License-Identifier: Apache-2.0
// Memory of the GPU of a fixed size, for measurements and tests; the engine's grows
// (engine/cuda/device_memory.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "base/cuda/launch.h"
#include "base/cuda/memory.h"

namespace kascade::cuda {

/// Uninitialised, and freed with the object. Copies wait for the device.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  /// what: who wants the memory, for messages. Throws OutOfMemory or DeviceError.
  DeviceBytes(size_t bytes, const char* what) : what_(what), bytes_(bytes) {
    if (bytes == 0) return;
    const cudaError_t error = cudaMalloc(&data_, bytes);
    if (error == cudaErrorMemoryAllocation) throw_memory_refused(what, bytes, Place::kDevice);
    check_cuda(error, "cudaMalloc", what);
  }
  DeviceBytes(DeviceBytes&& other) noexcept { swap(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBytes() { cudaFree(data_); }

  void upload(size_t offset, const void* data, size_t bytes) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpy(as<char>() + offset, data, bytes, cudaMemcpyHostToDevice), "cudaMemcpy", what_);
  }
  template <class T>
  std::vector<T> download(size_t count) const {
    std::vector<T> values(count);
    if (count > 0)
      check_cuda(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy",
                 what_);
    return values;
  }
  template <class T = std::byte>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void swap(DeviceBytes& other) {
    std::swap(what_, other.what_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  const char* what_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kascade::cuda
