// SPDX-License-Identifier: Apache-2.0
#include "engine/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <set>
#include <stdexcept>

#include "base/check.h"

namespace kascade::test {
namespace {

uint64_t next_random(uint64_t* state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double uniform(uint64_t* state) {
  return static_cast<double>(next_random(state) >> 11) * 0x1p-52 - 1;
}  // [-1, 1)

/// Ids as text: "<3>" unless spelled otherwise.
class FakeTokenizer final : public Tokenizer {
 public:
  explicit FakeTokenizer(TokenizerData data) : Tokenizer(std::move(data)) {}
  std::vector<int32_t> encode(std::string_view, bool) const override { return {}; }
  std::vector<int32_t> encode_marked(std::string_view, std::span<const TextRange>) const override {
    return {};
  }
  std::string_view token_bytes(int32_t id) const override { return data_.tokens[id]; }
  std::string decode(std::span<const int32_t> ids, bool) const override {
    std::string text;
    for (const int32_t id : ids) text += data_.tokens[id];
    return text;
  }
  bool is_control(int32_t) const override { return false; }
  std::optional<int32_t> find(std::string_view) const override { return std::nullopt; }
};

using Rows = std::vector<std::vector<double>>;

const float* floats(const WeightTensor& tensor) { return static_cast<const float*>(tensor.data); }

std::vector<double> multiply(const WeightTensor& weight, const WeightTensor& bias,
                             const std::vector<double>& x) {
  std::vector<double> y(static_cast<size_t>(weight.rows));
  for (int64_t row = 0; row < weight.rows; ++row) {
    double sum = bias ? static_cast<double>(floats(bias)[row]) : 0;
    for (int64_t column = 0; column < weight.columns; ++column)
      sum += static_cast<double>(floats(weight)[row * weight.columns + column]) * x[column];
    y[row] = sum;
  }
  return y;
}

void normalize(double* x, int64_t n, const WeightTensor& weight, double epsilon) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
  const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + epsilon);
  for (int64_t i = 0; i < n; ++i) x[i] *= scale * static_cast<double>(floats(weight)[i]);
}

std::vector<double> normalized(std::vector<double> x, const WeightTensor& weight, double epsilon) {
  normalize(x.data(), static_cast<int64_t>(x.size()), weight, epsilon);
  return x;
}

double rope_frequency(const ModelConfig& config, int pair) {
  double frequency = std::pow(config.rope_theta, -2.0 * pair / config.head_dim);
  const RopeScaling& scaling = config.rope_scaling;
  if (scaling.kind == RopeScaling::Kind::kLinear) frequency /= scaling.factor;
  if (scaling.kind == RopeScaling::Kind::kLlama3) {
    const double turns = static_cast<double>(scaling.original_context) * frequency / (2 * std::numbers::pi);
    const double kept = std::clamp(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
    frequency *= kept + (1 - kept) / scaling.factor;
  }
  if (!config.rope_frequency_factors.empty())
    frequency /= static_cast<double>(config.rope_frequency_factors[pair]);
  return frequency;
}

void rotate(const ModelConfig& config, double* head, int64_t position) {
  const int half = config.head_dim / 2;
  for (int pair = 0; pair < half; ++pair) {
    const bool adjacent = config.rope_layout == RopeLayout::kAdjacent;
    double& a = head[adjacent ? 2 * pair : pair];
    double& b = head[adjacent ? 2 * pair + 1 : pair + half];
    const double angle = static_cast<double>(position) * rope_frequency(config, pair);
    const double x = a * std::cos(angle) - b * std::sin(angle), y = a * std::sin(angle) + b * std::cos(angle);
    a = x;
    b = y;
  }
}

std::vector<double> attend(const ModelConfig& config, const std::vector<double>& q, const Rows& keys,
                           const Rows& values, int64_t position) {
  const int dim = config.head_dim, group = config.query_heads / config.kv_heads;
  std::vector<double> out(q.size());
  for (int head = 0; head < config.query_heads; ++head) {
    const int kv = head / group * dim;
    std::vector<double> weights(static_cast<size_t>(position) + 1);
    double sum = 0;
    for (int64_t j = 0; j <= position; ++j) {
      double score = 0;
      for (int i = 0; i < dim; ++i) score += q[head * dim + i] * keys[j][kv + i];
      sum += weights[j] = std::exp(score / std::sqrt(dim));
    }
    for (int64_t j = 0; j <= position; ++j)
      for (int i = 0; i < dim; ++i) out[head * dim + i] += weights[j] / sum * values[j][kv + i];
  }
  return out;
}

void add(std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace

TinyModel::TinyModel(std::vector<std::string> spellings, int32_t end_id, int vocabulary) {
  TokenizerData data;
  data.source = "tiny";
  data.tokens = std::move(spellings);
  for (size_t i = data.tokens.size(); i < static_cast<size_t>(vocabulary); ++i)
    data.tokens.push_back(fmt::format("<{}>", i));
  if (end_id >= 0) data.end_ids = {end_id};
  tokenizer_ = std::make_unique<FakeTokenizer>(std::move(data));
  path_ = "tiny";
  fingerprint_ = "0000000000000001";
}

TinyModel::TinyModel(const TinyModelOptions& options, std::vector<std::string> spellings, int32_t end_id)
    : TinyModel(std::move(spellings), end_id, options.vocabulary) {
  make_weights(options);
}

WeightTensor TinyModel::tensor(int64_t rows, int64_t columns, double scale, double offset) {
  auto values = std::make_unique<std::vector<float>>(static_cast<size_t>(rows * columns));
  for (float& value : *values) value = static_cast<float>(offset + scale * uniform(&random_));
  const WeightTensor result{values->data(), WeightType::kF32, rows, columns};
  storage_.push_back(std::move(values));
  return result;
}

void TinyModel::make_weights(const TinyModelOptions& o) {
  random_ = o.seed * 0x2545F4914F6CDD1Dull;
  config_.architecture = o.architecture;
  config_.name = "tiny";
  config_.layers = o.layers;
  config_.hidden = o.hidden;
  config_.ffn = o.ffn;
  config_.query_heads = o.query_heads;
  config_.kv_heads = o.kv_heads;
  config_.head_dim = o.head_dim;
  config_.vocabulary = o.vocabulary;
  config_.context = o.context;
  config_.rope_layout = o.rope_layout;
  config_.rope_scaling = o.rope_scaling;
  config_.qkv_bias = o.qkv_bias;
  config_.qk_norm = o.qk_norm;
  for (int i = 0; o.frequency_factors && i < o.head_dim / 2; ++i)
    config_.rope_frequency_factors.push_back(1 + 0.5f * static_cast<float>(i));

  const int64_t q_width = int64_t{o.query_heads} * o.head_dim, kv_width = int64_t{o.kv_heads} * o.head_dim;
  // Queries and keys large enough that attention is far from flat: a wrong key must show in the logits.
  const double into = 1.7 / std::sqrt(o.hidden), peaked = 2 * into;
  weights_.embedding = tensor(o.vocabulary, o.hidden, 1, 0);
  for (int layer = 0; layer < o.layers; ++layer) {
    LayerWeights w;
    w.attention_norm = tensor(1, o.hidden, 0.2, 1);
    w.q = tensor(q_width, o.hidden, peaked, 0);
    w.k = tensor(kv_width, o.hidden, peaked, 0);
    w.v = tensor(kv_width, o.hidden, into, 0);
    if (o.qkv_bias) {
      w.q_bias = tensor(1, q_width, 1, 0);
      w.k_bias = tensor(1, kv_width, 1, 0);
      w.v_bias = tensor(1, kv_width, 1, 0);
    }
    if (o.qk_norm) {
      w.q_norm = tensor(1, o.head_dim, 0.3, 1.5);
      w.k_norm = tensor(1, o.head_dim, 0.3, 1.5);
    }
    w.output = tensor(o.hidden, q_width, 1.7 / std::sqrt(q_width), 0);
    w.ffn_norm = tensor(1, o.hidden, 0.2, 1);
    w.gate = tensor(o.ffn, o.hidden, into, 0);
    w.up = tensor(o.ffn, o.hidden, into, 0);
    w.down = tensor(o.hidden, o.ffn, 1.7 / std::sqrt(o.ffn), 0);
    weights_.layers.push_back(w);
  }
  weights_.final_norm = tensor(1, o.hidden, 0.2, 1);
  weights_.head = tensor(o.vocabulary, o.hidden, 4 * into, 0);
}

std::shared_ptr<const TinyModel> TinyModel::successor(const std::vector<int32_t>& next,
                                                      std::vector<std::string> spellings, int32_t end_id) {
  const auto vocabulary = static_cast<int>(next.size());
  TinyModelOptions options;
  options.layers = 1;
  options.vocabulary = vocabulary;
  options.hidden = (vocabulary + 7) / 8 * 8;
  auto model = std::make_shared<TinyModel>(options, std::move(spellings), end_id);
  // The residual stream stays the embedding: what attention and feed-forward add is multiplied by zero.
  const auto clear = [&](const WeightTensor& tensor) {
    auto* values = const_cast<float*>(floats(tensor));
    std::fill(values, values + tensor.rows * tensor.columns, 0.0f);
    return values;
  };
  clear(model->weights_.layers[0].output);
  clear(model->weights_.layers[0].down);
  float* embedding = clear(model->weights_.embedding);
  float* head = clear(model->weights_.head);
  for (int token = 0; token < vocabulary; ++token) {
    embedding[token * options.hidden + token] = 1;
    head[next[token] * options.hidden + token] = 1;
  }
  return model;
}

std::vector<double> reference_logits(const Model& model, std::span<const int32_t> tokens) {
  const ModelConfig& config = model.config();
  const ModelWeights& weights = model.weights();
  const double epsilon = static_cast<double>(config.norm_epsilon);
  Rows x;
  for (const int32_t token : tokens) {
    const float* row = floats(weights.embedding) + int64_t{token} * config.hidden;
    x.emplace_back(row, row + config.hidden);
  }
  for (const LayerWeights& w : weights.layers) {
    Rows queries, keys, values;
    for (size_t position = 0; position < x.size(); ++position) {
      const std::vector<double> h = normalized(x[position], w.attention_norm, epsilon);
      std::vector<double> q = multiply(w.q, w.q_bias, h), k = multiply(w.k, w.k_bias, h);
      for (int head = 0; head < config.query_heads; ++head) {
        if (config.qk_norm) normalize(&q[head * config.head_dim], config.head_dim, w.q_norm, epsilon);
        rotate(config, &q[head * config.head_dim], static_cast<int64_t>(position));
      }
      for (int head = 0; head < config.kv_heads; ++head) {
        if (config.qk_norm) normalize(&k[head * config.head_dim], config.head_dim, w.k_norm, epsilon);
        rotate(config, &k[head * config.head_dim], static_cast<int64_t>(position));
      }
      queries.push_back(std::move(q));
      keys.push_back(std::move(k));
      values.push_back(multiply(w.v, w.v_bias, h));
    }
    for (size_t position = 0; position < x.size(); ++position) {
      add(x[position],
          multiply(w.output, {},
                   attend(config, queries[position], keys, values, static_cast<int64_t>(position))));
      const std::vector<double> h = normalized(x[position], w.ffn_norm, epsilon);
      std::vector<double> gate = multiply(w.gate, {}, h);
      const std::vector<double> up = multiply(w.up, {}, h);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(x[position], multiply(w.down, {}, gate));
    }
  }
  std::vector<double> logits;
  for (const std::vector<double>& row : x) {
    const std::vector<double> y = multiply(weights.head, {}, normalized(row, weights.final_norm, epsilon));
    logits.insert(logits.end(), y.begin(), y.end());
  }
  return logits;
}

std::vector<int32_t> random_tokens(int64_t n, int vocabulary, uint64_t seed) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& token : tokens)
    token = static_cast<int32_t>(next_random(&seed) % static_cast<uint64_t>(vocabulary));
  return tokens;
}

std::unique_ptr<Engine> make_engine(std::shared_ptr<const Model> model, EngineOptions options,
                                    const std::string& compute) {
  if (options.threads == 0) options.threads = 1;
  return Engine::create(PreparedModel::create(std::move(model), compute), options);
}

std::vector<float> prefill_logits(Engine& engine, Sequence& sequence, std::span<const int32_t> tokens,
                                  const Policy* policy) {
  const auto hidden = static_cast<size_t>(engine.model().config().hidden);
  std::vector<float> all;
  engine.prefill(
      sequence, tokens, policy, nullptr,
      [&](int64_t, std::span<const float> rows) {
        for (size_t begin = 0; begin < rows.size(); begin += hidden) {
          const auto logits = engine.logits(rows.subspan(begin, hidden));
          all.insert(all.end(), logits.begin(), logits.end());
        }
      },
      nullptr);
  return all;
}

std::vector<float> decode_logits(Engine& engine, Sequence& sequence, int32_t token, const Policy* policy) {
  const ForwardItem item{&sequence, {&token, 1}, 0};
  const auto logits = engine.logits(engine.forward({&item, 1}, {.phase = Phase::kDecode, .policy = policy}));
  return {logits.begin(), logits.end()};
}

Plan tiny_plan(const Model& model, std::vector<int> anchors, int tile) {
  Plan plan;
  plan.model = model.identity();
  plan.anchors = std::move(anchors);
  plan.settings.tile = tile;
  for (int layer = 0; layer < plan.model.layers; ++layer) {
    const bool anchor = std::find(plan.anchors.begin(), plan.anchors.end(), layer) != plan.anchors.end();
    std::vector<int> row;
    for (int head = 0; head < plan.model.kv_heads; ++head)
      row.push_back(anchor ? head : (head + layer) % plan.model.kv_heads);
    plan.head_map.push_back(row);
  }
  return plan;
}

std::vector<NamedPolicy> every_policy(const Model& model, const Plan& plan, int floor) {
  std::vector<NamedPolicy> result = {{"dense", nullptr}};
  std::set<std::string> made = {"dense"};
  const auto add = [&](const std::string& label, const std::string& name, PolicyOptions options) {
    options.floor = floor;
    result.push_back({label, make_policy(name, options, model.identity(), &plan)});
    made.insert(name);
  };
  add("default", "kascade", {.recent = 5});
  add("default fixed", "kascade", {.recent = 5, .rolling = false});
  add("paper", "kascade", {.budget = BudgetPreset::kPaper, .percent = 25});
  add("paper rolling", "kascade", {.budget = BudgetPreset::kPaper, .percent = 25, .rolling = true});
  add("kernel", "kascade", {.budget = BudgetPreset::kKernel});
  add("pooled", "kascade-pooled", {.sinks = 2, .recent = 5});
  add("no remap", "kascade-no-remap", {.recent = 5});
  add("decode only", "kascade-decode-only", {.budget = BudgetPreset::kPaper});
  add("oracle", "oracle-topk", {});
  add("oracle, dense layer 0", "oracle-topk-dense-layer0", {});
  for (const PolicyInfo& info : policies())
    if (!made.contains(info.name)) throw std::logic_error(std::string("every_policy lacks ") + info.name);
  return result;
}

double largest_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest))
      largest = std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity();
  }
  return largest;
}

}  // namespace kascade::test
