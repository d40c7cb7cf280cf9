// SPDX-License-Identifier: Apache-2.0
// Calibration: numbers in, plan out. Statistics of the model's attention, the exact choice of anchors by
// dynamic program, the head map, and the choice by measured quality over an evaluator that the caller
// provides. Pure and deterministic: no I/O, no model, no threads; the same numbers give the same plan in
// whatever order or parallelism they were gathered (docs/method.md, "Calibration").
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kascade/plan.h"

namespace kascade {

// ---- Statistics of one prompt
// -------------------------------------------------------------------------------------

/// The index sets that one layer selected for one tile. Views the caller's buffers.
struct TileSets {
  const int32_t* positions =
      nullptr;  // [kv_heads, capacity], ascending in [0, candidates); read up to counts only
  const int32_t* counts = nullptr;  // [kv_heads]
  int64_t capacity = 0;             // stride of positions
};

/// What one KV head of one layer gives to the keys of one tile (a generated token is a tile too).
struct TileWeights {
  const float* weights = nullptr;  // [candidates], post-softmax probability summed over the group's rows
  int64_t candidates = 0;
  // The same on the keys that are attended whatever is selected: the own tile; 0 in decode.
  float own_mass = 0;
  // [kv_heads] own_mass of every KV head: then S_t[., ., r, a] adds head a's to both masses instead of head
  // r's, as the published code does (the definition adds head r's). Null = own_mass.
  const float* own_mass_of_heads = nullptr;
};

/// Similarity of index sets over one prompt, fed one layer, KV head and tile at a time: holds [layers^2 / 2,
/// kv_heads^2] numbers and no weights. The result does not depend on the order of the calls, nor on how they
/// are spread over several accumulators that are merged: minima and integer sums only.
class SimilarityAccumulator {
 public:
  SimilarityAccumulator(int layers, int kv_heads);

  /// S_t[i, layer, kv_head, a] for every layer i <= layer and head a: the mass that layer i's set holds over
  /// the mass that layer's own set holds, own_mass added to both, 0/0 = 1. sets [layer + 1] are those of
  /// layers 0..layer for this tile. Throws BadArgument for indices out of range and for weights that are not
  /// finite.
  void add(int layer, int kv_head, const TileWeights& weights, const TileSets* sets);

  /// Adds what another accumulator of the same shape has seen of the same prompt.
  void merge(const SimilarityAccumulator& other);

  int layers() const { return layers_; }
  int kv_heads() const { return kv_heads_; }
  /// Tiles seen, the same for every layer and head. Throws BadArgument naming layer and head otherwise, or
  /// when none were.
  int64_t tiles() const;

  /// float [layers, layers, kv_heads, kv_heads], index [i, j, r, a]: layer i's set of head a serving head r
  /// of layer j; minimum and mean over the tiles, 0 where j < i.
  std::vector<float> minimum() const;
  std::vector<float> mean() const;

 private:
  int64_t slot(int layer, int kv_head) const;  // of [i = 0..layer, a]

  int layers_;
  int kv_heads_;
  std::vector<int64_t> tiles_;  // [layers, kv_heads]
  std::vector<float> minimum_;  // [j, r, i <= j, a]
  std::vector<int64_t> sum_;    // the same, in units of 2^-40
};

/// Importance over one prompt: e[l] = 1 - mean over tokens of cos(x, y), x the residual stream entering the
/// attention block of layer l (before its norm), y = x + attention output. Order and merging do not matter
/// either.
class ImportanceAccumulator {
 public:
  explicit ImportanceAccumulator(int layers);
  /// rows of x and y, each [rows, width] and contiguous. Throws BadArgument for numbers that are not finite.
  void add(int layer, const float* x, const float* y, int64_t rows, int64_t width);
  void merge(const ImportanceAccumulator& other);
  /// [layers]. Throws BadArgument naming a layer that saw no token.
  std::vector<float> importance() const;

 private:
  std::vector<int64_t> tokens_;  // [layers]
  std::vector<int64_t> sum_;     // of cosines, in units of 2^-40
};

/// The three statistics of one prompt.
struct PromptStatistics {
  int layers = 0;
  int kv_heads = 0;
  int64_t tiles = 0;
  int64_t tokens = 0;
  std::vector<float>
      similarity_min;  // [layers, layers, kv_heads, kv_heads], index [i, j, r, a]; 0 where j < i
  std::vector<float> similarity_mean;  // the same
  std::vector<float> importance;       // [layers]
};

PromptStatistics prompt_statistics(const SimilarityAccumulator& similarity,
                                   const ImportanceAccumulator& importance, int64_t tokens);

// ---- Statistics of a calibration set
// ------------------------------------------------------------------------------

enum class Aggregation : uint8_t {
  kMin,
  kMean
};  // over the tiles of a prompt; over prompts it is always the mean

/// "min" or "mean"; throws BadArgument for anything else.
Aggregation aggregation_from_name(const std::string& name);

/// S averaged over the prompts.
struct HeadSimilarity {
  int layers = 0;
  int kv_heads = 0;
  std::vector<double> values;  // [layers, layers, kv_heads, kv_heads], index [i, j, r, a]; 0 where j < i

