// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_parser.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <string>
#include <utility>

#include "base/check.h"
#include "model/jinja_lexer.h"

namespace kascade::jinja {
namespace {

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Block run() {
    Block block = parse_block({});
    if (peek().kind != TokenKind::kEnd) fail("a tag that closes nothing");
    return block;
  }

 private:
  // Counts how deep the parser itself is nested: it recurses before there is a tree to measure.
  class Nesting {
   public:
    explicit Nesting(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxTreeDepth) parser_.fail("nested too deeply");
    }
    ~Nesting() { --parser_.nesting_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    Parser& parser_;
  };

  [[noreturn]] void fail(std::string_view what) const {
    throw_error<BadFile>("chat template line {}: {}", peek().line, what);
  }

  const Token& peek(size_t ahead = 0) const {
    return tokens_[std::min(position_ + ahead, tokens_.size() - 1)];
  }
  Token next() {
    Token token = peek();
    if (position_ + 1 < tokens_.size()) ++position_;
    return token;
  }
  bool at_operator(std::string_view op, size_t ahead = 0) const {
    return peek(ahead).kind == TokenKind::kOperator && peek(ahead).text == op;
  }
  bool at_name(std::string_view name, size_t ahead = 0) const {
    return peek(ahead).kind == TokenKind::kName && peek(ahead).text == name;
  }
  bool skip_operator(std::string_view op) {
    if (!at_operator(op)) return false;
    next();
    return true;
  }
  bool skip_name(std::string_view name) {
    if (!at_name(name)) return false;
    next();
    return true;
  }
  void expect_operator(std::string_view op) {
    if (!skip_operator(op)) fail(fmt::format("expected '{}', got {}", op, describe(peek())));
  }
  void expect(TokenKind kind, std::string_view what) {
    if (peek().kind != kind) fail(fmt::format("expected {}, got {}", what, describe(peek())));
    next();
  }
  std::string expect_name() {
    if (peek().kind != TokenKind::kName) fail(fmt::format("expected a name, got {}", describe(peek())));
    return next().text;
  }

  static std::string describe(const Token& token) {
    switch (token.kind) {
      case TokenKind::kBlockEnd:
      case TokenKind::kVariableEnd:
        return "the end of the tag";
      case TokenKind::kEnd:
        return "the end of the template";
      default:
        return fmt::format("'{}'", std::string_view(token.text).substr(0, 50));
    }
  }

  // --- statements ---

  // Statements up to a block tag that begins with one of `ends` (its opening and name stay) or the end of the
  // template.
  Block parse_block(std::initializer_list<std::string_view> ends) {
    const Nesting nesting(*this);
    Block block;
    for (;;) {
      const Token& token = peek();
      if (token.kind == TokenKind::kEnd) return block;
      if (token.kind == TokenKind::kText) {
        Statement& text = add(block, StatementKind::kText);
        text.text = next().text;
      } else if (token.kind == TokenKind::kVariableBegin) {
        Statement& output = add(block, StatementKind::kOutput);
        next();
        output.value = parse_tuple();
        expect(TokenKind::kVariableEnd, "'}}'");
      } else {
        if (peek(1).kind != TokenKind::kName) fail("a block without a name");
        if (std::find(ends.begin(), ends.end(), peek(1).text) != ends.end()) return block;
        parse_statement(block);
      }
    }
  }

  Statement& add(Block& block, StatementKind kind) {
    block.emplace_back();
    block.back().kind = kind;
    block.back().line = peek().line;
    return block.back();
  }

  void end_tag() { expect(TokenKind::kBlockEnd, "'%}'"); }
  void expect_block(std::string_view name) {
    if (peek().kind != TokenKind::kBlockBegin || !at_name(name, 1)) fail(fmt::format("expected '{}'", name));
    next();
    next();
  }
  void close(std::string_view name) {
    expect_block(name);
    end_tag();
  }

