// SPDX-License-Identifier: Apache-2.0
// Sampling options of generate and chat.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "kascade/engine.h"

namespace kascade::cli {

/// --max-tokens --temperature --top-k --top-p --seed --stop
struct GenerateFlags {
  int64_t max_tokens = 128;
  double temperature = 0;
  int32_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
  std::vector<std::string> stops;

  void add(CLI::App& verb);
  GenerateOptions make(bool ignore_end) const;
};

}  // namespace kascade::cli
