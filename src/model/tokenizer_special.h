// SPDX-License-Identifier: Apache-2.0
// Finds the spellings of special tokens (control and user-defined) inside text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kascade/tokenizer.h"

namespace kascade {

/// The spellings, sorted; they are views and must outlive the matcher.
class SpecialMatcher {
 public:
  /// A longer spelling is refused when the tokenizer is made: it bounds the work at one position of a text.
  static constexpr size_t kMaxSpellingBytes = 1024;

  /// always: found in every text (user-defined), not only where control tokens are asked for.
  void add(std::string_view spelling, int32_t id, bool always);
  /// Call once, after the last add.
  void finish();

  struct Match {
    size_t begin, end;  // equal at the end of the text: nothing found
    int32_t id;
  };
  /// The first position at or after `from` where a spelling begins, and the longest one there. Spellings of
  /// control tokens count only with parse_special, and not where they touch a range of `plain` (ascending,
  /// disjoint).
  Match find(std::string_view text, size_t from, bool parse_special, std::span<const TextRange> plain) const;

 private:
  struct Spelling {
    std::string_view bytes;
    int32_t id;
    bool always;
  };
  struct Bucket {  // spellings by first byte
    uint32_t begin = 0, end = 0;
    bool always = false;  // whether any of them is found in every text
  };

  std::vector<Spelling> spellings_;
  std::array<Bucket, 256> buckets_;
};

}  // namespace kascade
