// SPDX-License-Identifier: Apache-2.0
// Implementation of attention_test_case.h.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <string_view>
#include <utility>

#include "attention/attention_test_case.h"
#include "kascade/thread_pool.h"

namespace kascade {

GuardedBuffer::GuardedBuffer(size_t bytes) : bytes_(bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t data_bytes = (bytes + page - 1) / page * page;
  map_bytes_ = data_bytes + page;
  void* map =
      mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  map_ = static_cast<std::byte*>(map);
  mprotect(map_ + data_bytes, page, PROT_NONE);
  data_ = map_ + data_bytes - bytes;
  std::memset(data_, 0xFF, bytes);
}

GuardedBuffer::~GuardedBuffer() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)),
      map_bytes_(other.map_bytes_),
      data_(other.data_),
      bytes_(other.bytes_) {}

uint64_t Random::bits() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

int64_t Random::in(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
}

float Random::normal() {
  // The sum of four uniform 16-bit numbers, centred; its standard deviation is 2^16 / sqrt(3).
  const uint64_t b = bits();
  const auto sum = static_cast<int64_t>((b & 0xFFFF) + (b >> 16 & 0xFFFF) + (b >> 32 & 0xFFFF) + (b >> 48));
  return static_cast<float>(sum - 131070) / 37837.0f;
}

float round_to_dtype(float value, DType dtype) {
  if (dtype == DType::kF16) return to_float(to_f16(value));
  if (dtype == DType::kBF16) return to_float(to_bf16(value));
  return value;
}

SequenceData& Problem::add(Random& random, int64_t q_len, int64_t kv_len, float peak, bool fine) {
  SequenceData data;
  data.q_len = q_len;
  data.kv_len = kv_len;
  data.q.resize(static_cast<size_t>(q_len * query_heads * head_dim));
  data.k.resize(static_cast<size_t>(kv_len * kv_heads * head_dim));
  data.v.resize(data.k.size());
  for (float& x : data.q) {
    x = round_to_dtype(random.normal() * peak, q_dtype);
    if (!fine) x = round_to_dtype(x, DType::kBF16);
  }
  for (float& x : data.k) x = round_to_dtype(random.normal(), kv_dtype);
  for (float& x : data.v) x = round_to_dtype(random.normal(), kv_dtype);
  sequences.push_back(std::move(data));
  return sequences.back();
}

Layout random_layout(Random& random) {
  Layout layout;
  layout.keys = random.of<Layout::Keys>(
      {Layout::Keys::kPacked, Layout::Keys::kPagesTokenMajor, Layout::Keys::kPagesHeadMajor});
  layout.page_size = static_cast<int32_t>(random.of<int64_t>({1, 3, 16, 64}));
  layout.seed = random.bits();
  layout.pad = random.in(0, 2);
  layout.head_major = random.one_in(2);
  layout.maxima =
      random.of<Layout::Maxima>({Layout::Maxima::kRead, Layout::Maxima::kExact, Layout::Maxima::kSlack});
  layout.spare_capacity = static_cast<int32_t>(random.of<int64_t>({0, 0, 1, 7}));
  return layout;
}

AttentionParams problem_params(const Problem& problem) {
  AttentionParams params;
  params.role = problem.role;
  params.tile_rule = problem.tile_rule;
  params.set_owner = problem.set_owner;
  params.tile = problem.tile;
  params.batch = static_cast<int32_t>(problem.sequences.size());
  params.query_heads = problem.query_heads;
  params.kv_heads = problem.kv_heads;
  params.head_dim = problem.head_dim;
  params.softmax_scale = problem.softmax_scale;
  params.k_scale = problem.k_scale;
  params.v_scale = problem.v_scale;
  params.q_dtype = problem.q_dtype;
  params.out_dtype = problem.out_dtype;
  params.kv_dtype = problem.kv_dtype;
  params.budget = problem.budget;
  if (!problem.head_map.empty()) params.head_map = problem.head_map.data();
  if (!problem.needed.empty()) params.needed = problem.needed.data();
  return params;
}

