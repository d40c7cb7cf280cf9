// SPDX-License-Identifier: Apache-2.0
// out [rows, outputs] = x [rows, inputs] W^T for up to 64 rows. The tensor cores take 16 outputs by 16 inputs
// of W as their first operand and 8 rows of x as the second, so W streams through once. Two warps of a block
// copy chunks of its rows of W and of x into a ring in shared memory; eight warps multiply: warp w has the
// quarter w % 4 of a chunk's inputs and every second tile of 16 outputs. The quarters' sums meet in shared
// memory at the end of a pass, in the order of the quarters, and with a split of the inputs over a cluster,
// of its blocks. The copies of W begin before the kernel ahead of this one has ended.
#include <algorithm>
#include <string>

#include "base/cuda/launch.h"
#include "base/cuda/parts.h"
#include "base/cuda/ptx/barrier.cuh"
#include "base/cuda/ptx/cluster.cuh"
#include "base/cuda/ptx/mma.cuh"
#include "ops/cuda/small_product.h"

namespace kascade::cuda {
namespace {

constexpr int kTile = 16;     // outputs
constexpr int kColumn = 8;    // rows of x
constexpr int kQuarters = 4;  // warps along the inputs
constexpr int kHalves = 2;    // warps along the outputs
constexpr int kConsumers = kQuarters * kHalves * 32;
constexpr int kProducers = 64;
constexpr int kThreads = kConsumers + kProducers;
constexpr int kMostStages = 12;
constexpr int kChunk = 512;  // inputs a stage: long enough runs for memory
constexpr int kMostTiles = 8;
constexpr int kConsumerBarrier = 1;

// Most of a multiprocessor's: a deep ring pays more than a second block that starts while this one ends.
constexpr int kSharedBytes = 225 * 1024;

/// Bytes between rows in shared memory: 8 rows by 4 lanes of 16 bytes meet no bank twice.
constexpr int kPitch = kChunk * 2 + 64;

/// Floats between the columns of the partial sums: lanes that write 8 outputs of 4 columns meet no bank
/// twice.
constexpr int partial_pitch(int tiles) { return tiles * kTile + 4; }

struct Control {
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t ready, released;  // of the partial sums of all blocks of the cluster
};

constexpr int kControlBytes = 256;
static_assert(sizeof(Control) <= kControlBytes);

int partial_bytes(int tiles) { return kQuarters * kColumn * partial_pitch(tiles) * 4; }
/// Groups of 8 rows of x that the kernel is instantiated for.
int columns_of(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }
int stage_bytes(const SmallProductShape& shape, int64_t rows) {
  return (shape.tiles * kTile + static_cast<int>(rows)) * kPitch;
}

struct Call {
  const __nv_bfloat16* weight;
  const __nv_bfloat16* x;
  void* out;
  int64_t inputs;
  int outputs, rows, clusters, pass_tiles, stages, stage_bytes, lead;
  bool float_out, accumulate;
};

__device__ uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ void copy_once_16(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(global), "l"(policy)
               : "memory");
}

__device__ void add_to(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

/// Arrives at this barrier of block `rank`; what the block's threads wrote before may be read after the wait.
__device__ void arrive_at(uint64_t& barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}\n" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}
__device__ void wait_for_cluster(uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], "
      "%1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

/// A block's share: tiles [first_tile, end_tile), inputs of chunks [first_chunk, end_chunk).
struct Share {
  int first_tile, end_tile, first_chunk, end_chunk;
};

__device__ Share share_of(const Call& call, int rank, int split) {
  const int tiles = (call.outputs + kTile - 1) / kTile;
  const int chunks = static_cast<int>((call.inputs + kChunk - 1) / kChunk);
  const int cluster = static_cast<int>(blockIdx.x) / split;
  return {static_cast<int>(int64_t{tiles} * cluster / call.clusters),
          static_cast<int>(int64_t{tiles} * (cluster + 1) / call.clusters), chunks * rank / split,
          chunks * (rank + 1) / split};
}

/// Position in the sequence of a block's chunks, pass after pass, and in the ring.
struct Cursor {
  int tile, chunk, stage = 0;
  uint32_t parity = 0;

  __device__ Cursor(const Share& share) : tile(share.first_tile), chunk(share.first_chunk) {}
  __device__ bool inside(const Share& share) const { return tile < share.end_tile; }
  __device__ void advance_stage(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void advance(const Share& share, int pass_tiles, int stages) {
    advance_stage(stages);
    if (++chunk == share.end_chunk) {
      chunk = share.first_chunk;
      tile += pass_tiles;
    }
  }
};

struct Producer {
  static constexpr int kAcross = kChunk / 8;  // threads along a row, 16 bytes each
  static constexpr int kRows = kProducers / kAcross;

  const Call& call;
  const Share& share;
  Control& control;
  uint32_t ring;
  uint64_t policy;
  int row, column;  // of the thread's first 16 bytes

  /// Whether the thread's column lies inside the matrix.
  __device__ bool inside(const Cursor& at) const {
    return int64_t{at.chunk} * kChunk + column * 8 < call.inputs;
  }
  __device__ void copy_weights(const Cursor& at) const {
    if (!inside(at)) return;
    const int tiles = min(call.pass_tiles, share.end_tile - at.tile);
    const int rows = min(tiles * kTile, call.outputs - at.tile * kTile);
    const __nv_bfloat16* from = call.weight + (int64_t{at.tile} * kTile + row) * call.inputs +
                                int64_t{at.chunk} * kChunk + column * 8;
    uint32_t to = ring + static_cast<uint32_t>(at.stage * call.stage_bytes + row * kPitch + column * 16);
#pragma unroll 8
    for (int r = row; r < rows; r += kRows) {
      copy_once_16(to, from, policy);
      from += kRows * call.inputs;
      to += kRows * kPitch;
    }
  }
  /// And announces the stage.
  __device__ void copy_x(const Cursor& at) const {
    if (inside(at)) {
      const __nv_bfloat16* from = call.x + row * call.inputs + int64_t{at.chunk} * kChunk + column * 8;
      uint32_t to = ring + static_cast<uint32_t>(at.stage * call.stage_bytes +
                                                 (call.pass_tiles * kTile + row) * kPitch + column * 16);
      for (int r = row; r < call.rows; r += kRows) {
        copy_async_16(to, from, 16);
        from += kRows * call.inputs;
        to += kRows * kPitch;
      }
    }
    arrive_after_copies(control.full[at.stage]);
  }
};

template <int kColumns, int kTilesEach>
__device__ void clear(float (&sums)[kTilesEach][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kTilesEach; ++i)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][c][e] = 0;
}

/// One warp's part of a chunk in shared memory. The order of inputs within 32 is the tensor cores' own
/// business as long as both operands share it, so a lane reads 8 neighbours at once and needs no shuffling.
template <int kColumns, int kTilesEach>
__device__ void multiply_chunk(float (&sums)[kTilesEach][kColumns][4], uint32_t weights, uint32_t x, int rows,
                               int tiles, int inputs, int quarter, int half, int lane) {
  constexpr int kEach = kChunk / kQuarters;
  const auto corner = static_cast<uint32_t>(lane / 4 * kPitch + lane % 4 * 16);
  uint32_t x_corner[kColumns];  // past the last row that row again: what comes of it is not used
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    x_corner[c] = static_cast<uint32_t>(min(c * kColumn + lane / 4, rows - 1) * kPitch + lane % 4 * 16);
#pragma unroll
  for (int group = 0; group < kEach / 32; ++group) {
    const int input = quarter * kEach + group * 32;
    if (input >= inputs) break;
    const uint32_t at = corner + static_cast<uint32_t>(input * 2);
    uint4 b[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      b[c] = load_shared_16(x + x_corner[c] + static_cast<uint32_t>(input * 2));
#pragma unroll
    for (int i = 0; i < kTilesEach; ++i) {
      const int tile = i * kHalves + half;
      if (tile >= tiles) break;
      const uint32_t row = weights + at + static_cast<uint32_t>(tile * kTile * kPitch);
      const uint4 low = load_shared_16(row), high = load_shared_16(row + 8 * kPitch);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        multiply_add<__nv_bfloat16>(sums[i][c], first, b[c].x, b[c].y);
        multiply_add<__nv_bfloat16>(sums[i][c], second, b[c].z, b[c].w);
      }
    }
  }
}

__device__ void write_out(const Call& call, int row, int output, float value) {
  const int64_t at = int64_t{row} * call.outputs + output;
  if (!call.float_out)
    static_cast<__nv_bfloat16*>(call.out)[at] = __float2bfloat16_rn(value);
  else if (call.accumulate)
    add_to(static_cast<float*>(call.out) + at, value);  // one addition to each, so their order is no matter
  else
    static_cast<float*>(call.out)[at] = value;
}

template <int kColumns, int kTilesEach>
__global__ void __launch_bounds__(kThreads, 1) small_product_kernel(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& control = *reinterpret_cast<Control*>(shared);
  auto* partial = reinterpret_cast<float*>(shared + kControlBytes);
  constexpr int kPartialPitch = partial_pitch(kTilesEach * kHalves);
  constexpr int kPartial = kQuarters * kColumn * kPartialPitch;
  const uint32_t ring = shared_address(shared + kControlBytes + kPartial * 4);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int split = cluster_size(), rank = cluster_rank();
  const Share share = share_of(call, rank, split);

  if (threadIdx.x == kConsumers) {
    for (int stage = 0; stage < call.stages; ++stage) {
      init_barrier(control.full[stage], kProducers);
      init_barrier(control.empty[stage], kConsumers);
    }
    init_barrier(control.ready, static_cast<uint32_t>(split));
    init_barrier(control.released, static_cast<uint32_t>(split));
    fence_barriers();
  }
  __syncthreads();
  if (split > 1) cluster_arrive();

  if (warp >= kConsumers / 32) {
    const int thread = static_cast<int>(threadIdx.x) - kConsumers, across = Producer::kAcross;
    const Producer producer{call, share, control, ring, read_once_policy(), thread / across, thread % across};
    const int passes = (share.end_tile - share.first_tile + call.pass_tiles - 1) / call.pass_tiles;
    int left = passes * (share.end_chunk - share.first_chunk);
    if (left <= call.lead) allow_next_kernel();
    Cursor ahead(share), at(share);
    for (int i = 0; i < call.stages && ahead.inside(share); ++i) {
      producer.copy_weights(ahead);
      ahead.advance(share, call.pass_tiles, call.stages);
    }
    wait_for_previous_kernel();
    for (int i = 0; at.inside(share); ++i) {
      // The next kernel's copies should fill the time in which this one sums up, not compete with it before.
      if (left-- == call.lead) allow_next_kernel();
      if (i >= call.stages) {  // the stage has been filled before: it must have been read
        wait_barrier(control.empty[at.stage], at.parity ^ 1);
        producer.copy_weights(at);
      }
      producer.copy_x(at);
      at.advance(share, call.pass_tiles, call.stages);
    }
    allow_next_kernel();
    if (split > 1) cluster_wait();
    return;
  }

  wait_for_previous_kernel();
  if (split > 1) cluster_wait();
  const int quarter = warp % kQuarters, half = warp / kQuarters;
  Cursor at(share);
  uint32_t round = 0;
  for (int tile = share.first_tile; tile < share.end_tile; tile += call.pass_tiles) {
    const int tiles = min(call.pass_tiles, share.end_tile - tile);
    float sums[kTilesEach][kColumns][4];
    clear<kColumns, kTilesEach>(sums);
    for (int chunk = share.first_chunk; chunk < share.end_chunk; ++chunk) {
      const uint32_t weights = ring + static_cast<uint32_t>(at.stage * call.stage_bytes);
      const uint32_t x = weights + static_cast<uint32_t>(call.pass_tiles * kTile * kPitch);
      const auto inputs = static_cast<int>(min(int64_t{kChunk}, call.inputs - int64_t{chunk} * kChunk));
      wait_barrier(control.full[at.stage], at.parity);
      multiply_chunk<kColumns, kTilesEach>(sums, weights, x, call.rows, tiles, inputs, quarter, half, lane);
      // Each lane for the reads of its own: its arrival comes after them, and copies after the producers'
      // wait.
      arrive(control.empty[at.stage]);
      at.advance_stage(call.stages);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c * kColumn >= call.rows) break;
      if (round > 0) {
        if (split > 1)
          wait_for_cluster(control.released, (round - 1) & 1);
        else
          named_sync(kConsumerBarrier, kConsumers);
      }
#pragma unroll
      for (int i = 0; i < kTilesEach; ++i) {
        float* to = partial + (quarter * kColumn + lane % 4 * 2) * kPartialPitch +
                    (i * kHalves + half) * kTile + lane / 4;
        to[0] = sums[i][c][0];
        to[kPartialPitch] = sums[i][c][1];
        to[8] = sums[i][c][2];
        to[kPartialPitch + 8] = sums[i][c][3];
      }
      named_sync(kConsumerBarrier, kConsumers);
      if (split > 1) {
        if (static_cast<int>(threadIdx.x) < split) arrive_at(control.ready, static_cast<int>(threadIdx.x));
        wait_for_cluster(control.ready, round & 1);
      }
      const int outputs = tiles * kTile, rows = min(kColumn, call.rows - c * kColumn);
      for (int i = static_cast<int>(threadIdx.x) + rank * kConsumers; i < outputs * rows;
           i += split * kConsumers) {
        const int output = i % outputs, row = i / outputs;
        if (tile * kTile + output >= call.outputs) continue;
        float sum = 0;
        for (int other = 0; other < split; ++other) {
          const float* from = split > 1 ? in_block(partial, other) : partial;
#pragma unroll
          for (int q = 0; q < kQuarters; ++q) sum += from[(q * kColumn + row) * kPartialPitch + output];
        }
        write_out(call, c * kColumn + row, tile * kTile + output, sum);
      }
      if (split > 1) {
        named_sync(kConsumerBarrier, kConsumers);
        if (static_cast<int>(threadIdx.x) < split) arrive_at(control.released, static_cast<int>(threadIdx.x));
      }
      ++round;
    }
  }
  // The other blocks may still read this one's sums.
  if (split > 1 && round > 0) wait_for_cluster(control.released, (round - 1) & 1);
}

template <int kColumns, int kTilesEach>
void start(const SmallProductShape& shape, const Call& call, cudaStream_t stream) {
  const int bytes = kControlBytes + partial_bytes(kTilesEach * kHalves) + shape.stages * call.stage_bytes;
  launch("small_product", small_product_kernel<kColumns, kTilesEach>,
         LaunchShape{.blocks = int64_t{shape.clusters} * shape.split,
                     .threads = kThreads,
                     .shared_bytes = static_cast<size_t>(bytes),
                     .cluster = shape.split},
         stream, call);
}

void start(const SmallProductShape& shape, const Call& call, cudaStream_t stream) {
  const bool few = shape.tiles <= 4;
  const int columns = columns_of(call.rows);
  if (columns == 1) return few ? start<1, 2>(shape, call, stream) : start<1, 4>(shape, call, stream);
  if (columns == 2) return few ? start<2, 2>(shape, call, stream) : start<2, 4>(shape, call, stream);
  if (columns == 4) return few ? start<4, 2>(shape, call, stream) : start<4, 4>(shape, call, stream);
  return start<8, 2>(shape, call, stream);
}

}  // namespace

