// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "kascade/calibrate.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int source_of(const std::vector<int>& anchors, int layer) {
  return *std::prev(std::upper_bound(anchors.begin(), anchors.end(), layer));
}

// A made-up model: KL is the mean loss of the layers to their sources, which the similarity shows only
// roughly, and passkeys are lost unless one hidden layer is an anchor, which the similarity does not show at
// all. Shares of the prompts see the loss with an error.
class FakeModel {
 public:
  FakeModel(int layers, uint32_t seed, int retrieval_layer)
      : layers_(layers), retrieval_layer_(retrieval_layer) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    loss_.assign(layers, std::vector<double>(layers, 0.0));
    similarity_.assign(layers, std::vector<double>(layers, 0.0));
    for (int i = 0; i < layers; ++i) {
      similarity_[i][i] = 1;
      for (int j = i + 1; j < layers; ++j) {
        loss_[i][j] = (0.2 + uniform(random)) * (1 - std::exp(-0.2 * (j - i)));
        similarity_[i][j] = 1 - 0.5 * loss_[i][j] * (0.5 + uniform(random));
      }
    }
  }

  AnchorEvaluation evaluate(const std::vector<int>& anchors, double fidelity) const {
    double loss = 0;
    uint64_t hash = 1;
    for (int j = 0; j < layers_; ++j) {
      loss += loss_[source_of(anchors, j)][j];
      hash =
          hash * 6364136223846793005u + static_cast<uint64_t>(source_of(anchors, j)) + 1442695040888963407u;
    }
    const double error = static_cast<double>(hash >> 40) / (1 << 24) - 0.5;
    const bool retrieves =
        retrieval_layer_ == 0 || std::binary_search(anchors.begin(), anchors.end(), retrieval_layer_);
    AnchorEvaluation out;
    out.kl = loss / layers_ * (1 + 0.2 * error * (1 - fidelity));
    out.top1 = std::max(0.0, 1 - out.kl);
    out.passkey_dense = 1;
    out.passkey = retrieves ? 1 : 0.4;
    out.objective = out.kl + (retrieves ? 0.01 : 1.0);
    return out;
  }

  const LayerSimilarity& similarity() const { return similarity_; }
  int layers() const { return layers_; }

  // The least objective of all sets of this size (layers <= 14: at most some thousand sets).
  double best_objective(int anchors) const {
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t mask = 0; mask < 1u << (layers_ - 1); ++mask) {
      std::vector<int> set = {0};
      for (int layer = 1; layer < layers_; ++layer)
        if (mask >> (layer - 1) & 1) set.push_back(layer);
      if (static_cast<int>(set.size()) == anchors) best = std::min(best, evaluate(set, 1).objective);
    }
    return best;
  }

 private:
  int layers_;
  int retrieval_layer_;
  std::vector<std::vector<double>> loss_;
  LayerSimilarity similarity_;
};

// Answers requests and checks what every request promises.
class Evaluator {
 public:
  explicit Evaluator(const FakeModel& model) : model_(model) {}

  AnchorEvaluator callback() {
    return [this](const EvaluationRequest& request) {
      EXPECT_FALSE(request.anchor_sets.empty());
      EXPECT_GT(request.fidelity, 0);
      EXPECT_LE(request.fidelity, 1);
      EXPECT_TRUE(cost == 0 || asked_.count({1, request.base})) << "base was never measured";
      std::vector<AnchorEvaluation> out;
      for (const std::vector<int>& set : request.anchor_sets) {
        EXPECT_EQ(set[0], 0);
        EXPECT_TRUE(std::is_sorted(set.begin(), set.end(), std::less_equal<>()));
        EXPECT_LT(set.back(), model_.layers());
        EXPECT_TRUE(asked_.insert({request.fidelity, set}).second) << "measured twice";
        out.push_back(model_.evaluate(set, request.fidelity));
        cost += request.fidelity;
        shared += request.fidelity * first_difference(set, request.base, model_.layers()) / model_.layers();
        ++measurements;
      }
      return out;
    };
  }

  double cost = 0;
  double shared = 0;  // the part of it that lies below the first difference from base
  int64_t measurements = 0;

