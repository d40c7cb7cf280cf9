// SPDX-License-Identifier: Apache-2.0
#include "base/hash.h"

#include <fmt/format.h>

namespace kascade {

std::string hash_hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace kascade
