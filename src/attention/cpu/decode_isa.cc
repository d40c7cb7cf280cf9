// SPDX-License-Identifier: Apache-2.0
// Decode: few query rows against many keys, bound by reading K and V (docs/kernels/cpu_attention.md). A key
// is read once for all rows of its group; the lanes are head dims, and sums across them are taken for kLanes
// (row, key) pairs at a time.
#include "attention/cpu/entries.h"
#include "attention/cpu/math.h"
#include "attention/cpu/select.h"

namespace kascade::KASCADE_ISA {
namespace {

using cpu::DecodeSplit;
using cpu::kSplitKeys;
using cpu::RowBlock;

// Rows that one pass over a split serves: the scores of a pass stay in the first two cache levels.
constexpr int kDecodeRows = 16;
// Keys whose values are multiplied before the next dims and rows are: their rows of V stay in the first-level
// cache.
constexpr int kValueKeys = 64;
// Rows of K and V are fetched this far ahead into the second-level cache, in step with the products: the
// first level tracks too few misses to cover the latency of memory. Fetches past what the second level tracks
// are dropped, so they must not come in bursts, and each row is fetched again half-way. Close by, rows that
// lie side by side are fetched into the first level; rows of a set have no misses to spare for it.
// docs/kernels/cpu_attention.md has the timings.
constexpr int64_t kFarBytes = 32 << 10;
constexpr int kMiddleRows = 48;
constexpr int64_t kNearBytes = 1 << 10;
constexpr int kMostFarRows = 192;
// So that memory does not rest while rows are located and weights are computed, some are fetched beyond that
// distance then: so many for each step, up to so many in all. Keys are located so many in a step.
constexpr int kLocatedKeys = 64;
constexpr int kRowsPerStep = 4;
constexpr int kSpareRows = 64;
// Entries past the rows of a split.
constexpr int kNextRows = kMostFarRows + kSpareRows + 2 * kLanes;
constexpr float kLn2 = 0.69314718056f;
constexpr float kLeastKeptSum = 0x1p-64f;

HWY_INLINE int64_t padded_dim(int64_t head_dim) { return round_up(head_dim, 32); }

struct Scratch {
  const char** rows;        // [2 * kSplitKeys + kNextRows] in the order of reading: K, V, what is next
  int32_t* positions;       // [kSplitKeys]
  float* scores;            // [kDecodeRows, kSplitKeys]
  uint32_t* probabilities;  // [kDecodeRows, kSplitKeys / 2] when they are rounded
  char* queries;            // [kDecodeRows, padded dim] words, or blocks of four rows (query_blocks)
  int32_t* list;
  float* weights;  // [keys]
  uint32_t* select;
  size_t bytes;

  HWY_INLINE Scratch(int64_t head_dim, int64_t list_size, int64_t key_count, char* base) {
    Carver carver(base);
    rows = carver.take<const char*>(2 * kSplitKeys + kNextRows);
    positions = carver.take<int32_t>(kSplitKeys + kLanes);
    scores = carver.take<float>(kDecodeRows * kSplitKeys);
    probabilities = carver.take<uint32_t>(kDecodeRows * kSplitKeys / 2);
    queries = carver.take<char>(kDecodeRows * padded_dim(head_dim) * static_cast<int64_t>(sizeof(float)));
    list = carver.take<int32_t>(list_size);
    weights = carver.take<float>(key_count > 0 ? round_up(key_count, kSplitKeys) : 0);
    select = carver.take<uint32_t>(key_count > 0 ? select_scratch(key_count) : 0);
    bytes = carver.bytes();
  }
};

/// Lines of a row, into the second-level cache (Locality 2) or into every level (3).
template <int Locality>
HWY_INLINE void fetch(const char* row, int64_t bytes) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, Locality);
}

template <class M>
class Split {
  using Word = typename M::Word;
  using Stored = typename M::Stored;

