// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE: text is cut into pieces by a regular expression, the bytes of a piece are the first
// symbols, and pairs of symbols merge by rank. Vocabulary files spell bytes in GPT-2's alphabet: printable
// bytes as themselves, the others from U+0100 on.
#include <array>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/bpe_merge.h"
#include "model/pre_tokenizer.h"
#include "model/tokenizer_common.h"
#include "model/unicode.h"

namespace kascade {
namespace {

struct ByteAlphabet {
  std::array<char32_t, 256> letter_of{};
  std::array<int, 0x144> byte_of{};  // -1: no letter of the alphabet

  ByteAlphabet() {
    byte_of.fill(-1);
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      letter_of[byte] = printable ? byte : next++;
      byte_of[letter_of[byte]] = static_cast<int>(byte);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

// The bytes that a spelling stands for; a spelling with a character outside the alphabet stands for itself.
void bytes_of_spelling(std::string_view spelling, std::string& bytes) {
  const auto& byte_of = byte_alphabet().byte_of;
  bytes.clear();
  for (size_t i = 0; i < spelling.size();) {
    const Utf8Char letter = decode_utf8(spelling.substr(i));
    if (letter.bytes == 0 || letter.code >= byte_of.size() || byte_of[letter.code] < 0) {
      bytes = spelling;
      return;
    }
    bytes.push_back(static_cast<char>(byte_of[letter.code]));
    i += letter.bytes;
  }
}

class BpeTokenizer final : public TokenizerCommon {
 public:
  explicit BpeTokenizer(TokenizerData data)
      : TokenizerCommon(std::move(data)), pre_tokenizer_(data_.pre_tokenizer, data_.source) {
    std::string bytes;
    for (int32_t id = 0; id < size(); ++id) {
      if (is_text(id)) {
        bytes_of_spelling(data_.tokens[id], bytes);
        append_bytes(bytes);
      } else {
        append_bytes(data_.tokens[id]);
      }
    }
    finish();
    for (unsigned byte = 0; byte < 256; ++byte) {
      std::string letter;
      append_utf8(letter, byte_alphabet().letter_of[byte]);
      symbol_of_[byte] = find_text(letter).value_or(-1);
    }
    merges_.reserve(data_.merges.size());
    MergeRuleReader reader(*this);
    for (size_t i = 0; i < data_.merges.size(); ++i) {
      const MergeRule rule = reader.read(i);
      if (is_text(rule.left) && is_text(rule.right) && is_text(rule.result)) {
        merges_.insert(rule.left, rule.right, {static_cast<uint32_t>(i), rule.result});
      }
    }
    if (data_.ignore_merges) {
      for (int32_t id = 0; id < size(); ++id) {
        if (find_text(data_.tokens[id]) == id) whole_pieces_.emplace(token_bytes(id), id);
      }
    }
  }

 protected:
  void encode_text(std::string_view text, bool /*space_prefix*/, std::vector<int32_t>& ids) const override {
    Merger merger(merges_);
    std::vector<int32_t> symbols;
    while (!text.empty()) {
      const std::string_view valid = text.substr(0, valid_utf8_prefix(text));
      if (!valid.empty()) {
        PreTokenizer::Walk walk(pre_tokenizer_, valid);
        for (std::string_view piece = walk.next(); !piece.empty(); piece = walk.next()) {
          encode_piece(piece, merger, symbols, ids);
        }
      }
      text.remove_prefix(valid.size());
      if (!text.empty()) {  // not UTF-8: this byte is a piece of its own
        encode_piece(text.substr(0, 1), merger, symbols, ids);
        text.remove_prefix(1);
      }
    }
  }

 private:
  void encode_piece(std::string_view piece, Merger& merger, std::vector<int32_t>& symbols,
                    std::vector<int32_t>& ids) const {
    if (data_.ignore_merges) {
      if (const auto whole = whole_pieces_.find(piece); whole != whole_pieces_.end()) {
        ids.push_back(whole->second);
        return;
      }
    }
    symbols.clear();
    for (const char byte : piece) {
      // Some vocabularies lack bytes that their training text never held; such a byte is left out, as
      // everywhere.
      const int32_t symbol = symbol_of_[static_cast<unsigned char>(byte)];
      if (symbol >= 0) symbols.push_back(symbol);
    }
    merger.merge(symbols);
    ids.insert(ids.end(), symbols.begin(), symbols.end());
  }

  PreTokenizer pre_tokenizer_;
  std::array<int32_t, 256> symbol_of_{};  // by byte; -1: the vocabulary has no token for it
  MergeTable merges_;
  std::unordered_map<std::string_view, int32_t> whole_pieces_;  // by bytes; only with ignore_merges
};

}  // namespace

std::unique_ptr<const Tokenizer> create_bpe_tokenizer(TokenizerData data) {
  return std::make_unique<const BpeTokenizer>(std::move(data));
}

}  // namespace kascade
