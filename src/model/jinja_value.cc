// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "model/unicode.h"

namespace kascade::jinja {

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

void TextBuilder::mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!marks_.empty() && marks_.back().end == begin) {
    marks_.back().end = end;
  } else {
    marks_.push_back({begin, end});
  }
}

void TextBuilder::append(std::string_view bytes, bool marked) {
  if (marked) mark(bytes_.size(), bytes_.size() + bytes.size());
  bytes_ += bytes;
}

void TextBuilder::append(const Text& text) {
  for (const TextRange& range : text.marks) mark(bytes_.size() + range.begin, bytes_.size() + range.end);
  bytes_ += text.bytes;
}

void Machine::step(size_t bytes, size_t elements) {
  steps_ += static_cast<int64_t>(1 + bytes / 128 + elements);
  if (steps_ > limits_.max_steps) fail("passes the limit of {} steps", limits_.max_steps);
}

void Machine::check_size(size_t bytes) const {
  if (bytes > limits_.max_output_bytes) fail("passes the limit of {} bytes", limits_.max_output_bytes);
}

Machine::Depth::Depth(Machine& machine) : machine_(machine) {
  if (machine_.depth_ >= machine_.limits_.max_depth) {
    machine_.fail("passes the limit of {} nested evaluations", machine_.limits_.max_depth);
  }
  ++machine_.depth_;
}

Value Machine::boolean(bool value) const {
  Value result;
  result.kind = ValueKind::kBool;
  result.integer = value;
  return result;
}

Value Machine::integer(int64_t value) const {
  Value result;
  result.kind = ValueKind::kInteger;
  result.integer = value;
  return result;
}

Value Machine::number(double value) const {
  Value result;
  result.kind = ValueKind::kFloat;
  result.number = value;
  return result;
}

Value Machine::none() const {
  Value result;
  result.kind = ValueKind::kNone;
  return result;
}

Value Machine::borrow(std::string_view bytes, bool marked) {
  step();
  Text& text = texts_.emplace_back();
  text.bytes = bytes;
  if (marked && !bytes.empty()) text.marks.push_back({0, bytes.size()});
  Value result;
  result.kind = ValueKind::kString;
  result.text = &text;
  return result;
}

Value Machine::string(TextBuilder&& builder) {
  check_size(builder.size());
  step(builder.size(), builder.marks().size());
  Text& text = texts_.emplace_back();
  text.bytes = bytes_.emplace_back(std::move(builder.bytes()));
  text.marks = std::move(builder.marks());
  Value result;
  result.kind = ValueKind::kString;
  result.text = &text;
  return result;
}

Value Machine::string(std::string_view bytes, bool marked) {
  TextBuilder builder;
  builder.append(bytes, marked);
  return string(std::move(builder));
}

Value Machine::slice(const Text& text, size_t begin, size_t end) {
  step(0, text.marks.size());
  Text& part = texts_.emplace_back();
  part.bytes = text.bytes.substr(begin, end - begin);
  for (const TextRange& range : text.marks) {
    const size_t from = std::max(range.begin, begin), to = std::min(range.end, end);
    if (from < to) part.marks.push_back({from - begin, to - begin});
  }
  Value result;
  result.kind = ValueKind::kString;
  result.text = &part;
  return result;
}

Value Machine::list(std::vector<Value> items, bool is_tuple) {
  step(0, items.size());
  Value result;
  result.kind = ValueKind::kList;
  result.list = &lists_.emplace_back(List{std::move(items), is_tuple});
  return result;
}

Value Machine::dict(std::vector<std::pair<std::string_view, Value>> entries, ValueKind kind) {
  step(0, entries.size());
  Value result;
  result.kind = kind;
  result.dict = &dicts_.emplace_back(Dict{std::move(entries)});
  return result;
}

const Loop* Machine::loop(const Loop& loop) { return &loops_.emplace_back(loop); }

std::string_view Machine::type_name(const Value& value) {
  switch (value.kind) {
    case ValueKind::kUndefined:
      return "undefined";
    case ValueKind::kNone:
      return "none";
    case ValueKind::kBool:
      return "boolean";
    case ValueKind::kInteger:
      return "integer";
    case ValueKind::kFloat:
      return "float";
    case ValueKind::kString:
      return "string";
    case ValueKind::kList:
      return "list";
    case ValueKind::kDict:
      return "mapping";
    case ValueKind::kNamespace:
      return "namespace";
    case ValueKind::kLoop:
      return "loop";
    case ValueKind::kMacro:
      return "macro";
    case ValueKind::kFunction:
      return "function";
  }
  return "";
}

