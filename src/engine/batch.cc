// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.h"

#include <algorithm>

namespace kascade {
namespace {

void clear(BatchView& view) {
  view.cu_seqlens_q.assign(1, 0);
  view.seq_lens_kv.clear();
  view.budget_lens.clear();
  view.sequences.clear();
  view.max_q_len = view.max_kv_len = view.max_budget_len = 0;
}

void add(BatchView& view, CachedSequence& sequence, int64_t q_len, int64_t kv_len, int64_t budget_len) {
  view.cu_seqlens_q.push_back(view.cu_seqlens_q.back() + static_cast<int32_t>(q_len));
  view.seq_lens_kv.push_back(static_cast<int32_t>(kv_len));
  view.budget_lens.push_back(static_cast<int32_t>(budget_len));
  view.sequences.push_back(&sequence);
  view.max_q_len = std::max(view.max_q_len, static_cast<int32_t>(q_len));
  view.max_kv_len = std::max(view.max_kv_len, static_cast<int32_t>(kv_len));
  view.max_budget_len = std::max({view.max_budget_len, static_cast<int32_t>(budget_len), view.max_kv_len});
}

}  // namespace

void Batch::build(std::span<const ForwardItem> forward_items, Phase phase) {
  tokens.clear();
  positions.clear();
  slots.clear();
  clear(items);
  clear(single_rows);
  for (const ForwardItem& item : forward_items) {
    if (item.tokens.empty()) continue;
    auto& sequence = static_cast<CachedSequence&>(*item.sequence);
    const int64_t begin = sequence.length(), end = begin + static_cast<int64_t>(item.tokens.size());
    tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
    for (int64_t position = begin; position < end; ++position) {
      positions.push_back(static_cast<int32_t>(position));
      slots.push_back(sequence.slot(position));
      if (phase == Phase::kRows) add(single_rows, sequence, 1, position + 1, position + 1);
    }
    add(items, sequence, end - begin, end, item.budget_length != 0 ? item.budget_length : end);
  }
  fill_pages(items);
  fill_pages(single_rows);
}

void Batch::fill_pages(BatchView& view) {
  if (view.sequences.empty()) return;
  const std::vector<CachedSequence*>& sequences = view.sequences;
  const bool one = std::all_of(sequences.begin(), sequences.end(),
                               [&](const CachedSequence* sequence) { return sequence == sequences[0]; });
  if (one) {
    view.page_table = sequences[0]->page_table().data();
    view.page_table_stride = 0;
    return;
  }
  size_t stride = 0;
  for (const CachedSequence* sequence : sequences) stride = std::max(stride, sequence->page_table().size());
  view.table.resize(stride * sequences.size());
  for (size_t b = 0; b < sequences.size(); ++b) {
    const std::vector<int32_t>& pages = sequences[b]->page_table();
    std::copy(pages.begin(), pages.end(), view.table.begin() + static_cast<ptrdiff_t>(b * stride));
  }
  view.page_table = view.table.data();
  view.page_table_stride = static_cast<int64_t>(stride);
}

}  // namespace kascade
