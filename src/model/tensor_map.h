// SPDX-License-Identifier: Apache-2.0
// The tensors of a model file by name, handed out with their shapes checked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/stored_tensor.h"

namespace kascade {

class TensorMap {
 public:
  explicit TensorMap(std::string source) : source_(std::move(source)) {}

  /// Throws BadFile when the name is there already.
  void add(StoredTensor tensor, std::string file);

  bool has(const std::string& name) const { return tensors_.contains(name); }

  /// The matrix of this name and shape, removed from the map. Throws BadFile naming file, tensor, expected
  /// and actual.
  WeightTensor take_matrix(const std::string& name, int64_t rows, int64_t columns);
  /// The vector of this name and length; also refuses block formats, which no vector of a model uses.
  WeightTensor take_vector(const std::string& name, int64_t length);
  /// Removes a tensor that the model does not need.
  void drop(const std::string& name) { tensors_.erase(name); }

  /// Throws Unsupported naming the first tensor that nobody took.
  void refuse_rest(const std::string& architecture) const;

  const std::string& source() const { return source_; }

 private:
  struct Entry {
    StoredTensor tensor;
    std::string file;
  };
  Entry take(const std::string& name, std::vector<int64_t> shape);

  std::string source_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace kascade