  void parse_statement(Block& block) {
    next();
    const std::string_view name = peek().text;
    if (name == "if") {
      parse_if(add(block, StatementKind::kIf));
    } else if (name == "for") {
      parse_for(add(block, StatementKind::kFor));
    } else if (name == "set") {
      parse_set(add(block, StatementKind::kSet));
    } else if (name == "macro") {
      parse_macro(add(block, StatementKind::kMacro));
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) fail(fmt::format("'{}' outside of a loop", name));
      add(block, name == "break" ? StatementKind::kBreak : StatementKind::kContinue);
      next();
      end_tag();
    } else if (name == "generation") {
      // Marks what a model wrote, for training; for rendering it is its body.
      next();
      end_tag();
      Block body = parse_block({"endgeneration"});
      close("endgeneration");
      std::move(body.begin(), body.end(), std::back_inserter(block));
    } else if (name.starts_with("end") || name == "else" || name == "elif") {
      fail(fmt::format("'{}' closes nothing", name));
    } else {
      throw_error<Unsupported>("chat template line {}: statement '{}' is not supported", peek().line, name);
    }
  }

  void parse_if(Statement& statement) {
    do {
      next();
      Branch branch;
      branch.condition = parse_tuple();
      end_tag();
      branch.body = parse_block({"elif", "else", "endif"});
      statement.branches.push_back(std::move(branch));
      if (peek().kind != TokenKind::kBlockBegin) fail("'if' is not closed");
      next();
    } while (at_name("elif"));
    if (skip_name("else")) {
      end_tag();
      statement.branches.push_back({nullptr, parse_block({"endif"})});
      expect_block("endif");
    } else {
      next();
    }
    end_tag();
  }

  void parse_for(Statement& statement) {
    next();
    statement.names = parse_targets();
    if (!skip_name("in")) fail("expected 'in'");
    statement.value = parse_or();  // not a conditional: its "if" filters the loop
    if (at_operator(",")) fail("a loop over several values needs brackets");
    if (skip_name("if")) statement.condition = parse_expression();
    if (at_name("recursive")) {
      throw_error<Unsupported>("chat template line {}: recursive loops are not supported", peek().line);
    }
    end_tag();
    ++loops_;
    statement.body = parse_block({"else", "endfor"});
    --loops_;
    if (peek().kind != TokenKind::kBlockBegin) fail("'for' is not closed");
    next();
    if (skip_name("else")) {
      end_tag();
      statement.otherwise = parse_block({"endfor"});
      expect_block("endfor");
    } else {
      next();
    }
    end_tag();
  }

  std::vector<std::string> parse_targets() {
    const bool bracket = skip_operator("(");
    std::vector<std::string> names{parse_target()};
    while (skip_operator(",")) {
      if (at_operator(")") || at_name("in") || at_operator("=")) break;
      names.push_back(parse_target());
    }
    if (bracket) expect_operator(")");
    return names;
  }

  std::string parse_target() {
    static constexpr std::string_view kReserved[] = {"true", "false", "none", "True", "False", "None",
                                                     "and",  "or",    "not",  "if",   "else",  "elif",
                                                     "in",   "is",    "for",  "loop"};
    if (std::find(std::begin(kReserved), std::end(kReserved), peek().text) != std::end(kReserved)) {
      fail(fmt::format("cannot assign to '{}'", peek().text));
    }
    return expect_name();
  }

  void parse_set(Statement& statement) {
    next();
    if (peek().kind == TokenKind::kName && at_operator(".", 1)) {
      statement.kind = StatementKind::kSetField;
      statement.names.push_back(expect_name());
      next();
      statement.names.push_back(expect_name());
      expect_operator("=");
      statement.value = parse_tuple();
      end_tag();
      return;
    }
    statement.names = parse_targets();
    if (skip_operator("=")) {
      statement.value = parse_tuple();
      end_tag();
      return;
    }
    if (statement.names.size() != 1) fail("expected '='");
    if (at_operator("|"))
      throw_error<Unsupported>("chat template line {}: a filtered set block is not supported", peek().line);
    statement.kind = StatementKind::kSetBlock;
    end_tag();
    statement.body = parse_block({"endset"});
    close("endset");
  }

