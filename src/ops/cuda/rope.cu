// SPDX-License-Identifier: Apache-2.0
// Rotary embedding's table, and what happens to q, k and v between the product and attention.
#include <string>

#include "attention/cuda/common/launch.h"
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

template <int kCount>
struct alignas(2 * kCount) Bf16s {
  __nv_bfloat16 values[kCount];
};

/// kPairs neighbouring pairs as two lists: their first elements, their second elements.
template <int kPairs>
struct Pairs {
  float first[kPairs], second[kPairs];

  __device__ void load(const __nv_bfloat16* head, int pair, int half, bool adjacent) {
    Bf16s<kPairs> a, b;
    if (kPairs == 1) {  // rows may begin anywhere
      a.values[0] = head[adjacent ? 2 * pair : pair];
      b.values[0] = head[adjacent ? 2 * pair + 1 : half + pair];
    } else if (adjacent) {
      const auto both = *reinterpret_cast<const Bf16s<2 * kPairs>*>(head + 2 * pair);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        a.values[i] = both.values[2 * i];
        b.values[i] = both.values[2 * i + 1];
      }
    } else {
      a = *reinterpret_cast<const Bf16s<kPairs>*>(head + pair);
      b = *reinterpret_cast<const Bf16s<kPairs>*>(head + half + pair);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      first[i] = __bfloat162float(a.values[i]);
      second[i] = __bfloat162float(b.values[i]);
    }
  }

  __device__ void store(__nv_bfloat16* head, int pair, int half, bool adjacent) const {
    Bf16s<kPairs> a, b;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      a.values[i] = __float2bfloat16_rn(first[i]);
      b.values[i] = __float2bfloat16_rn(second[i]);
    }
    if (kPairs == 1) {
      head[adjacent ? 2 * pair : pair] = a.values[0];
      head[adjacent ? 2 * pair + 1 : half + pair] = b.values[0];
    } else if (adjacent) {
      Bf16s<2 * kPairs> both;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        both.values[2 * i] = a.values[i];
        both.values[2 * i + 1] = b.values[i];
      }
      *reinterpret_cast<Bf16s<2 * kPairs>*>(head + 2 * pair) = both;
    } else {
      *reinterpret_cast<Bf16s<kPairs>*>(head + pair) = a;
      *reinterpret_cast<Bf16s<kPairs>*>(head + half + pair) = b;
    }
  }
};

/// A group of `lanes` lanes (a power of two) has one head of one row; each lane has kPairs neighbouring
/// pairs, kTimes times.
template <int kPairs, int kTimes>
__global__ void __launch_bounds__(kThreads) rope_append_kernel(RopeAppend call, int64_t rows, int lanes) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int heads = call.query_heads + 2 * call.kv_heads;
  const int half = call.head_dim / 2;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t group = thread / lanes;
  const int lane = static_cast<int>(thread % lanes);
  const bool inside = group < rows * heads;  // idle lanes stay for the sums over groups
  const int64_t row = inside ? group / heads : 0;
  const int head = static_cast<int>(inside ? group % heads : 0);
  __nv_bfloat16* at = call.qkv + row * call.row_stride + int64_t{head} * call.head_dim;

  Pairs<kPairs> pairs[kTimes];
  float squares = 0;
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const int pair = (lane + t * lanes) * kPairs;
    if (!inside || pair >= half) continue;
    pairs[t].load(at, pair, half, call.adjacent);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (call.bias != nullptr) {
        const float* bias = call.bias + head * call.head_dim;
        pairs[t].first[i] += bias[call.adjacent ? 2 * (pair + i) : pair + i];
        pairs[t].second[i] += bias[call.adjacent ? 2 * (pair + i) + 1 : half + pair + i];
      }
      squares += pairs[t].first[i] * pairs[t].first[i] + pairs[t].second[i] * pairs[t].second[i];
    }
  }

  const bool is_query = head < call.query_heads;
  const bool is_key = !is_query && head < call.query_heads + call.kv_heads;
  const float* norm = is_query ? call.q_norm : is_key ? call.k_norm : nullptr;
  if (call.q_norm != nullptr || call.k_norm != nullptr)
    for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
  if (!inside) return;

  __nv_bfloat16* to = at;
  if (!is_query) {
    const int64_t slot = call.slots[row];
    if (slot < 0) return;
    const int64_t page = slot / call.page_size, offset = slot % call.page_size;
    const int kv_head = head - call.query_heads - (is_key ? 0 : call.kv_heads);
    to = (is_key ? call.k_pages : call.v_pages) +
         ((page * call.kv_heads + kv_head) * call.page_size + offset) * call.head_dim;
  }
  const float scale =
      norm == nullptr ? 1 : rsqrtf(squares / static_cast<float>(call.head_dim) + call.norm_epsilon);
  const float2* turns = is_query || is_key ? call.rope_table + int64_t{call.positions[row]} * half : nullptr;
#pragma unroll
  for (int t = 0; t < kTimes; ++t) {
    const int pair = (lane + t * lanes) * kPairs;
    if (pair >= half) continue;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float& a = pairs[t].first[i];
      float& b = pairs[t].second[i];
      if (norm != nullptr) {
        a = a * scale * norm[call.adjacent ? 2 * (pair + i) : pair + i];
        b = b * scale * norm[call.adjacent ? 2 * (pair + i) + 1 : half + pair + i];
      }
      if (turns != nullptr) {
        const float2 turn = turns[pair + i];
        const float x = a, y = b;
        a = x * turn.x - y * turn.y;
        b = x * turn.y + y * turn.x;
      }
    }
    pairs[t].store(to, pair, half, call.adjacent);
  }
}

}  // namespace

void rope_table(const double* inverse_frequencies, int half, int64_t begin, int64_t end, float2* table,
                cudaStream_t stream) {
  const int64_t count = (end - begin) * half;
  launch("rope_table", rope_table_kernel,
         LaunchShape{.blocks = (count + kThreads - 1) / kThreads, .threads = kThreads, .chained = false},
         stream, inverse_frequencies, half, begin, count, table);
}

void rope_append(const RopeAppend& call, int64_t rows, cudaStream_t stream) {
  if (call.head_dim <= 0 || call.head_dim > 256 || call.head_dim % 2 != 0)
    throw BadArgument("rope_append: head_dim is " + std::to_string(call.head_dim) +
                      "; expected an even number up to 256");
  if (call.page_size <= 0)
    throw BadArgument("rope_append: page_size is " + std::to_string(call.page_size) +
                      "; expected at least 1");
  const int half = call.head_dim / 2;
  const bool by_fours = half % 4 == 0 && call.row_stride % 8 == 0 &&
                        reinterpret_cast<uintptr_t>(call.qkv) % 16 == 0 &&
                        reinterpret_cast<uintptr_t>(call.k_pages) % 16 == 0 &&
                        reinterpret_cast<uintptr_t>(call.v_pages) % 16 == 0;
  int lanes = 32;
  while (by_fours && lanes / 2 * 4 >= half && lanes > 1) lanes /= 2;
  const int64_t threads = rows * (call.query_heads + 2 * call.kv_heads) * lanes;
  launch("rope_append", by_fours ? rope_append_kernel<4, 1> : rope_append_kernel<1, 4>,
         LaunchShape{.blocks = (threads + kThreads - 1) / kThreads, .threads = kThreads}, stream, call, rows,
         lanes);
}

}  // namespace kascade::cuda