 public:
  Split(const DecodeSplit& split, const Scratch& scratch)
      : d_(split),
        s_(scratch),
        head_dim_(split.rows.head_dim),
        row_bytes_(split.rows.head_dim * static_cast<int64_t>(sizeof(Stored))),
        out_stride_(padded_dim(split.rows.head_dim)),
        far_rows_(rows_in(kFarBytes, kMostFarRows)),
        middle_rows_(far_rows_ < kMiddleRows ? far_rows_ : kMiddleRows),
        near_rows_(rows_in(kNearBytes, kLanes)),
        fetches_near_(split.keys.list == nullptr) {}

  void run() {
    if (!load_rows(true, d_.values)) return;
    for (int row = 0; row < d_.rows.rows(); row += kDecodeRows) {
      const int count = d_.rows.rows() - row < kDecodeRows ? d_.rows.rows() - row : kDecodeRows;
      load_queries(row, count);
      multiply_keys(row, count);
      for (int r = 0; r < count; ++r) {
        if (row == 0) fetch_spare(count_, kRowsPerStep);
        weigh(row + r, s_.scores + r * kSplitKeys, r);
      }
      if (d_.values) multiply_values(row, count);
    }
    leave(d_.values ? values_ + count_ : values_);
  }

  void run_kept(const cpu::DecodeKept& kept) {
    if (!load_rows(false, true)) return;
    const int rows = d_.rows.rows();
    for (int row = 0; row < rows; row += kDecodeRows) {
      const int count = rows - row < kDecodeRows ? rows - row : kDecodeRows;
      for (int r = 0; r < count; ++r) {
        float* p = s_.scores + r * kSplitKeys;
        const float* source = kept.split.kept + (row + r) * kept.split.kept_stride;
        for (int i = 0; i < count_; ++i) {
          const int64_t position = s_.positions[i];
          p[i] = source[position] * kept.factors[position / kSplitKeys * rows + row + r];
        }
        d_.maximum[row + r] = kept.row_maximum[row + r];
        if (row == 0) fetch_spare(0, kRowsPerStep);
        finish_row(row + r, p, count_, r);
      }
      multiply_values(row, count);
    }
    leave(values_ + count_);
  }

 private:
  /// Rows that `bytes` bytes are.
  int rows_in(int64_t bytes, int most) const {
    const int64_t rows = bytes / row_bytes_;
    return rows < 1 ? 1 : rows > most ? most : static_cast<int>(rows);
  }

  /// Addresses of the split's rows; an empty split gets maxima of -inf.
  bool load_rows(bool with_keys, bool with_values) {
    cpu::KeySource keys = d_.keys;
    if (keys.list != nullptr && with_keys && !d_.list_is_good) {
      keys.list = checked_list(keys.list, &keys.list_count, static_cast<int32_t>(keys.own_begin), s_.list);
    }
    const int64_t left = keys.size() - d_.begin;
    count_ = static_cast<int>(left < d_.count ? left : d_.count);
    if (count_ <= 0) {
      for (int r = 0; r < d_.rows.rows(); ++r) {
        d_.maximum[r] = kMinusInfinity;
        d_.sum[r] = 0;
        if (d_.values) clear_out(r);
      }
      return false;
    }
    values_ = s_.rows + (with_keys ? count_ : 0);
    fetched_ = d_.fetched;
    for (int i = 0; i < count_; i += kLocatedKeys) {
      const int size = count_ - i < kLocatedKeys ? count_ - i : kLocatedKeys;
      locate(d_.cache, keys, d_.begin + i, size, s_.positions + i, with_keys ? s_.rows + i : nullptr,
             with_values ? values_ + i : nullptr);
      // The rows of K (of V where there are none) are the first to be read.
      const int known = i + size - fetched_;
      fetch_spare(0, known < kRowsPerStep ? known : kRowsPerStep);
    }
    load_next_rows(with_values ? values_ + count_ : values_, with_keys, keys);
    return true;
  }

