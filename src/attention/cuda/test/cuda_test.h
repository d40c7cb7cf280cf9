// SPDX-License-Identifier: Apache-2.0
// What the files of the CUDA test program share: failures, and a case checked against the reference.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "attention/cuda/test/device_case.h"

namespace kascade::cuda_test {

// Name of the running case, printed with failures.
extern std::string current;
void fail(const std::string& message);

template <class... Args>
std::string text(const char* format, Args... args) {
  char line[400];
  std::snprintf(line, sizeof line, format, args...);
  return line;
}

#define EXPECT(condition, ...)                 \
  do {                                         \
    if (!(condition)) fail(text(__VA_ARGS__)); \
  } while (false)

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);
bool same(const Outcome& a, const Outcome& b);

/// One case on one placement, checked in full; returns the result.
Outcome run_case(const Case& c, const Placement& placement);

void test_prefill_instantiations();
void test_prefill_shapes();
void test_prefill_lengths();
void test_prefill_budgets_and_owners();
void test_prefill_values();
void test_prefill_chunks_and_batches();
void test_prefill_long();
void test_prefill_graph_and_clamping();

}  // namespace kascade::cuda_test
