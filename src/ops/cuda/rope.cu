// SPDX-License-Identifier: Apache-2.0
// Rotary embedding's table, and what happens to q, k and v between the product and attention.
#include <string>

#include "base/cuda/launch.h"
#include "base/cuda/parts.h"
#include "base/cuda/warp.cuh"
#include "ops/cuda/ops.h"

namespace kascade::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rope_table_kernel(const double* inverse_frequencies, int half,
                                                              int64_t begin, int64_t count, float2* table) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t position = begin + at / half;
  double sine, cosine;
  sincos(static_cast<double>(position) * inverse_frequencies[at % half], &sine, &cosine);
  table[begin * half + at] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

template <class T, int kCount>
struct alignas(kCount == 1 ? alignof(T) : 16) Run {
  T values[kCount];
};

/// kPairs neighbouring pairs as two lists: their first elements, their second elements.
template <int kPairs, bool kAdjacent>
struct Pairs {
  float first[kPairs], second[kPairs];

  /// Where pair `pair`'s first or second element is in a head.
  __device__ static int first_at(int pair, int) { return kAdjacent ? 2 * pair : pair; }
  __device__ static int second_at(int pair, int half) { return kAdjacent ? 2 * pair + 1 : pair + half; }

  /// From T (bf16 or float).
  template <class T>
  __device__ void load(const T* head, int pair, int half) {
    if constexpr (kAdjacent && kPairs > 1) {
      const auto both = *reinterpret_cast<const Run<T, 2 * kPairs>*>(head + 2 * pair);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        first[i] = static_cast<float>(both.values[2 * i]);
        second[i] = static_cast<float>(both.values[2 * i + 1]);
      }
    } else {
      const auto a = *reinterpret_cast<const Run<T, kPairs>*>(head + first_at(pair, half));
      const auto b = *reinterpret_cast<const Run<T, kPairs>*>(head + second_at(pair, half));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        first[i] = static_cast<float>(a.values[i]);
        second[i] = static_cast<float>(b.values[i]);
      }
    }
  }

  __device__ void store(__nv_bfloat16* head, int pair, int half) const {
    if constexpr (kAdjacent && kPairs > 1) {
      Run<__nv_bfloat16, 2 * kPairs> both;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        both.values[2 * i] = __float2bfloat16_rn(first[i]);
        both.values[2 * i + 1] = __float2bfloat16_rn(second[i]);
      }
      *reinterpret_cast<Run<__nv_bfloat16, 2 * kPairs>*>(head + 2 * pair) = both;
    } else {
      Run<__nv_bfloat16, kPairs> a, b;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        a.values[i] = __float2bfloat16_rn(first[i]);
        b.values[i] = __float2bfloat16_rn(second[i]);
      }
      *reinterpret_cast<Run<__nv_bfloat16, kPairs>*>(head + first_at(pair, half)) = a;
      *reinterpret_cast<Run<__nv_bfloat16, kPairs>*>(head + second_at(pair, half)) = b;
    }
  }
};

/// 64-bit division takes a hundred instructions; slots are rarely that large.
__device__ int64_t quotient(int64_t x, int32_t by) {
  return x >> 31 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(x) / static_cast<uint32_t>(by)) : x / by;
}