  /// Positions and rows of keys; what is null is not wanted.
  static void locate(const cpu::CacheView& cache, const cpu::KeySource& keys, int64_t begin, int count,
                     int32_t* positions, const char** key_rows, const char** value_rows) {
    const bool alike =
        cache.k_page_stride == cache.v_page_stride && cache.k_token_stride == cache.v_token_stride;
    if (alike && positions != nullptr && value_rows != nullptr) {
      const int64_t distance = cache.v - cache.k;
      const char** const first = key_rows != nullptr ? key_rows : value_rows;
      for_each_key(cache, keys, begin, count, [&](int i, int64_t position, const char* k, const char*) {
        positions[i] = static_cast<int32_t>(position);
        first[i] = k;
        value_rows[i] = k + distance;
      });
      return;
    }
    for_each_key(cache, keys, begin, count, [&](int i, int64_t position, const char* k, const char* v) {
      if (positions != nullptr) positions[i] = static_cast<int32_t>(position);
      if (key_rows != nullptr) key_rows[i] = k;
      if (value_rows != nullptr) value_rows[i] = v;
    });
  }

  /// Past the split's rows come the first ones of the next piece, for the fetches alone, and stand-ins.
  void load_next_rows(const char** end, bool with_keys, const cpu::KeySource& keys) {
    const char* last = end[-1];
    next_rows_ = 0;
    if (d_.next != nullptr) {
      const cpu::KeySource& next = d_.next->keys;
      const int64_t begin = d_.next->begin;
      bool good = true;
      if (next.list != nullptr && with_keys) {
        // Empty sets of any sequences share one list, so the list alone does not say which keys follow.
        const bool same = next.list == d_.keys.list && next.list_count == d_.keys.list_count &&
                          next.own_begin == d_.keys.own_begin;
        good = same ? keys.list == d_.keys.list : is_ascending(next.list, next.list_count, next.own_begin);
      }
      d_.next->list_is_good = good;
      const int64_t left = next.size() - begin;
      if (good && left > 0) {
        const int most = far_rows_ + kSpareRows;
        next_rows_ = static_cast<int>(left < most ? left : most);
        locate(d_.next->cache, next, begin, next_rows_, nullptr, with_keys ? end : nullptr,
               with_keys ? nullptr : end);
      }
    }
    for (int i = next_rows_; i < far_rows_ + kSpareRows + 2 * kLanes; ++i) end[i] = last;
  }

  /// Tells the next piece how many of its rows were fetched.
  void leave(const char* const* end) const {
    if (d_.next == nullptr) return;
    const int ahead = fetched_ - static_cast<int>(end - s_.rows);
    d_.next->fetched = ahead < 0 ? 0 : ahead < next_rows_ ? ahead : next_rows_;
  }

  /// Fetches up to `rows` rows beyond the usual distance from row `done`, where there is time to.
  void fetch_spare(int done, int rows) {
    const int room = done + far_rows_ + kSpareRows - fetched_;
    fetch_far(room < rows ? room : rows);
  }

  template <int Dims = 0>
  HWY_INLINE int64_t row_bytes() const {
    return Dims > 0 ? Dims * static_cast<int64_t>(sizeof(Stored)) : row_bytes_;
  }

  template <int Dims = 0>
  HWY_INLINE void fetch_far(int rows) {
    for (int i = 0; i < rows; ++i) fetch<2>(s_.rows[fetched_++], row_bytes<Dims>());
  }

  const float* query_row(int r) const {
    const RowBlock& b = d_.rows;
    return b.q + r % b.tokens * b.q_token_stride + r / b.tokens * b.q_head_stride;
  }

  Word* query(int r) const {
    return reinterpret_cast<Word*>(s_.queries) + r * padded_dim(head_dim_) / M::kPair;
  }

  /// Where rows r..r + 3 (r a multiple of 4) have their queries rounded and side by side: 8 dims of each.
  Word* query_blocks(int r) const { return query(r); }

