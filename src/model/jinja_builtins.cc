// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_builtins.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <string>

#include "model/jinja_json.h"
#include "model/jinja_strings.h"

namespace kascade::jinja {

const Value* ArgumentReader::optional(std::string_view name) {
  if (next_ < arguments_.positional.size()) return &arguments_.positional[next_++];
  for (const auto& [key, value] : arguments_.named) {
    if (key == name) {
      ++named_taken_;
      return &value;
    }
  }
  return nullptr;
}

const Value& ArgumentReader::required(std::string_view name) {
  const Value* value = optional(name);
  if (value == nullptr) machine_.fail("{}: argument '{}' is missing", callee_, name);
  return *value;
}

void ArgumentReader::finish() const {
  if (next_ < arguments_.positional.size() || named_taken_ < arguments_.named.size()) {
    machine_.fail("{}: too many arguments, or one of an unknown name", callee_);
  }
}

namespace {

// a.b.c, as filters take it in their argument "attribute".
Value get_path(Machine& machine, Value object, const Value& path) {
  if (path.is(ValueKind::kInteger)) return get_item(machine, object, path);
  std::string_view rest = machine.to_text(path, "attribute").bytes;
  for (;;) {
    const size_t dot = rest.find('.');
    object = get_attribute(machine, object, rest.substr(0, dot));
    if (dot == std::string_view::npos) return object;
    rest.remove_prefix(dot + 1);
  }
}

// The arguments from index `first` on, for the filter or test that a filter is given the name of.
Arguments arguments_from(const Arguments& arguments, size_t first) {
  Arguments rest = arguments;
  rest.positional.erase(
      rest.positional.begin(),
      rest.positional.begin() + static_cast<ptrdiff_t>(std::min(first, rest.positional.size())));
  return rest;
}

Value filter_map(Machine& machine, const Value& input, const Arguments& arguments) {
  if (!machine.truth(input)) return machine.list({});
  std::vector<Value> results;
  const Value* attribute = nullptr;
  const Value* fallback = nullptr;
  for (const auto& [key, value] : arguments.named) {
    if (key == "attribute") attribute = &value;
    if (key == "default") fallback = &value;
  }
  if (attribute == nullptr && arguments.positional.empty())
    machine.fail("map: expected a filter or an attribute");
  for (const Value& item : machine.iterate(input)->items) {
    if (attribute != nullptr) {
      Value result = get_path(machine, item, *attribute);
      if (result.is(ValueKind::kUndefined) && fallback != nullptr) result = *fallback;
      results.push_back(result);
    } else {
      const std::string_view name = machine.to_text(arguments.positional[0], "map").bytes;
      results.push_back(apply_filter(machine, name, item, arguments_from(arguments, 1)));
    }
  }
  return machine.list(std::move(results));
}

// select, reject, selectattr, rejectattr.
Value filter_select(Machine& machine, const Value& input, const Arguments& arguments, bool wanted,
                    bool by_attribute) {
  if (!machine.truth(input)) return machine.list({});
  const size_t test = by_attribute ? 1 : 0;
  if (arguments.positional.size() < test) machine.fail("selectattr: argument 'attribute' is missing");
  std::vector<Value> results;
  for (const Value& item : machine.iterate(input)->items) {
    machine.step();
    const Value value = by_attribute ? get_path(machine, item, arguments.positional[0]) : item;
    const bool holds = arguments.positional.size() <= test
                           ? machine.truth(value)
                           : apply_test(machine, machine.to_text(arguments.positional[test], "select").bytes,
                                        value, arguments_from(arguments, test + 1));
    if (holds == wanted) results.push_back(item);
  }
  return machine.list(std::move(results));
}

Value filter_join(Machine& machine, const Value& input, const Arguments& arguments) {
  ArgumentReader reader(machine, "join", arguments);
  const Value* separator = reader.optional("d");
  const Value* attribute = reader.optional("attribute");
  reader.finish();
  TextBuilder joined;
  bool first = true;
  for (const Value& item : machine.iterate(input)->items) {
    machine.step();
    if (!first && separator != nullptr) machine.print(*separator, joined);
    first = false;
    machine.print(attribute != nullptr ? get_path(machine, item, *attribute) : item, joined);
  }
  return machine.string(std::move(joined));
}

Value filter_default(Machine& machine, const Value& input, const Arguments& arguments) {
  ArgumentReader reader(machine, "default", arguments);
  const Value* fallback = reader.optional("default_value");
  const Value* any_false = reader.optional("boolean");
  reader.finish();
  const bool missing = input.is(ValueKind::kUndefined) ||
                       (any_false != nullptr && machine.truth(*any_false) && !machine.truth(input));
  if (!missing) return input;
  return fallback != nullptr ? *fallback : machine.borrow("");
}

Value filter_end(Machine& machine, const Value& input, bool first) {
  if (input.is(ValueKind::kUndefined)) return {};
  const std::vector<Value>& items = machine.iterate(input)->items;
  if (items.empty()) return {};
  return first ? items.front() : items.back();
}

Value filter_reverse(Machine& machine, const Value& input) {
  std::vector<Value> items = machine.iterate(input)->items;
  std::reverse(items.begin(), items.end());
  if (!input.is(ValueKind::kString)) return machine.list(std::move(items));
  TextBuilder reversed;
  for (const Value& item : items) reversed.append(*item.text);
  return machine.string(std::move(reversed));
}

Value filter_unique(Machine& machine, const Value& input) {
  std::vector<Value> kept;
  for (const Value& item : machine.iterate(input)->items) {
    const bool known =
        std::any_of(kept.begin(), kept.end(), [&](const Value& other) { return machine.equal(item, other); });
    if (!known) kept.push_back(item);
  }
  return machine.list(std::move(kept));
}

Value filter_integer(Machine& machine, const Value& input, const Arguments& arguments) {
  ArgumentReader reader(machine, "int", arguments);
  const Value* fallback = reader.optional("default");
  reader.finish();
  const Value otherwise = fallback != nullptr ? *fallback : machine.integer(0);
  switch (input.kind) {
    case ValueKind::kBool:
    case ValueKind::kInteger:
      return machine.integer(input.integer);
    case ValueKind::kFloat: {
      const bool fits = input.number > -9.2e18 && input.number < 9.2e18;  // within int64, and no NaN
      return fits ? machine.integer(static_cast<int64_t>(input.number)) : otherwise;
    }
    case ValueKind::kString:
      return parse_integer(machine, *input.text, otherwise);
    default:
      return otherwise;
  }
}

Value dict_items(Machine& machine, const Value& dict) {
  std::vector<Value> items;
  if (dict.is(ValueKind::kUndefined)) return machine.list({});
  if (!dict.is(ValueKind::kDict)) machine.fail("items: expected a mapping, got {}", Machine::type_name(dict));
  for (const auto& [key, value] : dict.dict->entries) {
    items.push_back(machine.list({machine.borrow(key), value}, true));
  }
  return machine.list(std::move(items));
}

Value method_of_dict(Machine& machine, const Value& object, std::string_view name,
                     const Arguments& arguments) {
  ArgumentReader reader(machine, name, arguments);
  if (name == "get") {
    const Value& key = reader.required("key");
    const Value* fallback = reader.optional("default");
    reader.finish();
    machine.step(0, object.dict->entries.size());
    const Value* found = key.is(ValueKind::kString) ? object.dict->find(key.bytes()) : nullptr;
    if (found != nullptr) return *found;
    return fallback != nullptr ? *fallback : machine.none();
  }
  if (name != "items" && name != "keys" && name != "values")
    machine.unsupported("method '{}' of a mapping", name);
  reader.finish();
  if (name == "items") return dict_items(machine, object);
  std::vector<Value> results;
  if (name == "keys") {
    for (const auto& entry : object.dict->entries) results.push_back(machine.borrow(entry.first));
  } else {
    for (const auto& entry : object.dict->entries) results.push_back(entry.second);
  }
  return machine.list(std::move(results));
}

Value loop_attribute(Machine& machine, const Loop& loop, std::string_view name) {
  const auto count = static_cast<int64_t>(loop.items->items.size()), index = static_cast<int64_t>(loop.index);
  if (name == "index") return machine.integer(index + 1);
  if (name == "index0") return machine.integer(index);
  if (name == "revindex") return machine.integer(count - index);
  if (name == "revindex0") return machine.integer(count - index - 1);
  if (name == "first") return machine.boolean(index == 0);
  if (name == "last") return machine.boolean(index + 1 == count);
  if (name == "length") return machine.integer(count);
  if (name == "depth") return machine.integer(1);  // only recursive loops go deeper
  if (name == "depth0") return machine.integer(0);
  if (name == "previtem") return index == 0 ? Value{} : loop.items->items[loop.index - 1];
  if (name == "nextitem") return index + 1 == count ? Value{} : loop.items->items[loop.index + 1];
  machine.unsupported("loop.{}", name);
}

Value function_range(Machine& machine, const Arguments& arguments) {
  ArgumentReader reader(machine, "range", arguments);
  const int64_t first = machine.to_integer(reader.required("start"), "range");
  const Value* second = reader.optional("stop");
  const Value* third = reader.optional("step");
  reader.finish();
  const int64_t start = second != nullptr ? first : 0;
  const int64_t stop = second != nullptr ? machine.to_integer(*second, "range") : first;
  const int64_t step = third != nullptr ? machine.to_integer(*third, "range") : 1;
  if (step == 0) machine.fail("range: a step of 0");
  std::vector<Value> items;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    machine.step();
    items.push_back(machine.integer(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return machine.list(std::move(items));
}

// Names are English whatever the locale, as in Python's default.
std::string format_time(Machine& machine, std::string_view format) {
  static constexpr std::array<std::string_view, 7> kDays = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                                            "Thursday", "Friday", "Saturday"};
  static constexpr std::array<std::string_view, 12> kMonths = {
      "January", "February", "March",     "April",   "May",      "June",
      "July",    "August",   "September", "October", "November", "December"};
  const std::time_t seconds = std::time(nullptr);
  std::tm now{};
  if (localtime_r(&seconds, &now) == nullptr) machine.fail("strftime_now: the time is not known");
  std::string text;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%' || i + 1 == format.size()) {
      text += format[i];
      continue;
    }
    const char field = format[++i];
    const int hour = now.tm_hour % 12 == 0 ? 12 : now.tm_hour % 12;
    switch (field) {
      case 'Y':
        text += fmt::format("{}", now.tm_year + 1900);
        break;
      case 'y':
        text += fmt::format("{:02}", now.tm_year % 100);
        break;
      case 'm':
        text += fmt::format("{:02}", now.tm_mon + 1);
        break;
      case 'd':
        text += fmt::format("{:02}", now.tm_mday);
        break;
      case 'j':
        text += fmt::format("{:03}", now.tm_yday + 1);
        break;
      case 'H':
        text += fmt::format("{:02}", now.tm_hour);
        break;
      case 'I':
        text += fmt::format("{:02}", hour);
        break;
      case 'M':
        text += fmt::format("{:02}", now.tm_min);
        break;
      case 'S':
        text += fmt::format("{:02}", now.tm_sec);
        break;
      case 'p':
        text += now.tm_hour < 12 ? "AM" : "PM";
        break;
      case 'B':
        text += kMonths[now.tm_mon];
        break;
      case 'b':
        text += kMonths[now.tm_mon].substr(0, 3);
        break;
      case 'A':
        text += kDays[now.tm_wday];
        break;
      case 'a':
        text += kDays[now.tm_wday].substr(0, 3);
        break;
      case '%':
        text += '%';
        break;
      default:
        machine.unsupported("strftime_now: field '%{}'", field);
    }
  }
  return text;
}

bool is_any(const Value& value, std::initializer_list<ValueKind> kinds) {
  return std::find(kinds.begin(), kinds.end(), value.kind) != kinds.end();
}

}  // namespace

