// SPDX-License-Identifier: Apache-2.0
#include "model/jinja_lexer.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "model/unicode.h"

namespace kascade::jinja {
namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_name_part(char c) { return is_name_start(c) || is_digit(c); }

// Line ends become LF, and one at the very end goes.
std::string normalize_lines(std::string_view source) {
  std::string text;
  text.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text.push_back(source[i]);
    } else if (i + 1 == source.size() || source[i + 1] != '\n') {
      text.push_back('\n');
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(normalize_lines(source)) {}

  std::vector<Token> run() {
    while (position_ < text_.size()) lex_text();
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw_error<BadFile>("chat template line {}: {}", line_, what);
  }

  std::string_view rest() const { return std::string_view(text_).substr(position_); }
  bool at(std::string_view expected) const { return rest().starts_with(expected); }

  void advance(size_t bytes) {
    line_ += static_cast<int>(std::count(text_.begin() + position_, text_.begin() + position_ + bytes, '\n'));
    position_ += bytes;
  }
  void skip_spaces() {
    size_t end = position_;
    while (end < text_.size() && is_space(text_[end])) ++end;
    advance(end - position_);
  }

  void add(TokenKind kind, std::string_view text) { tokens_.push_back({kind, std::string(text), line_}); }

  void add_text(std::string_view text) {
    if (!text.empty()) add(TokenKind::kText, text);
  }

  // Text up to the next tag, then the tag.
  void lex_text() {
    size_t begin = position_;
    while (begin < text_.size() &&
           (text_[begin] != '{' || begin + 1 == text_.size() ||
            (text_[begin + 1] != '{' && text_[begin + 1] != '%' && text_[begin + 1] != '#'))) {
      ++begin;
    }
    std::string_view text = rest().substr(0, begin - position_);
    if (begin == text_.size()) {
      add_text(text);
      advance(text.size());
      return;
    }
    const char kind = text_[begin + 1];
    const char sign = begin + 2 < text_.size() ? text_[begin + 2] : '\0';
    add_text(strip_before(text, kind, sign));
    advance(text.size() + 2 + (sign == '-' || sign == '+' ? 1 : 0));
    if (kind == '#') {
      lex_comment();
    } else if (kind == '{') {
      lex_tag(TokenKind::kVariableBegin, TokenKind::kVariableEnd, "}}");
    } else if (!lex_raw()) {
      lex_tag(TokenKind::kBlockBegin, TokenKind::kBlockEnd, "%}");
    }
  }

  // What is left of the text in front of a tag: "-" strips all white space, otherwise white space that begins
  // the tag's line goes, unless the tag is an output or has "+".
  std::string_view strip_before(std::string_view text, char kind, char sign) const {
    if (sign == '-') {
      while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    } else if (sign != '+' && kind != '{') {
      const size_t newline = text.rfind('\n');
      const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
      const bool whole_line = line_begin > 0 || at_line_start_;
      if (whole_line && std::all_of(text.begin() + line_begin, text.end(), is_space))
        text = text.substr(0, line_begin);
    }
    return text;
  }

  // Passes the end of a tag if it stands here: "-" strips the white space behind, else a block takes its
  // newline along.
  bool end_tag(std::string_view end, bool trims_newline) {
    const size_t sign = at("-") || (at("+") && trims_newline) ? 1 : 0;
    if (!rest().substr(sign).starts_with(end)) return false;
    const bool minus = sign == 1 && text_[position_] == '-', plus = sign == 1 && !minus;
    advance(sign + end.size());
    at_line_start_ = false;
    const size_t before = position_;
    if (minus) {
      skip_spaces();
    } else if (trims_newline && !plus && at("\n")) {
      advance(1);
    }
    at_line_start_ = position_ > before && text_[position_ - 1] == '\n';
    return true;
  }

  void lex_comment() {
    while (position_ < text_.size()) {
      if (end_tag("#}", true)) return;
      advance(1);
    }
    fail("a comment is not closed");
  }

  // {% raw %} text {% endraw %}; whether it stood here.
  bool lex_raw() {
    const auto [saved_position, saved_line] = std::pair(position_, line_);
    skip_spaces();
    if (at("raw") && !is_name_part(rest().size() > 3 ? rest()[3] : ' ')) {
      advance(3);
      skip_spaces();
      if (end_tag("%}", false)) {
        const size_t begin = position_;
        for (size_t tag = text_.find("{%", begin); tag != std::string::npos;
             tag = text_.find("{%", tag + 2)) {
          const char sign = tag + 2 < text_.size() ? text_[tag + 2] : '\0';
          advance(tag + 2 + (sign == '-' || sign == '+' ? 1 : 0) - position_);
          skip_spaces();
          if (!at("endraw")) continue;
          advance(6);
          skip_spaces();
          if (!end_tag("%}", true)) fail("expected the end of endraw");
          add_text(strip_before(std::string_view(text_).substr(begin, tag - begin), '%', sign));
          return true;
        }
        fail("raw is not closed");
      }
    }
    position_ = saved_position;
    line_ = saved_line;
    return false;
  }

  void lex_tag(TokenKind begin, TokenKind end, std::string_view end_text) {
    add(begin, "");
    std::string open;  // brackets that are not closed: inside them }} ends dicts, not the tag
    for (;;) {
      skip_spaces();
      if (position_ == text_.size()) fail("a tag is not closed");
      if (open.empty()) {
        const int line = line_;
        if (end_tag(end_text, end == TokenKind::kBlockEnd)) {
          tokens_.push_back({end, "", line});
          return;
        }
      }
      const char c = text_[position_];
      if (is_name_start(c)) {
        size_t size = 1;
        while (size < rest().size() && is_name_part(rest()[size])) ++size;
        add(TokenKind::kName, rest().substr(0, size));
        advance(size);
      } else if (is_digit(c)) {
        lex_number();
      } else if (c == '\'' || c == '"') {
        lex_string(c);
      } else {
        lex_operator(open);
      }
    }
  }

  void lex_number() {
    std::string digits;
    bool is_float = false;
    size_t size = 0;
    const std::string_view text = rest();
    const auto digit_at = [&](size_t i) { return i < text.size() && is_digit(text[i]); };
    const auto take_digits = [&] {
      while (digit_at(size) || (size < text.size() && text[size] == '_' && digit_at(size + 1))) {
        if (text[size] != '_') digits.push_back(text[size]);
        ++size;
      }
    };
    take_digits();
    const bool after_dot = position_ > 0 && text_[position_ - 1] == '.';  // x.0.1 is two indices
    if (!after_dot && size < text.size() && text[size] == '.' && digit_at(size + 1)) {
      is_float = true;
      digits.push_back(text[size++]);
      take_digits();
    }
    if (size < text.size() && (text[size] == 'e' || text[size] == 'E')) {
      const size_t sign = size + 1 < text.size() && (text[size + 1] == '+' || text[size + 1] == '-') ? 1 : 0;
      if (digit_at(size + 1 + sign)) {
        is_float = true;
        digits.append(text.substr(size, 1 + sign));
        size += 1 + sign;
        take_digits();
      }
    }
    if (size < text.size() && is_name_part(text[size])) fail("a number runs into a name");
    add(is_float ? TokenKind::kFloat : TokenKind::kInteger, digits);
    advance(size);
  }

  void lex_operator(std::string& open) {
    static constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                      "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                      ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (const std::string_view op : kOperators) {
      if (!at(op)) continue;
      const char c = op[0];
      if (c == '(' || c == '[' || c == '{') open.push_back(c);
      if (c == ')' || c == ']' || c == '}') {
        const char wanted = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || open.back() != wanted) fail(fmt::format("'{}' closes nothing", c));
        open.pop_back();
      }
      add(TokenKind::kOperator, op);
      advance(op.size());
      return;
    }
    fail("a character that belongs to no token");
  }

  void lex_string(char quote) {
    size_t end = 1;
    const std::string_view text = rest();
    while (end < text.size() && text[end] != quote) end += text[end] == '\\' ? 2 : 1;
    if (end >= text.size()) fail("a string is not closed");
    add(TokenKind::kString, unescape(text.substr(1, end - 1)));
    advance(end + 1);
  }

  // Python's escapes.
  std::string unescape(std::string_view text) const {
    std::string result;
    for (size_t i = 0; i < text.size();) {
      if (text[i] != '\\') {
        result.push_back(text[i++]);
        continue;
      }
      const char c = text[i + 1];  // the lexer saw to it that something follows
      i += 2;
      static constexpr std::string_view kLetters = "\\'\"abfnrtv", kMeanings = "\\'\"\a\b\f\n\r\t\v";
      if (const size_t letter = kLetters.find(c); letter != std::string_view::npos) {
        result.push_back(kMeanings[letter]);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        append_code(result, text.substr(i, digits), digits, 16);
        i += digits;
      } else if (c >= '0' && c <= '7') {
        size_t digits = 1;
        while (digits < 3 && i - 1 + digits < text.size() && text[i - 1 + digits] >= '0' &&
               text[i - 1 + digits] <= '7') {
          ++digits;
        }
        append_code(result, text.substr(i - 1, digits), digits, 8);
        i += digits - 1;
      } else if (c == 'N') {
        throw_error<Unsupported>("chat template line {}: escape \\N is not supported", line_);
      } else if (c !=
                 '\n') {  // a backslash at the end of a line joins it to the next; elsewhere it is itself
        result.push_back('\\');
        result.push_back(c);
      }
    }
    return result;
  }

  void append_code(std::string& result, std::string_view digits, size_t expected, uint32_t base) const {
    uint32_t code = 0;
    for (const char c : digits) {
      const uint32_t digit = is_digit(c)            ? static_cast<uint32_t>(c - '0')
                             : c >= 'a' && c <= 'f' ? static_cast<uint32_t>(c - 'a' + 10)
                             : c >= 'A' && c <= 'F' ? static_cast<uint32_t>(c - 'A' + 10)
                                                    : base;
      if (digit >= base || code > 0x10FFFF) fail("a malformed escape in a string");
      code = code * base + digit;
    }
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    if (digits.size() != expected || code > 0x10FFFF || surrogate) fail("a malformed escape in a string");
    append_utf8(result, code);
  }

  std::string text_;
  size_t position_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;  // whether what was lexed last ended a line
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize_template(std::string_view source) { return Lexer(source).run(); }

}  // namespace kascade::jinja
