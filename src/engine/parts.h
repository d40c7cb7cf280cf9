// SPDX-License-Identifier: Apache-2.0
// The parts of a pass through the layers whose times are told apart; attention by role.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kascade/attention.h"

namespace kascade {

enum class Part : uint8_t { kProducts, kDense, kLayer0, kAnchor, kReuse, kRest };
constexpr size_t kParts = 6;

/// The part that attention in a role belongs to.
constexpr Part attention_part(Role role) {
  switch (role) {
    case Role::kDense:
      return Part::kDense;
    case Role::kLayer0:
      return Part::kLayer0;
    case Role::kAnchor:
      return Part::kAnchor;
    case Role::kReuse:
      return Part::kReuse;
  }
  return Part::kRest;
}

/// Seconds by part.
struct PartTimes : std::array<double, kParts> {
  using std::array<double, kParts>::operator[];
  double& operator[](Part part) { return (*this)[static_cast<size_t>(part)]; }
  double operator[](Part part) const { return (*this)[static_cast<size_t>(part)]; }
};

}  // namespace kascade
