// SPDX-License-Identifier: Apache-2.0
// The attention operator: one call for one layer over a packed batch (docs/method.md; DESIGN.md "The
// operator"). Kernels know tensors, index sets, head maps and budgets; never plans, models or policies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kascade/budget.h"
#include "kascade/dtype.h"

namespace kascade {

class ThreadPool;

enum class Role : uint8_t {
  kDense,   // plain causal attention
  kLayer0,  // dense output, and selects index sets
  kAnchor,  // selects index sets, then attends to them
  kReuse,   // attends to given index sets through a head map
};

/// "dense", "layer0", "anchor" or "reuse".
constexpr const char* role_name(Role role) {
  switch (role) {
    case Role::kDense:
      return "dense";
    case Role::kLayer0:
      return "layer0";
    case Role::kAnchor:
      return "anchor";
    case Role::kReuse:
      return "reuse";
  }
  return "unknown role";
}

enum class TileRule : uint8_t {
  // Prefill: a tile is `tile` consecutive positions [tT, (t+1)T) of one sequence; candidates are the keys
  // before tT.
  kAligned,
  // Decode: with OwnTile::kOnTop a sequence's rows are one tile (candidates: keys before the step). Otherwise
  // each row is
  // a tile of its own whose candidates include its own key, and nothing is forced.
  kStep,
};

/// Who owns an index set: S of the tables below.
enum class SetOwner : uint8_t {
  kKvHead,     // S = G: pooled over the R query heads of a KV head
  kAllHeads,   // S = 1: pooled over all query heads
  kQueryHead,  // S = H: no pooling
};

/// Bits of *status, set when a length on the device exceeded a stated maximum and was clamped.
enum AttentionStatus : uint32_t {
  kStatusQueryClamped = 1u << 0,
  kStatusKvClamped = 1u << 1,
  kStatusTilesClamped = 1u << 2,
  kStatusCapacityClamped = 1u << 3,
};

/// Parameters of one call. Strides are in elements; the last dimension (head_dim) is contiguous; every row of
/// q, k, v and out is 16-byte aligned. Positions are logical, within the sequence, never physical slots. B =
/// batch, H = query heads, G = KV heads, R = H/G in 1..16, D = head_dim, a multiple of 8.
struct AttentionParams {
  Role role = Role::kDense;
  TileRule tile_rule = TileRule::kAligned;
  SetOwner set_owner = SetOwner::kKvHead;
  int32_t tile = 32;  // T in 1..128; `step` ignores it

  int32_t batch = 0;
  int32_t query_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float softmax_scale = 0;  // 0 = 1/sqrt(D)

  // Queries and output.
  const void* q = nullptr;  // [total_q, H, D] of q_dtype
  void* out = nullptr;      // [total_q, H, D] of out_dtype
  float* lse = nullptr;     // [total_q, H] natural-log log-sum-exp of the keys attended; null when not wanted
  DType q_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  int64_t q_row_stride = 0, q_head_stride = 0;
  int64_t out_row_stride = 0, out_head_stride = 0;
  int64_t lse_row_stride = 0;             // heads are contiguous
  const int32_t* cu_seqlens_q = nullptr;  // [B+1] row range of each sequence
  const int32_t* seq_lens_kv = nullptr;   // [B] keys of each sequence, the new rows' keys included
  const int32_t* budget_lens = nullptr;   // [B] L of the budget; null = seq_lens_kv

  // Keys and values. Token j of sequence b: page = page_table[b][j / page_size], slot j % page_size. Without
  // a page table the sequences are packed: token cu_seqlens_kv[b] + j of one page.
  const void* k = nullptr;  // [pages, page_size, G, D] or [pages, G, page_size, D] by strides, of kv_dtype
  const void* v = nullptr;
  DType kv_dtype = DType::kF32;
  int64_t k_page_stride = 0, k_token_stride = 0, k_head_stride = 0;
  int64_t v_page_stride = 0, v_token_stride = 0, v_head_stride = 0;
  int32_t page_size = 0;                   // paged only
  const int32_t* page_table = nullptr;     // [B, max_pages] logical page -> physical page; null = packed
  int64_t page_table_stride = 0;           // elements between rows
  const int32_t* cu_seqlens_kv = nullptr;  // [B+1] packed only
  float k_scale = 1, v_scale = 1;          // stored value * scale = value (8-bit caches)
  const void* selection_k = nullptr;  // compact copy of K that layer0 and anchor rank from; null = K itself

