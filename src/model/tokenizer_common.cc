// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_common.h"

#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"
#include "model/unicode.h"

namespace kascade {
namespace {

void check_id(const TokenizerData& data, const char* field, int32_t id) {
  require<BadFile>(id >= 0 && static_cast<size_t>(id) < data.tokens.size(),
                   "{}: field 'tokenizer {}': expected a token id below {}, got {}", data.source, field,
                   data.tokens.size(), id);
}

void check_data(const TokenizerData& data) {
  require<BadFile>(!data.tokens.empty(),
                   "{}: field 'tokenizer tokens': expected at least one token, got none", data.source);
  require<BadFile>(data.tokens.size() <= std::numeric_limits<int32_t>::max(),
                   "{}: field 'tokenizer tokens': expected fewer than 2^31, got {}", data.source,
                   data.tokens.size());
  require<BadFile>(data.types.empty() || data.types.size() == data.tokens.size(),
                   "{}: field 'tokenizer token types': expected {}, one per token, got {}", data.source,
                   data.tokens.size(), data.types.size());
  for (size_t i = 0; i < data.types.size(); ++i) {
    const auto value = static_cast<int>(data.types[i]);
    require<BadFile>(value >= 1 && value <= 6,
                     "{}: field 'tokenizer token types[{}]': expected 1 to 6, got {}", data.source, i, value);
  }
  if (data.bos) check_id(data, "bos id", *data.bos);
  if (data.eos) check_id(data, "eos id", *data.eos);
  if (data.unknown) check_id(data, "unknown id", *data.unknown);
  for (const int32_t id : data.end_ids) check_id(data, "end ids", id);
  require<BadFile>(!data.add_bos || data.bos.has_value(),
                   "{}: field 'tokenizer add bos': true, but the vocabulary names no bos id", data.source);
}

void check_ranges(std::string_view text, std::span<const TextRange> plain) {
  size_t last = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    require<BadArgument>(
        plain[i].begin >= last && plain[i].end >= plain[i].begin && plain[i].end <= text.size(),
        "encode_marked: range {} = [{}, {}) of a text of {} bytes: expected ascending, disjoint ranges", i,
        plain[i].begin, plain[i].end, text.size());
    last = plain[i].end;
  }
}

}  // namespace

TokenizerCommon::TokenizerCommon(TokenizerData data) : Tokenizer(std::move(data)) {
  check_data(data_);
  ids_.reserve(data_.tokens.size());
  ends_.reserve(data_.tokens.size());
  for (int32_t id = 0; id < size(); ++id) {
    // Of tokens with one spelling the first counts, but one that text may become before one that it may not.
    const auto [entry, is_new] = ids_.emplace(data_.tokens[id], id);
    if (!is_new && is_text(id) && !is_text(entry->second)) entry->second = id;
  }
}

bool TokenizerCommon::is_text(int32_t id) const {
  const TokenType kind = type(id);
  return kind == TokenType::kNormal || kind == TokenType::kByte;
}

std::optional<int32_t> TokenizerCommon::find(std::string_view spelling) const {
  const auto found = ids_.find(spelling);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<int32_t> TokenizerCommon::find_text(std::string_view spelling) const {
  const std::optional<int32_t> id = find(spelling);
  return id && is_text(*id) ? id : std::nullopt;
}

void TokenizerCommon::append_bytes(std::string_view bytes) {
  bytes_ += bytes;
  ends_.push_back(bytes_.size());
}

void TokenizerCommon::finish() {
  for (int32_t id = 0; id < size(); ++id) {
    const bool always = type(id) == TokenType::kUserDefined;
    if (!always && !is_control(id)) continue;
    const std::string_view spelling = token_bytes(id);
    require<BadFile>(spelling.size() <= SpecialMatcher::kMaxSpellingBytes,
                     "{}: field 'tokenizer tokens[{}]': expected a special token of at most {} bytes, got {}",
                     data_.source, id, SpecialMatcher::kMaxSpellingBytes, spelling.size());
    special_.add(spelling, id, always);
  }
  special_.finish();
}

std::string_view TokenizerCommon::token_bytes(int32_t id) const {
  require<BadArgument>(id >= 0 && id < size(), "token id {} is outside the vocabulary of {}", id, size());
  const size_t begin = id == 0 ? 0 : ends_[id - 1];
  return std::string_view(bytes_).substr(begin, ends_[id] - begin);
}

bool TokenizerCommon::is_control(int32_t id) const {
  require<BadArgument>(id >= 0 && id < size(), "token id {} is outside the vocabulary of {}", id, size());
  return type(id) == TokenType::kControl || type(id) == TokenType::kUnknown;
}

std::vector<int32_t> TokenizerCommon::encode(std::string_view text, bool parse_special) const {
  return encode_around_special(text, parse_special, {});
}

std::vector<int32_t> TokenizerCommon::encode_marked(std::string_view text,
                                                    std::span<const TextRange> plain) const {
  check_ranges(text, plain);
  return encode_around_special(text, true, plain);
}

std::vector<int32_t> TokenizerCommon::encode_around_special(std::string_view text, bool parse_special,
                                                            std::span<const TextRange> plain) const {
  require<BadArgument>(text.size() < std::numeric_limits<int32_t>::max() / 2,
                       "a text of {} bytes: at most {} can be encoded at once", text.size(),
                       std::numeric_limits<int32_t>::max() / 2);
  std::vector<int32_t> ids;
  bool after_special = true;
  for (size_t position = 0; position < text.size();) {
    const SpecialMatcher::Match match = special_.find(text, position, parse_special, plain);
    if (match.begin > position) {
      const std::string_view run = text.substr(position, match.begin - position);
      const bool space_prefix = data_.space_prefix_once ? position == 0 : after_special;
      if (data_.normalize_nfc) {
        encode_text(normalize_nfc(run), space_prefix, ids);
      } else {
        encode_text(run, space_prefix, ids);
      }
      after_special = false;
    }
    if (match.end > match.begin) {
      ids.push_back(match.id);
      after_special = true;
    }
    position = match.end;
  }
  return ids;
}

std::string TokenizerCommon::decode(std::span<const int32_t> ids, bool show_special) const {
  StreamDecoder decoder(*this, show_special);
  std::string text;
  for (const int32_t id : ids) text += decoder.push(id);
  text += decoder.flush();
  return text;
}

MergeRule MergeRuleReader::read(size_t index) {
  const TokenizerData& data = tokenizer_.data();
  const std::string_view merge = data.merges[index];
  const size_t space = merge.find(' ');
  require<BadFile>(space != std::string_view::npos && space > 0 && space + 1 < merge.size() &&
                       merge.find(' ', space + 1) == std::string_view::npos,
                   "{}: field 'tokenizer merges[{}]': expected two parts separated by one space, got '{}'",
                   data.source, index, merge.substr(0, 100));
  const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
  union_.assign(left).append(right);
  const auto id_of = [&](std::string_view part) {
    const std::optional<int32_t> id = tokenizer_.find(part);
    require<BadFile>(id.has_value(), "{}: field 'tokenizer merges[{}]': '{}' is not in the vocabulary",
                     data.source, index, part.substr(0, 100));
    return *id;
  };
  return {id_of(left), id_of(right), id_of(union_)};
}

}  // namespace kascade
