// SPDX-License-Identifier: Apache-2.0
// Anchors by measured quality. Measuring is dear, so candidates are first measured on a share of the prompts,
// nothing is measured twice, and what the cost does not allow to try is dropped in the order of the
// similarity's objective.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "kascade/calibrate.h"

namespace kascade {
namespace {

using AnchorSet = std::vector<int>;

// Auto does not know the M it will end with: a step may spend what is left as if so many were still to come.
constexpr int kPlannedSteps = 7;

void check_options(const SearchOptions& options, int layers) {
  require<BadArgument>(options.anchors >= 0 && options.anchors <= layers,
                       "anchors: expected 0 (auto) or 1..{}, got {}", layers, options.anchors);
  require<BadArgument>(options.max_anchors >= 1, "max_anchors: expected at least 1, got {}",
                       options.max_anchors);
  const QualityThresholds& t = options.thresholds;
  require<BadArgument>(t.max_kl >= 0, "max_kl: expected at least 0, got {}", t.max_kl);
  require<BadArgument>(t.min_top1 >= 0 && t.min_top1 <= 1, "min_top1: expected 0..1, got {}", t.min_top1);
  require<BadArgument>(t.max_passkey_loss >= 0 && t.max_passkey_loss <= 1,
                       "max_passkey_loss: expected 0..1, got {}", t.max_passkey_loss);
  require<BadArgument>(options.min_gain >= 0 && options.min_gain < 1,
                       "min_gain: expected 0 or more, below 1, got {}", options.min_gain);
  require<BadArgument>(options.patience >= 1, "patience: expected at least 1, got {}", options.patience);
  require<BadArgument>(options.max_cost > 0 && std::isfinite(options.max_cost),
                       "max_cost: expected above 0, got {}", options.max_cost);
  double last = 0;
  for (const SearchRung& rung : options.rungs) {
    require<BadArgument>(rung.fidelity > last && rung.fidelity < 1,
                         "rungs: fidelity: expected ascending shares above 0 and below 1, got {}",
                         rung.fidelity);
    require<BadArgument>(rung.survivors >= 1, "rungs: survivors: expected at least 1, got {}",
                         rung.survivors);
    last = rung.fidelity;
  }
  require<BadArgument>(options.program_sets >= 0 && options.swap_passes >= 0 && options.swap_reach >= 0 &&
                           options.swap_layers >= 0,
                       "program_sets, swap_passes, swap_reach, swap_layers: expected at least 0");
}

// Every measurement of one search, made once.
class Measurements {
 public:
  Measurements(const AnchorEvaluator& evaluator, const SearchOptions& options)
      : evaluator_(evaluator), options_(options) {}

  double cost() const { return cost_; }
  double left() const { return options_.max_cost - cost_; }
  int64_t count() const { return count_; }

  const AnchorEvaluation* find(const AnchorSet& set, double fidelity) const {
    const auto found = known_.find({fidelity, set});
    return found == known_.end() ? nullptr : &found->second;
  }

  void measure(const std::vector<AnchorSet>& sets, double fidelity, const AnchorSet& base) {
    EvaluationRequest request{{}, base, fidelity};
    for (const AnchorSet& set : sets)
      if (!find(set, fidelity)) request.anchor_sets.push_back(set);
    if (request.anchor_sets.empty()) return;
    if (options_.cancelled && options_.cancelled()) throw Cancelled("anchor search: cancelled");
    const std::vector<AnchorEvaluation> results = evaluator_(request);
    require<BadArgument>(results.size() == request.anchor_sets.size(),
                         "anchor evaluator: expected {} evaluations, got {}", request.anchor_sets.size(),
                         results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const AnchorEvaluation& e = results[i];
      const bool finite = std::isfinite(e.objective) && std::isfinite(e.kl) && std::isfinite(e.top1) &&
                          std::isfinite(e.passkey) && std::isfinite(e.passkey_dense);
      require<BadArgument>(
          finite, "anchor evaluator: anchors {}: not finite: objective {}, KL {}, top-1 {}, passkey {}",
          fmt::join(request.anchor_sets[i], ","), e.objective, e.kl, e.top1, e.passkey);
      known_.emplace(std::pair{fidelity, request.anchor_sets[i]}, e);
    }
    count_ += static_cast<int64_t>(results.size());
    cost_ += fidelity * static_cast<double>(results.size());
  }

