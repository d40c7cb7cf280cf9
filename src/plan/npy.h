// SPDX-License-Identifier: Apache-2.0
// NumPy's .npy files, versions 1 to 3: the header's description, checked against the bytes that follow it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kascade/plan.h"

namespace kascade {

struct NpyArray {
  std::string descr;                // e.g. "<i4": byte order, kind, bytes per element
  std::vector<uint64_t> shape;      // C order; empty for a scalar
  uint64_t elements = 0;            // product of shape
  std::span<const std::byte> data;  // elements * bytes per element; unaligned, a view into the file
};

/// Reads the header of a whole .npy file held in memory. The data that follow must be exactly what shape and
/// descr say. Throws BadFile naming source and field for a malformed header, Fortran order, structured or
/// object types, and sizes that overflow or differ from the file.
NpyArray parse_npy(std::span<const std::byte> file, const std::string& source);

/// A published head map held in memory, int32 or int64 [layers, kv_heads], made a plan. Throws BadFile.
Plan plan_from_npy(std::span<const std::byte> file, const std::vector<int>& anchors,
                   const std::string& source);

/// The anchors that a published map carries in its name: {0, 2, 8} for "dir/Model_layers_0_2_8.npy". Throws
/// BadArgument.
std::vector<int> anchors_from_name(const std::string& path);

}  // namespace kascade
