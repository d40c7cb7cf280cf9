// SPDX-License-Identifier: Apache-2.0
#include "model/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <limits>

#include "base/check.h"

namespace kascade {
namespace {

// Bodies of character classes, equal to those of the reference (Oniguruma inside PyPI tokenizers 0.23,
// Unicode 16) for every code point. White_Space is spelled out because PCRE2's \s takes in U+180E, which
// Unicode removed from it. Letters and numbers carry what Unicode 15.0 to 16.0 added to categories L and N,
// because PCRE2 10.42 knows Unicode 14; naming a code point twice does no harm with a newer PCRE2. The one
// difference left: the reference cuts out smollm's digits by Unicode 17, which has 13 numbers more (U+11DE0
// to U+11DE9, U+16FF4 to U+16FF6).
const std::string kSpace =
    R"(\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
const std::string kLetter =
    R"(\p{L}\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65})"
    R"(\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B}\x{1138E})"
    R"(\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"
    R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D})"
    R"(\x{16D40}-\x{16D6C}\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D})"
    R"(\x{1E4D0}-\x{1E4EB}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})";
const std::string kNumber =
    R"(\p{N}\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
    R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})";

std::string any_of(const std::string& body) { return "[" + body + "]"; }
std::string none_of(const std::string& body) { return "[^" + body + "]"; }

// A run of spaces leaves its last one to what follows, unless that is the end or of class `end`.
std::string spaces(const std::string& end) {
  return any_of(kSpace) + "+(?!" + none_of(kSpace + end) + ")|" + any_of(kSpace) + "+";
}

const std::string kContraction = "'(?:[sdmt]|re|ve|ll)";
const std::string kOther = none_of(kSpace + kLetter + kNumber);

std::string gpt2_pattern() {
  return kContraction + "| ?" + any_of(kLetter) + "+| ?" + any_of(kNumber) + "+| ?" + kOther + "+|" +
         spaces("");
}

// Numbers are cut out one by one first and the rest is cut as by gpt-2, each stretch between numbers as a
// text of its own: so a run of spaces before a number is one piece, as at the end of a text.
std::string smollm_pattern() {
  return any_of(kNumber) + "|" + kContraction + "| ?" + any_of(kLetter) + "+| ?" + kOther + "+|" +
         spaces(kNumber);
}

std::string llama_pattern(const std::string& digits) {
  return "(?i:" + kContraction + ")|" + none_of("\\r\\n" + kLetter + kNumber) + "?" + any_of(kLetter) + "+|" +
         any_of(kNumber) + digits + "| ?" + kOther + "+[\\r\\n]*|" + any_of(kSpace) + "*[\\r\\n]+|" +
         spaces("");
}

// The pattern of a family; empty for a name that is not known.
std::string family_pattern(const std::string& name) {
  if (name == "smollm") return smollm_pattern();
  if (name == "gpt-2") return gpt2_pattern();
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") return llama_pattern("{1,3}");
  if (name == "qwen2" || name == "deepseek-r1-qwen") return llama_pattern("");
  return {};
}

}  // namespace

struct PreTokenizer::Compiled {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  bool jit = false;

  ~Compiled() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
};

PreTokenizer::PreTokenizer(const std::string& name, const std::string& source, bool use_jit) {
  const std::string pattern = family_pattern(name);
  require<Unsupported>(
      !pattern.empty(),
      "{}: field 'tokenizer pre-tokeniser': '{}' is not supported (smollm, llama-bpe, qwen2, gpt-2 are)",
      source, name);
  auto compiled = std::make_unique<Compiled>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  compiled->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, &error, &offset, nullptr);
  require<Unsupported>(compiled->code != nullptr,
                       "{}: pre-tokeniser '{}': PCRE2 error {} at offset {} of its pattern", source, name,
                       error, offset);
  compiled->context = pcre2_match_context_create(nullptr);
  require<OutOfMemory>(compiled->context != nullptr, "{}: pre-tokeniser '{}': no memory to match", source,
                       name);
  // No pattern backtracks more than once over a run of spaces, so matching is linear and needs no limit; the
  // default limit would refuse runs of ten million spaces.
  pcre2_set_match_limit(compiled->context, std::numeric_limits<uint32_t>::max());
  pcre2_set_depth_limit(compiled->context, std::numeric_limits<uint32_t>::max());
  compiled->jit = use_jit && pcre2_jit_compile(compiled->code, PCRE2_JIT_COMPLETE) == 0;
  compiled_ = std::move(compiled);
}

PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;

struct PreTokenizer::Walk::State {
  const Compiled& compiled;
  std::string_view text;
  size_t position = 0;
  pcre2_match_data* match = nullptr;

  ~State() { pcre2_match_data_free(match); }
};

PreTokenizer::Walk::Walk(const PreTokenizer& pre_tokenizer, std::string_view text)
    : state_(new State{*pre_tokenizer.compiled_, text}) {
  state_->match = pcre2_match_data_create_from_pattern(state_->compiled.code, nullptr);
  require<OutOfMemory>(state_->match != nullptr, "pre-tokeniser: no memory to match");
}

PreTokenizer::Walk::~Walk() = default;

std::string_view PreTokenizer::Walk::next() {
  State& state = *state_;
  if (state.position == state.text.size()) return {};
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(state.text.data());
  const size_t begin = state.position;
  int matched = PCRE2_ERROR_JIT_STACKLIMIT;
  if (state.compiled.jit) {
    matched = pcre2_jit_match(state.compiled.code, subject, state.text.size(), begin, 0, state.match,
                              state.compiled.context);
  }
  if (matched ==
      PCRE2_ERROR_JIT_STACKLIMIT) {  // no JIT here, or its fixed stack was too small for this piece
    matched = pcre2_match(state.compiled.code, subject, state.text.size(), begin,
                          PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, state.match, state.compiled.context);
  }
  require<OutOfMemory>(matched > 0, "pre-tokeniser: PCRE2 error {} at byte {} of a text of {}", matched,
                       begin, state.text.size());
  state.position = pcre2_get_ovector_pointer(state.match)[1];
  return state.text.substr(begin, state.position - begin);
}

}  // namespace kascade
