// SPDX-License-Identifier: Apache-2.0
// What the tests of this folder share: a tiny model, engines over it, text.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "eval/random.h"
#include "kascade/engine.h"

namespace kascade::test {

/// Llama with 3 layers, 4 query and 2 KV heads, a vocabulary of 352 and a context of 512, random weights.
inline std::shared_ptr<const PreparedModel> tiny_model(const std::string& compute = "f32") {
  static const std::shared_ptr<const Model> model = Model::open(KASCADE_FIXTURES "/models/llama.gguf");
  static const std::shared_ptr<const PreparedModel> f32 = PreparedModel::create(model, "f32");
  static const std::shared_ptr<const PreparedModel> fast = PreparedModel::create(model, "auto");
  return compute == "f32" ? f32 : fast;
}

inline std::unique_ptr<Engine> tiny_engine(int threads = 1, const std::string& compute = "f32",
                                           int64_t cache_tokens = 16384) {
  EngineOptions options;
  options.threads = threads;
  options.cache_tokens = cache_tokens;
  return Engine::create(tiny_model(compute), options);
}

inline std::vector<std::unique_ptr<Engine>> tiny_engines(int count, const std::string& compute = "f32") {
  std::vector<std::unique_ptr<Engine>> engines;
  engines.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) engines.push_back(tiny_engine(1, compute));
  return engines;
}

/// Ids of ordinary tokens.
inline std::vector<int32_t> random_ids(int64_t count, uint64_t seed) {
  SplitMix random(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(330));
  return ids;
}

/// An empty folder of its own, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kascade_eval_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

/// The message of the exception of type E that f throws; fails when it throws none.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace kascade::test
