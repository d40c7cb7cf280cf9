// SPDX-License-Identifier: Apache-2.0
// A drawing as SVG text. All lengths are in pixels.
#pragma once

#include <string>
#include <string_view>

namespace kascade {

/// The colours that every figure shares: text, text that steps back, and the lines of a grid.
constexpr std::string_view kSvgInk = "#1f2933", kSvgMuted = "#66727f", kSvgGrid = "#e4e8ec";

class Drawing {
 public:
  /// Content may come from a file: it is made safe inside XML (valid UTF-8, no control or reserved
  /// characters) and cut at 100 characters.
  void text(double x, double y, std::string_view content, std::string_view attributes = "");
  void rect(double x, double y, double width, double height, std::string_view attributes);
  void line(double x1, double y1, double x2, double y2, std::string_view colour, double width = 1);
  /// Markup as it is.
  void raw(std::string_view markup) { out_ += markup; }
  /// The document, on white.
  std::string finish(double width, double height) const;

 private:
  std::string out_;
};

}  // namespace kascade
