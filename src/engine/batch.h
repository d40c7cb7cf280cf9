// SPDX-License-Identifier: Apache-2.0
// The rows of one forward call as the attention operator wants them: packed, with per-sequence lengths and
// pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/page_pool.h"
#include "kascade/attention.h"
#include "kascade/engine.h"

namespace kascade {

/// One way to see the rows as sequences: each item one sequence, or each row (kRows) one.
struct BatchView {
  std::vector<int32_t> cu_seqlens_q;       // [B+1]
  std::vector<int32_t> seq_lens_kv;        // [B], the new rows included
  std::vector<int32_t> budget_lens;        // [B]
  std::vector<CachedSequence*> sequences;  // [B]
  std::vector<int32_t> table;              // [B, table_stride] pages, unless every sequence is the same
  const int32_t* page_table = nullptr;
  int64_t page_table_stride = 0;
  int32_t max_q_len = 0;
  int32_t max_kv_len = 0;      // of seq_lens_kv
  int32_t max_budget_len = 0;  // of both lengths

  int32_t size() const { return static_cast<int32_t>(seq_lens_kv.size()); }
};

/// Built once a forward call; its vectors keep their memory from call to call.
class Batch {
 public:
  /// Items are checked; their sequences hold pages for the new rows.
  void build(std::span<const ForwardItem> items, Phase phase);

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }

  std::vector<int32_t> tokens;     // [rows]
  std::vector<int32_t> positions;  // [rows] in their sequences
  std::vector<int64_t> slots;      // [rows] in the KV cache
  BatchView items;                 // every item with rows is a sequence
  BatchView single_rows;           // kRows: every row is a sequence that ends with it; else empty

 private:
  static void fill_pages(BatchView& view);
};

}  // namespace kascade
