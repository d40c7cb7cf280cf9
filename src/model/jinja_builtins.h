// SPDX-License-Identifier: Apache-2.0
// Filters, tests, methods and functions that chat templates may use. What is not known throws Unsupported by
// name.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "model/jinja_value.h"

namespace kascade::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string_view, Value>> named;
};

Value apply_filter(Machine& machine, std::string_view name, const Value& input, const Arguments& arguments);
bool apply_test(Machine& machine, std::string_view name, const Value& input, const Arguments& arguments);
Value call_function(Machine& machine, Function function, const Arguments& arguments);

/// A method of a string, mapping or loop.
Value call_method(Machine& machine, const Value& object, std::string_view name, const Arguments& arguments);

/// object.name and object[index]; undefined where there is none. Throws BadFile when object is undefined.
Value get_attribute(Machine& machine, const Value& object, std::string_view name);
Value get_item(Machine& machine, const Value& object, const Value& index);

/// object[start:stop:step] of a string or list; a bound that is none or undefined is left out.
Value get_slice(Machine& machine, const Value& object, const Value& start, const Value& stop,
                const Value& step);

/// The arguments of one call, taken one by one by position or name; what nobody took is an error.
class ArgumentReader {
 public:
  ArgumentReader(Machine& machine, std::string_view callee, const Arguments& arguments)
      : machine_(machine), callee_(callee), arguments_(arguments) {}

  const Value* optional(std::string_view name);  // null where it is not given
  const Value& required(std::string_view name);
  void finish() const;

 private:
  Machine& machine_;
  std::string_view callee_;
  const Arguments& arguments_;
  size_t next_ = 0;
  size_t named_taken_ = 0;
};

}  // namespace kascade::jinja
