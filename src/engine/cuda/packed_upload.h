// SPDX-License-Identifier: Apache-2.0
// The small arrays of one forward call, gathered on the host and copied to the GPU at once.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "engine/cuda/device_memory.h"

namespace kascade::cuda {

/// Calls that add arrays of the same sizes in the same order find them at the same device addresses, unless
/// send() says that the memory moved.
class PackedUpload {
 public:
  void clear() { bytes_.clear(); }

  /// The place of a copy of values: at() gives its device address once send() was called.
  template <class T>
  size_t add(std::span<const T> values) {
    const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(offset + values.size_bytes());
    if (!values.empty()) std::memcpy(bytes_.data() + offset, values.data(), values.size_bytes());
    return offset;
  }

  /// Makes room on the device; whether the memory moved. Waits for nothing unless it did.
  bool place() {
    const auto count = static_cast<int64_t>(bytes_.size());
    pinned_.grow(count);
    return device_.grow(count);
  }
  void send(const Stream& stream) {
    std::memcpy(pinned_.data(), bytes_.data(), bytes_.size());
    check_call(
        cudaMemcpyAsync(device_.data(), pinned_.data(), bytes_.size(), cudaMemcpyHostToDevice, stream.get()),
        "cudaMemcpyAsync");
  }

  template <class T>
  const T* at(size_t offset) const {
    return reinterpret_cast<const T*>(device_.data() + offset);
  }
  uint64_t bytes() const { return device_.bytes(); }

 private:
  static constexpr size_t kAlignment = 16;
  std::vector<std::byte> bytes_;
  PinnedBuffer<std::byte> pinned_{"step arrays"};
  DeviceBuffer<std::byte> device_{"step arrays"};
};

}  // namespace kascade::cuda
