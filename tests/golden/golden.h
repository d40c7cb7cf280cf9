// SPDX-License-Identifier: Apache-2.0
// Golden tests: results of the method's authors' own code, in a directory of the format that
// tests/golden/fixtures/README.md describes. KASCADE_GOLDEN_DIR names another one at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "kascade/engine.h"
#include "kascade/policy.h"

namespace kascade::golden {

/// What became of the cases of one kind. A failure prints its reason at once.
class Tally {
 public:
  void ran(const std::string& name);
  void skipped(const std::string& name, const std::string& why);
  /// Counts one failure of the case named, unless the condition holds. Returns the condition.
  bool check(bool condition, const std::string& name, const std::string& message);
  int ran_count() const { return ran_; }
  int skipped_count() const { return skipped_; }
  int failures() const { return failures_; }

 private:
  int ran_ = 0, skipped_ = 0, failures_ = 0;
};

template <class T>
struct Array {
  std::vector<int64_t> shape;
  std::vector<T> values;
};

/// .npy of float32; int16 and int32 are read as int32. Throws BadFile for anything else.
Array<float> load_floats(const std::string& path);
Array<int32_t> load_ints(const std::string& path);

/// Names (no folders, no suffix) of the files in directory that end in suffix, sorted.
std::vector<std::string> cases_in(const std::string& directory, const std::string& suffix);
std::vector<std::string> folders_in(const std::string& directory);

/// The default model in fp32, opened once. KASCADE_MODEL names another file.
std::shared_ptr<const PreparedModel> reference_model();
/// A fresh engine over it that holds `tokens` tokens.
std::unique_ptr<Engine> make_engine(int64_t tokens);

/// A strategy by the authors' name ("kascade_rolling", "decode_only_M8_20", ...). A null policy with known =
/// true belongs to a policy that this build has not got yet.
struct Strategy {
  bool known = false;
  std::shared_ptr<const Policy> policy;
};
Strategy make_strategy(const std::string& name, const std::string& golden_dir, const ModelIdentity& model);

/// -log p(target) of a row of logits, nats.
double negative_log_likelihood(std::span<const float> logits, int32_t target);

/// One function a kind: runs every case of golden_dir/KIND.
void run_tokenizer(const std::string& golden_dir, Tally& tally);
void run_dense(const std::string& golden_dir, Tally& tally);
void run_ops(const std::string& golden_dir, Tally& tally);
void run_calibration(const std::string& golden_dir, Tally& tally);
void run_strategies(const std::string& golden_dir, Tally& tally);
void run_needle(const std::string& golden_dir, Tally& tally);

}  // namespace kascade::golden
