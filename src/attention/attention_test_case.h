// SPDX-License-Identifier: Apache-2.0
// Test cases of the attention operator: what is computed (Problem) apart from where it lies in memory
// (Layout), so that one problem can be run through every kernel, page layout and thread count. Every buffer
// ends at an unreadable page and starts out as NaN, and what a call has no business to write is checked
// afterwards.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/params.h"
#include "kascade/attention.h"

namespace kascade {

/// Sanitizers make tests several times slower: the longest ones do less there.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kThorough = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kThorough = false;
#else
constexpr bool kThorough = true;
#endif
#else
constexpr bool kThorough = true;
#endif

/// Bytes whose end is the end of mapped memory, filled with 0xFF (NaN in every float type).
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t bytes = 0);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }

 private:
  std::byte* map_ = nullptr;
  size_t map_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  /// Uniform in [low, high].
  int64_t in(int64_t low, int64_t high);
  bool one_in(int64_t n) { return in(1, n) == 1; }
  /// Roughly normal, standard deviation 1.
  float normal();
  template <class T>
  T of(const std::vector<T>& values) {
    return values[static_cast<size_t>(in(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  uint64_t state_;
};

float round_to_dtype(float value, DType dtype);

/// q [q_len, H, D], k and v [kv_len, G, D], already rounded to their types.
struct SequenceData {
  int64_t q_len = 0, kv_len = 0;
  int64_t budget_len = -1;  // -1: no budget_lens entry of its own (kv_len)
  std::vector<float> q, k, v;
};

struct Problem {
  Role role = Role::kDense;
  TileRule tile_rule = TileRule::kAligned;
  SetOwner set_owner = SetOwner::kKvHead;
  int32_t tile = 32;
  int32_t query_heads = 2, kv_heads = 1, head_dim = 16;
  float softmax_scale = 0, k_scale = 1, v_scale = 1;
  DType q_dtype = DType::kF32, out_dtype = DType::kF32, kv_dtype = DType::kF32;
  Budget budget = default_budget();
  std::vector<int32_t> head_map;
  std::vector<uint8_t> needed;
  std::vector<SequenceData> sequences;

  /// Appends a sequence of random data. peak stretches the queries: larger is a more uneven softmax. Queries
  /// are made representable in bf16, so that kernels that multiply in bf16 lose nothing there, unless fine is
  /// set.
  SequenceData& add(Random& random, int64_t q_len, int64_t kv_len, float peak = 1.5f, bool fine = false);
};

/// Index sets of a batch: members[(tile_begin[b] + tile) * S + s].
struct Sets {
  std::vector<int64_t> tile_begin;  // [B+1]
  int32_t per_tile = 1;
  std::vector<std::vector<int32_t>> members;

  const std::vector<int32_t>& of(int64_t sequence, int64_t tile, int32_t set) const {
    return members[static_cast<size_t>((tile_begin[static_cast<size_t>(sequence)] + tile) * per_tile + set)];
  }
  friend bool operator==(const Sets&, const Sets&) = default;
};

struct Layout {
  enum class Keys { kPacked, kPagesTokenMajor, kPagesHeadMajor };
  enum class Maxima { kRead, kExact, kSlack };
  Keys keys = Keys::kPacked;
  int32_t page_size = 16;
  uint64_t seed = 1;        // page permutation, gaps
  int64_t pad = 0;          // elements of padding in every stride, in units of 8
  bool head_major = false;  // q, out and packed keys with the head outermost
  Maxima maxima = Maxima::kRead;
  int32_t spare_capacity = 0;
  bool by_products = false;
  // Called right before and after the call; what the first one redirects, the second one has to bring back.
  std::function<void(AttentionParams&)> before = nullptr, after = nullptr;
};
Layout random_layout(Random& random);

struct Result {
  std::vector<float> out;                  // [total_q, H, D]
  std::vector<float> lse;                  // [total_q, H]
  Sets sets;                               // written by selecting roles
  std::vector<std::vector<float>> pooled;  // with by_products: [tile * S + set] of the candidates
  std::vector<float> own_mass;             // with by_products: [tile * S + set]
  uint32_t status = 0;
};

/// Where tiles of a problem start, without members.
Sets empty_sets(const Problem& problem);

/// The parameters that a problem alone fixes; no pointers but head_map and needed.
AttentionParams problem_params(const Problem& problem);

/// Runs a problem. given: the sets of a reuse call. Adds test failures for anything written outside its
/// place, and for index lists that are not ascending, in range and -1 up to capacity.
Result run(const Problem& problem, const AttentionKernel& kernel, const Layout& layout = {}, int threads = 1,
           const Sets* given = nullptr);

/// Whether a kernel takes a problem.
bool supports(const AttentionKernel& kernel, const Problem& problem);

const AttentionKernel& reference();
/// Kernels that run on this machine and read its memory, reference last.
std::vector<const AttentionKernel*> available_kernels();

/// Index of the first element whose bits differ, -1 if none, -2 for different sizes.
int64_t first_difference(const std::vector<float>& a, const std::vector<float>& b);

/// Rows [begin, end) of out or lse (`width` floats a row).
std::vector<float> rows_of(const std::vector<float>& values, int64_t begin, int64_t end, int64_t width);

/// Largest |a - b|; infinite when one is NaN, or infinite and unlike the other.
float max_difference(const std::vector<float>& a, const std::vector<float>& b);

/// What a kernel may differ by from exact arithmetic, for values of v up to about 4 in magnitude. In fp32 a
/// score carries a few units of 2^-24 of rounding per product, far below 1e-5. Kernels whose name ends in
/// _bf16 multiply bf16 keys in bf16: a probability is rounded by 2^-9, relative, before it meets V or is
/// summed, and a query that is not representable in bf16 (fine) moves a score of magnitude 8 by up to 8 *
/// 2^-9.
struct Tolerance {
  float out = 0;
  float lse = 0;
  float weight = 0;  // relative, of pooled weights; also how far from the cut a key may change sides
};
Tolerance tolerance(const AttentionKernel& kernel, DType kv_dtype, DType out_dtype = DType::kF32,
                    bool fine = false);

/// A kernel of this build and machine with one type of keys: the parameter of the property tests.
struct KernelCase {
  const AttentionKernel* kernel = nullptr;
  DType kv_dtype = DType::kF32;
};
std::vector<KernelCase> kernel_cases();
/// "cpu_avx2_bf16", for test names.
std::string case_name(const ::testing::TestParamInfo<KernelCase>& info);
/// For messages.
void PrintTo(const KernelCase& kernel_case, std::ostream* out);

}  // namespace kascade
