// SPDX-License-Identifier: Apache-2.0
// Which of the compiled instruction sets the operators use: the best that the machine has, chosen at first
// use; the environment variable KASCADE_ISA (baseline, avx2, avx512, avx512_bf16) forces a lesser one.
#pragma once

#include <cstdint>
#include <span>

#include "ops/kernels.h"

namespace kascade {

/// Every instruction set compiled in, weakest first.
std::span<const OpKernels* const> compiled_op_kernels();

/// Whether this machine can run them; sets above one that KASCADE_ISA names count as absent.
bool op_kernels_available(const OpKernels& kernels);

/// The set in use. Throws BadArgument when KASCADE_ISA names a set that is not compiled in or that the
/// machine lacks.
const OpKernels& op_kernels();

/// Tests only: makes op_kernels() return `kernels` until the end of the scope.
class ScopedOpKernels {
 public:
  explicit ScopedOpKernels(const OpKernels& kernels);
  ~ScopedOpKernels();
  ScopedOpKernels(const ScopedOpKernels&) = delete;
  ScopedOpKernels& operator=(const ScopedOpKernels&) = delete;

 private:
  const OpKernels* previous_;
};

}  // namespace kascade
