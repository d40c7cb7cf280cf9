// SPDX-License-Identifier: Apache-2.0
#include "base/svg.h"

#include <fmt/format.h>

#include "base/json.h"

namespace kascade {
namespace {

constexpr size_t kMaxTextChars = 100;

std::string escaped(std::string_view raw) {
  const std::string text = parse_json(dump_json(std::string(raw)), "text").get<std::string>();
  std::string out;
  size_t chars = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if ((c & 0xC0) != 0x80 && ++chars > kMaxTextChars) return out + "...";
    const std::string_view rest = std::string_view(text).substr(i, 3);
    if (rest == "\xEF\xBF\xBE" || rest == "\xEF\xBF\xBF") {  // U+FFFE and U+FFFF are not XML characters
      out += '?';
      i += 2;
    } else if (c < 0x20 || c == 0x7F) {
      out += ' ';
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += static_cast<char>(c);
    }
  }
  return out;
}

}  // namespace

void Drawing::text(double x, double y, std::string_view content, std::string_view attributes) {
  out_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, escaped(content));
}

void Drawing::rect(double x, double y, double width, double height, std::string_view attributes) {
  out_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" {}/>\n", x, y,
                      width, height, attributes);
}

void Drawing::line(double x1, double y1, double x2, double y2, std::string_view colour, double width) {
  out_ += fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-width=\"{}\"/>\n",
      x1, y1, x2, y2, colour, width);
}

std::string Drawing::finish(double width, double height) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"{2}\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{3}</svg>\n",
      width, height, kSvgInk, out_);
}

}  // namespace kascade
