// SPDX-License-Identifier: Apache-2.0
// Prefill: a tile's rows of one group against blocks of keys, as docs/kernels/cpu_attention.md explains.
// Scores are computed transposed: a lane is a query row, and a key is one word at a time broadcast straight
// from where the cache holds it, so that K is never packed, whatever its strides or page, and the softmax
// needs no sums across lanes.
#include "attention/cpu/entries.h"
#include "attention/cpu/math.h"
#include "attention/cpu/select.h"

namespace kascade::KASCADE_ISA {
namespace {

using cpu::kBlockKeys;
using cpu::KeySource;
using cpu::PrefillSizes;
using cpu::PrefillTile;
using cpu::RowBlock;

// Register blocks. AVX-512 and NEON have 32 vector registers, the rest 16.
constexpr int kMaxVectors = kLanes == 16 ? 4 : 3;
constexpr int keys_per_step(int vectors) { return kLanes == 16 ? (vectors == 4 ? 6 : 8) : 4; }
static_assert(kBlockKeys % 6 == 0 && kBlockKeys % 8 == 0 && kBlockKeys % kLanes == 0);

// Query rows are far apart, so they are fetched this many ahead.
constexpr int kQueriesAhead = 4;

constexpr float kLn2 = 0.69314718056f;
// Kept probabilities of a set that sum to less, relative to the row's largest, are computed afresh.
constexpr float kLeastKeptSum = 0x1p-64f;
// Probabilities of one tile are kept for its own sparse pass while they fit; past that only those of one pass
// are, for pooling. A constant, so that the bits of a tile do not depend on the stated maxima.
constexpr int64_t kKeptWords = int64_t{16} << 20;
constexpr bool keeps_tile(int64_t words) { return words <= kKeptWords; }

/// Rows of a group, padded in each of its passes.
constexpr int64_t padded_rows(int64_t rows) {
  return rows / cpu::kPassRows * cpu::kPassRows + round_up(rows % cpu::kPassRows, kLanes);
}

/// Where a block's keys are.
struct BlockKeys {
  const char** key_rows;    // [kBlockKeys]
  const char** value_rows;  // [kBlockKeys]
  int32_t* positions;       // [kBlockKeys]
};

template <class Word>
struct Scratch {
  float* out;                    // [pass rows, padded dim]
  float* scores;                 // [kBlockKeys, rows of a lane group]
  Word* queries;                 // per lane group [words of a row, rows of the group]
  Word* probabilities;           // [words of a block, pass rows]
  Word* values;                  // [words of a block, padded dim]
  float* keys;                   // [kBlockKeys, head dim] when K is converted
  float* maximum;                // [pass rows] to the base 2
  float* sum;                    // [pass rows]
  float* correction;             // [pass rows]
  int32_t* row_position;         // [pass rows]
  const void** multiplied_rows;  // [kBlockKeys] rows of K as words: in the cache or converted
  BlockKeys block[2];            // the block at hand and the next one, which is fetched meanwhile
  int32_t* list;
  float* factors;  // per pass [blocks + 1, rows]
  float* weights;  // [keys]
  uint32_t* select;
  Word* kept;
  size_t bytes;

