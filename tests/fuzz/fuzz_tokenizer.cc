// SPDX-License-Identifier: Apache-2.0
// Tokenizer data and text from outside. Input: lines that add to a vocabulary of all bytes, an empty line,
// then the text.
//   k bpe FAMILY | k spm          kind
//   f FLAG                        ignore_merges, nfc, no_prefix, once, unless_space, no_fallback
//   t TYPE SCORE SPELLING         a token (TYPE 1 to 6)
//   m LEFT RIGHT                  a merge, as it stands
//   b ID / e ID                   bos, eos
// Whatever the bytes, create throws or gives a tokenizer that keeps its promises.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kascade/error.h"
#include "kascade/tokenizer.h"

namespace {

using kascade::Tokenizer;
using kascade::TokenizerData;
using kascade::TokenType;

void require(bool condition) {
  if (!condition) std::abort();
}

std::string_view take(std::string_view& text, char end) {
  const size_t at = text.find(end);
  const std::string_view part = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return part;
}

int number(std::string_view text) {
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void add(TokenizerData& data, std::string_view spelling, int type, float score) {
  data.tokens.emplace_back(spelling);
  data.types.push_back(static_cast<TokenType>(type));
  data.scores.push_back(score);
}

void add_bytes(TokenizerData& data) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    if (data.kind == kascade::TokenizerKind::kSentencePiece) {
      add(data, std::string("<0x") + kHex[byte / 16] + kHex[byte % 16] + ">", 6, 0);
      continue;
    }
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const unsigned letter = printable ? byte : next++;
    std::string spelling(1, static_cast<char>(letter));
    if (letter >= 0x80)
      spelling = {static_cast<char>(0xC0 | letter >> 6), static_cast<char>(0x80 | (letter & 0x3F))};
    add(data, spelling, 1, 0);
  }
  if (data.kind == kascade::TokenizerKind::kSentencePiece) add(data, "\xE2\x96\x81", 1, -1);
}

TokenizerData read(std::string_view& input) {
  TokenizerData data;
  data.source = "fuzz";
  data.pre_tokenizer = "gpt-2";
  std::string_view first = input;
  if (take(first, '\n') == "k spm") data.kind = kascade::TokenizerKind::kSentencePiece;
  add_bytes(data);
  for (std::string_view line = take(input, '\n'); !line.empty(); line = take(input, '\n')) {
    const std::string_view what = take(line, ' ');
    if (what == "k" && take(line, ' ') == "bpe") data.pre_tokenizer = line;
    if (what == "f") {
      data.ignore_merges = data.ignore_merges || line == "ignore_merges";
      data.normalize_nfc = data.normalize_nfc || line == "nfc";
      data.add_space_prefix = data.add_space_prefix && line != "no_prefix";
      data.space_prefix_once = data.space_prefix_once || line == "once";
      data.space_prefix_unless_space = data.space_prefix_unless_space || line == "unless_space";
      data.byte_fallback = data.byte_fallback && line != "no_fallback";
    }
    if (what == "t") {
      const int type = number(take(line, ' '));
      const int score = number(take(line, ' '));
      add(data, line, type, static_cast<float>(score));
    }
    if (what == "m") data.merges.emplace_back(line);
    if (what == "b") data.bos = number(line);
    if (what == "e") data.eos = number(line);
  }
  return data;
}

void check(const Tokenizer& tokenizer, std::string_view text) {
  const TokenizerData& data = tokenizer.data();
  const std::vector<int32_t> plain = tokenizer.encode(text);
  const std::vector<int32_t> special = tokenizer.encode(text, true);
  const std::vector<kascade::TextRange> everything = {{0, text.size()}};
  require(tokenizer.encode_marked(text, {}) == special);
  require(tokenizer.encode_marked(text, everything) == plain);
  for (const int32_t id : plain) require(!tokenizer.is_control(id) || (data.unknown && id == *data.unknown));
  for (const int32_t id : special) require(id >= 0 && id < tokenizer.size());

  const std::string decoded = tokenizer.decode(plain), shown = tokenizer.decode(special, true);
  kascade::StreamDecoder stream(tokenizer);
  std::string streamed;
  for (const int32_t id : plain) streamed += stream.push(id);
  require(streamed + stream.flush() == decoded);

  const bool spaces_change = data.kind == kascade::TokenizerKind::kSentencePiece &&
                             (data.space_prefix_once || data.space_prefix_unless_space ||
                              !data.byte_fallback || text.find("\xE2\x96\x81") != std::string_view::npos);
  if (spaces_change || data.normalize_nfc) return;
  require(decoded == text);
  require(shown == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  std::string_view input(reinterpret_cast<const char*>(bytes), size);
  std::unique_ptr<const Tokenizer> tokenizer;
  try {
    tokenizer = Tokenizer::create(read(input));
  } catch (const kascade::BadFile&) {
    return 0;
  } catch (const kascade::Unsupported&) {
    return 0;
  }
  check(*tokenizer, input);
  return 0;
}
