// SPDX-License-Identifier: Apache-2.0
// The plan file: JSON, one key a line, matrices one row a line, always in the same order.
#include <algorithm>
#include <string_view>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "kascade/plan.h"
#include "plan/plan_fault.h"

namespace kascade {
namespace {

constexpr std::string_view kFormat = "kascade-plan";
constexpr int kVersion = 1;
// The similarity of 1,024 layers takes some 22 MB.
constexpr uint64_t kMaxFileBytes = uint64_t{64} << 20;

// ---- writing ----

std::string text(const Json& value) { return dump_json(value); }

template <class T>
std::string list(const std::vector<T>& values) {
  std::string out = "[";
  for (size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + text(values[i]);
  return out + "]";
}

// One row a line, indented below its key.
std::string lines(const std::vector<std::string>& rows) {
  if (rows.empty()) return "[]";
  return fmt::format("[\n    {}\n  ]", fmt::join(rows, ",\n    "));
}

template <class T>
std::string matrix(const std::vector<std::vector<T>>& rows) {
  std::vector<std::string> out;
  for (const std::vector<T>& row : rows) out.push_back(list(row));
  return lines(out);
}

// Members in the order given: {"a": 1, "b": 2}.
class ObjectText {
 public:
  ObjectText& add(std::string_view key, const Json& value) { return add_text(key, text(value)); }
  ObjectText& add_text(std::string_view key, const std::string& value) {
    members_.push_back(fmt::format("\"{}\": {}", key, value));
    return *this;
  }
  std::string inlined() const { return fmt::format("{{{}}}", fmt::join(members_, ", ")); }
  std::string document() const { return fmt::format("{{\n  {}\n}}\n", fmt::join(members_, ",\n  ")); }

 private:
  std::vector<std::string> members_;
};

std::string candidate_text(const PlanCandidate& candidate) {
  return ObjectText()
      .add_text("anchors", list(candidate.anchors))
      .add("kl", candidate.kl)
      .add("top1", candidate.top1)
      .add("passkey", candidate.passkey)
      .add("objective", candidate.objective)
      .inlined();
}

std::string validation_text(const std::optional<PlanValidation>& validation) {
  if (!validation) return "null";
  return ObjectText()
      .add("kl", validation->kl)
      .add("top1", validation->top1)
      .add("passkey", validation->passkey)
      .add("passkey_dense", validation->passkey_dense)
      .add("prompts", validation->prompts)
      .add("passed", validation->passed)
      .inlined();
}

// ---- reading ----

// A JSON object with its place in the file, for messages.
class Reader {
 public:
  Reader(const Json& object, const std::string& source, std::string where)
      : object_(object), source_(source), where_(std::move(where)) {
    if (!object.is_object()) wrong(where_.empty() ? "(root)" : where_, "an object", object);
  }

  Reader object(std::string_view key) const {
    return {json_field(object_, key, source_, where_), source_, path(key)};
  }
  bool has(std::string_view key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }
  int integer(std::string_view key, int max) const {
    return static_cast<int>(json_int(object_, key, 0, max, source_, where_));
  }
  int64_t count(std::string_view key) const { return json_int(object_, key, 0, INT64_MAX, source_, where_); }
  double number(std::string_view key) const { return json_number(object_, key, source_, where_); }
  std::string string(std::string_view key) const { return json_string(object_, key, source_, where_); }
  bool boolean(std::string_view key) const {
    const Json& value = json_field(object_, key, source_, where_);
    if (!value.is_boolean()) wrong(path(key), "true or false", value);
    return value.get<bool>();
  }

  const Json& array(std::string_view key) const {
    return array_value(json_field(object_, key, source_, where_), path(key));
  }
  std::vector<int> integers(std::string_view key, int max) const {
    return integers_of(array(key), path(key), max);
  }
  std::vector<std::vector<int>> integer_rows(std::string_view key, int max) const {
    const Json& rows = array(key);
    std::vector<std::vector<int>> out;
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::string where = fmt::format("{}[{}]", path(key), i);
      out.push_back(integers_of(array_value(rows[i], where), where, max));
    }
    return out;
  }
  // Absent, null or empty: unknown.
  std::vector<double> numbers(std::string_view key) const {
    if (!has(key)) return {};
    return numbers_of(array(key), path(key));
  }
  std::vector<std::vector<double>> number_rows(std::string_view key) const {
    std::vector<std::vector<double>> out;
    if (!has(key)) return out;
    const Json& rows = array(key);
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::string where = fmt::format("{}[{}]", path(key), i);
      out.push_back(numbers_of(array_value(rows[i], where), where));
    }
    return out;
  }