  HWY_INLINE Scratch(const PrefillSizes& sizes, int pair, char* base) {
    Carver carver(base);
    const int64_t rows = padded_rows(sizes.rows < cpu::kPassRows ? sizes.rows : cpu::kPassRows);
    const int64_t tile_rows = sizes.groups * padded_rows(sizes.rows);
    const int64_t dim = round_up(sizes.head_dim, 32);
    const int64_t blocks = (sizes.keys + kBlockKeys - 1) / kBlockKeys;
    const int64_t row_words = blocks * (kBlockKeys / pair);
    // What is not kept for the whole tile is kept for one pass; shorter tiles may still be kept whole.
    int64_t kept_words = tile_rows * row_words;
    if (!keeps_tile(kept_words)) kept_words = rows * row_words > kKeptWords ? rows * row_words : kKeptWords;
    out = carver.take<float>(rows * dim);
    scores = carver.take<float>(kBlockKeys * kMaxVectors * kLanes);
    queries = carver.take<Word>(rows * (sizes.head_dim / pair));
    probabilities = carver.take<Word>(rows * (kBlockKeys / pair));
    values = carver.take<Word>(dim * (kBlockKeys / pair));
    keys = carver.take<float>(kBlockKeys * sizes.head_dim);
    maximum = carver.take<float>(rows);
    sum = carver.take<float>(rows);
    correction = carver.take<float>(rows);
    row_position = carver.take<int32_t>(rows);
    multiplied_rows = carver.take<const void*>(kBlockKeys);
    for (BlockKeys& keys_of_block : block) {
      keys_of_block.key_rows = carver.take<const char*>(kBlockKeys);
      keys_of_block.value_rows = carver.take<const char*>(kBlockKeys);
      keys_of_block.positions = carver.take<int32_t>(kBlockKeys);
    }
    list = carver.take<int32_t>(sizes.list);
    factors = carver.take<float>(sizes.keys > 0 ? (blocks + 1) * tile_rows : 0);
    weights = carver.take<float>(blocks * kBlockKeys);
    select = carver.take<uint32_t>(sizes.keys > 0 ? select_scratch(sizes.keys) : 0);
    kept = carver.take<Word>(kept_words);
    bytes = carver.bytes();
  }
};

/// The rows [begin, begin + rows) of a group that share one pass, in lanes.
struct Pass {
  RowBlock block;
  int begin = 0, rows = 0, padded_rows = 0;
};

/// s[m][v] = keys m against the rows of v; maximum[v] follows.
template <class M, int Keys, int Vectors>
HWY_INLINE void score_block(const void* const* rows, const typename M::Word* queries, int words,
                            float* scores, VecF* maximum) {
  VecF acc[Keys][Vectors];
  for (int m = 0; m < Keys; ++m)
    for (int v = 0; v < Vectors; ++v) acc[m][v] = zero();
  const void* row[Keys];
  for (int m = 0; m < Keys; ++m) row[m] = rows[m];
  for (int i = 0; i < words; ++i) {
    typename M::Vec query[Vectors];
    for (int v = 0; v < Vectors; ++v) query[v] = load(queries + (i * Vectors + v) * kLanes);
    for (int m = 0; m < Keys; ++m) {
      const auto key = broadcast(word_at<typename M::Word>(row[m], i));
      for (int v = 0; v < Vectors; ++v) acc[m][v] = M::multiply_add(acc[m][v], key, query[v]);
    }
  }
  for (int m = 0; m < Keys; ++m) {
    for (int v = 0; v < Vectors; ++v) {
      store(acc[m][v], scores + (m * Vectors + v) * kLanes);
      maximum[v] = hn::Max(maximum[v], acc[m][v]);
    }
  }
}

/// out[m][v] = out[m][v] * correction[m] + sum over the words of a block of probabilities[word][m] *
/// values[word][v].
template <class M, int Rows, int Vectors>
HWY_INLINE void value_block(const typename M::Word* probabilities, int64_t probability_stride,
                            const typename M::Word* values, int64_t value_stride, int words,
                            const float* correction, float* out, int64_t out_stride) {
  VecF acc[Rows][Vectors];
  for (int m = 0; m < Rows; ++m)
    for (int v = 0; v < Vectors; ++v) acc[m][v] = load(out + m * out_stride + v * kLanes);
  if (correction != nullptr) {
    for (int m = 0; m < Rows; ++m)
      for (int v = 0; v < Vectors; ++v) acc[m][v] = hn::Mul(acc[m][v], broadcast(correction[m]));
  }
  for (int i = 0; i < words; ++i) {
    typename M::Vec value[Vectors];
    for (int v = 0; v < Vectors; ++v) value[v] = load(values + v * kLanes);
    for (int m = 0; m < Rows; ++m) {
      const auto probability = broadcast(probabilities[m]);
      for (int v = 0; v < Vectors; ++v) acc[m][v] = M::multiply_add(acc[m][v], probability, value[v]);
    }
    probabilities += probability_stride;
    values += value_stride;
  }
  for (int m = 0; m < Rows; ++m)
    for (int v = 0; v < Vectors; ++v) store(acc[m][v], out + m * out_stride + v * kLanes);
}

template <class M>
class Tile {
  using Word = typename M::Word;
  static constexpr int kWords = kBlockKeys / M::kPair;  // of a block of keys

