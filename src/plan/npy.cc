// SPDX-License-Identifier: Apache-2.0
#include "plan/npy.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "base/text.h"
#include "kascade/plan.h"
#include "plan/plan_fault.h"

namespace kascade {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxDimensions = 32;  // NumPy's own limit
constexpr uint64_t kMaxElementBytes = 16;

// The header is a Python dictionary literal: {'descr': '<i4', 'fortran_order': False, 'shape': (32, 8), }
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  NpyArray parse() {
    NpyArray array;
    bool has_descr = false, has_order = false, has_shape = false;
    expect('{', "header");
    while (!take('}')) {
      const std::string_view key = string("header key");
      expect(':', "header");
      if (key == "descr") {
        once(key, has_descr);
        array.descr = string(key);
      } else if (key == "fortran_order") {
        once(key, has_order);
        refuse_fortran_order();
      } else if (key == "shape") {
        once(key, has_shape);
        array.shape = shape();
      } else {
        wrong("header", "the keys descr, fortran_order and shape", quote_text(key));
      }
      if (take(',')) continue;
      expect('}', "header");
      break;
    }
    skip_space();
    if (!text_.empty()) wrong("header", "nothing after '}'", quote_text(text_));
    if (!has_descr) wrong("descr", "a type string", "nothing");
    if (!has_order) wrong("fortran_order", "True or False", "nothing");
    if (!has_shape) wrong("shape", "a tuple", "nothing");
    return array;
  }

  [[noreturn]] void wrong(std::string_view field, std::string_view expected, std::string_view got) const {
    throw_error<BadFile>("{}: npy field '{}': expected {}, got {}", source_, field, expected, got);
  }

 private:
  void once(std::string_view key, bool& seen) const {
    if (seen) wrong(key, "one entry", "two");
    seen = true;
  }

  void skip_space() {
    const size_t begin = text_.find_first_not_of(" \t\r\n");
    text_.remove_prefix(std::min(begin, text_.size()));
  }

  bool take(char c) {
    skip_space();
    if (text_.empty() || text_[0] != c) return false;
    text_.remove_prefix(1);
    return true;
  }

  bool take_word(std::string_view word) {
    skip_space();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  void expect(char c, std::string_view field) {
    if (!take(c)) wrong(field, fmt::format("'{}'", c), quote_text(text_, 20));
  }

  std::string_view string(std::string_view field) {
    skip_space();
    const char quote = text_.empty() ? '\0' : text_[0];
    if (quote != '\'' && quote != '"') wrong(field, "a string", quote_text(text_, 20));
    const size_t end = text_.find(quote, 1);
    if (end == std::string_view::npos) wrong(field, "a closing quote", quote_text(text_, 20));
    const std::string_view value = text_.substr(1, end - 1);
    if (value.find('\\') != std::string_view::npos) wrong(field, "no escapes", quote_text(value, 20));
    text_.remove_prefix(end + 1);
    return value;
  }

  void refuse_fortran_order() {
    if (take_word("False")) return;
    if (take_word("True")) wrong("fortran_order", "False (C order)", "True");
    wrong("fortran_order", "True or False", quote_text(text_, 20));
  }

  std::vector<uint64_t> shape() {
    std::vector<uint64_t> out;
    expect('(', "shape");
    while (!take(')')) {
      skip_space();
      uint64_t extent = 0;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), extent);
      if (error != std::errc()) wrong("shape", "extents below 2^64", quote_text(text_, 24));
      text_.remove_prefix(static_cast<size_t>(end - text_.data()));
      if (out.size() == kMaxDimensions) wrong("shape", "at most 32 dimensions", "more");
      out.push_back(extent);
      take_word("L");  // Python 2 wrote long integers so
      if (take(',')) continue;
      expect(')', "shape");
      break;
    }
    return out;
  }

  std::string_view text_;
  const std::string& source_;
};

uint64_t little_endian(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i > 0; --i) value = value << 8 | static_cast<uint64_t>(bytes[i - 1]);
  return value;
}

// "<i4": byte order, kind, bytes per element.
uint64_t element_bytes(const std::string& descr, const HeaderParser& header) {
  constexpr std::string_view kOrders = "<>|=", kKinds = "biufc";
  uint64_t bytes = 0;
  bool valid = descr.size() >= 3 && kOrders.find(descr[0]) != std::string_view::npos &&
               kKinds.find(descr[1]) != std::string_view::npos;
  if (valid) {
    const char* const end = descr.data() + descr.size();
    const auto result = std::from_chars(descr.data() + 2, end, bytes);
    valid = result.ec == std::errc() && result.ptr == end && std::has_single_bit(bytes) &&
            bytes <= kMaxElementBytes;
  }
  if (!valid) header.wrong("descr", "a plain number type such as '<i4'", quote_text(descr));
  return bytes;
}

}  // namespace