  std::string path(std::string_view key) const {
    return where_.empty() ? std::string(key) : fmt::format("{}.{}", where_, key);
  }
  [[noreturn]] void wrong(const std::string& field, std::string_view expected, const Json& value) const {
    std::string got = value.type_name();
    if (value.is_string()) got = quote_text(value.get_ref<const std::string&>());
    if (value.is_number() || value.is_boolean()) got = value.dump();
    throw_error<BadFile>("{}: field '{}': expected {}, got {}", source_, field, expected, got);
  }

 private:
  const Json& array_value(const Json& value, const std::string& where) const {
    if (!value.is_array()) wrong(where, "an array", value);
    return value;
  }
  std::vector<int> integers_of(const Json& array, const std::string& where, int max) const {
    std::vector<int> out;
    out.reserve(array.size());
    for (size_t i = 0; i < array.size(); ++i) {
      const Json& value = array[i];
      const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(max);
      if (!fits) wrong(fmt::format("{}[{}]", where, i), fmt::format("an integer in 0..{}", max), value);
      out.push_back(value.get<int>());
    }
    return out;
  }
  std::vector<double> numbers_of(const Json& array, const std::string& where) const {
    std::vector<double> out;
    out.reserve(array.size());
    for (size_t i = 0; i < array.size(); ++i) {
      if (!array[i].is_number()) wrong(fmt::format("{}[{}]", where, i), "a number", array[i]);
      out.push_back(array[i].get<double>());
    }
    return out;
  }

  const Json& object_;
  const std::string& source_;
  std::string where_;
};

ModelIdentity read_model(const Reader& in) {
  ModelIdentity model;
  model.architecture = in.string("architecture");
  model.layers = in.integer("layers", kMaxPlanLayers);
  model.query_heads = in.integer("query_heads", kMaxPlanHeads);
  model.kv_heads = in.integer("kv_heads", kMaxPlanHeads);
  model.head_dim = in.integer("head_dim", kMaxPlanHeadDim);
  model.fingerprint = in.string("fingerprint");
  return model;
}

CalibrationSettings read_settings(const Reader& in) {
  CalibrationSettings settings;
  settings.tile = in.integer("tile", 128);
  settings.similarity_k = in.integer("similarity_k", INT32_MAX);
  settings.aggregation = in.string("aggregation");
  settings.forward = in.string("forward");
  settings.importance = in.boolean("importance");
  if (in.has("method")) settings.method = in.string("method");
  if (in.has("tensor_parallel")) settings.tensor_parallel = in.integer("tensor_parallel", kMaxPlanHeads);
  if (in.has("percent_hundredths")) settings.percent_hundredths = in.integer("percent_hundredths", 10000);
  if (in.has("budget")) settings.budget = in.string("budget");
  return settings;
}

CalibrationData read_data(const Reader& in) {
  CalibrationData data;
  data.name = in.string("name");
  data.prompts = in.count("prompts");
  data.tokens = in.count("tokens");
  data.hash = in.string("hash");
  return data;
}

std::vector<PlanCandidate> read_candidates(const Reader& in, const std::string& source) {
  std::vector<PlanCandidate> out;
  const Json& candidates = in.array("candidates");
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Reader entry(candidates[i], source, fmt::format("candidates[{}]", i));
    PlanCandidate candidate;
    candidate.anchors = entry.integers("anchors", kMaxPlanLayers);
    candidate.kl = entry.number("kl");
    candidate.top1 = entry.number("top1");
    candidate.passkey = entry.number("passkey");
    if (entry.has("objective")) candidate.objective = entry.number("objective");
    out.push_back(std::move(candidate));
  }
  return out;
}

