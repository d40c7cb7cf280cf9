// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_strings.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "model/unicode.h"

namespace kascade::jinja {
namespace {

// White space as str.strip() and str.split() know it: Unicode's, and four separators of ASCII.
bool is_python_space(char32_t code) { return is_white_space(code) || (code >= 0x1C && code <= 0x1F); }

// Where the last character of text begins.
size_t last_character(std::string_view text) {
  for (size_t bytes = 4; bytes > 1; --bytes) {
    if (bytes <= text.size() && decode_utf8(text.substr(text.size() - bytes)).bytes == bytes)
      return text.size() - bytes;
  }
  return text.size() - 1;
}

// Whether the character at the start of text is to be stripped: one of `characters`, or white space if that
// is null.
bool is_stripped(std::string_view character, const Text* characters) {
  if (characters == nullptr) {
    const Utf8Char decoded = decode_utf8(character);
    return decoded.bytes > 0 && is_python_space(decoded.code);
  }
  for (std::string_view rest = characters->bytes; !rest.empty(); rest.remove_prefix(character_bytes(rest))) {
    if (rest.substr(0, character_bytes(rest)) == character) return true;
  }
  return false;
}

Value strip(Machine& machine, const Text& text, bool left, bool right, const Text* characters) {
  machine.step(text.bytes.size() * (characters == nullptr ? 1 : 1 + characters->bytes.size()));
  size_t begin = 0, end = text.bytes.size();
  while (left && begin < end) {
    const size_t bytes = character_bytes(text.bytes.substr(begin, end - begin));
    if (!is_stripped(text.bytes.substr(begin, bytes), characters)) break;
    begin += bytes;
  }
  while (right && begin < end) {
    const size_t last = begin + last_character(text.bytes.substr(begin, end - begin));
    if (!is_stripped(text.bytes.substr(last, end - last), characters)) break;
    end = last;
  }
  return machine.slice(text, begin, end);
}

Value split_at_spaces(Machine& machine, const Text& text, int64_t limit) {
  std::vector<Value> parts;
  const std::string_view bytes = text.bytes;
  size_t i = 0;
  const auto skip = [&](bool spaces) {
    while (i < bytes.size()) {
      const Utf8Char character = decode_utf8(bytes.substr(i));
      if ((character.bytes > 0 && is_python_space(character.code)) != spaces) break;
      i += std::max<size_t>(1, character.bytes);
    }
  };
  for (skip(true); i < bytes.size(); skip(true)) {
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(machine.slice(text, i, bytes.size()));
      break;
    }
    const size_t begin = i;
    skip(false);
    parts.push_back(machine.slice(text, begin, i));
  }
  return machine.list(std::move(parts));
}

Value split(Machine& machine, const Text& text, const Arguments& arguments, bool from_right) {
  ArgumentReader reader(machine, "split", arguments);
  const Value* separator = reader.optional("sep");
  const Value* most = reader.optional("maxsplit");
  reader.finish();
  const int64_t limit = most != nullptr ? machine.to_integer(*most, "split") : -1;
  machine.step(text.bytes.size());
  if (separator == nullptr || separator->is(ValueKind::kNone)) {
    if (from_right && limit >= 0) machine.unsupported("rsplit at white space with a limit");
    return split_at_spaces(machine, text, limit);
  }
  const std::string_view between = machine.to_text(*separator, "split").bytes;
  if (between.empty()) machine.fail("split: an empty separator");
  std::vector<std::pair<size_t, size_t>> cuts;  // where separators begin and end, in order of search
  const auto enough = [&] { return limit >= 0 && static_cast<int64_t>(cuts.size()) >= limit; };
  if (from_right) {
    for (size_t end = text.bytes.size(); end >= between.size() && !enough();) {
      const size_t at = text.bytes.substr(0, end).rfind(between);
      if (at == std::string_view::npos) break;
      cuts.emplace_back(at, at + between.size());
      end = at;
    }
    std::reverse(cuts.begin(), cuts.end());
  } else {
    for (size_t at = 0; !enough();) {
      at = text.bytes.find(between, at);
      if (at == std::string_view::npos) break;
      cuts.emplace_back(at, at + between.size());
      at += between.size();
    }
  }
  std::vector<Value> parts;
  size_t begin = 0;
  for (const auto& [cut, after] : cuts) {
    parts.push_back(machine.slice(text, begin, cut));
    begin = after;
  }
  parts.push_back(machine.slice(text, begin, text.bytes.size()));
  return machine.list(std::move(parts));
}

Value replace(Machine& machine, const Text& text, const Arguments& arguments) {
  ArgumentReader reader(machine, "replace", arguments);
  const Text& old_text = machine.to_text(reader.required("old"), "replace");
  const Text& new_text = machine.to_text(reader.required("new"), "replace");
  const Value* count = reader.optional("count");
  reader.finish();
  int64_t left =
      count != nullptr && !count->is(ValueKind::kNone) ? machine.to_integer(*count, "replace") : -1;
  machine.step(text.bytes.size());
  TextBuilder result;
  const auto copy = [&](size_t begin, size_t end) { result.append(*machine.slice(text, begin, end).text); };
  const auto put = [&] {
    machine.step(new_text.bytes.size());
    machine.check_size(result.size() + new_text.bytes.size());
    result.append(new_text);
    --left;
  };
  size_t begin = 0;
  if (old_text.bytes.empty()) {  // in front of every character and at the end
    while (left != 0) {
      put();
      if (begin == text.bytes.size()) break;
      const size_t bytes = character_bytes(text.bytes.substr(begin));
      copy(begin, begin + bytes);
      begin += bytes;
    }
  } else {
    while (left != 0) {
      const size_t at = text.bytes.find(old_text.bytes, begin);
      if (at == std::string_view::npos) break;
      copy(begin, at);
      put();
      begin = at + old_text.bytes.size();
    }
  }
  copy(begin, text.bytes.size());
  return machine.string(std::move(result));
}

// Letter case beyond ASCII needs tables that nothing else here does.
Value change_case(Machine& machine, const Text& text, std::string_view name,
                  bool words_end_at_any_sign = true) {
  machine.step(text.bytes.size());
  if (std::any_of(text.bytes.begin(), text.bytes.end(),
                  [](char c) { return static_cast<unsigned char>(c) >= 0x80; })) {
    machine.unsupported("'{}' of text beyond ASCII", name);
  }
  const auto is_lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_upper = [](char c) { return c >= 'A' && c <= 'Z'; };
  std::string bytes(text.bytes);
  bool in_word = false;
  for (size_t i = 0; i < bytes.size(); ++i) {
    char& c = bytes[i];
    const bool letter = is_lower(c) || is_upper(c);
    const bool up = name == "upper" || (name == "title" && !in_word) || (name == "capitalize" && i == 0);
    if (up && is_lower(c)) c = static_cast<char>(c - 'a' + 'A');
    if (!up && is_upper(c)) c = static_cast<char>(c - 'A' + 'a');
    constexpr std::string_view kWordEnds = "- \t\n\v\f\r\x1C\x1D\x1E\x1F({[<";
    in_word = words_end_at_any_sign ? letter : kWordEnds.find(c) == std::string_view::npos;
  }
  TextBuilder result;
  result.append(Text{bytes, text.marks});
  return machine.string(std::move(result));
}

Value has_end(Machine& machine, const Text& text, std::string_view name, const Arguments& arguments) {
  ArgumentReader reader(machine, name, arguments);
  const Value& wanted = reader.required("affix");
  reader.finish();
  const auto matches = [&](const Value& affix) {
    const std::string_view bytes = machine.to_text(affix, name).bytes;
    machine.step(bytes.size());
    return name == "startswith" ? text.bytes.starts_with(bytes) : text.bytes.ends_with(bytes);
  };
  if (!wanted.is(ValueKind::kList)) return machine.boolean(matches(wanted));
  return machine.boolean(std::any_of(wanted.list->items.begin(), wanted.list->items.end(), matches));
}

Value without_affix(Machine& machine, const Text& text, bool prefix, const Text& affix) {
  machine.step(affix.bytes.size());
  const size_t size = text.bytes.size(), cut = affix.bytes.size();
  if (prefix && text.bytes.starts_with(affix.bytes)) return machine.slice(text, cut, size);
  if (!prefix && text.bytes.ends_with(affix.bytes)) return machine.slice(text, 0, size - cut);
  return machine.slice(text, 0, size);
}

Value find(Machine& machine, const Text& text, std::string_view name, const Text& wanted) {
  machine.step(text.bytes.size());
  const size_t at = text.bytes.find(wanted.bytes);
  if (at == std::string_view::npos) {
    if (name == "index") machine.fail("index: the string does not hold what is searched for");
    return machine.integer(-1);
  }
  return machine.integer(machine.length(machine.slice(text, 0, at)));
}

Value count(Machine& machine, const Text& text, const Text& wanted) {
  machine.step(text.bytes.size());
  if (wanted.bytes.empty()) machine.fail("count: an empty string");
  int64_t found = 0;
  for (size_t at = text.bytes.find(wanted.bytes); at != std::string_view::npos;
       at = text.bytes.find(wanted.bytes, at + wanted.bytes.size())) {
    ++found;
  }
  return machine.integer(found);
}

Value is_made_of(Machine& machine, const Text& text, std::string_view name) {
  machine.step(text.bytes.size());
  const auto fits = [name](char c) {
    const bool digit = c >= '0' && c <= '9', letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return (digit && name != "isalpha") || (letter && name != "isdigit");
  };
  if (std::any_of(text.bytes.begin(), text.bytes.end(),
                  [](char c) { return static_cast<unsigned char>(c) >= 0x80; })) {
    machine.unsupported("'{}' of text beyond ASCII", name);
  }
  return machine.boolean(!text.bytes.empty() && std::all_of(text.bytes.begin(), text.bytes.end(), fits));
}

}  // namespace