 public:
  Tile(const PrefillTile& tile, const PrefillSizes& sizes, char* scratch)
      : t_(tile),
        s_(sizes, M::kPair, scratch),
        words_(tile.rows.head_dim / M::kPair),
        dim_stride_(round_up(tile.rows.head_dim, 32)),
        row_bytes_(tile.rows.head_dim * static_cast<int64_t>(sizeof(typename M::Stored))) {}

  void run() {
    if (t_.selects) return run_selecting();
    for (int g = 0; g < t_.groups; ++g) {
      KeySource keys = t_.keys;
      if (keys.list != nullptr)
        keys.list = checked_list(keys.list, &keys.list_count, keys.own_begin, s_.list);
      enter_group(g);
      for_each_pass([&](const Pass& pass) { attend(pass, keys, true, nullptr, nullptr); });
    }
  }

 private:
  /// Layer 0 and anchors.
  void run_selecting() {
    const cpu::SetWork& set = t_.set;
    KeySource all;
    all.range_end = set.own_end;
    const bool dense_output = !t_.attends_to_set || set.covers_all();
    const bool pools = !set.covers_all() || set.pooled != nullptr || set.own_tile_mass != nullptr;
    const int64_t blocks = (all.range_end + kBlockKeys - 1) / kBlockKeys;
    const bool keeps_all = keeps_tile(t_.groups * padded_rows(t_.rows.rows()) * blocks * kWords);
    int64_t rows_before = 0;
    for (int g = 0; g < t_.groups; ++g) {
      enter_group(g);
      for_each_pass([&](const Pass& pass) {
        Word* kept = pools ? s_.kept + (keeps_all ? rows_before * blocks * kWords : 0) : nullptr;
        float* factors = s_.factors + rows_before * (blocks + 1);
        attend(pass, all, dense_output, kept, factors);
        if (pools) pool(pass, all.range_end, kept, factors, rows_before == 0);
        rows_before += pass.padded_rows;
      });
    }
    if (pools) hand_out_weights();
    select_members(set, s_.weights, s_.select);
    if (dense_output) return;

    KeySource chosen;
    chosen.list = set.members;
    chosen.list_count = *set.count;
    chosen.own_begin = set.candidates;
    chosen.own_end = set.own_end;
    rows_before = 0;
    for (int g = 0; g < t_.groups; ++g) {
      enter_group(g);
      for_each_pass([&](const Pass& pass) {
        const bool done = keeps_all && attend_kept(pass, chosen, s_.kept + rows_before * blocks * kWords,
                                                   s_.factors + rows_before * (blocks + 1));
        if (!done) attend(pass, chosen, true, nullptr, nullptr);
        rows_before += pass.padded_rows;
      });
    }
  }

  void enter_group(int g) {
    cache_ = t_.cache;
    cache_.k += g * t_.k_group_stride;
    cache_.v += g * t_.v_group_stride;
    block_ = t_.rows;
    block_.q += g * t_.q_group_stride;
    block_.out += g * t_.out_group_stride;
    if (block_.lse != nullptr) block_.lse += g * t_.lse_group_stride;
  }

  template <class Visit>
  void for_each_pass(const Visit& visit) {
    const int rows = block_.rows();
    for (int begin = 0; begin < rows; begin += cpu::kPassRows) {
      Pass pass;
      pass.block = block_;
      pass.begin = begin;
      pass.rows = rows - begin < cpu::kPassRows ? rows - begin : cpu::kPassRows;
      pass.padded_rows = static_cast<int>(round_up(pass.rows, kLanes));
      visit(pass);
    }
  }

  /// Calls f(first lane, vectors) for lane groups of about equal size.
  template <class F>
  static HWY_INLINE void for_each_lane_group(const Pass& pass, const F& f) {
    const int vectors = pass.padded_rows / kLanes;
    const int groups = (vectors + kMaxVectors - 1) / kMaxVectors;
    int first = 0;
    for (int i = 0; i < groups; ++i) {
      const int count = vectors / groups + (i < vectors % groups ? 1 : 0);
      f(first * kLanes, count);
      first += count;
    }
  }