  void parse_macro(Statement& statement) {
    next();
    statement.text = parse_target();
    expect_operator("(");
    while (!at_operator(")")) {
      if (!statement.names.empty()) expect_operator(",");
      if (at_operator(")")) break;
      statement.names.push_back(parse_target());
      statement.defaults.push_back(skip_operator("=") ? parse_expression() : nullptr);
      if (statement.defaults.back() == nullptr && statement.defaults.size() > 1 &&
          statement.defaults[statement.defaults.size() - 2] != nullptr) {
        fail("a parameter without a default after one with a default");
      }
    }
    next();
    end_tag();
    const int loops = std::exchange(loops_, 0);
    statement.body = parse_block({"endmacro"});
    loops_ = loops;
    expect_block("endmacro");
    if (peek().kind == TokenKind::kName) next();
    end_tag();
  }

  // --- expressions ---

  ExpressionPtr make(ExpressionKind kind) const {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->line = peek().line;
    return node;
  }

  void adopt(Expression& parent, ExpressionPtr child) const {
    measure(parent, child.get());
    parent.children.push_back(std::move(child));
  }

  void measure(Expression& parent, const Expression* child) const {
    if (child != nullptr) parent.depth = std::max(parent.depth, child->depth + 1);
    if (parent.depth > kMaxTreeDepth) fail("nested too deeply");
  }

  ExpressionPtr around(ExpressionKind kind, ExpressionPtr child) const {
    ExpressionPtr node = make(kind);
    adopt(*node, std::move(child));
    return node;
  }

  // One expression, or several with commas between: a tuple.
  ExpressionPtr parse_tuple() {
    ExpressionPtr first = parse_expression();
    if (!at_operator(",")) return first;
    ExpressionPtr list = around(ExpressionKind::kList, std::move(first));
    list->integer = 1;
    while (skip_operator(",")) {
      if (peek().kind == TokenKind::kVariableEnd || peek().kind == TokenKind::kBlockEnd || at_operator(")"))
        break;
      adopt(*list, parse_expression());
    }
    return list;
  }

  ExpressionPtr parse_expression() {
    const Nesting nesting(*this);
    ExpressionPtr value = parse_or();
    while (skip_name("if")) {
      ExpressionPtr node = around(ExpressionKind::kConditional, std::move(value));
      adopt(*node, parse_or());
      adopt(*node, skip_name("else") ? parse_expression() : make(ExpressionKind::kUndefined));
      value = std::move(node);
    }
    return value;
  }

  ExpressionPtr parse_or() {
    ExpressionPtr left = parse_and();
    if (!at_name("or")) return left;
    ExpressionPtr node = around(ExpressionKind::kOr, std::move(left));
    while (skip_name("or")) adopt(*node, parse_and());
    return node;
  }

  ExpressionPtr parse_and() {
    ExpressionPtr left = parse_not();
    if (!at_name("and")) return left;
    ExpressionPtr node = around(ExpressionKind::kAnd, std::move(left));
    while (skip_name("and")) adopt(*node, parse_not());
    return node;
  }

  ExpressionPtr parse_not() {
    const Nesting nesting(*this);
    if (skip_name("not")) return around(ExpressionKind::kNot, parse_not());
    return parse_comparison();
  }

  bool skip_comparison(Operator& op) {
    static constexpr std::pair<std::string_view, Operator> kOperators[] = {
        {"==", Operator::kEqual},     {"!=", Operator::kNotEqual}, {"<", Operator::kLess},
        {"<=", Operator::kLessEqual}, {">", Operator::kGreater},   {">=", Operator::kGreaterEqual}};
    for (const auto& [text, value] : kOperators) {
      if (skip_operator(text)) {
        op = value;
        return true;
      }
    }
    if (skip_name("in")) {
      op = Operator::kIn;
      return true;
    }
    if (at_name("not") && at_name("in", 1)) {
      next();
      next();
      op = Operator::kNotIn;
      return true;
    }
    return false;
  }

  ExpressionPtr parse_comparison() {
    ExpressionPtr left = parse_sum();
    Operator op;
    if (!skip_comparison(op)) return left;
    ExpressionPtr node = around(ExpressionKind::kComparison, std::move(left));
    do {
      node->operators.push_back(op);
      adopt(*node, parse_sum());
    } while (skip_comparison(op));
    return node;
  }

  bool skip_arithmetic(std::initializer_list<std::pair<std::string_view, Operator>> operators, Operator& op) {
    for (const auto& [text, value] : operators) {
      if (skip_operator(text)) {
        op = value;
        return true;
      }
    }
    return false;
  }

