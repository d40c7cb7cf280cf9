// SPDX-License-Identifier: Apache-2.0
#include "eval/one_pass.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>

#include "base/check.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {
namespace {

// Rows of logits made at once.
constexpr int64_t kLogitRows = 32;

// Keeps the residual stream entering every layer but the first.
class ResidualRecorder final : public LayerObserver {
 public:
  explicit ResidualRecorder(const ModelConfig& config)
      : hidden_(config.hidden), entering_(config.layers + 1) {}

  void after_layer(int layer, const float* residual, int64_t rows) override {
    entering_[layer + 1].assign(residual, residual + rows * hidden_);
  }

  const std::vector<float>& entering(int layer) const { return entering_[layer]; }

 private:
  int64_t hidden_;
  std::vector<std::vector<float>> entering_;  // [layers + 1] of [rows, hidden]
};

// Dense attention's answer at one row.
struct DenseRow {
  std::vector<float> logits;  // [vocabulary]
  int32_t best = 0;
};

void check_cancel(const std::atomic<bool>* cancel) {
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) throw Cancelled("calibration: cancelled");
}

bool is_passkey(const OnePassPrompt& prompt) { return !prompt.targets.empty(); }

void add(OnePassFigures& sum, const OnePassFigures& part) {
  sum.rows += part.rows;
  sum.kl_sum += part.kl_sum;
  sum.agree += part.agree;
  sum.digits += part.digits;
  sum.digit_kl_sum += part.digit_kl_sum;
  sum.digits_right += part.digits_right;
}

}  // namespace

int first_changed_layer(const Plan& base, const Plan& candidate) {
  const int layers = base.model.layers;
  for (int layer = 0; layer < layers; ++layer) {
    const bool same = base.is_anchor(layer) == candidate.is_anchor(layer) &&
                      base.source_anchor(layer) == candidate.source_anchor(layer) &&
                      base.head_map[layer] == candidate.head_map[layer];
    // A reuse layer reads sets that its source anchor makes anew in the same pass.
    if (!same) return candidate.source_anchor(layer);
  }
  return layers;
}

// One engine and the prompts whose prefixes lie in its cache.
struct OnePassEvaluator::Worker {
  Engine* engine = nullptr;
  std::vector<int64_t> prompts;                      // indices, ascending
  std::vector<std::unique_ptr<Sequence>> sequences;  // [prompts]
  std::vector<std::vector<DenseRow>> dense;          // [prompts] of the scored rows
  std::unique_ptr<ResidualRecorder> recorder;
  std::unique_ptr<ThreadPool> scoring;  // as many threads as the engine has

  // Prompts that go through the layers together: indices into the above, and their rows.
  struct Group {
    std::vector<size_t> members;
    int64_t rows = 0;
  };