 private:
  const FakeModel& model_;
  std::set<std::pair<double, std::vector<int>>> asked_;
};

void expect_consistent(const SearchResult& result, const FakeModel& model, const Evaluator& evaluator) {
  EXPECT_EQ(result.measurements, evaluator.measurements);
  EXPECT_NEAR(result.cost, evaluator.cost, 1e-9);
  const AnchorEvaluation truth = model.evaluate(result.anchors, 1);
  EXPECT_EQ(result.evaluation.kl, truth.kl);
  for (const PlanCandidate& candidate : result.candidates)
    EXPECT_EQ(candidate.objective, model.evaluate(candidate.anchors, 1).objective);  // never a rung's figures
}

SearchOptions auto_options() {
  SearchOptions options;
  options.thresholds = {0.25, 0.7, 0.05};
  return options;
}

TEST(SearchAnchors, FindsTheLayerThatRetrievalNeeds) {
  const FakeModel model(30, 11, 7);
  Evaluator evaluator(model);
  const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), auto_options());
  EXPECT_EQ(result.end, SearchEnd::kAccepted);
  EXPECT_TRUE(result.within_thresholds);
  EXPECT_TRUE(std::binary_search(result.anchors.begin(), result.anchors.end(), 7));
  EXPECT_LE(result.evaluation.kl, 0.25);
  expect_consistent(result, model, evaluator);
  // The program of the published choice does not see it.
  const auto published =
      choose_anchors(model.similarity(), {}, static_cast<int>(result.anchors.size())).anchors;
  EXPECT_FALSE(std::binary_search(published.begin(), published.end(), 7));
}

TEST(SearchAnchors, AutoEndsAtTheFirstSizeWithinTheThresholds) {
  const FakeModel model(24, 12, 5);
  Evaluator evaluator(model);
  const SearchOptions options = auto_options();
  const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
  ASSERT_EQ(result.candidates.size(), result.anchors.size());
  for (size_t m = 0; m < result.candidates.size(); ++m) {
    EXPECT_EQ(result.candidates[m].anchors.size(), m + 1);
    EXPECT_EQ(within(options.thresholds, model.evaluate(result.candidates[m].anchors, 1)),
              m + 1 == result.anchors.size());
  }
  EXPECT_EQ(result.candidates.back().anchors, result.anchors);
}

TEST(SearchAnchors, NearTheBestOfAllSets) {
  double worst = 1;
  for (uint32_t seed = 20; seed < 32; ++seed) {
    const FakeModel model(13, seed, 6);
    for (const int m : {3, 4, 5}) {
      SearchOptions options;
      options.anchors = m;
      Evaluator evaluator(model);
      const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
      EXPECT_EQ(result.anchors.size(), static_cast<size_t>(m));
      EXPECT_EQ(result.end, SearchEnd::kReached);
      expect_consistent(result, model, evaluator);
      worst = std::max(worst, result.evaluation.objective / model.best_objective(m));
    }
  }
  EXPECT_LE(worst, 1.05);  // greedy steps and single swaps are no exhaustive search
}

TEST(SearchAnchors, CostStaysInBounds) {
  for (const int layers : {30, 80})
    for (const double max_cost : {3.0, 20.0, 60.0, 200.0}) {
      const FakeModel model(layers, 13, 7);
      SearchOptions options = auto_options();
      options.thresholds.max_kl = 0;  // never reached
      options.max_cost = max_cost;
      Evaluator evaluator(model);
      const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
      // A step may end one measurement above what is left: its last candidate is always measured.
      EXPECT_LE(evaluator.cost, max_cost + 1) << layers;
      EXPECT_FALSE(result.within_thresholds);
      EXPECT_NE(result.end, SearchEnd::kAccepted);
      double least = std::numeric_limits<double>::infinity();
      for (const PlanCandidate& candidate : result.candidates) least = std::min(least, candidate.objective);
      EXPECT_EQ(result.evaluation.objective, least);
      expect_consistent(result, model, evaluator);
      // At least a third of the work lies below the first difference from base.
      EXPECT_GE(evaluator.shared, max_cost == 200.0 ? evaluator.cost / 3 : 0);
    }
}