  void load_queries(int first, int count) {
    if constexpr (M::kPair == 1) {
      for (int r = 0; r < count; ++r) {
        const float* row = query_row(first + r);
        for (int c = 0; c < head_dim_; c += kLanes) store(load_first(row + c, head_dim_ - c), query(r) + c);
      }
    } else {
      load_query_blocks(first, count);
    }
  }

  /// Rows that are missing in the last block are zeros.
  void load_query_blocks(int first, int count) {
    alignas(64) Word words[kLanes];
    for (int r = 0; r < round_up(count, 4); ++r) {
      Word* blocks = query_blocks(r / 4 * 4) + r % 4 * 4;
      for (int c = 0; c < head_dim_; c += M::kLoad) {
        if (r < count) {
          const float* row = query_row(first + r) + c;
          store(round_to_bfloat(load_first(row, head_dim_ - c),
                                load_first(row + kLanes, head_dim_ - c - kLanes)),
                words);
        } else {
          store(broadcast(0u), words);
        }
        for (int block = 0; block < 4; ++block)
          __builtin_memcpy(blocks + (c / 2 + block * 4) * 4, words + block * 4, 4 * sizeof(Word));
      }
    }
  }

  // ---- Scores.

  void multiply_keys(int first, int rows) {
    // The head dims that matter most have their loops unrolled.
    switch (head_dim_) {
      case 64:
        multiply_keys_of<64>(first, rows);
        break;
      case 128:
        multiply_keys_of<128>(first, rows);
        break;
      default:
        multiply_keys_of<0>(first, rows);
    }
  }

  template <int Dims>
  void multiply_keys_of(int first, int rows) {
    for (int j = 0; j < count_; j += kLanes) {
      // Past the last key come other rows: their scores are masked.
      int r = 0;
      const auto fetches = [&] { return first == 0 && r == 0; };
      if constexpr (M::kPair == 2) {
        for (; r < rows; r += 4) score_blocks<Dims>(r, j, fetches());
      } else if constexpr (kLanes >= 4) {
        for (; r + 4 <= rows; r += 4) score_keys<4, 4, Dims>(r, j, fetches());
        if (rows - r == 3) {
          score_keys<3, 4, Dims>(r, j, fetches());
          r += 3;
        }
        if (rows - r == 2) {
          score_keys<2, 2, Dims>(r, j, fetches());
          r += 2;
        }
      }
      for (; r < rows; ++r) score_keys<1, 1, Dims>(r, j, fetches());
    }
    const int missing = count_ + far_rows_ - fetched_;
    if (first == 0 && missing > 0) fetch_far(missing);
  }

  /// Fetches for the time in which rows [row, row + count) are multiplied: twice as many until they are far
  /// enough ahead, and fewer while they are farther.
  template <int Dims>
  HWY_INLINE void fetch_keys(int row, int count) {
    const int ahead = fetched_ - row;
    fetch_far<Dims>(ahead < far_rows_ ? 2 * count : ahead > far_rows_ && row % 8 == 0 ? count - 1 : count);
    for (int i = 0; i < count; ++i) fetch<2>(s_.rows[row + middle_rows_ + i], row_bytes<Dims>());
    if (!fetches_near_) return;
    for (int i = 0; i < count; ++i) fetch<3>(s_.rows[row + near_rows_ + i], row_bytes<Dims>());
  }

