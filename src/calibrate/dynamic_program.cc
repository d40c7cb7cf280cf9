// SPDX-License-Identifier: Apache-2.0
// The exact choice of anchors (docs/method.md, "Calibration"), keeping the n best sets instead of one.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kascade/calibrate.h"

namespace kascade {
namespace {

double weight_of(const std::vector<double>& weights, size_t layer) {
  return weights.empty() ? 1.0 : weights[layer];
}

void check_inputs(const LayerSimilarity& similarity, const std::vector<double>& weights) {
  const size_t layers = similarity.size();
  require<BadArgument>(layers >= 1, "similarity: expected at least one layer, got none");
  for (size_t i = 0; i < layers; ++i) {
    require<BadArgument>(similarity[i].size() == layers, "similarity[{}]: expected {} numbers, got {}", i,
                         layers, similarity[i].size());
    for (size_t j = i; j < layers; ++j)
      require<BadArgument>(std::isfinite(similarity[i][j]),
                           "similarity[{}][{}]: expected a finite number, got {}", i, j, similarity[i][j]);
  }
  require<BadArgument>(weights.empty() || weights.size() == layers,
                       "weights: expected {} numbers or none, got {}", layers, weights.size());
  for (size_t j = 0; j < weights.size(); ++j)
    require<BadArgument>(std::isfinite(weights[j]), "weights[{}]: expected a finite number, got {}", j,
                         weights[j]);
}

void check_anchors(const std::vector<int>& anchors, size_t layers) {
  require<BadArgument>(!anchors.empty() && anchors[0] == 0, "anchors: expected layer 0 first");
  for (size_t i = 1; i < anchors.size(); ++i)
    require<BadArgument>(anchors[i] > anchors[i - 1] && static_cast<size_t>(anchors[i]) < layers,
                         "anchors[{}]: expected ascending layers below {}, got {}", i, layers, anchors[i]);
}

// One of the best ways to cover layers 0..i-1 with m anchors: its value, its last anchor, and which of the
// best ways to cover the layers before that anchor it continues.
struct Cover {
  double value = 0;
  int last_anchor = 0;
  int continues = 0;
};

// Larger value first. Equal values: the smaller last anchor, then the better placed beginning, which by
// induction is the one with the smaller last anchor, and so on.
bool goes_first(const Cover& a, const Cover& b) {
  if (a.value != b.value) return a.value > b.value;
  if (a.last_anchor != b.last_anchor) return a.last_anchor < b.last_anchor;
  return a.continues < b.continues;
}

}  // namespace

double anchor_objective(const LayerSimilarity& similarity, const std::vector<double>& weights,
                        const std::vector<int>& anchors) {
  check_inputs(similarity, weights);
  check_anchors(anchors, similarity.size());
  double total = 0;
  for (size_t k = 0; k < anchors.size(); ++k) {
    const size_t begin = static_cast<size_t>(anchors[k]);
    const size_t end = k + 1 < anchors.size() ? static_cast<size_t>(anchors[k + 1]) : similarity.size();
    double segment = 0;  // summed apart, as the dynamic program does, so that both give the same bits
    for (size_t j = begin; j < end; ++j) segment += weight_of(weights, j) * similarity[begin][j];
    total = k == 0 ? segment : total + segment;
  }
  return total;
}

std::vector<AnchorChoice> best_anchor_sets(const LayerSimilarity& similarity,
                                           const std::vector<double>& weights, int anchors, int count) {
  check_inputs(similarity, weights);
  const int layers = static_cast<int>(similarity.size());
  require<BadArgument>(anchors >= 1 && anchors <= layers, "anchors: expected 1..{}, got {}", layers, anchors);
  require<BadArgument>(count >= 1, "count: expected at least 1, got {}", count);

  // segment[l][i] = sum for j = l..i-1 of weight[j] * s[l][j]
  std::vector<std::vector<double>> segment(static_cast<size_t>(layers));
  for (int l = 0; l < layers; ++l) {
    segment[l].assign(static_cast<size_t>(layers) + 1, 0.0);
    for (int j = l; j < layers; ++j)
      segment[l][j + 1] = segment[l][j] + weight_of(weights, j) * similarity[l][j];
  }

  // best[m][i]: the best covers of layers 0..i-1 with m anchors, in order.
  using Row = std::vector<std::vector<Cover>>;
  std::vector<Row> best(static_cast<size_t>(anchors) + 1, Row(static_cast<size_t>(layers) + 1));
  for (int i = 1; i <= layers; ++i) best[1][i] = {{segment[0][i], 0, 0}};
  for (int m = 2; m <= anchors; ++m) {
    for (int i = m; i <= layers; ++i) {
      std::vector<Cover>& covers = best[m][i];
      for (int l = m - 1; l < i; ++l) {
        const std::vector<Cover>& beginnings = best[m - 1][l];
        for (size_t rank = 0; rank < beginnings.size(); ++rank) {
          const Cover cover = {beginnings[rank].value + segment[l][i], l, static_cast<int>(rank)};
          if (covers.size() == static_cast<size_t>(count) && !goes_first(cover, covers.back())) continue;
          covers.insert(std::upper_bound(covers.begin(), covers.end(), cover, goes_first), cover);
          if (covers.size() > static_cast<size_t>(count)) covers.pop_back();
        }
      }
    }
  }

  std::vector<AnchorChoice> out;
  for (const Cover& last : best[anchors][layers]) {
    AnchorChoice choice{std::vector<int>(static_cast<size_t>(anchors)), last.value};
    Cover cover = last;
    for (int m = anchors; m >= 1; --m) {
      choice.anchors[m - 1] = cover.last_anchor;
      if (m > 1) cover = best[m - 1][cover.last_anchor][cover.continues];
    }
    out.push_back(std::move(choice));
  }
  return out;
}

AnchorChoice choose_anchors(const LayerSimilarity& similarity, const std::vector<double>& weights,
                            int anchors) {
  return best_anchor_sets(similarity, weights, anchors, 1).front();
}

std::vector<double> retained_mass(const LayerSimilarity& similarity, const std::vector<int>& anchors) {
  check_inputs(similarity, {});
  check_anchors(anchors, similarity.size());
  std::vector<double> out;
  size_t source = 0;
  for (size_t j = 0; j < similarity.size(); ++j) {
    if (source + 1 < anchors.size() && static_cast<size_t>(anchors[source + 1]) == j) ++source;
    out.push_back(similarity[anchors[source]][j]);
  }
  return out;
}

}  // namespace kascade
