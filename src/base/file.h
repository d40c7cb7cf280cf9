// SPDX-License-Identifier: Apache-2.0
// Files: read-only mappings, whole reads, and writes that appear whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kascade {

/// A read-only memory map of a whole regular file. Throws IoError (cannot open) or BadFile (not a regular
/// file, empty).
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// The whole file, byte for byte. Throws IoError, or BadFile when it is larger than max_bytes.
std::string read_file(const std::string& path, uint64_t max_bytes = uint64_t{1} << 32);

/// Writes beside the target, flushes, renames over it; on failure (full disk included) removes what it wrote
/// and throws IoError naming path and cause. A target that exists and is no regular file (/dev/full, a pipe)
/// is written directly.
void write_file_atomic(const std::string& path, std::string_view content);

/// Throws IoError unless a file can be created at path; leaves nothing behind. Long jobs call this first.
void require_writable(const std::string& path);

}  // namespace kascade
