// SPDX-License-Identifier: Apache-2.0
// Checks of a call's fields that hold for every implementation.
#pragma once

#include "kascade/attention.h"

namespace kascade {

/// Throws BadArgument naming the parameter, its value and what is legal. Reads through a pointer only where 0
/// was stated for the maximum that its array gives.
void check_params(const AttentionParams& params);

/// The part of check_params that a workspace query needs: everything but the caller's data.
void check_workspace_params(const AttentionParams& params);

}  // namespace kascade
