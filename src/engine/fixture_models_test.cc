// SPDX-License-Identifier: Apache-2.0
// Tiny models of every architecture, in both file formats, against the logits that transformers gives them
// (tests/fixtures/make_models.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/file.h"
#include "engine/tiny_model.h"
#include "kascade/engine.h"
#include "plan/npy.h"

namespace kascade {
namespace {

template <class T>
std::vector<T> load(const std::string& name, const char* descr) {
  const std::string file = read_file(KASCADE_FIXTURES "/models/" + name);
  const NpyArray array = parse_npy(std::as_bytes(std::span(file)), name);
  EXPECT_EQ(array.descr, descr);
  std::vector<T> values(array.elements);
  std::memcpy(values.data(), array.data.data(), array.data.size());
  return values;
}

struct Fixture {
  const char* name;   // of the ids and logits
  const char* model;  // the file or folder
};
std::vector<Fixture> fixtures() {
  return {{"llama", "llama"},
          {"llama", "llama.gguf"},
          {"llama-32-blocks", "llama-32-blocks.gguf"},
          {"llama-256-blocks", "llama-256-blocks.gguf"},
          {"mistral", "mistral"},
          {"mistral", "mistral.gguf"},
          {"qwen2", "qwen2"},
          {"qwen2", "qwen2.gguf"},
          {"qwen3", "qwen3"},
          {"qwen3", "qwen3.gguf"}};
}

class FixtureModel : public testing::TestWithParam<Fixture> {
 protected:
  std::shared_ptr<const Model> model_ =
      Model::open(std::string(KASCADE_FIXTURES "/models/") + GetParam().model);
  std::vector<int32_t> ids_ = load<int32_t>(std::string(GetParam().name) + ".ids.npy", "<i4");
  std::vector<float> expected_ = load<float>(std::string(GetParam().name) + ".logits.npy", "<f4");
};

TEST_P(FixtureModel, LogitsAreThoseOfTransformers) {
  const auto engine = test::make_engine(model_);
  const auto sequence = engine->make_sequence(), step = engine->make_sequence();
  // Both sides are fp32 sums in different orders.
  EXPECT_LT(test::largest_difference(test::prefill_logits(*engine, *sequence, ids_), expected_), 2e-4);
  std::vector<float> one_by_one;
  for (const int32_t id : ids_) {
    const auto row = test::decode_logits(*engine, *step, id);
    one_by_one.insert(one_by_one.end(), row.begin(), row.end());
  }
  EXPECT_LT(test::largest_difference(one_by_one, expected_), 2e-4);
}

TEST_P(FixtureModel, TheFastModeStaysClose) {
  const auto engine = test::make_engine(model_, {}, "auto");
  const auto sequence = engine->make_sequence(), step = engine->make_sequence();
  std::vector<float> one_by_one;
  for (const int32_t id : ids_) {
    const auto row = test::decode_logits(*engine, *step, id);
    one_by_one.insert(one_by_one.end(), row.begin(), row.end());
  }
  // Products and cache in 16 bits, decode's activations in 8: relative to the spread of the logits.
  double squares = 0;
  for (const float value : expected_) squares += static_cast<double>(value) * static_cast<double>(value);
  const double spread = std::sqrt(squares / static_cast<double>(expected_.size()));
  const auto relative = [&](std::span<const float> logits) {
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i)
      sum += std::pow(static_cast<double>(logits[i]) - static_cast<double>(expected_[i]), 2);
    return std::sqrt(sum / static_cast<double>(logits.size())) / spread;
  };
  ASSERT_EQ(one_by_one.size(), expected_.size());
  EXPECT_LT(relative(test::prefill_logits(*engine, *sequence, ids_)), 0.05);
  EXPECT_LT(relative(one_by_one), 0.1);
}

INSTANTIATE_TEST_SUITE_P(All, FixtureModel, testing::ValuesIn(fixtures()), [](const auto& instance) {
  std::string name = instance.param.model;
  for (char& c : name)
    if (c == '-' || c == '.') c = '_';
  return name;
});

}  // namespace
}  // namespace kascade
