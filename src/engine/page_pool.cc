// SPDX-License-Identifier: Apache-2.0
#include "engine/page_pool.h"

#include <algorithm>

#include "base/check.h"

namespace kascade {

uint64_t KvCacheShape::plane_bytes() const {
  uint64_t page = 0, plane = 0, total = 0;
  const bool fits =
      checked_mul(static_cast<uint64_t>(page_elements()), dtype_bytes(dtype), &page) &&
      checked_mul(page, static_cast<uint64_t>(pages), &plane) &&
      checked_add(plane, kPlaneAlignment - 1, &plane) &&
      checked_mul(plane / kPlaneAlignment * kPlaneAlignment, static_cast<uint64_t>(layers) * 2, &total);
  require<OutOfMemory>(fits, "KV cache: {} pages of {} tokens in {} layers pass 64 bits", pages, page_size,
                       layers);
  return plane / kPlaneAlignment * kPlaneAlignment;
}

PagePool::PagePool(const KvCacheShape& shape) : shape_(shape), plane_bytes_(shape.plane_bytes()) {}

uint64_t PagePool::live_bytes() const {
  return static_cast<uint64_t>(live_pages()) * shape_.page_bytes() * 2 * static_cast<uint64_t>(shape_.layers);
}

std::byte* PagePool::plane(int layer, bool values) const {
  return memory_ + (static_cast<uint64_t>(layer) * 2 + (values ? 1 : 0)) * plane_bytes_;
}

void PagePool::describe(int layer, AttentionParams& params) const {
  params.k = plane(layer, false);
  params.v = plane(layer, true);
  params.kv_dtype = shape_.dtype;
  params.page_size = shape_.page_size;
  params.k_page_stride = params.v_page_stride = shape_.page_elements();
  params.k_head_stride = params.v_head_stride = int64_t{shape_.page_size} * shape_.head_dim;
  params.k_token_stride = params.v_token_stride = shape_.head_dim;
}

int32_t PagePool::take_page() {
  int32_t page = -1;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else if (fresh_ < shape_.pages) {
    owners_.resize(static_cast<size_t>(fresh_) + 1);
    free_.reserve(owners_.capacity());  // giving pages back allocates nothing
    page = static_cast<int32_t>(fresh_++);
  } else {
    for (CachedSequence* sequence : sequences_)
      if (page = sequence->yield_spare_page(); page >= 0) break;
  }
  if (page >= 0) owners_[page] = 1;
  return page;
}

void PagePool::release_pages(std::span<const int32_t> pages) {
  const size_t first_free = free_.size();
  for (auto page = pages.rbegin(); page != pages.rend(); ++page)
    if (--owners_[*page] == 0) free_.push_back(*page);
  pages_end(std::span(free_).subspan(first_free));
}

CachedSequence::CachedSequence(std::shared_ptr<PagePool> pool) : pool_(std::move(pool)) {
  heard_.resize(static_cast<size_t>(pool_->shape().layers));
  pool_->sequences_.push_back(this);  // last: a constructor that throws leaves nothing behind
}

CachedSequence::CachedSequence(const CachedSequence& prefix, int64_t length) : CachedSequence(prefix.pool_) {
  require<BadArgument>(length >= 0 && length <= prefix.length_, "prefix: length is {}, must be in 0..{}",
                       length, prefix.length_);
  pages_.assign(prefix.pages_.begin(), prefix.pages_.begin() + pages_for(length));
  for (const int32_t page : pages_) pool_->share_page(page);
  length_ = written_ = length;
  if (length == prefix.length_) last_hidden_ = prefix.last_hidden_;
}

CachedSequence::~CachedSequence() {
  std::erase(pool_->sequences_, this);
  pool_->release_pages(pages_);
}

int64_t CachedSequence::pages_for(int64_t tokens) const {
  const int64_t page_size = pool_->shape().page_size;
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

void CachedSequence::require_page(int32_t page, int64_t tokens) const {
  require<OutOfMemory>(
      page >= 0,
      "KV cache: {} tokens of one sequence need {} pages; {} of {} pages ({} tokens each) are taken", tokens,
      pages_for(tokens), pool_->live_pages(), pool_->shape().pages, pool_->shape().page_size);
}

void CachedSequence::reserve(int64_t tokens) {
  const int64_t needed = pages_for(tokens);
  protect(tokens);
  pages_.reserve(static_cast<size_t>(needed));
  const int64_t fresh = pool_->fresh_;
  // Rows go to pages of their own: those shared with another sequence are copied first.
  for (int64_t i = length_ / pool_->shape().page_size; i < std::min<int64_t>(needed, std::ssize(pages_));
       ++i) {
    if (!pool_->is_shared(pages_[i])) continue;
    const int32_t copy = pool_->take_page();
    if (!pool_->is_shared(pages_[i])) {  // to find a page, the others let go of this one, spare to them
      if (copy >= 0) pool_->release_pages({&copy, 1});
      continue;
    }
    require_page(copy, tokens);
    try {
      pool_->copy_page(pages_[i], copy);
    } catch (...) {
      pool_->release_pages({&copy, 1});
      throw;
    }
    pool_->release_pages({&pages_[i], 1});
    pages_[i] = copy;
  }
  while (std::ssize(pages_) < needed) {
    const int32_t page = pool_->take_page();
    require_page(page, tokens);
    pages_.push_back(page);
  }
  if (pool_->fresh_ > fresh) pool_->pages_begin(fresh, pool_->fresh_);
}

int64_t CachedSequence::slot(int64_t position) const {
  const int64_t page_size = pool_->shape().page_size;
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
  // A shared page past the end goes back without being free for anyone.
  while (std::ssize(pages_) > pages_for(std::max(length_, reserved_))) {
    const int32_t page = pages_.back();
    pages_.pop_back();
    written_ = std::min(written_, std::ssize(pages_) * pool_->shape().page_size);
    if (!pool_->is_shared(page)) return page;
    pool_->release_pages({&page, 1});
  }
  return -1;
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
