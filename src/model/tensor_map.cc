// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_map.h"

#include "base/check.h"
#include "base/text.h"
#include "model/weight_check.h"

namespace kascade {

void TensorMap::add(StoredTensor tensor, std::string file) {
  const std::string name = tensor.name;
  const auto [at, added] = tensors_.try_emplace(name, Entry{std::move(tensor), file});
  if (!added) throw_error<BadFile>("{}: tensor {}: is in {} too", file, quote_text(name), at->second.file);
}

TensorMap::Entry TensorMap::take(const std::string& name, std::vector<int64_t> shape) {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    throw_error<BadFile>("{}: tensor {}: missing, expected shape {}", source_, quote_text(name),
                         shape_text(shape));
  Entry entry = std::move(found->second);
  tensors_.erase(found);
  // Some writers keep outer dimensions of 1.
  std::vector<int64_t>& actual = entry.tensor.shape;
  while (actual.size() > shape.size() && actual.front() == 1) actual.erase(actual.begin());
  if (actual != shape)
    throw_error<BadFile>("{}: tensor {}: expected shape {}, got {}", entry.file, quote_text(name),
                         shape_text(shape), shape_text(actual));
  return entry;
}

WeightTensor TensorMap::take_matrix(const std::string& name, int64_t rows, int64_t columns) {
  const Entry entry = take(name, {rows, columns});
  const WeightTensor weight{entry.tensor.data, entry.tensor.type, rows, columns};
  require_finite(weight, entry.file, name);
  return weight;
}

WeightTensor TensorMap::take_vector(const std::string& name, int64_t length) {
  const Entry entry = take(name, {length});
  const WeightTypeInfo& info = weight_type_info(entry.tensor.type);
  if (info.block_elements != 1)
    throw_error<Unsupported>("{}: tensor {}: type: expected F32, F16 or BF16 for a vector, got {}",
                             entry.file, quote_text(name), info.name);
  const WeightTensor weight{entry.tensor.data, entry.tensor.type, 1, length};
  require_finite(weight, entry.file, name);
  return weight;
}

void TensorMap::refuse_rest(const std::string& architecture) const {
  if (tensors_.empty()) return;
  const auto& [name, entry] = *tensors_.begin();
  throw_error<Unsupported>("{}: tensor {}: no part of architecture '{}' as it is supported here", entry.file,
                           quote_text(name), architecture);
}

}  // namespace kascade