  /// Scores of Rows rows from slot `first` with kLanes keys from j; Slots (Rows rounded up to a power of two)
  /// rows and kLanes / Slots keys share one sum across lanes.
  template <int Rows, int Slots, int Dims>
  HWY_INLINE void score_keys(int first, int j, bool fetches) {
    constexpr int kKeys = kLanes / Slots;
    const Word* queries[Rows];
    for (int m = 0; m < Rows; ++m) queries[m] = query(first + m);
    const int dims = Dims > 0 ? Dims : head_dim_;
    for (int step = 0; step < Slots; ++step) {
      const char* const* keys = s_.rows + j + step * kKeys;
      if (fetches) fetch_keys<Dims>(j + step * kKeys, kKeys);
      VecF acc[kLanes];
      for (int i = 0; i < kLanes; ++i) acc[i] = zero();
      const int whole = dims / M::kLoad * M::kLoad;
      for (int c = 0; c < whole; c += M::kLoad) multiply_dims<Rows, kKeys>(queries, keys, c, M::kLoad, acc);
      if (whole < dims) multiply_dims<Rows, kKeys>(queries, keys, whole, dims - whole, acc);
      alignas(64) float sums[kLanes];
      store(sums_of(acc), sums);
      for (int m = 0; m < Rows; ++m)
        __builtin_memcpy(s_.scores + (first + m) * kSplitKeys + j + step * kKeys, sums + m * kKeys,
                         kKeys * sizeof(float));
    }
  }

  /// Scores of the rows first..first + 3 with kLanes keys from j. A block of a vector holds a row: 8 dims of
  /// a key are broadcast to all blocks, and sums across lanes stay within blocks.
  template <int Dims>
  HWY_INLINE void score_blocks(int first, int j, bool fetches) {
    constexpr int kKeys = 4;
    constexpr int kChunks = Dims / 8;
    const Word* words = query_blocks(first);
    VecU queries[kChunks > 0 ? kChunks : 1];
    for (int i = 0; i < kChunks; ++i) queries[i] = load(words + i * kLanes);
    for (int step = j; step < j + kLanes; step += kKeys) {
      const char* const* keys = s_.rows + step;
      // Even and odd chunks, for the latency of the products.
      VecF acc[2][kKeys];
      for (int k = 0; k < kKeys; ++k) acc[0][k] = acc[1][k] = zero();
      const auto add = [&](int i, VecU query) {
        for (int k = 0; k < kKeys; ++k)
          acc[i % 2][k] = dot_pairs(acc[i % 2][k], query, broadcast_block(keys[k] + i * 16));
      };
      if constexpr (kChunks > 0) {
        // Rows are fetched one at a time, between the products.
#pragma GCC unroll 16
        for (int i = 0; i < kChunks; ++i) {
          if (fetches && i % (kChunks / kKeys) == 0) fetch_keys<Dims>(step + i / (kChunks / kKeys), 1);
          add(i, queries[i]);
        }
      } else {
        if (fetches) fetch_keys<Dims>(step, kKeys);
        for (int i = 0; i < head_dim_ / 8; ++i) add(i, load(words + i * kLanes));
      }
      float* scores[4];
      for (int m = 0; m < 4; ++m) scores[m] = s_.scores + (first + m) * kSplitKeys + step;
      for (int k = 0; k < kKeys; ++k) acc[0][k] = hn::Add(acc[0][k], acc[1][k]);
      store_blocks(block_sums_of(acc[0]), scores);
    }
  }

  template <int Rows, int Keys>
  static HWY_INLINE void multiply_dims(const Word* const* queries, const char* const* keys, int c, int count,
                                       VecF* acc) {
    typename M::Vec key[Keys];
    for (int k = 0; k < Keys; ++k) key[k] = M::load_row(reinterpret_cast<const Stored*>(keys[k]) + c, count);
    for (int m = 0; m < Rows; ++m) {
      const auto query = load(queries[m] + c / M::kPair);
      for (int k = 0; k < Keys; ++k) acc[m * Keys + k] = M::multiply_add(acc[m * Keys + k], query, key[k]);
    }
  }

  // ---- Softmax.

  /// Keys of the split that a row may see: its first ones, as positions ascend.
  int visible(int r) const {
    const int64_t last = d_.rows.first_position + r % d_.rows.tokens;
    int n = count_;
    while (n > 0 && s_.positions[n - 1] > last) --n;
    return n;
  }

