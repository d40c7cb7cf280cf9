// SPDX-License-Identifier: Apache-2.0
// SentencePiece-type vocabularies: spaces become U+2581, characters are the first symbols, and pairs merge
// over the whole text, either by the score of their union (vocabularies from GGUF) or by a list of merges
// (tokenizer.json). Characters outside the vocabulary become byte tokens <0xXX> or the unknown token.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/bpe_merge.h"
#include "model/tokenizer_common.h"
#include "model/unicode.h"

namespace kascade {
namespace {

constexpr char32_t kSpaceCode = 0x2581;
constexpr std::string_view kSpaceSpelling = "\xE2\x96\x81";

// With scores, every cut of a token into two is tried; this bounds their number. SentencePiece's own limit is
// 16 characters.
constexpr size_t kMaxTokenBytes = 1024;

// Symbols below zero are what the vocabulary does not know: characters, then bytes that are not UTF-8.
constexpr int32_t kFirstInvalidByte = 0x110000;
int32_t unknown_symbol(int32_t code_or_byte) { return -1 - code_or_byte; }

// The byte that a spelling <0xXX> stands for; -1 for any other spelling.
int byte_of_spelling(std::string_view spelling) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return -1;
  const size_t high = kDigits.find(spelling[3]), low = kDigits.find(spelling[4]);
  if (high == std::string_view::npos || low == std::string_view::npos) return -1;
  return static_cast<int>(high * 16 + low);
}

// A spelling with its U+2581 turned back into spaces.
std::string with_spaces(std::string_view spelling) {
  std::string text;
  while (!spelling.empty()) {
    const bool space = spelling.starts_with(kSpaceSpelling);
    text.push_back(space ? ' ' : spelling.front());
    spelling.remove_prefix(space ? kSpaceSpelling.size() : 1);
  }
  return text;
}

class SentencePieceTokenizer final : public TokenizerCommon {
 public:
  explicit SentencePieceTokenizer(TokenizerData data) : TokenizerCommon(std::move(data)) {
    read_tokens();
    finish();
    check_fallback();
    if (data_.merges.empty()) {
      read_scores();
    } else {
      read_merges();
    }
  }

 protected:
  void encode_text(std::string_view text, bool space_prefix, std::vector<int32_t>& ids) const override {
    std::vector<int32_t> symbols;
    symbols.reserve(text.size() + 1);
    const bool has_space = text.starts_with(' ') || text.starts_with(kSpaceSpelling);
    if (space_prefix && data_.add_space_prefix && !(has_space && data_.space_prefix_unless_space)) {
      symbols.push_back(symbol_of(kSpaceCode));
    }
    for (size_t i = 0; i < text.size();) {
      const Utf8Char character = decode_utf8(text.substr(i));
      if (character.bytes == 0) {
        symbols.push_back(unknown_symbol(kFirstInvalidByte + static_cast<unsigned char>(text[i])));
        ++i;
      } else {
        symbols.push_back(symbol_of(character.code == ' ' ? kSpaceCode : character.code));
        i += character.bytes;
      }
    }
    Merger merger(merges_);
    std::vector<int32_t> piece;
    bool after_unknown = false;
    for (size_t i = 0; i < symbols.size(); ++i) {
      piece.push_back(symbols[i]);
      // Nothing merges across two characters that stand side by side in no token: what lies between such cuts
      // merges alone, several times faster than the whole text at once.
      if (i + 1 < symbols.size() && neighbours_.find(symbols[i], symbols[i + 1]) != nullptr) continue;
      merger.merge(piece);
      for (const int32_t symbol : piece) after_unknown = append_symbol(symbol, after_unknown, ids);
      piece.clear();
    }
  }

 private:
  bool is_byte(int32_t id) const {
    return type(id) == TokenType::kByte ||
           (data_.byte_fallback && type(id) == TokenType::kNormal && byte_of_spelling(data_.tokens[id]) >= 0);
  }

