// SPDX-License-Identifier: Apache-2.0
// Text that leaves a generation: whole characters only, and nothing of a stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kascade {

/// Holds back what may still become a stop string. Stops are not empty.
class TextStream {
 public:
  explicit TextStream(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  /// Appends text. Returns what is now surely before any stop string; valid until the next call.
  std::string_view push(std::string_view text);
  /// No more text comes: what was held back, unless a stop string was found.
  std::string_view finish();

  bool stopped() const { return stopped_; }
  /// Everything up to the stop string, or all of it.
  const std::string& text() const { return text_; }

 private:
  std::string_view release(size_t end);

  std::vector<std::string> stops_;
  std::string text_;
  size_t released_ = 0;  // text_[0, released) was returned
  bool stopped_ = false;
};

}  // namespace kascade