  void weigh(int row, float* scores, int slot) {
    const int n = visible(row);
    const VecF scale = broadcast(d_.rows.score_scale);
    for (int i = n; i < count_ + kLanes && i < kSplitKeys; ++i) scores[i] = kMinusInfinity;
    VecF largest = broadcast(kMinusInfinity);
    for (int i = 0; i < n; i += kLanes) largest = hn::Max(largest, load(scores + i));
    const float maximum = max_of(hn::Mul(largest, scale));
    d_.maximum[row] = n > 0 ? maximum : kMinusInfinity;
    const VecF reference = broadcast(n > 0 && maximum != kMinusInfinity ? maximum : 0.0f);
    for (int i = 0; i < count_; i += kLanes)
      store(exp2_nonpositive(hn::MulSub(load(scores + i), scale, reference)), scores + i);
    if (d_.kept != nullptr) {
      float* kept = d_.kept + row * d_.kept_stride + d_.begin;
      for (int i = 0; i < count_; i += kLanes) store(load(scores + i), kept + i);
    }
    finish_row(row, scores, count_, slot);
  }

  /// Sums a row's probabilities and rounds them as the products need.
  void finish_row(int row, float* p, int count, [[maybe_unused]] int slot) {
    for (int i = count; i < round_up(count, 2 * kLanes); ++i) p[i] = 0;
    VecF sum = zero();
    for (int i = 0; i < count; i += kLanes) sum = hn::Add(sum, load(p + i));
    d_.sum[row] = sum_of(sum);
    if constexpr (M::kPair == 2) {
      uint32_t* rounded = s_.probabilities + slot * (kSplitKeys / 2);
      for (int i = 0; i < count; i += 2 * kLanes)
        store(round_to_bfloat(load(p + i), load(p + i + kLanes)), rounded + i / 2);
    }
  }

  // ---- Values.

  void clear_out(int row) {
    for (int64_t c = 0; c < out_stride_; c += kLanes) store(zero(), d_.partial + row * out_stride_ + c);
  }

  const Word* probability_row(int slot) const {
    if constexpr (M::kPair == 2) {
      return s_.probabilities + slot * (kSplitKeys / 2);
    } else {
      return s_.scores + slot * kSplitKeys;
    }
  }

  void multiply_values(int first, int rows) {
    for (int r = 0; r < rows; ++r) clear_out(first + r);
    constexpr int kWide = (kLanes == 16 ? 4 : 2) * kLanes;
    for (int begin = 0; begin < count_; begin += kValueKeys) {
      const int end = begin + kValueKeys < count_ ? begin + kValueKeys : count_;
      for (int c = 0; c < head_dim_;) {
        const int left = head_dim_ - c;
        int width = kWide;
        if (left >= kWide) {
          value_rows<kWide, true>(first, rows, begin, end, c, kWide);
        } else if (left >= M::kLoad) {
          width = M::kLoad;
          value_rows<M::kLoad, true>(first, rows, begin, end, c, M::kLoad);
        } else {
          width = left;
          value_rows<M::kLoad, false>(first, rows, begin, end, c, left);
        }
        c += width;
      }
    }
    if (first == 0) fetched_ += count_;
  }

