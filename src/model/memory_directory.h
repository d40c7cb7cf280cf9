// SPDX-License-Identifier: Apache-2.0
// A model directory in memory, for tests and fuzzing.
#pragma once

#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/model_directory.h"

namespace kascade {

class MemoryDirectory : public ModelDirectory {
 public:
  explicit MemoryDirectory(std::string path) : ModelDirectory(std::move(path)) {}

  void put(const std::string& name, std::string_view content) {
    std::vector<std::byte>& file = files_[name];
    file.resize(content.size());
    if (!content.empty()) std::memcpy(file.data(), content.data(), content.size());
  }
  void remove(const std::string& name) { files_.erase(name); }

  std::optional<std::span<const std::byte>> find(const std::string& name) override {
    asked_.insert(name);
    const auto found = files_.find(name);
    if (found == files_.end()) return std::nullopt;
    return std::span<const std::byte>(found->second);
  }

  /// Every name that was looked for.
  const std::set<std::string>& asked() const { return asked_; }

 private:
  std::map<std::string, std::vector<std::byte>> files_;
  std::set<std::string> asked_;
};

}  // namespace kascade
