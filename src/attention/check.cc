// SPDX-License-Identifier: Apache-2.0
#include "attention/check.h"

#include <cmath>
#include <cstdint>

#include "attention/params.h"
#include "base/check.h"

namespace kascade {
namespace {

constexpr int64_t kRowAlignmentBytes = 16;

template <class T>
void check_range(const char* name, T value, int64_t low, int64_t high) {
  require<BadArgument>(value >= low && value <= high, "{} is {}, must be in {}..{}", name, value, low, high);
}

void check_not_negative(const char* name, int64_t value) {
  require<BadArgument>(value >= 0, "{} is {}, must be 0 or more", name, value);
}

void check_present(const char* name, const void* pointer, const char* why) {
  require<BadArgument>(pointer != nullptr, "{} is null, must be given {}", name, why);
}

void check_dtype(const char* name, DType dtype) {
  require<BadArgument>(dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16,
                       "{} is {}, must be f32 (0), f16 (1) or bf16 (2)", name, static_cast<int>(dtype));
}

void check_scale(const char* name, float scale) {
  require<BadArgument>(std::isfinite(scale) && scale > 0, "{} is {}, must be positive and finite", name,
                       scale);
}

/// A base pointer and the strides of its rows; a stride of a dimension with one entry is never used, so not
/// checked.
void check_rows(const char* name, const void* pointer, DType dtype) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  require<BadArgument>(address % kRowAlignmentBytes == 0,
                       "{} is at address {:#x}, must be {}-byte aligned ({} rows)", name, address,
                       kRowAlignmentBytes, dtype_name(dtype));
}

void check_stride(const char* name, int64_t stride, int64_t extent, int64_t least, DType dtype) {
  if (extent <= 1) return;
  require<BadArgument>(stride >= least, "{} is {}, must be at least {}", name, stride, least);
  const int64_t unit = kRowAlignmentBytes / static_cast<int64_t>(dtype_bytes(dtype));
  require<BadArgument>(stride % unit == 0,
                       "{} is {}, must be a multiple of {} so that {} rows are {}-byte aligned", name, stride,
                       unit, dtype_name(dtype), kRowAlignmentBytes);
}

void check_enums(const AttentionParams& p) {
  check_range("role", static_cast<int>(p.role), 0, static_cast<int>(Role::kReuse));
  check_range("tile_rule", static_cast<int>(p.tile_rule), 0, static_cast<int>(TileRule::kStep));
  check_range("set_owner", static_cast<int>(p.set_owner), 0, static_cast<int>(SetOwner::kQueryHead));
  check_range("budget.own_tile", static_cast<int>(p.budget.own_tile), 0,
              static_cast<int>(OwnTile::kCandidate));
  check_dtype("q_dtype", p.q_dtype);
  check_dtype("out_dtype", p.out_dtype);
  check_dtype("kv_dtype", p.kv_dtype);
}

void check_shape(const AttentionParams& p) {
  if (p.tile_rule == TileRule::kAligned) check_range("tile", p.tile, 1, kMaxTile);
  check_not_negative("batch", p.batch);
  require<BadArgument>(p.kv_heads >= 1, "kv_heads is {}, must be 1 or more", p.kv_heads);
  require<BadArgument>(p.query_heads >= 1 && p.query_heads % p.kv_heads == 0,
                       "query_heads is {}, must be a positive multiple of kv_heads, {}", p.query_heads,
                       p.kv_heads);
  require<BadArgument>(group_size(p) <= kMaxGroup,
                       "query_heads is {}: {} per KV head (kv_heads {}), must be 1..{}", p.query_heads,
                       group_size(p), p.kv_heads, kMaxGroup);
  require<BadArgument>(p.head_dim >= 8 && p.head_dim % 8 == 0,
                       "head_dim is {}, must be a positive multiple of 8", p.head_dim);
  if (p.softmax_scale != 0) check_scale("softmax_scale", p.softmax_scale);
  check_scale("k_scale", p.k_scale);
  check_scale("v_scale", p.v_scale);
  check_not_negative("max_q_len", p.max_q_len);
  check_not_negative("max_kv_len", p.max_kv_len);
  check_not_negative("max_total_q", p.max_total_q);
  check_not_negative("max_tiles", p.max_tiles);
}

void check_budget(const AttentionParams& p) {
  const Budget& b = p.budget;
  check_range("budget.percent_hundredths", b.percent_hundredths, 0, 10000);
  check_not_negative("budget.floor", b.floor);
  require<BadArgument>(b.round_to >= 1, "budget.round_to is {}, must be 1 or more", b.round_to);
  check_not_negative("budget.sinks", b.sinks);
  check_not_negative("budget.recent", b.recent);
  check_range("budget.tile", b.tile, 1, kMaxTile);
  check_not_negative("budget.rolling_min_rows", b.rolling_min_rows);
  require<BadArgument>(
      p.tile_rule == TileRule::kStep || b.own_tile != OwnTile::kCandidate || p.tile == 1,
      "budget.own_tile is kCandidate with tile {}, must be kOnTop or kCharged unless tile is 1", p.tile);
}

/// Row ranges [array[b], array[b+1]) of the batch.
void check_offsets(const char* name, const int32_t* array, int32_t batch) {
  check_not_negative(name, array[0]);
  for (int32_t b = 0; b < batch; ++b)
    require<BadArgument>(array[b + 1] >= array[b], "{}[{}] is {}, must be at least {}[{}], {}", name, b + 1,
                         array[b + 1], name, b, array[b]);
}

void check_lengths(const char* name, const int32_t* array, int32_t batch) {
  for (int32_t b = 0; b < batch; ++b)
    require<BadArgument>(array[b] >= 0, "{}[{}] is {}, must be 0 or more", name, b, array[b]);
}

bool reads_queries(const AttentionParams& p) { return p.max_q_len == 0 || p.max_total_q == 0; }
bool reads_keys(const AttentionParams& p) { return p.max_kv_len == 0; }

/// Lengths come before everything that depends on the resolved maxima.
void check_sequences(const AttentionParams& p) {
  check_present("cu_seqlens_q", p.cu_seqlens_q, "when batch is not 0");
  check_present("seq_lens_kv", p.seq_lens_kv, "when batch is not 0");
  if (reads_queries(p)) check_offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch);
  if (reads_keys(p)) {
    check_lengths("seq_lens_kv", p.seq_lens_kv, p.batch);
    if (p.budget_lens != nullptr) check_lengths("budget_lens", p.budget_lens, p.batch);
  }
  if (p.page_table == nullptr) {
    check_present("cu_seqlens_kv", p.cu_seqlens_kv, "when page_table is null");
    if (!reads_keys(p)) return;
    check_offsets("cu_seqlens_kv", p.cu_seqlens_kv, p.batch);
    for (int32_t b = 0; b < p.batch; ++b)
      require<BadArgument>(p.cu_seqlens_kv[b + 1] - p.cu_seqlens_kv[b] >= p.seq_lens_kv[b],
                           "seq_lens_kv[{}] is {}, must be at most its share of cu_seqlens_kv, {}", b,
                           p.seq_lens_kv[b], p.cu_seqlens_kv[b + 1] - p.cu_seqlens_kv[b]);
    return;
  }
  require<BadArgument>(p.cu_seqlens_kv == nullptr, "cu_seqlens_kv is given, must be null with a page_table");
  require<BadArgument>(p.page_size >= 1, "page_size is {}, must be 1 or more", p.page_size);
}

