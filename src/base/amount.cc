// SPDX-License-Identifier: Apache-2.0
#include "base/amount.h"

#include <charconv>
#include <cmath>
#include <string>

#include "base/check.h"
#include "base/text.h"

namespace kascade {
namespace {

constexpr double kMaxBytes = 0x1p60;

double unit_bytes(std::string_view unit) {
  if (unit.empty() || unit == "B") return 1;
  constexpr std::string_view kPrefixes = "KMGT";
  const size_t power = kPrefixes.find(unit.front());
  if (power == std::string_view::npos) return 0;
  const std::string_view rest = unit.substr(1);
  const auto exponent = static_cast<double>(power + 1);
  return rest == "B" ? std::pow(1000.0, exponent) : rest == "iB" ? std::pow(1024.0, exponent) : 0;
}

}  // namespace

int64_t parse_count(std::string_view text, std::string_view what) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  const int64_t factor = unit.empty() ? 1 : unit == "K" ? 1 << 10 : unit == "M" ? 1 << 20 : 0;
  require<BadArgument>(error == std::errc() && factor > 0 && value >= 1 && value <= INT32_MAX / factor,
                       "{}: expected a number like 4096, 128K or 1M, got {}", what, quote_text(text));
  return value * factor;
}

uint64_t parse_bytes(std::string_view text, std::string_view what) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  const double bytes = value * unit_bytes({rest, static_cast<size_t>(end - rest)});
  require<BadArgument>(error == std::errc() && bytes >= 1 && bytes <= kMaxBytes,
                       "{}: expected a size like 80GB, 80GiB or bytes, got {}", what, quote_text(text));
  return static_cast<uint64_t>(bytes);
}

}  // namespace kascade