Sets empty_sets(const Problem& problem) {
  const AttentionParams params = problem_params(problem);
  Sets sets;
  sets.per_tile = sets_per_tile(params);
  sets.tile_begin.push_back(0);
  for (const SequenceData& s : problem.sequences)
    sets.tile_begin.push_back(sets.tile_begin.back() + tiles_of(params, s.q_len, s.kv_len));
  sets.members.resize(static_cast<size_t>(sets.tile_begin.back() * sets.per_tile));
  return sets;
}

namespace {

constexpr int32_t kSlack = 5;                // by which stated maxima exceed the lengths
constexpr int32_t kUnreadable = 0x7FFFFFFF;  // a page number or position that no test has

void put(GuardedBuffer& buffer, DType dtype, int64_t index, float value) {
  if (dtype == DType::kF32) buffer.as<float>()[index] = value;
  if (dtype == DType::kF16) buffer.as<F16>()[index] = to_f16(value);
  if (dtype == DType::kBF16) buffer.as<BF16>()[index] = to_bf16(value);
}

float get(GuardedBuffer& buffer, DType dtype, int64_t index) {
  if (dtype == DType::kF16) return to_float(buffer.as<F16>()[index]);
  if (dtype == DType::kBF16) return to_float(buffer.as<BF16>()[index]);
  return buffer.as<float>()[index];
}

/// Everything in the buffer but `written` elements is still as it was made.
void expect_untouched(GuardedBuffer& buffer, size_t element_bytes, const std::vector<bool>& written,
                      const char* name) {
  const auto* bytes = buffer.as<unsigned char>();
  for (size_t i = 0; i < buffer.size(); ++i) {
    if (i / element_bytes < written.size() && written[i / element_bytes]) continue;
    if (bytes[i] != 0xFF) {
      ADD_FAILURE() << name << " was written outside its rows, at element " << i / element_bytes;
      return;
    }
  }
}

/// Two strides of a [rows, heads, width] array, and the elements that it takes.
struct RowStrides {
  int64_t row, head, elements;
  RowStrides(int64_t rows, int64_t heads, int64_t width, const Layout& layout, int64_t extra) {
    const int64_t padded = width + 8 * layout.pad;
    row = layout.head_major ? padded : heads * padded + 8 * extra;
    head = layout.head_major ? (rows + extra) * padded : padded;
    elements = rows > 0 ? (rows - 1) * row + (heads - 1) * head + width : 0;
  }
};

class Run {
 public:
  Run(const Problem& problem, const Layout& layout)
      : problem_(problem), layout_(layout), random_(layout.seed) {
    params_ = problem_params(problem);
    place_queries();
    place_keys(params_.k_page_stride, params_.k_token_stride, params_.k_head_stride, k_, &SequenceData::k, 0);
    place_keys(params_.v_page_stride, params_.v_token_stride, params_.v_head_stride, v_, &SequenceData::v, 1);
    params_.k = k_.back().as<void>();
    params_.v = v_.back().as<void>();
    if (problem.role != Role::kDense) place_sets();
    state_maxima();
  }

  Result operator()(const AttentionKernel& kernel, int threads, const Sets* given) {
    if (problem_.role == Role::kReuse) fill_sets(*given);
    Result result;
    std::unique_ptr<ThreadPool> pool = threads > 1 ? std::make_unique<ThreadPool>(threads) : nullptr;
    params_.status = &result.status;
    if (layout_.before) layout_.before(params_);
    const size_t bytes = attention_workspace_bytes(params_, kernel, threads);
    constexpr size_t kAlign = 64;
    GuardedBuffer workspace((bytes + kAlign - 1) / kAlign * kAlign);
    attention(params_, kernel, workspace.as<void>(), bytes, {.pool = pool.get()});
    if (layout_.after) layout_.after(params_);
    for (size_t i = bytes; i < workspace.size(); ++i)
      EXPECT_EQ(workspace.as<unsigned char>()[i], 0xFF) << "workspace written past workspace_bytes";
    collect_rows(result);
    if (selects(problem_.role)) collect_sets(result);
    return result;
  }

 private:
  int64_t batch() const { return static_cast<int64_t>(problem_.sequences.size()); }
  const SequenceData& sequence(int64_t b) const { return problem_.sequences[static_cast<size_t>(b)]; }

