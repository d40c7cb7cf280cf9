// SPDX-License-Identifier: Apache-2.0
// The pass over K alone that makes pooled weights of a chunk of tiles, and their histograms.
#pragma once

#include <cstddef>

#include "attention/cuda/sm90/prefill_score.cuh"
#include "attention/cuda/sm90/prefill_weights.cuh"

namespace kascade::cuda {

/// Counts one more at an address in shared memory.
__device__ inline void count_shared(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

/// One tile of a unit of pooling.
struct PoolTile {
  int32_t place;  // of its weights and histogram for the unit's set
  int32_t row, rows;
  int32_t end_key;              // weights of keys before it are wanted; 0 for none
  int32_t sinks, recent_begin;  // ranked keys lie between
};

/// A range of keys of one or two neighbouring tiles and a set; first_key is a multiple of kRangeKeys / 4.
struct alignas(16) PoolUnit {
  int32_t set;  // -1: no more units
  int32_t batch, keys;
  int32_t first_key, end_key;
  int32_t rows;  // of the larger tile
  PoolTile tiles[2];
};

/// Query rows that a unit pools: of each KV head from kv_head_begin on, of `heads` query heads.
struct PoolRows {
  int32_t kv_head_begin, kv_head_end;
  int32_t head_begin, heads;  // query heads of the first KV head, and of each

  __device__ PoolRows(const PrefillCall& call, int32_t set) {
    const AttentionParams& p = call.params;
    const int32_t group = p.query_heads / p.kv_heads;
    kv_head_begin = p.set_owner == SetOwner::kAllHeads    ? 0
                    : p.set_owner == SetOwner::kQueryHead ? set / group
                                                          : set;
    kv_head_end = p.set_owner == SetOwner::kAllHeads ? p.kv_heads : kv_head_begin + 1;
    head_begin = p.set_owner == SetOwner::kQueryHead ? set : kv_head_begin * group;
    heads = p.set_owner == SetOwner::kQueryHead ? 1 : group;
  }
};

/// How many packed rows of a tile there are from `begin` on.
__device__ inline int32_t part_rows(const PoolTile& tile, const PoolRows& rows, int32_t begin) {
  return max(tile.rows * rows.heads - begin, 0);
}

/// Whether a box brings the queries of a part that has so many rows from here on: boxes have rows of all
/// query heads of a KV head.
__device__ inline bool boxes_part(const PrefillCall& call, const PoolRows& rows, int32_t part_rows) {
  return call.q_boxes.usable && part_rows >= kBlockRows &&
         rows.heads * call.params.kv_heads == call.params.query_heads;
}

__device__ inline PoolTile pool_tile(const PrefillCall& call, const TileEntry& entry, int32_t place,
                                     int32_t first_key, int32_t range_keys) {
  PoolTile tile;
  tile.place = place;
  tile.row = entry.row;
  tile.rows = entry.rows;
  tile.sinks = entry.sinks;
  tile.recent_begin = entry.recent_begin;
  tile.end_key = min(first_key + range_keys, entry.candidates);
  // Nothing is ranked when none or all of the keys between are members.
  const bool ranks = entry.ranked != 0 && entry.ranked != entry.recent_begin - entry.sinks;
  if ((!ranks && call.params.pooled_weights == nullptr) || tile.end_key <= first_key) tile.end_key = 0;
  return tile;
}

/// The next unit of a chunk that has keys, for all lanes of a warp: all tiles on one range of one head's keys
/// before the next range.
template <int parts>
__device__ inline PoolUnit draw_pool_unit(const PrefillCall& call, int32_t chunk, int lane) {
  const PrefillTotals& totals = *call.totals;
  const int32_t chunk_tiles = same_in_all(totals.chunk_tiles), needed_sets = same_in_all(totals.needed_sets);
  const int32_t tiles = min(same_in_all(totals.tiles) - chunk * chunk_tiles, chunk_tiles);
  const int32_t keys = same_in_all(call.chunk_keys[chunk]);
  // Shorter ones where there would be few units.
  const int32_t range_keys =
      tiles / parts * needed_sets * divide_up(keys, kRangeKeys) > static_cast<int32_t>(gridDim.x)
          ? kRangeKeys
          : kRangeKeys / 4;
  const int32_t ranges = divide_up(keys, range_keys);
  const TileEntry* table = call.tile_table + chunk * chunk_tiles;
  PoolUnit unit = {};
  unit.set = -1;
  while (tiles > 0) {
    const int32_t index = draw_number(call.counters + 2 + chunk, lane);
    const int32_t needed = index / tiles / max(ranges, 1);
    if (ranges == 0 || needed >= needed_sets) break;
    // The longest first, so that the end is even.
    const int32_t set = call.needed_sets[needed], slot = tiles - 1 - index % tiles;
    const TileEntry entry = table[slot];
    // The second of a pair comes with the first.
    if (parts == 2 && slot % 2 == 1 && __all_sync(kFullWarp, table[slot - 1].batch == entry.batch)) continue;
    unit.batch = entry.batch;
    unit.keys = entry.keys;
    unit.first_key = index / tiles % ranges * range_keys;
    unit.tiles[0] = pool_tile(call, entry, slot * needed_sets + needed, unit.first_key, range_keys);
    unit.tiles[1] = PoolTile{};
    if (parts == 2 && slot % 2 == 0 && slot + 1 < tiles &&
        __all_sync(kFullWarp, table[slot + 1].batch == entry.batch))
      unit.tiles[1] =
          pool_tile(call, table[slot + 1], (slot + 1) * needed_sets + needed, unit.first_key, range_keys);
    unit.end_key = max(unit.tiles[0].end_key, unit.tiles[1].end_key);
    unit.rows = max(unit.tiles[0].rows, unit.tiles[1].rows);
    if (__all_sync(kFullWarp, unit.end_key == 0)) continue;
    unit.set = set;
    break;
  }
  return unit;
}

/// Histograms of a unit's tiles are counted by the computing warps and added to the tiles' by the loading
/// ones, while the next unit's are counted.
template <int D>
struct PoolMemory {
  using Shape = ScoreShape<D>;
  using Score = ScoreMemory<D, PoolUnit, Shape::kParts>;
  Score score;
  float lse[Shape::kParts][kBlockRows];  // of the rows of queries
  int32_t histograms[2][Shape::kParts][kWeightBins];
  int32_t places[2][Shape::kParts];  // of tiles whose histograms they are, or -1
  uint64_t counted[2], added[2];

  /// By all threads of the block.
  __device__ void init() {
    int32_t* bins = histograms[0][0];
    for (int i = static_cast<int>(threadIdx.x); i < 2 * Shape::kParts * kWeightBins; i += Shape::kThreads)
      bins[i] = 0;
    if (threadIdx.x != 0) return;
    for (int i = 0; i < 2; ++i) {
      init_barrier(counted[i], 4 * Shape::kGroups);
      init_barrier(added[i], kLoadWarps);
    }
    score.init();
  }
};

/// Adds counted histograms to their tiles', and empties them; all loading threads call it.
template <int D>
__device__ void add_histograms(const PrefillCall& call, PoolMemory<D>& memory, Ring<2>& ring) {
  wait_barrier(memory.counted[ring.stage], ring.parity);
#pragma unroll 1
  for (int part = 0; part < PoolMemory<D>::Shape::kParts; ++part) {
    const int32_t place = memory.places[ring.stage][part];
    if (place < 0) continue;
    int32_t* bins = memory.histograms[ring.stage][part] + threadIdx.x;
    int32_t* tile = call.histograms + int64_t{place} * kWeightBins + threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < kWeightBins; i += kLoadWarps * 32) {
      const int32_t count = bins[i];
      if (count == 0) continue;
      atomicAdd(tile + i, count);
      bins[i] = 0;
    }
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(memory.added[ring.stage]);
  ring.next();
}

template <class T, int D>
__device__ void pool_load(const PrefillCall& call, PoolMemory<D>& memory, int32_t chunk) {
  using Shape = ScoreShape<D>;
  constexpr int kKeys = Shape::kKeys, kParts = Shape::kParts;
  const int warp = static_cast<int>(in_uniform_register(threadIdx.x / 32)),
            lane = static_cast<int>(threadIdx.x) % 32;
  auto& score = memory.score;
  UnitWriter<PoolUnit> writer(score.queue);
  UnitReader<PoolUnit> reader(score.queue);
  const auto draw = [&] {
    writer.put_by(warp == kLoadWarps - 1, [&] { return draw_pool_unit<kParts>(call, chunk, lane); });
  };
  draw();
  KeyLoader<T, D, kKeys> loader(call, warp, lane);
  Ring<Shape::kStages> ring;
  Ring<2> histogram;
  bool counting = false;  // histograms of the unit before are not added yet
  uint32_t q_parity = 1;
  while (true) {
    const PoolUnit& unit = reader.wait();
    if (unit.set < 0) break;
    const PoolRows rows(call, unit.set);
    const int32_t last = divide_up(unit.end_key, kKeys) - 1, first = unit.first_key / kKeys;
    const int32_t most_rows = unit.rows * rows.heads;
    const HeadDivision division(rows.heads);
#pragma unroll 1
    for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
#pragma unroll 1
      for (int32_t begin = 0; begin < most_rows; begin += kBlockRows) {
        loader.begin(unit.keys, unit.batch, g, last);
        const bool draws = g == rows.kv_head_end - 1 && begin + kBlockRows >= most_rows;
#pragma unroll 1
        for (int32_t block = last; block >= first; --block) {
          loader.look_ahead(block);
          wait_barrier(score.k_empty[ring.stage], ring.parity ^ 1);
          loader.copy(block, shared_address(score.k[ring.stage]), shared_address(&score.k_full[ring.stage]));
          loader.next();
          ring.next();
          // By then the slowest warpgroup is at the last block before.
          if (block == max(last - (Shape::kStages - 2), first)) {
            const int32_t head_begin = rows.head_begin + (g - rows.kv_head_begin) * rows.heads;
            if (const int own = own_slice(warp); own < kParts) {
              const PoolTile& tile = unit.tiles[own];
              const int32_t there = part_rows(tile, rows, begin);
              const uint32_t full = shared_address(&score.q_full[own]);
              wait_barrier(score.q_empty[own], q_parity);
#pragma unroll 1
              for (int at = kept_lane(lane), i = 0; i < kLoadWarps; ++i, at += 32) {
                const int32_t n = begin + at, token = division.token_of(n);
                const float* lse = call.lse;
                if (at < there)
                  lse += int64_t{tile.row + token} * call.params.query_heads + head_begin + n -
                         token * rows.heads;
                copy_async_4(shared_address(&memory.lse[own][at]), lse, at < there ? 4 : 0);
              }
              if (boxes_part(call, rows, there)) {
                if (lane == 0) expect_bytes(full, kBlockRows * D * 2);
                copy_box_by_one(shared_address(score.q[own]), &call.q_boxes.map, full, 0, head_begin,
                                tile.row + division.token_of(begin), 0, 0);
              } else {
                copy_slice<D, kScoreBatch, kBlockRows>(call, shared_address(score.q[own]), tile.row, begin,
                                                       there, head_begin, rows.heads, kept_lane(lane));
              }
              // Waited for here, as computing threads themselves read the log-sum-exps; there is time.
              commit_copies();
              wait_copies<0>();
              arrive(full);
            }
            q_parity ^= 1;
          }
          // By then all warpgroups are done with the unit before, if there are as many blocks.
          if (counting && (block + Shape::kStages < last || block == first)) {
            add_histograms(call, memory, histogram);
            counting = false;
          }
          if (draws && block == min(first + kBlocksLeft, last)) draw();
        }
      }
    reader.release();
    counting = true;
  }
  if (counting) add_histograms(call, memory, histogram);
}

/// Keys lie on the rows of the product and packed query rows on its columns, so that a thread adds up most of
/// a key's weight by itself.
template <class T, int D>
class PoolComputer : public ScoreComputer<PoolComputer<T, D>, typename PoolMemory<D>::Score> {
  using Memory = typename PoolMemory<D>::Score;
  using Base = ScoreComputer<PoolComputer<T, D>, Memory>;
  friend Base;
  using Base::call_;
  using Base::group_;
  using Base::kParts;
  using Base::lane_;
  using Base::warp_;
  static constexpr int kKeys = Memory::Shape::kKeys;

 public:
  __device__ PoolComputer(const PrefillCall& call, PoolMemory<D>& memory)
      : Base(call, memory.score), memory_(memory) {}

  __device__ void run() {
    UnitReader<PoolUnit> reader(memory_.score.queue);
    Ring<2> histogram;
    while (true) {
      const PoolUnit& unit = reader.wait();
      const PoolTile tile = unit.tiles[own_part()];
      const int32_t set = unit.set, keys = unit.keys, first_key = unit.first_key, end_key = unit.end_key,
                    tile_rows = unit.rows;
      reader.release();
      if (set < 0) break;
      const PoolRows rows(call_, set);
      this->boxed_ = call_.box_rows == 0 ? 0 : keys / kKeys;
      wait_barrier(memory_.added[histogram.stage], histogram.parity ^ 1);
      if (group_ % 2 == 0 && warp_ == 0 && lane_ == 0)
        memory_.places[histogram.stage][own_part()] = tile.end_key > 0 ? tile.place : -1;
      const int32_t last = divide_up(end_key, kKeys) - 1, first = first_key / kKeys,
                    most_rows = tile_rows * rows.heads;
      bool fresh = true;
#pragma unroll 1
      for (int32_t g = rows.kv_head_begin; g < rows.kv_head_end; ++g)
#pragma unroll 1
        for (int32_t begin = 0; begin < most_rows; begin += kBlockRows) {
          const int32_t there = part_rows(tile, rows, begin);
          begin_part(tile, there, last, fresh, g == rows.kv_head_end - 1 && there <= kBlockRows,
                     shared_address(memory_.histograms[histogram.stage][own_part()]));
          this->wait_queries(own_part(), boxes_part(call_, rows, there));
          load_lse(there);
          fresh = false;
          this->run_blocks(own_part(), this->query_tile(own_part()),
                           static_cast<uint32_t>(group_ % 2 * 64 * D * 2), last, first);
        }
      this->release(memory_.counted[histogram.stage]);
      histogram.next();
    }
  }

 private:
  /// What add() needs to know of a part; add() goes on from block to block with it.
  struct Part {
    float* weight;  // of the thread's key of the block
    bool stores;    // whether the thread has a key whose weight is stored
    bool fresh;     // the first rows of the unit: weights are set, not added to
    // The thread's key less the first that is ranked, and how many are; none before the last rows are added.
    uint32_t place, ranked;
    uint32_t histogram;  // its tile's, an address in shared memory
  };

  /// tile: of the part; rows: how many it has from here on; last_block: of keys; fresh, is_last: whether
  /// these are the tile's first rows, its last; histogram: in shared memory.
  __device__ void begin_part(const PoolTile& tile, int32_t rows, int32_t last_block, bool fresh, bool is_last,
                             uint32_t histogram) {
    // Of the last block; lanes 0 and 1 of a quad end up with the weights of its two keys. What the last block
    // has beyond the tile's end is stored too, where nobody looks at it.
    const int32_t key = last_block * kKeys + group_ % 2 * 64 + warp_ * 16 + lane_ / 4 + 8 * (lane_ & 1);
    Part& p = part_;
    p.weight = call_.weights + int64_t{tile.place} * call_.weight_stride + key;
    p.stores = rows > 0 && tile.end_key > 0 && (lane_ & 2) == 0;
    p.fresh = fresh;
    const int32_t end = min(tile.recent_begin, tile.end_key);
    p.place = static_cast<uint32_t>(key - tile.sinks);
    p.ranked = is_last ? static_cast<uint32_t>(max(end - tile.sinks, 0)) : 0;
    p.histogram = histogram;
  }
  /// Of the part's rows, of which there are so many; they come with the queries.
  __device__ void load_lse(int32_t rows) {
    const auto* lse = reinterpret_cast<const float2*>(memory_.lse[own_part()]) + (lane_ & 3);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 two = lse[4 * j];
      lse_[2 * j] = two.x;
      lse_[2 * j + 1] = two.y;
    }
    // Infinite for columns without a row, whose weights become zero.
#pragma unroll
    for (int c = 0; c < 32; ++c)
      if (c / 2 * 8 + 2 * (lane_ & 3) + c % 2 >= rows) lse_[c] = INFINITY;
  }

  // Warpgroups 0 and 1 take the two halves of a block's keys for the first part, the others for the second.
  __device__ int own_part() const { return group_ / 2; }

  __device__ void multiply(float (&scores)[64], uint32_t queries, uint32_t keys) {
    const uint64_t q = row_descriptor<D>(queries), k = row_descriptor<D>(keys);
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
      Product<T, kBlockRows>::shared(scores, advance(k, step_bytes(step)), advance(q, step_bytes(step)),
                                     step > 0);
  }

  __device__ void add(const float (&scores)[64], int32_t) {
    float sums[2][2] = {}, powers[2][16];
    // Added up one step later: a sum would wait for the exponential just before it.
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < 4) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
          powers[step & 1][i] =
              exp2_fast(fmaf(scores[16 * step + i], call_.scale_log2, -lse_[8 * step + i / 4 * 2 + (i & 1)]));
      }
      if (step > 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i >> 1 & 1][i & 1] += powers[(step - 1) & 1][i];
      }
    }
    added_[0] = sums[0][0] + sums[0][1];
    added_[1] = sums[1][0] + sums[1][1];
  }

  /// Weights of a block's keys, whose sums were added up before.
  __device__ void settle() {
    const float first = added_[0], second = added_[1];
    const bool odd = (lane_ & 1) != 0;
    float weight = (odd ? second : first) + __shfl_xor_sync(kFullWarp, odd ? first : second, 1);
    weight += __shfl_xor_sync(kFullWarp, weight, 2);
    Part& p = part_;
    if (p.stores) {
      if (!p.fresh) weight += *p.weight;
      if (weight != weight) weight = kNanWeight;
      *p.weight = weight;
      if (p.place < p.ranked)
        count_shared(p.histogram + static_cast<uint32_t>(weight_bin(__float_as_int(weight))) * 4);
    }
    p.weight -= kKeys;
    p.place -= kKeys;
    __syncwarp();
  }

  PoolMemory<D>& memory_;
  Part part_;
  float added_[2] = {};  // of the thread's rows, for each of its two keys
  float lse_[32];
};

template <class T, int D>
__global__ void __launch_bounds__(ScoreShape<D>::kThreads, 1)
    prefill_pool_kernel(const __grid_constant__ PrefillCall call, int32_t chunk) {
  extern __shared__ __align__(1024) unsigned char shared[];
  PoolMemory<D>& memory = *reinterpret_cast<PoolMemory<D>*>(shared);
  memory.init();
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x < kLoadWarps * 32) {
    release_registers<ScoreShape<D>::kPoolLoadRegisters>();
    pool_load<T, D>(call, memory, chunk);
  } else {
    take_registers<ScoreShape<D>::kPoolComputeRegisters>();
    PoolComputer<T, D>(call, memory).run();
  }
}

template <class T, int D>
void launch_prefill_pool(const PrefillCall& call, int32_t chunk, cudaStream_t stream) {
  LaunchShape shape;
  shape.blocks = call.multiprocessors;
  shape.threads = ScoreShape<D>::kThreads;
  shape.shared_bytes = sizeof(PoolMemory<D>);
  launch("prefill_pool", prefill_pool_kernel<T, D>, shape, stream, call, chunk);
}

}  // namespace kascade::cuda