  ExpressionPtr parse_sum() {
    const auto skip = [&](Operator& op) {
      return skip_arithmetic({{"+", Operator::kAdd}, {"-", Operator::kSubtract}}, op);
    };
    ExpressionPtr left = parse_concat();
    Operator op;
    if (!skip(op)) return left;
    ExpressionPtr node = around(ExpressionKind::kArithmetic, std::move(left));
    do {
      node->operators.push_back(op);
      adopt(*node, parse_concat());
    } while (skip(op));
    return node;
  }

  ExpressionPtr parse_concat() {
    ExpressionPtr left = parse_product();
    if (!at_operator("~")) return left;
    ExpressionPtr node = around(ExpressionKind::kConcat, std::move(left));
    while (skip_operator("~")) adopt(*node, parse_product());
    return node;
  }

  ExpressionPtr parse_product() {
    const auto skip = [&](Operator& op) {
      return skip_arithmetic({{"*", Operator::kMultiply},
                              {"/", Operator::kDivide},
                              {"//", Operator::kFloorDivide},
                              {"%", Operator::kModulo}},
                             op);
    };
    ExpressionPtr left = parse_unary(true);
    if (at_operator("**"))
      throw_error<Unsupported>("chat template line {}: '**' is not supported", peek().line);
    Operator op;
    if (!skip(op)) return left;
    ExpressionPtr node = around(ExpressionKind::kArithmetic, std::move(left));
    do {
      node->operators.push_back(op);
      adopt(*node, parse_unary(true));
    } while (skip(op));
    return node;
  }

  ExpressionPtr parse_unary(bool with_filters) {
    const Nesting nesting(*this);
    ExpressionPtr node;
    if (skip_operator("-")) {
      node = around(ExpressionKind::kNegative, parse_unary(false));
    } else if (skip_operator("+")) {
      node = around(ExpressionKind::kPositive, parse_unary(false));
    } else {
      node = parse_postfix(parse_primary());
    }
    return with_filters ? parse_filters(std::move(node)) : std::move(node);
  }

