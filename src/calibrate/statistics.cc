// SPDX-License-Identifier: Apache-2.0
// Statistics of one prompt: similarity of index sets, and importance.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/check.h"
#include "calibrate/triangle.h"
#include "kascade/calibrate.h"

namespace kascade {
namespace {

// Four chains hide the latency of an addition; loads are then the limit (two a cycle).
float sum_at(const float* weights, const int32_t* positions, int32_t count) {
  float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  int32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    s0 += weights[positions[i]];
    s1 += weights[positions[i + 1]];
    s2 += weights[positions[i + 2]];
    s3 += weights[positions[i + 3]];
  }
  for (; i < count; ++i) s0 += weights[positions[i]];
  return (s0 + s1) + (s2 + s3);
}

// Lists ascend, so their ends bound them.
void check_set(const int32_t* positions, int64_t count, const TileWeights& tile, int64_t capacity, int layer,
               int head) {
  require<BadArgument>(count >= 0 && count <= capacity,
                       "index set of layer {}, KV head {}: expected 0..{} members, got {}", layer, head,
                       capacity, count);
  require<BadArgument>(count == 0 || (positions[0] >= 0 && positions[count - 1] < tile.candidates),
                       "index set of layer {}, KV head {}: expected positions in 0..{}, got {}..{}", layer,
                       head, tile.candidates - 1, positions[0], positions[count - 1]);
}

// cos(x, y) of one row; a zero vector has cosine 0.
double cosine(const float* x, const float* y, int64_t width) {
  constexpr int kLanes = 8;  // independent sums, in a fixed order whatever the compiler vectorises
  double xy[kLanes] = {}, xx[kLanes] = {}, yy[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double a = x[i + lane], b = y[i + lane];
      xy[lane] += a * b;
      xx[lane] += a * a;
      yy[lane] += b * b;
    }
  }
  for (; i < width; ++i) {
    const double a = x[i], b = y[i];
    xy[0] += a * b;
    xx[0] += a * a;
    yy[0] += b * b;
  }
  double dot = 0, x_square = 0, y_square = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    dot += xy[lane];
    x_square += xx[lane];
    y_square += yy[lane];
  }
  const double norms = std::sqrt(x_square) * std::sqrt(y_square);
  return norms > 0 ? std::clamp(dot / norms, -1.0, 1.0) : norms;  // NaN stays NaN
}

void add_to(std::vector<int64_t>& sum, const std::vector<int64_t>& other) {
  std::transform(sum.begin(), sum.end(), other.begin(), sum.begin(), std::plus<>());
}

}  // namespace

SimilarityAccumulator::SimilarityAccumulator(int layers, int kv_heads)
    : layers_(layers), kv_heads_(kv_heads) {
  const size_t cells = static_cast<size_t>(triangle_cells(layers, kv_heads));
  tiles_.assign(static_cast<size_t>(layers) * kv_heads, 0);
  minimum_.assign(cells, 1.0F);
  sum_.assign(cells, 0);
}

int64_t SimilarityAccumulator::slot(int layer, int kv_head) const {
  return triangle_slot(kv_heads_, layer, kv_head);
}

void SimilarityAccumulator::add(int layer, int kv_head, const TileWeights& tile, const TileSets* sets) {
  require<BadArgument>(layer >= 0 && layer < layers_, "layer: expected 0..{}, got {}", layers_ - 1, layer);
  require<BadArgument>(kv_head >= 0 && kv_head < kv_heads_, "kv_head: expected 0..{}, got {}", kv_heads_ - 1,
                       kv_head);
  const auto kept = [&](int i, int a) {
    const TileSets& from = sets[i];
    const int32_t* positions = from.positions + a * from.capacity;
    check_set(positions, from.counts[a], tile, from.capacity, i, a);
    return sum_at(tile.weights, positions, from.counts[a]);
  };
  const float own_selected = kept(layer, kv_head);
  const auto require_mass = [&](float mass) {  // false for NaN
    require<BadArgument>(mass >= 0 && mass <= std::numeric_limits<float>::max(),
                         "attention weights of layer {}, KV head {}: expected a finite sum >= 0, got {}",
                         layer, kv_head, mass);
  };
  require_mass(own_selected + tile.own_mass);
  float* minimum = minimum_.data() + slot(layer, kv_head);
  int64_t* sum = sum_.data() + slot(layer, kv_head);
  for (int i = 0; i <= layer; ++i) {
    for (int a = 0; a < kv_heads_; ++a, ++minimum, ++sum) {
      const float own_mass = tile.own_mass_of_heads != nullptr ? tile.own_mass_of_heads[a] : tile.own_mass;
      const float mass = kept(i, a) + own_mass, own = own_selected + own_mass;
      require_mass(mass);
      // Rounding, and ties at the cut, can put another layer's sum above the layer's own: a share ends at 1.
      const float share = mass < own ? mass / own : 1.0F;
      *minimum = std::min(*minimum, share);
      *sum += static_cast<int64_t>(static_cast<double>(share) * kFixedOne + 0.5);
    }
  }
  ++tiles_[static_cast<size_t>(layer) * kv_heads_ + kv_head];
}

