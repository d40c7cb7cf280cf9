// SPDX-License-Identifier: Apache-2.0
// Builds GGUF files in memory for tests, right or wrong as the test wants them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kascade {

class GgufBuilder {
 public:
  using Bytes = std::vector<std::byte>;

  struct Tensor {
    std::string name;
    std::vector<uint64_t> dimensions;  // as in the file: the contiguous one first
    uint32_t type = 0;
    Bytes data;
    uint64_t offset = kAutomatic;
  };
  static constexpr uint64_t kAutomatic = ~uint64_t{0};

  uint32_t version = 3;
  uint64_t alignment = 32;  // of the layout; "general.alignment" is another matter
  uint64_t tensor_count = kAutomatic;
  uint64_t key_count = kAutomatic;
  std::vector<std::pair<std::string, Bytes>> metadata;
  std::vector<Tensor> tensors;

  static void append(Bytes& bytes, const void* data, size_t size) {
    const size_t old = bytes.size();
    bytes.resize(old + size);
    if (size != 0) std::memcpy(bytes.data() + old, data, size);
  }
  template <class T>
  static void put(Bytes& bytes, T value) {
    append(bytes, &value, sizeof(T));
  }
  static void put_text(Bytes& bytes, std::string_view text) {
    put(bytes, static_cast<uint64_t>(text.size()));
    append(bytes, text.data(), text.size());
  }

  // Replaces the value of a key, or adds it.
  GgufBuilder& set_raw(const std::string& key, Bytes value) {
    for (auto& [name, old] : metadata) {
      if (name != key) continue;
      old = std::move(value);
      return *this;
    }
    metadata.emplace_back(key, std::move(value));
    return *this;
  }
  template <class T>
  GgufBuilder& set_scalar(const std::string& key, uint32_t type, T value) {
    Bytes bytes;
    put(bytes, type);
    put(bytes, value);
    return set_raw(key, std::move(bytes));
  }
  GgufBuilder& set(const std::string& key, uint32_t value) { return set_scalar(key, 4, value); }
  GgufBuilder& set(const std::string& key, float value) { return set_scalar(key, 6, value); }
  GgufBuilder& set(const std::string& key, bool value) {
    return set_scalar(key, 7, static_cast<uint8_t>(value));
  }
  GgufBuilder& set(const std::string& key, const char* value) {
    Bytes bytes;
    put(bytes, uint32_t{8});
    put_text(bytes, value);
    return set_raw(key, std::move(bytes));
  }
  GgufBuilder& set(const std::string& key, const std::vector<std::string>& values) {
    Bytes bytes = array(8, values.size());
    for (const std::string& value : values) put_text(bytes, value);
    return set_raw(key, std::move(bytes));
  }
  GgufBuilder& set(const std::string& key, const std::vector<float>& values) {
    Bytes bytes = array(6, values.size());
    for (const float value : values) put(bytes, value);
    return set_raw(key, std::move(bytes));
  }
  GgufBuilder& set(const std::string& key, const std::vector<int32_t>& values) {
    Bytes bytes = array(5, values.size());
    for (const int32_t value : values) put(bytes, value);
    return set_raw(key, std::move(bytes));
  }
  GgufBuilder& remove(const std::string& key) {
    std::erase_if(metadata, [&](const auto& entry) { return entry.first == key; });
    return *this;
  }

  Tensor& tensor(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& one) { return one.name == name; });
  }
  GgufBuilder& remove_tensor(const std::string& name) {
    std::erase_if(tensors, [&](const Tensor& one) { return one.name == name; });
    return *this;
  }
  // F32, filled with value.
  GgufBuilder& add_tensor(const std::string& name, std::vector<uint64_t> dimensions, float value = 0.5f) {
    uint64_t count = 1;
    for (const uint64_t extent : dimensions) count *= extent;
    Tensor tensor{name, std::move(dimensions), 0, {}, kAutomatic};
    for (uint64_t i = 0; i < count; ++i) put(tensor.data, value);
    tensors.push_back(std::move(tensor));
    return *this;
  }

  Bytes bytes() const {
    Bytes file;
    for (const char c : {'G', 'G', 'U', 'F'}) put(file, c);
    put(file, version);
    put(file, tensor_count == kAutomatic ? tensors.size() : tensor_count);
    put(file, key_count == kAutomatic ? metadata.size() : key_count);
    for (const auto& [key, value] : metadata) {
      put_text(file, key);
      append(file, value.data(), value.size());
    }
    uint64_t next = 0;
    for (const Tensor& tensor : tensors) {
      put_text(file, tensor.name);
      put(file, static_cast<uint32_t>(tensor.dimensions.size()));
      for (const uint64_t extent : tensor.dimensions) put(file, extent);
      put(file, tensor.type);
      put(file, tensor.offset == kAutomatic ? next : tensor.offset);
      next = rounded(next + tensor.data.size());
    }
    if (tensors.empty()) return file;
    file.resize(rounded(file.size()));
    const size_t start = file.size();
    for (const Tensor& tensor : tensors) {
      append(file, tensor.data.data(), tensor.data.size());
      file.resize(start + rounded(file.size() - start));
    }
    return file;
  }

 private:
  static Bytes array(uint32_t element, size_t count) {
    Bytes bytes;
    put(bytes, uint32_t{9});
    put(bytes, element);
    put(bytes, static_cast<uint64_t>(count));
    return bytes;
  }
  size_t rounded(size_t size) const { return (size + alignment - 1) / alignment * alignment; }
};

}  // namespace kascade
