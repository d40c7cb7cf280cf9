// SPDX-License-Identifier: Apache-2.0
// Numbers with a unit, as people write them in options.
#pragma once

#include <cstdint>
#include <string_view>

namespace kascade {

/// "4096", "128K" (131072), "1M": at least 1. Throws BadArgument naming `what`.
int64_t parse_count(std::string_view text, std::string_view what);

/// "80GB" (powers of 1000), "80GiB" (powers of 1024), KB to TB, or bytes; fractions are allowed. Throws
/// BadArgument naming `what`.
uint64_t parse_bytes(std::string_view text, std::string_view what);

}  // namespace kascade
