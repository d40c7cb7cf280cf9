// SPDX-License-Identifier: Apache-2.0
// Keys that are NaN, within the length: weights that are NaN rank last, and nothing else changes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "attention/cuda/test/cuda_test.h"

namespace kascade::cuda_test {
namespace {

constexpr int32_t kRanked = 64, kRecent = 16, kNanKey = 900;
constexpr uint16_t kNanBits = 0x7FFF;  // in both types

Case case_of(TileRule rule, Role role, DType dtype, int32_t head_dim) {
  const bool decode = rule == TileRule::kStep;
  Case c;
  c.tile_rule = rule;
  c.role = role;
  c.dtype = dtype;
  c.head_dim = head_dim;
  c.q_lens = decode ? std::vector<int32_t>{3, 1} : std::vector<int32_t>{40, 33};
  c.kv_lens = {1500, 700};
  c.budget = Budget{.percent_hundredths = 0, .floor = kRanked, .recent = kRecent};
  c.name = text("NaN key, %s, role %d, %s, d %d", decode ? "decode" : "prefill", int(role), dtype_name(dtype),
                head_dim);
  return c;
}

Outcome run_once(const Case& c, const HostData& data) {
  DeviceRun run(c, data, Placement{});
  run.launch();
  return run.results();
}

std::vector<int32_t> members_of(const Outcome& o, size_t set) {
  const auto begin = o.positions.begin() + static_cast<int64_t>(set) * o.capacity;
  return {begin, begin + std::clamp(o.counts[set], 0, o.capacity)};
}

/// Rows and sets of the second sequence, and of the second KV head of the first, are those of `clean`.
void expect_rest_untouched(const Case& c, const HostData& data, const Outcome& clean, const Outcome& got) {
  const auto heads = static_cast<size_t>(c.query_heads), dim = static_cast<size_t>(c.head_dim);
  for (size_t i = 0; i < got.lse.size(); ++i) {
    if (i / heads < static_cast<size_t>(c.q_lens[0]) && i % heads < heads / 2) continue;
    const bool equal = clean.lse[i] == got.lse[i] &&
                       std::memcmp(&clean.out[i * dim], &got.out[i * dim], dim * sizeof(float)) == 0;
    EXPECT(equal, "row %zu, head %zu differs", i / heads, i % heads);
  }
  for (size_t set = 0; set < got.counts.size(); ++set) {
    EXPECT(got.counts[set] == clean.counts[set], "set %zu has %d members", set, got.counts[set]);
    if (set < size_t{2} * static_cast<size_t>(data.tile_offsets[1]) && set % 2 == 0) continue;
    EXPECT(members_of(got, set) == members_of(clean, set), "set %zu differs", set);
  }
}

void expect_nan_last(const Case& c) {
  current = c.name;
  HostData data = make_data(c);
  const Outcome clean = run_once(c, data);
  const size_t stride = static_cast<size_t>(c.kv_heads) * static_cast<size_t>(c.head_dim);
  data.k[kNanKey * stride] = kNanBits;
  const Outcome one = run_once(c, data);
  expect_rest_untouched(c, data, clean, one);
  const size_t sets = size_t{2} * static_cast<size_t>(data.tile_offsets[1]);
  for (size_t set = 0; set < sets; set += 2) {
    const std::vector<int32_t> members = members_of(one, set);
    EXPECT(members.size() == kRanked + kRecent &&
               std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end() &&
               !std::binary_search(members.begin(), members.end(), kNanKey) && members.front() >= 0,
           "set %zu is not whole, or not ascending, or has the NaN key", set);
  }
  if (c.role == Role::kAnchor)
    EXPECT(std::all_of(one.out.begin(), one.out.end(), [](float x) { return std::isfinite(x); }),
           "an output of sets without the NaN key is not finite");

  // Nothing but NaN: ties, which the smaller positions win.
  for (size_t j = 0; j < 1500; ++j) data.k[j * stride] = kNanBits;
  const Outcome all = run_once(c, data);
  expect_rest_untouched(c, data, clean, all);
  for (size_t set = 0; set < sets; set += 2) {
    const std::vector<int32_t> members = members_of(all, set);
    for (size_t m = 0; m < members.size() && m < kRanked; ++m)
      EXPECT(members[m] == static_cast<int32_t>(m), "set %zu of NaN keys: member %zu is %d", set, m,
             members[m]);
  }
}

void test_nan_keys() {
  for (const TileRule rule : {TileRule::kStep, TileRule::kAligned})
    for (const Role role : {Role::kLayer0, Role::kAnchor}) {
      expect_nan_last(case_of(rule, role, DType::kBF16, 128));
      expect_nan_last(case_of(rule, role, DType::kF16, 64));
    }
}

const Registered kTests[] = {{10, "NaN keys", test_nan_keys, "all"}};

}  // namespace
}  // namespace kascade::cuda_test
