// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/cuda/cuda_attention.h"
#include "attention/cuda/test/device_case.h"
#include "attention/kernels.h"
#include "attention/params.h"
#include "base/cuda/launch.h"
#include "kascade/dtype.h"

namespace kascade::cuda_test {
namespace {

void check(cudaError_t error, const char* call) { cuda::check_cuda(error, call, "test"); }

uint16_t narrow(float value, DType dtype) {
  return dtype == DType::kBF16 ? to_bf16(value).bits : to_f16(value).bits;
}

AttentionParams common_params(const Case& c) {
  AttentionParams p;
  p.role = c.role;
  p.tile_rule = c.tile_rule;
  p.tile = c.tile;
  p.set_owner = c.set_owner;
  p.batch = static_cast<int32_t>(c.q_lens.size());
  p.query_heads = c.query_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.q_dtype = p.kv_dtype = c.dtype;
  p.q_row_stride = int64_t{c.query_heads} * c.head_dim;
  p.q_head_stride = c.head_dim;
  p.out_row_stride = p.q_row_stride;
  p.out_head_stride = c.head_dim;
  p.lse_row_stride = c.query_heads;
  p.k_scale = c.k_scale;
  p.v_scale = c.v_scale;
  p.budget = c.budget;
  return p;
}

/// Rows with elements after each that are not numbers.
std::vector<uint16_t> padded(const std::vector<uint16_t>& rows, int64_t count, int64_t stride) {
  if (count == 0) return rows;
  const size_t width = rows.size() / static_cast<size_t>(count);
  std::vector<uint16_t> all(static_cast<size_t>(count * stride), 0xFFFF);
  for (size_t i = 0; i < rows.size(); ++i) all[i / width * static_cast<size_t>(stride) + i % width] = rows[i];
  return all;
}

int64_t longest(const std::vector<int32_t>& lengths) {
  int64_t most = 0;
  for (const int32_t length : lengths) most = std::max<int64_t>(most, length);
  return most;
}

/// Capacity that any set of the case needs, and maxima as the host would state them.
void state_maxima(const Case& c, AttentionParams& p, int32_t slack, int32_t more_keys = 0) {
  const int64_t most_rows = c.tile_rule == TileRule::kStep ? 8 : INT32_MAX;
  p.max_q_len = static_cast<int32_t>(std::clamp<int64_t>(longest(c.q_lens) + slack, 1, most_rows));
  p.max_kv_len = static_cast<int32_t>(std::max<int64_t>(longest(c.kv_lens), 1) + slack + more_keys);
  p.max_total_q = std::max(1, std::accumulate(c.q_lens.begin(), c.q_lens.end(), 0)) + slack;
  p.capacity = static_cast<int32_t>(required_capacity(p)) + slack;
  for (size_t b = 0; b < c.budget_lens.size(); ++b) p.capacity = std::max(p.capacity, c.kv_lens[b]);
}

float value_of(const Case& c, Random& random, int64_t position, int64_t length, int32_t d, bool is_key) {
  if (!is_key) return random.normal();
  switch (c.values) {
    case Values::kNormal:
      return random.normal();
    case Values::kEqualScores:
      return d == 0 ? 1.0f : 0.0f;
    case Values::kRamp:  // scores rise with the position
      return d == 0 ? 8.0f * static_cast<float>(position) / static_cast<float>(std::max<int64_t>(length, 1))
                    : 0.0f;
    case Values::kOneHuge:
      return position == length / 2 ? (d < 4 ? 60.0f : 0.0f) : 0.1f * random.normal();
    case Values::kMassTies:  // a few distinct keys, so that many weights are equal at any cut
      return static_cast<float>((position * 7 + d * 3) % 5) * 0.25f;
  }
  return 0;
}

}  // namespace

int64_t sets_of(const Case& c) {
  return c.set_owner == SetOwner::kAllHeads    ? 1
         : c.set_owner == SetOwner::kQueryHead ? c.query_heads
                                               : c.kv_heads;
}

HostData make_data(const Case& c) {
  HostData data;
  data.cu_q = {0};
  data.cu_kv = {0};
  data.tile_offsets = {0};
  const AttentionParams p = common_params(c);
  for (size_t b = 0; b < c.q_lens.size(); ++b) {
    data.cu_q.push_back(data.cu_q.back() + c.q_lens[b]);
    data.cu_kv.push_back(data.cu_kv.back() + c.kv_lens[b]);
    data.tile_offsets.push_back(data.tile_offsets.back() +
                                static_cast<int32_t>(tiles_of(p, c.q_lens[b], c.kv_lens[b])));
    // A generator of its own, so that a sequence's data does not depend on its batch mates.
    Random of_sequence(c.seed * 1000003 + static_cast<uint64_t>(c.kv_lens[b]) * 17 +
                       static_cast<uint64_t>(c.q_lens[b]));
    for (int64_t i = 0; i < int64_t{c.q_lens[b]} * c.query_heads * c.head_dim; ++i)
      data.q.push_back(narrow(of_sequence.normal() * c.peak, c.dtype));
    for (int64_t j = 0; j < c.kv_lens[b]; ++j)
      for (int32_t i = 0; i < c.kv_heads * c.head_dim; ++i) {
        data.k.push_back(narrow(value_of(c, of_sequence, j, c.kv_lens[b], i % c.head_dim, true), c.dtype));
        data.v.push_back(narrow(value_of(c, of_sequence, j, c.kv_lens[b], i % c.head_dim, false), c.dtype));
      }
  }
  return data;
}

Outcome run_reference(const Case& c, const HostData& data, const Outcome* given) {
  AttentionParams p = common_params(c);
  HostData d = data;
  d.k.resize(d.k.size() + 8);
  d.v.resize(d.v.size() + 8);
  d.q.resize(d.q.size() + 8);
  const size_t rows = static_cast<size_t>(d.cu_q.back()) * static_cast<size_t>(c.query_heads);
  const int64_t sets = sets_of(c), tiles = d.tile_offsets.back();
  Outcome o;
  std::vector<float> out(rows * static_cast<size_t>(c.head_dim) + 4), lse(rows + 1);
  p.q = d.q.data();
  p.out = out.data();
  p.lse = lse.data();
  p.out_dtype = DType::kF32;
  p.cu_seqlens_q = d.cu_q.data();
  p.seq_lens_kv = c.kv_lens.data();
  if (!c.budget_lens.empty()) p.budget_lens = c.budget_lens.data();
  p.k = d.k.data();
  p.v = d.v.data();
  p.k_token_stride = p.v_token_stride = int64_t{c.kv_heads} * c.head_dim;
  p.k_head_stride = p.v_head_stride = c.head_dim;
  p.cu_seqlens_kv = d.cu_kv.data();
  p.tile_offsets = d.tile_offsets.data();
  if (!c.head_map.empty()) p.head_map = c.head_map.data();
  if (!c.needed.empty()) p.needed = c.needed.data();
  state_maxima(c, p, 0);
  p.max_q_len = p.max_total_q = p.max_tiles = 0;
  if (given != nullptr) {
    o.counts = given->counts;
    o.positions = given->positions;
    p.capacity = given->capacity;
  } else {
    o.counts.assign(static_cast<size_t>(tiles * sets), 0);
    o.positions.assign(static_cast<size_t>(tiles * sets * p.capacity) + 1, 0);
  }
  o.capacity = p.capacity;
  p.counts = o.counts.data();
  p.positions = o.positions.data();
  if (selects(c.role)) {
    o.pooled_stride = longest(c.kv_lens) + 1;
    o.pooled.assign(static_cast<size_t>(tiles * sets * o.pooled_stride), 0);
    o.own_mass.assign(static_cast<size_t>(tiles * sets), 0);
    p.pooled_weights = o.pooled.data();
    p.pooled_head_stride = o.pooled_stride;
    p.pooled_tile_stride = o.pooled_stride * sets;
    p.own_tile_mass = o.own_mass.data();
  }
  std::vector<std::byte> workspace(reference_kernel.workspace_bytes(p, 1) + 64);
  if (p.batch > 0 && rows > 0) reference_kernel.launch(p, workspace.data(), {});
  out.resize(rows * static_cast<size_t>(c.head_dim));
  lse.resize(rows);
  o.out = std::move(out);
  o.lse = std::move(lse);
  return o;
}

void DeviceRun::place_keys(const Case& c, const HostData& data, const Placement& placement) {
  const int64_t d = c.head_dim, g = c.kv_heads, size = placement.paged ? placement.page_size : 0;
  AttentionParams& p = params_;
  if (!placement.paged) {
    const int64_t tokens = int64_t{data.cu_kv.back()} + 2;
    p.k_token_stride = placement.head_major ? d : g * d;
    p.k_head_stride = placement.head_major ? tokens * d : d;
    k_ = DeviceBuffer(static_cast<size_t>(tokens * g * d) * 2);
    v_ = DeviceBuffer(static_cast<size_t>(tokens * g * d) * 2);
    std::vector<uint16_t> k(static_cast<size_t>(tokens * g * d), 0xFFFF), v = k;
    for (int64_t t = 0; t < data.cu_kv.back(); ++t)
      for (int64_t h = 0; h < g; ++h)
        for (int64_t e = 0; e < d; ++e) {
          const auto to = static_cast<size_t>(t * p.k_token_stride + h * p.k_head_stride + e);
          k[to] = data.k[static_cast<size_t>((t * g + h) * d + e)];
          v[to] = data.v[static_cast<size_t>((t * g + h) * d + e)];
        }
    k_.upload(0, k.data(), k.size() * 2);
    v_.upload(0, v.data(), v.size() * 2);
    cu_kv_ = DeviceBuffer::of(data.cu_kv);
    p.cu_seqlens_kv = cu_kv_.as<int32_t>();
  } else {
    const int64_t page_elements = size * g * d;
    p.page_size = placement.page_size;
    p.k_page_stride = page_elements;
    p.k_token_stride = placement.head_major ? d : g * d;
    p.k_head_stride = placement.head_major ? size * d : d;
    int64_t used = 0, widest = 1;
    for (const int32_t length : c.kv_lens) {
      used += (length + size - 1) / size;
      widest = std::max<int64_t>(widest, (length + size - 1) / size);
    }
    const int64_t pages = used + placement.spare_pages;
    // Used pages at random among the last `used + 3`: far from the base when there are many spare pages.
    std::vector<int32_t> physical(static_cast<size_t>(std::min(pages, used + 3)));
    std::iota(physical.begin(), physical.end(),
              static_cast<int32_t>(pages - static_cast<int64_t>(physical.size())));
    Random random(placement.seed);
    for (size_t i = physical.size(); i > 1; --i)
      std::swap(physical[i - 1], physical[static_cast<size_t>(random.in(0, static_cast<int64_t>(i) - 1))]);
    k_ = DeviceBuffer(static_cast<size_t>(pages * page_elements) * 2);
    v_ = DeviceBuffer(static_cast<size_t>(pages * page_elements) * 2);
    const int64_t table_stride = widest + 2;
    // Unused entries point nowhere.
    std::vector<int32_t> table(c.kv_lens.size() * static_cast<size_t>(table_stride), INT32_MAX);
    size_t next = 0;
    std::vector<uint16_t> k(static_cast<size_t>(page_elements)), v(k.size());
    for (size_t b = 0; b < c.kv_lens.size(); ++b)
      for (int64_t first = 0; first < c.kv_lens[b]; first += size) {
        std::fill(k.begin(), k.end(), uint16_t{0xFFFF});
        std::fill(v.begin(), v.end(), uint16_t{0xFFFF});
        for (int64_t t = 0; t < std::min<int64_t>(size, c.kv_lens[b] - first); ++t)
          for (int64_t h = 0; h < g; ++h)
            for (int64_t e = 0; e < d; ++e) {
              const auto to = static_cast<size_t>(t * p.k_token_stride + h * p.k_head_stride + e);
              const auto from = static_cast<size_t>(((data.cu_kv[b] + first + t) * g + h) * d + e);
              k[to] = data.k[from];
              v[to] = data.v[from];
            }
        const int32_t page = physical[next++];
        table[b * static_cast<size_t>(table_stride) + static_cast<size_t>(first / size)] = page;
        k_.upload(static_cast<size_t>(page * page_elements) * 2, k.data(), k.size() * 2);
        v_.upload(static_cast<size_t>(page * page_elements) * 2, v.data(), v.size() * 2);
      }
    pages_ = DeviceBuffer::of(table);
    p.page_table = pages_.as<int32_t>();
    p.page_table_stride = table_stride;
  }
  p.v_page_stride = p.k_page_stride;
  p.v_token_stride = p.k_token_stride;
  p.v_head_stride = p.k_head_stride;
  p.k = k_.as<void>();
  p.v = v_.as<void>();
}

DeviceRun::DeviceRun(const Case& c, const HostData& data, const Placement& placement, const Outcome* given)
    : case_(c), params_(common_params(c)) {
  AttentionParams& p = params_;
  total_q_ = data.cu_q.back();
  tiles_ = data.tile_offsets.back();
  p.out_dtype = c.out_dtype;
  state_maxima(c, p, placement.slack, placement.more_keys);
  p.max_tiles = static_cast<int32_t>(std::max<int64_t>(tiles_, 1)) + placement.slack;
  if (given != nullptr) p.capacity = given->capacity;
  const int64_t sets = sets_of(c);
  p.q_row_stride += placement.row_padding;
  p.out_row_stride += placement.row_padding;
  q_ = DeviceBuffer::of(padded(data.q, total_q_, p.q_row_stride));
  if (q_.bytes() == 0) q_ = DeviceBuffer(16);
  out_ = DeviceBuffer(static_cast<size_t>(total_q_ * p.out_row_stride) * dtype_bytes(c.out_dtype) + 16);
  lse_ = DeviceBuffer(static_cast<size_t>(total_q_ * c.query_heads + 1) * 4);
  cu_q_ = DeviceBuffer::of(data.cu_q);
  kv_lens_ = DeviceBuffer::of(c.kv_lens);
  tile_offsets_ = DeviceBuffer::of(data.tile_offsets);
  counts_ = given != nullptr ? DeviceBuffer::of(given->counts)
                             : DeviceBuffer(static_cast<size_t>(tiles_ * sets + 1) * 4);
  positions_ = given != nullptr ? DeviceBuffer::of(given->positions)
                                : DeviceBuffer(static_cast<size_t>(tiles_ * sets * p.capacity + 1) * 4);
  status_ = DeviceBuffer::of(std::vector<uint32_t>{0});
  p.q = q_.as<void>();
  p.out = out_.as<void>();
  p.lse = lse_.as<float>();
  p.cu_seqlens_q = cu_q_.as<int32_t>();
  p.seq_lens_kv = kv_lens_.as<int32_t>();
  p.tile_offsets = tile_offsets_.as<int32_t>();
  p.counts = counts_.as<int32_t>();
  p.positions = positions_.as<int32_t>();
  p.status = status_.as<uint32_t>();
  if (!c.budget_lens.empty()) {
    budget_lens_ = DeviceBuffer::of(c.budget_lens);
    p.budget_lens = budget_lens_.as<int32_t>();
  }
  if (!c.head_map.empty()) {
    head_map_ = DeviceBuffer::of(c.head_map);
    p.head_map = head_map_.as<int32_t>();
  }
  if (!c.needed.empty()) {
    needed_ = DeviceBuffer::of(c.needed);
    p.needed = needed_.as<uint8_t>();
  }
  if (c.by_products && selects(c.role)) {
    p.pooled_head_stride = p.max_kv_len;
    p.pooled_tile_stride = sets * p.pooled_head_stride;
    pooled_ = DeviceBuffer(static_cast<size_t>(tiles_ * p.pooled_tile_stride + 1) * 4);
    p.pooled_weights = pooled_.as<float>();
    own_mass_ = DeviceBuffer(static_cast<size_t>(tiles_ * sets + 1) * 4);
    p.own_tile_mass = own_mass_.as<float>();
  }
  place_keys(c, data, placement);
  if (placement.multiprocessors != 0)
    spare_multiprocessors_ = std::max(0, cuda::multiprocessors("test") - placement.multiprocessors);
  workspace_ = DeviceBuffer(cuda_attention_workspace_bytes(p));
}

void DeviceRun::launch(cudaStream_t stream) {
  cuda_attention(params_, workspace_.as<void>(), workspace_.bytes(), stream, spare_multiprocessors_);
}

/// The output without what lies after each row.
template <class T>
std::vector<T> DeviceRun::unpadded() const {
  const auto row = static_cast<size_t>(params_.out_row_stride),
             width = static_cast<size_t>(params_.query_heads) * static_cast<size_t>(params_.head_dim);
  const std::vector<T> all = out_.download<T>(static_cast<size_t>(total_q_) * row);
  std::vector<T> rows;
  for (size_t i = 0; i < all.size(); ++i) {
    // As it was allocated, all bits are set.
    T untouched;
    std::memset(&untouched, 0xFF, sizeof untouched);
    if (i % row < width) {
      rows.push_back(all[i]);
    } else if (std::memcmp(&all[i], &untouched, sizeof untouched) != 0) {
      throw std::runtime_error("written after row " + std::to_string(i / row) + " of the output");
    }
  }
  return rows;
}

Outcome DeviceRun::results() const {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  Outcome o;
  if (case_.out_dtype == DType::kF32) {
    o.out = unpadded<float>();
  } else {
    for (const uint16_t bits : unpadded<uint16_t>())
      o.out.push_back(case_.out_dtype == DType::kBF16 ? to_float(BF16{bits}) : to_float(F16{bits}));
  }
  o.lse = lse_.download<float>(static_cast<size_t>(total_q_ * case_.query_heads));
  o.capacity = params_.capacity;
  const int64_t sets = sets_of(case_);
  o.counts = counts_.download<int32_t>(static_cast<size_t>(tiles_ * sets));
  o.positions = positions_.download<int32_t>(static_cast<size_t>(tiles_ * sets * params_.capacity));
  if (params_.pooled_weights != nullptr) {
    o.pooled_stride = params_.pooled_head_stride;
    o.pooled = pooled_.download<float>(static_cast<size_t>(tiles_ * params_.pooled_tile_stride));
    if (params_.own_tile_mass != nullptr)
      o.own_mass = own_mass_.download<float>(static_cast<size_t>(tiles_ * sets));
  }
  o.status = status_.download<uint32_t>(1)[0];
  return o;
}

}  // namespace kascade::cuda_test
