// SPDX-License-Identifier: Apache-2.0
#include "eval/calibration_statistics.h"

#include <algorithm>

#include "base/check.h"
#include "ops/ops.h"

namespace kascade {
namespace {

void check_cancel(const std::atomic<bool>* cancel) {
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("calibration: cancelled");
}

// Every layer selects. Dense forward: as layer 0 does, with dense output; sparse forward: as an anchor does.
class CollectingPolicy final : public Policy {
 public:
  explicit CollectingPolicy(const StatisticsSettings& settings) {
    prefill_.role = settings.sparse_forward ? Role::kAnchor : Role::kLayer0;
    prefill_.tile_rule = TileRule::kAligned;
    prefill_.tile = settings.tile;
    decode_ = prefill_;
    decode_.tile_rule = TileRule::kStep;
    if (settings.similarity_k == 0) {
      prefill_.budget = settings.budget;
      decode_.budget = settings.decode_budget;
      return;
    }
    // K_cal keys besides the own tile; of a generated token its own key is a candidate like any other.
    prefill_.budget = Budget{.percent_hundredths = 0, .floor = settings.similarity_k, .tile = settings.tile};
    decode_.budget = Budget{
        .percent_hundredths = 0, .floor = settings.similarity_k, .own_tile = OwnTile::kCandidate, .tile = 1};
  }

  const std::string& name() const override { return name_; }
  std::string describe() const override { return name_; }
  LayerRule rule(int, Phase phase) const override { return phase == Phase::kPrefill ? prefill_ : decode_; }

 private:
  std::string name_ = "collecting";
  LayerRule prefill_, decode_;
};

// Asks every layer for its pooled weights and turns them into similarity while the layer's weights are there;
// of earlier layers it keeps index sets only.
class Collector final : public LayerObserver {
 public:
  Collector(const ModelConfig& config, bool published_own_mass)
      : heads_(config.kv_heads),
        hidden_(config.hidden),
        published_own_mass_(published_own_mass),
        similarity_(config.layers, config.kv_heads),
        importance_(config.layers),
        sets_(config.layers) {}

  void before_attention(int, Phase, AttentionParams& params) override {
    const int64_t keys = params.seq_lens_kv[0];
    const int64_t rows = params.cu_seqlens_q[1] - params.cu_seqlens_q[0];
    tiles_ = tiles_of(params, rows, keys);
    stride_ = keys;
    // Grown, never shrunk or cleared: entries past the candidates are neither written nor read.
    if (weights_.size() < static_cast<size_t>(tiles_ * heads_ * stride_))
      weights_.resize(tiles_ * heads_ * stride_);
    if (own_mass_.size() < static_cast<size_t>(tiles_ * heads_)) own_mass_.resize(tiles_ * heads_);
    params.pooled_weights = weights_.data();
    params.pooled_head_stride = stride_;
    params.pooled_tile_stride = stride_ * heads_;
    params.own_tile_mass = own_mass_.data();
  }

  void after_attention(const LayerEvent& event) override {
    const AttentionParams& params = *event.attention;
    const int layer = event.layer;
    LayerSets& own = sets_[layer];
    const int64_t first_set = params.tile_offsets[0];
    own.capacity = params.capacity;
    const int32_t* positions = params.positions + first_set * heads_ * params.capacity;
    own.positions.assign(positions, positions + tiles_ * heads_ * params.capacity);
    const int32_t* counts = params.counts + first_set * heads_;
    own.counts.assign(counts, counts + tiles_ * heads_);

    // In decode nothing is attended by right unless the budget puts the step's own rows on top.
    const bool own_on_top =
        params.tile_rule == TileRule::kAligned || params.budget.own_tile == OwnTile::kOnTop;
    std::vector<TileSets> sets(layer + 1);
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      for (int i = 0; i <= layer; ++i) {
        const LayerSets& from = sets_[i];
        sets[i] = {from.positions.data() + tile * heads_ * from.capacity, from.counts.data() + tile * heads_,
                   from.capacity};
      }
      const int64_t candidates = candidates_of(params, tile);
      for (int head = 0; head < heads_; ++head) {
        const int64_t set = tile * heads_ + head;
        TileWeights weights{weights_.data() + set * stride_, candidates};
        if (own_on_top) {
          weights.own_mass = own_mass_[set];
          if (published_own_mass_) weights.own_mass_of_heads = own_mass_.data() + tile * heads_;
        }
        similarity_.add(layer, head, weights, sets.data());
      }
    }
    importance_.add(layer, event.residual_in, event.residual_out, event.rows, hidden_);
  }

