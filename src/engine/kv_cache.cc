// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace kascade {
namespace {

constexpr uintptr_t kSystemPage = 4096;
constexpr uint64_t kPlaneAlignment = 4096;
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

KvCache::KvCache(const KvCacheShape& shape) : shape_(shape) {
  uint64_t page_bytes = 0, plane = 0, total = 0;
  const bool fits =
      checked_mul(static_cast<uint64_t>(shape.page_elements()), dtype_bytes(shape.dtype), &page_bytes) &&
      checked_mul(page_bytes, static_cast<uint64_t>(shape.pages), &plane) &&
      checked_add(plane, kPlaneAlignment - 1, &plane) &&
      checked_mul(plane / kPlaneAlignment * kPlaneAlignment, static_cast<uint64_t>(shape.layers) * 2, &total);
  require<OutOfMemory>(fits, "KV cache: {} pages of {} tokens in {} layers pass 64 bits", shape.pages,
                       shape.page_size, shape.layers);
  plane_bytes_ = plane / kPlaneAlignment * kPlaneAlignment;
  if (total == 0) return;
  void* memory =
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require<OutOfMemory>(memory != MAP_FAILED, "KV cache: cannot reserve {} bytes of addresses for {} tokens",
                       total, shape.pages * shape.page_size);
  memory_ = static_cast<std::byte*>(memory);
  mapped_bytes_ = total;
  free_.reserve(static_cast<size_t>(shape.pages));
}

KvCache::~KvCache() {
  if (memory_ != nullptr) munmap(memory_, mapped_bytes_);
}

uint64_t KvCache::live_bytes() const {
  return static_cast<uint64_t>(live_pages()) * shape_.page_bytes() * 2 * static_cast<uint64_t>(shape_.layers);
}

std::byte* KvCache::plane(int layer, bool values) const {
  return memory_ + (static_cast<uint64_t>(layer) * 2 + (values ? 1 : 0)) * plane_bytes_;
}

void KvCache::describe(int layer, AttentionParams& params) const {
  params.k = plane(layer, false);
  params.v = plane(layer, true);
  params.kv_dtype = shape_.dtype;
  params.page_size = shape_.page_size;
  params.k_page_stride = params.v_page_stride = shape_.page_elements();
  params.k_head_stride = params.v_head_stride = int64_t{shape_.page_size} * shape_.head_dim;
  params.k_token_stride = params.v_token_stride = shape_.head_dim;
}

void KvCache::append(int layer, const float* k, const float* v, std::span<const int64_t> slots,
                     ThreadPool& pool) {
  const int64_t rows = static_cast<int64_t>(slots.size()), heads = shape_.kv_heads, dim = shape_.head_dim;
  const auto write = [&](auto* keys, auto* values) {
    pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
      for (int64_t row = task * kRowsPerTask; row < end; ++row) {
        const int64_t page = slots[row] / shape_.page_size, slot = slots[row] % shape_.page_size;
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t to = page * shape_.page_elements() + (head * shape_.page_size + slot) * dim;
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
  switch (shape_.dtype) {
    case DType::kF32:
      return write_as(float{});
    case DType::kF16:
      return write_as(F16{});
    case DType::kBF16:
      return write_as(BF16{});
  }
}

int32_t KvCache::take_page() {
  if (!free_.empty()) {
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  if (fresh_ < shape_.pages) return static_cast<int32_t>(fresh_++);
  for (CachedSequence* sequence : sequences_)
    if (const int32_t page = sequence->yield_spare_page(); page >= 0) return page;
  return -1;
}

void KvCache::release_pages(std::span<const int32_t> pages) {
  free_.insert(free_.end(), pages.rbegin(), pages.rend());
  // Hands the memory back run by run of neighbouring pages; the addresses stay.
  for (size_t begin = 0; begin < pages.size();) {
    size_t end = begin + 1;
    while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
    for (int plane_index = 0; plane_index < shape_.layers * 2; ++plane_index) {
      const auto base = reinterpret_cast<uintptr_t>(plane(plane_index / 2, plane_index % 2 != 0));
      const uintptr_t from = base + static_cast<uintptr_t>(pages[begin]) * shape_.page_bytes();
      const uintptr_t to = base + (static_cast<uintptr_t>(pages[end - 1]) + 1) * shape_.page_bytes();
      const uintptr_t first = (from + kSystemPage - 1) / kSystemPage * kSystemPage,
                      last = to / kSystemPage * kSystemPage;
      if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
    begin = end;
  }
}

void KvCache::ask_for_large_pages(int64_t begin, int64_t end) {
  // A large page is committed as a whole: at either edge up to a quarter of one may go unused.
  constexpr uintptr_t kSlack = kLargePage / 4;
  const auto memory = reinterpret_cast<uintptr_t>(memory_);
  for (int plane_index = 0; plane_index < shape_.layers * 2; ++plane_index) {
    const auto base = reinterpret_cast<uintptr_t>(plane(plane_index / 2, plane_index % 2 != 0));
    const uintptr_t from = base + static_cast<uintptr_t>(begin) * shape_.page_bytes();
    const uintptr_t to = base + static_cast<uintptr_t>(end) * shape_.page_bytes();
    const uintptr_t first = std::max((from + kLargePage - kSlack) / kLargePage * kLargePage, memory);
    const uintptr_t last = std::min((to + kSlack) / kLargePage * kLargePage, memory + mapped_bytes_);
    // A wish: a system without large pages refuses it, and nothing is lost.
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
}

CachedSequence::CachedSequence(std::shared_ptr<KvCache> cache) : cache_(std::move(cache)) {
  cache_->sequences_.push_back(this);
  heard_.resize(static_cast<size_t>(cache_->shape().layers));
}

CachedSequence::~CachedSequence() {
  std::erase(cache_->sequences_, this);
  cache_->release_pages(pages_);
}

int64_t CachedSequence::pages_for(int64_t tokens) const {
  const int64_t page_size = cache_->shape().page_size;
  return (tokens + page_size - 1) / page_size;
}

void CachedSequence::truncate(int64_t length) {
  require<BadArgument>(length >= 0 && length <= length_, "truncate: length is {}, must be in 0..{}", length,
                       length_);
  if (length == length_) return;
  length_ = length;
  last_hidden_.clear();
  for (int64_t& heard : heard_) heard = std::min(heard, length);
  if (state_) state_->truncated(length);
}

void CachedSequence::reserve(int64_t tokens) {
  const int64_t needed = pages_for(tokens);
  reserved_ = tokens;
  pages_.reserve(static_cast<size_t>(needed));
  const int64_t fresh = cache_->fresh_;
  while (static_cast<int64_t>(pages_.size()) < needed) {
    const int32_t page = cache_->take_page();
    if (page < 0)
      throw_error<OutOfMemory>(
          "KV cache: {} tokens of one sequence need {} pages; {} of {} pages ({} tokens each) are taken",
          tokens, needed, cache_->live_pages(), cache_->shape().pages, cache_->shape().page_size);
    pages_.push_back(page);
  }
  if (cache_->fresh_ > fresh) cache_->ask_for_large_pages(fresh, cache_->fresh_);
}

int64_t CachedSequence::slot(int64_t position) const {
  const int64_t page_size = cache_->shape().page_size;
  return pages_[position / page_size] * page_size + position % page_size;
}

void CachedSequence::commit(int64_t length, std::span<const float> last_hidden) {
  length_ = length;
  reserved_ = 0;
  written_ = length;
  last_hidden_.assign(last_hidden.begin(), last_hidden.end());
}

void CachedSequence::roll_back() {
  reserved_ = 0;
  written_ = length_;
  for (int64_t& heard : heard_) heard = std::min(heard, length_);
  if (state_) state_->truncated(length_);
}

int32_t CachedSequence::yield_spare_page() {
  if (static_cast<int64_t>(pages_.size()) <= pages_for(std::max(length_, reserved_))) return -1;
  const int32_t page = pages_.back();
  pages_.pop_back();
  written_ = std::min(written_, static_cast<int64_t>(pages_.size()) * cache_->shape().page_size);
  return page;
}

PolicyState* CachedSequence::state_for(const Policy* policy) {
  if (policy != state_policy_) {
    state_ = policy != nullptr ? policy->make_state() : nullptr;
    state_policy_ = policy;
    std::fill(heard_.begin(), heard_.end(), 0);
  }
  return state_.get();
}

}  // namespace kascade