/// A group of 2^log_lanes lanes has one head of one row; each lane has kPairs neighbouring pairs, kTimes
/// times.
template <int kPairs, int kTimes, bool kAdjacent>
__global__ void __launch_bounds__(kThreads)
    rope_append_kernel(const __grid_constant__ RopeAppend call, int64_t rows, int log_lanes) {
  using Part = Pairs<kPairs, kAdjacent>;
  const int heads = call.query_heads + 2 * call.kv_heads;
  const int half = call.head_dim / 2, lanes = 1 << log_lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> log_lanes;
  const bool inside = group < rows * heads;  // idle lanes stay for the sums over groups
  const int64_t row = inside ? quotient(group, heads) : 0;
  const int head = inside ? static_cast<int>(group - row * heads) : 0;
  const bool is_query = head < call.query_heads;
  const bool is_key = !is_query && head < call.query_heads + call.kv_heads;
  const bool turned = is_query || is_key;
  const float* norm = is_query ? call.q_norm : is_key ? call.k_norm : nullptr;
  __nv_bfloat16* at = call.qkv + row * call.row_stride + int64_t{head} * call.head_dim;

  Part pairs[kTimes], bias[kTimes], weights[kTimes];
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const int pair = (lane + (t << log_lanes)) * kPairs;
    if (pair >= half) continue;
    if (call.bias != nullptr) bias[t].load(call.bias + head * call.head_dim, pair, half);
    if (norm != nullptr) weights[t].load(norm, pair, half);
  }
  allow_next_kernel();
  wait_for_previous_kernel();

  const int64_t slot = is_query ? 0 : call.slots[row];
  const float2* turns = call.rope_table + int64_t{call.positions[row]} * half;
  float2 turn[kTimes][kPairs];
  float squares = 0;
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const int pair = (lane + (t << log_lanes)) * kPairs;
    if (!inside || pair >= half) continue;
    pairs[t].load(at, pair, half);
    if (turned) {
      constexpr int kTogether = kPairs > 1 ? 2 : 1;
#pragma unroll
      for (int i = 0; i < kPairs; i += kTogether)
        *reinterpret_cast<Run<float2, kTogether>*>(&turn[t][i]) =
            *reinterpret_cast<const Run<float2, kTogether>*>(turns + pair + i);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (call.bias != nullptr) {
        pairs[t].first[i] += bias[t].first[i];
        pairs[t].second[i] += bias[t].second[i];
      }
      squares += pairs[t].first[i] * pairs[t].first[i] + pairs[t].second[i] * pairs[t].second[i];
    }
  }
  if (call.q_norm != nullptr || call.k_norm != nullptr)
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      squares += __shfl_xor_sync(kFullWarp, squares, offset);
  if (!inside || slot < 0) return;

  __nv_bfloat16* to = at;
  if (!is_query) {
    const int64_t page = quotient(slot, call.page_size), offset = slot - page * call.page_size;
    const int kv_head = head - call.query_heads - (is_key ? 0 : call.kv_heads);
    to = (is_key ? call.k_pages : call.v_pages) +
         ((page * call.kv_heads + kv_head) * call.page_size + offset) * call.head_dim;
  }
  const float scale = rsqrtf(squares / static_cast<float>(call.head_dim) + call.norm_epsilon);
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const int pair = (lane + (t << log_lanes)) * kPairs;
    if (pair >= half) continue;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float& a = pairs[t].first[i];
      float& b = pairs[t].second[i];
      if (norm != nullptr) {
        a = a * scale * weights[t].first[i];
        b = b * scale * weights[t].second[i];
      }
      if (turned) {
        const float x = a, y = b;
        a = x * turn[t][i].x - y * turn[t][i].y;
        b = x * turn[t][i].y + y * turn[t][i].x;
      }
    }
    pairs[t].store(to, pair, half);
  }
}

}  // namespace

void rope_table(const double* inverse_frequencies, int half, int64_t begin, int64_t end, float2* table,
                cudaStream_t stream) {
  const int64_t count = (end - begin) * half;
  launch("rope_table", rope_table_kernel,
         LaunchShape{.blocks = parts_of(count, kThreads), .threads = kThreads, .chained = false}, stream,
         inverse_frequencies, half, begin, count, table);
}

void rope_append(const RopeAppend& call, int64_t rows, cudaStream_t stream) {
  if (call.head_dim <= 0 || call.head_dim > 256 || call.head_dim % 2 != 0)
    throw BadArgument("rope_append: head_dim is " + std::to_string(call.head_dim) +
                      "; expected an even number up to 256");
  if (call.page_size <= 0)
    throw BadArgument("rope_append: page_size is " + std::to_string(call.page_size) +
                      "; expected at least 1");
  const int half = call.head_dim / 2;
  const bool wide = half % 8 == 0 && call.row_stride % 8 == 0 &&
                    aligned_16({call.qkv, call.k_pages, call.v_pages, call.rope_table, call.bias, call.q_norm,
                                call.k_norm});
  int log_lanes = 5;
  while (wide && log_lanes > 0 && 8 << (log_lanes - 1) >= half) --log_lanes;
  const int64_t threads = (rows * (call.query_heads + 2 * call.kv_heads)) << log_lanes;
  const auto kernel =
      wide ? (call.adjacent ? rope_append_kernel<8, 1, true> : rope_append_kernel<8, 1, false>)
           : (call.adjacent ? rope_append_kernel<1, 4, true> : rope_append_kernel<1, 4, false>);
  launch("rope_append", kernel, LaunchShape{.blocks = parts_of(threads, kThreads), .threads = kThreads},
         stream, call, rows, log_lanes);
}

}  // namespace kascade::cuda
