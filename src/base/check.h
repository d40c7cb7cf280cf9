// SPDX-License-Identifier: Apache-2.0
// Formatted throwing. Usage: throw_error<BadFile>("{}: field '{}': expected {}, got {}", path, field,
// expected, got).
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "kascade/error.h"

namespace kascade {

template <class E, class... Args>
[[noreturn]] void throw_error(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

/// Throws E with the formatted message unless the condition holds.
template <class E, class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]]
    throw E(fmt::format(format, std::forward<Args>(args)...));
}

/// a * b, or false when it does not fit. Sizes that come from a file go through these.
[[nodiscard]] inline bool checked_mul(uint64_t a, uint64_t b, uint64_t* result) {
  return !__builtin_mul_overflow(a, b, result);
}
[[nodiscard]] inline bool checked_add(uint64_t a, uint64_t b, uint64_t* result) {
  return !__builtin_add_overflow(a, b, result);
}

}  // namespace kascade
