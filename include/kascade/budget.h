// SPDX-License-Identifier: Apache-2.0
// Budgets: how many keys a tile selects. Data, not code; 64-bit integer arithmetic, so every backend agrees.
// The same functions run on the host and, from CUDA, on the device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KASCADE_HOST_DEVICE __host__ __device__
#else
#define KASCADE_HOST_DEVICE
#endif

namespace kascade {

/// What becomes of a tile's own keys.
enum class OwnTile : uint8_t {
  kOnTop,      // always attended, causally, besides the budget
  kCharged,    // the same, and the tile's size T is taken off the budget
  kCandidate,  // own keys are candidates like any other; nothing is forced (one-row tiles only)
};

/// A budget rule. x is the number of keys before the tile (`aligned`: the tile's start) or before the step; L
/// is the sequence's budget length (budget_lens, by default all keys present).
struct Budget {
  int32_t percent_hundredths = 1000;  // 0..10000; 0 = the floor alone decides
  bool round_up = false;              // percent * length / 10000: ceil instead of floor
  int32_t floor = 128;                // least count before capping by what is there
  int32_t round_to = 1;               // the count is rounded up to a multiple
  int32_t sinks = 0;                  // the first keys are always members
  int32_t recent = 0;                 // the last keys before the tile are always members
  bool forced_charged = false;        // sinks and recent are counted within the budget instead of on top
  OwnTile own_tile = OwnTile::kOnTop;
  int32_t tile = 32;    // T the budget was made for: what kCharged takes off, in decode too
  bool rolling = true;  // the percentage is of x (start of the tile), not of L
  // A rolling budget falls back to the fixed one in calls (sequences) with at most this many query rows.
  int32_t rolling_min_rows = 0;
  // A rolling count never exceeds the fixed count of the whole length (`paper`).
  bool rolling_capped = false;

  friend bool operator==(const Budget&, const Budget&) = default;
};

/// Members of a tile's set: the forced keys [0, sinks) and [recent_begin, candidates), and the `ranked`
/// heaviest keys of the candidates between them.
struct SetBudget {
  int64_t candidates = 0;    // keys [0, candidates) may be members
  int64_t sinks = 0;         // forced: [0, sinks)
  int64_t recent_begin = 0;  // forced: [recent_begin, candidates); recent_begin >= sinks
  int64_t ranked = 0;        // taken by weight from [sinks, recent_begin), never more than there are

  KASCADE_HOST_DEVICE constexpr int64_t members() const {
    return sinks + ranked + (candidates - recent_begin);
  }
  KASCADE_HOST_DEVICE constexpr bool covers_all() const { return members() == candidates; }
};

namespace budget_detail {
KASCADE_HOST_DEVICE constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
KASCADE_HOST_DEVICE constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/// max(floor, percent of length), rounded up to a multiple of round_to.
KASCADE_HOST_DEVICE constexpr int64_t count_of(const Budget& budget, int64_t length) {
  const int64_t product = budget.percent_hundredths * length + (budget.round_up ? 9999 : 0);
  const int64_t count = max64(product / 10000, budget.floor);
  return (count + budget.round_to - 1) / budget.round_to * budget.round_to;
}
}  // namespace budget_detail

/// A tile's budget (docs/method.md, "Budgets"). `candidates` = x for kOnTop and kCharged prefill tiles; for a
/// row whose own key is a candidate (kCandidate, and every row of a `step` call whose budget is not kOnTop)
/// its position + 1. x = rolling length; length = L; query_rows, which rolling_min_rows compares with, is L
/// in an `aligned` call ("this call" is the whole prompt, never a chunk of it) and 1 in a `step` call.
KASCADE_HOST_DEVICE constexpr SetBudget evaluate_budget(const Budget& budget, int64_t candidates, int64_t x,
                                                        int64_t length, int64_t query_rows) {
  namespace d = budget_detail;
  const int64_t charged = budget.own_tile == OwnTile::kCharged && budget.tile > 1 ? budget.tile : 0;
  // The fixed count is capped by the length before the own tile is charged (`paper`: min(k0, L) - T, at least
  // one).
  const int64_t fixed = d::max64(d::min64(d::count_of(budget, length), length) - charged, 1);
  int64_t count = fixed;
  if (budget.rolling && query_rows > budget.rolling_min_rows) {
    count = d::count_of(budget, x);
    if (budget.rolling_capped) count = d::min64(count, fixed);
  }
  SetBudget set;
  set.candidates = d::max64(candidates, 0);
  set.sinks = d::min64(budget.sinks, set.candidates);
  set.recent_begin = d::max64(set.candidates - budget.recent, set.sinks);
  if (budget.forced_charged) count = d::max64(count - set.sinks - (set.candidates - set.recent_begin), 0);
  set.ranked = d::min64(count, set.recent_begin - set.sinks);
  return set;
}

/// Named presets (docs/method.md, "Budgets").
enum class BudgetPreset : uint8_t { kDefault, kPaper, kKernel };

/// `default`: the last 128 keys before the tile always, ceil(percent * x) >= 128 of the others, own tile on
/// top. `paper`: the authors' accuracy runs. k0 - T, own tile charged; rolling optional, only past 128 query
/// rows. `kernel`: the authors' timing runs. Rounded up to 128, own tile on top; decode forces nothing:
/// `step` rows of this preset use kernel_decode_budget.
constexpr Budget default_budget(int32_t percent_hundredths = 1000) {
  return Budget{.percent_hundredths = percent_hundredths, .round_up = true, .recent = 128};
}
constexpr Budget paper_budget(int32_t percent_hundredths = 1000, int32_t tile = 32, bool rolling = false) {
  return Budget{.percent_hundredths = percent_hundredths,
                .own_tile = OwnTile::kCharged,
                .tile = tile,
                .rolling = rolling,
                .rolling_min_rows = 128,
                .rolling_capped = true};
}
constexpr Budget kernel_budget(int32_t percent_hundredths = 1000, int32_t tile = 32, bool rolling = true) {
  return Budget{.percent_hundredths = percent_hundredths,
                .round_to = 128,
                .tile = tile,
                .rolling = rolling,
                .rolling_min_rows = 128};
}
constexpr Budget kernel_decode_budget(int32_t percent_hundredths = 1000) {
  return Budget{.percent_hundredths = percent_hundredths,
                .round_to = 128,
                .own_tile = OwnTile::kCandidate,
                .tile = 1,
                .rolling = false};
}

}  // namespace kascade