  ExpressionPtr parse_primary() {
    const Token& token = peek();
    ExpressionPtr node;
    switch (token.kind) {
      case TokenKind::kName:
        return parse_name();
      case TokenKind::kString:
        node = make(ExpressionKind::kString);
        while (peek().kind == TokenKind::kString) node->text += next().text;  // neighbours are one string
        return node;
      case TokenKind::kInteger: {
        node = make(ExpressionKind::kInteger);
        const std::string& digits = token.text;
        const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), node->integer);
        if (read.ec != std::errc{}) fail(fmt::format("'{}' is too large a number", digits.substr(0, 50)));
        next();
        return node;
      }
      case TokenKind::kFloat: {
        node = make(ExpressionKind::kFloat);
        const std::string& digits = token.text;
        const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), node->number);
        if (read.ec != std::errc{})
          fail(fmt::format("'{}' is no representable number", digits.substr(0, 50)));
        next();
        return node;
      }
      default:
        break;
    }
    if (skip_operator("(")) {
      if (skip_operator(")")) {
        node = make(ExpressionKind::kList);
        node->integer = 1;
        return node;
      }
      node = parse_tuple();
      expect_operator(")");
      return node;
    }
    if (at_operator("[")) return parse_list();
    if (at_operator("{")) return parse_dict();
    fail(fmt::format("expected an expression, got {}", describe(token)));
  }

  ExpressionPtr parse_name() {
    ExpressionPtr node = make(ExpressionKind::kName);
    node->text = next().text;
    const std::string_view name = node->text;
    const bool is_true = name == "true" || name == "True";
    if (is_true || name == "false" || name == "False") {
      node->kind = ExpressionKind::kBool;
      node->integer = is_true;
    } else if (name == "none" || name == "None") {
      node->kind = ExpressionKind::kNone;
    }
    return node;
  }

  ExpressionPtr parse_list() {
    ExpressionPtr node = make(ExpressionKind::kList);
    next();
    while (!at_operator("]")) {
      if (!node->children.empty()) expect_operator(",");
      if (at_operator("]")) break;
      adopt(*node, parse_expression());
    }
    next();
    return node;
  }

  ExpressionPtr parse_dict() {
    ExpressionPtr node = make(ExpressionKind::kDict);
    next();
    while (!at_operator("}")) {
      if (!node->children.empty()) expect_operator(",");
      if (at_operator("}")) break;
      adopt(*node, parse_expression());
      expect_operator(":");
      adopt(*node, parse_expression());
    }
    next();
    return node;
  }

  ExpressionPtr parse_postfix(ExpressionPtr node) {
    for (;;) {
      if (skip_operator(".")) {
        if (peek().kind == TokenKind::kInteger) {
          node = around(ExpressionKind::kItem, std::move(node));
          adopt(*node, parse_primary());
        } else {
          node = around(ExpressionKind::kAttribute, std::move(node));
          node->text = expect_name();
        }
      } else if (at_operator("[")) {
        node = parse_subscript(std::move(node));
      } else if (at_operator("(")) {
        node = around(ExpressionKind::kCall, std::move(node));
        parse_arguments(*node);
      } else {
        return node;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr object) {
    next();
    ExpressionPtr parts[3];
    int colons = 0;
    while (!at_operator("]")) {
      if (at_operator(":")) {
        if (++colons > 2) fail("a slice has at most two colons");
        next();
      } else {
        if (parts[colons] != nullptr) fail("expected ']'");
        parts[colons] = parse_expression();
      }
    }
    next();
    if (colons == 0) {
      if (parts[0] == nullptr) fail("an empty index");
      ExpressionPtr node = around(ExpressionKind::kItem, std::move(object));
      adopt(*node, std::move(parts[0]));
      return node;
    }
    ExpressionPtr node = around(ExpressionKind::kSlice, std::move(object));
    for (ExpressionPtr& part : parts) adopt(*node, std::move(part));
    return node;
  }

  void parse_arguments(Expression& call) {
    expect_operator("(");
    bool first = true;
    while (!at_operator(")")) {
      if (!first) expect_operator(",");
      first = false;
      if (at_operator(")")) break;
      if (at_operator("*") || at_operator("**")) {
        throw_error<Unsupported>("chat template line {}: unpacked arguments are not supported", peek().line);
      }
      if (peek().kind == TokenKind::kName && at_operator("=", 1)) {
        std::string name = expect_name();
        next();
        ExpressionPtr value = parse_expression();
        measure(call, value.get());
        call.named.emplace_back(std::move(name), std::move(value));
      } else {
        if (!call.named.empty()) fail("a positional argument after a named one");
        adopt(call, parse_expression());
      }
    }
    next();
  }

  ExpressionPtr parse_filters(ExpressionPtr node) {
    for (;;) {
      if (skip_operator("|")) {
        node = around(ExpressionKind::kFilter, std::move(node));
        node->text = expect_name();
        if (at_operator("(")) parse_arguments(*node);
      } else if (skip_name("is")) {
        node = parse_test(std::move(node));
      } else if (at_operator("(")) {  // the result of a filter or test, called
        node = around(ExpressionKind::kCall, std::move(node));
        parse_arguments(*node);
      } else {
        return node;
      }
    }
  }

  ExpressionPtr parse_test(ExpressionPtr input) {
    ExpressionPtr node = around(ExpressionKind::kTest, std::move(input));
    node->negated = skip_name("not");
    node->text = expect_name();
    if (at_operator("(")) {
      parse_arguments(*node);
      return node;
    }
    const Token& token = peek();
    const bool value =
        token.kind == TokenKind::kString || token.kind == TokenKind::kInteger ||
        token.kind == TokenKind::kFloat || at_operator("[") || at_operator("{") ||
        (token.kind == TokenKind::kName && !at_name("else") && !at_name("or") && !at_name("and") &&
         !at_name("if") && !at_name("is") && !at_name("not") && !at_name("in"));
    if (value) adopt(*node, parse_postfix(parse_primary()));
    return node;
  }

  std::vector<Token> tokens_;
  size_t position_ = 0;
  int nesting_ = 0;
  int loops_ = 0;
};

}  // namespace

Block parse_template(std::string_view source) { return Parser(tokenize_template(source)).run(); }

}  // namespace kascade::jinja