bool Machine::truth(const Value& value) {
  switch (value.kind) {
    case ValueKind::kUndefined:
    case ValueKind::kNone:
      return false;
    case ValueKind::kBool:
    case ValueKind::kInteger:
      return value.integer != 0;
    case ValueKind::kFloat:
      return value.number != 0;
    case ValueKind::kString:
      return !value.bytes().empty();
    case ValueKind::kList:
      return !value.list->items.empty();
    case ValueKind::kDict:
      return !value.dict->entries.empty();
    default:
      return true;
  }
}

namespace {

bool is_number(const Value& value) {
  return value.is(ValueKind::kBool) || value.is(ValueKind::kInteger) || value.is(ValueKind::kFloat);
}

double as_double(const Value& value) {
  return value.is(ValueKind::kFloat) ? value.number : static_cast<double>(value.integer);
}

}  // namespace

bool Machine::equal(const Value& a, const Value& b) {
  const Depth depth(*this);
  if (is_number(a) && is_number(b)) {
    step();
    if (a.is(ValueKind::kFloat) || b.is(ValueKind::kFloat)) return as_double(a) == as_double(b);
    return a.integer == b.integer;
  }
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case ValueKind::kUndefined:
    case ValueKind::kNone:
      return true;
    case ValueKind::kString:
      step(std::min(a.bytes().size(), b.bytes().size()));
      return a.bytes() == b.bytes();
    case ValueKind::kList: {
      const auto &left = a.list->items, &right = b.list->items;
      if (left.size() != right.size() || a.list->is_tuple != b.list->is_tuple) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        step();
        if (!equal(left[i], right[i])) return false;
      }
      return true;
    }
    case ValueKind::kDict: {
      if (a.dict->entries.size() != b.dict->entries.size()) return false;
      for (const auto& [key, value] : a.dict->entries) {
        step(0, b.dict->entries.size());
        const Value* other = b.dict->find(key);
        if (other == nullptr || !equal(value, *other)) return false;
      }
      return true;
    }
    case ValueKind::kNamespace:
      return a.dict == b.dict;
    case ValueKind::kLoop:
      return a.loop == b.loop;
    case ValueKind::kMacro:
      return a.macro == b.macro;
    case ValueKind::kFunction:
      return a.function == b.function;
    default:
      return false;
  }
}

int Machine::compare(const Value& a, const Value& b) {
  const auto order = [](auto x, auto y) { return x < y ? -1 : x > y ? 1 : 0; };
  if (is_number(a) && is_number(b)) {
    if (a.is(ValueKind::kFloat) || b.is(ValueKind::kFloat)) return order(as_double(a), as_double(b));
    return order(a.integer, b.integer);
  }
  if (!a.is(ValueKind::kString) || !b.is(ValueKind::kString)) {
    fail("cannot order {} and {}", type_name(a), type_name(b));
  }
  step(std::min(a.bytes().size(), b.bytes().size()));
  return order(a.bytes(), b.bytes());
}

bool Machine::contains(const Value& container, const Value& item) {
  switch (container.kind) {
    case ValueKind::kUndefined:
      return false;
    case ValueKind::kString:
      if (!item.is(ValueKind::kString)) fail("'in': a string holds strings, not {}", type_name(item));
      step(container.bytes().size());
      return container.bytes().find(item.bytes()) != std::string_view::npos;
    case ValueKind::kList:
      for (const Value& element : container.list->items) {
        step();
        if (equal(element, item)) return true;
      }
      return false;
    case ValueKind::kDict:
      step(0, container.dict->entries.size());
      return item.is(ValueKind::kString) && container.dict->find(item.bytes()) != nullptr;
    default:
      fail("'in': {} holds nothing", type_name(container));
  }
}

size_t character_bytes(std::string_view text) { return std::max<size_t>(1, decode_utf8(text).bytes); }

const List* Machine::iterate(const Value& value) {
  if (value.is(ValueKind::kList)) return value.list;
  std::vector<Value> items;
  switch (value.kind) {
    case ValueKind::kUndefined:
      break;
    case ValueKind::kString:
      for (size_t i = 0; i < value.bytes().size();) {
        const size_t bytes = character_bytes(value.bytes().substr(i));
        items.push_back(slice(*value.text, i, i + bytes));
        i += bytes;
      }
      break;
    case ValueKind::kDict:
      for (const auto& entry : value.dict->entries) items.push_back(borrow(entry.first));
      break;
    default:
      fail("cannot walk over {}", type_name(value));
  }
  return list(std::move(items)).list;
}