  void place_queries() {
    int64_t row = layout_.pad;  // the first sequence need not start at row 0
    auto* cu = make<int32_t>(cu_q_, batch() + 1);
    auto* lens = make<int32_t>(seq_lens_, batch());
    auto* budget = make<int32_t>(budget_lens_, batch());
    bool own_budget_len = false;
    cu[0] = static_cast<int32_t>(row);
    for (int64_t b = 0; b < batch(); ++b) {
      const SequenceData& s = sequence(b);
      cu[b + 1] = static_cast<int32_t>(row += s.q_len);
      lens[b] = static_cast<int32_t>(s.kv_len);
      budget[b] = static_cast<int32_t>(s.budget_len >= 0 ? s.budget_len : s.kv_len);
      own_budget_len |= s.budget_len >= 0;
    }
    total_q_ = row;
    params_.cu_seqlens_q = cu;
    params_.seq_lens_kv = lens;
    if (own_budget_len) params_.budget_lens = budget;
    const int64_t heads = problem_.query_heads, width = problem_.head_dim;
    const RowStrides q(row, heads, width, layout_, 1), out(row, heads, width, layout_, 2);
    params_.q_row_stride = q.row;
    params_.q_head_stride = q.head;
    params_.out_row_stride = out.row;
    params_.out_head_stride = out.head;
    params_.lse_row_stride = heads + layout_.pad;
    q_.emplace_back(static_cast<size_t>(q.elements) * dtype_bytes(problem_.q_dtype));
    out_.emplace_back(static_cast<size_t>(out.elements) * dtype_bytes(problem_.out_dtype));
    lse_.emplace_back(
        row > 0 ? static_cast<size_t>((row - 1) * params_.lse_row_stride + heads) * sizeof(float) : 0);
    params_.q = q_.back().as<void>();
    params_.out = out_.back().as<void>();
    params_.lse = lse_.back().as<float>();
    for (int64_t b = 0; b < batch(); ++b)
      for (int64_t r = 0; r < sequence(b).q_len; ++r)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t c = 0; c < width; ++c)
            put(q_.back(), problem_.q_dtype, (cu[b] + r) * q.row + h * q.head + c,
                sequence(b).q[static_cast<size_t>((r * heads + h) * width + c)]);
  }

  template <class T>
  T* make(std::vector<GuardedBuffer>& place, int64_t count) {
    place.emplace_back(static_cast<size_t>(count) * sizeof(T));
    return place.back().as<T>();
  }

  /// Page table or packed ranges, made once; keys and values share them.
  void place_tokens() {
    if (params_.page_table != nullptr || params_.cu_seqlens_kv != nullptr) return;
    if (layout_.keys == Layout::Keys::kPacked) {
      auto* cu = make<int32_t>(cu_kv_, batch() + 1);
      int64_t token = layout_.pad;
      for (int64_t b = 0; b <= batch(); ++b) {
        cu[b] = static_cast<int32_t>(token);
        if (b < batch()) token += sequence(b).kv_len + (b + 1 < batch() ? random_.in(0, 2 * layout_.pad) : 0);
      }
      slots_ = token;
      pages_ = 1;
      params_.cu_seqlens_kv = cu;
      return;
    }
    params_.page_size = layout_.page_size;
    slots_ = layout_.page_size;
    std::vector<int64_t> used;
    for (int64_t b = 0; b < batch(); ++b) used.push_back((sequence(b).kv_len + slots_ - 1) / slots_);
    pages_ = std::accumulate(used.begin(), used.end(), int64_t{0}) + layout_.pad;
    std::vector<int32_t> order(static_cast<size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = pages_ - 1; i > 0; --i)
      std::swap(order[static_cast<size_t>(i)], order[random_.bits() % (i + 1)]);
    params_.page_table_stride =
        batch() > 0 ? *std::max_element(used.begin(), used.end()) + layout_.pad : layout_.pad;
    // The table ends at the last entry that is used.
    auto* table =
        make<int32_t>(table_, batch() > 0 ? (batch() - 1) * params_.page_table_stride + used.back() : 0);
    std::fill_n(table, table_.back().size() / sizeof(int32_t), kUnreadable);
    size_t next = 0;
    for (int64_t b = 0; b < batch(); ++b)
      for (int64_t page = 0; page < used[static_cast<size_t>(b)]; ++page)
        table[b * params_.page_table_stride + page] = order[next++];
    params_.page_table = table;
  }

