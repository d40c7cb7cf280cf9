// SPDX-License-Identifier: Apache-2.0
#include "ops/isa.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace kascade {
namespace {

TEST(Isa, BaselineAlwaysRunsAndAScopeForcesIt) {
  const OpKernels& baseline = *compiled_op_kernels().front();
  EXPECT_STREQ(baseline.name, "baseline");
  EXPECT_TRUE(op_kernels_available(baseline));
  const OpKernels& usual = op_kernels();
  {
    const ScopedOpKernels scoped(baseline);
    EXPECT_EQ(&op_kernels(), &baseline);
  }
  EXPECT_EQ(&op_kernels(), &usual);
}

TEST(Isa, TheBestAvailableIsChosenUnlessForced) {
  const OpKernels* best = nullptr;
  for (const OpKernels* kernels : compiled_op_kernels())
    if (op_kernels_available(*kernels)) best = kernels;
  const char* forced = std::getenv("KASCADE_ISA");
  if (forced == nullptr || *forced == '\0')
    EXPECT_EQ(&op_kernels(), best);
  else
    EXPECT_EQ(op_kernels().name, std::string(forced));
}

}  // namespace
}  // namespace kascade