NpyArray parse_npy(std::span<const std::byte> file, const std::string& source) {
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
  require<BadFile>(text.starts_with(kMagic), "{}: npy field 'magic': expected \\x93NUMPY, got {}", source,
                   quote_text(text.substr(0, kMagic.size())));
  require<BadFile>(file.size() >= 8, "{}: npy field 'version': expected two bytes, got {}", source,
                   file.size() - 6);
  const int major = static_cast<int>(file[6]), minor = static_cast<int>(file[7]);
  require<BadFile>(major >= 1 && major <= 3 && minor == 0,
                   "{}: npy field 'version': expected 1.0, 2.0 or 3.0, got {}.{}", source, major, minor);
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t header_begin = 8 + length_bytes;
  require<BadFile>(file.size() >= header_begin, "{}: npy field 'header length': expected {} bytes, got {}",
                   source, length_bytes, file.size() - 8);
  const uint64_t header_bytes = little_endian(file.subspan(8, length_bytes));
  require<BadFile>(header_bytes <= file.size() - header_begin,
                   "{}: npy field 'header length': expected at most {} (the file's end), got {}", source,
                   file.size() - header_begin, header_bytes);

  HeaderParser header(text.substr(header_begin, header_bytes), source);
  NpyArray array = header.parse();
  const uint64_t item_bytes = element_bytes(array.descr, header);
  array.data = file.subspan(header_begin + header_bytes);
  uint64_t bytes = item_bytes;
  array.elements = 1;
  bool fits = true;
  for (const uint64_t extent : array.shape) {
    fits = fits && checked_mul(bytes, extent, &bytes);
    array.elements *= extent;  // no larger than bytes
  }
  require<BadFile>(fits, "{}: npy field 'shape': ({}) overflows", source, fmt::join(array.shape, ", "));
  require<BadFile>(bytes == array.data.size(), "{}: npy data: expected {} bytes (shape ({}) of {}), got {}",
                   source, bytes, fmt::join(array.shape, ", "), array.descr, array.data.size());
  return array;
}

Plan plan_from_npy(std::span<const std::byte> file, const std::vector<int>& anchors,
                   const std::string& source) {
  const NpyArray array = parse_npy(file, source);
  const bool wide = array.descr == "<i8";
  require<BadFile>(wide || array.descr == "<i4",
                   "{}: npy field 'descr': expected '<i4' or '<i8' (a head map), got {}", source,
                   quote_text(array.descr));
  require<BadFile>(array.shape.size() == 2 && array.shape[0] >= 1 && array.shape[0] <= kMaxPlanLayers &&
                       array.shape[1] >= 1 && array.shape[1] <= kMaxPlanHeads,
                   "{}: npy field 'shape': expected (layers 1..{}, kv_heads 1..{}), got ({})", source,
                   kMaxPlanLayers, kMaxPlanHeads, fmt::join(array.shape, ", "));

  Plan plan;
  plan.model.layers = static_cast<int>(array.shape[0]);
  plan.model.kv_heads = static_cast<int>(array.shape[1]);
  plan.anchors = anchors;
  plan.settings.method = "imported";
  const size_t item_bytes = wide ? 8 : 4;
  size_t at = 0;
  for (int layer = 0; layer < plan.model.layers; ++layer) {
    std::vector<int>& row = plan.head_map.emplace_back();
    for (int head = 0; head < plan.model.kv_heads; ++head, at += item_bytes) {
      const uint64_t bits = little_endian(array.data.subspan(at, item_bytes));
      const int64_t value =
          wide ? static_cast<int64_t>(bits) : static_cast<int64_t>(static_cast<int32_t>(bits));
      require<BadFile>(value >= 0 && value < plan.model.kv_heads,
                       "{}: entry [{}][{}]: expected a KV head in 0..{}, got {}", source, layer, head,
                       plan.model.kv_heads - 1, value);
      row.push_back(static_cast<int>(value));
    }
  }
  if (const auto fault = plan_fault(plan)) throw_error<BadFile>("{}: {}", source, *fault);
  return plan;
}

std::vector<int> anchors_from_name(const std::string& path) {
  constexpr std::string_view kMarker = "layers_", kSuffix = ".npy";
  std::string_view name(path);
  name.remove_prefix(std::min(name.rfind('/') + 1, name.size()));  // npos + 1 = 0
  if (name.ends_with(kSuffix)) name.remove_suffix(kSuffix.size());
  const size_t marker = name.rfind(kMarker);
  std::vector<int> anchors;
  bool valid = marker != std::string_view::npos && (marker == 0 || name[marker - 1] == '_');
  for (size_t at = marker + kMarker.size(); valid;) {
    int layer = 0;
    const char* const end = name.data() + name.size();
    const auto result = std::from_chars(name.data() + at, end, layer);
    valid = result.ec == std::errc() && layer >= 0;
    anchors.push_back(layer);
    if (!valid || result.ptr == end) break;
    valid = *result.ptr == '_';
    at = static_cast<size_t>(result.ptr - name.data()) + 1;
  }
  require<BadArgument>(
      valid, "{}: expected anchors in the name, as in MODEL_layers_0_2_8.npy; give --anchors", path);
  return anchors;
}

}  // namespace kascade