PlanValidation read_validation(const Reader& in) {
  PlanValidation validation;
  validation.kl = in.number("kl");
  validation.top1 = in.number("top1");
  validation.passkey = in.number("passkey");
  if (in.has("passkey_dense")) validation.passkey_dense = in.number("passkey_dense");
  validation.prompts = in.count("prompts");
  validation.passed = in.boolean("passed");
  return validation;
}

void check_header(const Reader& in, const std::string& source) {
  const std::string format = in.string("format");
  require<BadFile>(format == kFormat, "{}: field 'format': expected '{}', got {}", source, kFormat,
                   quote_text(format));
  const int64_t version = in.count("version");
  require<BadFile>(version == kVersion, "{}: field 'version': expected {}, got {}", source, kVersion,
                   version);
}

}  // namespace

std::string plan_to_json(const Plan& plan) {
  validate_plan(plan);
  std::vector<std::string> candidates;
  for (const PlanCandidate& candidate : plan.candidates) candidates.push_back(candidate_text(candidate));
  return ObjectText()
      .add("format", kFormat)
      .add("version", kVersion)
      .add_text("model", ObjectText()
                             .add("architecture", plan.model.architecture)
                             .add("layers", plan.model.layers)
                             .add("query_heads", plan.model.query_heads)
                             .add("kv_heads", plan.model.kv_heads)
                             .add("head_dim", plan.model.head_dim)
                             .add("fingerprint", plan.model.fingerprint)
                             .inlined())
      .add_text("anchors", list(plan.anchors))
      .add_text("head_map", matrix(plan.head_map))
      .add_text("settings", ObjectText()
                                .add("method", plan.settings.method)
                                .add("tile", plan.settings.tile)
                                .add("similarity_k", plan.settings.similarity_k)
                                .add("aggregation", plan.settings.aggregation)
                                .add("forward", plan.settings.forward)
                                .add("importance", plan.settings.importance)
                                .add("tensor_parallel", plan.settings.tensor_parallel)
                                .add("percent_hundredths", plan.settings.percent_hundredths)
                                .add("budget", plan.settings.budget)
                                .inlined())
      .add_text("data", ObjectText()
                            .add("name", plan.data.name)
                            .add("prompts", plan.data.prompts)
                            .add("tokens", plan.data.tokens)
                            .add("hash", plan.data.hash)
                            .inlined())
      .add("objective", plan.objective)
      .add_text("candidates", lines(candidates))
      .add_text("validation", validation_text(plan.validation))
      .add("validated", plan.validation && plan.validation->passed)
      .add_text("retained_mass", list(plan.retained_mass))
      .add_text("importance", list(plan.importance))
      .add_text("similarity", matrix(plan.similarity))
      .add("tool_version", plan.tool_version)
      .document();
}

Plan parse_plan(const std::string& json, const std::string& source) {
  const Json root = parse_json(json, source);
  const Reader in(root, source, "");
  check_header(in, source);
  Plan plan;
  plan.model = read_model(in.object("model"));
  plan.anchors = in.integers("anchors", kMaxPlanLayers);
  plan.head_map = in.integer_rows("head_map", kMaxPlanHeads);
  plan.settings = read_settings(in.object("settings"));
  if (in.has("data")) plan.data = read_data(in.object("data"));
  if (in.has("objective")) plan.objective = in.number("objective");
  plan.importance = in.numbers("importance");
  plan.similarity = in.number_rows("similarity");
  plan.retained_mass = in.numbers("retained_mass");
  if (in.has("candidates")) plan.candidates = read_candidates(in, source);
  if (in.has("validation")) plan.validation = read_validation(in.object("validation"));
  if (in.has("tool_version")) plan.tool_version = in.string("tool_version");
  if (const auto fault = plan_fault(plan)) throw_error<BadFile>("{}: {}", source, *fault);
  if (in.has("validated")) {
    const bool validated = in.boolean("validated");
    const bool passed = plan.validation && plan.validation->passed;
    require<BadFile>(validated == passed, "{}: field 'validated': expected {} (validation.passed), got {}",
                     source, passed, validated);
  }
  return plan;
}

Plan load_plan(const std::string& path) { return parse_plan(read_file(path, kMaxFileBytes), path); }

void save_plan(const Plan& plan, const std::string& path) { write_file_atomic(path, plan_to_json(plan)); }

}  // namespace kascade
