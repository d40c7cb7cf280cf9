// SPDX-License-Identifier: Apache-2.0
// The operator in plain loops: what every other implementation is compared with, written to be read beside
// docs/method.md, "Selection", "Budgets" and "Edge cases". Scores, softmax and sums are in double; pooled
// weights become float once, before they are ranked.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels.h"
#include "attention/params.h"

namespace kascade {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// f(pointer to element `offset`, typed).
template <class F>
void with_elements(const void* base, DType dtype, int64_t offset, F f) {
  switch (dtype) {
    case DType::kF16:
      return f(static_cast<const F16*>(base) + offset);
    case DType::kBF16:
      return f(static_cast<const BF16*>(base) + offset);
    case DType::kF32:
      return f(static_cast<const float*>(base) + offset);
  }
}

void store(void* base, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kF16:
      static_cast<F16*>(base)[index] = to_f16(value);
      return;
    case DType::kBF16:
      static_cast<BF16*>(base)[index] = to_bf16(value);
      return;
    case DType::kF32:
      static_cast<float*>(base)[index] = value;
  }
}

/// Scratch of one call, cut from the workspace. All per key of the longest sequence but query and sum.
struct Scratch {
  double* probabilities;  // [kv_len] of the keys listed, one row and head
  double* pooled;         // [kv_len] sum of probabilities over a tile's rows and heads
  float* weights;         // [kv_len] pooled, rounded
  int32_t* keys;          // [kv_len] positions attended
  double* query;          // [head_dim]
  double* sum;            // [head_dim]
  uint32_t* top_k;        // [select_top_k_scratch]

  /// Lays the arrays out from base (null: only measures); *bytes is the whole size.
  Scratch(std::byte* base, int64_t kv_len, int64_t head_dim, size_t* bytes) {
    size_t offset = 0;
    const auto take = [&](auto*& array, int64_t count) {
      array = base != nullptr ? reinterpret_cast<std::remove_reference_t<decltype(array)>>(base + offset)
                              : nullptr;
      offset += static_cast<size_t>(count) * sizeof(*array);
    };
    take(probabilities, kv_len);
    take(pooled, kv_len);
    take(query, head_dim);
    take(sum, head_dim);
    take(weights, kv_len);
    take(keys, kv_len);
    take(top_k, select_top_k_scratch(kv_len));
    *bytes = offset;
  }
};

class Call {
 public:
  Call(const AttentionParams& params, void* workspace)
      : p_(params),
        maxima_(resolve_maxima(params)),
        scratch_(static_cast<std::byte*>(workspace), maxima_.kv_len, params.head_dim, &scratch_bytes_) {}

  static size_t workspace_bytes(const AttentionParams& params) {
    size_t bytes = 0;
    Scratch(nullptr, resolve_maxima(params).kv_len, params.head_dim, &bytes);
    return bytes;
  }

  void run() {
    if (p_.status != nullptr) *p_.status |= clamp_status(p_, maxima_);
    for (b_ = 0; b_ < p_.batch; ++b_) {
      seq_ = sequence_at(p_, maxima_, b_);
      if (!attends_to_sets(p_.role)) attend_rows(0, seq_.q_len, nullptr);
      if (p_.role == Role::kDense) continue;
      int64_t done = 0;
      for (int64_t i = 0; i < seq_.tiles; ++i) {
        const Tile tile = tile_at(p_, seq_, i);
        if (selects(p_.role) && tile.set >= 0) select(tile);
        if (!attends_to_sets(p_.role)) continue;
        // Rows before the first key belong to no tile and see nothing.
        attend_rows(done, tile.row_begin, nullptr);
        attend_rows(tile.row_begin, tile.row_end, &tile);
        done = tile.row_end;
      }
      if (attends_to_sets(p_.role)) attend_rows(done, seq_.q_len, nullptr);
    }
  }

 private:
  int64_t position(int64_t row) const { return seq_.start + row; }

  int64_t set_index(int64_t tile_set, int32_t set) const { return tile_set * sets_per_tile(p_) + set; }

