// SPDX-License-Identifier: Apache-2.0
#include "engine/text_stream.h"

#include <algorithm>
#include <utility>

namespace kascade {

std::string_view TextStream::push(std::string_view text) {
  if (stopped_) return {};
  text_ += text;
  // A stop string that is complete now begins at or after released_: whatever could be its head was held
  // back.
  size_t found = std::string::npos;
  for (const std::string& stop : stops_) found = std::min(found, text_.find(stop, released_));
  if (found != std::string::npos) {
    stopped_ = true;
    text_.resize(found);
    return release(found);
  }
  size_t held = text_.size();
  const std::string_view all = text_;
  for (const std::string& stop : stops_) {
    const size_t longest = std::min(stop.size() - 1, text_.size() - released_);
    for (size_t begin = text_.size() - longest; begin < held; ++begin) {
      if (!stop.starts_with(all.substr(begin))) continue;
      held = begin;
      break;
    }
  }
  return release(held);
}

std::string_view TextStream::finish() { return release(text_.size()); }

std::string_view TextStream::release(size_t end) {
  const size_t begin = std::exchange(released_, end);
  return std::string_view(text_).substr(begin, end - begin);
}

}  // namespace kascade
