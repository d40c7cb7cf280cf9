// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/unicode.h"

namespace kascade {
namespace {

struct Decomposition {
  char32_t code;
  char32_t first, second;  // second is 0 where one character stands for another
  bool composes;           // whether first and second become code again
};
struct ClassRange {
  char32_t first, last;
  uint8_t combining_class;
};
#include "model/unicode_nfc_tables.inc"

// Hangul syllables are composed by arithmetic (Unicode standard, section 3.12).
constexpr char32_t kSyllable = 0xAC00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11A7;
constexpr char32_t kLeads = 19, kVowels = 21, kTrails = 28;

struct Letter {
  char32_t code;
  uint8_t combining_class;
};

uint8_t combining_class(char32_t code) {
  const auto range = std::partition_point(std::begin(kClassRanges), std::end(kClassRanges),
                                          [code](const ClassRange& r) { return r.last < code; });
  return range != std::end(kClassRanges) && range->first <= code ? range->combining_class : 0;
}

void decompose(char32_t code, std::vector<Letter>& letters) {
  if (code >= kSyllable && code < kSyllable + kLeads * kVowels * kTrails) {
    const char32_t index = code - kSyllable;
    letters.push_back({kLead + index / (kVowels * kTrails), 0});
    letters.push_back({kVowel + index / kTrails % kVowels, 0});
    if (index % kTrails != 0) letters.push_back({kTrail + index % kTrails, 0});
    return;
  }
  const auto entry = std::partition_point(std::begin(kDecompositions), std::end(kDecompositions),
                                          [code](const Decomposition& d) { return d.code < code; });
  if (entry == std::end(kDecompositions) || entry->code != code) {
    letters.push_back({code, combining_class(code)});
    return;
  }
  decompose(entry->first, letters);  // the tables nest at most four deep
  if (entry->second != 0) decompose(entry->second, letters);
}

// The character that a pair composes to; 0 for none.
char32_t composed(char32_t first, char32_t second) {
  if (first >= kLead && first < kLead + kLeads && second >= kVowel && second < kVowel + kVowels) {
    return kSyllable + ((first - kLead) * kVowels + (second - kVowel)) * kTrails;
  }
  if (first >= kSyllable && first < kSyllable + kLeads * kVowels * kTrails &&
      (first - kSyllable) % kTrails == 0 && second > kTrail && second < kTrail + kTrails) {
    return first + (second - kTrail);
  }
  static const std::unordered_map<uint64_t, char32_t> pairs = [] {
    std::unordered_map<uint64_t, char32_t> map;
    for (const Decomposition& d : kDecompositions) {
      if (d.composes) map.emplace(uint64_t{d.first} << 32 | d.second, d.code);
    }
    return map;
  }();
  const auto found = pairs.find(uint64_t{first} << 32 | second);
  return found == pairs.end() ? 0 : found->second;
}

// Sorts each run of combining marks by class, keeping the order within a class.
void reorder(std::vector<Letter>& letters) {
  for (size_t i = 0; i < letters.size();) {
    size_t end = i + 1;
    if (letters[i].combining_class != 0) {
      while (end < letters.size() && letters[end].combining_class != 0) ++end;
      std::stable_sort(letters.begin() + i, letters.begin() + end, [](const Letter& a, const Letter& b) {
        return a.combining_class < b.combining_class;
      });
    }
    i = end;
  }
}

void compose(std::vector<Letter>& letters) {
  constexpr size_t kNone = ~size_t{0};
  size_t starter = kNone, kept = 0;
  int last_class = -1;  // of the last letter kept after the starter; -1: none was
  for (const Letter letter : letters) {
    // A mark is blocked from its starter by a kept letter of the same or a higher class.
    if (starter != kNone && last_class < static_cast<int>(letter.combining_class)) {
      if (const char32_t code = composed(letters[starter].code, letter.code); code != 0) {
        letters[starter].code = code;
        continue;
      }
    }
    if (letter.combining_class == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = letter.combining_class;
    }
    letters[kept++] = letter;
  }
  letters.resize(kept);
}

}  // namespace

std::string normalize_nfc(std::string_view text) {
  // Characters below U+0300 (lead bytes below 0xCC) compose with nothing before them and are composed
  // themselves.
  const auto composing = [](char byte) { return static_cast<unsigned char>(byte) >= 0xCC; };
  if (std::none_of(text.begin(), text.end(), composing)) return std::string(text);
  std::string normalized;
  normalized.reserve(text.size());
  std::vector<Letter> letters;
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    letters.clear();
    for (size_t i = 0; i < valid;) {
      const Utf8Char character = decode_utf8(text.substr(i));
      decompose(character.code, letters);
      i += character.bytes;
    }
    reorder(letters);
    compose(letters);
    for (const Letter& letter : letters) append_utf8(normalized, letter.code);
    text.remove_prefix(valid);
    if (!text.empty()) {  // not UTF-8: one byte, as it is
      normalized.push_back(text.front());
      text.remove_prefix(1);
    }
  }
  return normalized;
}

}  // namespace kascade
