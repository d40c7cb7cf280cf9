// SPDX-License-Identifier: Apache-2.0
// What a warp of a pass over keys computes (docs/kernels/decode.md): scores of a chunk of keys, their softmax
// and the weighted values of a unit's query rows.
#pragma once

#include "attention/cuda/common/call.h"
#include "attention/cuda/common/sequence.cuh"
#include "attention/cuda/sm90/decode_unit.cuh"
#include "base/cuda/ptx/mma.cuh"
#include "base/cuda/warp.cuh"

namespace kascade::cuda {

// A row's reference score moves only when a score passes it by this much (log2): 2^8 is harmless in any type.
constexpr float kReferenceSlack = 8.0f;

/// Where the scores of chunk `key` of a row are stored: four keys a thread, one 32-byte sector a row. Codes
/// are distances below the chunk's top; a NaN becomes kScoreFarBelow, as does everything when the top is
/// -inf.
__device__ inline uint32_t score_code(float top, float score) {
  return static_cast<uint32_t>(
      __float2int_rn(fminf((top - score) * kScoreSteps, static_cast<float>(kScoreFarBelow))));
}
__device__ inline void store_codes(const DecodeCall& call, int64_t row, int32_t key, int quad, uint2 codes) {
  *reinterpret_cast<uint2*>(call.score_codes + row * call.score_stride + key + 4 * quad) = codes;
}
__device__ inline void store_top(const DecodeCall& call, int64_t row, int32_t key, float top) {
  call.score_tops[(row * call.score_stride + key) / kChunkKeys] = top;
}

/// The computing side of the pass without values: scores of up to kRows query rows and their sums. Query rows
/// are the rows of the products: a thread holds rows lane / 4 and lane / 4 + 8 of each tile of 16, and of
/// every chunk the keys 4 (lane % 4) .. + 3.
template <class T, int D, int kRows>
class ScoreComputer {
  static constexpr int kTiles = kRows / 16;

 public:
  __device__ ScoreComputer(const DecodeCall& call, int lane) : call_(call), lane_(lane) {}

  /// Whether a unit must begin before the next stage.
  __device__ bool idle() const { return chunks_left_ == 0; }