TEST(SearchAnchors, AFixedSizeIsReachedWhateverTheCost) {
  const FakeModel model(40, 14, 7);
  for (const double max_cost : {0.5, 5.0, 50.0}) {
    SearchOptions options;
    options.anchors = 11;
    options.max_cost = max_cost;
    Evaluator evaluator(model);
    const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
    EXPECT_EQ(result.anchors.size(), 11u);
    EXPECT_LE(evaluator.cost, max_cost + 11);
    ASSERT_EQ(result.candidates.size(), 11u);
    EXPECT_EQ(result.candidates.back().anchors, result.anchors);
  }
}

TEST(SearchAnchors, Ends) {
  for (const int layers : {1, 2, 3}) {
    const FakeModel model(layers, 15, 0);
    for (int m = 0; m <= layers; ++m) {
      SearchOptions options;
      options.anchors = m;
      options.thresholds.max_kl = 0;  // only with every layer an anchor
      Evaluator evaluator(model);
      const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
      EXPECT_EQ(result.anchors.size(), static_cast<size_t>(m == 0 ? layers : m));
      EXPECT_EQ(result.end, m == 0 ? SearchEnd::kAccepted : SearchEnd::kReached);
    }
  }
  const FakeModel model(6, 16, 0);
  SearchOptions options;
  options.anchors = 6;
  EXPECT_THAT(search_anchors(model.similarity(), Evaluator(model).callback(), options).anchors,
              ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(SearchAnchors, StopsWhereAnchorsNoLongerHelp) {
  const LayerSimilarity similarity(20, std::vector<double>(20, 1.0));
  const std::vector<double> kl = {2, 1, 0.5, 0.45, 0.4, 0.38, 0.37, 0.36, 0.35, 0.34, 0.33, 0.32};  // by M
  const AnchorEvaluator evaluator = [&](const EvaluationRequest& request) {
    std::vector<AnchorEvaluation> out;
    for (const auto& set : request.anchor_sets)
      out.push_back({kl[set.size() - 1], kl[set.size() - 1], 0.5, 1, 1});
    return out;
  };
  SearchOptions options;  // M = 4 to 7 gained 18 %, 5 to 8 only 10 %
  const SearchResult result = search_anchors(similarity, evaluator, options);
  EXPECT_EQ(result.end, SearchEnd::kNoGain);
  EXPECT_EQ(result.candidates.size(), 8u);
  EXPECT_EQ(result.anchors.size(), 8u);
  options.max_anchors = 4;
  EXPECT_EQ(search_anchors(similarity, evaluator, options).end, SearchEnd::kLimit);
}

TEST(SearchAnchors, ARefusedSetSendsItOn) {
  const FakeModel model(20, 17, 5);
  SearchOptions options = auto_options();
  std::vector<size_t> offered;
  options.accept = [&](const std::vector<int>& anchors, const AnchorEvaluation& evaluation) {
    EXPECT_TRUE(within(options.thresholds, evaluation));
    offered.push_back(anchors.size());
    return offered.size() == 3;
  };
  const SearchResult result = search_anchors(model.similarity(), Evaluator(model).callback(), options);
  EXPECT_EQ(result.end, SearchEnd::kAccepted);
  ASSERT_EQ(offered.size(), 3u);
  EXPECT_EQ(offered[1], offered[0] + 1);
  EXPECT_EQ(offered[2], offered[0] + 2);
  EXPECT_EQ(result.anchors.size(), offered[2]);

  options.accept = [](const std::vector<int>&, const AnchorEvaluation&) { return false; };
  const SearchResult none = search_anchors(model.similarity(), Evaluator(model).callback(), options);
  EXPECT_TRUE(none.end == SearchEnd::kLimit || none.end == SearchEnd::kCost);
  EXPECT_TRUE(none.within_thresholds);  // the best it has, though nobody accepted it
}

TEST(SearchAnchors, SameNumbersSameAnswer) {
  const FakeModel model(30, 18, 7);
  Evaluator first(model), second(model);
  const SearchResult a = search_anchors(model.similarity(), first.callback(), auto_options());
  const SearchResult b = search_anchors(model.similarity(), second.callback(), auto_options());
  EXPECT_EQ(a.anchors, b.anchors);
  EXPECT_EQ(a.measurements, b.measurements);
}

TEST(SearchAnchors, TellsItsProgress) {
  const FakeModel model(20, 19, 5);
  SearchOptions options;
  options.anchors = 4;
  double last_cost = 0;
  std::set<std::string> phases;
  options.progress = [&](const SearchProgress& progress) {
    EXPECT_GE(progress.cost, last_cost);
    EXPECT_EQ(progress.max_cost, options.max_cost);
    if (!progress.best.anchors.empty()) {
      EXPECT_EQ(progress.best.anchors.size(), static_cast<size_t>(progress.anchors));
      EXPECT_EQ(progress.best.objective, model.evaluate(progress.best.anchors, 1).objective);
    }
    last_cost = progress.cost;
    phases.insert(progress.phase);
  };
  search_anchors(model.similarity(), Evaluator(model).callback(), options);
  EXPECT_THAT(phases, ElementsAre("add", "swap"));
}

TEST(SearchAnchors, CanBeCancelled) {
  const FakeModel model(20, 19, 5);
  SearchOptions options;
  int asked = 0;
  options.cancelled = [&] { return ++asked > 3; };
  EXPECT_THROW(search_anchors(model.similarity(), Evaluator(model).callback(), options), Cancelled);
  EXPECT_EQ(asked, 4);
}

TEST(SearchAnchors, RefusesEvaluationsThatCannotBe) {
  const FakeModel model(10, 19, 5);
  const auto run = [&](const AnchorEvaluator& evaluator) {
    try {
      search_anchors(model.similarity(), evaluator, SearchOptions());
    } catch (const BadArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  EXPECT_THAT(run([](const EvaluationRequest&) { return std::vector<AnchorEvaluation>{}; }),
              HasSubstr("expected 1 evaluations, got 0"));
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    for (int field = 0; field < 5; ++field)
      EXPECT_THAT(run([&](const EvaluationRequest& request) {
                    AnchorEvaluation e;
                    double* fields[] = {&e.objective, &e.kl, &e.top1, &e.passkey, &e.passkey_dense};
                    *fields[field] = value;
                    return std::vector<AnchorEvaluation>(request.anchor_sets.size(), e);
                  }),
                  HasSubstr("anchors 0: not finite"));
  struct Stop {};
  EXPECT_THROW(
      search_anchors(
          model.similarity(), [](const EvaluationRequest&) -> std::vector<AnchorEvaluation> { throw Stop{}; },
          SearchOptions()),
      Stop);
}

TEST(SearchAnchors, RefusesOptionsThatCannotBe) {
  const FakeModel model(10, 19, 5);
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const std::function<void(SearchOptions&)> spoils[] = {
      [](SearchOptions& o) { o.anchors = -1; },
      [](SearchOptions& o) { o.anchors = 11; },
      [](SearchOptions& o) { o.max_anchors = 0; },
      [](SearchOptions& o) { o.thresholds.max_kl = kNaN; },
      [](SearchOptions& o) { o.thresholds.max_kl = -0.1; },
      [](SearchOptions& o) { o.thresholds.min_top1 = 1.1; },
      [](SearchOptions& o) { o.thresholds.max_passkey_loss = -0.1; },
      [](SearchOptions& o) { o.min_gain = 1; },
      [](SearchOptions& o) { o.patience = 0; },
      [](SearchOptions& o) { o.max_cost = 0; },
      [](SearchOptions& o) { o.max_cost = kNaN; },
      [](SearchOptions& o) {
        o.rungs = {{1.0, 4}};
      },
      [](SearchOptions& o) {
        o.rungs = {{0.5, 4}, {0.25, 2}};
      },
      [](SearchOptions& o) {
        o.rungs = {{0.5, 0}};
      },
      [](SearchOptions& o) { o.program_sets = -1; },
      [](SearchOptions& o) { o.swap_passes = -1; },
      [](SearchOptions& o) { o.swap_reach = -1; },
      [](SearchOptions& o) { o.swap_layers = -1; },
  };
  for (const auto& spoil : spoils) {
    SearchOptions options;
    spoil(options);
    EXPECT_THROW(search_anchors(model.similarity(), Evaluator(model).callback(), options), BadArgument);
  }
  EXPECT_THROW(search_anchors({}, Evaluator(model).callback(), {}), BadArgument);
}

TEST(SearchAnchors, WorksWithoutRungsSwapsAndProgram) {
  const FakeModel model(16, 21, 5);
  SearchOptions options;
  options.anchors = 4;
  options.rungs.clear();
  options.program_sets = 0;
  options.swap_passes = 0;
  Evaluator evaluator(model);
  const SearchResult result = search_anchors(model.similarity(), evaluator.callback(), options);
  EXPECT_EQ(evaluator.measurements, 1 + 15 + 14 + 13);  // greedy additions, all of them
  // By hand.
  std::vector<int> greedy = {0};
  while (greedy.size() < 4) {
    std::vector<int> best;
    for (int layer = 1; layer < 16; ++layer) {
      std::vector<int> set = greedy;
      if (std::count(set.begin(), set.end(), layer)) continue;
      set.push_back(layer);
      std::sort(set.begin(), set.end());
      if (best.empty() || model.evaluate(set, 1).objective < model.evaluate(best, 1).objective) best = set;
    }
    greedy = best;
  }
  EXPECT_EQ(result.anchors, greedy);
}

TEST(SearchProgram, MeasuresTheProgramsSetsOnly) {
  const FakeModel model(20, 22, 0);
  std::vector<double> weights(20, 0.5);
  SearchOptions options = auto_options();
  options.thresholds.max_kl = 0.2;
  options.thresholds.min_top1 = 0.5;
  options.max_anchors = 20;
  Evaluator evaluator(model);
  const SearchResult result = search_program(model.similarity(), weights, evaluator.callback(), options);
  EXPECT_EQ(result.end, SearchEnd::kAccepted);
  EXPECT_EQ(evaluator.measurements, static_cast<int64_t>(result.anchors.size()));
  for (const PlanCandidate& candidate : result.candidates)
    EXPECT_EQ(
        candidate.anchors,
        choose_anchors(model.similarity(), weights, static_cast<int>(candidate.anchors.size())).anchors);
  expect_consistent(result, model, evaluator);

  options.anchors = 5;
  Evaluator fixed(model);
  const SearchResult five = search_program(model.similarity(), weights, fixed.callback(), options);
  EXPECT_EQ(fixed.measurements, 1);
  EXPECT_EQ(five.anchors, choose_anchors(model.similarity(), weights, 5).anchors);
  EXPECT_EQ(five.end, SearchEnd::kReached);
  ASSERT_EQ(five.candidates.size(), 1u);

  options.anchors = 0;
  options.max_anchors = 3;
  EXPECT_EQ(search_program(model.similarity(), weights, Evaluator(model).callback(), options).end,
            SearchEnd::kLimit);
  options.max_anchors = 20;
  options.max_cost = 2.5;
  EXPECT_EQ(search_program(model.similarity(), weights, Evaluator(model).callback(), options).end,
            SearchEnd::kCost);
}

TEST(FirstDifference, IsTheFirstLayerTreatedOtherwise) {
  EXPECT_EQ(first_difference({0, 3, 7}, {0, 3, 7}, 10), 10);
  EXPECT_EQ(first_difference({0, 3, 7}, {0, 3}, 10), 7);
  EXPECT_EQ(first_difference({0, 3}, {0, 3, 7}, 10), 7);
  EXPECT_EQ(first_difference({0, 3, 7}, {0, 5, 7}, 10), 3);
  EXPECT_EQ(first_difference({0}, {0, 1}, 2), 1);
}

TEST(Within, ThresholdsAreInclusive) {
  const QualityThresholds thresholds;
  EXPECT_TRUE(within(thresholds, {9, 0.06, 0.90, 0.95, 1.0}));
  EXPECT_FALSE(within(thresholds, {0, 0.0601, 0.90, 0.95, 1.0}));
  EXPECT_FALSE(within(thresholds, {0, 0.06, 0.899, 0.95, 1.0}));
  EXPECT_FALSE(within(thresholds, {0, 0.06, 0.90, 0.949, 1.0}));
  EXPECT_TRUE(within(thresholds, {0, 0.06, 0.90, 0.5, 0.5}));  // dense loses as many
}

}  // namespace
}  // namespace kascade
