// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "kascade/calibrate.h"
#include "kascade/error.h"

namespace kascade {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// One tile of one layer: its weights [heads][candidates], own mass [heads], and sets [heads].
struct LayerTile {
  std::vector<std::vector<float>> weights;
  std::vector<float> own_mass;
  std::vector<int32_t> positions;  // [heads, capacity]
  std::vector<int32_t> counts;
};

size_t at(int layers, int heads, int i, int j, int r, int a) {
  return ((static_cast<size_t>(i) * layers + j) * heads + r) * heads + a;
}

LayerTile layer_tile(std::vector<std::vector<float>> weights, std::vector<float> own_mass,
                     const std::vector<std::vector<int32_t>>& sets, size_t capacity = 4) {
  LayerTile tile{std::move(weights), std::move(own_mass), {}, {}};
  for (const std::vector<int32_t>& set : sets) {
    tile.counts.push_back(static_cast<int32_t>(set.size()));
    tile.positions.insert(tile.positions.end(), set.begin(), set.end());
    tile.positions.resize(tile.counts.size() * capacity, -1);
  }
  return tile;
}

std::vector<TileSets> sets_of(const std::vector<LayerTile>& layers) {
  std::vector<TileSets> sets;
  sets.reserve(layers.size());
  for (const LayerTile& layer : layers)
    sets.push_back({layer.positions.data(), layer.counts.data(),
                    static_cast<int64_t>(layer.positions.size() / layer.counts.size())});
  return sets;
}

void add_tile(SimilarityAccumulator& accumulator, const std::vector<LayerTile>& layers) {
  const std::vector<TileSets> sets = sets_of(layers);
  for (size_t j = 0; j < layers.size(); ++j)
    for (size_t r = 0; r < layers[j].weights.size(); ++r)
      accumulator.add(static_cast<int>(j), static_cast<int>(r),
                      {layers[j].weights[r].data(), static_cast<int64_t>(layers[j].weights[r].size()),
                       layers[j].own_mass[r]},
                      sets.data());
}

// Similarity (docs/method.md, "Calibration") worked out by hand: layer 0 selects {0,1} and {2,3}.
std::vector<LayerTile> example_tile() {
  return {layer_tile({{.25F, .25F, .0F, .0F}, {.0F, .0F, .25F, .25F}}, {.5F, .5F}, {{0, 1}, {2, 3}}),
          layer_tile({{.30F, .10F, .20F, .05F}, {.02F, .03F, .30F, .25F}}, {.35F, .40F}, {{0, 2}, {2, 3}})};
}

TEST(Similarity, WorkedExample) {
  SimilarityAccumulator accumulator(2, 2);
  add_tile(accumulator, example_tile());
  for (const std::vector<float>& s : {accumulator.minimum(), accumulator.mean()}) {
    EXPECT_NEAR(s[at(2, 2, 0, 1, 0, 0)], .75 / .85, 1e-6);  // .882
    EXPECT_NEAR(s[at(2, 2, 0, 1, 0, 1)], .60 / .85, 1e-6);  // .706
    EXPECT_NEAR(s[at(2, 2, 0, 1, 1, 0)], .45 / .95, 1e-6);  // .474
    EXPECT_EQ(s[at(2, 2, 0, 1, 1, 1)], 1.0F);
    EXPECT_EQ(s[at(2, 2, 1, 1, 0, 0)], 1.0F);  // its own set, bit for bit
    EXPECT_EQ(s[at(2, 2, 1, 0, 0, 0)], 0.0F);  // below the diagonal
  }
  HeadSimilarity averaged{2, 2, {}};
  for (const float value : accumulator.minimum()) averaged.values.push_back(value);
  EXPECT_NEAR(layer_similarity(averaged)[0][1], .941, 5e-4);
  EXPECT_EQ(head_map(averaged, {0})[1], (std::vector<int>{0, 1}));
}

// The same example with the own mass of the anchor's head, .35 or .40, in both masses.
TEST(Similarity, ThePublishedCodeAddsTheAnchorHeadsOwnMass) {
  SimilarityAccumulator accumulator(2, 2);
  const std::vector<LayerTile> layers = example_tile();
  const std::vector<TileSets> sets = sets_of(layers);
  for (int j = 0; j < 2; ++j)
    for (int r = 0; r < 2; ++r)
      accumulator.add(j, r,
                      {layers[j].weights[r].data(), 4, layers[j].own_mass[r], layers[j].own_mass.data()},
                      sets.data());
  const std::vector<float> s = accumulator.minimum();
  EXPECT_NEAR(s[at(2, 2, 0, 1, 0, 0)], (.40 + .35) / (.50 + .35), 1e-6);
  EXPECT_NEAR(s[at(2, 2, 0, 1, 0, 1)], (.25 + .40) / (.50 + .40), 1e-6);
  EXPECT_NEAR(s[at(2, 2, 0, 1, 1, 0)], (.05 + .35) / (.55 + .35), 1e-6);
  EXPECT_NEAR(s[at(2, 2, 0, 1, 1, 1)], 1, 1e-6);
}

TEST(Similarity, ZeroOverZeroIsOne) {
  SimilarityAccumulator accumulator(2, 1);
  add_tile(accumulator, {layer_tile({{}}, {0.0F}, {{}}), layer_tile({{}}, {0.0F}, {{}})});  // no mass at all
  add_tile(accumulator, {layer_tile({{}}, {3.0F}, {{}}), layer_tile({{}}, {2.0F}, {{}})});  // tile 0
  add_tile(accumulator,
           {layer_tile({{0, 0}}, {0}, {{0}}), layer_tile({{0, 0}}, {0}, {{1}})});  // all weights 0
  for (const float value : {accumulator.minimum()[1], accumulator.mean()[1]}) EXPECT_EQ(value, 1.0F);
  EXPECT_EQ(accumulator.tiles(), 3);
}

TEST(Similarity, MinimumAndMeanOverTiles) {
  SimilarityAccumulator accumulator(2, 1);
  const auto tile = [](float first, float second) {
    return std::vector<LayerTile>{layer_tile({{1, 0}}, {0}, {{0}}),
                                  layer_tile({{first, second}}, {0}, {{1}})};
  };
  add_tile(accumulator, tile(0.25F, 1));
  add_tile(accumulator, tile(0.75F, 1));
  add_tile(accumulator, tile(0.5F, 1));
  EXPECT_EQ(accumulator.minimum()[1], 0.25F);
  EXPECT_EQ(accumulator.mean()[1], 0.5F);
}

TEST(Similarity, AShareEndsAtOne) {  // own sets may lose a tie at the cut to a larger sum by rounding
  SimilarityAccumulator accumulator(2, 1);
  add_tile(accumulator, {layer_tile({{1, 1}}, {0}, {{1}}), layer_tile({{0.1F, 0.2F}}, {0}, {{0}})});
  EXPECT_EQ(accumulator.minimum()[1], 1.0F);
}

// A prompt of random tiles; sets are the true top sets of the weights.
std::vector<std::vector<LayerTile>> random_prompt(int layers, int heads, int tiles, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0, 1);
  std::vector<std::vector<LayerTile>> prompt;
  for (int t = 0; t < tiles; ++t) {
    const size_t candidates = static_cast<size_t>(t) * 8;
    std::vector<LayerTile> tile;
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<std::vector<float>> weights(heads);
      std::vector<std::vector<int32_t>> sets(heads);
      std::vector<float> own;
      for (int head = 0; head < heads; ++head) {
        for (size_t i = 0; i < candidates; ++i) weights[head].push_back(std::pow(uniform(random), 6.0F));
        std::vector<int32_t> order(candidates);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return weights[head][a] > weights[head][b]; });
        order.resize(std::min<size_t>(candidates, 11));
        std::sort(order.begin(), order.end());
        sets[head] = order;
        own.push_back(uniform(random));
      }
      tile.push_back(layer_tile(std::move(weights), std::move(own), sets, 11));
    }
    prompt.push_back(std::move(tile));
  }
  return prompt;
}