  double at(int i, int j, int r, int a) const {
    return values[((static_cast<size_t>(i) * layers + j) * kv_heads + r) * kv_heads + a];
  }
};

/// Running means over prompts, of constant size. Independent of the order of the prompts, and serialisable,
/// so that an interrupted calibration goes on where it stopped.
class StatisticsSet {
 public:
  /// identity: anything that tells one calibration from another (model, settings, prompts); compared when
  /// read back.
  StatisticsSet(int layers, int kv_heads, std::string identity);

  /// Throws BadArgument for another shape, a number outside [0, 1] (similarity) or [0, 2] (importance), a
  /// prompt seen before.
  void insert(int64_t prompt, const PromptStatistics& statistics);
  bool contains(int64_t prompt) const { return prompts_.count(prompt) != 0; }
  int64_t prompts() const { return static_cast<int64_t>(prompts_.size()); }
  int64_t tokens() const { return tokens_; }

  /// Means over the prompts. Throw BadArgument when there are none.
  HeadSimilarity similarity(Aggregation aggregation) const;
  std::vector<double> importance() const;  // [layers]

  /// Versioned binary with a checksum; the same set gives the same bytes.
  std::string serialize() const;
  /// Throws BadFile naming source and field: not such a file, damaged, of another shape or identity.
  static StatisticsSet parse(std::string_view bytes, const std::string& source, int layers, int kv_heads,
                             const std::string& identity);