  /// All keys that a row may see, in order; returns how many.
  int64_t list_all_keys(int64_t row) {
    const int64_t count = std::max<int64_t>(position(row) + 1, 0);
    for (int64_t j = 0; j < count; ++j) scratch_.keys[j] = static_cast<int32_t>(j);
    return count;
  }

  /// The set that query head h uses, then the row's own keys; returns how many.
  int64_t list_set_keys(int64_t row, int32_t h, const Tile& tile) {
    int64_t count = 0;
    const int32_t kv_head = h / group_size(p_);
    if (tile.set >= 0) {
      const int64_t set =
          set_index(tile.set, p_.role == Role::kReuse ? set_read_by(p_, kv_head, h) : own_set(h));
      const int64_t members = std::clamp<int64_t>(p_.counts[set], 0, p_.capacity);
      // A set from the caller may hold anything: a key outside the candidates or after the row is not
      // attended.
      const int64_t end = std::min(tile.budget.candidates, position(row) + 1);
      int64_t last = -1;
      for (int64_t m = 0; m < members; ++m) {
        const int32_t j = p_.positions[set * p_.capacity + m];
        if (j <= last || j >= end) continue;
        scratch_.keys[count++] = j;
        last = j;
      }
    }
    for (int64_t j = tile.budget.candidates; j <= position(row); ++j)
      scratch_.keys[count++] = static_cast<int32_t>(j);
    return count;
  }

  int32_t own_set(int32_t h) const {
    if (p_.set_owner == SetOwner::kAllHeads) return 0;
    return p_.set_owner == SetOwner::kQueryHead ? h : h / group_size(p_);
  }

  /// Probabilities of the listed keys for one row and head; returns the log-sum-exp, -inf without keys.
  double softmax(int64_t row, int32_t h, int64_t key_count) {
    if (key_count == 0) return -kInfinity;
    const int64_t q_offset = (seq_.row_begin + row) * p_.q_row_stride + h * p_.q_head_stride;
    with_elements(p_.q, p_.q_dtype, q_offset, [&](const auto* q) {
      for (int64_t c = 0; c < p_.head_dim; ++c) scratch_.query[c] = to_float(q[c]);
    });
    const double scale = score_scale(p_);
    double largest = -kInfinity;
    for (int64_t n = 0; n < key_count; ++n) {
      const int64_t offset = token_offset(p_, b_, scratch_.keys[n], p_.k_page_stride, p_.k_token_stride) +
                             h / group_size(p_) * p_.k_head_stride;
      double dot = 0;
      with_elements(p_.k, p_.kv_dtype, offset, [&](const auto* k) {
        for (int64_t c = 0; c < p_.head_dim; ++c) dot += scratch_.query[c] * to_float(k[c]);
      });
      scratch_.probabilities[n] = dot * scale;
      largest = std::max(largest, dot * scale);
    }
    double total = 0;
    for (int64_t n = 0; n < key_count; ++n) {
      scratch_.probabilities[n] = std::exp(scratch_.probabilities[n] - largest);
      total += scratch_.probabilities[n];
    }
    for (int64_t n = 0; n < key_count; ++n) scratch_.probabilities[n] /= total;
    return largest + std::log(total);
  }

  /// Output and log-sum-exp of rows [begin, end): over all keys, or over a tile's sets and own keys.
  void attend_rows(int64_t begin, int64_t end, const Tile* tile) {
    for (int64_t row = begin; row < end; ++row)
      for (int32_t h = 0; h < p_.query_heads; ++h)
        attend(row, h, tile != nullptr ? list_set_keys(row, h, *tile) : list_all_keys(row));
  }

