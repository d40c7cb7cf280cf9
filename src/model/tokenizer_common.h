// SPDX-License-Identifier: Apache-2.0
// What both kinds of tokenizer share: checks, token bytes, look-ups, special tokens, decoding.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kascade/tokenizer.h"
#include "model/tokenizer_special.h"

namespace kascade {

class TokenizerCommon : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, bool parse_special) const override;
  std::vector<int32_t> encode_marked(std::string_view text, std::span<const TextRange> plain) const override;
  std::string_view token_bytes(int32_t id) const override;
  std::string decode(std::span<const int32_t> ids, bool show_special) const override;
  bool is_control(int32_t id) const override;
  std::optional<int32_t> find(std::string_view spelling) const override;

 protected:
  /// Checks what does not depend on the kind. Throws BadFile.
  explicit TokenizerCommon(TokenizerData data);

  /// Ids of text without special tokens. space_prefix: whether this is where SentencePiece puts a space in
  /// front.
  virtual void encode_text(std::string_view text, bool space_prefix, std::vector<int32_t>& ids) const = 0;

  TokenType type(int32_t id) const { return data_.types.empty() ? TokenType::kNormal : data_.types[id]; }
  /// Whether the merging of plain text may end in this token. Control tokens must not arise from what a user
  /// typed, and user-defined ones are cut out of the text before.
  bool is_text(int32_t id) const;
  /// find, for tokens that plain text may become.
  std::optional<int32_t> find_text(std::string_view spelling) const;

  /// Constructors call append_bytes once per token in order of id, then finish.
  void append_bytes(std::string_view bytes);
  void finish();

 private:
  std::vector<int32_t> encode_around_special(std::string_view text, bool parse_special,
                                             std::span<const TextRange> plain) const;

  std::unordered_map<std::string_view, int32_t> ids_;  // views of data_.tokens
  std::string bytes_;                                  // of all tokens, one after the other
  std::vector<size_t> ends_;                           // [tokens]: where each ends in bytes_
  SpecialMatcher special_;
};

std::unique_ptr<const Tokenizer> create_bpe_tokenizer(TokenizerData data);
std::unique_ptr<const Tokenizer> create_sentencepiece_tokenizer(TokenizerData data);

/// What a merge list says, checked: two parts that are tokens and whose union is one. Throws BadFile naming
/// the merge.
struct MergeRule {
  int32_t left, right, result;
};
class MergeRuleReader {
 public:
  explicit MergeRuleReader(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  MergeRule read(size_t index);

 private:
  const Tokenizer& tokenizer_;
  std::string union_;
};

}  // namespace kascade
