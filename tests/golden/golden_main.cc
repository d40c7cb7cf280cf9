// SPDX-License-Identifier: Apache-2.0
// golden_test KIND: runs one kind and prints how many of its cases ran and were skipped. golden_test kinds:
// fails when the directory holds a kind that this program does not know.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "golden.h"

namespace {

using kascade::golden::Tally;

struct Kind {
  const char* name;
  void (*run)(const std::string& golden_dir, Tally& tally);
};

constexpr Kind kKinds[] = {
    {"tokenizer", kascade::golden::run_tokenizer},
    {"dense", kascade::golden::run_dense},
    {"ops", kascade::golden::run_ops},
    {"calibration", kascade::golden::run_calibration},
    {"strategies", kascade::golden::run_strategies},
    {"needle", kascade::golden::run_needle},
};

int list_kinds(const std::string& golden_dir) {
  int unknown = 0;
  for (const std::string& folder : kascade::golden::folders_in(golden_dir)) {
    bool known = false;
    for (const Kind& kind : kKinds) known = known || folder == kind.name;
    std::printf("%s: %s\n", folder.c_str(), known ? "known" : "UNKNOWN KIND");
    unknown += known ? 0 : 1;
  }
  return unknown == 0 ? 0 : 1;
}

int run_kind(const Kind& kind, const std::string& golden_dir) {
  if (!std::filesystem::is_directory(golden_dir + "/" + kind.name)) {
    std::printf("%s: not in %s: 0 ran, 0 skipped\n", kind.name, golden_dir.c_str());
    return 0;
  }
  Tally tally;
  kind.run(golden_dir, tally);
  std::printf("%s: %d ran, %d skipped, %d failures\n", kind.name, tally.ran_count(), tally.skipped_count(),
              tally.failures());
  if (tally.ran_count() + tally.skipped_count() == 0) {
    std::printf("%s: the directory is there and holds no case\n", kind.name);
    return 1;
  }
  return tally.failures() == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const char* given = std::getenv("KASCADE_GOLDEN_DIR");
  const std::string golden_dir = given != nullptr && *given != '\0' ? given : KASCADE_GOLDEN_FIXTURES;
  if (argc != 2) {
    std::fprintf(stderr, "usage: golden_test kinds|KIND\n");
    return 2;
  }
  try {
    if (!std::filesystem::is_directory(golden_dir)) {
      std::fprintf(stderr, "%s: no such directory\n", golden_dir.c_str());
      return 1;
    }
    const std::string wanted = argv[1];
    if (wanted == "kinds") return list_kinds(golden_dir);
    for (const Kind& kind : kKinds) {
      if (wanted == kind.name) return run_kind(kind, golden_dir);
    }
    std::fprintf(stderr, "golden_test: unknown kind '%s'\n", wanted.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "golden_test: %s\n", error.what());
    return 1;
  }
}
