// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace kascade {
namespace {

constexpr uintptr_t kSystemPage = 4096;
// The system's large pages, where it has them. Reading rows of K and V by index from them takes a tenth off
// a decode step over 7,500 tokens; a sequence that would leave most of one empty does without.
constexpr uintptr_t kLargePage = uintptr_t{2} << 20;

// Rows converted by one task: at D = 64 and three KV heads this is some 10 us of work.
constexpr int64_t kRowsPerTask = 32;

void convert_row(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}
void convert_row(const float* from, int64_t count, BF16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}
void convert_row(const float* from, int64_t count, F16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_f16(from[i]);
}

}  // namespace

KvCache::KvCache(const KvCacheShape& shape) : PagePool(shape) {
  const uint64_t total = shape.total_bytes();
  if (total == 0) return;
  void* memory =
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require<OutOfMemory>(memory != MAP_FAILED, "KV cache: cannot reserve {} bytes of addresses for {} tokens",
                       total, shape.pages * shape.page_size);
  memory_ = static_cast<std::byte*>(memory);
  mapped_bytes_ = total;
}

KvCache::~KvCache() {
  if (memory_ != nullptr) munmap(memory_, mapped_bytes_);
}

void KvCache::append(int layer, const float* k, const float* v, std::span<const int64_t> slots,
                     ThreadPool& pool) {
  const int64_t rows = static_cast<int64_t>(slots.size()), heads = shape().kv_heads, dim = shape().head_dim;
  const auto write = [&](auto* keys, auto* values) {
    pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
      for (int64_t row = task * kRowsPerTask; row < end; ++row) {
        const int64_t page = slots[row] / shape().page_size, slot = slots[row] % shape().page_size;
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t to = page * shape().page_elements() + (head * shape().page_size + slot) * dim;
          convert_row(k + (row * heads + head) * dim, dim, keys + to);
          convert_row(v + (row * heads + head) * dim, dim, values + to);
        }
      }
    });
  };
  const auto write_as = [&](auto type) {
    using T = decltype(type);
    write(reinterpret_cast<T*>(plane(layer, false)), reinterpret_cast<T*>(plane(layer, true)));
  };
  switch (shape().dtype) {
    case DType::kF32:
      return write_as(float{});
    case DType::kF16:
      return write_as(F16{});
    case DType::kBF16:
      return write_as(BF16{});
  }
}

void KvCache::copy_page(int32_t from, int32_t to) {
  const uint64_t bytes = shape().page_bytes();
  for (int plane_index = 0; plane_index < shape().layers * 2; ++plane_index) {
    std::byte* base = plane(plane_index / 2, plane_index % 2 != 0);
    std::memcpy(base + static_cast<uint64_t>(to) * bytes, base + static_cast<uint64_t>(from) * bytes, bytes);
  }
}

void KvCache::pages_end(std::span<const int32_t> pages) {
  // Run by run of neighbouring pages; the addresses stay.
  const uint64_t bytes = shape().page_bytes();
  for (size_t begin = 0; begin < pages.size();) {
    size_t end = begin + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] - 1) ++end;
    for (int plane_index = 0; plane_index < shape().layers * 2; ++plane_index) {
      const auto base = reinterpret_cast<uintptr_t>(plane(plane_index / 2, plane_index % 2 != 0));
      const uintptr_t from = base + static_cast<uintptr_t>(pages[end - 1]) * bytes;
      const uintptr_t to = base + (static_cast<uintptr_t>(pages[begin]) + 1) * bytes;
      const uintptr_t first = (from + kSystemPage - 1) / kSystemPage * kSystemPage,
                      last = to / kSystemPage * kSystemPage;
      if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
    begin = end;
  }
}

void KvCache::pages_begin(int64_t begin, int64_t end) {
  // A large page is committed as a whole: at either edge up to a quarter of one may go unused.
  constexpr uintptr_t kSlack = kLargePage / 4;
  const auto memory = reinterpret_cast<uintptr_t>(memory_);
  for (int plane_index = 0; plane_index < shape().layers * 2; ++plane_index) {
    const auto base = reinterpret_cast<uintptr_t>(plane(plane_index / 2, plane_index % 2 != 0));
    const uintptr_t from = base + static_cast<uintptr_t>(begin) * shape().page_bytes();
    const uintptr_t to = base + static_cast<uintptr_t>(end) * shape().page_bytes();
    const uintptr_t first = std::max((from + kLargePage - kSlack) / kLargePage * kLargePage, memory);
    const uintptr_t last = std::min((to + kSlack) / kLargePage * kLargePage, memory + mapped_bytes_);
    // A wish: a system without large pages refuses it, and nothing is lost.
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
}

}  // namespace kascade