  // ---- Attention over a source, block by block. kept: the probabilities stay there, relative to the maximum
  // so far, which goes to factors; both are for [blocks of the source] x [rows of the pass]. In the end
  // factors [blocks + 1, rows] holds what takes a block's probabilities to the row's maximum, and last the
  // maxima.
  void attend(const Pass& pass, const KeySource& keys, bool with_values, Word* kept, float* factors) {
    load_queries(pass);
    for (int r = 0; r < pass.padded_rows; ++r) {
      s_.maximum[r] = kMinusInfinity;
      s_.sum[r] = 0;
    }
    if (with_values) clear_out(pass);
    const int64_t total = keys.size();
    locate_first(keys);
    for (int64_t begin = 0, block = 0; begin < total; begin += kBlockKeys, ++block) {
      const int count = locate_next(keys, begin);
      load_keys(count);
      if (with_values) load_values(count);
      const bool masked = count < kBlockKeys || now_->positions[count - 1] > pass.block.first_position;
      Word* probabilities = kept != nullptr ? kept + block * kWords * pass.padded_rows : s_.probabilities;
      bool corrected = false;
      for_each_lane_group(pass, [&](int lane, int vectors) {
        switch (vectors) {
          case 1:
            corrected = weigh<1>(pass, lane, count, masked, probabilities);
            break;
          case 2:
            corrected = weigh<2>(pass, lane, count, masked, probabilities);
            break;
          case 3:
            corrected = weigh<3>(pass, lane, count, masked, probabilities);
            break;
          default:
            corrected = weigh<kMaxVectors>(pass, lane, count, masked, probabilities);
        }
        if (with_values)
          multiply_values(pass, lane, vectors * kLanes, count, probabilities,
                          corrected ? s_.correction : nullptr);
      });
      if (kept != nullptr)
        for (int r = 0; r < pass.padded_rows; ++r) factors[block * pass.padded_rows + r] = s_.maximum[r];
    }
    if (kept != nullptr) finish_factors(pass, (total + kBlockKeys - 1) / kBlockKeys, factors);
    if (with_values) store_out(pass);
  }

  /// Scores of a block for one lane group, its softmax and its probabilities. Returns whether any maximum
  /// moved.
  template <int Vectors>
  HWY_NOINLINE bool weigh(const Pass& pass, int lane, int count, bool masked, Word* probabilities) {
    constexpr int kKeys = keys_per_step(Vectors);
    VecF largest[Vectors];
    for (int v = 0; v < Vectors; ++v) largest[v] = broadcast(kMinusInfinity);
    const Word* queries = s_.queries + lane * words_;
    for (int j = 0; j < count; j += kKeys) {
      if (lane == 0) fetch_next(j, kKeys);
      score_block<M, kKeys, Vectors>(s_.multiplied_rows + j, queries, words_,
                                     s_.scores + j * Vectors * kLanes, largest);
    }
    if (masked) mask<Vectors>(lane, static_cast<int>(round_up(count, 2)), count, largest);

    const VecF scale = broadcast(pass.block.score_scale);
    bool moved = false;
    for (int v = 0; v < Vectors; ++v) {
      const int row = lane + v * kLanes;
      const VecF before = load(s_.maximum + row);
      const VecF after = hn::Max(before, hn::Mul(largest[v], scale));
      // Rows that have seen no key yet: anything finite makes their probabilities 0.
      const VecF reference = hn::IfThenElse(hn::Eq(after, broadcast(kMinusInfinity)), zero(), after);
      const VecF correction = exp2_nonpositive(hn::Sub(before, reference));
      moved |= !hn::AllTrue(TagF(), hn::Eq(before, after));
      store(after, s_.maximum + row);
      store(correction, s_.correction + row);
      const VecF sum = hn::Mul(load(s_.sum + row), correction);
      store(sum_probabilities(s_.scores + v * kLanes, Vectors * kLanes, count, scale, reference, sum,
                              probabilities + row, pass.padded_rows),
            s_.sum + row);
    }
    return moved;
  }