  std::vector<Group> groups(const std::vector<OnePassPrompt>& all, const std::vector<uint8_t>& taken,
                            int64_t max_rows) const {
    std::vector<Group> result;
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (!taken[prompts[i]]) continue;
      const auto rows = static_cast<int64_t>(all[prompts[i]].rows.size());
      if (result.empty() || result.back().rows + rows > max_rows) result.emplace_back();
      result.back().members.push_back(i);
      result.back().rows += rows;
    }
    return result;
  }

  // The group's rows through the layers from first_layer on; the cache holds the prefixes alone again
  // afterwards, though what the rows' layers below first_layer wrote into it stays where it is.
  std::vector<float> forward(const Group& group, const std::vector<OnePassPrompt>& all, const Policy* policy,
                             int first_layer, const float* hidden_in, LayerObserver* observer) {
    std::vector<ForwardItem> items;
    for (const size_t i : group.members) items.push_back({sequences[i].get(), all[prompts[i]].rows, 0});
    const std::span<const float> hidden = engine->forward(items, ForwardOptions{.phase = Phase::kRows,
                                                                                .policy = policy,
                                                                                .observer = observer,
                                                                                .first_layer = first_layer,
                                                                                .hidden_in = hidden_in});
    std::vector<float> result(hidden.begin(), hidden.end());
    for (const size_t i : group.members)
      sequences[i]->truncate(static_cast<int64_t>(all[prompts[i]].prefix.size()));
    return result;
  }

  // Calls measure(member, scored row of it, logits) for every scored row of the group, the rows of a block at
  // once, and take(member, row of the prompt, what measure returned) for one after another. A block of logits
  // never spans prompts: how many rows a product has may decide its last digits, and groups depend on the
  // workers.
  template <class Measure, class Take>
  void for_each_scored(const Group& group, const std::vector<OnePassPrompt>& all,
                       std::span<const float> hidden, Measure&& measure, Take&& take) {
    using Measured = decltype(measure(size_t{}, int64_t{}, std::span<const float>()));
    struct Place {
      int64_t scored, row;
    };
    const int64_t width = engine->model().config().hidden;
    const int64_t vocabulary = engine->model().config().vocabulary;
    std::vector<Place> places;
    std::vector<float> gathered;
    const auto flush = [&](size_t member) {
      const std::span<const float> logits = engine->logits(gathered);
      std::vector<Measured> measured(places.size());
      scoring->parallel_for(std::ssize(places), [&](int64_t p, int) {
        measured[p] = measure(member, places[p].scored, logits.subspan(p * vocabulary, vocabulary));
      });
      for (size_t p = 0; p < places.size(); ++p) take(member, places[p].row, std::move(measured[p]));
      places.clear();
      gathered.clear();
    };
    int64_t first_row = 0;
    for (const size_t i : group.members) {
      const OnePassPrompt& prompt = all[prompts[i]];
      int64_t scored = 0;
      for (size_t row = 0; row < prompt.rows.size(); ++row) {
        if (!prompt.scored[row]) continue;
        const std::span<const float> vector = hidden.subspan((first_row + row) * width, width);
        gathered.insert(gathered.end(), vector.begin(), vector.end());
        places.push_back({scored++, static_cast<int64_t>(row)});
        if (static_cast<int64_t>(places.size()) == kLogitRows) flush(i);
      }
      if (!places.empty()) flush(i);
      first_row += static_cast<int64_t>(prompt.rows.size());
    }
  }

  // Figures of each member under the hidden rows of one candidate, added to its slot of `figures` [all
  // prompts].
  void score(const Group& group, const std::vector<OnePassPrompt>& all, std::span<const float> hidden,
             std::span<OnePassFigures> figures) {
    struct Row {
      double kl = 0;
      int32_t best = 0;
      bool agrees = false;
    };
    for_each_scored(
        group, all, hidden,
        [&](size_t i, int64_t scored, std::span<const float> logits) {
          const DenseRow& reference = dense[i][scored];
          const int32_t best = arg_max(logits);
          return Row{kl_divergence(reference.logits, logits), best, best == reference.best};
        },
        [&](size_t i, int64_t row, const Row& measured) {
          const OnePassPrompt& prompt = all[prompts[i]];
          OnePassFigures& sum = figures[prompts[i]];
          if (is_passkey(prompt)) {
            ++sum.digits;
            sum.digit_kl_sum += measured.kl;
            sum.digits_right += measured.best == prompt.targets[row];
          } else {
            ++sum.rows;
            sum.kl_sum += measured.kl;
            sum.agree += measured.agrees;
          }
        });
  }
};

