// SPDX-License-Identifier: Apache-2.0
// The first kernels of a prefill call: entries of the tables of work by sequence, then the tables. The same
// rules as attention/params.cc.
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/prefill_call.h"
#include "base/cuda/launch.h"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {
namespace {

constexpr int kCountThreads = 1024;
constexpr int kFillThreads = 128;

__device__ int64_t clamp64(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}
__device__ int32_t divide_up(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

/// sequence_at() of attention/params.h, and how many entries the sequence has in each table.
struct AlignedSequence {
  int64_t row_begin, q_len, kv_len, start, budget_len, first_tile, tiles, set_begin, stored_tiles;
  int32_t dense_blocks, sparse_blocks,
      bare_blocks;  // bare: of rows before the first key, which belong to no tile
};

__device__ AlignedSequence load_sequence(const PrefillCall& call, int32_t b) {
  const AttentionParams& p = call.params;
  AlignedSequence s = {};
  s.row_begin = clamp64(p.cu_seqlens_q[b], 0, call.maxima.total_q);
  const int64_t row_end = min(int64_t{p.cu_seqlens_q[b + 1]}, call.maxima.total_q);
  s.q_len = clamp64(row_end - s.row_begin, 0, call.maxima.q_len);
  s.kv_len = clamp64(p.seq_lens_kv[b], 0, call.maxima.kv_len);
  s.start = s.kv_len - s.q_len;
  s.budget_len = p.budget_lens != nullptr ? max(p.budget_lens[b], 0) : s.kv_len;
  if (p.role != Role::kReuse)
    s.dense_blocks = divide_up(s.q_len * (p.query_heads / p.kv_heads), call.dense_rows);
  if (p.role == Role::kDense || s.q_len == 0) return s;
  s.first_tile = max(s.start, int64_t{0}) / p.tile;
  s.tiles = s.kv_len == 0 ? 0 : (s.kv_len - 1) / p.tile - s.first_tile + 1;
  s.set_begin = p.tile_offsets[b];
  const int64_t set_end = min(int64_t{p.tile_offsets[b + 1]}, call.maxima.tiles);
  s.stored_tiles = s.set_begin < 0 ? 0 : clamp64(set_end - s.set_begin, 0, s.tiles);
  if (attends_to_sets(p.role)) {
    s.bare_blocks = divide_up(max(-s.start, int64_t{0}) * call.reader_heads, kBlockRows);
    s.sparse_blocks = static_cast<int32_t>(s.tiles) * call.tile_parts + s.bare_blocks;
  }
  return s;
}

/// tile_at() of attention/params.h, less the part of the rows; *clamped: the budget did not fit into
/// capacity.
__device__ SetBudget load_budget(const PrefillCall& call, const AlignedSequence& s, int64_t tile,
                                 bool* clamped) {
  const AttentionParams& p = call.params;
  const int64_t x = (s.first_tile + tile) * p.tile;
  const int64_t candidates = x + (p.budget.own_tile == OwnTile::kCandidate ? 1 : 0);
  SetBudget budget = evaluate_budget(p.budget, candidates, x, s.budget_len, s.budget_len);
  *clamped = budget.members() > p.capacity;
  const int64_t sinks = min(budget.sinks, int64_t{p.capacity});
  const int64_t recent = min(budget.candidates - budget.recent_begin, p.capacity - sinks);
  budget.ranked = min(budget.ranked, p.capacity - sinks - recent);
  budget.sinks = sinks;
  budget.recent_begin = budget.candidates - recent;
  return budget;
}

__device__ bool is_needed(const AttentionParams& p, int32_t set) {
  if (p.role != Role::kLayer0 || p.needed == nullptr) return true;
  if (p.set_owner != SetOwner::kAllHeads)
    return p.needed[p.set_owner == SetOwner::kQueryHead ? set / (p.query_heads / p.kv_heads) : set] != 0;
  for (int32_t g = 0; g < p.kv_heads; ++g)
    if (p.needed[g] != 0) return true;
  return false;
}

/// Sum over the block up to and including this thread; carry is what came before and is advanced.
__device__ int32_t running_sum(int32_t value, int32_t* warp_sums, int32_t* carry) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  value = sum_up_to(value, lane);
  __syncthreads();
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int32_t before = *carry, total = *carry;
  for (int w = 0; w < kCountThreads / 32; ++w) {
    before += w < warp ? warp_sums[w] : 0;
    total += warp_sums[w];
  }
  *carry = total;
  return before + value;
}

/// Entry x of the table of units that attend to all keys: a sequence's last rows, the longest, come first.
__device__ RowBlock dense_block(const PrefillCall& call, int32_t x) {
  const AttentionParams& p = call.params;
  const int32_t b = find_sequence(call.dense_begin, p.batch, x);
  const AlignedSequence s = load_sequence(call, b);
  const int32_t index = s.dense_blocks - 1 - (x - call.dense_begin[b]);
  const int64_t rows = s.q_len * (p.query_heads / p.kv_heads);
  RowBlock block = {};
  block.batch = b;
  block.row = static_cast<int32_t>(s.row_begin);
  block.position = static_cast<int32_t>(s.start);
  block.first = index * call.dense_rows;
  block.rows = static_cast<int32_t>(min(rows - block.first, int64_t{call.dense_rows}));
  block.keys = static_cast<int32_t>(s.kv_len);
  block.set = -1;
  return block;
}

__device__ int64_t tile_row_begin(const PrefillCall& call, const AlignedSequence& s, int64_t tile) {
  return max((s.first_tile + tile) * call.params.tile - s.start, int64_t{0});
}
__device__ int64_t tile_row_end(const PrefillCall& call, const AlignedSequence& s, int64_t tile) {
  return min((s.first_tile + tile + 1) * call.params.tile - s.start, s.q_len);
}

__device__ RowBlock sparse_block(const PrefillCall& call, int32_t x) {
  const AttentionParams& p = call.params;
  const int32_t b = find_sequence(call.sparse_begin, p.batch, x);
  const AlignedSequence s = load_sequence(call, b);
  const int32_t index = x - call.sparse_begin[b], tiled = s.sparse_blocks - s.bare_blocks;
  RowBlock block = {};
  block.batch = b;
  block.keys = static_cast<int32_t>(s.kv_len);
  block.set = -1;
  if (index >= tiled) {
    const int64_t rows = -s.start * call.reader_heads;
    block.row = static_cast<int32_t>(s.row_begin);
    block.position = static_cast<int32_t>(s.start);
    block.first = (index - tiled) * kBlockRows;
    block.rows = static_cast<int32_t>(min(rows - block.first, int64_t{kBlockRows}));
    return block;
  }
  const int64_t tile = s.tiles - 1 - index / call.tile_parts;
  const int64_t begin = tile_row_begin(call, s, tile), end = tile_row_end(call, s, tile);
  block.row = static_cast<int32_t>(s.row_begin + begin);
  block.position = static_cast<int32_t>(s.start + begin);
  block.first = index % call.tile_parts * kBlockRows;
  block.rows = static_cast<int32_t>(clamp64((end - begin) * call.reader_heads - block.first, 0, kBlockRows));
  block.own_begin = static_cast<int32_t>((s.first_tile + tile) * p.tile) +
                    (p.budget.own_tile == OwnTile::kCandidate ? 1 : 0);
  if (tile < s.stored_tiles) block.set = static_cast<int32_t>(s.set_begin + tile);
  return block;
}

__device__ TileEntry tile_entry(const PrefillCall& call, int32_t x) {
  const int32_t b = find_sequence(call.tile_begin, call.params.batch, x);
  const AlignedSequence s = load_sequence(call, b);
  const int64_t tile = x - call.tile_begin[b];
  const int64_t begin = tile_row_begin(call, s, tile), end = tile_row_end(call, s, tile);
  bool clamped = false;
  const SetBudget budget = load_budget(call, s, tile, &clamped);
  TileEntry entry = {};
  entry.batch = b;
  entry.row = static_cast<int32_t>(s.row_begin + begin);
  entry.rows = static_cast<int32_t>(end - begin);
  entry.position = static_cast<int32_t>(s.start + begin);
  entry.keys = static_cast<int32_t>(s.kv_len);
  entry.set = static_cast<int32_t>(s.set_begin + tile);
  entry.candidates = static_cast<int32_t>(budget.candidates);
  entry.sinks = static_cast<int32_t>(budget.sinks);
  entry.recent_begin = static_cast<int32_t>(budget.recent_begin);
  entry.ranked = static_cast<int32_t>(budget.ranked);
  return entry;
}

/// Every step-th entry of the tables of units, from `first` on.
__device__ void fill_blocks(const PrefillCall& call, int32_t first, int32_t step) {
  const int32_t dense = call.totals->dense_blocks, sparse = call.totals->sparse_blocks;
  for (int32_t x = first; x < dense; x += step) call.dense_table[x] = dense_block(call, x);
  for (int32_t x = first; x < sparse; x += step) call.sparse_table[x] = sparse_block(call, x);
}

/// Whether so little is to be filled in that the kernel that counts does it.
__host__ __device__ bool fills_alone(const PrefillCall& call) {
  return !selects(call.params.role) && call.dense_capacity + call.sparse_capacity <= 2 * kCountThreads;
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(const __grid_constant__ PrefillCall call) {
  __shared__ int32_t warp_sums[kCountThreads / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const AttentionParams& p = call.params;
  const int thread = static_cast<int>(threadIdx.x);
  int32_t dense_before = 0, sparse_before = 0, tiles_before = 0;
  const int32_t dense_most = static_cast<int32_t>(call.dense_capacity);
  const int32_t sparse_most = static_cast<int32_t>(call.sparse_capacity);
  const int32_t tiles_most = static_cast<int32_t>(call.tile_capacity);
  uint32_t status = 0;
  for (int32_t first = 0; first < p.batch; first += kCountThreads) {
    const int32_t b = first + thread;
    AlignedSequence s = {};
    if (b < p.batch) {
      s = load_sequence(call, b);
      if (s.q_len < int64_t{p.cu_seqlens_q[b + 1]} - p.cu_seqlens_q[b]) status |= kStatusQueryClamped;
      if (s.kv_len < p.seq_lens_kv[b]) status |= kStatusKvClamped;
      if (s.stored_tiles < s.tiles) status |= kStatusTilesClamped;
      bool clamped = false;
      if (selects(p.role) && s.tiles > 0) load_budget(call, s, s.tiles - 1, &clamped);
      if (clamped) status |= kStatusCapacityClamped;
    }
    const int32_t dense = running_sum(s.dense_blocks, warp_sums, &dense_before);
    const int32_t sparse = running_sum(s.sparse_blocks, warp_sums, &sparse_before);
    const int32_t tiles =
        running_sum(selects(p.role) ? static_cast<int32_t>(s.stored_tiles) : 0, warp_sums, &tiles_before);
    if (b >= p.batch) continue;
    // Arrays that are not ascending could name more rows than there are.
    call.dense_begin[b + 1] = min(dense, dense_most);
    call.sparse_begin[b + 1] = min(sparse, sparse_most);
    call.tile_begin[b + 1] = min(tiles, tiles_most);
  }
  for (int32_t i = thread; i < 2 + call.chunks; i += kCountThreads) call.counters[i] = 0;
  for (int32_t i = thread; i < call.chunks; i += kCountThreads) call.chunk_keys[i] = 0;
  if (thread == 0) {
    call.dense_begin[0] = call.sparse_begin[0] = call.tile_begin[0] = 0;
    PrefillTotals totals = {min(dense_before, dense_most), min(sparse_before, sparse_most),
                            min(tiles_before, tiles_most), 0, 0};
    if (selects(p.role))
      for (int32_t set = 0; set < call.sets; ++set)
        if (is_needed(p, set)) call.needed_sets[totals.needed_sets++] = set;
    totals.chunk_tiles = call.chunk_tiles * call.sets / max(totals.needed_sets, 1);
    *call.totals = totals;
  }
  if (p.status != nullptr && status != 0) atomicOr(p.status, status);
  if (!fills_alone(call)) return;
  __syncthreads();
  fill_blocks(call, thread, kCountThreads);
}

__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ PrefillCall call) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const PrefillTotals totals = *call.totals;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kFillThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t step = static_cast<int32_t>(gridDim.x) * kFillThreads;
  fill_blocks(call, first, step);
  for (int32_t x = first; x < totals.tiles; x += step) {
    const TileEntry entry = tile_entry(call, x);
    call.tile_table[x] = entry;
    atomicMax(call.chunk_keys + x / totals.chunk_tiles, entry.candidates);
  }
  if (!selects(call.params.role)) return;
  // Every selection leaves its histogram empty for the next chunk.
  const int64_t bins = int64_t{totals.chunk_tiles} * totals.needed_sets * kWeightBins;
  for (int64_t i = first; i < bins; i += step) call.histograms[i] = 0;
}

}  // namespace

void launch_prefill_schedule(const PrefillCall& call, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = 1;
  shape.threads = kCountThreads;
  launch("prefill_count", count_kernel, shape, stream, call);
  if (fills_alone(call)) return;
  shape.blocks = 4 * multiprocessors("prefill_fill");
  shape.threads = kFillThreads;
  launch("prefill_fill", fill_kernel, shape, stream, call);
}

}  // namespace kascade::cuda
