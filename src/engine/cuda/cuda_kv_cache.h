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
    // Plane by plane: planes of 2 GiB and more lie further apart than a two-dimensional copy may reach.
    const size_t bytes = shape().page_bytes();
    for (int index = 0; index < shape().layers * 2; ++index) {
      std::byte* base = plane(index / 2, index % 2 != 0);
      cuda::check_call(
          cudaMemcpyAsync(base + static_cast<size_t>(to) * bytes, base + static_cast<size_t>(from) * bytes,
                          bytes, cudaMemcpyDeviceToDevice, stream_.get()),
          "cudaMemcpyAsync");
    }
  }

  const cuda::Stream& stream_;
  cuda::DeviceBuffer<std::byte> pages_{"KV cache"};
};

}  // namespace kascade
