// SPDX-License-Identifier: Apache-2.0
// The engine's tests as one of the device test program.
#include <gtest/gtest.h>

#include "base/cuda/test/device_test.h"

namespace kascade::cuda_test {
namespace {

void test_engine() {
  int argc = 1;
  char name[] = "engine";
  char* argv[] = {name, nullptr};
  testing::InitGoogleTest(&argc, argv);
  if (RUN_ALL_TESTS() != 0) fail("engine: see the failures above");
}

const Registered kTests[] = {{30, "engine", test_engine, "all"}};

}  // namespace
}  // namespace kascade::cuda_test
