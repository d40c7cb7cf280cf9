// SPDX-License-Identifier: Apache-2.0
// The paged KV cache in the memory of a GPU.
#pragma once

#include <memory>

#include "engine/cuda/device_memory.h"
#include "engine/page_pool.h"

namespace kascade {

/// All pages are allocated at once.
class CudaKvCache final : public PagePool {
 public:
  /// Pages are copied on stream. Throws OutOfMemory, with what is asked and what is free, when they do not
  /// fit.
  CudaKvCache(const KvCacheShape& shape, const cuda::Stream& stream) : PagePool(shape), stream_(stream) {
    if (shape.total_bytes() == 0) return;
    pages_.grow(static_cast<int64_t>(shape.total_bytes()));
    memory_ = pages_.data();
  }

 private:
  void copy_page(int32_t from, int32_t to) override {
    const size_t plane = shape().plane_bytes(), page = shape().page_bytes();
    cuda::check_call(
        cudaMemcpy2DAsync(memory_ + static_cast<size_t>(to) * page, plane,
                          memory_ + static_cast<size_t>(from) * page, plane, page,
                          static_cast<size_t>(shape().layers) * 2, cudaMemcpyDeviceToDevice, stream_.get()),
        "cudaMemcpy2DAsync");
  }

  const cuda::Stream& stream_;
  cuda::DeviceBuffer<std::byte> pages_{"KV cache"};
};

}  // namespace kascade