OnePassEvaluator::OnePassEvaluator(std::span<const std::unique_ptr<Engine>> engines,
                                   std::vector<OnePassPrompt> prompts, std::vector<Prefilled> prefilled,
                                   PolicyOf policy_of, int64_t max_rows, const std::atomic<bool>* cancel,
                                   const std::function<void(int64_t)>& on_tokens)
    : prompts_(std::move(prompts)),
      policy_of_(std::move(policy_of)),
      max_rows_(max_rows),
      cancel_(cancel),
      dense_right_(prompts_.size(), 0) {
  require<BadArgument>(!engines.empty(), "one-pass evaluation: expected at least one engine, got none");
  require<BadArgument>(prefilled.empty() || prefilled.size() == prompts_.size(),
                       "one-pass evaluation: expected {} prefilled prompts or none, got {}", prompts_.size(),
                       prefilled.size());
  prefilled.resize(prompts_.size());
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const OnePassPrompt& prompt = prompts_[i];
    const size_t rows = prompt.rows.size();
    const bool well_formed = !prompt.prefix.empty() && rows >= 1 && static_cast<int64_t>(rows) <= max_rows &&
                             prompt.scored.size() == rows &&
                             (prompt.targets.empty() || prompt.targets.size() == rows);
    require<BadArgument>(
        well_formed,
        "one-pass prompt {}: expected a prefix, 1..{} rows and as many flags, got {} tokens, {} rows, "
        "{} flags, {} targets",
        i, max_rows, prompt.prefix.size(), rows, prompt.scored.size(), prompt.targets.size());
  }

  for (const std::unique_ptr<Engine>& engine : engines) {
    workers_.push_back(std::make_unique<Worker>());
    workers_.back()->engine = engine.get();
    workers_.back()->recorder = std::make_unique<ResidualRecorder>(engine->model().config());
    workers_.back()->scoring = std::make_unique<ThreadPool>(engine->threads());
  }
  // What has no prefix yet goes to the worker with the fewest tokens.
  std::vector<int64_t> tokens(engines.size(), 0);
  const auto tokens_of = [this](size_t i) {
    return static_cast<int64_t>(prompts_[i].prefix.size() + prompts_[i].rows.size());
  };
  for (size_t i = 0; i < prompts_.size(); ++i)
    if (prefilled[i].sequence) tokens[prefilled[i].engine] += tokens_of(i);
  for (size_t i = 0; i < prompts_.size(); ++i) {
    if (!prefilled[i].sequence) {
      prefilled[i].engine = std::min_element(tokens.begin(), tokens.end()) - tokens.begin();
      tokens[prefilled[i].engine] += tokens_of(i);
    }
    Worker& worker = *workers_[prefilled[i].engine];
    worker.prompts.push_back(static_cast<int64_t>(i));
    worker.sequences.push_back(std::move(prefilled[i].sequence));
  }

  std::mutex reporting;
  ThreadPool pool(static_cast<int>(workers_.size()));
  pool.parallel_for(static_cast<int64_t>(workers_.size()), [&](int64_t w, int) {
    Worker& worker = *workers_[w];
    worker.dense.resize(worker.prompts.size());
    for (size_t i = 0; i < worker.prompts.size(); ++i) {
      const OnePassPrompt& prompt = prompts_[worker.prompts[i]];
      std::unique_ptr<Sequence>& sequence = worker.sequences[i];
      if (!sequence) {
        sequence = worker.engine->make_sequence();
        worker.engine->prefill(*sequence, prompt.prefix, nullptr, nullptr, {}, cancel_);
        const std::lock_guard lock(reporting);
        if (on_tokens) on_tokens(static_cast<int64_t>(prompt.prefix.size()));
      }
      sequence->truncate(static_cast<int64_t>(prompt.prefix.size()));
    }
    const std::vector<uint8_t> everything(prompts_.size(), 1);
    for (const Worker::Group& group : worker.groups(prompts_, everything, max_rows_)) {
      check_cancel(cancel_);
      const std::vector<float> hidden = worker.forward(group, prompts_, nullptr, 0, nullptr, nullptr);
      worker.for_each_scored(
          group, prompts_, hidden,
          [](size_t, int64_t, std::span<const float> logits) {
            return DenseRow{{logits.begin(), logits.end()}, arg_max(logits)};
          },
          [&](size_t i, int64_t row, DenseRow&& measured) {
            const OnePassPrompt& prompt = prompts_[worker.prompts[i]];
            worker.dense[i].push_back(std::move(measured));
            if (is_passkey(prompt))
              dense_right_[worker.prompts[i]] += worker.dense[i].back().best == prompt.targets[row];
          });
    }
  });
}

OnePassEvaluator::~OnePassEvaluator() = default;

