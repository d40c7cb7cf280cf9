// SPDX-License-Identifier: Apache-2.0
#include "model/stored_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace kascade {

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace kascade
