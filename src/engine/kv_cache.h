// SPDX-License-Identifier: Apache-2.0
// The paged KV cache in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/page_pool.h"
#include "kascade/thread_pool.h"

namespace kascade {

/// Address space for every page is reserved at once; the system commits memory when a page is first written.
class KvCache final : public PagePool {
 public:
  /// Throws OutOfMemory when the address space cannot be had.
  explicit KvCache(const KvCacheShape& shape);
  ~KvCache() override;

  /// Writes rows of K and V, fp32 [rows, G, D], converted to the cache's type. Row r goes to slots[r]
  /// (CachedSequence::slot).
  void append(int layer, const float* k, const float* v, std::span<const int64_t> slots, ThreadPool& pool);

 private:
  void copy_page(int32_t from, int32_t to) override;
  void pages_begin(int64_t begin, int64_t end) override;    // asks for large pages
  void pages_end(std::span<const int32_t> pages) override;  // hands the memory back

  uint64_t mapped_bytes_ = 0;
};

}  // namespace kascade