Value apply_filter(Machine& machine, std::string_view name, const Value& input, const Arguments& arguments) {
  const Machine::Depth depth(machine);
  machine.step();
  // The filters with arguments.
  if (name == "default" || name == "d") return filter_default(machine, input, arguments);
  if (name == "join") return filter_join(machine, input, arguments);
  if (name == "map") return filter_map(machine, input, arguments);
  if (name == "select") return filter_select(machine, input, arguments, true, false);
  if (name == "reject") return filter_select(machine, input, arguments, false, false);
  if (name == "selectattr") return filter_select(machine, input, arguments, true, true);
  if (name == "rejectattr") return filter_select(machine, input, arguments, false, true);
  if (name == "tojson") return to_json(machine, input, arguments);
  if (name == "int") return filter_integer(machine, input, arguments);
  if (name == "trim") return call_method(machine, machine.to_string(input), "strip", arguments);
  if (name == "replace") return call_method(machine, machine.to_string(input), "replace", arguments);

  ArgumentReader(machine, name, arguments).finish();
  if (name == "length" || name == "count") return machine.integer(machine.length(input));
  if (name == "first") return filter_end(machine, input, true);
  if (name == "last") return filter_end(machine, input, false);
  if (name == "list") return machine.list(machine.iterate(input)->items);
  if (name == "string") return machine.to_string(input);
  if (name == "safe") return input;  // nothing is escaped
  if (name == "reverse") return filter_reverse(machine, input);
  if (name == "unique") return filter_unique(machine, input);
  if (name == "items") return dict_items(machine, input);
  if (name == "title") return title_words(machine, *machine.to_string(input).text);
  if (name == "upper" || name == "lower" || name == "capitalize") {
    return call_method(machine, machine.to_string(input), name, {});
  }
  machine.unsupported("filter '{}'", name);
}