  __device__ void begin(const Unit& unit, uint32_t) {
    const AttentionParams& p = call_.params;
    rows_ = unit.rows;
    first_limit_ = unit.limit;
    keeps_scores_ = unit.keep_scores != 0;
    chunks_left_ = unit.chunks;
    split_chunks_ = split_left_ = unit.split_chunks;
    is_group_ = unit.is_group != 0;
    key_ = unit.key_begin;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top_[t][half] = group_top_[t][half] = -INFINITY;
        sum_[t][half] = group_sum_[t][half] = 0;
        if (t * 16 + half * 8 >= unit.rows) {
          limit_[t][half] = row_[t][half] = 0;
#pragma unroll
          for (int step = 0; step < D / 16; ++step) q_[t][step][half] = q_[t][step][half + 2] = 0;
          continue;
        }
        const int i = row_of(t, half);
        const bool exists = i < unit.rows;
        const int n = unit.first + i;
        const int64_t q_row = unit.q_row + n / call_.group, head = unit.head_begin + n % call_.group;
        limit_[t][half] = exists ? unit.limit + n / call_.group - unit.first / call_.group : 0;
        row_[t][half] = static_cast<int32_t>(q_row * p.query_heads + head);
        const uint32_t* q = reinterpret_cast<const uint32_t*>(
            static_cast<const T*>(p.q) + q_row * p.q_row_stride + head * p.q_head_stride);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          q_[t][step][half] = exists ? q[step * 8 + lane_ % 4] : 0;
          q_[t][step][half + 2] = exists ? q[step * 8 + 4 + lane_ % 4] : 0;
        }
      }
  }

  /// A row for a unit that goes nowhere.
  __device__ void rehearse() {
    rows_ = 1;
    first_limit_ = INT32_MAX;
  }

  /// Adds one stage of keys; exists: bit k is set when its key k exists.
  __device__ void add_stage(uint32_t keys, uint32_t exists) {
    float s[kTiles][2][4];
    score(s, keys);
    mask(s, exists);
    softmax(s);
    key_ += kChunkKeys;
    --chunks_left_;
    if (is_group_ && (--split_left_ == 0 || chunks_left_ == 0)) merge_split();
  }

  /// Writes the unit's partial results.
  __device__ void finish(const Unit& unit) {
    if (!is_group_) add_up();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row_of(t, half) >= rows_ || (lane_ & 3) != 0) continue;
        call_.partial_stats[int64_t{row_[t][half]} * call_.dense_splits + unit.part] =
            is_group_ ? make_float2(group_top_[t][half], group_sum_[t][half])
                      : make_float2(top_[t][half], sum_[t][half]);
      }
  }

 private:
  /// The lanes' sums of a row.
  __device__ void add_up() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum_[t][half] += __shfl_xor_sync(kFullWarp, sum_[t][half], 1);
        sum_[t][half] += __shfl_xor_sync(kFullWarp, sum_[t][half], 2);
      }
  }

  /// The split's results go into the group's.
  __device__ void merge_split() {
    add_up();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Merge merge = merge_tops(group_top_[t][half], top_[t][half]);
        group_top_[t][half] = merge.top;
        group_sum_[t][half] = merge_sums(merge, group_sum_[t][half], sum_[t][half]);
        top_[t][half] = -INFINITY;
        sum_[t][half] = 0;
      }
    split_left_ = split_chunks_;
  }

  __device__ int row_of(int tile, int half) const { return tile * 16 + half * 8 + lane_ / 4; }

  __device__ void score(float (&s)[kTiles][2][4], uint32_t keys) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = 0;
    // Even and odd steps sum apart: a product waits for the one before it in its chain.
    float odd[kTiles][2][4] = {};
    const uint32_t lane_keys =
        keys + piece_offset<D>((lane_ >> 4) * 8 + (lane_ & 7), static_cast<int>(lane_ >> 3 & 1));
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t k[4];
      load_matrices(k, lane_keys ^ static_cast<uint32_t>(step * 32));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_add<T>(step % 2 == 0 ? s[t][0] : odd[t][0], q_[t][step], k[0], k[1]);
        multiply_add<T>(step % 2 == 0 ? s[t][1] : odd[t][1], q_[t][step], k[2], k[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][n][e] = (s[t][n][e] + odd[t][n][e]) * call_.scale_log2;
  }

  /// -inf for keys that do not exist or that a row may not see.
  __device__ void mask(float (&s)[kTiles][2][4], uint32_t exists) const {
    if (exists == 0xFFFFu && key_ + kChunkKeys <= first_limit_) return;
    const int key = 4 * (lane_ & 3);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = key + 2 * n + (e & 1);
          if ((exists >> k & 1u) == 0 || key_ + k >= limit_[t][e >> 1]) s[t][n][e] = -INFINITY;
        }
  }

  /// Stores the scores and adds up 2^(score - reference) of each row.
  __device__ void softmax(const float (&s)[kTiles][2][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // No row of the unit lies here.
        if (t * 16 + half * 8 >= rows_) continue;
        const float* a = &s[t][0][2 * half];
        const float* b = &s[t][1][2 * half];
        float top = fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        if (keeps_scores_ && row_of(t, half) < rows_) {
          const auto code = [top](float x) { return score_code(top, x); };
          store_codes(call_, row_[t][half], key_, lane_ & 3,
                      make_uint2(code(a[0]) | code(a[1]) << 16, code(b[0]) | code(b[1]) << 16));
          if ((lane_ & 3) == 0) store_top(call_, row_[t][half], key_, top);
        }
        float factor = 1;
        if (top > top_[t][half] + kReferenceSlack) {
          factor = exp2_fast(top_[t][half] - top);
          top_[t][half] = top;
        }
        const float reference = top_[t][half] == -INFINITY ? 0 : top_[t][half];
        const float weights = (exp2_fast(a[0] - reference) + exp2_fast(a[1] - reference)) +
                              (exp2_fast(b[0] - reference) + exp2_fast(b[1] - reference));
        sum_[t][half] = sum_[t][half] * factor + weights;
      }
  }

  const DecodeCall& call_;
  const int lane_;
  int32_t key_ = 0;  // index in the list of the next chunk's first key
  int32_t chunks_left_ = 0;
  // Of the unit; first_limit_: keys that its first row sees.
  int32_t rows_ = 0, first_limit_ = 0, split_chunks_ = 0, split_left_ = 0;
  bool keeps_scores_ = false, is_group_ = false;
  int32_t limit_[kTiles][2];  // keys of the list that the row sees
  int32_t row_[kTiles][2];    // row of q times H plus head
  uint32_t q_[kTiles][D / 16][4];
  float top_[kTiles][2], sum_[kTiles][2];              // of the split
  float group_top_[kTiles][2], group_sum_[kTiles][2];  // of splits before it
};