  // Sets of one size measured on all prompts: the least objective (equal ones: the first in lexicographic
  // order), among those within the thresholds if asked for.
  std::optional<AnchorSet> best(int anchors, bool only_within) const {
    std::optional<AnchorSet> best;
    double objective = 0;
    for (const auto& [key, evaluation] : known_) {
      const auto& [fidelity, set] = key;
      if (fidelity != 1 || set.size() != static_cast<size_t>(anchors)) continue;
      if (only_within && !within(options_.thresholds, evaluation)) continue;
      if (best && evaluation.objective >= objective) continue;
      best = set;
      objective = evaluation.objective;
    }
    return best;
  }

 private:
  const AnchorEvaluator& evaluator_;
  const SearchOptions& options_;
  std::map<std::pair<double, AnchorSet>, AnchorEvaluation> known_;
  double cost_ = 0;
  int64_t count_ = 0;
};

class Search {
 public:
  Search(const LayerSimilarity& similarity, const AnchorEvaluator& evaluator, const SearchOptions& options)
      : similarity_(similarity),
        options_(options),
        layers_(static_cast<int>(similarity.size())),
        measured_(evaluator, options) {
    check_options(options, layers_);
    anchor_objective(similarity, {}, {0});  // checks the matrix
    fixed_ = options.anchors > 0;
    target_ = fixed_ ? options.anchors : std::min(options.max_anchors, layers_);
  }

  SearchResult measure_and_choose() {
    measure_all("add", {{0}}, {0});
    AnchorSet base = {0};
    for (int anchors = 1;; ++anchors) {
      if (anchors > 1) base = grow(base);
      if (const auto end = conclude(anchors, true)) return finish(*end);
    }
  }

  SearchResult choose_by_program(const std::vector<double>& weights) {
    AnchorSet base = {0};
    for (int anchors = fixed_ ? target_ : 1;; ++anchors) {
      const AnchorSet set = choose_anchors(similarity_, weights, anchors).anchors;
      anchors_ = anchors;
      measure_all("program", {set}, anchors > 1 && measured_.find(base, 1) ? base : set);
      base = set;
      if (const auto end = conclude(anchors, false)) return finish(*end);
    }
  }

 private:
  void report(const char* phase) {
    if (!options_.progress) return;
    SearchProgress progress{anchors_, phase, measured_.cost(), options_.max_cost, {}};
    if (const auto best = measured_.best(anchors_, false))
      progress.best = {*best, measured_.find(*best, 1)->objective};
    options_.progress(progress);
  }

  void measure_at(const char* phase, const std::vector<AnchorSet>& sets, double fidelity,
                  const AnchorSet& base) {
    measured_.measure(sets, fidelity, base);
    report(phase);
  }

  void measure_all(const char* phase, const std::vector<AnchorSet>& sets, const AnchorSet& base) {
    measure_at(phase, sets, 1, base);
  }

  // What narrow() spends at most on so many sets.
  double narrowing_cost(size_t sets) const {
    double cost = 0;
    for (const SearchRung& rung : options_.rungs) {
      if (sets <= static_cast<size_t>(rung.survivors)) continue;
      cost += rung.fidelity * static_cast<double>(sets);
      sets = static_cast<size_t>(rung.survivors);
    }
    return cost + static_cast<double>(sets);
  }

  // As many of the sets, from the front, as the allowance can pay for.
  void cut_to(double allowance, size_t least, std::vector<AnchorSet>& sets) const {
    while (sets.size() > least && narrowing_cost(sets.size()) > allowance) sets.pop_back();
  }

