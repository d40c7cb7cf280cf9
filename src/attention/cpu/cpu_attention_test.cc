// SPDX-License-Identifier: Apache-2.0
// What the shared tests of the operator do not reach in these kernels: many keys, tiles too large to be kept,
// sets too light to be divided by their own sum.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/attention_test_case.h"
#include "attention/cpu/limits.h"

namespace kascade {
namespace {

struct Named {
  std::string name;
  const cpu::Kernels* kernels;
};

std::vector<Named> instruction_sets() {
  std::vector<Named> sets;
  for (const AttentionKernel& kernel : attention_kernels())
    if (const cpu::Kernels* kernels = cpu::kernels_of(kernel); kernels != nullptr && kernel.available())
      sets.push_back({kernel.name, kernels});
  return sets;
}

/// The members that every instruction set selects must be those of select_top_k, and nothing past them is
/// written.
void expect_same_members(const std::vector<float>& weights, int64_t k) {
  const auto n = static_cast<int64_t>(weights.size());
  std::vector<int32_t> expected(static_cast<size_t>(std::min(k, n)));
  std::vector<uint32_t> scratch(static_cast<size_t>(select_top_k_scratch(n)));
  select_top_k(weights.data(), n, k, expected.data(), scratch.data());
  for (int32_t& member : expected) member += 7;
  for (const Named& set : instruction_sets()) {
    SCOPED_TRACE(set.name);
    GuardedBuffer members(expected.size() * sizeof(int32_t));
    GuardedBuffer own_scratch(static_cast<size_t>(set.kernels->select_scratch_size(n)) * sizeof(uint32_t));
    const int64_t count = set.kernels->select_ranked(weights.data(), n, k, 7, members.as<int32_t>(),
                                                     own_scratch.as<uint32_t>());
    ASSERT_EQ(count, static_cast<int64_t>(expected.size()));
    const std::vector<int32_t> actual(members.as<int32_t>(), members.as<int32_t>() + count);
    ASSERT_EQ(actual, expected) << n << " weights, k " << k;
  }
}

TEST(CpuSelect, AgreesWithTheReferenceOnAnyWeights) {
  Random random(1);
  const float kNan = std::numeric_limits<float>::quiet_NaN(),
              kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> odd = {0.0f, 1e-45f, 1e-38f, kNan, kInfinity, 1.0f, 1.0f + 0x1p-23f, 3e38f};
  // Around the vector widths and the length from which bounds are guessed.
  for (const int64_t n : {1, 2, 15, 16, 17, 63, 100, 1000, 4095, 4096, 4097, 6000, 20011}) {
    for (int kind = 0; kind < 6; ++kind) {
      std::vector<float> weights(static_cast<size_t>(n));
      for (size_t i = 0; i < weights.size(); ++i) {
        const float normal = random.normal();
        switch (kind) {
          case 0:  // many magnitudes
            weights[i] = std::exp(4 * normal);
            break;
          case 1:  // all the same: ties go to the first
            weights[i] = 0.25f;
            break;
          case 2:  // few values
            weights[i] = static_cast<float>(random.in(0, 3));
            break;
          case 3:  // special values
            weights[i] = random.of(odd);
            break;
          case 4:  // one digit holds all, differing in the last bits
            weights[i] = 1 + static_cast<float>(random.in(0, 500)) * 0x1p-23f;
            break;
          default:  // falling, as under a recency bias
            weights[i] = 1 / (1 + static_cast<float>(i));
        }
      }
      for (const int64_t k : {int64_t{0}, int64_t{1}, n / 10, n / 2, n - 1, n, n + 5})
        expect_same_members(weights, k);
    }
  }
}

TEST(CpuSelect, AWrongGuessCostsNoExactness) {
  // The sample sees one vector in 16, whatever the vector's width: here only large weights, there only small
  // ones.
  for (const int64_t lanes : {1, 4, 8, 16}) {
    for (const bool sampled_large : {false, true}) {
      std::vector<float> weights(8192);
      for (size_t i = 0; i < weights.size(); ++i) {
        const bool sampled = static_cast<int64_t>(i) / lanes % 16 == 0;
        weights[i] = (sampled == sampled_large ? 1.0f : 1e-6f) + static_cast<float>(i % 97) * 1e-8f;
      }
      for (const int64_t k : {1, 100, 511, 512, 513, 4000, 7679, 7680, 7681, 8191})
        expect_same_members(weights, k);
    }
  }
}

class CpuAttention : public testing::TestWithParam<KernelCase> {
 protected:
  Result run(const Problem& problem, const Layout& layout = {}, int threads = 1,
             const Sets* given = nullptr) const {
    return kascade::run(problem, *GetParam().kernel, layout, threads, given);
  }
  Tolerance allowed() const { return tolerance(*GetParam().kernel, GetParam().kv_dtype, DType::kF32, false); }

