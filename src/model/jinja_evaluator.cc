// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_evaluator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/jinja_builtins.h"

namespace kascade::jinja {
namespace {

enum class Flow : uint8_t { kNext, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(Machine& machine, const std::vector<std::pair<std::string_view, Value>>& variables)
      : machine_(machine) {
    const auto function = [](Function which) {
      Value value;
      value.kind = ValueKind::kFunction;
      value.function = which;
      return value;
    };
    scopes_.push_back({{"range", function(Function::kRange)},
                       {"namespace", function(Function::kNamespace)},
                       {"dict", function(Function::kDict)},
                       {"raise_exception", function(Function::kRaiseException)},
                       {"strftime_now", function(Function::kStrftimeNow)}});
    for (const auto& [name, value] : variables) assign(name, value);
  }

  RenderedChat run(const Block& block) {
    TextBuilder out;
    out_ = &out;
    execute(block);
    return {std::move(out.bytes()), std::move(out.marks())};
  }

 private:
  using Scope = std::vector<std::pair<std::string_view, Value>>;

  // A scope, for as long as it lives.
  class Scoped {
   public:
    explicit Scoped(Evaluator& evaluator) : evaluator_(evaluator) { evaluator_.scopes_.emplace_back(); }
    ~Scoped() { evaluator_.scopes_.pop_back(); }
    Scoped(const Scoped&) = delete;
    Scoped& operator=(const Scoped&) = delete;

   private:
    Evaluator& evaluator_;
  };

  // --- variables ---

  // From the innermost scope outwards to the running macro's, then the template's own.
  Value look_up(std::string_view name) {
    machine_.step();
    for (size_t i = scopes_.size(); i-- > 0;) {
      if (i < first_scope_ && i > 0) continue;
      for (const auto& [key, value] : scopes_[i]) {
        if (key == name) return value;
      }
    }
    return {};
  }

  void assign(std::string_view name, const Value& value) {
    for (auto& [key, old] : scopes_.back()) {
      if (key == name) {
        old = value;
        return;
      }
    }
    machine_.step();
    scopes_.back().emplace_back(name, value);
  }

  void assign_all(const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) {
      assign(names[0], value);
      return;
    }
    if (!value.is(ValueKind::kList) || value.list->items.size() != names.size()) {
      machine_.fail("expected {} values to unpack, got {}", names.size(),
                    value.is(ValueKind::kList) ? fmt::format("{}", value.list->items.size())
                                               : std::string(Machine::type_name(value)));
    }
    for (size_t i = 0; i < names.size(); ++i) assign(names[i], value.list->items[i]);
  }

  // --- statements ---

