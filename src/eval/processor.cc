// SPDX-License-Identifier: Apache-2.0
#include "eval/processor.h"

#include <cstdio>
#include <cstring>

namespace kascade {

std::string processor_name() {
  std::string text;
  if (FILE* file = std::fopen("/proc/cpuinfo", "r")) {
    char line[512];
    while (text.empty() && std::fgets(line, sizeof(line), file) != nullptr) {
      if (std::strncmp(line, "model name", 10) != 0) continue;
      if (const char* colon = std::strchr(line, ':')) text = colon + 2;
    }
    std::fclose(file);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.empty() ? "unknown" : text;
}

}  // namespace kascade