  // Measures the sets on growing shares of the prompts, only the best going on. Returns them in the order of
  // the first share that they all were measured on (all prompts when there are few).
  std::vector<AnchorSet> narrow(const char* phase, std::vector<AnchorSet> sets, const AnchorSet& base) {
    std::erase_if(sets, [&](const AnchorSet& set) { return measured_.find(set, 1) != nullptr; });
    std::vector<AnchorSet> order;
    const auto rank = [&](double fidelity) {
      std::stable_sort(sets.begin(), sets.end(), [&](const AnchorSet& a, const AnchorSet& b) {
        return measured_.find(a, fidelity)->objective < measured_.find(b, fidelity)->objective;
      });
      if (order.empty()) order = sets;
    };
    for (const SearchRung& rung : options_.rungs) {
      if (sets.size() <= static_cast<size_t>(rung.survivors)) continue;
      measure_at(phase, sets, rung.fidelity, base);
      rank(rung.fidelity);
      sets.resize(static_cast<size_t>(rung.survivors));
    }
    measure_all(phase, sets, base);
    rank(1);
    return order;
  }

  // Candidates in the order in which they are given up when the cost runs short: best by similarity first.
  void sort_by_similarity(std::vector<AnchorSet>& sets) const {
    std::vector<std::pair<double, AnchorSet>> keyed;
    keyed.reserve(sets.size());
    for (AnchorSet& set : sets) keyed.emplace_back(-anchor_objective(similarity_, {}, set), std::move(set));
    std::sort(keyed.begin(), keyed.end());
    for (size_t i = 0; i < sets.size(); ++i) sets[i] = std::move(keyed[i].second);
  }

  std::vector<AnchorSet> additions(const AnchorSet& base) const {
    std::vector<AnchorSet> sets;
    for (int layer = 1; layer < layers_; ++layer) {
      if (std::binary_search(base.begin(), base.end(), layer)) continue;
      AnchorSet set = base;
      set.insert(std::upper_bound(set.begin(), set.end(), layer), layer);
      sets.push_back(std::move(set));
    }
    sort_by_similarity(sets);
    return sets;
  }

  // base with one anchor moved: to a neighbouring layer first, then to one of the given layers, then farther.
  std::vector<AnchorSet> swaps(const AnchorSet& base, const std::vector<int>& layers) const {
    std::vector<AnchorSet> sets;
    std::set<AnchorSet> seen = {base};
    const auto move = [&](size_t index, int layer) {
      if (layer < 1 || layer >= layers_ || std::binary_search(base.begin(), base.end(), layer)) return;
      AnchorSet set = base;
      set[index] = layer;
      std::sort(set.begin(), set.end());
      if (seen.insert(set).second) sets.push_back(std::move(set));
    };
    for (int reach = 1; reach <= std::max(1, options_.swap_reach); ++reach) {
      for (size_t index = 1; index < base.size() && reach <= options_.swap_reach; ++index) {
        move(index, base[index] - reach);
        move(index, base[index] + reach);
      }
      for (size_t index = 1; index < base.size() && reach == 1; ++index)
        for (const int layer : layers) move(index, layer);
    }
    return sets;
  }

  // The first layers that the best additions would add, other than those now chosen.
  std::vector<int> layers_of(const std::vector<AnchorSet>& ranked, const AnchorSet& base,
                             const AnchorSet& chosen) const {
    std::vector<int> layers;
    for (const AnchorSet& set : ranked) {
      AnchorSet added;
      std::set_difference(set.begin(), set.end(), base.begin(), base.end(), std::back_inserter(added));
      if (added.size() != 1 || std::binary_search(chosen.begin(), chosen.end(), added[0]))
        continue;  // a program's set
      if (layers.size() == static_cast<size_t>(options_.swap_layers)) break;
      layers.push_back(added[0]);
    }
    return layers;
  }

  // The best set found with one anchor more than base.
  AnchorSet grow(const AnchorSet& base) {
    anchors_ = static_cast<int>(base.size()) + 1;
    const int steps_left = std::min(target_ - anchors_ + 1, kPlannedSteps);
    const double allowance = measured_.left() / steps_left;
    const double start = measured_.cost();

    std::vector<AnchorSet> sets;
    if (options_.program_sets > 0)
      for (AnchorChoice& choice : best_anchor_sets(similarity_, {}, anchors_, options_.program_sets))
        sets.push_back(std::move(choice.anchors));
    for (AnchorSet& set : additions(base))
      if (std::find(sets.begin(), sets.end(), set) == sets.end()) sets.push_back(std::move(set));
    cut_to(allowance, 1, sets);
    const std::vector<AnchorSet> ranked = narrow("add", std::move(sets), base);

    AnchorSet best = *measured_.best(anchors_, false);
    for (int pass = 0; pass < options_.swap_passes; ++pass) {
      std::vector<AnchorSet> moved = swaps(best, layers_of(ranked, base, best));
      cut_to(allowance - (measured_.cost() - start), 0, moved);
      if (moved.empty()) break;
      narrow("swap", std::move(moved), best);
      AnchorSet better = *measured_.best(anchors_, false);
      if (better == best) break;
      best = std::move(better);
    }
    return best;
  }