  // Index sets. Written by layer0 and anchor, read by reuse. Tile i of sequence b is set tile_offsets[b] + i.
  int32_t* positions = nullptr;  // [tiles, S, capacity] ascending logical positions, -1 up to capacity
  int32_t* counts = nullptr;     // [tiles, S] members; readers go by counts only
  const int32_t* tile_offsets = nullptr;  // [B+1] first set of each sequence; q_len 0 owns none
  int32_t capacity = 0;
  const int32_t* head_map =
      nullptr;  // reuse: [G] set owner head of each KV head; null = identity (or the only set)
  const uint8_t* needed =
      nullptr;  // layer0: [G] KV heads whose sets anyone reads, others get count 0; null = all
  Budget budget;

  // Optional by-products of selecting roles, for calibration: pooled weights of each tile's candidates,
  // before top-k.
  float* pooled_weights =
      nullptr;  // [tiles, S, pooled_head_stride]; entries past the candidates are not written
  int64_t pooled_tile_stride = 0, pooled_head_stride = 0;
  float* own_tile_mass =
      nullptr;  // [tiles, S] probability on the tile's own keys, summed over its rows and heads

  // Maxima stated by the host; workspace and the check of capacity go by them. 0 = read the (host) arrays. A
  // longer budget length than max_kv_len stays legal: sets that it makes larger than capacity are cut
  // (kStatusCapacityClamped).
  int32_t max_q_len = 0, max_kv_len = 0, max_total_q = 0, max_tiles = 0;
  uint32_t* status = nullptr;  // AttentionStatus bits are or-ed in; null = not reported
};

/// Where a call runs. The CPU implementations use pool (null = the calling thread alone); CUDA uses stream.
struct AttentionContext {
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
  int spare_multiprocessors = 0;  // of the GPU: the passes over keys leave so many to other work
};

/// Number of tiles that a sequence with q_len new rows and kv_len keys owns in a call (kernels and
/// tile_offsets agree on it).
int64_t tiles_of(const AttentionParams& params, int64_t q_len, int64_t kv_len);

/// Members that any set can have under the stated maxima: the least legal capacity.
int64_t required_capacity(const AttentionParams& params);

/// One implementation of the operator, by name: "reference", "cpu", "cpu-avx2", ... Each is listed once in
/// kernels.inc.
struct AttentionKernel {
  const char* name;
  bool (*available)();                                        // this machine and build can run it
  std::string (*unsupported)(const AttentionParams& params);  // empty, or what is not supported and what is
  size_t (*workspace_bytes)(const AttentionParams& params, int threads);
  void (*launch)(const AttentionParams& params, void* workspace, const AttentionContext& context);
  bool on_device = false;  // pointers are a GPU's; only runs when named
};

/// All implementations of this build, best first; the reference is last.
std::span<const AttentionKernel> attention_kernels();
/// The best available implementation, or the one named; throws BadArgument (unknown) or Unsupported (not
/// available). Without a name it is one for the host's pointers; KASCADE_ATTENTION in the environment, read
/// once, forces which.
const AttentionKernel& select_attention_kernel(const std::string& name = "");

/// Bytes of workspace for any call within the stated maxima.
size_t attention_workspace_bytes(const AttentionParams& params, const AttentionKernel& kernel, int threads);

/// Checks every field that the host can check (BadArgument or Unsupported naming the parameter, its value and
/// what is legal), then runs. Never allocates; workspace is 64-byte aligned (256-byte on CUDA) and at least
/// attention_workspace_bytes long, anything less throws before the launch. The result does not depend on
/// batch mates, thread count, page layout, or chunking at tile boundaries.
void attention(const AttentionParams& params, const AttentionKernel& kernel, void* workspace,
               size_t workspace_bytes, const AttentionContext& context);

/// The k largest of weights[0, n): larger first, then the smaller position; NaN ranks last. Writes min(k, n)
/// positions, ascending, and returns how many. scratch holds at least select_top_k_scratch(n) elements.
int64_t select_top_k(const float* weights, int64_t n, int64_t k, int32_t* positions, uint32_t* scratch);
int64_t select_top_k_scratch(int64_t n);

}  // namespace kascade