TEST(Similarity, AgreesWithTheDefinition) {
  constexpr int kLayers = 5, kHeads = 3, kTiles = 7;
  const auto prompt = random_prompt(kLayers, kHeads, kTiles, 1);
  SimilarityAccumulator accumulator(kLayers, kHeads);
  for (const auto& tile : prompt) add_tile(accumulator, tile);
  const std::vector<float> minimum = accumulator.minimum(), mean = accumulator.mean();
  for (int i = 0; i < kLayers; ++i)
    for (int j = i; j < kLayers; ++j)
      for (int r = 0; r < kHeads; ++r)
        for (int a = 0; a < kHeads; ++a) {
          double least = 1, sum = 0;
          for (const auto& tile : prompt) {
            const auto mass = [&](int layer, int head) {
              double total = tile[j].own_mass[r];
              for (int n = 0; n < tile[layer].counts[head]; ++n)
                total += tile[j].weights[r][tile[layer].positions[head * 11 + n]];
              return total;
            };
            const double share = mass(i, a) / mass(j, r);
            least = std::min(least, share);
            sum += share;
          }
          // fp32 sums of some ten terms.
          EXPECT_NEAR(minimum[at(kLayers, kHeads, i, j, r, a)], least, 1e-6);
          EXPECT_NEAR(mean[at(kLayers, kHeads, i, j, r, a)], sum / kTiles, 1e-6);
        }
}

