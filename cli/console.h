// SPDX-License-Identifier: Apache-2.0
// What the program shows: checked standard output, a progress bar, tables, and the interrupt flag.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace kascade::cli {

/// Set by SIGINT and SIGTERM; a second signal ends the process at once.
const std::atomic<bool>& interrupted();
void install_signal_handlers();

/// Writes to standard output; throws IoError when it cannot (a closed pipe, a full disk).
void print(std::string_view text);
/// print(), and pushes the text out: for streamed tokens.
void print_now(std::string_view text);
/// One JSON document and a newline.
void print_json(const Json& document);
/// A line on standard error: warnings, notes.
void note(std::string_view text);

/// Text made safe for a terminal line: control characters become spaces.
std::string one_line(std::string_view text);

std::string human_bytes(uint64_t bytes);
std::string human_seconds(double seconds);

/// Columns aligned by width, the first to the left, the others to the right; a rule under the header row.
std::string table(const std::vector<std::vector<std::string>>& rows);

/// A bar on standard error with the share done and the time left; silent unless standard error is a terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// fraction in [0, 1] of the stage; a negative seconds_left is estimated from the time since the stage
  /// began.
  void update(std::string_view stage, double fraction, double seconds_left = -1);
  /// Takes the bar off the screen so that something else can be written.
  void clear();

 private:
  bool visible_;
  bool drawn_ = false;
  std::string stage_;
  std::chrono::steady_clock::time_point stage_start_;
  std::chrono::steady_clock::time_point last_draw_;
};

}  // namespace kascade::cli