  void expect_near_reference(const Problem& problem, const Result& actual, const Sets* given) const {
    Problem same = problem;
    if (problem.role == Role::kAnchor) same.role = Role::kReuse;
    const Result expected =
        kascade::run(same, reference(), {}, 1, problem.role == Role::kAnchor ? &actual.sets : given);
    EXPECT_LE(max_difference(actual.out, expected.out), allowed().out);
    EXPECT_LE(max_difference(actual.lse, expected.lse), allowed().lse);
  }
};

TEST_P(CpuAttention, ManySplitsAndBlocksOfKeys) {
  // Around the splits of decode (512 keys) and the blocks of prefill (96).
  Random random(2);
  for (const TileRule rule : {TileRule::kStep, TileRule::kAligned}) {
    for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor}) {
      Problem p;
      p.role = role;
      p.tile_rule = rule;
      p.kv_dtype = GetParam().kv_dtype;
      p.query_heads = 6;
      p.kv_heads = 2;
      p.head_dim = 24;
      p.budget = default_budget(2500);
      for (const int64_t keys : {511, 512, 513, 575, 576, 577, 1600}) p.add(random, 3, keys);
      expect_near_reference(p, run(p, {}, 2), nullptr);
    }
  }
}

TEST_P(CpuAttention, SetsThatHoldNothingOfARowAreStillAttended) {
  // Every row has a key of its own that takes all but e^-100 or less of its probability, but the sets hold
  // two keys. What is kept of the first pass is then 0 for six rows of eight.
  for (const TileRule rule : {TileRule::kStep, TileRule::kAligned}) {
    Problem p;
    p.role = Role::kAnchor;
    p.tile_rule = rule;
    p.kv_dtype = GetParam().kv_dtype;
    p.tile = 8;
    p.query_heads = p.kv_heads = 1;
    p.head_dim = 32;
    p.budget = Budget{.percent_hundredths = 0, .floor = 2};
    Random random(3);
    SequenceData& s = p.add(random, 8, 200);
    std::fill(s.q.begin(), s.q.end(), 0.0f);
    for (size_t row = 0; row < 8; ++row) {
      s.q[row * 32 + row] = 32;
      for (size_t key = 0; key < 200; ++key)
        s.k[key * 32 + row] = key == 20 * row ? 32.0f : static_cast<float>(key % 4) / 4;
    }
    const Result actual = run(p);
    EXPECT_THAT(actual.out, testing::Each(testing::Truly([](float x) { return x == x; })));
    expect_near_reference(p, actual, nullptr);
  }
}

TEST_P(CpuAttention, TilesTooLargeToKeepAreComputedAgain) {
  // 2,048 rows against 17,000 keys: their probabilities pass 64 MiB, so that the anchor's own pass starts
  // from the scores, as a reuse call does.
  Problem p;
  p.role = Role::kAnchor;
  p.kv_dtype = GetParam().kv_dtype;
  p.tile = 128;
  p.query_heads = 16;
  p.kv_heads = 1;
  p.head_dim = 8;
  p.budget = Budget{.percent_hundredths = 0, .floor = 40};
  if (std::string(GetParam().kernel->name) == "reference" ||
      std::string(GetParam().kernel->name) == "cpu-baseline")
    GTEST_SKIP() << "too slow";
  Random random(4);
  p.add(random, 128, 17024);
  const Result anchor = run(p, {.by_products = true}, 2);
  // Every row and head votes with weight 1.
  double total = anchor.own_mass[0];
  for (const float weight : anchor.pooled[0]) total += weight;
  EXPECT_NEAR(total, 2048, 2048 * 0x1p-9);
  Problem reuse = p;
  reuse.role = Role::kReuse;
  const Result expected = run(reuse, {}, 1, &anchor.sets);
  EXPECT_EQ(first_difference(anchor.out, expected.out), -1);
  EXPECT_EQ(first_difference(anchor.lse, expected.lse), -1);
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuAttention, testing::ValuesIn(kernel_cases()), case_name);

TEST(CpuLimits, AreMeasured) {
  ThreadPool pool(2);
  const std::vector<char> buffer(8 << 20, 1);
  for (const Named& set : instruction_sets()) {
    const cpu::Limits limits =
        cpu::measure_limits(*set.kernels, pool, buffer.data(), static_cast<int64_t>(buffer.size()));
    EXPECT_GT(limits.read_gb_per_s, 0) << set.name;
    EXPECT_GT(limits.f32_tflop_per_s, 0) << set.name;
    EXPECT_GT(limits.bf16_tflop_per_s, 0) << set.name;
  }
  EXPECT_GE(cpu::last_level_cache_bytes(), int64_t{64} << 10);
  EXPECT_EQ(cpu::kernels_of(reference()), nullptr);
}

}  // namespace
}  // namespace kascade