std::vector<uint8_t> OnePassEvaluator::taken(double share) const {
  std::vector<uint8_t> result(prompts_.size(), 0);
  for (const bool passkeys : {false, true}) {
    std::vector<size_t> kind;
    for (size_t i = 0; i < prompts_.size(); ++i)
      if (is_passkey(prompts_[i]) == passkeys) kind.push_back(i);
    const auto n = static_cast<int64_t>(kind.size());
    const int64_t count = std::min(n, static_cast<int64_t>(std::ceil(share * static_cast<double>(n))));
    for (int64_t i = 0; i < count; ++i) result[kind[(2 * i + 1) * n / (2 * count)]] = 1;
  }
  return result;
}

OnePassFigures OnePassEvaluator::dense(double share) const {
  const std::vector<uint8_t> use = taken(share);
  OnePassFigures figures;
  for (size_t i = 0; i < prompts_.size(); ++i) {
    if (!use[i]) continue;
    const auto scored = std::count(prompts_[i].scored.begin(), prompts_[i].scored.end(), 1);
    if (is_passkey(prompts_[i])) {
      figures.digits += scored;
      figures.digits_right += dense_right_[i];
    } else {
      figures.rows += scored;
      figures.agree += scored;
    }
  }
  return figures;
}

const Policy* OnePassEvaluator::keep_policy(const Plan& plan) {
  policies_.push_back(policy_of_(plan));
  return policies_.back().get();
}

std::vector<OnePassFigures> OnePassEvaluator::evaluate(std::span<const Plan> candidates, double share,
                                                       const Plan* base) {
  require<BadArgument>(share > 0 && share <= 1, "share of prompts: expected above 0 and at most 1, got {}",
                       share);
  const auto count = static_cast<int64_t>(candidates.size());
  const int layers = workers_.front()->engine->model().config().layers;
  std::vector<const Policy*> policies;
  std::vector<int> first(count, 0);
  int64_t shared_layers = 0;
  for (int64_t c = 0; c < count; ++c) {
    policies.push_back(keep_policy(candidates[c]));
    if (base != nullptr) first[c] = first_changed_layer(*base, candidates[c]);
    shared_layers += first[c];
  }
  // The base's own pass must pay for itself.
  if (shared_layers <= layers) {
    base = nullptr;
    std::fill(first.begin(), first.end(), 0);
  }
  const Policy* base_policy = base != nullptr ? keep_policy(*base) : nullptr;
  // Deepest start first: a candidate overwrites the keys of its rows from its first layer on, those below
  // stay the base's.
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&first](int64_t a, int64_t b) { return first[a] > first[b]; });

  const std::vector<uint8_t> use = taken(share);
  std::vector<std::vector<OnePassFigures>> figures(count, std::vector<OnePassFigures>(prompts_.size()));
  ThreadPool pool(static_cast<int>(workers_.size()));
  pool.parallel_for(static_cast<int64_t>(workers_.size()), [&](int64_t w, int) {
    Worker& worker = *workers_[w];
    for (const Worker::Group& group : worker.groups(prompts_, use, max_rows_)) {
      std::vector<float> base_hidden;
      if (base != nullptr)
        base_hidden = worker.forward(group, prompts_, base_policy, 0, nullptr, worker.recorder.get());
      for (const int64_t c : order) {
        check_cancel(cancel_);
        if (first[c] == layers) {
          worker.score(group, prompts_, base_hidden, figures[c]);
          continue;
        }
        const float* entering = first[c] > 0 ? worker.recorder->entering(first[c]).data() : nullptr;
        const std::vector<float> hidden =
            worker.forward(group, prompts_, policies[c], first[c], entering, nullptr);
        worker.score(group, prompts_, hidden, figures[c]);
      }
    }
  });

  // In the order of the prompts, whoever computed them: sums have the same bits for any number of workers.
  std::vector<OnePassFigures> sums(count);
  for (int64_t c = 0; c < count; ++c)
    for (const OnePassFigures& part : figures[c]) add(sums[c], part);
  return sums;
}

}  // namespace kascade
