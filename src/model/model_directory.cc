// SPDX-License-Identifier: Apache-2.0
#include "model/model_directory.h"

#include <sys/stat.h>

#include <cerrno>

#include "base/check.h"

namespace kascade {

std::span<const std::byte> ModelDirectory::require(const std::string& name) {
  const std::optional<std::span<const std::byte>> file = find(name);
  if (!file) throw_error<BadFile>("{}: missing", path_of(name));
  return *file;
}

std::optional<std::span<const std::byte>> DiskDirectory::find(const std::string& name) {
  const auto known = files_.find(name);
  if (known != files_.end()) return known->second.bytes();
  const std::string path = path_of(name);
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  return files_.emplace(name, MappedFile(path)).first->second.bytes();
}

bool is_base_name(std::string_view name) {
  return !name.empty() && name.front() != '.' &&
         name.find_first_of(std::string_view("/\\\0:", 4)) == std::string_view::npos;
}

}  // namespace kascade