  void place_keys(int64_t& page_stride, int64_t& token_stride, int64_t& head_stride,
                  std::vector<GuardedBuffer>& place, std::vector<float> SequenceData::*values,
                  int64_t extra) {
    place_tokens();
    const int64_t heads = problem_.kv_heads, width = problem_.head_dim;
    const bool head_major = layout_.keys == Layout::Keys::kPacked
                                ? layout_.head_major
                                : layout_.keys == Layout::Keys::kPagesHeadMajor;
    const int64_t padded = width + 8 * (layout_.pad + extra);
    token_stride = head_major ? padded : heads * padded;
    head_stride = head_major ? slots_ * padded + 8 * extra : padded;
    page_stride = (head_major ? heads * head_stride : slots_ * token_stride) + 8 * extra;
    const int64_t elements = slots_ * pages_ > 0 ? (pages_ - 1) * page_stride + (slots_ - 1) * token_stride +
                                                       (heads - 1) * head_stride + width
                                                 : 0;
    place.emplace_back(static_cast<size_t>(elements) * dtype_bytes(problem_.kv_dtype));
    for (int64_t b = 0; b < batch(); ++b)
      for (int64_t j = 0; j < sequence(b).kv_len; ++j)
        for (int64_t g = 0; g < heads; ++g)
          for (int64_t c = 0; c < width; ++c)
            put(place.back(), problem_.kv_dtype,
                token_offset(params_, static_cast<int32_t>(b), j, page_stride, token_stride) +
                    g * head_stride + c,
                (sequence(b).*values)[static_cast<size_t>((j * heads + g) * width + c)]);
  }

  void place_sets() {
    const Sets shape = empty_sets(problem_);
    auto* offsets = make<int32_t>(tile_offsets_, batch() + 1);
    int64_t tile = 0;
    for (int64_t b = 0; b <= batch(); ++b) {
      offsets[b] = static_cast<int32_t>(tile);
      if (b < batch())
        tile += shape.tile_begin[static_cast<size_t>(b + 1)] - shape.tile_begin[static_cast<size_t>(b)] +
                layout_.pad;
    }
    stored_tiles_ = tile;
    params_.tile_offsets = offsets;
    params_.capacity = std::numeric_limits<int32_t>::max();
    params_.capacity = static_cast<int32_t>(required_capacity(params_)) + layout_.spare_capacity;
    const int64_t sets = tile * shape.per_tile;
    params_.positions = make<int32_t>(positions_, sets * params_.capacity);
    params_.counts = make<int32_t>(counts_, sets);
    if (!layout_.by_products || !selects(problem_.role)) return;
    params_.pooled_head_stride = max_kv_len() + kSlack + layout_.pad;
    params_.pooled_tile_stride = shape.per_tile * params_.pooled_head_stride + layout_.pad;
    params_.pooled_weights = make<float>(pooled_, tile * params_.pooled_tile_stride);
    params_.own_tile_mass = make<float>(own_mass_, sets);
  }

  int64_t max_kv_len() const {
    int64_t most = 0;
    for (const SequenceData& s : problem_.sequences) most = std::max({most, s.kv_len, s.budget_len});
    return most;
  }

  void state_maxima() {
    if (layout_.maxima == Layout::Maxima::kRead) return;
    const int32_t slack = layout_.maxima == Layout::Maxima::kSlack ? kSlack : 0;
    for (const SequenceData& s : problem_.sequences)
      params_.max_q_len = std::max(params_.max_q_len, static_cast<int32_t>(s.q_len));
    params_.max_q_len += slack;
    params_.max_kv_len = static_cast<int32_t>(max_kv_len()) + slack;
    params_.max_total_q = static_cast<int32_t>(total_q_) + slack;
    params_.max_tiles = static_cast<int32_t>(stored_tiles_);
    if (problem_.role == Role::kDense) return;
    // Capacity goes by the stated maxima now, which may allow larger sets than these lengths need.
    const auto required = static_cast<int32_t>(required_capacity(params_));
    if (required <= params_.capacity) return;
    params_.capacity = required;
    params_.positions = make<int32_t>(positions_, stored_tiles_ * sets_per_tile(params_) * params_.capacity);
  }

