// SPDX-License-Identifier: Apache-2.0
// The engine's tests as one of the device test program.
#include <gtest/gtest.h>

#include "base/cuda/test/device_test.h"

namespace kascade::cuda_test {
namespace {

void run_tests(const char* filter) {
  int argc = 1;
  char name[] = "engine";
  char* argv[] = {name, nullptr};
  testing::InitGoogleTest(&argc, argv);
  if (filter != nullptr) GTEST_FLAG_SET(filter, filter);
  if (RUN_ALL_TESTS() != 0) fail("engine: see the failures above");
}

void test_engine() { run_tests(nullptr); }
void sanitize_engine() { run_tests("*AShortRunOfEachKindOfCall*"); }

const Registered kTests[] = {{30, "engine", test_engine, "all"},
                             {30, "engine, a few", sanitize_engine, "sanitize"}};

}  // namespace
}  // namespace kascade::cuda_test