Value title_words(Machine& machine, const Text& text) { return change_case(machine, text, "title", false); }

Value parse_integer(Machine& machine, const Text& text, const Value& otherwise) {
  const std::string_view bytes = strip(machine, text, true, true, nullptr).bytes();
  const std::string_view digits = bytes.starts_with('+') ? bytes.substr(1) : bytes;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole =
      error == std::errc{} && end == digits.data() + digits.size() && bytes.substr(0, 2) != "+-";
  return whole ? machine.integer(value) : otherwise;
}

Value call_string_method(Machine& machine, const Text& text, std::string_view name,
                         const Arguments& arguments) {
  if (name == "split") return split(machine, text, arguments, false);
  if (name == "rsplit") return split(machine, text, arguments, true);
  if (name == "replace") return replace(machine, text, arguments);
  if (name == "startswith" || name == "endswith") return has_end(machine, text, name, arguments);

  ArgumentReader reader(machine, name, arguments);
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Value* characters = reader.optional("chars");
    reader.finish();
    const bool given = characters != nullptr && !characters->is(ValueKind::kNone);
    return strip(machine, text, name != "rstrip", name != "lstrip",
                 given ? &machine.to_text(*characters, name) : nullptr);
  }
  if (name == "removeprefix" || name == "removesuffix" || name == "find" || name == "index" ||
      name == "count") {
    const Text& wanted = machine.to_text(reader.required("text"), name);
    reader.finish();
    if (name == "count") return count(machine, text, wanted);
    if (name == "find" || name == "index") return find(machine, text, name, wanted);
    return without_affix(machine, text, name == "removeprefix", wanted);
  }
  if (name == "join") {
    Value separator;
    separator.kind = ValueKind::kString;
    separator.text = &text;
    const Value& items = reader.required("items");
    reader.finish();
    return apply_filter(machine, "join", items, Arguments{{separator}, {}});
  }
  const bool is_case = name == "upper" || name == "lower" || name == "title" || name == "capitalize";
  if (!is_case && name != "isdigit" && name != "isalpha" && name != "isalnum") {
    machine.unsupported("method '{}' of a string", name);
  }
  reader.finish();
  return is_case ? change_case(machine, text, name) : is_made_of(machine, text, name);
}

}  // namespace kascade::jinja