  /// Entries past the count hold nothing that a reader may use.
  void fill_sets(const Sets& given) {
    size_t most = 0;
    for (const auto& members : given.members) most = std::max(most, members.size());
    params_.capacity = static_cast<int32_t>(most) + layout_.spare_capacity;
    params_.positions = make<int32_t>(positions_, stored_tiles_ * given.per_tile * params_.capacity);
    std::fill_n(params_.positions, positions_.back().size() / sizeof(int32_t), kUnreadable);
    for_each_set([&](int64_t index, int64_t set) {
      const auto& members = given.members[static_cast<size_t>(index)];
      std::copy(members.begin(), members.end(), params_.positions + set * params_.capacity);
      params_.counts[set] = static_cast<int32_t>(members.size());
    });
  }

  /// f(index in Sets::members, index in positions and counts).
  template <class F>
  void for_each_set(F f) {
    const Sets shape = empty_sets(problem_);
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t begin = shape.tile_begin[static_cast<size_t>(b)],
                    end = shape.tile_begin[static_cast<size_t>(b + 1)];
      for (int64_t t = 0; t < end - begin; ++t)
        for (int32_t s = 0; s < shape.per_tile; ++s)
          f((begin + t) * shape.per_tile + s, (params_.tile_offsets[b] + t) * shape.per_tile + s);
    }
  }

  void collect_rows(Result& result) {
    const int64_t heads = problem_.query_heads, width = problem_.head_dim;
    std::vector<bool> out_written(out_.back().size() / dtype_bytes(problem_.out_dtype));
    std::vector<bool> lse_written(lse_.back().size() / sizeof(float));
    for (int64_t row = params_.cu_seqlens_q[0]; row < total_q_; ++row) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t offset = row * params_.out_row_stride + h * params_.out_head_stride;
        for (int64_t c = 0; c < width; ++c) {
          result.out.push_back(get(out_.back(), problem_.out_dtype, offset + c));
          out_written[static_cast<size_t>(offset + c)] = true;
        }
        const int64_t at = row * params_.lse_row_stride + h;
        result.lse.push_back(lse_.back().as<float>()[at]);
        lse_written[static_cast<size_t>(at)] = true;
      }
    }
    expect_untouched(out_.back(), dtype_bytes(problem_.out_dtype), out_written, "out");
    expect_untouched(lse_.back(), sizeof(float), lse_written, "lse");
  }

  void collect_sets(Result& result) {
    result.sets = empty_sets(problem_);
    const int64_t capacity = params_.capacity;
    std::vector<bool> positions_written(positions_.back().size() / sizeof(int32_t));
    std::vector<bool> counts_written(counts_.back().size() / sizeof(int32_t));
    for_each_set([&](int64_t index, int64_t set) {
      const int64_t count = params_.counts[set];
      ASSERT_TRUE(count >= 0 && count <= capacity) << "count " << count << " of set " << set;
      const int32_t* list = params_.positions + set * capacity;
      for (int64_t m = 0; m < capacity; ++m) {
        if (m >= count) {
          EXPECT_EQ(list[m], -1) << "set " << set << " entry " << m << " past its count " << count;
        } else {
          EXPECT_GT(list[m], m > 0 ? list[m - 1] : -1) << "set " << set << " entry " << m;
        }
        positions_written[static_cast<size_t>(set * capacity + m)] = true;
      }
      counts_written[static_cast<size_t>(set)] = true;
      result.sets.members[static_cast<size_t>(index)].assign(list, list + count);
    });
    expect_untouched(positions_.back(), sizeof(int32_t), positions_written, "positions");
    expect_untouched(counts_.back(), sizeof(int32_t), counts_written, "counts");
    if (layout_.by_products) collect_by_products(result);
  }

  void collect_by_products(Result& result) {
    std::vector<bool> pooled_written(pooled_.back().size() / sizeof(float));
    const Maxima maxima = resolve_maxima(params_);
    const int32_t per_tile = sets_per_tile(params_);
    for (int32_t b = 0; b < params_.batch; ++b) {
      const Sequence s = sequence_at(params_, maxima, b);
      for (int64_t t = 0; t < s.tiles; ++t) {
        const Tile tile = tile_at(params_, s, t);
        for (int32_t set = 0; set < per_tile; ++set) {
          const int64_t begin = tile.set * params_.pooled_tile_stride + set * params_.pooled_head_stride;
          const float* weights = params_.pooled_weights + begin;
          result.pooled.emplace_back(weights, weights + tile.budget.candidates);
          for (int64_t j = 0; j < tile.budget.candidates; ++j)
            pooled_written[static_cast<size_t>(begin + j)] = true;
          result.own_mass.push_back(params_.own_tile_mass[tile.set * per_tile + set]);
        }
      }
    }
    expect_untouched(pooled_.back(), sizeof(float), pooled_written, "pooled_weights");
  }

  const Problem& problem_;
  const Layout& layout_;
  Random random_;
  AttentionParams params_;
  int64_t total_q_ = 0, slots_ = 0, pages_ = 0, stored_tiles_ = 0;
  std::vector<GuardedBuffer> q_, out_, lse_, cu_q_, seq_lens_, budget_lens_, k_, v_, table_, cu_kv_;
  std::vector<GuardedBuffer> tile_offsets_, positions_, counts_, pooled_, own_mass_;
};

}  // namespace

