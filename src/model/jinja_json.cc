// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_json.h"

#include <algorithm>
#include <string>

#include "model/unicode.h"

namespace kascade::jinja {
namespace {

struct Style {
  bool ensure_ascii = false;
  bool sort_keys = false;
  int64_t indent = -1;  // below zero: all on one line
  std::string_view between_items = ", ";
  std::string_view after_key = ": ";
};

class JsonWriter {
 public:
  JsonWriter(Machine& machine, const Style& style, TextBuilder& out)
      : machine_(machine), style_(style), out_(out) {}

  void write(const Value& value, int64_t level) {
    const Machine::Depth depth(machine_);
    machine_.step();
    switch (value.kind) {
      case ValueKind::kNone:
        out_.append("null");
        break;
      case ValueKind::kBool:
        out_.append(value.integer != 0 ? "true" : "false");
        break;
      case ValueKind::kInteger:
      case ValueKind::kFloat:
        machine_.print(value, out_);
        break;
      case ValueKind::kString:
        write_string(*value.text);
        break;
      case ValueKind::kList: {
        const std::vector<Value>& items = value.list->items;
        out_.append("[");
        for (size_t i = 0; i < items.size(); ++i) {
          separate(i == 0, level + 1);
          write(items[i], level + 1);
        }
        close("]", items.empty(), level);
        break;
      }
      case ValueKind::kDict: {
        auto entries = value.dict->entries;
        machine_.step(0, entries.size());
        if (style_.sort_keys) {
          std::stable_sort(entries.begin(), entries.end(),
                           [](const auto& a, const auto& b) { return a.first < b.first; });
        }
        out_.append("{");
        for (size_t i = 0; i < entries.size(); ++i) {
          separate(i == 0, level + 1);
          write_string(Text{entries[i].first, {}});
          out_.append(style_.after_key);
          write(entries[i].second, level + 1);
        }
        close("}", entries.empty(), level);
        break;
      }
      default:
        machine_.fail("tojson: {} has no JSON form", Machine::type_name(value));
    }
    machine_.check_size(out_.size());
  }

 private:
  void new_line(int64_t level) {
    if (style_.indent < 0) return;
    const auto spaces = static_cast<size_t>(style_.indent * level);
    machine_.step(spaces);
    out_.append("\n");
    out_.append(std::string(spaces, ' '));
  }
  void separate(bool first, int64_t level) {
    if (!first) out_.append(style_.between_items);
    new_line(level);
  }
  void close(std::string_view bracket, bool empty, int64_t level) {
    if (!empty) new_line(level);
    out_.append(bracket);
  }

  void write_string(const Text& text) {
    machine_.step(text.bytes.size());
    std::string json = "\"";
    for (size_t i = 0; i < text.bytes.size();) {
      const size_t bytes = character_bytes(text.bytes.substr(i));
      const std::string_view character = text.bytes.substr(i, bytes);
      const Utf8Char decoded = decode_utf8(character);
      const char c = character[0];
      static constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
      if (const size_t escape = kEscaped.find(c); escape != std::string_view::npos) {
        json += '\\';
        json += kLetters[escape];
      } else if (static_cast<unsigned char>(c) < 0x20) {
        json += fmt::format("\\u{:04x}", static_cast<int>(c));
      } else if (style_.ensure_ascii && decoded.bytes > 1) {
        write_escape(json, decoded.code);
      } else {
        json += character;
      }
      i += bytes;
    }
    json += '"';
    out_.append(json, !text.marks.empty());
  }

  static void write_escape(std::string& json, char32_t code) {
    if (code < 0x10000) {
      json += fmt::format("\\u{:04x}", static_cast<uint32_t>(code));
    } else {  // a surrogate pair
      const uint32_t above = static_cast<uint32_t>(code) - 0x10000;
      json += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (above >> 10), 0xDC00 + (above & 0x3FF));
    }
  }

  Machine& machine_;
  const Style& style_;
  TextBuilder& out_;
};

}  // namespace

Value to_json(Machine& machine, const Value& input, const Arguments& arguments) {
  ArgumentReader reader(machine, "tojson", arguments);
  const Value* ensure_ascii = reader.optional("ensure_ascii");
  const Value* indent = reader.optional("indent");
  const Value* separators = reader.optional("separators");
  const Value* sort_keys = reader.optional("sort_keys");
  reader.finish();
  Style style;
  style.ensure_ascii = ensure_ascii != nullptr && machine.truth(*ensure_ascii);
  style.sort_keys = sort_keys != nullptr && machine.truth(*sort_keys);
  if (indent != nullptr && !indent->is(ValueKind::kNone)) {
    style.indent = machine.to_integer(*indent, "tojson: indent");
    if (style.indent < 0 || style.indent > 16)
      machine.fail("tojson: indent {} is outside 0 to 16", style.indent);
    style.between_items = ",";
  }
  if (separators != nullptr && !separators->is(ValueKind::kNone)) {
    if (!separators->is(ValueKind::kList) || separators->list->items.size() != 2) {
      machine.fail("tojson: separators: expected two strings");
    }
    style.between_items = machine.to_text(separators->list->items[0], "tojson: separators").bytes;
    style.after_key = machine.to_text(separators->list->items[1], "tojson: separators").bytes;
  }
  TextBuilder out;
  JsonWriter(machine, style, out).write(input, 0);
  return machine.string(std::move(out));
}

}  // namespace kascade::jinja