int64_t Machine::length(const Value& value) {
  switch (value.kind) {
    case ValueKind::kUndefined:
      return 0;
    case ValueKind::kString: {
      step(value.bytes().size());
      int64_t characters = 0;
      for (size_t i = 0; i < value.bytes().size(); ++characters)
        i += character_bytes(value.bytes().substr(i));
      return characters;
    }
    case ValueKind::kList:
      return static_cast<int64_t>(value.list->items.size());
    case ValueKind::kDict:
      return static_cast<int64_t>(value.dict->entries.size());
    default:
      fail("{} has no length", type_name(value));
  }
}

int64_t Machine::to_integer(const Value& value, std::string_view what) const {
  if (!value.is(ValueKind::kInteger) && !value.is(ValueKind::kBool)) {
    fail("{}: expected an integer, got {}", what, type_name(value));
  }
  return value.integer;
}

const Text& Machine::to_text(const Value& value, std::string_view what) const {
  if (!value.is(ValueKind::kString)) fail("{}: expected a string, got {}", what, type_name(value));
  return *value.text;
}

namespace {

void represent_float(double value, TextBuilder& out) {
  if (std::isnan(value) || std::isinf(value)) {
    out.append(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
    return;
  }
  // Python writes the shortest digits that read back the same, plain from 1e-4 up to 1e16.
  char digits[400];
  const double size = std::fabs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(digits, digits + sizeof digits, value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific)
                       .ptr;
  const std::string_view text(digits, end - digits);
  out.append(text);
  if (plain && text.find('.') == std::string_view::npos) out.append(".0");
}

void represent_string(const Text& text, TextBuilder& out) {
  const bool marked = !text.marks.empty();
  const bool has_single = text.bytes.find('\'') != std::string_view::npos;
  const char quote = has_single && text.bytes.find('"') == std::string_view::npos ? '"' : '\'';
  std::string quoted(1, quote);
  for (const char c : text.bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == quote || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (c == '\r') {
      quoted += "\\r";
    } else if (c == '\t') {
      quoted += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  quoted += quote;
  out.append(quoted, marked);
}

}  // namespace

void Machine::represent(const Value& value, TextBuilder& out) {
  const Depth depth(*this);
  switch (value.kind) {
    case ValueKind::kString:
      step(value.bytes().size());
      represent_string(*value.text, out);
      break;
    case ValueKind::kList: {
      const bool is_tuple = value.list->is_tuple;
      out.append(is_tuple ? "(" : "[");
      bool first = true;
      for (const Value& item : value.list->items) {
        step();
        if (!first) out.append(", ");
        first = false;
        represent(item, out);
      }
      if (is_tuple && value.list->items.size() == 1) out.append(",");
      out.append(is_tuple ? ")" : "]");
      break;
    }
    case ValueKind::kDict: {
      out.append("{");
      bool first = true;
      for (const auto& [key, item] : value.dict->entries) {
        step(key.size());
        if (!first) out.append(", ");
        first = false;
        represent_string(Text{key, {}}, out);
        out.append(": ");
        represent(item, out);
      }
      out.append("}");
      break;
    }
    default:
      print(value, out);
  }
  check_size(out.size());
}

void Machine::print(const Value& value, TextBuilder& out) {
  switch (value.kind) {
    case ValueKind::kUndefined:
      break;
    case ValueKind::kNone:
      out.append("None");
      break;
    case ValueKind::kBool:
      out.append(value.integer != 0 ? "True" : "False");
      break;
    case ValueKind::kInteger:
      out.append(fmt::format("{}", value.integer));
      break;
    case ValueKind::kFloat:
      represent_float(value.number, out);
      break;
    case ValueKind::kString:
      step(value.bytes().size(), value.text->marks.size());
      out.append(*value.text);
      break;
    case ValueKind::kList:
    case ValueKind::kDict:
      represent(value, out);
      break;
    default:
      unsupported("printing of {}", type_name(value));
  }
  check_size(out.size());
}

Value Machine::to_string(const Value& value) {
  if (value.is(ValueKind::kString)) return value;
  TextBuilder builder;
  print(value, builder);
  return string(std::move(builder));
}

}  // namespace kascade::jinja