/// The computing side of the passes with values. Keys, then dimensions, are the rows of the products, so that
/// eight query rows need no padding: of each tile of eight rows a thread holds rows 2 (lane % 4) and the
/// next, of every chunk the keys first_key() and first_key() + 2, and of the output the dimensions lane / 4 +
/// 8 i.
template <class T, int D, int kRows, Pass pass>
class ValueComputer {
  static constexpr int kTiles = kRows / 8;
  // A group's earlier splits are kept in registers, which more rows need themselves, or in the group's place
  // in the workspace.
  static constexpr bool kGroupInRegisters = kRows == 8;
  static constexpr bool kSparse = pass == Pass::kSparse;
  // A unit may be several splits without being their group.
  static constexpr bool kManySplits = kSparse && kRows == 8;

  struct Rows {
    float top[kTiles][2], sum[kTiles][2];
    float out[kTiles][D / 16][4];
  };

 public:
  __device__ ValueComputer(const DecodeCall& call, int lane) : call_(call), lane_(lane) {}

  __device__ bool idle() const { return chunks_left_ == 0; }

  /// block_part: shared memory for the unit's results, kRows rows of D values and their stats; 0 where they
  /// go to the workspace.
  __device__ void begin(const Unit& unit, [[maybe_unused]] uint32_t block_part) {
    const AttentionParams& p = call_.params;
    const int heads = kSparse ? call_.reader_heads : call_.group;
    rows_ = unit.rows;
    first_limit_ = unit.limit;
    keeps_scores_ = unit.keep_scores != 0;
    chunks_left_ = unit.chunks;
    split_chunks_ = split_left_ = unit.split_chunks;
    key_ = unit.key_begin;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int i = t * 8 + lane_ / 4;
      const bool exists = i < unit.rows;
      const int n = unit.first + i, r = n / heads;
      const int64_t q_row = unit.q_row + r, head = unit.head_begin + n - r * heads;
      const int32_t limit = exists ? unit.limit + r - (unit.first > 0 ? unit.first / heads : 0) : 0;
      q_row_[t] = static_cast<int32_t>(q_row * p.query_heads + head);
      const uint32_t* q = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.q) +
                                                            q_row * p.q_row_stride + head * p.q_head_stride);
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        q_[t][step][0] = exists ? q[step * 8 + lane_ % 4] : 0;
        q_[t][step][1] = exists ? q[step * 8 + 4 + lane_ % 4] : 0;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) limit_[t][e] = __shfl_sync(kFullWarp, limit, lane_of_row(e));
    }
    clear(split_);
    is_group_ = unit.is_group != 0;
    group_left_ = 0;
    part_ = unit.part;
    if (is_group_) begin_group();
    if constexpr (kManySplits) {
      if (block_part != 0) part_ = ~static_cast<int32_t>(block_part);
    }
  }

  /// A row for a unit that goes nowhere.
  __device__ void rehearse() {
    rows_ = 1;
    first_limit_ = INT32_MAX;
  }

  /// Adds one stage of keys and values; exists: bit k is set when its key k exists.
  __device__ void add_stage(uint32_t keys, uint32_t exists) {
    float s[kTiles][4];
    score(s, keys);
    mask(s, exists);
    if constexpr (!kSparse) {
      if (keeps_scores_) store_scores(s);
    }
    softmax(s);
    add_values(s, keys + kChunkKeys * D * 2);
    key_ += kChunkKeys;
    --chunks_left_;
    if constexpr (kManySplits) {
      if (--split_left_ == 0 || chunks_left_ == 0) finish_split();
    } else if (is_group_ && (--split_left_ == 0 || chunks_left_ == 0)) {
      merge_split();
      clear(split_);
      split_left_ = split_chunks_;
    }
  }

  /// Writes the unit's partial results, where its splits have not.
  __device__ void finish(const Unit&) {
    if constexpr (kManySplits) return;
    if (is_group_) {
      if constexpr (kGroupInRegisters) write(group_);
      return;
    }
    add_up(split_);
    write(split_);
  }

 private:
  /// A lane whose q_row_ is that of this one's row e.
  __device__ int lane_of_row(int e) const { return (2 * (lane_ & 3) + e) * 4; }
  /// Of the chunk; tile_row() puts it into row lane / 4 of the tile.
  __device__ int first_key() const { return (lane_ >> 3) * 4 + (lane_ >> 2 & 1); }

  __device__ static void clear(Rows& rows) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        rows.top[t][e] = -INFINITY;
        rows.sum[t][e] = 0;
      }
