// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/text.h"

namespace kascade {
namespace {

// A value costs some 100 bytes of tree and may cost two bytes of text. The largest tokenizer files in use
// hold about two million values.
constexpr int64_t kMaxValues = 8'000'000;

// Builds the tree value by value, so that depth and size are known before a node exists.
class TreeBuilder : public nlohmann::json_sax<Json> {
 public:
  TreeBuilder(std::string source, int max_depth) : source_(std::move(source)), max_depth_(max_depth) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(Json(nullptr)); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(number_integer_t value) override { return add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return add(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return add(Json(value)); }
  bool string(string_t& value) override { return add(Json(std::move(value))); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Json& object = *open_.back();
    if (object.contains(name)) throw_error<BadFile>("{}: JSON: duplicate key {}", source_, quote_text(name));
    slot_ = &object[name];
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view message = error.what();
    const size_t end_of_tag = message.find("] ");
    // The message repeats the last token, which may be as long as the file.
    throw_error<BadFile>(
        "{}: not valid JSON: {}", source_,
        quote_text(message.substr(end_of_tag == std::string_view::npos ? 0 : end_of_tag + 2), 200));
  }

 private:
  Json* place(Json value) {
    require<BadFile>(++values_ <= kMaxValues, "{}: JSON: more than {} values", source_, kMaxValues);
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    *slot_ = std::move(value);
    return slot_;
  }

  bool add(Json value) {
    place(std::move(value));
    return true;
  }

  bool open(Json value) {
    require<BadFile>(static_cast<int>(open_.size()) < max_depth_, "{}: JSON: nested deeper than {} levels",
                     source_, max_depth_);
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string source_;
  int max_depth_;
  int64_t values_ = 0;
  Json root_;
  std::vector<Json*> open_;  // stable: a container grows only while it is the innermost open one
  Json* slot_ = nullptr;     // where the value of the last key goes
};

std::string dotted(const std::string& where, std::string_view key) {
  const std::string name = quote_text(key);
  const std::string_view bare(name.data() + 1, name.rfind('\'') - 1);
  return where.empty() ? std::string(bare) : fmt::format("{}.{}", where, bare);
}

std::string kind_of(const Json& value) {
  if (value.is_number_integer()) return fmt::format("the integer {}", value.dump());
  if (value.is_number()) return fmt::format("the number {}", value.dump());
  if (value.is_string()) return fmt::format("the string {}", quote_text(value.get_ref<const std::string&>()));
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  return value.type_name();
}

}  // namespace

Json parse_json(std::string_view text, const std::string& source, int max_depth) {
  TreeBuilder builder(source, max_depth);
  Json::sax_parse(text, &builder);
  return builder.take();
}

Json load_json(const std::string& path, uint64_t max_bytes) {
  return parse_json(read_file(path, max_bytes), path);
}

const Json& json_field(const Json& object, std::string_view key, const std::string& source,
                       const std::string& where) {
  require<BadFile>(object.is_object(), "{}: field '{}': expected an object, got {}", source, where,
                   kind_of(object));
  const auto found = object.find(key);
  require<BadFile>(found != object.end(), "{}: field '{}': missing", source, dotted(where, key));
  return *found;
}

int64_t json_int(const Json& object, std::string_view key, int64_t min, int64_t max,
                 const std::string& source, const std::string& where) {
  const Json& value = json_field(object, key, source, where);
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
  require<BadFile>(fits && value.get<int64_t>() >= min && value.get<int64_t>() <= max,
                   "{}: field '{}': expected an integer in {}..{}, got {}", source, dotted(where, key), min,
                   max, kind_of(value));
  return value.get<int64_t>();
}

double json_number(const Json& object, std::string_view key, const std::string& source,
                   const std::string& where) {
  const Json& value = json_field(object, key, source, where);
  require<BadFile>(value.is_number() && std::isfinite(value.get<double>()),
                   "{}: field '{}': expected a number, got {}", source, dotted(where, key), kind_of(value));
  return value.get<double>();
}

std::string json_string(const Json& object, std::string_view key, const std::string& source,
                        const std::string& where) {
  const Json& value = json_field(object, key, source, where);
  require<BadFile>(value.is_string(), "{}: field '{}': expected a string, got {}", source, dotted(where, key),
                   kind_of(value));
  return value.get<std::string>();
}

std::string dump_json(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace kascade