TEST(Similarity, OrderAndMergingDoNotMatter) {
  constexpr int kLayers = 4, kHeads = 2;
  const auto prompt = random_prompt(kLayers, kHeads, 9, 2);
  SimilarityAccumulator forward(kLayers, kHeads), backward(kLayers, kHeads);
  for (size_t t = 0; t < prompt.size(); ++t) {
    add_tile(forward, prompt[t]);
    add_tile(backward, prompt[prompt.size() - 1 - t]);
  }
  SimilarityAccumulator part(kLayers, kHeads), rest(kLayers, kHeads);
  for (size_t t = 0; t < prompt.size(); ++t) add_tile(t % 3 == 0 ? part : rest, prompt[t]);
  rest.merge(part);
  for (const SimilarityAccumulator* other : {&backward, &rest}) {
    EXPECT_EQ(other->minimum(), forward.minimum());
    EXPECT_EQ(other->mean(), forward.mean());
    EXPECT_EQ(other->tiles(), 9);
  }
  SimilarityAccumulator another(kLayers, kHeads + 1);
  EXPECT_THROW(rest.merge(another), BadArgument);
}

TEST(Similarity, OneLayerOneHead) {
  SimilarityAccumulator accumulator(1, 1);
  add_tile(accumulator, {layer_tile({{0.5F}}, {0.5F}, {{0}})});
  EXPECT_EQ(accumulator.minimum(), std::vector<float>{1.0F});
}

TEST(Similarity, RefusesWhatCannotBe) {
  SimilarityAccumulator accumulator(2, 1);
  const auto tile = example_tile();
  const float weights[] = {0.5F, 0.25F};
  const auto add = [&](const TileWeights& w, std::vector<int32_t> positions, int32_t count, int layer = 0,
                       int head = 0) {
    const TileSets sets = {positions.data(), &count, static_cast<int64_t>(positions.size())};
    accumulator.add(layer, head, w, &sets);
  };
  EXPECT_THROW(add({weights, 2, 0}, {0}, 1, 2), BadArgument);
  EXPECT_THROW(add({weights, 2, 0}, {0}, 1, -1), BadArgument);
  EXPECT_THROW(add({weights, 2, 0}, {0}, 1, 0, 1), BadArgument);
  EXPECT_THROW(add({weights, 2, 0}, {0}, 2), BadArgument);  // past the capacity
  EXPECT_THROW(add({weights, 2, 0}, {0}, -1), BadArgument);
  EXPECT_THROW(add({weights, 2, 0}, {2}, 1), BadArgument);  // past the candidates
  EXPECT_THROW(add({weights, 2, 0}, {-1}, 1), BadArgument);
  EXPECT_THROW(add({weights, 2, kNaN}, {0}, 1), BadArgument);
  EXPECT_THROW(add({weights, 2, kInf}, {0}, 1), BadArgument);
  EXPECT_THROW(add({weights, 2, -1.0F}, {0}, 1), BadArgument);
  const float spoiled[] = {kNaN, kInf};
  EXPECT_THROW(add({spoiled, 2, 0}, {0}, 1), BadArgument);
  EXPECT_THROW(add({spoiled, 2, 0}, {1}, 1), BadArgument);
  EXPECT_THROW(accumulator.minimum(), BadArgument);  // no tile
  add({weights, 2, 0}, {0}, 1);
  EXPECT_THROW(accumulator.mean(), BadArgument);  // layer 1 has seen none
}

