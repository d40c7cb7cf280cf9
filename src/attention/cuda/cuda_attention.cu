// SPDX-License-Identifier: Apache-2.0
// The operator on CUDA, and the host side of a decode call: what is supported, the workspace, and the order
// of the kernels. sm90/prefill.cu is the host side of a prefill call.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <numbers>
#include <string>

#include "attention/check.h"
#include "attention/cuda/common/call.h"
#include "attention/cuda/common/host.h"
#include "attention/cuda/cuda_attention.h"
#include "attention/cuda/sm90/prefill_call.h"
#include "base/cuda/launch.h"
#include "base/cuda/parts.h"
#include "base/cuda/ptx/async_copy.cuh"

namespace kascade {
namespace cuda {
namespace {

// Rows of scores are padded to whole sectors of memory.
constexpr int kScorePadding = 32;
// Bytes of stored scores up to which keys make room for them in the second-level cache (measured); the more
// there are, the fewer stay.
constexpr int64_t kMostKeptScores = int64_t{96} << 20;

bool rows_are_tiles(const AttentionParams& p) { return own_key_is_candidate(p); }

/// Query rows of a unit for `rows` rows that share keys: as many as registers allow. Keys and rows change
/// places between the passes with values and the one without.
int32_t unit_rows(const AttentionParams& p, bool values, int64_t rows) {
  if (values && rows <= 8) return 8;
  return rows <= 16 || p.head_dim > 128 ? 16 : 32;
}

}  // namespace

size_t lay_out(DecodeCall& call, std::byte* base) {
  const AttentionParams& p = call.params;
  Layout layout(base);
  const int64_t rows = call.maxima.total_q * p.query_heads;
  const int64_t dense_splits = p.role == Role::kReuse ? 0 : call.dense_splits;
  const int64_t sparse_splits = attends_to_sets(p.role) ? call.sparse_splits : 0;
  if (!call.self_scheduled) {
    const int64_t tiles = int64_t{p.batch} * call.tiles;
    layout.take(call.dense_units, tiles + 1);
    layout.take(call.sparse_units, tiles + 1);
    layout.take(call.dense_tiles, tiles);
    layout.take(call.sparse_tiles, tiles);
  }
  layout.take(call.counters, 2);
  layout.take(call.partial_stats, rows * std::max(dense_splits, sparse_splits));
  layout.take(call.partial_out, rows * (attends_to_sets(p.role) ? sparse_splits : dense_splits) * p.head_dim);
  if (selects(p.role)) {
    layout.take(call.score_codes, rows * call.score_stride);
    layout.take(call.score_tops, rows * call.score_stride / kChunkKeys);
    if (select_needs_rank_digits(call)) {
      layout.take(call.rank_digits, select_lists(call) * call.score_stride);
      layout.take(call.rank_bits, select_lists(call) * call.score_stride / 32);
    }
  }
  return layout.bytes();
}

namespace {

/// Measured on an H200 (docs/kernels/decode.md): enough splits that one sequence keeps the GPU busy, and no
/// more, as every unit costs a few microseconds of its warp and a partial result. rows: of a unit; more of
/// them leave more behind.
SplitRule split_rule(Pass pass, int32_t head_dim, int32_t lists, int32_t rows) {
  SplitRule rule;
  switch (pass) {
    case Pass::kScore:
      rule.units = 2048;
      rule.least = 128;
      rule.most = 256;
      break;
    case Pass::kDense:
      rule.units = 1024;
      rule.least = 256;
      rule.most = 1024;
      break;
    case Pass::kSparse:
      // At most 128 splits a list: a call of one sequence then has a unit a warp, if it has eight lists.
      rule.units = rows <= 8 ? std::min(1024, 128 * lists) : 256;
      rule.least = 64;
      rule.most = rows <= 8 ? 256 : 416;
      break;
  }
  rule.least = rule.least * 128 / head_dim;
  rule.most = rule.most * 128 / head_dim;
  rule.lists = lists;
  return rule;
}

/// Batches up to this find their units of work in every block, which saves a kernel, and deal them out in
/// turn, which longer passes do less evenly than a counter.
int32_t most_self_scheduled(Role role) { return role == Role::kReuse ? 8 : role == Role::kAnchor ? 4 : 2; }
static_assert(kMostSelfScheduled >= 8);

DecodeCall make_call(const AttentionParams& p) {
  DecodeCall call;
  call.params = p;
  call.maxima = Maxima{p.max_q_len, p.max_kv_len, p.max_total_q, p.max_tiles};
  call.scale_log2 = static_cast<float>(score_scale(p) * std::numbers::log2e);
  call.sets = sets_per_tile(p);
  call.readers = p.set_owner == SetOwner::kQueryHead ? p.query_heads : p.kv_heads;
  call.reader_heads = p.query_heads / call.readers;
  call.group = group_size(p);
  call.tiles = rows_are_tiles(p) && p.role != Role::kDense ? p.max_q_len : 1;
  call.dense_rows = unit_rows(p, p.role != Role::kAnchor, int64_t{p.max_q_len} * group_size(p));
  call.sparse_rows = unit_rows(p, true, int64_t{rows_are_tiles(p) ? 1 : p.max_q_len} * call.reader_heads);
  call.dense_rule = split_rule(p.role == Role::kAnchor ? Pass::kScore : Pass::kDense, p.head_dim, p.kv_heads,
                               call.dense_rows);
  call.sparse_rule = split_rule(Pass::kSparse, p.head_dim, call.readers, call.sparse_rows);
  call.sparse_rule.many_of_a_call = call.sparse_rows == 8;
  call.dense_splits = most_splits(call.dense_rule, p.max_kv_len);
  call.sparse_splits = most_splits(call.sparse_rule, int64_t{p.capacity} + p.max_q_len);
  call.score_stride = parts_of(p.max_kv_len, kScorePadding) * kScorePadding;
  if (p.page_size > 0 && std::has_single_bit(static_cast<uint32_t>(p.page_size)))
    call.page_shift = std::countr_zero(static_cast<uint32_t>(p.page_size));
  call.self_scheduled = int64_t{p.batch} * call.tiles <= most_self_scheduled(p.role);
  // Without values a unit leaves a few bytes, and long units end far apart: a warp merges groups only where
  // splits need not be cut short at `most` keys, and none that are dealt out.
  if (p.role == Role::kAnchor)
    call.dense_rule.most_grouped = call.self_scheduled ? 0 : call.dense_rule.units / call.dense_rule.lists;
  const int64_t score_bytes = int64_t{p.max_total_q} * p.query_heads * call.score_stride * 9 / 4;
  call.key_policy = score_bytes <= kMostKeptScores ? kEvictFirst : kEvictNormal;
  const StrideUnits<4> strides = key_stride_units(p);
  call.stride_unit = strides.unit;
  call.k_token_units = static_cast<uint32_t>(strides.units[0]);
  call.k_page_units = static_cast<uint32_t>(strides.units[1]);
  call.v_token_units = static_cast<uint32_t>(strides.units[2]);
  call.v_page_units = static_cast<uint32_t>(strides.units[3]);
  return call;
}

std::string unsupported(const AttentionParams& p) {
  if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
    return reason("head_dim", p.head_dim, "64, 128, 256");
  if (p.kv_dtype != DType::kF16 && p.kv_dtype != DType::kBF16)
    return std::string("kv_dtype is ") + dtype_name(p.kv_dtype) + "; supported: f16, bf16";
  if (p.q_dtype != p.kv_dtype)
    return std::string("q_dtype is ") + dtype_name(p.q_dtype) + "; supported: kv_dtype, " +
           dtype_name(p.kv_dtype);
  if (p.selection_k != nullptr) return "selection_k is given; supported: null";
  if (p.batch == 0) return "";
  if (std::string keys = keys_out_of_reach(p); !keys.empty()) return keys;
  if (p.tile_rule == TileRule::kAligned) return prefill_unsupported(p);
  const char* stated = "a stated maximum of 1 or more (lengths are on the device)";
  if (p.max_q_len < 1 || p.max_q_len > kMaxStepRows) return reason("max_q_len", p.max_q_len, "1..8");
  if (p.max_kv_len < 1) return reason("max_kv_len", p.max_kv_len, stated);
  if (p.max_total_q < 1) return reason("max_total_q", p.max_total_q, stated);
  if (p.role != Role::kDense && p.max_tiles < 1) return reason("max_tiles", p.max_tiles, stated);
  if (int64_t{p.max_total_q} * p.query_heads > INT32_MAX)
    return reason("max_total_q", p.max_total_q, "at most 2147483647 rows and heads in a call");
  const int64_t pooled = int64_t{p.max_q_len} * p.query_heads / sets_per_tile(p);
  if (selects(p.role) && pooled > kMaxPooledRows)
    return reason("query_heads", p.query_heads, "at most 512 rows and heads pooled into a set");
  const DecodeCall call = make_call(p);
  const int64_t row_chunks = parts_of(int64_t{p.max_q_len} * group_size(p), 16);
  if (int64_t{p.batch} * p.query_heads * row_chunks * std::max(call.dense_splits, call.sparse_splits) >
      INT32_MAX)
    return reason("batch", p.batch, "at most 2147483647 units of work in a call");
  return "";
}

bool available() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

size_t workspace_bytes(const AttentionParams& params, int) {
  if (params.batch == 0) return 0;
  if (params.tile_rule == TileRule::kAligned) return prefill_workspace_bytes(params);
  DecodeCall call = make_call(params);
  return lay_out(call, nullptr);
}

template <class T>
void attend(const DecodeCall& call, Pass pass, cudaStream_t stream) {
  switch (call.params.head_dim) {
    case 64:
      return launch_attend_pass<T, 64>(call, pass, stream);
    case 128:
      return launch_attend_pass<T, 128>(call, pass, stream);
    default:
      return launch_attend_pass<T, 256>(call, pass, stream);
  }
}

void attend(const DecodeCall& call, Pass pass, cudaStream_t stream) {
  if (call.params.kv_dtype == DType::kBF16) return attend<__nv_bfloat16>(call, pass, stream);
  attend<__half>(call, pass, stream);
}

/// What depends on the multiprocessors, and so must not touch what is added to what.
void share_work(DecodeCall& call) {
  const int32_t dim = call.params.head_dim;
  const int32_t warps = call.multiprocessors * (dim <= 64 ? 16 : dim <= 128 ? 8 : 4);
  call.dense_rule.warps = call.params.role == Role::kAnchor ? 2 * warps : warps;
  call.sparse_rule.warps = warps;
  if (call.params.batch * call.tiles == 1 && call.sparse_rows == 8 && dim <= 128)
    call.sparse_rule.block_groups = warps / kSplitGroup;
}

void launch_call(const AttentionParams& params, void* workspace, const AttentionContext& context) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  if (workspace == nullptr || address % kWorkspaceAlignment != 0)
    throw BadArgument("workspace is at address " + std::to_string(address) + ", must be " +
                      std::to_string(kWorkspaceAlignment) + "-byte aligned device memory");
  if (context.spare_multiprocessors < 0)
    throw BadArgument("spare_multiprocessors is " + std::to_string(context.spare_multiprocessors) +
                      ", must be 0 or more");
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (params.tile_rule == TileRule::kAligned)
    return launch_prefill(params, workspace, stream, context.spare_multiprocessors);
  DecodeCall call = make_call(params);
  lay_out(call, static_cast<std::byte*>(workspace));
  call.multiprocessors = std::max(1, multiprocessors("decode") - context.spare_multiprocessors);
  share_work(call);
  if (!call.self_scheduled) launch_schedule(call, stream);
  if (params.role == Role::kDense || params.role == Role::kLayer0) {
    attend(call, Pass::kDense, stream);
    if (params.role == Role::kLayer0) launch_select(call, stream);
    launch_merge(call, false, stream);
    return;
  }
  if (params.role == Role::kAnchor) {
    attend(call, Pass::kScore, stream);
    launch_select(call, stream);
  }
  attend(call, Pass::kSparse, stream);
  launch_merge(call, true, stream);
}

}  // namespace
}  // namespace cuda

const AttentionKernel cuda_sm90_kernel = {"cuda-sm90",           cuda::available,   cuda::unsupported,
                                          cuda::workspace_bytes, cuda::launch_call, true};

size_t cuda_attention_workspace_bytes(const AttentionParams& params) {
  check_workspace_params(params);
  const std::string reason = cuda::unsupported(params);
  if (!reason.empty()) throw Unsupported(reason);
  return cuda::workspace_bytes(params, 1);
}

void cuda_attention(const AttentionParams& params, void* workspace, size_t workspace_bytes, void* stream,
                    int spare_multiprocessors) {
  // What is not stated would be read from the caller's arrays, which are not the host's to read.
  const size_t needed = cuda_attention_workspace_bytes(params);
  check_params(params);
  if (params.batch == 0) return;
  if (workspace_bytes < needed)
    throw BadArgument("workspace_bytes is " + std::to_string(workspace_bytes) + ", must be at least " +
                      std::to_string(needed));
  AttentionContext context;
  context.stream = stream;
  context.spare_multiprocessors = spare_multiprocessors;
  cuda::launch_call(params, workspace, context);
}

}  // namespace kascade