  /// Writes exp2(score * scale - reference) of one vector of rows and returns sum plus their sum.
  static HWY_INLINE VecF sum_probabilities(const float* scores, int64_t score_stride, int count, VecF scale,
                                           VecF reference, VecF sum, Word* probabilities, int64_t stride) {
    for (int i = 0; i * M::kPair < count; ++i) {
      const VecF low = exp2_nonpositive(hn::MulSub(load(scores), scale, reference));
      sum = hn::Add(sum, low);
      if constexpr (M::kPair == 2) {
        const VecF high = exp2_nonpositive(hn::MulSub(load(scores + score_stride), scale, reference));
        sum = hn::Add(sum, high);
        store(pair_up(low, high), probabilities);
      } else {
        store(low, probabilities);
      }
      scores += M::kPair * score_stride;
      probabilities += stride;
    }
    return sum;
  }

  /// Takes out what a row may not see, and the keys past count.
  template <int Vectors>
  HWY_INLINE void mask(int lane, int padded_count, int count, VecF* largest) {
    for (int v = 0; v < Vectors; ++v) {
      const VecI row = load(s_.row_position + lane + v * kLanes);
      largest[v] = broadcast(kMinusInfinity);
      for (int j = 0; j < padded_count; ++j) {
        float* score = s_.scores + (j * Vectors + v) * kLanes;
        const VecI key = broadcast(j < count ? now_->positions[j] : INT32_MAX);
        const auto hidden = hn::RebindMask(TagF(), hn::Gt(key, row));
        const VecF visible = hn::IfThenElse(hidden, broadcast(kMinusInfinity), load(score));
        store(visible, score);
        largest[v] = hn::Max(largest[v], visible);
      }
    }
  }

  void multiply_values(const Pass& pass, int lane, int rows, int count, const Word* probabilities,
                       const float* correction) {
    const int vectors = static_cast<int>((pass.block.head_dim + kLanes - 1) / kLanes);
    const int groups = (vectors + kMaxVectors - 1) / kMaxVectors;
    const int words = (count + M::kPair - 1) / M::kPair;
    int first = 0;
    for (int i = 0; i < groups; ++i) {
      const int width = vectors / groups + (i < vectors % groups ? 1 : 0);
      const ValueArgs args = {probabilities + lane,
                              pass.padded_rows,
                              s_.values + first * kLanes,
                              dim_stride_,
                              words,
                              correction != nullptr ? correction + lane : nullptr,
                              s_.out + lane * dim_stride_ + first * kLanes,
                              rows};
      switch (width) {
        case 1:
          value_rows<1>(args);
          break;
        case 2:
          value_rows<2>(args);
          break;
        case 3:
          value_rows<3>(args);
          break;
        default:
          value_rows<kMaxVectors>(args);
      }
      first += width;
    }
  }

  struct ValueArgs {
    const Word* probabilities;
    int64_t probability_stride;
    const Word* values;
    int64_t value_stride;
    int words;
    const float* correction;
    float* out;
    int rows;
  };

  template <int Vectors>
  static HWY_NOINLINE void value_rows(const ValueArgs& a) {
    constexpr int kRows = keys_per_step(Vectors);
    int r = 0;
    const auto block = [&](auto rows_constant) {
      constexpr int kCount = decltype(rows_constant)::value;
      for (; r + kCount <= a.rows; r += kCount)
        value_block<M, kCount, Vectors>(a.probabilities + r, a.probability_stride, a.values, a.value_stride,
                                        a.words, a.correction != nullptr ? a.correction + r : nullptr,
                                        a.out + r * a.value_stride, a.value_stride);
    };
    block(Constant<kRows>());
    if (kRows > 4) block(Constant<4>());
    block(Constant<2>());
    block(Constant<1>());
  }

  template <int N>
  struct Constant {
    static constexpr int value = N;
  };

  // ---- Pooling and the sparse pass of an anchor, from what was kept.

