// SPDX-License-Identifier: Apache-2.0
// Memory for vectors: 64-byte aligned, uninitialised, grows and never shrinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "base/check.h"

namespace kascade {

template <class T>
class AlignedBuffer {
 public:
  /// At least `count` elements; what was there is lost when it grows. Throws OutOfMemory.
  T* grow(int64_t count) {
    if (count <= capacity_) return data();
    memory_.reset();
    capacity_ = 0;
    uint64_t bytes = 0;
    if (checked_mul(static_cast<uint64_t>(count), sizeof(T), &bytes) && checked_add(bytes, 63, &bytes))
      memory_.reset(std::aligned_alloc(64, bytes / 64 * 64));
    require<OutOfMemory>(memory_ != nullptr, "cannot allocate {} elements of {} bytes", count, sizeof(T));
    capacity_ = count;
    return data();
  }

  T* data() const { return static_cast<T*>(memory_.get()); }
  uint64_t bytes() const { return static_cast<uint64_t>(capacity_) * sizeof(T); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace kascade