  // Records the best set of this M and says whether, and why, the search ends with it.
  std::optional<SearchEnd> conclude(int anchors, bool may_run_out_of_gain) {
    const AnchorSet best = *measured_.best(anchors, false);
    const auto inside = measured_.best(anchors, true);
    const AnchorSet& shown = inside ? *inside : best;
    const AnchorEvaluation& figures = *measured_.find(shown, 1);
    result_.candidates.push_back({shown, figures.kl, figures.top1, figures.passkey, figures.objective});

    if (fixed_) {
      if (anchors < target_) return std::nullopt;
      choose(shown);
      return SearchEnd::kReached;
    }
    if (inside && (!options_.accept || options_.accept(*inside, figures))) {
      choose(*inside);
      return SearchEnd::kAccepted;
    }
    const double objective = measured_.find(best, 1)->objective;
    if (result_.anchors.empty() || objective < result_.evaluation.objective) choose(best);
    objectives_.push_back(objective);
    if (anchors >= target_) return SearchEnd::kLimit;
    // A set that was refused elsewhere may need anchors that the evaluator sees no gain in.
    if (may_run_out_of_gain && !inside && objectives_.size() > static_cast<size_t>(options_.patience)) {
      const double before = objectives_[objectives_.size() - 1 - static_cast<size_t>(options_.patience)];
      if (before - objective < options_.min_gain * before) return SearchEnd::kNoGain;
    }
    if (measured_.left() < 1) return SearchEnd::kCost;
    return std::nullopt;
  }

  void choose(const AnchorSet& set) {
    result_.anchors = set;
    result_.evaluation = *measured_.find(set, 1);
  }

  SearchResult finish(SearchEnd end) {
    result_.end = end;
    result_.within_thresholds = within(options_.thresholds, result_.evaluation);
    result_.cost = measured_.cost();
    result_.measurements = measured_.count();
    return std::move(result_);
  }

  const LayerSimilarity& similarity_;
  const SearchOptions& options_;
  int layers_;
  Measurements measured_;
  bool fixed_ = false;
  int target_ = 1;                  // the last M
  int anchors_ = 1;                 // M in work
  std::vector<double> objectives_;  // the least of every M so far
  SearchResult result_;
};

}  // namespace

int first_difference(const std::vector<int>& a, const std::vector<int>& b, int layers) {
  size_t i = 0;
  while (i < a.size() && i < b.size() && a[i] == b[i]) ++i;
  const int next_a = i < a.size() ? a[i] : layers;
  const int next_b = i < b.size() ? b[i] : layers;
  return std::min(next_a, next_b);
}

bool within(const QualityThresholds& thresholds, const AnchorEvaluation& evaluation) {
  // Shares are ratios of counts: 1.0 - 0.95 must not exceed 0.05.
  constexpr double kRounding = 1e-9;
  return evaluation.kl <= thresholds.max_kl && evaluation.top1 >= thresholds.min_top1 - kRounding &&
         evaluation.passkey_dense - evaluation.passkey <= thresholds.max_passkey_loss + kRounding;
}

SearchResult search_anchors(const LayerSimilarity& similarity, const AnchorEvaluator& evaluator,
                            const SearchOptions& options) {
  return Search(similarity, evaluator, options).measure_and_choose();
}

SearchResult search_program(const LayerSimilarity& similarity, const std::vector<double>& weights,
                            const AnchorEvaluator& evaluator, const SearchOptions& options) {
  return Search(similarity, evaluator, options).choose_by_program(weights);
}

}  // namespace kascade