  /// Maxima of the blocks become factors to the row's maximum.
  void finish_factors(const Pass& pass, int64_t blocks, float* factors) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int r = 0; r < pass.padded_rows; r += kLanes) {
        float* factor = factors + block * pass.padded_rows + r;
        store(exp2_nonpositive(hn::Sub(load(factor), load(s_.maximum + r))), factor);
      }
    }
    for (int r = 0; r < pass.padded_rows; ++r) factors[blocks * pass.padded_rows + r] = s_.maximum[r];
  }

  /// Adds the pass's pooled weights of the keys [0, end) to the tile's (or begins them).
  void pool(const Pass& pass, int64_t end, const Word* kept, const float* factors, bool begins) {
    float* share = s_.correction;  // 1 / sum, 0 in padding lanes
    for (int r = 0; r < pass.padded_rows; ++r) share[r] = r < pass.rows ? 1 / s_.sum[r] : 0;
    alignas(64) float scaled[cpu::kPassRows];
    for (int64_t begin = 0; begin < end; begin += kBlockKeys) {
      for (int r = 0; r < pass.padded_rows; r += kLanes) {
        store(hn::Mul(load(factors + r), load(share + r)), scaled + r);
      }
      for (int j = 0; j < kBlockKeys; j += kLanes) {
        const VecF weights = pool_keys(kept + j / M::kPair * pass.padded_rows, pass.padded_rows, scaled);
        float* out = s_.weights + begin + j;
        store(begins ? weights : hn::Add(load(out), weights), out);
      }
      kept += kWords * pass.padded_rows;
      factors += pass.padded_rows;
    }
  }

  /// Pooled weights of kLanes keys.
  static HWY_INLINE VecF pool_keys(const Word* kept, int rows, const float* factors) {
    VecF acc[kLanes];
    for (int i = 0; i < kLanes; ++i) acc[i] = zero();
    for (int r = 0; r < rows; r += kLanes) {
      const VecF factor = load(factors + r);
      if constexpr (M::kPair == 2) {
        for (int i = 0; i < kLanes / 2; ++i) {
          const VecU pair = load(kept + i * rows + r);
          acc[2 * i] = hn::MulAdd(low_halves(pair), factor, acc[2 * i]);
          acc[2 * i + 1] = hn::MulAdd(high_halves(pair), factor, acc[2 * i + 1]);
        }
      } else {
        for (int i = 0; i < kLanes; ++i) acc[i] = hn::MulAdd(load(kept + i * rows + r), factor, acc[i]);
      }
    }
    return sums_of(acc);
  }

  void hand_out_weights() {
    const cpu::SetWork& set = t_.set;
    if (set.pooled != nullptr)
      for (int64_t j = 0; j < set.candidates; ++j) set.pooled[j] = s_.weights[j];
    if (set.own_tile_mass == nullptr) return;
    float mass = 0;
    for (int64_t j = set.candidates; j < set.own_end; ++j) mass += s_.weights[j];
    *set.own_tile_mass = mass;
  }

  /// attend() from kept probabilities; false when some row's are too small to be divided by their sum.
  bool attend_kept(const Pass& pass, const KeySource& keys, const Word* kept, const float* factors) {
    for (int r = 0; r < pass.padded_rows; ++r) s_.sum[r] = 0;
    clear_out(pass);
    const int64_t total = keys.size();
    locate_first(keys);
    for (int64_t begin = 0; begin < total; begin += kBlockKeys) {
      const int count = locate_next(keys, begin);
      for (int j = 0; j < next_count_; ++j) fetch(next_->value_rows[j]);
      load_values(count);
      for (int r = 0; r < pass.padded_rows; r += kLanes) gather_kept(pass, r, count, kept, factors);
      for_each_lane_group(pass, [&](int lane, int vectors) {
        multiply_values(pass, lane, vectors * kLanes, count, s_.probabilities, nullptr);
      });
    }
    for (int r = 0; r < pass.rows; ++r)
      if (!(s_.sum[r] >= kLeastKeptSum)) return false;
    const int64_t blocks = (keys.own_end + kBlockKeys - 1) / kBlockKeys;
    for (int r = 0; r < pass.rows; ++r) s_.maximum[r] = factors[blocks * pass.padded_rows + r];
    store_out(pass);
    return true;
  }

  /// Probabilities of one vector of rows for the block's keys, relative to the row's maximum.
  HWY_INLINE void gather_kept(const Pass& pass, int row, int count, const Word* kept, const float* factors) {
    const int64_t rows = pass.padded_rows;
    VecF sum = load(s_.sum + row);
    Word* out = s_.probabilities + row;
    const auto one = [&](int j) {
      const int64_t position = now_->positions[j];
      const VecF factor = load(factors + position / kBlockKeys * rows + row);
      const auto word = load(kept + position / M::kPair * rows + row);
      if constexpr (M::kPair == 2) {
        return hn::Mul(position % 2 == 0 ? low_halves(word) : high_halves(word), factor);
      } else {
        return hn::Mul(word, factor);
      }
    };
    for (int j = 0; j < count; j += M::kPair) {
      const VecF low = one(j);
      sum = hn::Add(sum, low);
      if constexpr (M::kPair == 2) {
        const VecF high = j + 1 < count ? one(j + 1) : zero();
        sum = hn::Add(sum, high);
        store(pair_up(low, high), out);
      } else {
        store(low, out);
      }
      out += rows;
    }
    store(sum, s_.sum + row);
  }

  // ---- Loading and storing.

  const float* query_row(const Pass& pass, int r) const {
    const int row = pass.begin + r;
    const RowBlock& b = pass.block;
    return b.q + row % b.tokens * b.q_token_stride + row / b.tokens * b.q_head_stride;
  }

  /// The pass's queries, transposed: a panel per lane group. Padding lanes are zeros and never reach a
  /// result.
  void load_queries(const Pass& pass) {
    for (int r = 0; r < pass.padded_rows; ++r)
      s_.row_position[r] = static_cast<int32_t>(pass.block.first_position +
                                                (r < pass.rows ? (pass.begin + r) % pass.block.tokens : 0));
    for_each_lane_group(pass, [&](int lane, int vectors) {
      const int width = vectors * kLanes;
      Word* panel = s_.queries + lane * words_;
      for (int r = 0; r < width; ++r) {
        if (lane + r + kQueriesAhead < pass.rows) {
          const auto* ahead = reinterpret_cast<const char*>(query_row(pass, lane + r + kQueriesAhead));
          for (int64_t i = 0; i < pass.block.head_dim * 4; i += 64) __builtin_prefetch(ahead + i);
        }
        if (lane + r >= pass.rows) {
          for (int64_t i = 0; i < words_; ++i) panel[i * width + r] = 0;
          continue;
        }
        const Word* row = query_words(query_row(pass, lane + r), pass.block.head_dim);
        for (int64_t i = 0; i < words_; ++i) panel[i * width + r] = row[i];
      }
    });
  }

  /// A query row as words; in the scratch of the scores when it needs rounding.
  HWY_INLINE const Word* query_words(const float* row, int head_dim) {
    if constexpr (M::kPair == 1) {
      return row;
    } else {
      auto* words = reinterpret_cast<uint32_t*>(s_.out);
      for (int i = 0; i < head_dim; i += 2 * kLanes)
        store(round_to_bfloat(load_first(row + i, head_dim - i),
                              load_first(row + i + kLanes, head_dim - i - kLanes)),
              words + i / 2);
      return words;
    }
  }

  /// Looks up where the first block's keys are; locate_next() makes them the block at hand and looks ahead by
  /// one.
  void locate_first(const KeySource& keys) {
    next_ = &s_.block[0];
    next_count_ = locate(keys, 0, next_);
  }

  /// Returns the keys of the block at hand, which begins at `begin`.
  int locate_next(const KeySource& keys, int64_t begin) {
    const int count = next_count_;
    now_ = next_;
    next_ = &s_.block[now_ == &s_.block[0] ? 1 : 0];
    next_count_ = locate(keys, begin + kBlockKeys, next_);
    return count;
  }

  int locate(const KeySource& keys, int64_t begin, const BlockKeys* block) {
    const int64_t left = keys.size() - begin;
    if (left <= 0) return 0;
    const int count = static_cast<int>(left < kBlockKeys ? left : kBlockKeys);
    for_each_key(cache_, keys, begin, count, [&](int i, int64_t position, const char* k, const char* v) {
      block->positions[i] = static_cast<int32_t>(position);
      block->key_rows[i] = k;
      block->value_rows[i] = v;
    });
    return count;
  }

  /// Into the second-level cache, while the block at hand is multiplied.
  HWY_INLINE void fetch(const char* row) const {
    for (int64_t i = 0; i < row_bytes_; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
  HWY_INLINE void fetch_next(int first, int count) const {
    for (int j = first; j < first + count && j < next_count_; ++j) {
      fetch(next_->key_rows[j]);
      fetch(next_->value_rows[j]);
    }
  }

  /// Rows of K as the products read them. Scores past count are computed from the last key, and masked.
  void load_keys(int count) {
    const int head_dim = t_.rows.head_dim;
    for (int i = 0; i < count; ++i) {
      s_.multiplied_rows[i] = now_->key_rows[i];
      if constexpr (M::kConverts) {
        float* out = s_.keys + static_cast<int64_t>(i) * head_dim;
        const auto* row = reinterpret_cast<const typename M::Stored*>(now_->key_rows[i]);
        for (int c = 0; c < head_dim; c += kLanes)
          store_first(load_as_float(row + c, head_dim - c), out + c, head_dim - c);
        s_.multiplied_rows[i] = out;
      }
    }
    for (int i = count; i < kBlockKeys; ++i) s_.multiplied_rows[i] = s_.multiplied_rows[count - 1];
  }

  /// V of the block as words [kWords, padded dim]: rows as floats, or pairs of rows interleaved.
  void load_values(int count) {
    const int head_dim = t_.rows.head_dim;
    Word* out = s_.values;
    if constexpr (M::kPair == 1) {
      for (int i = 0; i < count; ++i, out += dim_stride_) {
        const auto* row = reinterpret_cast<const typename M::Stored*>(now_->value_rows[i]);
        for (int c = 0; c < head_dim; c += kLanes) store(load_as_float(row + c, head_dim - c), out + c);
      }
    } else {
      for (int i = 0; i < count; i += 2, out += dim_stride_) {
        const auto* even = reinterpret_cast<const Bfloat*>(now_->value_rows[i]);
        const auto* odd = reinterpret_cast<const Bfloat*>(now_->value_rows[i + 1 < count ? i + 1 : i]);
        const bool single = i + 1 >= count;
        for (int c = 0; c < head_dim; c += 2 * kLanes) {
          const VecU a = load_pairs(even + c, head_dim - c);
          const VecU b = single ? broadcast(0u) : load_pairs(odd + c, head_dim - c);
          VecU low, high;
          interleave_rows(a, b, &low, &high);
          store(low, out + c);
          store(high, out + c + kLanes);
        }
      }
    }
  }

  void clear_out(const Pass& pass) {
    const int64_t count = pass.padded_rows * dim_stride_;
    for (int64_t i = 0; i < count; i += kLanes) store(zero(), s_.out + i);
  }

  void store_out(const Pass& pass) {
    const RowBlock& b = pass.block;
    for (int r = 0; r < pass.rows; ++r) {
      const int row = pass.begin + r;
      const int token = row % b.tokens, head = row / b.tokens;
      float* out = b.out + token * b.out_token_stride + head * b.out_head_stride;
      const float sum = s_.sum[r];
      const VecF share = broadcast(sum == 0 ? 0.0f : b.value_scale / sum);
      for (int c = 0; c < b.head_dim; c += kLanes)
        store_first(hn::Mul(load(s_.out + r * dim_stride_ + c), share), out + c, b.head_dim - c);
      if (b.lse != nullptr)
        b.lse[token * b.lse_token_stride + head] =
            sum == 0 ? kMinusInfinity : s_.maximum[r] * kLn2 + __builtin_logf(sum);
    }
  }

  const PrefillTile& t_;
  const Scratch<Word> s_;
  const int words_;
  const int64_t dim_stride_;
  const int64_t row_bytes_;
  const BlockKeys* now_ = nullptr;
  const BlockKeys* next_ = nullptr;
  int next_count_ = 0;
  cpu::CacheView cache_;
  RowBlock block_;
};

}  // namespace

size_t prefill_scratch_bytes(const PrefillSizes& sizes) {
  return with_math(sizes.stored, [&](auto math) {
    using M = decltype(math);
    return Scratch<typename M::Word>(sizes, M::kPair, nullptr).bytes;
  });
}

void prefill_tile(const PrefillTile& tile, const PrefillSizes& sizes, char* scratch) {
  with_math(sizes.stored, [&](auto math) { Tile<decltype(math)>(tile, sizes, scratch).run(); });
}

}  // namespace kascade::KASCADE_ISA