bool apply_test(Machine& machine, std::string_view name, const Value& input, const Arguments& arguments) {
  machine.step();
  ArgumentReader reader(machine, name, arguments);
  const auto other = [&]() -> const Value& {
    const Value& value = reader.required("other");
    reader.finish();
    return value;
  };
  if (name == "equalto" || name == "eq" || name == "==") return machine.equal(input, other());
  if (name == "ne" || name == "!=") return !machine.equal(input, other());
  if (name == "lt" || name == "lessthan" || name == "<") return machine.compare(input, other()) < 0;
  if (name == "le" || name == "<=") return machine.compare(input, other()) <= 0;
  if (name == "gt" || name == "greaterthan" || name == ">") return machine.compare(input, other()) > 0;
  if (name == "ge" || name == ">=") return machine.compare(input, other()) >= 0;
  if (name == "in") return machine.contains(other(), input);
  if (name == "sameas") {
    const Value& value = other();
    return input.kind == value.kind && machine.equal(input, value);
  }
  if (name == "divisibleby") {
    const int64_t divisor = machine.to_integer(other(), name);
    if (divisor == 0) machine.fail("divisibleby: division by zero");
    return divisor == -1 || machine.to_integer(input, name) % divisor == 0;
  }
  reader.finish();
  using enum ValueKind;
  if (name == "defined") return !input.is(kUndefined);
  if (name == "undefined") return input.is(kUndefined);
  if (name == "none") return input.is(kNone);
  if (name == "string") return input.is(kString);
  if (name == "boolean") return input.is(kBool);
  if (name == "true") return input.is(kBool) && input.integer != 0;
  if (name == "false") return input.is(kBool) && input.integer == 0;
  if (name == "integer") return input.is(kInteger);
  if (name == "float") return input.is(kFloat);
  if (name == "number") return is_any(input, {kBool, kInteger, kFloat});
  if (name == "mapping") return input.is(kDict);
  if (name == "sequence" || name == "iterable") return is_any(input, {kUndefined, kString, kList, kDict});
  if (name == "callable") return is_any(input, {kMacro, kFunction});
  if (name == "odd") return machine.to_integer(input, name) % 2 != 0;
  if (name == "even") return machine.to_integer(input, name) % 2 == 0;
  machine.unsupported("test '{}'", name);
}