  template <int Width, bool Whole>
  void value_rows(int first, int rows, int begin, int end, int c, int dims) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) value_block<4, Width, Whole>(first, r, begin, end, c, dims);
    switch (rows - r) {
      case 3:
        return value_block<3, Width, Whole>(first, r, begin, end, c, dims);
      case 2:
        return value_block<2, Width, Whole>(first, r, begin, end, c, dims);
      case 1:
        return value_block<1, Width, Whole>(first, r, begin, end, c, dims);
      default:
        return;
    }
  }

  /// Adds keys [begin, end) times dims [c, c + Width) for Rows rows from slot r on.
  template <int Rows, int Width, bool Whole>
  HWY_NOINLINE void value_block(int first, int r, int begin, int end, int c, int dims) {
    constexpr int kVectors = (Width + kLanes - 1) / kLanes;
    float* out = d_.partial + (first + r) * out_stride_ + c;
    const Word* p[Rows];
    for (int m = 0; m < Rows; ++m) p[m] = probability_row(r + m);
    VecF acc[Rows][kVectors];
    for (int m = 0; m < Rows; ++m)
      for (int v = 0; v < kVectors; ++v) acc[m][v] = load(out + m * out_stride_ + v * kLanes);
    // The first rows to come by fetch for all, each of their passes the dims that it multiplies.
    const bool fetches = first == 0 && r == 0;
    const int ahead = fetched_ - static_cast<int>(values_ - s_.rows);
    constexpr int64_t kPassBytes = Width * static_cast<int64_t>(sizeof(Stored));
    const int64_t offset = c * static_cast<int64_t>(sizeof(Stored));
    for (int j = begin; j < end; j += M::kPair) {
      if (fetches) {
        for (int i = j; i < j + M::kPair; ++i) {
          fetch<2>(values_[i + ahead] + offset, kPassBytes);
          fetch<2>(values_[i + middle_rows_] + offset, kPassBytes);
          if (fetches_near_) fetch<3>(values_[i + near_rows_] + offset, kPassBytes);
        }
      }
      typename M::Vec value[kVectors];
      if constexpr (M::kPair == 2) {
        const auto* even = reinterpret_cast<const Stored*>(values_[j]) + c;
        const auto* odd = reinterpret_cast<const Stored*>(values_[j + 1 < end ? j + 1 : j]) + c;
        for (int v = 0; v < kVectors; v += 2) {
          const int count = Whole ? M::kLoad : dims;
          interleave_rows(load_pairs(even + v * kLanes, count), load_pairs(odd + v * kLanes, count),
                          &value[v], &value[v + 1]);
        }
      } else {
        const auto* row = reinterpret_cast<const Stored*>(values_[j]) + c;
        for (int v = 0; v < kVectors; ++v) value[v] = load_as_float(row + v * kLanes, Whole ? kLanes : dims);
      }
      for (int m = 0; m < Rows; ++m) {
        const auto probability = broadcast(p[m][j / M::kPair]);
        for (int v = 0; v < kVectors; ++v) acc[m][v] = M::multiply_add(acc[m][v], probability, value[v]);
      }
    }
    for (int m = 0; m < Rows; ++m)
      for (int v = 0; v < kVectors; ++v) store(acc[m][v], out + m * out_stride_ + v * kLanes);
  }

  const DecodeSplit& d_;
  const Scratch& s_;
  const int head_dim_;
  const int64_t row_bytes_;
  const int64_t out_stride_;
  const int far_rows_, middle_rows_, near_rows_;  // how far ahead rows are fetched
  const bool fetches_near_;
  const char** values_ = nullptr;  // the rows of V among s_.rows
  int count_ = 0;
  int fetched_ = 0;    // of s_.rows
  int next_rows_ = 0;  // of the next piece, known here
};

/// 2^x of one number, with the same bits as a vector's.
float exp2_one(float x) { return hn::GetLane(exp2_nonpositive(broadcast(x))); }

/// Takes maxima to the largest of their row; returns it and, in *total, the row's sum.
float finish_row(float* maximum, const float* sum, int64_t splits, int64_t stride, float* total) {
  float largest = kMinusInfinity;
  bool number = true;
  for (int64_t s = 0; s < splits; ++s) {
    const float m = maximum[s * stride];
    if (m > largest) largest = m;
    number &= m == m;
  }
  // Rows without keys, and rows that are lost to NaN.
  const float reference = !number ? __builtin_nanf("") : largest == kMinusInfinity ? 0.0f : largest;
  *total = 0;
  for (int64_t s = 0; s < splits; ++s) {
    maximum[s * stride] = exp2_one(maximum[s * stride] - reference);
    *total += sum[s * stride] * maximum[s * stride];
  }
  return largest;
}

}  // namespace

int64_t padded_head_dim(int64_t head_dim) { return padded_dim(head_dim); }