void check_set_arrays(const AttentionParams& p) {
  check_not_negative("capacity", p.capacity);
  check_present("counts", p.counts, "unless role is dense");
  if (p.capacity > 0) check_present("positions", p.positions, "unless role is dense");
  check_present("tile_offsets", p.tile_offsets, "unless role is dense");
  if (p.max_tiles != 0) return;
  check_offsets("tile_offsets", p.tile_offsets, p.batch);
  if (!reads_queries(p) || !reads_keys(p)) return;
  for (int32_t b = 0; b < p.batch; ++b) {
    const int64_t tiles = tiles_of(p, p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b], p.seq_lens_kv[b]);
    require<BadArgument>(p.tile_offsets[b + 1] - p.tile_offsets[b] >= tiles,
                         "tile_offsets[{}] is {}, must be at least {}: sequence {} owns {} tiles", b + 1,
                         p.tile_offsets[b + 1], p.tile_offsets[b] + tiles, b, tiles);
  }
}

void check_selection(const AttentionParams& p, const Maxima& maxima) {
  const int64_t required = required_capacity(p);
  require<BadArgument>(p.capacity >= required,
                       "capacity is {}, must be at least {} for this budget and {} keys", p.capacity,
                       required, maxima.kv_len);
  if (p.pooled_weights == nullptr) return;
  const int64_t sets = sets_per_tile(p);
  require<BadArgument>(sets * maxima.tiles <= 1 || p.pooled_head_stride >= maxima.kv_len,
                       "pooled_head_stride is {}, must be at least {}, the keys", p.pooled_head_stride,
                       maxima.kv_len);
  require<BadArgument>(maxima.tiles <= 1 || p.pooled_tile_stride >= sets * p.pooled_head_stride,
                       "pooled_tile_stride is {}, must be at least {}, {} sets of pooled_head_stride",
                       p.pooled_tile_stride, sets * p.pooled_head_stride, sets);
}