 private:
  int layers_;
  int kv_heads_;
  std::string identity_;
  std::set<int64_t> prompts_;
  int64_t tokens_ = 0;
  std::vector<int64_t> min_sum_;         // [i, j >= i, r, a], in units of 2^-40
  std::vector<int64_t> mean_sum_;        // the same
  std::vector<int64_t> importance_sum_;  // [layers]
};

// ---- From statistics to a plan
// ------------------------------------------------------------------------------------

/// [layers][layers], row = anchor layer: the captured mass that layer i's sets keep in layer j, 1 on the
/// diagonal, 0 below it.
using LayerSimilarity = std::vector<std::vector<double>>;

/// s[i][j] = mean over heads r of max over heads a of S[i, j, r, a]. With tensor_parallel ranks, a stays
/// within r's rank.
LayerSimilarity layer_similarity(const HeadSimilarity& similarity, int tensor_parallel = 1);

/// Anchor layers and their value, sum over layers j of weight[j] * s[p(j)][j].
struct AnchorChoice {
  std::vector<int> anchors;
  double objective = 0;
};

/// The value of given anchors. weights [layers], or empty for 1 everywhere.
double anchor_objective(const LayerSimilarity& similarity, const std::vector<double>& weights,
                        const std::vector<int>& anchors);

/// The `count` best sets of `anchors` layers (layer 0 counted), best first, fewer if there are fewer; exact,
/// by dynamic program in O(anchors * layers^2 * count). Equal values: the set whose last anchor is smaller
/// goes first, then the one before it, and so on. Throws BadArgument for anchors outside 1..layers, a ragged
/// or non-finite matrix, or count < 1.
std::vector<AnchorChoice> best_anchor_sets(const LayerSimilarity& similarity,
                                           const std::vector<double>& weights, int anchors, int count);

/// The best of them.
AnchorChoice choose_anchors(const LayerSimilarity& similarity, const std::vector<double>& weights,
                            int anchors);

/// [layers][kv_heads]: argmax over a of S[p(l), l, r, a], ties to the smaller a; identity for anchors. With
/// tensor_parallel ranks, a stays within r's rank.
std::vector<std::vector<int>> head_map(const HeadSimilarity& similarity, const std::vector<int>& anchors,
                                       int tensor_parallel = 1);

/// [layers]: s[p(j)][j].
std::vector<double> retained_mass(const LayerSimilarity& similarity, const std::vector<int>& anchors);

/// A valid plan of these anchors: head map, similarity, importance, retained mass and, as objective, the
/// value of the anchors (weighted when settings.importance). Leaves data, candidates, validation and
/// tool_version to the caller.
Plan make_plan(const ModelIdentity& model, const CalibrationSettings& settings,
               const HeadSimilarity& similarity, const std::vector<double>& importance,
               const std::vector<int>& anchors);

// ---- The measured choice
// ------------------------------------------------------------------------------------------

/// Quality of one anchor set, measured with the model.
struct AnchorEvaluation {
  double objective =
      0;            // what is minimised: KL on ordinary prompts plus KL on the digit rows of passkeys, nats
  double kl = 0;    // mean KL(dense || policy) on ordinary prompts, nats
  double top1 = 0;  // share of rows whose arg-max equals dense's
  double passkey = 0;        // share of passkey digits right
  double passkey_dense = 0;  // the same with dense attention, on the same passkeys
};

/// Anchor sets to measure in one go. An evaluator may share work below the first layer where a set differs
/// from base (first_difference): there the policy is the same, so hidden states computed once for base serve
/// all the sets.
struct EvaluationRequest {
  std::vector<std::vector<int>> anchor_sets;  // distinct, none asked before at this fidelity
  std::vector<int> base;  // the best set so far, measured on all prompts, unless this is the first request
  double fidelity = 1;    // share of the prompts to use, always the same ones for one share
};

/// One evaluation a set, in the order of the request. May throw (Cancelled included): the search ends with
/// it.
using AnchorEvaluator = std::function<std::vector<AnchorEvaluation>(const EvaluationRequest&)>;

/// The first layer that two ascending anchor lists treat differently; layers when they are equal.
int first_difference(const std::vector<int>& a, const std::vector<int>& b, int layers);

struct QualityThresholds {
  double max_kl = 0.06;
  double min_top1 = 0.90;
  double max_passkey_loss = 0.05;  // share of digits, below dense
};
bool within(const QualityThresholds& thresholds, const AnchorEvaluation& evaluation);

/// Before sets are measured on all prompts, they are measured on a share of them, and the best `survivors` go
/// on.
struct SearchRung {
  double fidelity = 0;
  int survivors = 0;
};

struct SearchProgress {
  int anchors = 0;         // M in work
  const char* phase = "";  // "add", "swap" or "program"
  double cost = 0;         // spent, in measurements of one set on all prompts
  double max_cost = 0;
  AnchorChoice best;  // best set of the M in work, empty before one was measured
};

struct SearchOptions {
  int anchors = 0;       // M, layer 0 counted; 0 = auto, the smallest M within the thresholds
  int max_anchors = 12;  // auto stops here
  QualityThresholds thresholds;
  // Auto stops where the last `patience` anchors together lowered the objective by less than this share and
  // the thresholds are not kept.
  double min_gain = 0.15;
  int patience = 3;
  // Cost of the whole search, in measurements of one set on all prompts. When it runs short, candidates are
  // cut to those that the similarity ranks best; a fixed M is always reached, at one measurement an anchor if
  // it must.
  double max_cost = 200;
  std::vector<SearchRung> rungs = {SearchRung{0.25, 4}};
  int program_sets = 3;  // best sets of the dynamic program that join at every M
  int swap_passes = 2;   // rounds of single swaps at every M, as long as they help
  int swap_reach =
      2;  // a swap moves an anchor by up to so many layers, or to one of the `swap_layers` best additions
  int swap_layers = 2;
  /// Auto: asked for the first set within the thresholds (then the next M's, and so on): true ends the
  /// search. Empty: always true. The place for a validation on other prompts.
  std::function<bool(const std::vector<int>& anchors, const AnchorEvaluation& evaluation)> accept;
  std::function<void(const SearchProgress&)> progress;
  std::function<bool()> cancelled;  // asked between requests; true ends the search with Cancelled
};

enum class SearchEnd : uint8_t {
  kReached,   // the fixed M
  kAccepted,  // auto: within the thresholds and accepted
  kNoGain,    // auto: more anchors do not help
  kLimit,     // auto: max_anchors, or every layer is an anchor
  kCost,      // auto: max_cost is spent
};

struct SearchResult {
  std::vector<int> anchors;  // accepted, or of the fixed M, or else the set of the least objective
  AnchorEvaluation evaluation;
  bool within_thresholds = false;
  SearchEnd end = SearchEnd::kReached;
  std::vector<PlanCandidate> candidates;  // the best set of every M that was tried, ascending
  double cost = 0;                        // as max_cost
  int64_t measurements = 0;               // sets measured, at whatever fidelity
};

/// Anchors by measured quality: from {0}, add the layer that lowers the objective most, then try single
/// swaps; the best sets of the dynamic program join at every M. similarity guides where the cost forbids to
/// try everything. Throws BadArgument for options out of range and for evaluations that are not finite or not
/// one a set; Cancelled.
SearchResult search_anchors(const LayerSimilarity& similarity, const AnchorEvaluator& evaluator,
                            const SearchOptions& options);

/// Anchors by the dynamic program alone (methods published and budget), measured to learn M: with
/// options.anchors fixed, its set; with auto, the smallest M whose set is within the thresholds and accepted.
/// weights as in best_anchor_sets. Of the options, rungs and swaps do not apply.
SearchResult search_program(const LayerSimilarity& similarity, const std::vector<double>& weights,
                            const AnchorEvaluator& evaluator, const SearchOptions& options);

}  // namespace kascade
