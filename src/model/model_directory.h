// SPDX-License-Identifier: Apache-2.0
// The files of a safetensors model by base name: a folder on disk, or bytes in memory for tests and fuzzing.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace kascade {

class ModelDirectory {
 public:
  virtual ~ModelDirectory() = default;

  /// The whole file, valid as long as the directory; nullopt when there is none. name is a base name.
  virtual std::optional<std::span<const std::byte>> find(const std::string& name) = 0;

  /// The same; throws BadFile naming the path when there is none.
  std::span<const std::byte> require(const std::string& name);

  /// For messages.
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 protected:
  explicit ModelDirectory(std::string path) : path_(std::move(path)) {}

 private:
  std::string path_;
};

/// Maps files of a folder when they are asked for, and no others.
class DiskDirectory : public ModelDirectory {
 public:
  explicit DiskDirectory(std::string path) : ModelDirectory(std::move(path)) {}
  std::optional<std::span<const std::byte>> find(const std::string& name) override;

 private:
  std::map<std::string, MappedFile> files_;
};

/// Whether name may stand in a file for another file beside it: no path separators, drive, leading dot or
/// NUL, not empty.
bool is_base_name(std::string_view name);

}  // namespace kascade