  // A token that merging can make: text, and not a byte token (nobody means <0x41> when typing it).
  std::optional<int32_t> find_mergeable(std::string_view spelling) const {
    const std::optional<int32_t> id = find_text(spelling);
    return id && !is_byte(*id) ? id : std::nullopt;
  }

  void read_tokens() {
    byte_ids_.fill(-1);
    std::string bytes;
    std::vector<std::pair<int32_t, int32_t>> neighbours;
    for (int32_t id = 0; id < size(); ++id) {
      const std::string& spelling = data_.tokens[id];
      bytes = spelling;
      if (is_byte(id)) {
        const int byte = byte_of_spelling(spelling);
        require<BadFile>(byte >= 0,
                         "{}: field 'tokenizer tokens[{}]': expected a byte token <0x00> to <0xFF>, got '{}'",
                         data_.source, id, spelling.substr(0, 100));
        if (byte_ids_[byte] < 0) byte_ids_[byte] = id;
        bytes.assign(1, static_cast<char>(byte));
      } else if (!is_control(id)) {
        bytes = with_spaces(spelling);
        if (is_text(id)) read_characters(spelling, neighbours);
      }
      append_bytes(bytes);
    }
    neighbours_.reserve(neighbours.size());
    for (const auto& [left, right] : neighbours) neighbours_.insert(left, right, {});
  }

  // Gives each character of a token a symbol: its own token's id, or a number above all ids where it is no
  // token by itself.
  void read_characters(std::string_view spelling, std::vector<std::pair<int32_t, int32_t>>& neighbours) {
    int32_t previous = -1;
    for (size_t i = 0; i < spelling.size();) {
      const Utf8Char character = decode_utf8(spelling.substr(i));
      if (character.bytes == 0) return;  // such a token cannot arise from characters
      const std::string_view alone = spelling.substr(i, character.bytes);
      if (!symbols_.contains(character.code)) {
        const int32_t above = size() + static_cast<int32_t>(loose_characters_.size());
        const std::optional<int32_t> id = find_mergeable(alone);
        if (!id) loose_characters_.push_back(character.code);
        symbols_.emplace(character.code, id.value_or(above));
      }
      const int32_t symbol = symbols_.at(character.code);
      if (previous >= 0) neighbours.emplace_back(previous, symbol);
      previous = symbol;
      i += character.bytes;
    }
  }

  void check_fallback() const {
    if (data_.unknown) return;
    require<BadFile>(data_.byte_fallback,
                     "{}: field 'tokenizer unknown id': expected one, as there is no byte fallback",
                     data_.source);
    for (size_t byte = 0; byte < byte_ids_.size(); ++byte) {
      require<BadFile>(byte_ids_[byte] >= 0,
                       "{}: field 'tokenizer tokens': expected <0x{:02X}> or an unknown token, got neither",
                       data_.source, byte);
    }
  }

  void read_merges() {
    merges_.reserve(data_.merges.size());
    MergeRuleReader reader(*this);
    for (size_t i = 0; i < data_.merges.size(); ++i) {
      const MergeRule rule = reader.read(i);
      if (!is_text(rule.left) || !is_text(rule.right) || !is_text(rule.result) || is_byte(rule.result))
        continue;
      merges_.insert(rule.left, rule.right, {static_cast<uint32_t>(i), rule.result});
    }
  }

