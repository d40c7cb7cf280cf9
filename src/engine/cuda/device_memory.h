// SPDX-License-Identifier: Apache-2.0
// Memory of the GPU and pinned memory of the host, and CUDA calls with their errors checked.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/check.h"
#include "base/cuda/launch.h"
#include "base/cuda/memory.h"

namespace kascade::cuda {

/// check_cuda() of a call that is for no kernel.
inline void check_call(cudaError_t error, const char* call) { check_cuda(error, call); }

/// Makes a device the thread's current one until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check_call(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_call(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// The current device, as messages name it.
struct DeviceInfo {
  int index = 0;
  std::string name;
  uint64_t total_bytes = 0, free_bytes = 0;
};
/// Throws Unsupported (no device, its architecture, its driver; each named with what is supported).
DeviceInfo usable_device();

/// Memory that grows when a larger problem comes and then stays. grow() does not keep what it held, and waits
/// for the device when it moves.
template <class T, Place place = Place::kDevice>
class CudaBuffer {
 public:
  explicit CudaBuffer(const char* name) : name_(name) {}
  ~CudaBuffer() { release(); }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;

  /// At least count elements; whether the buffer moved. Throws OutOfMemory naming the buffer; it is empty
  /// then.
  bool grow(int64_t count) {
    if (count <= count_) return false;
    // An eighth on top: lengths that grow step by step reallocate a logarithmic number of times.
    int64_t wanted = count_ == 0 ? count : count + count / 8;
    release();
    void* memory = nullptr;
    cudaError_t error = allocate(&memory, wanted);
    if (error == cudaErrorMemoryAllocation && wanted > count) {
      wanted = count;
      error = allocate(&memory, wanted);
    }
    if (error == cudaErrorMemoryAllocation)
      throw_memory_refused(name_, static_cast<uint64_t>(wanted) * sizeof(T), place);
    check_call(error, name_);
    data_ = static_cast<T*>(memory);
    count_ = wanted;
    return true;
  }

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  uint64_t bytes() const { return static_cast<uint64_t>(count_) * sizeof(T); }

 private:
  /// A failure is the caller's to tell.
  static cudaError_t allocate(void** memory, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const cudaError_t error =
        place == Place::kDevice ? cudaMalloc(memory, bytes) : cudaMallocHost(memory, bytes);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
  }
  void release() {
    if (data_ == nullptr) return;
    if constexpr (place == Place::kDevice) {
      cudaFree(data_);
    } else {
      cudaFreeHost(data_);
    }
    data_ = nullptr;
    count_ = 0;
  }

  const char* name_;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

template <class T>
using DeviceBuffer = CudaBuffer<T, Place::kDevice>;
template <class T>
using PinnedBuffer = CudaBuffer<T, Place::kPinned>;

class Stream {
 public:
  Stream() { check_call(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { check_call(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Enqueues a copy of count elements.
template <class T>
void copy_to_host(T* to, const T* from, int64_t count, const Stream& stream) {
  check_call(
      cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T), cudaMemcpyDeviceToHost, stream.get()),
      "cudaMemcpyAsync");
}
template <class T>
void copy_to_device(T* to, const T* from, int64_t count, const Stream& stream) {
  check_call(
      cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice, stream.get()),
      "cudaMemcpyAsync");
}

}  // namespace kascade::cuda
