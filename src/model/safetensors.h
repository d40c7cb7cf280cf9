// SPDX-License-Identifier: Apache-2.0
// The safetensors container: a JSON header and the tensors' bytes. Knows nothing of models.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "model/stored_tensor.h"

namespace kascade {

/// The tensors of a file, in the order of their bytes; they point into file, at any alignment. Checks the
/// header's length, JSON and field types, and that the tensors cover the data exactly, without overlap or
/// gap, each as many bytes as its shape says. Throws BadFile, or Unsupported for element types other than
/// F32, F16 and BF16.
std::vector<StoredTensor> parse_safetensors(std::span<const std::byte> file, const std::string& source);

}  // namespace kascade