Value call_function(Machine& machine, Function function, const Arguments& arguments) {
  machine.step();
  switch (function) {
    case Function::kRange:
      return function_range(machine, arguments);
    case Function::kNamespace:
    case Function::kDict: {
      std::vector<std::pair<std::string_view, Value>> entries;
      if (arguments.positional.size() > 1 ||
          (arguments.positional.size() == 1 && !arguments.positional[0].is(ValueKind::kDict))) {
        machine.fail("namespace and dict take one mapping and named values");
      }
      if (!arguments.positional.empty()) entries = arguments.positional[0].dict->entries;
      for (const auto& named : arguments.named) {
        const auto same = std::find_if(entries.begin(), entries.end(),
                                       [&named](const auto& entry) { return entry.first == named.first; });
        if (same != entries.end()) {
          same->second = named.second;
        } else {
          entries.push_back(named);
        }
      }
      return machine.dict(std::move(entries),
                          function == Function::kDict ? ValueKind::kDict : ValueKind::kNamespace);
    }
    case Function::kRaiseException: {
      ArgumentReader reader(machine, "raise_exception", arguments);
      TextBuilder message;
      machine.print(reader.required("message"), message);
      reader.finish();
      machine.fail("the template refuses the conversation: {}", message.bytes().substr(0, 500));
    }
    case Function::kStrftimeNow: {
      ArgumentReader reader(machine, "strftime_now", arguments);
      const Text& format = machine.to_text(reader.required("format"), "strftime_now");
      reader.finish();
      return machine.string(format_time(machine, format.bytes));
    }
  }
  machine.fail("not a function");
}

