// SPDX-License-Identifier: Apache-2.0
// Byte-pair merging: which neighbouring symbols may become one, and the order in which they do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kascade {

/// Pairs of symbols (token ids) that merge: a hash table with open addressing, filled once, then only read.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank;   // lower merges first
    int32_t result;  // the symbol that the pair becomes
  };

  /// Room for `pairs` pairs; call once, before insert.
  void reserve(size_t pairs);
  /// Adds a pair of symbols >= 0; a pair that is there already keeps its merge.
  void insert(int32_t left, int32_t right, Merge merge);
  /// The merge of a pair; null when it has none. Symbols below zero have none.
  const Merge* find(int32_t left, int32_t right) const;

 private:
  struct Slot {
    uint64_t key;
    Merge merge;
  };
  size_t slot_of(uint64_t key) const;

  std::vector<Slot> slots_;  // [power of two], at most half full
  int shift_ = 64;
};

/// Merges sequences of symbols. Holds scratch memory only: one per thread, reused from piece to piece.
class Merger {
 public:
  explicit Merger(const MergeTable& table) : table_(table) {}

  /// Merges the pair of lowest rank (the leftmost among equals) until no pair is left. n log n in the number
  /// of symbols.
  void merge(std::vector<int32_t>& symbols);

 private:
  struct Candidate {
    uint64_t order;  // rank, then position: the smallest comes first
    int32_t left, right, result;
  };
  /// Queues the pair at position, if it merges; whether it did.
  bool consider(const std::vector<int32_t>& symbols, int32_t position);

  const MergeTable& table_;
  std::vector<int32_t> previous_, next_;  // [symbols]: neighbours that are still there, -1 at the ends
  std::vector<Candidate> heap_;
};

}  // namespace kascade