  void attend(int64_t row, int32_t h, int64_t key_count) {
    const double lse = softmax(row, h, key_count);
    std::fill_n(scratch_.sum, p_.head_dim, 0.0);
    for (int64_t n = 0; n < key_count; ++n) {
      const int64_t offset = token_offset(p_, b_, scratch_.keys[n], p_.v_page_stride, p_.v_token_stride) +
                             h / group_size(p_) * p_.v_head_stride;
      with_elements(p_.v, p_.kv_dtype, offset, [&](const auto* v) {
        for (int64_t c = 0; c < p_.head_dim; ++c)
          scratch_.sum[c] += scratch_.probabilities[n] * to_float(v[c]);
      });
    }
    const int64_t out_row = seq_.row_begin + row;
    const int64_t out_offset = out_row * p_.out_row_stride + h * p_.out_head_stride;
    for (int64_t c = 0; c < p_.head_dim; ++c)
      store(p_.out, p_.out_dtype, out_offset + c, static_cast<float>(scratch_.sum[c] * p_.v_scale));
    if (p_.lse != nullptr) p_.lse[out_row * p_.lse_row_stride + h] = static_cast<float>(lse);
  }

  /// Pools the weights of query heads [begin, end) over a tile's rows; returns the mass on the tile's own
  /// keys. Each row's probabilities are normalised over all its keys, own ones included.
  double pool(const Tile& tile, int32_t head_begin, int32_t head_end) {
    const int64_t candidates = tile.budget.candidates;
    double own_mass = 0;
    std::fill_n(scratch_.pooled, candidates, 0.0);
    for (int32_t h = head_begin; h < head_end; ++h) {
      for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
        const int64_t key_count = list_all_keys(row);
        softmax(row, h, key_count);
        for (int64_t j = 0; j < key_count; ++j)
          (j < candidates ? scratch_.pooled[j] : own_mass) += scratch_.probabilities[j];
      }
    }
    return own_mass;
  }

  void select(const Tile& tile) {
    const int32_t sets = sets_per_tile(p_);
    const int32_t heads = p_.query_heads / sets;
    for (int32_t s = 0; s < sets; ++s) {
      const int64_t set = set_index(tile.set, s);
      int64_t count = 0;
      int32_t* members = p_.positions + set * p_.capacity;
      if (set_needed(p_, s)) {
        const double own_mass = pool(tile, s * heads, (s + 1) * heads);
        for (int64_t j = 0; j < tile.budget.candidates; ++j)
          scratch_.weights[j] = static_cast<float>(scratch_.pooled[j]);
        if (p_.pooled_weights != nullptr)
          std::copy_n(scratch_.weights, tile.budget.candidates,
                      p_.pooled_weights + tile.set * p_.pooled_tile_stride + s * p_.pooled_head_stride);
        if (p_.own_tile_mass != nullptr) p_.own_tile_mass[set] = static_cast<float>(own_mass);
        count = write_members(tile.budget, members);
      }
      std::fill_n(members + count, p_.capacity - count, -1);
      p_.counts[set] = static_cast<int32_t>(count);
    }
  }

  /// Forced and ranked members, ascending.
  int64_t write_members(const SetBudget& budget, int32_t* members) {
    int64_t count = 0;
    for (int64_t j = 0; j < budget.sinks; ++j) members[count++] = static_cast<int32_t>(j);
    const int64_t ranked = select_top_k(scratch_.weights + budget.sinks, budget.recent_begin - budget.sinks,
                                        budget.ranked, members + count, scratch_.top_k);
    for (int64_t m = 0; m < ranked; ++m) members[count++] += static_cast<int32_t>(budget.sinks);
    for (int64_t j = budget.recent_begin; j < budget.candidates; ++j)
      members[count++] = static_cast<int32_t>(j);
    return count;
  }

  const AttentionParams& p_;
  const Maxima maxima_;
  size_t scratch_bytes_ = 0;
  Scratch scratch_;
  int32_t b_ = 0;
  Sequence seq_;
};

bool available() { return true; }

std::string unsupported(const AttentionParams& params) {
  return params.selection_k != nullptr ? "selection_k is given; only null is supported" : "";
}

size_t workspace_bytes(const AttentionParams& params, int) { return Call::workspace_bytes(params); }

void launch(const AttentionParams& params, void* workspace, const AttentionContext&) {
  Call(params, workspace).run();
}

}  // namespace

const AttentionKernel reference_kernel = {"reference", available, unsupported, workspace_bytes, launch};

}  // namespace kascade
