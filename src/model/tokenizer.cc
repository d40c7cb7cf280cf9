// SPDX-License-Identifier: Apache-2.0
#include "kascade/tokenizer.h"

#include <algorithm>
#include <utility>

#include "model/tokenizer_common.h"
#include "model/unicode.h"

namespace kascade {

std::unique_ptr<const Tokenizer> Tokenizer::create(TokenizerData data) {
  return data.kind == TokenizerKind::kByteBpe ? create_bpe_tokenizer(std::move(data))
                                              : create_sentencepiece_tokenizer(std::move(data));
}

bool Tokenizer::ends_generation(int32_t id) const {
  return (data_.eos && *data_.eos == id) ||
         std::find(data_.end_ids.begin(), data_.end_ids.end(), id) != data_.end_ids.end();
}

std::string StreamDecoder::push(int32_t id) {
  const TokenizerData& data = tokenizer_.data();
  std::string_view bytes = tokenizer_.token_bytes(id);
  const bool user_defined = !data.types.empty() && data.types[id] == TokenType::kUserDefined;
  if (tokenizer_.is_control(id)) {
    if (!data.space_prefix_once) first_ = true;  // encode puts a space after it as well
    if (!show_special_) return {};
  } else {
    const bool has_prefix =
        first_ && !user_defined && data.kind == TokenizerKind::kSentencePiece && data.add_space_prefix;
    if (has_prefix && bytes.starts_with(' ')) bytes.remove_prefix(1);
    first_ = user_defined && !data.space_prefix_once;
  }
  pending_ += bytes;
  const size_t whole = pending_.size() - unfinished_utf8_tail(pending_);
  std::string text = pending_.substr(0, whole);
  pending_.erase(0, whole);
  return text;
}

std::string StreamDecoder::flush() { return std::exchange(pending_, {}); }

}  // namespace kascade