#pragma unroll
      for (int d = 0; d < D / 16; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows.out[t][d][e] = 0;
    }
  }

  /// The lanes' sums of a row.
  __device__ static void add_up(Rows& rows) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          rows.sum[t][e] += __shfl_xor_sync(kFullWarp, rows.sum[t][e], step);
  }

  __device__ void begin_group() {
    if constexpr (kGroupInRegisters) {
      clear(group_);
      group_left_ = kSplitGroup;
    } else {
      first_of_group_ = true;
    }
  }

  /// The split's results become a partial result, or go into their group's.
  __device__ void finish_split() {
    bool is_part = true;
    if (group_left_ == 0) {
      add_up(split_);
    } else {
      merge_split();
      is_part = --group_left_ == 0 || chunks_left_ == 0;
      if (is_part) {
        split_ = group_;
        begin_group();
      }
    }
    if (is_part) write(split_);
    clear(split_);
    split_left_ = split_chunks_;
  }

  /// The split's results go into the group's.
  __device__ void merge_split() {
    add_up(split_);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (kGroupInRegisters) {
          const Merge merge = merge_tops(group_.top[t][e], split_.top[t][e]);
          group_.top[t][e] = merge.top;
          group_.sum[t][e] = merge_sums(merge, group_.sum[t][e], split_.sum[t][e]);
#pragma unroll
          for (int d = 0; d < D / 16; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              group_.out[t][d][2 * half + e] =
                  merge_sums(merge, group_.out[t][d][2 * half + e], split_.out[t][d][2 * half + e]);
        } else {
          merge_into_workspace(t, e);
        }
      }
    if constexpr (!kGroupInRegisters) first_of_group_ = false;
  }

  /// Where row e of tile t of the unit has its partial result.
  __device__ int64_t place(int t, int e) const {
    const int32_t row = __shfl_sync(kFullWarp, q_row_[t], lane_of_row(e));
    return int64_t{row} * (kSparse ? call_.sparse_splits : call_.dense_splits) + part_;
  }
  /// The lane's dimensions of it, every eighth float4: 128 bytes of a row at a time, in the order of
  /// stored_dimension().
  __device__ float4* out_at(int64_t place) const {
    return reinterpret_cast<float4*>(call_.partial_out + place * D) + lane_ / 4;
  }
  __device__ static float4 out_of(const Rows& rows, int t, int e, int i) {
    return make_float4(rows.out[t][2 * i][e], rows.out[t][2 * i][2 + e], rows.out[t][2 * i + 1][e],
                       rows.out[t][2 * i + 1][2 + e]);
  }
  __device__ bool has_row(int t, int e) const { return t * 8 + 2 * (lane_ & 3) + e < rows_; }

  __device__ void merge_into_workspace(int t, int e) const {
    const int64_t at = place(t, e);
    float2 stats = make_float2(-INFINITY, 0);
    if (has_row(t, e) && !first_of_group_) stats = call_.partial_stats[at];
    __syncwarp();  // all lanes of the row have read it
    if (!has_row(t, e)) return;
    const Merge merge = merge_tops(stats.x, split_.top[t][e]);
    stats = make_float2(merge.top, merge_sums(merge, stats.y, split_.sum[t][e]));
    if (lane_ < 4) call_.partial_stats[at] = stats;
    float4* out = out_at(at);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      float4 all = first_of_group_ ? make_float4(0, 0, 0, 0) : out[8 * i];
      const float4 own = out_of(split_, t, e, i);
      all.x = merge_sums(merge, all.x, own.x);
      all.y = merge_sums(merge, all.y, own.y);
      all.z = merge_sums(merge, all.z, own.z);
      all.w = merge_sums(merge, all.w, own.w);
      out[8 * i] = all;
    }
  }

  /// A partial result of the unit, after those that it has left before.
  __device__ void write(const Rows& rows) {
    const bool in_block = kManySplits && part_ < 0;
    if (in_block) __syncwarp();  // other lanes may still read the stage that this overwrites
    auto* block_part =
        static_cast<float*>(__cvta_shared_to_generic(static_cast<uint32_t>(in_block ? ~part_ : 0)));
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t at = place(t, e);
        if (!has_row(t, e)) continue;
        const int row = t * 8 + 2 * (lane_ & 3) + e;
        float2* stats =
            in_block ? reinterpret_cast<float2*>(block_part + kRows * D) + row : call_.partial_stats + at;
        if (lane_ < 4) *stats = make_float2(rows.top[t][e], rows.sum[t][e]);
        float4* out = in_block ? reinterpret_cast<float4*>(block_part + row * D) + lane_ / 4 : out_at(at);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) out[8 * i] = out_of(rows, t, e, i);
      }
    ++part_;
  }

  __device__ void score(float (&s)[kTiles][4], uint32_t keys) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = 0;
    // Even and odd steps sum apart: a product waits for the one before it in its chain.
    float odd[kTiles][4] = {};
    const uint32_t lane_keys = keys + piece_offset<D>(lane_ & 15, lane_ >> 4);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t k[4];
      load_matrices(k, lane_keys ^ static_cast<uint32_t>(step * 32));
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        multiply_add<T>(step % 2 == 0 ? s[t] : odd[t], k, q_[t][step][0], q_[t][step][1]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[t][e] = (s[t][e] + odd[t][e]) * call_.scale_log2;
  }

  /// -inf for keys that do not exist or that a row may not see.
  __device__ void mask(float (&s)[kTiles][4], uint32_t exists) const {
    if (exists == 0xFFFFu && key_ + kChunkKeys <= first_limit_) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = first_key() + 2 * half;
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((exists >> k & 1u) == 0 || key_ + k >= limit_[t][e]) s[t][2 * half + e] = -INFINITY;
    }
  }

  /// Whether the chunk at hand is the first of its split, or it is not worth knowing.
  __device__ bool is_fresh() const { return kManySplits && split_left_ == split_chunks_; }

  /// The largest over the lanes that share a row.
  __device__ static float largest(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, step));
    return x;
  }

  /// Scores become 2^(score - reference) of their row.
  __device__ void softmax(float (&s)[kTiles][4]) {
    bool passed = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) passed |= fmaxf(s[t][e], s[t][2 + e]) > split_.top[t][e] + kReferenceSlack;
    if (__any_sync(kFullWarp, passed)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float top = largest(fmaxf(s[t][e], s[t][2 + e]));
          if (!(top > split_.top[t][e] + kReferenceSlack)) continue;
          const float factor = exp2_fast(split_.top[t][e] - top);
          split_.top[t][e] = top;
          if (is_fresh()) continue;  // there is nothing but zeros
          split_.sum[t][e] *= factor;
#pragma unroll
          for (int d = 0; d < D / 16; ++d) {
            split_.out[t][d][e] *= factor;
            split_.out[t][d][2 + e] *= factor;
          }
        }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float reference = split_.top[t][e] == -INFINITY ? 0 : split_.top[t][e];
        s[t][e] = exp2_fast(s[t][e] - reference);
        s[t][2 + e] = exp2_fast(s[t][2 + e] - reference);
        split_.sum[t][e] += s[t][e] + s[t][2 + e];
      }
  }

  __device__ void store_scores(const float (&s)[kTiles][4]) const {
    const int quad = lane_ & 3;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint32_t codes[2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float top = largest(fmaxf(s[t][e], s[t][2 + e]));
        codes[0] |= score_code(top, s[t][e]) << (16 * e);
        codes[1] |= score_code(top, s[t][2 + e]) << (16 * e);
        const int32_t row = __shfl_sync(kFullWarp, q_row_[t], lane_of_row(e));
        if (lane_ < 4 && t * 8 + 2 * quad + e < rows_) store_top(call_, row, key_, top);
      }
      const uint2 of_row = make_uint2(transpose_matrix(codes[0]), transpose_matrix(codes[1]));
      if (t * 8 + lane_ / 4 < rows_) store_codes(call_, q_row_[t], key_, quad, of_row);
    }
  }

  __device__ void add_values(const float (&p)[kTiles][4], uint32_t values) {
    uint32_t weights[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weights[t][half] = transpose_matrix(pack_pair<T>(p[t][2 * half], p[t][2 * half + 1]));
    const uint32_t lane_values = values + piece_offset<D>((lane_ >> 4) * 8 + (lane_ & 7), lane_ >> 3 & 1);
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      uint32_t v[4];
      load_matrices_transposed(v, lane_values ^ static_cast<uint32_t>(d * 32));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) multiply_add<T>(split_.out[t][d], v, weights[t][0], weights[t][1]);
    }
  }

  const DecodeCall& call_;
  const int lane_;
  int32_t key_ = 0;  // index in the list of the next chunk's first key
  int32_t chunks_left_ = 0;
  // Of the unit; first_limit_: keys that its first row sees.
  int32_t rows_ = 0, first_limit_ = 0, split_chunks_ = 0, split_left_ = 0;
  int32_t part_ = 0;  // the next partial result; negative: its complement is an address in shared memory
  int32_t group_left_ = 0;  // splits of the group; 0: they are not merged
  bool keeps_scores_ = false, is_group_ = false, first_of_group_ = false;
  int32_t limit_[kTiles][2];  // keys of the list that the row sees
  int32_t q_row_[kTiles];     // row of q times H plus head, of row lane / 4
  uint32_t q_[kTiles][D / 16][2];
  Rows split_, group_;  // group_: of splits before this one
};

}  // namespace kascade::cuda