size_t decode_scratch_bytes(int64_t head_dim, int64_t list, int64_t keys) {
  return Scratch(head_dim, list, keys, nullptr).bytes;
}

void decode_split(const cpu::DecodeSplit& split) {
  const Scratch scratch(split.rows.head_dim, split.list_size, 0, split.scratch);
  with_math(split.cache.stored, [&](auto math) { Split<decltype(math)>(split, scratch).run(); });
}

void decode_kept(const cpu::DecodeKept& kept) {
  const Scratch scratch(kept.split.rows.head_dim, 0, 0, kept.split.scratch);
  with_math(kept.split.cache.stored,
            [&](auto math) { Split<decltype(math)>(kept.split, scratch).run_kept(kept); });
}

bool decode_merge(const cpu::DecodeMerge& merge, bool kept) {
  const RowBlock& b = merge.rows;
  const int rows = b.rows();
  const int64_t stride = padded_dim(b.head_dim);
  bool large_enough = true;
  for (int r = 0; r < rows; ++r) {
    float sum = 0;
    const float largest = finish_row(merge.maximum + r, merge.sum + r, merge.splits, rows, &sum);
    if (merge.row_maximum != nullptr) {
      merge.row_maximum[r] = largest;
      merge.row_sum[r] = sum;
    }
    if (merge.partial == nullptr) continue;
    if (!(sum >= kLeastKeptSum)) large_enough = false;
    const int token = r % b.tokens, head = r / b.tokens;
    float* out = b.out + token * b.out_token_stride + head * b.out_head_stride;
    const VecF share = broadcast(sum == 0 ? 0.0f : b.value_scale / sum);
    for (int c = 0; c < b.head_dim; c += kLanes) {
      VecF acc = zero();
      for (int64_t s = 0; s < merge.splits; ++s)
        acc = hn::MulAdd(load(merge.partial + (s * rows + r) * stride + c),
                         broadcast(merge.maximum[s * rows + r]), acc);
      store_first(hn::Mul(acc, share), out + c, b.head_dim - c);
    }
    if (b.lse != nullptr)
      b.lse[token * b.lse_token_stride + head] =
          sum == 0 ? kMinusInfinity : largest * kLn2 + __builtin_logf(sum);
  }
  return large_enough || !kept;
}

void decode_select(const cpu::DecodeSelect& d) {
  const cpu::SetWork& set = d.set;
  const Scratch scratch(kLanes, 0, set.own_end, d.scratch);
  const bool pools = !set.covers_all() || set.pooled != nullptr || set.own_tile_mass != nullptr;
  if (pools) {
    for (int64_t s = 0; s < d.splits; ++s) {
      const int64_t begin = s * kSplitKeys;
      const int64_t end = begin + kSplitKeys < set.own_end ? begin + kSplitKeys : set.own_end;
      for (int64_t i = begin; i < end; i += kLanes) store(zero(), scratch.weights + i);
      for (int g = 0; g < d.groups; ++g) {
        for (int r = 0; r < d.rows; ++r) {
          const float sum = d.row_sum[g * d.row_group_stride + r];
          const VecF factor =
              broadcast(sum == 0 ? 0.0f : d.maximum[g * d.group_stride + s * d.rows + r] / sum);
          const float* kept = d.kept + g * d.kept_group_stride + r * d.kept_stride;
          for (int64_t i = begin; i < end; i += kLanes)
            store(hn::MulAdd(load(kept + i), factor, load(scratch.weights + i)), scratch.weights + i);
        }
      }
    }
    if (set.pooled != nullptr)
      for (int64_t j = 0; j < set.candidates; ++j) set.pooled[j] = scratch.weights[j];
    if (set.own_tile_mass != nullptr) {
      float mass = 0;
      for (int64_t j = set.candidates; j < set.own_end; ++j) mass += scratch.weights[j];
      *set.own_tile_mass = mass;
    }
  }
  select_members(set, pools ? scratch.weights : nullptr, scratch.select);
}

}  // namespace kascade::KASCADE_ISA