  void read_scores() {
    require<BadFile>(data_.scores.size() == data_.tokens.size(),
                     "{}: field 'tokenizer scores': expected {}, one per token, got {}", data_.source, size(),
                     data_.scores.size());
    for (size_t id = 0; id < data_.scores.size(); ++id) {
      require<BadFile>(std::isfinite(data_.scores[id]),
                       "{}: field 'tokenizer scores[{}]': expected a number, got {}", data_.source, id,
                       data_.scores[id]);
    }
    std::vector<int32_t> by_score(data_.tokens.size());
    std::iota(by_score.begin(), by_score.end(), 0);
    std::stable_sort(by_score.begin(), by_score.end(),
                     [&](int32_t a, int32_t b) { return data_.scores[a] > data_.scores[b]; });

    struct Cut {
      int32_t left, right;
      MergeTable::Merge merge;
    };
    std::vector<Cut> cuts;
    uint32_t rank = 0;
    for (size_t i = 0; i < by_score.size(); ++i) {
      const int32_t id = by_score[i];
      // Equal scores share a rank: among them the leftmost pair of the text merges first.
      if (i > 0 && data_.scores[id] != data_.scores[by_score[i - 1]]) ++rank;
      const std::string_view spelling = data_.tokens[id];
      if (find_mergeable(spelling) != id || valid_utf8_prefix(spelling) != spelling.size()) continue;
      require<BadFile>(spelling.size() <= kMaxTokenBytes,
                       "{}: field 'tokenizer tokens[{}]': expected at most {} bytes, got {}", data_.source,
                       id, kMaxTokenBytes, spelling.size());
      for (size_t at = decode_utf8(spelling).bytes; at < spelling.size();
           at += decode_utf8(spelling.substr(at)).bytes) {
        const std::optional<int32_t> left = part_symbol(spelling.substr(0, at));
        if (!left) continue;
        const std::optional<int32_t> right = part_symbol(spelling.substr(at));
        if (right) cuts.push_back({*left, *right, {rank, id}});
      }
    }
    merges_.reserve(cuts.size());
    for (const Cut& cut : cuts) merges_.insert(cut.left, cut.right, cut.merge);
  }

  // The symbol that a part of a token is while merging: a character or a token.
  std::optional<int32_t> part_symbol(std::string_view part) const {
    const Utf8Char first = decode_utf8(part);
    return first.bytes == part.size() ? symbol_of(first.code) : find_mergeable(part);
  }

  int32_t symbol_of(char32_t code) const {
    const auto found = symbols_.find(code);
    return found == symbols_.end() ? unknown_symbol(static_cast<int32_t>(code)) : found->second;
  }

  // Whether it became the unknown token; a run of unknown characters is one such token.
  bool append_symbol(int32_t symbol, bool after_unknown, std::vector<int32_t>& ids) const {
    if (symbol >= 0 && symbol < size()) {
      ids.push_back(symbol);
      return false;
    }
    std::string bytes;
    const int32_t code = symbol >= 0 ? static_cast<int32_t>(loose_characters_[symbol - size()]) : -1 - symbol;
    if (code >= kFirstInvalidByte) {
      bytes.push_back(static_cast<char>(code - kFirstInvalidByte));
    } else {
      append_utf8(bytes, static_cast<char32_t>(code));
    }
    const auto id_of = [&](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
    const bool as_bytes = data_.byte_fallback && std::all_of(bytes.begin(), bytes.end(),
                                                             [&](char byte) { return id_of(byte) >= 0; });
    if (as_bytes) {
      for (const char byte : bytes) ids.push_back(id_of(byte));
    } else if (!after_unknown) {
      ids.push_back(*data_.unknown);
    }
    return !as_bytes;
  }

  std::array<int32_t, 256> byte_ids_{};            // -1: no token <0xXX>
  std::unordered_map<char32_t, int32_t> symbols_;  // of every character of the vocabulary
  std::vector<char32_t>
      loose_characters_;  // that are no token by themselves: symbols size(), size() + 1, ...
  MergeTable
      neighbours_;  // pairs of characters that stand side by side in some token; their merges mean nothing
  MergeTable merges_;
};

}  // namespace

std::unique_ptr<const Tokenizer> create_sentencepiece_tokenizer(TokenizerData data) {
  return std::make_unique<const SentencePieceTokenizer>(std::move(data));
}

}  // namespace kascade