  PromptStatistics finish(int64_t tokens) const {
    return prompt_statistics(similarity_, importance_, tokens);
  }

 private:
  struct LayerSets {
    std::vector<int32_t> positions, counts;
    int64_t capacity = 0;
  };

  // Keys that may be selected for a tile of the call; a decode step is one row.
  static int64_t candidates_of(const AttentionParams& params, int64_t tile) {
    const int64_t keys = params.seq_lens_kv[0];
    const int64_t rows = params.cu_seqlens_q[1] - params.cu_seqlens_q[0];
    if (params.tile_rule == TileRule::kStep)
      return params.budget.own_tile == OwnTile::kOnTop ? keys - rows : keys - rows + tile + 1;
    return ((keys - rows) / params.tile + tile) * params.tile;
  }

  int heads_;
  int64_t hidden_;
  bool published_own_mass_;
  SimilarityAccumulator similarity_;
  ImportanceAccumulator importance_;
  std::vector<LayerSets> sets_;  // [layers] of the call in work
  int64_t tiles_ = 0, stride_ = 0;
  std::vector<float> weights_;   // [tiles, heads, stride]
  std::vector<float> own_mass_;  // [tiles, heads]
};

// Greedy tokens after hidden, each fed back but the last.
std::vector<int32_t> continue_greedily(Engine& engine, Sequence& sequence, std::span<const float> hidden,
                                       int64_t max_new_tokens, const Policy* policy, LayerObserver* observer,
                                       const std::atomic<bool>* cancel) {
  std::vector<int32_t> generated;
  while (static_cast<int64_t>(generated.size()) < max_new_tokens) {
    const int32_t token = arg_max(engine.logits(hidden));
    generated.push_back(token);
    if (engine.model().model().tokenizer().ends_generation(token) ||
        static_cast<int64_t>(generated.size()) == max_new_tokens)
      break;
    check_cancel(cancel);
    const ForwardItem item{&sequence, {&token, 1}, 0};
    hidden = engine.forward({&item, 1},
                            ForwardOptions{.phase = Phase::kDecode, .policy = policy, .observer = observer});
  }
  return generated;
}

}  // namespace

CollectedPrompt collect_statistics(Engine& engine, std::span<const int32_t> tokens,
                                   const StatisticsSettings& settings, const std::atomic<bool>* cancel,
                                   const std::function<void(int64_t)>& on_tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  require<BadArgument>(n >= 1, "calibration prompt: expected at least one token, got none");
  require<BadArgument>(settings.tile >= 1 && settings.tile <= 128, "tile: expected 1..128, got {}",
                       settings.tile);
  require<BadArgument>(settings.similarity_k >= 0, "similarity-k: expected at least 1, got {}",
                       settings.similarity_k);
  require<BadArgument>(settings.prefill_chunk >= settings.tile,
                       "prefill_chunk: expected at least the {} rows of a tile, got {}", settings.tile,
                       settings.prefill_chunk);
  const CollectingPolicy policy(settings);
  Collector collector(engine.model().config(), settings.published_own_mass);
  CollectedPrompt collected;
  const std::unique_ptr<Sequence> sequence = engine.make_sequence();
  // Chunks end between tiles, so that no tile's votes are split.
  const int64_t chunk = settings.prefill_chunk / settings.tile * settings.tile;
  std::span<const float> hidden;
  for (int64_t begin = 0; begin < n; begin += chunk) {
    check_cancel(cancel);
    const int64_t rows = std::min(chunk, n - begin);
    const ForwardItem item{sequence.get(), tokens.subspan(begin, rows), n};
    hidden = engine.forward({&item, 1}, ForwardOptions{.policy = &policy, .observer = &collector});
    hidden = hidden.last(engine.model().config().hidden);
    if (on_tokens) on_tokens(begin + rows);
  }
  collected.generated =
      continue_greedily(engine, *sequence, hidden, settings.max_new_tokens, &policy, &collector, cancel);
  collected.statistics = collector.finish(n);
  return collected;
}

DensePrompt prefill_dense(Engine& engine, std::span<const int32_t> tokens, int64_t max_new_tokens,
                          const std::atomic<bool>* cancel) {
  DensePrompt dense;
  dense.sequence = engine.make_sequence();
  const std::span<const float> hidden = engine.prefill(*dense.sequence, tokens, nullptr, nullptr, {}, cancel);
  dense.generated =
      continue_greedily(engine, *dense.sequence, hidden, max_new_tokens, nullptr, nullptr, cancel);
  return dense;
}

}  // namespace kascade