void SimilarityAccumulator::merge(const SimilarityAccumulator& other) {
  require<BadArgument>(other.layers_ == layers_ && other.kv_heads_ == kv_heads_,
                       "similarity: expected {} layers of {} KV heads, got {} of {}", layers_, kv_heads_,
                       other.layers_, other.kv_heads_);
  add_to(tiles_, other.tiles_);
  add_to(sum_, other.sum_);
  std::transform(minimum_.begin(), minimum_.end(), other.minimum_.begin(), minimum_.begin(),
                 [](float a, float b) { return std::min(a, b); });
}

int64_t SimilarityAccumulator::tiles() const {
  for (int layer = 0; layer < layers_; ++layer)
    for (int head = 0; head < kv_heads_; ++head) {
      const int64_t seen = tiles_[static_cast<size_t>(layer) * kv_heads_ + head];
      require<BadArgument>(seen == tiles_[0] && seen > 0,
                           "tiles of layer {}, KV head {}: expected {}, got {}", layer, head,
                           tiles_[0] > 0 ? tiles_[0] : 1, seen);
    }
  return tiles_[0];
}

std::vector<float> SimilarityAccumulator::minimum() const {
  tiles();  // checks
  std::vector<float> out(static_cast<size_t>(layers_) * layers_ * kv_heads_ * kv_heads_, 0.0F);
  for_each_cell(layers_, kv_heads_, [&](size_t cell, size_t full) { out[full] = minimum_[cell]; });
  return out;
}

std::vector<float> SimilarityAccumulator::mean() const {
  const double tiles = static_cast<double>(this->tiles());
  std::vector<float> out(static_cast<size_t>(layers_) * layers_ * kv_heads_ * kv_heads_, 0.0F);
  for_each_cell(layers_, kv_heads_, [&](size_t cell, size_t full) {
    out[full] = static_cast<float>(from_fixed(sum_[cell]) / tiles);
  });
  return out;
}

ImportanceAccumulator::ImportanceAccumulator(int layers) {
  triangle_cells(layers, 1);  // checks
  tokens_.assign(static_cast<size_t>(layers), 0);
  sum_.assign(static_cast<size_t>(layers), 0);
}

void ImportanceAccumulator::add(int layer, const float* x, const float* y, int64_t rows, int64_t width) {
  require<BadArgument>(layer >= 0 && static_cast<size_t>(layer) < sum_.size(),
                       "layer: expected 0..{}, got {}", sum_.size() - 1, layer);
  require<BadArgument>(rows >= 0 && width >= 1,
                       "residual rows of layer {}: expected [>= 0, >= 1], got [{}, {}]", layer, rows, width);
  int64_t sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const double value = cosine(x + row * width, y + row * width, width);
    require<BadArgument>(std::isfinite(value), "residual stream of layer {}, row {}: not finite", layer, row);
    sum += to_fixed(value);
  }
  sum_[static_cast<size_t>(layer)] += sum;
  tokens_[static_cast<size_t>(layer)] += rows;
}

void ImportanceAccumulator::merge(const ImportanceAccumulator& other) {
  require<BadArgument>(other.sum_.size() == sum_.size(), "importance: expected {} layers, got {}",
                       sum_.size(), other.sum_.size());
  add_to(sum_, other.sum_);
  add_to(tokens_, other.tokens_);
}

std::vector<float> ImportanceAccumulator::importance() const {
  std::vector<float> out;
  for (size_t layer = 0; layer < sum_.size(); ++layer) {
    require<BadArgument>(tokens_[layer] > 0, "importance of layer {}: no token was seen", layer);
    out.push_back(static_cast<float>(1 - from_fixed(sum_[layer]) / static_cast<double>(tokens_[layer])));
  }
  return out;
}

PromptStatistics prompt_statistics(const SimilarityAccumulator& similarity,
                                   const ImportanceAccumulator& importance, int64_t tokens) {
  PromptStatistics out;
  out.layers = similarity.layers();
  out.kv_heads = similarity.kv_heads();
  out.tiles = similarity.tiles();
  out.tokens = tokens;
  out.similarity_min = similarity.minimum();
  out.similarity_mean = similarity.mean();
  out.importance = importance.importance();
  require<BadArgument>(out.importance.size() == static_cast<size_t>(out.layers),
                       "importance: expected {} layers, got {}", out.layers, out.importance.size());
  return out;
}

}  // namespace kascade
