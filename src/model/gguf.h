// SPDX-License-Identifier: Apache-2.0
// The GGUF container, versions 2 and 3, little-endian: metadata and a table of tensors, checked against the
// file's bytes. Knows nothing of models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/stored_tensor.h"

namespace kascade {

enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

/// A parsed file. Names, strings and tensors point into the bytes that were parsed, which must outlive it.
///
/// Access to metadata is typed: find_* give nullopt for an absent key and throw BadFile naming file, key,
/// expected and actual for a value of another type or out of range; the others throw for an absent key too.
class GgufFile {
 public:
  /// Checks everything that does not depend on the architecture: counts and lengths against the bytes that
  /// are left, types, duplicate keys and names, and for tensors shape, size, alignment, extent, overlap and
  /// gaps. Throws BadFile or Unsupported (other versions, byte orders and tensor types), naming source. file
  /// starts at an address divisible by 8.
  static GgufFile parse(std::span<const std::byte> file, std::string source);

  const std::string& source() const { return source_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  std::vector<std::string_view> keys() const;

  bool has(std::string_view key) const { return metadata_.contains(key); }
  /// Any integer type; a bool is none.
  std::optional<int64_t> find_integer(std::string_view key, int64_t min, int64_t max) const;
  int64_t integer(std::string_view key, int64_t min, int64_t max) const;
  /// Finite float32 or float64.
  std::optional<double> find_number(std::string_view key) const;
  double number(std::string_view key) const;
  /// Any number or bool as a double; nullopt for strings and arrays too.
  std::optional<double> find_scalar(std::string_view key) const;
  std::optional<bool> find_flag(std::string_view key) const;
  std::optional<std::string_view> find_string(std::string_view key) const;
  std::string_view string(std::string_view key) const;
  /// An integer, or an array of integers that are all the same (some files state one for each layer).
  /// Unsupported when they differ.
  std::optional<int64_t> find_uniform_integer(std::string_view key, int64_t min, int64_t max) const;
  std::optional<std::vector<std::string_view>> find_strings(std::string_view key) const;
  std::optional<std::vector<float>> find_floats(std::string_view key) const;
  std::optional<std::vector<int64_t>> find_integers(std::string_view key) const;

  /// For messages: the value of a key in words, such as "the float32 1.5" or "an array of 3 string".
  std::string describe(std::string_view key) const;

 private:
  struct Value {
    GgufType type = GgufType::kUint8;
    GgufType element = GgufType::kUint8;  // of an array
    uint64_t count = 1;                   // of an array's elements
    std::span<const std::byte> bytes;     // a scalar, a string's text, or an array's elements
  };

  GgufFile() = default;
  const Value* find(std::string_view key) const;
  [[noreturn]] void wrong(std::string_view key, std::string_view expected) const;
  [[noreturn]] void missing(std::string_view key) const;

  std::string source_;
  std::map<std::string_view, Value> metadata_;
  std::vector<StoredTensor> tensors_;

  friend class GgufParser;
};

}  // namespace kascade
