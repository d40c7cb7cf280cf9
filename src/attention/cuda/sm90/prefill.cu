// SPDX-License-Identifier: Apache-2.0
// Host side of a prefill call: what is supported, the workspace, tensor maps, and the order of the kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <numbers>

#include "attention/cuda/common/host.h"
#include "attention/cuda/sm90/prefill_call.h"
#include "base/cuda/launch.h"
#include "base/cuda/parts.h"

namespace kascade::cuda {
namespace {

// Pooled weights are kept for as many tiles as fit into this.
constexpr int64_t kWeightBytes = int64_t{512} << 20;

size_t lay_out(PrefillCall& call, std::byte* base) {
  const AttentionParams& p = call.params;
  Layout layout(base);
  layout.take(call.totals, 1);
  layout.take(call.counters, 2 + call.chunks);
  layout.take(call.chunk_keys, call.chunks);
  layout.take(call.dense_begin, p.batch + 1);
  layout.take(call.sparse_begin, p.batch + 1);
  layout.take(call.tile_begin, p.batch + 1);
  layout.take(call.needed_sets, call.sets);
  layout.take(call.dense_table, call.dense_capacity);
  layout.take(call.sparse_table, call.sparse_capacity);
  layout.take(call.tile_table, call.tile_capacity);
  if (selects(p.role)) {
    layout.take(call.lse, call.maxima.total_q * p.query_heads);
    layout.take(call.weights, call.chunk_tiles * call.sets * call.weight_stride);
    layout.take(call.histograms, int64_t{call.chunk_tiles} * call.sets * kWeightBins);
  }
  return layout.bytes();
}

/// Of rows and heads of q.
StrideUnits<2> query_stride_units(const AttentionParams& p) {
  return stride_units<2>({p.max_total_q > 1 ? p.q_row_stride : 0, p.query_heads > 1 ? p.q_head_stride : 0});
}

void set_strides(PrefillCall& call) {
  const StrideUnits<4> keys = key_stride_units(call.params);
  call.kv_unit = keys.unit;
  call.k_token_units = static_cast<uint32_t>(keys.units[0]);
  call.k_page_units = static_cast<uint32_t>(keys.units[1]);
  call.v_token_units = static_cast<uint32_t>(keys.units[2]);
  call.v_page_units = static_cast<uint32_t>(keys.units[3]);
  const StrideUnits<2> queries = query_stride_units(call.params);
  call.q_unit = queries.unit;
  call.q_row_units = static_cast<uint32_t>(queries.units[0]);
  call.q_head_units = static_cast<uint32_t>(queries.units[1]);
}

/// Empty, or which stride of q leads further than 32 bits reach.
std::string queries_out_of_reach(const AttentionParams& p) {
  const StrideUnits<2> strides = query_stride_units(p);
  const auto rows = static_cast<uint64_t>(p.max_total_q - 1),
             heads = static_cast<uint64_t>(p.query_heads - 1);
  const std::string supported = reach_of(strides.unit);
  if (strides.units[1] > UINT32_MAX / std::max<uint64_t>(heads, 1))
    return reason("q_head_stride", p.q_head_stride, supported.c_str());
  if (strides.units[0] > (UINT32_MAX - heads * strides.units[1]) / std::max<uint64_t>(rows, 1))
    return reason("q_row_stride", p.q_row_stride, supported.c_str());
  return "";
}

PrefillCall make_call(const AttentionParams& p) {
  PrefillCall call;
  call.params = p;
  call.maxima = Maxima{p.max_q_len, p.max_kv_len, p.max_total_q, p.max_tiles};
  call.scale_log2 = static_cast<float>(score_scale(p) * std::numbers::log2e);
  const int32_t group = group_size(p);
  call.sets = sets_per_tile(p);
  set_strides(call);
  if (p.page_table != nullptr && std::has_single_bit(static_cast<uint32_t>(p.page_size)))
    call.page_shift = std::countr_zero(static_cast<uint32_t>(p.page_size));
  call.readers = p.set_owner == SetOwner::kQueryHead ? p.query_heads : p.kv_heads;
  call.reader_heads = p.query_heads / call.readers;
  call.tile_parts = static_cast<int32_t>(parts_of(int64_t{p.tile} * call.reader_heads, kBlockRows));
  call.dense_rows = p.role == Role::kAnchor ? lse_rows(p.head_dim) : kBlockRows;
  if (p.role != Role::kReuse)
    call.dense_capacity = int64_t{p.max_total_q} * group / call.dense_rows + p.batch;
  if (attends_to_sets(p.role)) {
    const int64_t tiles = p.max_total_q / p.tile + 2 * int64_t{p.batch};
    call.sparse_capacity =
        tiles * call.tile_parts + int64_t{p.max_total_q} * call.reader_heads / kBlockRows + p.batch;
  }
  if (selects(p.role)) {
    call.tile_capacity = p.max_tiles;
    call.weight_stride = parts_of(p.max_kv_len, 128) * 128;
    const int64_t tile_bytes = call.sets * call.weight_stride * static_cast<int64_t>(sizeof(float));
    call.chunk_tiles = static_cast<int32_t>(std::clamp<int64_t>(kWeightBytes / tile_bytes, 1, p.max_tiles));
    call.chunks = static_cast<int32_t>(parts_of(p.max_tiles, call.chunk_tiles));
  }
  return call;
}

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

/// A map of 16-bit elements in boxes that are laid out as tiles are (prefill_load.cuh); whether there is one.
bool encode_map(DType dtype, const void* base, const cuuint64_t (&extents)[5], const cuuint64_t (&strides)[4],
                const cuuint32_t (&box)[5], CUtensorMap* map) {
  static const EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) return false;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto type =
      dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode(map, type, 5, const_cast<void*>(base), extents, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Elements side by side in a tile; and an extent that ends nowhere, as only what exists is ever asked for.
constexpr int64_t kPanel = 64;
constexpr cuuint64_t kMany = INT32_MAX;

cuuint64_t stride_bytes(int64_t elements) { return static_cast<cuuint64_t>(elements) * 2; }

/// Boxes of `rows` keys: of each eight keys 64 elements after 64 elements. So a key is given by two
/// dimensions, the second in steps of eight keys.
bool encode_boxes(const AttentionParams& p, const void* base, int64_t token_stride, int64_t head_stride,
                  int64_t page_stride, int32_t rows, BoxMap* map) {
  if (p.kv_heads > 1 && head_stride % kPanel != 0) return false;
  const bool paged = p.page_table != nullptr;
  const cuuint64_t extents[5] = {kPanel, kMany, kMany, kMany, paged ? kMany : 1};
  // The stride of a dimension with one entry is not the caller's to give.
  const cuuint64_t strides[4] = {stride_bytes(token_stride), stride_bytes(kPanel),
                                 stride_bytes(8 * token_stride), paged ? stride_bytes(page_stride) : 16};
  const cuuint32_t box[5] = {kPanel, 8, static_cast<cuuint32_t>(p.head_dim / kPanel),
                             static_cast<cuuint32_t>(rows / 8), 1};
  map->head_panels = p.kv_heads > 1 ? static_cast<int32_t>(head_stride / kPanel) : 0;
  return encode_map(p.kv_dtype, base, extents, strides, box, &map->map);
}

/// Boxes of `rows` packed rows: of each eight rows, which are tokens times heads, 64 elements after 64
/// elements.
void encode_row_boxes(const AttentionParams& p, DType dtype, const void* base, int64_t row_stride,
                      int64_t head_stride, int32_t rows, RowBoxes* boxes) {
  const int32_t heads = group_size(p);
  if (8 % heads != 0 || (dtype != DType::kBF16 && dtype != DType::kF16)) return;
  const int32_t tokens = 8 / heads;
  const auto panels = static_cast<cuuint32_t>(p.head_dim / kPanel);
  const cuuint64_t extents[5] = {kPanel, static_cast<cuuint64_t>(p.query_heads), kMany, panels, kMany};
  const cuuint64_t strides[4] = {p.query_heads > 1 ? stride_bytes(head_stride) : 16, stride_bytes(row_stride),
                                 stride_bytes(kPanel), stride_bytes(tokens * row_stride)};
  const cuuint32_t box[5] = {kPanel, static_cast<cuuint32_t>(heads), static_cast<cuuint32_t>(tokens), panels,
                             static_cast<cuuint32_t>(rows / 8)};
  boxes->usable = encode_map(dtype, base, extents, strides, box, &boxes->map);
}

void encode_maps(PrefillCall& call) {
  const AttentionParams& p = call.params;
  // Half of a tile at most, so that two warps can share one.
  int32_t rows = 64;
  if (p.page_table != nullptr)
    while (p.page_size % rows != 0) rows /= 2;
  // Eight rows are one period of the swizzle.
  if (rows < 8) return;
  if (encode_boxes(p, p.k, p.k_token_stride, p.k_head_stride, p.k_page_stride, rows, &call.k_boxes) &&
      encode_boxes(p, p.v, p.v_token_stride, p.v_head_stride, p.v_page_stride, rows, &call.v_boxes))
    call.box_rows = rows;
  encode_row_boxes(p, p.q_dtype, p.q, p.q_row_stride, p.q_head_stride, kBlockRows, &call.q_boxes);
  encode_row_boxes(p, p.q_dtype, p.q, p.q_row_stride, p.q_head_stride, kGroupRows, &call.q_group_boxes);
  encode_row_boxes(p, p.out_dtype, p.out, p.out_row_stride, p.out_head_stride, kStoredRows, &call.out_boxes);
}

template <class T, int D>
void launch_dense(const PrefillCall& call, cudaStream_t stream) {
  if constexpr (D == 128) {
    if (call.box_rows != 0) return launch_prefill_chain<T, D>(call, stream);
  }
  launch_prefill_attend<T, D>(call, false, stream);
}

template <class T, int D>
void launch_typed(const PrefillCall& call, cudaStream_t stream) {
  const Role role = call.params.role;
  if (role == Role::kDense || role == Role::kLayer0) launch_dense<T, D>(call, stream);
  if (role == Role::kAnchor) launch_prefill_lse<T, D>(call, stream);
  for (int32_t chunk = 0; chunk < call.chunks; ++chunk) {
    launch_prefill_pool<T, D>(call, chunk, stream);
    launch_prefill_select(call, chunk, stream);
  }
  if (selects(role) && call.params.own_tile_mass != nullptr) launch_prefill_own_mass(call, stream);
  if (attends_to_sets(role)) launch_prefill_attend<T, D>(call, true, stream);
}

template <class T>
void launch_typed(const PrefillCall& call, cudaStream_t stream) {
  switch (call.params.head_dim) {
    case 64:
      return launch_typed<T, 64>(call, stream);
    case 128:
      return launch_typed<T, 128>(call, stream);
    default:
      return launch_typed<T, 256>(call, stream);
  }
}

}  // namespace

std::string prefill_unsupported(const AttentionParams& p) {
  const char* stated = "a stated maximum of 1 or more (lengths are on the device)";
  if (p.max_q_len < 1) return reason("max_q_len", p.max_q_len, stated);
  if (p.max_kv_len < 1) return reason("max_kv_len", p.max_kv_len, stated);
  if (p.max_total_q < 1) return reason("max_total_q", p.max_total_q, stated);
  if (p.role != Role::kDense && p.max_tiles < 1) return reason("max_tiles", p.max_tiles, stated);
  if (int64_t{p.max_total_q} * p.query_heads > INT32_MAX)
    return reason("max_total_q", p.max_total_q, "at most 2147483647 rows and heads in a call");
  if (std::string queries = queries_out_of_reach(p); !queries.empty()) return queries;
  const PrefillCall call = make_call(p);
  if (call.dense_capacity * p.kv_heads > INT32_MAX || call.sparse_capacity * call.readers > INT32_MAX)
    return reason("batch", p.batch, "at most 2147483647 units of 128 rows in a call");
  return "";
}

size_t prefill_workspace_bytes(const AttentionParams& params) {
  if (params.batch == 0) return 0;
  PrefillCall call = make_call(params);
  return lay_out(call, nullptr);
}

void launch_prefill(const AttentionParams& params, void* workspace, cudaStream_t stream,
                    int spare_multiprocessors) {
  PrefillCall call = make_call(params);
  call.multiprocessors = std::max(1, multiprocessors("prefill") - spare_multiprocessors);
  lay_out(call, static_cast<std::byte*>(workspace));
  encode_maps(call);
  launch_prefill_schedule(call, stream);
  if (params.kv_dtype == DType::kBF16) {
    launch_typed<__nv_bfloat16>(call, stream);
  } else {
    launch_typed<__half>(call, stream);
  }
}

}  // namespace kascade::cuda