Result run(const Problem& problem, const AttentionKernel& kernel, const Layout& layout, int threads,
           const Sets* given) {
  return Run(problem, layout)(kernel, threads, given);
}

bool supports(const AttentionKernel& kernel, const Problem& problem) {
  return kernel.unsupported(problem_params(problem)).empty();
}

const AttentionKernel& reference() { return select_attention_kernel("reference"); }

std::vector<const AttentionKernel*> available_kernels() {
  std::vector<const AttentionKernel*> kernels;
  for (const AttentionKernel& kernel : attention_kernels())
    if (!kernel.on_device && kernel.available()) kernels.push_back(&kernel);
  return kernels;
}

int64_t first_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return -2;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return static_cast<int64_t>(i);
  return -1;
}

std::vector<float> rows_of(const std::vector<float>& values, int64_t begin, int64_t end, int64_t width) {
  return {values.begin() + begin * width, values.begin() + end * width};
}

float max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<float>::infinity();
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const float difference = std::abs(a[i] - b[i]);
    most = std::isnan(difference) ? std::numeric_limits<float>::infinity() : std::max(most, difference);
  }
  return most;
}

std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> cases;
  for (const AttentionKernel* kernel : available_kernels())
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) cases.push_back({kernel, dtype});
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<KernelCase>& info) {
  std::string name = std::string(info.param.kernel->name) + "_" + dtype_name(info.param.kv_dtype);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-'; }, '_');
  return name;
}

void PrintTo(const KernelCase& kernel_case, std::ostream* out) {
  *out << kernel_case.kernel->name << " with " << dtype_name(kernel_case.kv_dtype) << " keys";
}

Tolerance tolerance(const AttentionKernel& kernel, DType kv_dtype, DType out_dtype, bool fine) {
  Tolerance t{.out = 2e-5f, .lse = 2e-5f, .weight = 2e-5f};
  if (kv_dtype == DType::kBF16 && std::string_view(kernel.name).ends_with("_bf16")) {
    t = {.out = 4 * 0x1p-8f, .lse = 0x1p-8f, .weight = 0x1p-7f};
    if (fine) t = {.out = 16 * 0x1p-8f, .lse = 8 * 0x1p-8f, .weight = 8 * 0x1p-8f};
  }
  // An output of magnitude 4 rounded to nearest.
  if (out_dtype == DType::kF16) t.out += 4 * 0x1p-11f;
  if (out_dtype == DType::kBF16) t.out += 4 * 0x1p-8f;
  return t;
}

}  // namespace kascade
