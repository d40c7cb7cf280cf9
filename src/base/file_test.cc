// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "kascade/error.h"

namespace kascade {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// The message of the E that f throws; fails the test when it throws none.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "kascade_file_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void put(const std::string& name, const std::string& content) const {
    std::ofstream(path(name), std::ios::binary) << content;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder_))
      result.push_back(entry.path().filename().string());
    return result;
  }

  fs::path folder_;
};

const std::string kBytes("a\0b\r\n\xFF\x1A end", 11);

TEST_F(FileTest, ReadsByteForByte) {
  put("f", kBytes);
  EXPECT_EQ(read_file(path("f")), kBytes);
  put("empty", "");
  EXPECT_EQ(read_file(path("empty")), "");
  const std::string large(3'000'001, 'x');
  put("large", large);
  EXPECT_EQ(read_file(path("large")), large);
}

TEST_F(FileTest, ReadsFilesThatStateNoSize) { EXPECT_FALSE(read_file("/proc/self/status").empty()); }

TEST_F(FileTest, ReadStopsAtTheLimit) {
  put("f", "12345");
  EXPECT_EQ(read_file(path("f"), 5), "12345");
  EXPECT_THAT(message_of<BadFile>([&] { read_file(path("f"), 4); }),
              HasSubstr(path("f") + ": size: expected at most 4"));
  // A device without end states no size.
  EXPECT_THAT(message_of<BadFile>([&] { read_file("/dev/zero", 100'000); }), HasSubstr("at most 100000"));
}

TEST_F(FileTest, ReadNamesPathAndCause) {
  EXPECT_THAT(message_of<IoError>([&] { read_file(path("none")); }),
              HasSubstr(path("none") + ": cannot open: No such"));
  EXPECT_THAT(message_of<IoError>([&] { read_file(folder_.string()); }), HasSubstr("Is a directory"));
  EXPECT_THROW(read_file(""), BadArgument);
  EXPECT_THROW(read_file(std::string("a\0b", 3)), BadArgument);
}

TEST_F(FileTest, MapsByteForByteAndMoves) {
  put("f", kBytes);
  MappedFile first(path("f"));
  MappedFile second(std::move(first));
  put("g", "other");
  MappedFile third(path("g"));
  third = std::move(second);
  ASSERT_EQ(third.bytes().size(), kBytes.size());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(third.bytes().data()), third.bytes().size()), kBytes);
  EXPECT_EQ(third.path(), path("f"));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(third.bytes().data()) % 4096, 0u);
}

TEST_F(FileTest, MapRefusesWhatIsNoRegularFile) {
  put("empty", "");
  EXPECT_THAT(message_of<BadFile>([&] { MappedFile{path("empty")}; }), HasSubstr("empty"));
  EXPECT_THAT(message_of<BadFile>([&] { MappedFile{folder_.string()}; }), HasSubstr("regular file"));
  EXPECT_THAT(message_of<BadFile>([&] { MappedFile{"/dev/zero"}; }), HasSubstr("regular file"));
  EXPECT_THAT(message_of<IoError>([&] { MappedFile{path("none")}; }), HasSubstr("No such file"));
  // Nobody writes into this pipe: waiting for a writer would never end.
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<BadFile>([&] { MappedFile{path("pipe")}; }), HasSubstr("regular file"));
}

TEST_F(FileTest, WritesWholeAndLeavesNothingElse) {
  write_file_atomic(path("f"), kBytes);
  EXPECT_EQ(read_file(path("f")), kBytes);
  write_file_atomic(path("f"), "");
  EXPECT_EQ(read_file(path("f")), "");
  EXPECT_THAT(names(), testing::ElementsAre("f"));
}

TEST_F(FileTest, WritesRelativePaths) {
  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  write_file_atomic("f", "x");
  fs::current_path(before);
  EXPECT_EQ(read_file(path("f")), "x");
}

TEST_F(FileTest, ReplacedFileKeepsItsPermissions) {
  put("f", "old");
  ASSERT_EQ(chmod(path("f").c_str(), 0604), 0);
  write_file_atomic(path("f"), "new");
  EXPECT_EQ(fs::status(path("f")).permissions(), fs::perms(0604));
}

TEST_F(FileTest, WritesThroughSymbolicLinks) {
  put("target", "old");
  fs::create_symlink("target", path("link"));
  write_file_atomic(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(read_file(path("target")), "new");
  fs::create_symlink("later", path("dangling"));
  write_file_atomic(path("dangling"), "made");
  EXPECT_EQ(read_file(path("later")), "made");
  fs::create_symlink("loop", path("loop"));
  EXPECT_THROW(write_file_atomic(path("loop"), "x"), IoError);
}

TEST_F(FileTest, FullDeviceIsAnErrorNamingIt) {
  EXPECT_THAT(message_of<IoError>([] { write_file_atomic("/dev/full", "x"); }),
              HasSubstr("/dev/full: cannot write: No space left"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
  write_file_atomic("/dev/null", "x");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(FileTest, WritesIntoAPipe) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  std::string got;
  std::thread reader([&] { got = read_file(path("pipe")); });
  write_file_atomic(path("pipe"), "through");
  reader.join();
  EXPECT_EQ(got, "through");
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

// A limit on the size of files stands for a full disk: the write fails in the middle.
TEST_F(FileTest, FailedWriteKeepsTheOldFileAndNothingElse) {
  put("f", "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight = before;
  tight.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const std::string message =
      message_of<IoError>([&] { write_file_atomic(path("f"), std::string(5000, 'x')); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr(path("f") + ": cannot write: File too large"));
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_THAT(names(), testing::ElementsAre("f"));
}

TEST_F(FileTest, UnwritableTargets) {
  EXPECT_THAT(message_of<IoError>([&] { write_file_atomic(path("no/such/f"), "x"); }),
              HasSubstr("No such file"));
  EXPECT_THAT(message_of<IoError>([&] { write_file_atomic(folder_.string(), "x"); }),
              HasSubstr("Is a directory"));
  put("file", "x");
  EXPECT_THAT(message_of<IoError>([&] { write_file_atomic(path("file/f"), "x"); }),
              HasSubstr("Not a directory"));
  EXPECT_THROW(write_file_atomic(path(std::string(300, 'n')), "x"), IoError);
  EXPECT_THROW(write_file_atomic("", "x"), BadArgument);
}

TEST_F(FileTest, RequireWritableLeavesNothing) {
  require_writable(path("f"));
  EXPECT_TRUE(names().empty());
  put("f", "old");
  require_writable(path("f"));
  EXPECT_EQ(read_file(path("f")), "old");
  EXPECT_THAT(names(), testing::ElementsAre("f"));
  require_writable("/dev/full");
  EXPECT_THROW(require_writable(path("no/f")), IoError);
  EXPECT_THROW(require_writable(folder_.string()), IoError);
}

}  // namespace
}  // namespace kascade
