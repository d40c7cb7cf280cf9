// SPDX-License-Identifier: Apache-2.0
// Models of the fixtures through the front door: shapes, tokens, and the logits that a plain forward pass
// gives with the weights as this library reads them, against those of the library that made the models.
#include "kascade/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "base/dequantize.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "model/gguf_model.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::HasSubstr;

const std::string kModels = std::string(KASCADE_FIXTURES) + "/models/";

// Data of a version 1.0 .npy file of known type.
template <class T>
std::vector<T> load_npy(const std::string& path) {
  const std::string file = read_file(path);
  uint16_t header = 0;
  std::memcpy(&header, file.data() + 8, 2);
  std::vector<T> values((file.size() - 10 - header) / sizeof(T));
  std::memcpy(values.data(), file.data() + 10 + header, values.size() * sizeof(T));
  return values;
}

using Vector = std::vector<double>;

Vector row_of(const WeightTensor& weight, int64_t row) {
  std::vector<float> floats(static_cast<size_t>(weight.columns));
  dequantize_row(weight.type, static_cast<const char*>(weight.data) + row * weight.row_bytes(),
                 weight.columns, floats.data());
  return {floats.begin(), floats.end()};
}

Vector multiply(const WeightTensor& weight, const Vector& x) {
  Vector result(static_cast<size_t>(weight.rows));
  for (int64_t r = 0; r < weight.rows; ++r) {
    const Vector row = row_of(weight, r);
    for (size_t c = 0; c < x.size(); ++c) result[static_cast<size_t>(r)] += row[c] * x[c];
  }
  return result;
}