bool small_product_suits(const DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows) {
  return rows > 0 && rows <= kSmallRows && matrix.inputs > 0 && matrix.inputs % 32 == 0 &&
         matrix.outputs <= INT32_MAX / 2 && aligned_16({matrix.weight, x});
}

SmallProductShape small_product_shape(const DeviceMatrix& matrix, int64_t rows, int multiprocessors) {
  SmallProductShape best;
  const int64_t tiles = parts_of(matrix.outputs, kTile), chunks = parts_of(matrix.inputs, kChunk);
  double least = 0;
  for (const int split : {1, 2, 4}) {
    if (split > 1 && chunks < 2 * split) continue;
    // Clusters of four leave a few multiprocessors without one.
    const int most = split == 4 ? multiprocessors / 4 - 1 : multiprocessors / split;
    SmallProductShape shape;
    shape.split = split;
    shape.clusters = static_cast<int>(std::min<int64_t>(tiles, std::max(most, 1)));
    const int64_t each = parts_of(tiles, shape.clusters);
    shape.tiles =
        static_cast<int>(each <= 3 ? each : parts_of(each, parts_of(each, rows > 16 && rows <= 32 ? 4 : 2)));
    // In tiles by chunks; meeting in the cluster costs about a microsecond.
    const double cost = static_cast<double>(parts_of(chunks, split) * each) + (split > 1 ? 2.0 : 0.0);
    if (split > 1 && cost >= least) continue;
    least = cost;
    best = shape;
  }
  const int room = kSharedBytes - kControlBytes - partial_bytes(best.tiles <= 4 ? 4 : kMostTiles);
  best.stages = std::clamp(room / stage_bytes(best, rows), 1, kMostStages);
  best.lead = best.stages;
  return best;
}

void small_product(const DeviceMatrix& matrix, const SmallProductShape& shape, const __nv_bfloat16* x,
                   int64_t rows, void* out, bool float_out, bool accumulate, cudaStream_t stream) {
  const Call call{matrix.weight,
                  x,
                  out,
                  matrix.inputs,
                  static_cast<int>(matrix.outputs),
                  static_cast<int>(rows),
                  shape.clusters,
                  shape.tiles,
                  shape.stages,
                  stage_bytes(shape, rows),
                  shape.lead,
                  float_out,
                  accumulate};
  start(shape, call, stream);
}

}  // namespace kascade::cuda
