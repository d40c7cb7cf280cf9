// SPDX-License-Identifier: Apache-2.0
// The paged KV cache, wherever its memory is: which page belongs to which sequence. A physical page number
// means the same place in K and V of every layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kascade/attention.h"
#include "kascade/dtype.h"
#include "kascade/engine.h"
#include "kascade/policy.h"

namespace kascade {

struct KvCacheShape {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int64_t pages = 0;
  int32_t page_size = 0;  // tokens
  DType dtype = DType::kBF16;

  /// Elements of one page of K (or of V) of one layer, laid out [G, page_size, D].
  int64_t page_elements() const { return int64_t{kv_heads} * page_size * head_dim; }
  uint64_t page_bytes() const { return static_cast<uint64_t>(page_elements()) * dtype_bytes(dtype); }
  /// Of K, or of V, of one layer, rounded up to kPlaneAlignment; OutOfMemory when all planes pass 64 bits.
  uint64_t plane_bytes() const;
  uint64_t total_bytes() const { return plane_bytes() * 2 * static_cast<uint64_t>(layers); }

  static constexpr uint64_t kPlaneAlignment = 4096;
};

class CachedSequence;

/// Pages of [layers, 2, pages, G, page_size, D], handed to sequences. A page may belong to several sequences
/// that share a prefix; it is free when the last of them lets go.
class PagePool {
 public:
  explicit PagePool(const KvCacheShape& shape);
  virtual ~PagePool() = default;
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  const KvCacheShape& shape() const { return shape_; }
  int64_t live_pages() const { return fresh_ - static_cast<int64_t>(free_.size()); }
  uint64_t live_bytes() const;

  /// Sets the K and V pointers, strides and type of a call for one layer; the page table is the caller's.
  void describe(int layer, AttentionParams& params) const;
  std::byte* plane(int layer, bool values) const;

 protected:
  std::byte* memory_ = nullptr;  // set by the owner of the memory

 private:
  friend class CachedSequence;
  /// A page nobody uses, or -1.
  int32_t take_page();
  void share_page(int32_t page) { ++owners_[page]; }
  bool is_shared(int32_t page) const { return owners_[page] > 1; }
  /// One owner less each; pages without one are free.
  void release_pages(std::span<const int32_t> pages);

  virtual void copy_page(int32_t from, int32_t to) = 0;
  /// Pages [begin, end), never used so far, are about to be filled.
  virtual void pages_begin(int64_t begin, int64_t end) { (void)begin, (void)end; }
  /// Nobody reads these pages any more; neighbours come in descending order.
  virtual void pages_end(std::span<const int32_t> pages) { (void)pages; }

  KvCacheShape shape_;
  uint64_t plane_bytes_ = 0;
  int64_t fresh_ = 0;            // pages [fresh, pages) were never used
  std::vector<int32_t> free_;    // used before, the last given back first
  std::vector<int32_t> owners_;  // [pages] sequences that hold the page
  std::vector<CachedSequence*> sequences_;
};

/// The engine's sequence. Pages past its end stay with it, so that rows that were cut off can be run again
/// from the middle of the layers, until another sequence needs them.
class CachedSequence final : public Sequence {
 public:
  explicit CachedSequence(std::shared_ptr<PagePool> pool);
  /// Shares the pages of the first `length` keys of prefix.
  CachedSequence(const CachedSequence& prefix, int64_t length);
  ~CachedSequence() override;
  CachedSequence(const CachedSequence&) = delete;
  CachedSequence& operator=(const CachedSequence&) = delete;

  int64_t length() const override { return length_; }
  void truncate(int64_t length) override;
  std::span<const float> last_hidden() const override { return last_hidden_; }

  const PagePool* pool() const { return pool_.get(); }
  const std::vector<int32_t>& page_table() const { return pages_; }

  /// The pages there are of the first `tokens` keys stay with this sequence until commit or roll_back.
  void protect(int64_t tokens) { reserved_ = tokens; }
  /// Pages for `tokens` keys, protected; those from the length on belong to this sequence alone. Throws
  /// OutOfMemory.
  void reserve(int64_t tokens);
  /// The slot (page * page_size + place in the page) of position.
  int64_t slot(int64_t position) const;
  /// A forward call ended: keys [0, length) are written in every layer, last_hidden is the last row's
  /// residual.
  void commit(int64_t length, std::span<const float> last_hidden);
  /// A forward call failed: what lies past the end is unknown, and spare.
  void roll_back();

  /// Keys below this position were written in every layer by calls that ended well, those cut off since
  /// included.
  int64_t written() const { return written_; }

  /// The state of policy for this sequence, made anew when another policy ran last; null when it keeps none.
  PolicyState* state_for(const Policy* policy);
  /// Keys of a layer that the state has heard of.
  int64_t& heard(int layer) { return heard_[layer]; }

 private:
  friend class PagePool;
  int64_t pages_for(int64_t tokens) const;
  /// Throws OutOfMemory when there was no page for `tokens` keys.
  void require_page(int32_t page, int64_t tokens) const;
  /// Gives one page past the end back, for another sequence; -1 when there is none.
  int32_t yield_spare_page();

  std::shared_ptr<PagePool> pool_;
  std::vector<int32_t> pages_;  // physical page of each logical one; those past the length are spare
  int64_t length_ = 0;
  int64_t reserved_ = 0;  // tokens whose pages a forward call is filling or is about to
  int64_t written_ = 0;
  std::vector<float> last_hidden_;
  const Policy* state_policy_ = nullptr;
  std::unique_ptr<PolicyState> state_;
  std::vector<int64_t> heard_;  // [layers]
};

}  // namespace kascade
