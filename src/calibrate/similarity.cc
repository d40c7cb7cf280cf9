// SPDX-License-Identifier: Apache-2.0
// From averaged statistics to layer similarity, head map and plan.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "kascade/calibrate.h"

namespace kascade {
namespace {

void check_shape(const HeadSimilarity& s) {
  require<BadArgument>(
      s.layers >= 1 && s.kv_heads >= 1 &&
          s.values.size() == static_cast<size_t>(s.layers) * s.layers * s.kv_heads * s.kv_heads,
      "similarity: expected [layers, layers, kv_heads, kv_heads], got {} numbers for {} layers of {} KV "
      "heads",
      s.values.size(), s.layers, s.kv_heads);
}

// KV heads of a rank; with more ranks than KV heads, each rank holds one (replicated).
int heads_of_rank(int kv_heads, int tensor_parallel) {
  require<BadArgument>(
      tensor_parallel >= 1 && (kv_heads % tensor_parallel == 0 || tensor_parallel % kv_heads == 0),
      "tensor_parallel: expected a divisor or a multiple of {} KV heads, got {}", kv_heads, tensor_parallel);
  return std::max(1, kv_heads / tensor_parallel);
}

// The head of layer i that serves head r of layer j best, ties to the smaller.
int best_head(const HeadSimilarity& s, int i, int j, int r, int rank_heads) {
  const int first = r / rank_heads * rank_heads;
  int best = first;
  for (int a = first + 1; a < first + rank_heads; ++a)
    if (s.at(i, j, r, a) > s.at(i, j, r, best)) best = a;
  return best;
}

}  // namespace

LayerSimilarity layer_similarity(const HeadSimilarity& similarity, int tensor_parallel) {
  check_shape(similarity);
  const int layers = similarity.layers, heads = similarity.kv_heads;
  const int rank_heads = heads_of_rank(heads, tensor_parallel);
  LayerSimilarity out(static_cast<size_t>(layers), std::vector<double>(static_cast<size_t>(layers), 0.0));
  for (int i = 0; i < layers; ++i) {
    for (int j = i; j < layers; ++j) {
      double sum = 0;
      for (int r = 0; r < heads; ++r)
        sum += similarity.at(i, j, r, best_head(similarity, i, j, r, rank_heads));
      out[i][j] = i == j ? 1.0 : sum / heads;
    }
  }
  return out;
}

std::vector<std::vector<int>> head_map(const HeadSimilarity& similarity, const std::vector<int>& anchors,
                                       int tensor_parallel) {
  check_shape(similarity);
  const int rank_heads = heads_of_rank(similarity.kv_heads, tensor_parallel);
  require<BadArgument>(!anchors.empty() && anchors[0] == 0, "anchors: expected layer 0 first");
  std::vector<std::vector<int>> map;
  size_t next = 0;
  for (int layer = 0; layer < similarity.layers; ++layer) {
    if (next < anchors.size() && anchors[next] == layer) ++next;
    const int source = anchors[next - 1];
    std::vector<int>& row = map.emplace_back();
    for (int r = 0; r < similarity.kv_heads; ++r)
      row.push_back(source == layer ? r : best_head(similarity, source, layer, r, rank_heads));
  }
  require<BadArgument>(next == anchors.size(), "anchors[{}]: expected ascending layers below {}, got {}",
                       next, similarity.layers, next < anchors.size() ? anchors[next] : 0);
  return map;
}

Plan make_plan(const ModelIdentity& model, const CalibrationSettings& settings,
               const HeadSimilarity& similarity, const std::vector<double>& importance,
               const std::vector<int>& anchors) {
  require<BadArgument>(similarity.layers == model.layers && similarity.kv_heads == model.kv_heads,
                       "similarity: expected {} layers of {} KV heads (the model), got {} of {}",
                       model.layers, model.kv_heads, similarity.layers, similarity.kv_heads);
  Plan plan;
  plan.model = model;
  plan.anchors = anchors;
  plan.settings = settings;
  plan.head_map = head_map(similarity, anchors, settings.tensor_parallel);
  plan.similarity = layer_similarity(similarity, settings.tensor_parallel);
  plan.importance = importance;
  plan.retained_mass = retained_mass(plan.similarity, anchors);
  plan.objective =
      anchor_objective(plan.similarity, settings.importance ? importance : std::vector<double>{}, anchors);
  validate_plan(plan);
  return plan;
}

}  // namespace kascade
