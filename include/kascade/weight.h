// SPDX-License-Identifier: Apache-2.0
// Weight tensors as a model file stores them: plain floats, or GGUF's block formats, which stay quantised in
// memory.
#pragma once

#include <cstdint>

namespace kascade {

/// How the elements of a weight tensor are stored. The Q types are GGUF's block formats.
enum class WeightType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
};
constexpr int kWeightTypes = 11;

struct WeightTypeInfo {
  const char* name;    // as files and messages spell it: "F32", "Q4_K"
  int block_elements;  // 1 for plain types, 32 or 256 for block formats
  int block_bytes;
};

/// Throws BadArgument for a value that is no enumerator.
const WeightTypeInfo& weight_type_info(WeightType type);

/// A view of a stored tensor; memory belongs to the model. A matrix maps `columns` inputs to `rows` outputs;
/// each row is contiguous and columns is a multiple of the block. data is null when the model has no such
/// tensor; it is aligned to 4 bytes at least where the type is F32 and to 2 otherwise.
struct WeightTensor {
  const void* data = nullptr;
  WeightType type = WeightType::kF32;
  int64_t rows = 0;     // outputs (1 for a vector)
  int64_t columns = 0;  // inputs, or the length of a vector

  explicit operator bool() const { return data != nullptr; }
  int64_t row_bytes() const;
  int64_t bytes() const { return rows * row_bytes(); }
};

}  // namespace kascade
