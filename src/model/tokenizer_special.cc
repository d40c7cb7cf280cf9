// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_special.h"

#include <algorithm>

namespace kascade {
namespace {

bool touches(std::span<const TextRange> ranges, size_t begin, size_t end) {
  const auto after = std::partition_point(ranges.begin(), ranges.end(),
                                          [&](const TextRange& range) { return range.end <= begin; });
  return after != ranges.end() && after->begin < end;
}

}  // namespace

void SpecialMatcher::add(std::string_view spelling, int32_t id, bool always) {
  if (!spelling.empty()) spellings_.push_back({spelling, id, always});
}

void SpecialMatcher::finish() {
  // Of tokens with one spelling the first stays, but one that is found in every text before one that is not.
  std::stable_sort(spellings_.begin(), spellings_.end(), [](const Spelling& a, const Spelling& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.always && !b.always;
  });
  const auto same = [](const Spelling& a, const Spelling& b) { return a.bytes == b.bytes; };
  spellings_.erase(std::unique(spellings_.begin(), spellings_.end(), same), spellings_.end());
  for (uint32_t i = 0; i < spellings_.size(); ++i) {
    Bucket& bucket = buckets_[static_cast<unsigned char>(spellings_[i].bytes[0])];
    if (bucket.begin == bucket.end) bucket.begin = i;
    bucket.end = i + 1;
    bucket.always = bucket.always || spellings_[i].always;
  }
}

SpecialMatcher::Match SpecialMatcher::find(std::string_view text, size_t from, bool parse_special,
                                           std::span<const TextRange> plain) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    const Bucket& bucket = buckets_[static_cast<unsigned char>(text[begin])];
    if (bucket.begin == bucket.end || !(parse_special || bucket.always)) continue;
    Match longest{begin, begin, -1};
    auto low = spellings_.begin() + bucket.begin, high = spellings_.begin() + bucket.end;
    // [low, high): the spellings that agree with the text so far; the one that ends here sorts first.
    for (size_t length = 1; low != high; ++length) {
      if (low->bytes.size() == length) {
        const bool allowed = low->always || (parse_special && !touches(plain, begin, begin + length));
        if (allowed) longest = {begin, begin + length, low->id};
        ++low;
      }
      if (begin + length == text.size()) break;
      const char wanted = text[begin + length];
      const auto byte = [length](const Spelling& s) { return static_cast<unsigned char>(s.bytes[length]); };
      low = std::partition_point(
          low, high, [&](const Spelling& s) { return byte(s) < static_cast<unsigned char>(wanted); });
      high = std::partition_point(
          low, high, [&](const Spelling& s) { return byte(s) == static_cast<unsigned char>(wanted); });
    }
    if (longest.id >= 0) return longest;
  }
  return {text.size(), text.size(), -1};
}

}  // namespace kascade
