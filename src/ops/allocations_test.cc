// SPDX-License-Identifier: Apache-2.0
// Replaces operator new by one that counts. In a file of its own: inlined beside its uses, the pair of malloc
// and free looks mismatched to the compiler.
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "ops/ops_test_util.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace kascade {

int64_t allocations_so_far() { return allocations.load(); }

TEST(Allocations, AreCounted) {
  const int64_t before = allocations_so_far();
  const std::vector<int> values(3);
  EXPECT_EQ(allocations_so_far(), before + 1);
}

}  // namespace kascade
