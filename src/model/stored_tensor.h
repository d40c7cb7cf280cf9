// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kascade/weight.h"

namespace kascade {

/// A named tensor as a file holds it, whatever the format.
struct StoredTensor {
  std::string name;
  WeightType type = WeightType::kF32;
  std::vector<int64_t> shape;  // outermost dimension first; the last one is contiguous
  const void* data = nullptr;
};

/// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace kascade