  Flow execute(const Block& block) {
    const Machine::Depth depth(machine_);
    for (const Statement& statement : block) {
      machine_.set_line(statement.line);
      machine_.step();
      const Flow flow = execute(statement);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Flow execute(const Statement& statement) {
    switch (statement.kind) {
      case StatementKind::kText:
        machine_.step(statement.text.size());
        out_->append(statement.text);
        machine_.check_size(out_->size());
        break;
      case StatementKind::kOutput:
        machine_.print(evaluate(*statement.value), *out_);
        break;
      case StatementKind::kIf:
        for (const Branch& branch : statement.branches) {
          if (branch.condition == nullptr || machine_.truth(evaluate(*branch.condition)))
            return execute(branch.body);
        }
        break;
      case StatementKind::kFor:
        execute_for(statement);
        break;
      case StatementKind::kSet:
        assign_all(statement.names, evaluate(*statement.value));
        break;
      case StatementKind::kSetField: {
        const Value target = look_up(statement.names[0]);
        const Value value = evaluate(*statement.value);
        if (!target.is(ValueKind::kNamespace)) {
          machine_.fail("'{}' is no namespace, its fields cannot be set", statement.names[0]);
        }
        set_field(*target.dict, statement.names[1], value);
        break;
      }
      case StatementKind::kSetBlock: {
        const Value captured = capture(statement.body);
        assign(statement.names[0], captured);
        break;
      }
      case StatementKind::kMacro: {
        Value macro;
        macro.kind = ValueKind::kMacro;
        macro.macro = &statement;
        assign(statement.text, macro);
        break;
      }
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  void set_field(Dict& fields, std::string_view name, const Value& value) {
    machine_.step(0, fields.entries.size());
    for (auto& [key, old] : fields.entries) {
      if (key == name) {
        old = value;
        return;
      }
    }
    fields.entries.emplace_back(name, value);
  }

  void execute_for(const Statement& statement) {
    const List* items = machine_.iterate(evaluate(*statement.value));
    if (statement.condition != nullptr) {
      std::vector<Value> kept;
      for (const Value& item : items->items) {
        const Scoped scope(*this);
        assign_all(statement.names, item);
        if (machine_.truth(evaluate(*statement.condition))) kept.push_back(item);
      }
      items = machine_.list(std::move(kept)).list;
    }
    if (items->items.empty()) {
      const Scoped scope(*this);
      execute(statement.otherwise);
      return;
    }
    for (size_t i = 0; i < items->items.size(); ++i) {
      machine_.step();
      const Scoped scope(*this);
      Value loop;
      loop.kind = ValueKind::kLoop;
      loop.loop = machine_.loop({items, i});
      assign("loop", loop);
      assign_all(statement.names, items->items[i]);
      if (execute(statement.body) == Flow::kBreak) break;
    }
  }

  // What a block writes, as a string.
  Value capture(const Block& block) {
    TextBuilder text;
    TextBuilder* const outer = std::exchange(out_, &text);
    {
      const Scoped scope(*this);
      execute(block);
    }
    out_ = outer;
    return machine_.string(std::move(text));
  }

  Value call_macro(const Statement& macro, const Arguments& arguments) {
    const size_t outer_scope = std::exchange(first_scope_, scopes_.size());
    Value result;
    {
      const Scoped scope(*this);
      ArgumentReader reader(machine_, macro.text, arguments);
      for (size_t i = 0; i < macro.names.size(); ++i) {
        const Value* given = reader.optional(macro.names[i]);
        Value value;
        if (given != nullptr) {
          value = *given;
        } else if (macro.defaults[i] != nullptr) {
          value = evaluate(*macro.defaults[i]);
        }
        assign(macro.names[i], value);
      }
      reader.finish();
      result = capture(macro.body);
    }
    first_scope_ = outer_scope;
    return result;
  }

  // --- expressions ---

  Value evaluate(const Expression& node) {
    const Machine::Depth depth(machine_);
    machine_.step();
    machine_.set_line(node.line);
    const auto child = [&](size_t i) { return evaluate(*node.children[i]); };
    switch (node.kind) {
      case ExpressionKind::kUndefined:
        return {};
      case ExpressionKind::kNone:
        return machine_.none();
      case ExpressionKind::kBool:
        return machine_.boolean(node.integer != 0);
      case ExpressionKind::kInteger:
        return machine_.integer(node.integer);
      case ExpressionKind::kFloat:
        return machine_.number(node.number);
      case ExpressionKind::kString:
        return machine_.borrow(node.text);
      case ExpressionKind::kName:
        return look_up(node.text);
      case ExpressionKind::kList: {
        std::vector<Value> items;
        for (const ExpressionPtr& item : node.children) items.push_back(evaluate(*item));
        return machine_.list(std::move(items), node.integer != 0);
      }
      case ExpressionKind::kDict:
        return evaluate_dict(node);
      case ExpressionKind::kItem: {
        const Value object = child(0);
        return get_item(machine_, object, child(1));
      }
      case ExpressionKind::kAttribute:
        return get_attribute(machine_, child(0), node.text);
      case ExpressionKind::kSlice: {
        const auto bound = [&](size_t i) { return node.children[i] != nullptr ? child(i) : Value{}; };
        const Value object = child(0), start = bound(1), stop = bound(2);
        return get_slice(machine_, object, start, stop, bound(3));
      }
      case ExpressionKind::kCall:
        return evaluate_call(node);
      case ExpressionKind::kFilter: {
        const Value input = child(0);
        return apply_filter(machine_, node.text, input, evaluate_arguments(node));
      }
      case ExpressionKind::kTest: {
        const Value input = child(0);
        return machine_.boolean(apply_test(machine_, node.text, input, evaluate_arguments(node)) !=
                                node.negated);
      }
      case ExpressionKind::kNot:
        return machine_.boolean(!machine_.truth(child(0)));
      case ExpressionKind::kNegative:
        return arithmetic(Operator::kSubtract, machine_.integer(0), child(0));
      case ExpressionKind::kPositive:
        return arithmetic(Operator::kAdd, machine_.integer(0), child(0));
      case ExpressionKind::kArithmetic: {
        Value left = child(0);
        for (size_t i = 1; i < node.children.size(); ++i)
          left = arithmetic(node.operators[i - 1], left, child(i));
        return left;
      }
      case ExpressionKind::kConcat: {
        TextBuilder text;
        for (const ExpressionPtr& part : node.children) machine_.print(evaluate(*part), text);
        return machine_.string(std::move(text));
      }
      case ExpressionKind::kComparison: {
        Value left = child(0);
        for (size_t i = 1; i < node.children.size(); ++i) {
          const Value right = child(i);
          if (!holds(node.operators[i - 1], left, right)) return machine_.boolean(false);
          left = right;
        }
        return machine_.boolean(true);
      }
      case ExpressionKind::kAnd:
      case ExpressionKind::kOr: {  // the value of the operand that decides
        Value value;
        for (const ExpressionPtr& operand : node.children) {
          value = evaluate(*operand);
          if (machine_.truth(value) == (node.kind == ExpressionKind::kOr)) break;
        }
        return value;
      }
      case ExpressionKind::kConditional:
        return machine_.truth(child(1)) ? child(0) : child(2);
    }
    return {};
  }

  Value evaluate_dict(const Expression& node) {
    std::vector<std::pair<std::string_view, Value>> entries;
    for (size_t i = 0; i < node.children.size(); i += 2) {
      const Value key = evaluate(*node.children[i]);
      if (!key.is(ValueKind::kString))
        machine_.unsupported("a mapping key of type {}", Machine::type_name(key));
      const Value value = evaluate(*node.children[i + 1]);
      const auto same =
          std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.first == key.bytes(); });
      machine_.step(0, entries.size());
      if (same != entries.end()) {
        same->second = value;
      } else {
        entries.emplace_back(key.bytes(), value);
      }
    }
    return machine_.dict(std::move(entries));
  }

  Arguments evaluate_arguments(const Expression& node) {
    Arguments arguments;
    for (size_t i = 1; i < node.children.size(); ++i)
      arguments.positional.push_back(evaluate(*node.children[i]));
    for (const auto& [name, value] : node.named) arguments.named.emplace_back(name, evaluate(*value));
    return arguments;
  }

  Value evaluate_call(const Expression& node) {
    const Expression& callee = *node.children[0];
    if (callee.kind == ExpressionKind::kAttribute) {
      const Value object = evaluate(*callee.children[0]);
      const bool has_field = object.is(ValueKind::kNamespace) && object.dict->find(callee.text) != nullptr;
      if (!has_field) return call_method(machine_, object, callee.text, evaluate_arguments(node));
      return call(*object.dict->find(callee.text), callee.text, evaluate_arguments(node));
    }
    const Value function = evaluate(callee);
    return call(function, callee.text, evaluate_arguments(node));
  }

  Value call(const Value& function, std::string_view name, const Arguments& arguments) {
    if (function.is(ValueKind::kMacro)) return call_macro(*function.macro, arguments);
    if (function.is(ValueKind::kFunction)) return call_function(machine_, function.function, arguments);
    machine_.fail("'{}' is {}, not something to call", name, Machine::type_name(function));
  }

  bool holds(Operator op, const Value& left, const Value& right) {
    switch (op) {
      case Operator::kEqual:
        return machine_.equal(left, right);
      case Operator::kNotEqual:
        return !machine_.equal(left, right);
      case Operator::kLess:
        return machine_.compare(left, right) < 0;
      case Operator::kLessEqual:
        return machine_.compare(left, right) <= 0;
      case Operator::kGreater:
        return machine_.compare(left, right) > 0;
      case Operator::kGreaterEqual:
        return machine_.compare(left, right) >= 0;
      case Operator::kIn:
        return machine_.contains(right, left);
      case Operator::kNotIn:
        return !machine_.contains(right, left);
      default:
        return false;
    }
  }

  Value arithmetic(Operator op, const Value& left, const Value& right) {
    const auto integral = [](const Value& v) { return v.is(ValueKind::kInteger) || v.is(ValueKind::kBool); };
    const auto numeric = [&](const Value& v) { return integral(v) || v.is(ValueKind::kFloat); };
    machine_.step();
    if (integral(left) && integral(right) && op != Operator::kDivide) {
      return machine_.integer(integer_arithmetic(op, left.integer, right.integer));
    }
    if (numeric(left) && numeric(right)) return machine_.number(float_arithmetic(op, left, right));
    if (op == Operator::kAdd && left.is(ValueKind::kString) && right.is(ValueKind::kString)) {
      TextBuilder text;
      machine_.print(left, text);
      machine_.print(right, text);
      return machine_.string(std::move(text));
    }
    if (op == Operator::kAdd && left.is(ValueKind::kList) && right.is(ValueKind::kList)) {
      machine_.step(0, left.list->items.size() + right.list->items.size());
      if (left.list->is_tuple != right.list->is_tuple) machine_.fail("cannot add a list and a tuple");
      std::vector<Value> items = left.list->items;
      items.insert(items.end(), right.list->items.begin(), right.list->items.end());
      return machine_.list(std::move(items), left.list->is_tuple);
    }
    if (op == Operator::kMultiply && left.is(ValueKind::kString) && integral(right))
      return repeat(left, right.integer);
    if (op == Operator::kMultiply && integral(left) && right.is(ValueKind::kString))
      return repeat(right, left.integer);
    if (op == Operator::kModulo && left.is(ValueKind::kString)) machine_.unsupported("'%' on a string");
    machine_.fail("cannot calculate with {} and {}", Machine::type_name(left), Machine::type_name(right));
  }

  Value repeat(const Value& text, int64_t times) {
    TextBuilder result;
    for (int64_t i = 0; i < times && !text.bytes().empty(); ++i) machine_.print(text, result);
    return machine_.string(std::move(result));
  }

  int64_t integer_arithmetic(Operator op, int64_t a, int64_t b) {
    int64_t result = 0;
    bool overflow = false;
    switch (op) {
      case Operator::kAdd:
        overflow = __builtin_add_overflow(a, b, &result);
        break;
      case Operator::kSubtract:
        overflow = __builtin_sub_overflow(a, b, &result);
        break;
      case Operator::kMultiply:
        overflow = __builtin_mul_overflow(a, b, &result);
        break;
      default: {  // kFloorDivide, kModulo: rounded towards minus infinity
        if (b == 0) machine_.fail("division by zero");
        overflow = a == std::numeric_limits<int64_t>::min() && b == -1;
        if (overflow) break;
        const bool adjust = a % b != 0 && (a % b < 0) != (b < 0);
        result = op == Operator::kModulo ? a % b + (adjust ? b : 0) : a / b - (adjust ? 1 : 0);
      }
    }
    if (overflow) machine_.fail("a number passes 64 bits");
    return result;
  }

  double float_arithmetic(Operator op, const Value& left, const Value& right) {
    const auto value = [](const Value& v) {
      return v.is(ValueKind::kFloat) ? v.number : static_cast<double>(v.integer);
    };
    const double a = value(left), b = value(right);
    switch (op) {
      case Operator::kAdd:
        return a + b;
      case Operator::kSubtract:
        return a - b;
      case Operator::kMultiply:
        return a * b;
      default:
        break;
    }
    if (b == 0) machine_.fail("division by zero");
    if (op == Operator::kDivide) return a / b;
    if (op == Operator::kFloorDivide) return std::floor(a / b);
    const double rest = std::fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  }

  Machine& machine_;
  std::vector<Scope> scopes_;
  size_t first_scope_ = 0;  // of the running macro
  TextBuilder* out_ = nullptr;
};

}  // namespace

RenderedChat evaluate(Machine& machine, const Block& block,
                      const std::vector<std::pair<std::string_view, Value>>& variables) {
  return Evaluator(machine, variables).run(block);
}

}  // namespace kascade::jinja