void check_queries(const AttentionParams& p, const Maxima& maxima) {
  check_present("q", p.q, "when there are query rows");
  check_present("out", p.out, "when there are query rows");
  check_rows("q", p.q, p.q_dtype);
  check_rows("out", p.out, p.out_dtype);
  check_stride("q_row_stride", p.q_row_stride, maxima.total_q, 0, p.q_dtype);
  check_stride("q_head_stride", p.q_head_stride, p.query_heads, 0, p.q_dtype);
  check_stride("out_row_stride", p.out_row_stride, maxima.total_q, p.head_dim, p.out_dtype);
  check_stride("out_head_stride", p.out_head_stride, p.query_heads, p.head_dim, p.out_dtype);
  if (p.lse != nullptr && maxima.total_q > 1)
    require<BadArgument>(p.lse_row_stride >= p.query_heads,
                         "lse_row_stride is {}, must be at least query_heads, {}", p.lse_row_stride,
                         p.query_heads);
}

void check_cache(const AttentionParams& p, const Maxima& maxima) {
  if (maxima.kv_len == 0) return;
  check_present("k", p.k, "when there are keys");
  check_present("v", p.v, "when there are keys");
  check_rows("k", p.k, p.kv_dtype);
  check_rows("v", p.v, p.kv_dtype);
  const bool paged = p.page_table != nullptr;
  // Packed sequences may sit anywhere in the one page; within pages of one slot no token stride is used.
  const int64_t tokens = paged ? p.page_size : INT64_MAX;
  const int64_t pages = paged ? INT64_MAX : 1;
  check_stride("k_page_stride", p.k_page_stride, pages, 0, p.kv_dtype);
  check_stride("k_token_stride", p.k_token_stride, tokens, 0, p.kv_dtype);
  check_stride("k_head_stride", p.k_head_stride, p.kv_heads, 0, p.kv_dtype);
  check_stride("v_page_stride", p.v_page_stride, pages, 0, p.kv_dtype);
  check_stride("v_token_stride", p.v_token_stride, tokens, 0, p.kv_dtype);
  check_stride("v_head_stride", p.v_head_stride, p.kv_heads, 0, p.kv_dtype);
  if (paged && p.batch > 1) {
    const int64_t most_pages = (maxima.kv_len + p.page_size - 1) / p.page_size;
    require<BadArgument>(p.page_table_stride >= 0,
                         "page_table_stride is {}, must be 0 or more (a row has up to {} pages)",
                         p.page_table_stride, most_pages);
  }
}

}  // namespace

void check_workspace_params(const AttentionParams& params) {
  check_enums(params);
  check_shape(params);
  if (params.role != Role::kDense) check_budget(params);
  if (params.batch == 0) return;
  if (reads_queries(params))
    check_present("cu_seqlens_q", params.cu_seqlens_q, "or max_q_len and max_total_q stated");
  if (reads_keys(params)) check_present("seq_lens_kv", params.seq_lens_kv, "or max_kv_len stated");
  if (params.role != Role::kDense && params.max_tiles == 0)
    check_present("tile_offsets", params.tile_offsets, "or max_tiles stated, unless role is dense");
}

void check_params(const AttentionParams& params) {
  check_workspace_params(params);
  if (params.batch == 0) return;
  check_sequences(params);
  if (params.role != Role::kDense) check_set_arrays(params);
  const Maxima maxima = resolve_maxima(params);
  if (maxima.total_q == 0 || maxima.q_len == 0) return;
  if (selects(params.role)) check_selection(params, maxima);
  check_queries(params, maxima);
  check_cache(params, maxima);
}

}  // namespace kascade