void add(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// RMS norm of each piece of weight.columns elements.
void normalise(Vector& x, const WeightTensor& weight, double epsilon) {
  const Vector scale = row_of(weight, 0);
  for (size_t begin = 0; begin < x.size(); begin += scale.size()) {
    double squares = 0;
    for (size_t i = 0; i < scale.size(); ++i) squares += x[begin + i] * x[begin + i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(scale.size()) + epsilon);
    for (size_t i = 0; i < scale.size(); ++i) x[begin + i] *= factor * scale[i];
  }
}

double frequency(const ModelConfig& config, int pair) {
  const double plain = std::pow(config.rope_theta, -2.0 * pair / config.head_dim);
  if (!config.rope_frequency_factors.empty())
    return plain / config.rope_frequency_factors[static_cast<size_t>(pair)];
  const RopeScaling& scaling = config.rope_scaling;
  if (scaling.kind == RopeScaling::Kind::kNone) return plain;
  if (scaling.kind == RopeScaling::Kind::kLinear) return plain / scaling.factor;
  const double turns = static_cast<double>(scaling.original_context) * plain / (2 * M_PI);
  const double smooth = std::clamp(
      (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0);
  return plain * ((1 - smooth) / scaling.factor + smooth);
}

void rotate(Vector& heads, const ModelConfig& config, size_t position) {
  const auto dim = static_cast<size_t>(config.head_dim);
  for (size_t head = 0; head < heads.size(); head += dim) {
    for (size_t pair = 0; pair < dim / 2; ++pair) {
      const bool adjacent = config.rope_layout == RopeLayout::kAdjacent;
      double& a = heads[head + (adjacent ? 2 * pair : pair)];
      double& b = heads[head + (adjacent ? 2 * pair + 1 : pair + dim / 2)];
      const double angle = static_cast<double>(position) * frequency(config, static_cast<int>(pair));
      const double rotated = a * std::cos(angle) - b * std::sin(angle);
      b = a * std::sin(angle) + b * std::cos(angle);
      a = rotated;
    }
  }
}

struct LayerCache {
  std::vector<Vector> k, v;
};

Vector attend(const ModelConfig& config, const Vector& q, const LayerCache& cache) {
  const auto dim = static_cast<size_t>(config.head_dim);
  const auto group = static_cast<size_t>(config.query_heads / config.kv_heads);
  Vector out(q.size());
  for (size_t head = 0; head * dim < q.size(); ++head) {
    const size_t kv = head / group * dim;
    Vector scores;
    double total = 0;
    for (const Vector& k : cache.k) {
      double dot = 0;
      for (size_t i = 0; i < dim; ++i) dot += q[head * dim + i] * k[kv + i];
      scores.push_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
      total += scores.back();
    }
    for (size_t j = 0; j < scores.size(); ++j)
      for (size_t i = 0; i < dim; ++i) out[head * dim + i] += scores[j] / total * cache.v[j][kv + i];
  }
  return out;
}

// Logits after each token, in double.
std::vector<Vector> forward(const ModelConfig& config, const ModelWeights& weights,
                            const std::vector<int32_t>& ids) {
  std::vector<LayerCache> caches(weights.layers.size());
  std::vector<Vector> logits;
  for (size_t position = 0; position < ids.size(); ++position) {
    Vector x = row_of(weights.embedding, ids[position]);
    for (size_t l = 0; l < weights.layers.size(); ++l) {
      const LayerWeights& layer = weights.layers[l];
      Vector h = x;
      normalise(h, layer.attention_norm, config.norm_epsilon);
      Vector q = multiply(layer.q, h);
      Vector k = multiply(layer.k, h);
      Vector v = multiply(layer.v, h);
      if (config.qkv_bias) {
        add(q, row_of(layer.q_bias, 0));
        add(k, row_of(layer.k_bias, 0));
        add(v, row_of(layer.v_bias, 0));
      }
      if (config.qk_norm) {
        normalise(q, layer.q_norm, config.norm_epsilon);
        normalise(k, layer.k_norm, config.norm_epsilon);
      }
      rotate(q, config, position);
      rotate(k, config, position);
      caches[l].k.push_back(std::move(k));
      caches[l].v.push_back(std::move(v));
      add(x, multiply(layer.output, attend(config, q, caches[l])));
      h = x;
      normalise(h, layer.ffn_norm, config.norm_epsilon);
      Vector gate = multiply(layer.gate, h);
      const Vector up = multiply(layer.up, h);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      add(x, multiply(layer.down, gate));
    }
    normalise(x, weights.final_norm, config.norm_epsilon);
    logits.push_back(multiply(weights.head, x));
  }
  return logits;
}

struct ModelFixture {
  const char* file;  // below models/
  const char* name;  // of the files with what is expected
};

class ModelFixtures : public testing::TestWithParam<ModelFixture> {};

TEST_P(ModelFixtures, PlainForwardGivesTheStoredLogits) {
  const auto model = Model::open(kModels + GetParam().file);
  const std::string stem = kModels + GetParam().name;
  const auto ids = load_npy<int32_t>(stem + ".ids.npy");
  const auto expected = load_npy<float>(stem + ".logits.npy");
  const auto vocabulary = static_cast<size_t>(model->config().vocabulary);
  ASSERT_EQ(expected.size(), ids.size() * vocabulary);
  const std::vector<Vector> logits = forward(model->config(), model->weights(), ids);
  double worst = 0;
  double largest = 0;
  for (size_t t = 0; t < ids.size(); ++t) {
    for (size_t i = 0; i < vocabulary; ++i) {
      const double wanted = static_cast<double>(expected[t * vocabulary + i]);
      ASSERT_TRUE(std::isfinite(logits[t][i]));
      worst = std::max(worst, std::abs(logits[t][i] - wanted));
      largest = std::max(largest, std::abs(wanted));
    }
  }
  // The stored logits were computed in float32: some hundred roundings of 6e-8 relative to the largest.
  EXPECT_LT(worst, 2e-5 * largest);
}

TEST_P(ModelFixtures, TokenizerGivesTheStoredIds) {
  const auto model = Model::open(kModels + GetParam().file);
  for (const Json& one : load_json(kModels + GetParam().name + ".tokens.json")) {
    const auto text = one["text"].get<std::string>();
    const bool special = text.find("<|") != std::string::npos;
    EXPECT_EQ(model->tokenizer().encode(text, special), one["ids"].get<std::vector<int32_t>>())
        << quote_text(text);
  }
  EXPECT_EQ(model->tokenizer().size(), model->config().vocabulary);
  EXPECT_THAT(model->chat_template_source(), HasSubstr("<|im_start|>"));
}

INSTANTIATE_TEST_SUITE_P(Files, ModelFixtures,
                         testing::Values(ModelFixture{"llama", "llama"}, ModelFixture{"llama.gguf", "llama"},
                                         ModelFixture{"mistral", "mistral"},
                                         ModelFixture{"mistral.gguf", "mistral"},
                                         ModelFixture{"qwen2", "qwen2"}, ModelFixture{"qwen2.gguf", "qwen2"},
                                         ModelFixture{"qwen3", "qwen3"}, ModelFixture{"qwen3.gguf", "qwen3"},
                                         ModelFixture{"llama-32-blocks.gguf", "llama-32-blocks"},
                                         ModelFixture{"llama-256-blocks.gguf", "llama-256-blocks"}),
                         [](const auto& test) {
                           std::string name = test.param.file;
                           for (char& c : name)
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           return name;
                         });

TEST(Model, BothFormatsOfAModelAreTheSameModel) {
  for (const char* name : {"llama", "mistral", "qwen2", "qwen3"}) {
    const auto gguf = Model::open(kModels + name + ".gguf");
    const auto safetensors = Model::open(kModels + name);
    EXPECT_EQ(gguf->identity().fingerprint, safetensors->identity().fingerprint);
    EXPECT_EQ(gguf->identity().fingerprint.size(), 16u);
    EXPECT_EQ(gguf->identity().layers, safetensors->identity().layers);
    EXPECT_EQ(gguf->identity().head_dim, safetensors->identity().head_dim);
    const ModelConfig& a = gguf->config();
    const ModelConfig& b = safetensors->config();
    EXPECT_EQ(a.hidden, b.hidden);
    EXPECT_EQ(a.ffn, b.ffn);
    EXPECT_EQ(a.query_heads, b.query_heads);
    EXPECT_EQ(a.kv_heads, b.kv_heads);
    EXPECT_EQ(a.vocabulary, b.vocabulary);
    EXPECT_EQ(a.context, b.context);
    EXPECT_EQ(a.norm_epsilon, b.norm_epsilon);
    EXPECT_EQ(a.rope_theta, b.rope_theta);
    EXPECT_EQ(a.tied_embeddings, b.tied_embeddings);
    EXPECT_EQ(gguf->chat_template_source(), safetensors->chat_template_source());
    const TokenizerData& x = gguf->tokenizer().data();
    const TokenizerData& y = safetensors->tokenizer().data();
    EXPECT_EQ(x.tokens, y.tokens);
    EXPECT_EQ(x.types, y.types);
    EXPECT_EQ(x.eos, y.eos);
    EXPECT_EQ(x.add_bos, y.add_bos);
    EXPECT_EQ(std::set(x.end_ids.begin(), x.end_ids.end()), std::set(y.end_ids.begin(), y.end_ids.end()));
  }
  EXPECT_NE(Model::open(kModels + "qwen2.gguf")->identity().fingerprint,
            Model::open(kModels + "qwen3.gguf")->identity().fingerprint);
}

TEST(Model, PathsThatAreNoModel) {
  EXPECT_THAT(fault_of<IoError>([] { Model::open(kModels + "none"); }),
              HasSubstr("none: cannot open: No such file"));
  EXPECT_THAT(fault_of<BadFile>([] { Model::open(kModels + "llama/config.json"); }),
              HasSubstr("not a GGUF file"));
  EXPECT_THAT(fault_of<BadFile>([] { Model::open(kModels + "qwen2/model.safetensors"); }),
              HasSubstr("expected the directory of a safetensors model"));
  EXPECT_THAT(fault_of<BadFile>([] { Model::open(std::string(KASCADE_FIXTURES)); }),
              HasSubstr("config.json: missing"));
  EXPECT_THAT(fault_of<BadFile>([] { Model::open("/dev/null"); }), HasSubstr("expected a regular file"));
}

TEST(Model, DirectoryMayEndInSlashes) { EXPECT_EQ(Model::open(kModels + "qwen2//")->config().name, "qwen2"); }

// A real file cut anywhere, or with any byte of its head replaced, opens or throws an Error: never anything
// else.
TEST(Model, DamagedFilesThrowErrors) {
  const std::string whole = read_file(kModels + "llama-32-blocks.gguf");
  std::vector<std::byte> bytes(whole.size());
  const auto read = [&](size_t size) {
    try {
      read_gguf_model(std::span(bytes).first(size), "F");
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  std::memcpy(bytes.data(), whole.data(), whole.size());
  ASSERT_TRUE(read(bytes.size()));
  for (size_t size = 0; size + 64 < whole.size(); size += 97) EXPECT_FALSE(read(size)) << size;
  size_t refused = 0;
  for (size_t at = 0; at < 12'000; at += 3) {
    for (const int flip : {0x01, 0x80, 0xFF}) {
      bytes[at] ^= static_cast<std::byte>(flip);
      refused += read(bytes.size()) ? 0 : 1;
      bytes[at] ^= static_cast<std::byte>(flip);
    }
  }
  // Much of the head is lengths, types and names; the rest is text that may be anything.
  EXPECT_GT(refused, 1000u);
}

}  // namespace
}  // namespace kascade