TEST(Similarity, NaNBeyondTheSetIsNeverRead) {
  SimilarityAccumulator accumulator(1, 1);
  add_tile(accumulator, {layer_tile({{kNaN, 0.5F, kNaN}}, {0.0F}, {{1}})});
  EXPECT_EQ(accumulator.minimum()[0], 1.0F);
}

TEST(Similarity, ShapesAreBounded) {
  EXPECT_THROW(SimilarityAccumulator(0, 1), BadArgument);
  EXPECT_THROW(SimilarityAccumulator(1, 0), BadArgument);
  EXPECT_THROW(SimilarityAccumulator(-5, 3), BadArgument);
  EXPECT_THROW(SimilarityAccumulator(1 << 16, 1 << 16), OutOfMemory);
  EXPECT_THROW(SimilarityAccumulator(2'000'000'000, 2'000'000'000), BadArgument);
}

TEST(Importance, OneMinusMeanCosine) {
  ImportanceAccumulator accumulator(2);
  const float x[] = {1, 0, 0, 2}, y[] = {1, 1, 0, 2};
  accumulator.add(0, x, y, 2, 2);  // cosines 1/sqrt(2) and 1
  accumulator.add(1, x, x, 2, 2);
  const std::vector<float> e = accumulator.importance();
  EXPECT_NEAR(e[0], 1 - (std::sqrt(0.5) + 1) / 2, 1e-7);
  EXPECT_NEAR(e[1], 0, 1e-7);
}

TEST(Importance, EveryWidthAndOppositeVectors) {
  for (int width = 1; width <= 19; ++width) {
    std::vector<float> x(width), y(width);
    double xy = 0, xx = 0, yy = 0;
    for (int i = 0; i < width; ++i) {
      x[i] = static_cast<float>(i % 5) - 1.5F;
      y[i] = static_cast<float>(i % 3) + 0.5F;
      xy += static_cast<double>(x[i]) * y[i];
      xx += static_cast<double>(x[i]) * x[i];
      yy += static_cast<double>(y[i]) * y[i];
    }
    ImportanceAccumulator accumulator(1);
    accumulator.add(0, x.data(), y.data(), 1, width);
    EXPECT_NEAR(accumulator.importance()[0], 1 - xy / std::sqrt(xx * yy), 1e-6) << width;
  }
  ImportanceAccumulator opposite(1);
  const float x[] = {3, 4}, y[] = {-3, -4}, zero[] = {0, 0};
  opposite.add(0, x, y, 1, 2);
  EXPECT_EQ(opposite.importance()[0], 2.0F);
  ImportanceAccumulator none(1);
  none.add(0, zero, x, 1, 2);  // a zero vector has cosine 0
  EXPECT_EQ(none.importance()[0], 1.0F);
}

TEST(Importance, OrderChunksAndMergingDoNotMatter) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr int kRows = 50, kWidth = 33;
  std::vector<float> x(kRows * kWidth), y(kRows * kWidth);
  for (float& value : x) value = normal(random);
  for (float& value : y) value = normal(random);
  ImportanceAccumulator whole(1), chunks(1), tail(1);
  whole.add(0, x.data(), y.data(), kRows, kWidth);
  tail.add(0, x.data() + 7 * kWidth, y.data() + 7 * kWidth, kRows - 7, kWidth);
  chunks.add(0, x.data(), y.data(), 7, kWidth);
  chunks.add(0, x.data(), y.data(), 0, kWidth);
  chunks.merge(tail);
  EXPECT_EQ(whole.importance(), chunks.importance());
}

TEST(Importance, RefusesWhatCannotBe) {
  ImportanceAccumulator accumulator(2);
  const float x[] = {1, kNaN}, y[] = {1, kInf}, good[] = {1, 1};
  EXPECT_THROW(accumulator.add(2, good, good, 1, 2), BadArgument);
  EXPECT_THROW(accumulator.add(0, x, good, 1, 2), BadArgument);
  EXPECT_THROW(accumulator.add(0, good, y, 1, 2), BadArgument);
  EXPECT_THROW(accumulator.add(0, good, good, -1, 2), BadArgument);
  EXPECT_THROW(accumulator.add(0, good, good, 1, 0), BadArgument);
  accumulator.add(0, good, good, 1, 2);
  EXPECT_THROW(accumulator.importance(), BadArgument);  // layer 1 saw none
}

}  // namespace
}  // namespace kascade
