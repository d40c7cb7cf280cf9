// SPDX-License-Identifier: Apache-2.0
#include "golden.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <regex>

#include "base/check.h"
#include "base/file.h"
#include "ops/ops.h"
#include "plan/npy.h"

namespace kascade::golden {
namespace {

template <class Stored, class T>
void convert(const NpyArray& npy, std::vector<T>& values) {
  values.resize(npy.elements);
  for (uint64_t i = 0; i < npy.elements; ++i) {
    Stored stored;
    std::memcpy(&stored, npy.data.data() + i * sizeof(Stored), sizeof(Stored));
    values[i] = static_cast<T>(stored);
  }
}

template <class T>
NpyArray open_npy(const std::string& path, std::string& bytes, Array<T>& array) {
  bytes = read_file(path);
  const NpyArray npy = parse_npy(std::as_bytes(std::span(bytes)), path);
  array.shape.assign(npy.shape.begin(), npy.shape.end());
  return npy;
}

}  // namespace

void Tally::ran(const std::string& name) {
  ++ran_;
  std::printf("  ran      %s\n", name.c_str());
}

void Tally::skipped(const std::string& name, const std::string& why) {
  ++skipped_;
  std::printf("  skipped  %s: %s\n", name.c_str(), why.c_str());
}

bool Tally::check(bool condition, const std::string& name, const std::string& message) {
  if (!condition) {
    ++failures_;
    std::printf("  FAILED   %s: %s\n", name.c_str(), message.c_str());
  }
  return condition;
}

Array<float> load_floats(const std::string& path) {
  Array<float> array;
  std::string bytes;
  const NpyArray npy = open_npy(path, bytes, array);
  require<BadFile>(npy.descr == "<f4", "{}: expected '<f4', got '{}'", path, npy.descr);
  convert<float>(npy, array.values);
  return array;
}

Array<int32_t> load_ints(const std::string& path) {
  Array<int32_t> array;
  std::string bytes;
  const NpyArray npy = open_npy(path, bytes, array);
  if (npy.descr == "<i2") {
    convert<int16_t>(npy, array.values);
  } else {
    require<BadFile>(npy.descr == "<i4", "{}: expected '<i2' or '<i4', got '{}'", path, npy.descr);
    convert<int32_t>(npy, array.values);
  }
  return array;
}

std::vector<std::string> cases_in(const std::string& directory, const std::string& suffix) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(suffix)) names.push_back(name.substr(0, name.size() - suffix.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> folders_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::shared_ptr<const PreparedModel> reference_model() {
  static const std::shared_ptr<const PreparedModel> model = [] {
    const char* given = std::getenv("KASCADE_MODEL");
    return PreparedModel::create(
        Model::open(given != nullptr && *given != '\0' ? given : KASCADE_DEFAULT_MODEL), "f32");
  }();
  return model;
}

std::unique_ptr<Engine> make_engine(int64_t tokens) {
  EngineOptions options;
  options.cache_tokens = tokens;
  return Engine::create(reference_model(), options);
}

double negative_log_likelihood(std::span<const float> logits, int32_t target) {
  return log_sum_exp(logits) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

Strategy make_strategy(const std::string& name, const std::string& golden_dir, const ModelIdentity& model) {
  // NAME[_m8 | _M8 | _all | _all_layers_anchor][_PERCENT], the authors' spelling.
  static const std::regex pattern("(.+?)(?:_[mM]([0-9]+)|_(all|all_layers_anchor))?(?:_([0-9]+))?");
  static const std::map<std::string, std::string> policies = {
      {"dense", "dense"},
      {"kascade", "kascade"},
      {"kascade_rolling", "kascade"},
      {"no_remap", "kascade-no-remap"},
      {"no_remap_kascade", "kascade-no-remap"},
      {"pooled", "kascade-pooled"},
      {"pooled_kascade", "kascade-pooled"},
      {"decode_only", "kascade-decode-only"},
      {"decode_only_kascade", "kascade-decode-only"},
      {"oracle_topk", "oracle-topk"},
      {"oracle_topk_layer0_global", "oracle-topk-dense-layer0"},
      {"quest", ""},
      {"less_is_more", ""},
      {"omni_kv", ""},
      {"sinked_sliding_window", ""},
  };
  // The maps do not carry their anchors; these are the ones that tests/golden/fixtures/README.md names.
  static const std::map<std::string, std::vector<int>> anchors = {{"5", {0, 1, 3, 12, 24}},
                                                                  {"8", {0, 1, 3, 9, 12, 17, 23, 24}}};
  std::smatch match;
  std::string base = name, plan_size = "5", percent;
  bool all_layers = false;
  if (!policies.contains(name)) {
    if (!std::regex_match(name, match, pattern)) return {};
    base = match[1];
    if (match[2].matched) plan_size = match[2];
    all_layers = match[3].matched;
    percent = match[4];
  }
  const auto entry = policies.find(base);
  if (entry == policies.end() || (!all_layers && !anchors.contains(plan_size))) return {};
  if (entry->second.empty()) return {.known = true, .policy = nullptr};

  PolicyOptions options;
  options.budget = BudgetPreset::kPaper;
  options.rolling = base == "kascade_rolling";
  if (!percent.empty()) options.percent = std::stod(percent);
  std::optional<Plan> plan;
  if (entry->second.starts_with("kascade")) {
    plan = import_npy(fmt::format("{}/plan_m{}.npy", golden_dir, plan_size), anchors.at(plan_size));
    plan->model = model;
    if (all_layers) {
      plan->anchors.clear();
      for (int layer = 0; layer < model.layers; ++layer) {
        plan->anchors.push_back(layer);
        for (int head = 0; head < model.kv_heads; ++head) plan->head_map[layer][head] = head;
      }
    }
  }
  return {.known = true, .policy = make_policy(entry->second, options, model, plan ? &*plan : nullptr)};
}

}  // namespace kascade::golden
