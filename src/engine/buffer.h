// SPDX-License-Identifier: Apache-2.0
// Scratch memory that grows when a larger problem comes and then stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/check.h"

namespace kascade {

/// 64-byte aligned elements. grow() does not keep what the buffer held.
template <class T>
class Buffer {
 public:
  explicit Buffer(const char* name) : name_(name) {}

  /// At least count elements. Throws OutOfMemory naming the buffer; it is empty then.
  T* grow(int64_t count) {
    if (count <= count_) return data_.get();
    // A quarter on top: lengths that grow step by step reallocate a logarithmic number of times.
    const int64_t rounded = count_ == 0 ? count : count + count / 4;
    const size_t bytes =
        (static_cast<size_t>(rounded) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    data_.reset();
    count_ = 0;
    data_.reset(static_cast<T*>(std::aligned_alloc(kAlignment, bytes)));
    require<OutOfMemory>(data_ != nullptr, "{}: cannot allocate {} bytes", name_, bytes);
    count_ = rounded;
    return data_.get();
  }

  T* data() const { return data_.get(); }
  int64_t size() const { return count_; }
  uint64_t bytes() const { return static_cast<uint64_t>(count_) * sizeof(T); }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  const char* name_;
  std::unique_ptr<T, Free> data_;
  int64_t count_ = 0;
};

}  // namespace kascade