Value call_method(Machine& machine, const Value& object, std::string_view name, const Arguments& arguments) {
  machine.step();
  if (object.is(ValueKind::kString)) return call_string_method(machine, *object.text, name, arguments);
  if (object.is(ValueKind::kDict)) return method_of_dict(machine, object, name, arguments);
  if (object.is(ValueKind::kLoop) && name == "cycle") {
    if (arguments.positional.empty()) machine.fail("loop.cycle: nothing to cycle through");
    return arguments.positional[object.loop->index % arguments.positional.size()];
  }
  if (object.is(ValueKind::kUndefined)) machine.fail("'{}' of an undefined value", name);
  machine.unsupported("method '{}' of {}", name, Machine::type_name(object));
}

Value get_attribute(Machine& machine, const Value& object, std::string_view name) {
  machine.step();
  switch (object.kind) {
    case ValueKind::kUndefined:
      machine.fail("'{}' of an undefined value", name);
    case ValueKind::kDict:
    case ValueKind::kNamespace: {
      machine.step(0, object.dict->entries.size());
      const Value* found = object.dict->find(name);
      return found != nullptr ? *found : Value{};
    }
    case ValueKind::kLoop:
      return loop_attribute(machine, *object.loop, name);
    default:
      return {};
  }
}

Value get_item(Machine& machine, const Value& object, const Value& index) {
  if (index.is(ValueKind::kString)) return get_attribute(machine, object, index.bytes());
  machine.step();
  if (object.is(ValueKind::kUndefined)) machine.fail("an item of an undefined value");
  if (!index.is(ValueKind::kInteger) && !index.is(ValueKind::kBool)) return {};
  if (!object.is(ValueKind::kString) && !object.is(ValueKind::kList)) return {};
  const int64_t count = machine.length(object);
  const int64_t at = index.integer < 0 ? index.integer + count : index.integer;
  if (at < 0 || at >= count) return {};
  if (object.is(ValueKind::kList)) return object.list->items[at];
  return get_slice(machine, object, machine.integer(at), machine.integer(at + 1), {});
}

Value get_slice(Machine& machine, const Value& object, const Value& start, const Value& stop,
                const Value& step) {
  machine.step();
  if (object.is(ValueKind::kUndefined)) machine.fail("a slice of an undefined value");
  if (!object.is(ValueKind::kString) && !object.is(ValueKind::kList)) return {};
  const auto bound = [&](const Value& value, int64_t otherwise) {
    const bool left_out = value.is(ValueKind::kUndefined) || value.is(ValueKind::kNone);
    return left_out ? otherwise : machine.to_integer(value, "slice");
  };
  const int64_t count = machine.length(object), by = bound(step, 1);
  if (by == 0) machine.fail("a slice with a step of 0");
  // Python's rules: bounds count from the end when negative and are then cut to the sequence.
  const int64_t lowest = by > 0 ? 0 : -1, highest = by > 0 ? count : count - 1;
  const auto place = [&](const Value& value, int64_t otherwise) {
    if (value.is(ValueKind::kUndefined) || value.is(ValueKind::kNone)) return otherwise;
    const int64_t at = machine.to_integer(value, "slice");
    return std::clamp(at < 0 ? at + count : at, lowest, highest);
  };
  const int64_t from = place(start, by > 0 ? lowest : highest), to = place(stop, by > 0 ? highest : lowest);

  if (object.is(ValueKind::kString) && by == 1) {
    const std::string_view bytes = object.bytes();
    size_t begin = 0;
    for (int64_t i = 0; i < from; ++i) begin += character_bytes(bytes.substr(begin));
    size_t end = begin;
    for (int64_t i = from; i < to; ++i) end += character_bytes(bytes.substr(end));
    return machine.slice(*object.text, begin, end);
  }
  const std::vector<Value>& items = machine.iterate(object)->items;
  std::vector<Value> kept;
  for (int64_t i = from; by > 0 ? i < to : i > to;) {
    kept.push_back(items[i]);
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  if (object.is(ValueKind::kList)) return machine.list(std::move(kept), object.list->is_tuple);
  TextBuilder text;
  for (const Value& item : kept) text.append(*item.text);
  return machine.string(std::move(text));
}

}  // namespace kascade::jinja
