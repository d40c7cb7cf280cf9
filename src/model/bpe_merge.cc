// SPDX-License-Identifier: Apache-2.0
#include "model/bpe_merge.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace kascade {
namespace {

constexpr uint64_t kEmpty = ~uint64_t{0};  // the pair (-1, -1), which is never inserted

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void MergeTable::reserve(size_t pairs) {
  const size_t size = std::bit_ceil(pairs * 2 + 2);
  slots_.assign(size, Slot{kEmpty, {}});
  shift_ = 64 - std::countr_zero(size);
}

size_t MergeTable::slot_of(uint64_t key) const {
  uint64_t mixed = key ^ (key >> 29);
  mixed *= 0x9E3779B97F4A7C15u;  // Knuth's multiplicative hashing: the upper bits depend on all of the key
  mixed ^= mixed >> 32;
  mixed *= 0xD6E8FEB86659FD93u;
  size_t slot = mixed >> shift_;
  while (slots_[slot].key != key && slots_[slot].key != kEmpty) slot = (slot + 1) & (slots_.size() - 1);
  return slot;
}

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = pair_key(left, right);
  Slot& slot = slots_[slot_of(key)];
  if (slot.key == kEmpty) slot = {key, merge};
}

const MergeTable::Merge* MergeTable::find(int32_t left, int32_t right) const {
  if ((left | right) < 0 || slots_.empty()) return nullptr;
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == kEmpty ? nullptr : &slot.merge;
}

bool Merger::consider(const std::vector<int32_t>& symbols, int32_t position) {
  const int32_t left = symbols[position], right = symbols[next_[position]];
  const MergeTable::Merge* merge = table_.find(left, right);
  if (merge == nullptr) return false;
  heap_.push_back(
      {uint64_t{merge->rank} << 32 | static_cast<uint32_t>(position), left, right, merge->result});
  return true;
}

void Merger::merge(std::vector<int32_t>& symbols) {
  const auto count = static_cast<int32_t>(symbols.size());
  if (count < 2) return;
  const auto first_is_later = [](const Candidate& a, const Candidate& b) { return a.order > b.order; };
  heap_.clear();
  previous_.resize(count);
  next_.resize(count);
  for (int32_t i = 0; i < count; ++i) {
    previous_[i] = i - 1;
    next_[i] = i + 1 < count ? i + 1 : -1;
  }
  for (int32_t i = 0; i + 1 < count; ++i) consider(symbols, i);
  std::make_heap(heap_.begin(), heap_.end(), first_is_later);

  constexpr int32_t kGone = std::numeric_limits<int32_t>::min();
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), first_is_later);
    const Candidate top = heap_.back();
    heap_.pop_back();
    const auto at = static_cast<int32_t>(static_cast<uint32_t>(top.order));
    const int32_t right = next_[at];
    // A candidate is out of date once either of its symbols has merged with another neighbour.
    if (symbols[at] != top.left || right < 0 || symbols[right] != top.right) continue;
    symbols[at] = top.result;
    symbols[right] = kGone;
    next_[at] = next_[right];
    if (next_[at] >= 0) {
      previous_[next_[at]] = at;
      if (consider(symbols, at)) std::push_heap(heap_.begin(), heap_.end(), first_is_later);
    }
    if (previous_[at] >= 0 && consider(symbols, previous_[at])) {
      std::push_heap(heap_.begin(), heap_.end(), first_is_later);
    }
  }
  std::erase(symbols, kGone);
}

}  // namespace kascade
