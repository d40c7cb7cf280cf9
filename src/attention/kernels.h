// SPDX-License-Identifier: Apache-2.0
// Declares x_kernel for every line of kernels.inc. Definitions are constant-initialised, so that the list can
// be read during static initialisation.
#pragma once

#include "kascade/attention.h"

namespace kascade {

#define KASCADE_ATTENTION_KERNEL(x) extern const AttentionKernel x##_kernel;
#include "attention/kernels.inc"
#undef KASCADE_ATTENTION_KERNEL

}  // namespace kascade
