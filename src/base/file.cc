// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace kascade {
namespace {

std::string errno_text(int code) { return std::system_category().message(code); }

// A descriptor that closes itself; close() reports what the kernel says, as delayed write errors surface
// there.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

int open_retrying(const char* path, int flags, mode_t mode = 0) {
  int fd = -1;
  do {
    fd = ::open(path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// A path with a NUL byte would name another file than the one that messages show.
void check_path(const std::string& path) {
  require<BadArgument>(!path.empty(), "file path: expected a path, got an empty one");
  require<BadArgument>(path.find('\0') == std::string::npos, "file path: holds a NUL byte");
}

void write_all(int fd, std::string_view content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t written = ::write(fd, content.data(), content.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_error<IoError>("{}: cannot write: {}", path, errno_text(errno));
    }
    content.remove_prefix(static_cast<size_t>(written));
  }
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Where a symbolic link points, so that the rename replaces the file and not the link. A link to nothing yet
// resolves as far as it goes.
std::string resolve_links(std::string path) {
  for (int depth = 0; depth < 40; ++depth) {  // the kernel's own limit
    char target[4096];
    const ssize_t length = ::readlink(path.c_str(), target, sizeof(target));
    if (length < 0) return path;
    require<IoError>(length < static_cast<ssize_t>(sizeof(target)), "{}: symbolic link is too long", path);
    std::string next(target, static_cast<size_t>(length));
    path = next.starts_with('/') ? next : directory_of(path) + "/" + next;
  }
  throw_error<IoError>("{}: {}", path, errno_text(ELOOP));
}

// A new file beside the target, removed again unless it was renamed over it.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target) : file_(create(target, &path_)) {}
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor() const { return file_.get(); }

  void replace(const std::string& target) {
    struct stat status = {};
    if (::stat(target.c_str(), &status) == 0) {
      // A file keeps its permissions when its content is replaced; where that is not allowed it gets the
      // default ones.
      [[maybe_unused]] const int ignored = ::fchmod(file_.get(), status.st_mode & 07777);
    }
    // EINVAL: a file system without fsync.
    if (::fsync(file_.get()) != 0 && errno != EINVAL)
      throw_error<IoError>("{}: cannot flush: {}", target, errno_text(errno));
    if (file_.close() != 0) throw_error<IoError>("{}: cannot close: {}", target, errno_text(errno));
    if (::rename(path_.c_str(), target.c_str()) != 0)
      throw_error<IoError>("{}: cannot replace: {}", target, errno_text(errno));
    path_.clear();
  }

 private:
  // The process id keeps processes apart and the counter threads; the loop passes what a killed process left
  // behind.
  static int create(const std::string& target, std::string* path) {
    static std::atomic<uint64_t> counter{0};
    for (int attempt = 0; attempt < 1000; ++attempt) {
      *path =
          fmt::format("{}/.kascade-{}-{}.partial", directory_of(target), ::getpid(), counter.fetch_add(1));
      const int fd = open_retrying(path->c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
      if (fd >= 0) return fd;
      if (errno != EEXIST) break;
    }
    const int cause = errno;
    path->clear();
    throw_error<IoError>("{}: cannot write: {}", target, errno_text(cause));
  }

  std::string path_;
  Descriptor file_;
};

enum class TargetKind { kAbsent, kRegular, kOther };

TargetKind target_kind(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return TargetKind::kAbsent;
    throw_error<IoError>("{}: cannot write: {}", path, errno_text(errno));
  }
  if (S_ISDIR(status.st_mode)) throw_error<IoError>("{}: cannot write: {}", path, errno_text(EISDIR));
  // A rename needs no right to write the file it replaces; who took that right away meant it.
  if (::access(path.c_str(), W_OK) != 0)
    throw_error<IoError>("{}: cannot write: {}", path, errno_text(errno));
  return S_ISREG(status.st_mode) ? TargetKind::kRegular : TargetKind::kOther;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  check_path(path);
  // Without O_NONBLOCK, opening a pipe that nobody writes would wait for ever.
  Descriptor file(open_retrying(path.c_str(), O_RDONLY | O_NONBLOCK));
  if (file.get() < 0) throw_error<IoError>("{}: cannot open: {}", path, errno_text(errno));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) throw_error<IoError>("{}: cannot read: {}", path, errno_text(errno));
  require<BadFile>(S_ISREG(status.st_mode), "{}: expected a regular file", path);
  require<BadFile>(status.st_size > 0, "{}: the file is empty", path);
  const auto size = static_cast<size_t>(status.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (data == MAP_FAILED) throw_error<IoError>("{}: cannot map {} bytes: {}", path, size, errno_text(errno));
  data_ = static_cast<const std::byte*>(data);
  size_ = size;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::string read_file(const std::string& path, uint64_t max_bytes) {
  check_path(path);
  Descriptor file(open_retrying(path.c_str(), O_RDONLY));
  if (file.get() < 0) throw_error<IoError>("{}: cannot open: {}", path, errno_text(errno));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) throw_error<IoError>("{}: cannot read: {}", path, errno_text(errno));
  if (S_ISDIR(status.st_mode)) throw_error<IoError>("{}: cannot read: {}", path, errno_text(EISDIR));
  const uint64_t expected = S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : 0;
  require<BadFile>(expected <= max_bytes, "{}: size: expected at most {} bytes, got {}", path, max_bytes,
                   expected);

  // The size is a hint only: the file may grow, and pipes and /proc files state none.
  std::string content;
  content.reserve(static_cast<size_t>(expected));
  char chunk[64 * 1024];
  for (;;) {
    const ssize_t got = ::read(file.get(), chunk, sizeof(chunk));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_error<IoError>("{}: cannot read: {}", path, errno_text(errno));
    if (got == 0) return content;
    require<BadFile>(static_cast<uint64_t>(got) <= max_bytes - content.size(),
                     "{}: size: expected at most {} bytes, got more", path, max_bytes);
    content.append(chunk, static_cast<size_t>(got));
  }
}

void write_file_atomic(const std::string& path, std::string_view content) {
  check_path(path);
  const std::string target = resolve_links(path);
  const TargetKind kind = target_kind(target);
  if (kind == TargetKind::kOther) {
    Descriptor file(open_retrying(target.c_str(), O_WRONLY));
    if (file.get() < 0) throw_error<IoError>("{}: cannot open: {}", path, errno_text(errno));
    write_all(file.get(), content, path);
    if (file.close() != 0) throw_error<IoError>("{}: cannot close: {}", path, errno_text(errno));
    return;
  }
  TemporaryFile temporary(target);
  write_all(temporary.descriptor(), content, path);
  temporary.replace(target);
}

void require_writable(const std::string& path) {
  check_path(path);
  const std::string target = resolve_links(path);
  if (target_kind(target) == TargetKind::kOther) return;
  const TemporaryFile probe(target);
}

}  // namespace kascade
