// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace kascade {

/// The processor's name as the system tells it; "unknown" where it tells none.
std::string processor_name();

}  // namespace kascade
