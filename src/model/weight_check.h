// SPDX-License-Identifier: Apache-2.0
// What is checked of, and computed from, the contents of weights.
#pragma once

#include <string>

#include "kascade/model.h"

namespace kascade {

/// Throws BadFile naming file, tensor and row when the weight holds an infinity or a NaN. Guarantee: every
/// float that dequantize_row makes of an accepted weight is finite. Of block formats only the scales and
/// minima are read: quants are small integers, and no product of those with a finite half leaves the range of
/// a float.
void require_finite(const WeightTensor& weight, const std::string& file, const std::string& name);

/// 16 hex digits: FNV-1a over the attention norms of all layers in order, rounded to bf16, as little-endian
/// bytes. The same for GGUF and safetensors files of one model: norms are stored unquantised in both.
std::string weight_fingerprint(const ModelWeights& weights);

}  // namespace kascade
