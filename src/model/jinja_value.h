// SPDX-License-Identifier: Apache-2.0
// Values of chat templates. They are small handles; what they point at lives in the Machine that renders,
// which counts every step and byte, so that no template can take more than its limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kascade/chat_template.h"

namespace kascade::jinja {

struct Statement;
struct List;
struct Dict;
struct Loop;

/// A string: bytes that live in the Machine, the template or the messages, and which of them came from
/// messages.
struct Text {
  std::string_view bytes;
  std::vector<TextRange> marks;  // ascending, disjoint, not touching
};

enum class ValueKind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInteger,
  kFloat,
  kString,
  kList,
  kDict,
  kNamespace,
  kLoop,
  kMacro,
  kFunction
};

enum class Function : uint8_t { kRange, kNamespace, kDict, kRaiseException, kStrftimeNow };

struct Value {
  ValueKind kind = ValueKind::kUndefined;
  union {
    int64_t integer = 0;  // kBool, kInteger
    double number;        // kFloat
    const Text* text;     // kString
    const List* list;
    Dict* dict;  // kDict, kNamespace
    const Loop* loop;
    const Statement* macro;
    Function function;
  };

  bool is(ValueKind other) const { return kind == other; }
  std::string_view bytes() const { return text->bytes; }  // of a string
};

struct List {
  std::vector<Value> items;
  bool is_tuple = false;  // printed in round brackets, equal to no list
};

struct Dict {
  std::vector<std::pair<std::string_view, Value>> entries;  // in order of insertion
  const Value* find(std::string_view key) const;
};

/// What `loop` is inside a for loop.
struct Loop {
  const List* items;
  size_t index;  // from 0
};

/// Builds a string and keeps track of what came from messages.
class TextBuilder {
 public:
  void append(std::string_view bytes, bool marked = false);
  void append(const Text& text);
  size_t size() const { return bytes_.size(); }
  std::string& bytes() { return bytes_; }
  std::vector<TextRange>& marks() { return marks_; }

 private:
  void mark(size_t begin, size_t end);

  std::string bytes_;
  std::vector<TextRange> marks_;
};

/// Owns all values of one rendering and enforces its limits. Everything it throws names the line being
/// rendered.
class Machine {
 public:
  explicit Machine(const ChatTemplateLimits& limits) : limits_(limits) {}
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  /// Counts one step, and one more for every 128 bytes or element that the step touches.
  void step(size_t bytes = 0, size_t elements = 0);
  /// Refuses a string or output that is longer than any output may be.
  void check_size(size_t bytes) const;

  /// One level of recursion, for as long as it lives.
  class Depth {
   public:
    explicit Depth(Machine& machine);
    ~Depth() { --machine_.depth_; }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;

   private:
    Machine& machine_;
  };

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<BadFile>("chat template line {}: {}", line_,
                         fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  [[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<Unsupported>("chat template line {}: {} is not supported", line_,
                             fmt::format(format, std::forward<Args>(args)...));
  }
  void set_line(int line) { line_ = line; }

  Value boolean(bool value) const;
  Value integer(int64_t value) const;
  Value number(double value) const;
  Value none() const;
  /// A string whose bytes outlive the rendering.
  Value borrow(std::string_view bytes, bool marked = false);
  Value string(TextBuilder&& builder);
  Value string(std::string_view bytes, bool marked = false);  // a copy
  /// The bytes [begin, end) of a string, with their marks; no copy.
  Value slice(const Text& text, size_t begin, size_t end);
  Value list(std::vector<Value> items, bool is_tuple = false);
  Value dict(std::vector<std::pair<std::string_view, Value>> entries, ValueKind kind = ValueKind::kDict);
  const Loop* loop(const Loop& loop);

  // --- what Python's operators and str() do ---

  bool truth(const Value& value);
  bool equal(const Value& a, const Value& b);
  /// -1, 0 or 1; numbers with numbers and strings with strings only.
  int compare(const Value& a, const Value& b);
  bool contains(const Value& container, const Value& item);
  /// The elements that a for loop or filter walks over.
  const List* iterate(const Value& value);
  int64_t length(const Value& value);
  int64_t to_integer(const Value& value, std::string_view what) const;
  const Text& to_text(const Value& value, std::string_view what) const;
  /// As str() and as repr().
  void print(const Value& value, TextBuilder& out);
  void represent(const Value& value, TextBuilder& out);
  Value to_string(const Value& value);
  static std::string_view type_name(const Value& value);

 private:
  friend class Depth;

  const ChatTemplateLimits& limits_;
  int64_t steps_ = 0;
  int depth_ = 0;
  int line_ = 1;
  std::deque<std::string> bytes_;
  std::deque<Text> texts_;
  std::deque<List> lists_;
  std::deque<Dict> dicts_;
  std::deque<Loop> loops_;
};

/// Bytes of the character at the start of text; a byte that is not UTF-8 counts as one.
size_t character_bytes(std::string_view text);

}  // namespace kascade::jinja
