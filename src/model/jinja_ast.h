// SPDX-License-Identifier: Apache-2.0
// The tree of a chat template: what the parser builds and the evaluator walks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kascade::jinja {

/// Deepest tree that is built. Walking and destroying a tree recurses, so this bounds the stack.
constexpr int kMaxTreeDepth = 100;

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

enum class ExpressionKind : uint8_t {
  kUndefined,  // the missing else of a conditional
  kNone,
  kBool,         // integer
  kInteger,      // integer
  kFloat,        // number
  kString,       // text
  kName,         // text
  kList,         // children; integer: whether it is a tuple
  kDict,         // children: key, value, key, value, ...
  kItem,         // children: object, index
  kAttribute,    // children: object; text: name
  kSlice,        // children: object, start, stop, step; null where left out
  kCall,         // children: callee, arguments; named: keyword arguments
  kFilter,       // children: input, arguments; named; text: name
  kTest,         // children: input, arguments; text: name; negated
  kNot,          // children: operand
  kNegative,     // children: operand
  kPositive,     // children: operand
  kArithmetic,   // children and operators: a o b o c ..., from left to right
  kConcat,       // children: a ~ b ~ c ...
  kComparison,   // children and operators: a < b <= c ..., all of which must hold
  kAnd,          // children
  kOr,           // children
  kConditional,  // children: value, condition, otherwise
};

enum class Operator : uint8_t {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,  // kArithmetic
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,  // kComparison
};

struct Expression {
  ExpressionKind kind = ExpressionKind::kUndefined;
  int line = 0;
  int depth = 1;  // of the tree below, this node included
  bool negated = false;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<ExpressionPtr> children;
  std::vector<Operator> operators;  // [children - 1]
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

enum class StatementKind : uint8_t {
  kText,      // text
  kOutput,    // value
  kIf,        // branches: the first whose condition holds; a null condition always does
  kFor,       // names, value: the iterable, condition or null, body, otherwise
  kSet,       // names, value
  kSetField,  // names: namespace variable and field, value
  kSetBlock,  // names: one, body
  kMacro,     // text: name, names: parameters, defaults, body
  kBreak,
  kContinue,
};

struct Statement;
using Block = std::vector<Statement>;

struct Branch {
  ExpressionPtr condition;
  Block body;
};

struct Statement {
  StatementKind kind = StatementKind::kText;
  int line = 0;
  std::string text;
  std::vector<std::string> names;
  ExpressionPtr value;
  ExpressionPtr condition;
  std::vector<ExpressionPtr> defaults;  // [names]; null where a parameter has none
  std::vector<Branch> branches;
  Block body;
  Block otherwise;
};

}  // namespace kascade::jinja
