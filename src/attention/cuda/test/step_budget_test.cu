// SPDX-License-Identifier: Apache-2.0
// The budgets of decode's kernels, in 32 bits, against evaluate_budget(), on the host.
#include <algorithm>
#include <cstdint>

#include "attention/cuda/common/sequence.cuh"
#include "base/cuda/test/device_test.h"

namespace kascade::cuda_test {
namespace {

/// Small, near some limit, or anything, so that cases meet each other.
int32_t any_count(Random& random, int32_t limit) {
  switch (random.in(0, 3)) {
    case 0:
      return static_cast<int32_t>(random.in(0, std::min(limit, 300)));
    case 1:
      return static_cast<int32_t>(random.in(std::max(0, limit - 2), limit));
    case 2:
      return std::min(limit, 128 * static_cast<int32_t>(random.in(0, 40)));
    default:
      return static_cast<int32_t>(random.in(0, limit));
  }
}

Budget any_budget(Random& random) {
  const auto flip = [&random] { return random.in(0, 1) != 0; };
  Budget b;
  b.percent_hundredths = any_count(random, 10000);
  b.round_up = flip();
  b.floor = any_count(random, INT32_MAX);
  b.round_to = std::max(1, any_count(random, flip() ? 256 : INT32_MAX));
  b.sinks = any_count(random, INT32_MAX);
  b.recent = any_count(random, INT32_MAX);
  b.forced_charged = flip();
  b.own_tile = static_cast<OwnTile>(random.in(0, 2));
  b.tile = static_cast<int32_t>(random.in(1, 128));
  b.rolling = flip();
  b.rolling_min_rows = static_cast<int32_t>(random.in(0, 2));
  b.rolling_capped = flip();
  return b;
}

void expect_same(const Budget& b, int32_t candidates, int32_t x, int32_t length) {
  const SetBudget expected = evaluate_budget(b, candidates, x, length, 1);
  const cuda::StepBudget got = cuda::step_budget(b, candidates, x, length);
  EXPECT(got.candidates == expected.candidates && got.sinks == expected.sinks &&
             got.recent_begin == expected.recent_begin && got.ranked == expected.ranked &&
             got.members() == expected.members(),
         "%d sinks, recent from %d, %d ranked, expected %lld, %lld, %lld; %d candidates, x %d, length %d, "
         "percent %d, up %d, floor %d, multiple %d, sinks %d, recent %d, charged %d, own tile %d of %d, "
         "rolling %d from %d, capped %d",
         got.sinks, got.recent_begin, got.ranked, static_cast<long long>(expected.sinks),
         static_cast<long long>(expected.recent_begin), static_cast<long long>(expected.ranked), candidates,
         x, length, b.percent_hundredths, int(b.round_up), b.floor, b.round_to, b.sinks, b.recent,
         int(b.forced_charged), int(b.own_tile), b.tile, int(b.rolling), b.rolling_min_rows,
         int(b.rolling_capped));
}

void test_step_budget() {
  Random random(71);
  for (int i = 0; i < 200000; ++i) {
    const Budget b = any_budget(random);
    const int32_t x = any_count(random, random.in(0, 1) != 0 ? INT32_MAX - 1 : 100000);
    const int32_t length = random.in(0, 1) != 0 ? x : any_count(random, INT32_MAX);
    expect_same(b, b.own_tile == OwnTile::kOnTop ? x : x + 1, x, length);
  }
  for (const Budget& b : {default_budget(), paper_budget(), paper_budget(1000, 32, true), kernel_budget(),
                          kernel_decode_budget(), Budget{.percent_hundredths = 0, .floor = 0}})
    for (int32_t x = 0; x < 3000; ++x)
      for (const int32_t length : {0, x, x + 1, 2 * x}) expect_same(b, x, x, length);
}

const Registered kTests[] = {{10, "step budget", test_step_budget, "host all"}};

}  // namespace
}  // namespace kascade::cuda_test
