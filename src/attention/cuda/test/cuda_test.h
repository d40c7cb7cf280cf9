// SPDX-License-Identifier: Apache-2.0
// A case checked against the reference, and the tests of prefill calls.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "attention/cuda/test/device_case.h"

namespace kascade::cuda_test {

bool same(const Outcome& a, const Outcome& b);

/// One case on one placement, checked in full; returns the result.
Outcome run_case(const Case& c, const Placement& placement);

void test_prefill_bf16_instantiations();
void test_prefill_fp16_instantiations();
void test_prefill_shapes();
void test_prefill_lengths();
void test_prefill_budgets_and_owners();
void test_prefill_values();
void test_prefill_chunks_and_batches();
void test_prefill_row_boxes();
void test_prefill_partial_blocks();
void test_prefill_many_without_keys();
void test_prefill_long();
void test_prefill_chunks_of_weights();
void test_prefill_graph_and_clamping();

}  // namespace kascade::cuda_test
