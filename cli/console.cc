// SPDX-License-Identifier: Apache-2.0
#include "cli/console.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace kascade::cli {
namespace {

std::atomic<bool> interrupt_flag{false};

void on_signal(int number) {
  if (interrupt_flag.exchange(true)) {
    signal(number, SIG_DFL);
    raise(number);
  }
}

void write_all(std::string_view text, bool flush) {
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || (flush && std::fflush(stdout) != 0)) {
    throw_error<IoError>("standard output: {}", std::strerror(errno != 0 ? errno : EIO));
  }
}

}  // namespace

const std::atomic<bool>& interrupted() { return interrupt_flag; }

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A closed pipe is reported by the write that meets it.
  signal(SIGPIPE, SIG_IGN);
}

void print(std::string_view text) { write_all(text, false); }
void print_now(std::string_view text) { write_all(text, true); }
void print_json(const Json& document) { write_all(dump_json(document, 2) + "\n", true); }
void note(std::string_view text) {
  std::fprintf(stderr, "%.*s\n", static_cast<int>(text.size()), text.data());
}

std::string one_line(std::string_view text) {
  std::string line(text);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return line;
}

std::string human_bytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  const int64_t whole = std::llround(std::max(seconds, 0.0));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t i = 0; i < rows[r].size(); ++i) {
      text += i == 0 ? fmt::format("{:<{}}", rows[r][i], widths[i])
                     : fmt::format("  {:>{}}", rows[r][i], widths[i]);
    }
    text += '\n';
    if (r == 0) {
      size_t total = 0;
      for (size_t i = 0; i < widths.size(); ++i) total += widths[i] + (i == 0 ? 0 : 2);
      text += std::string(total, '-') + '\n';
    }
  }
  return text;
}

Progress::Progress() : visible_(isatty(STDERR_FILENO) != 0) {}
Progress::~Progress() { clear(); }

void Progress::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  drawn_ = false;
}

void Progress::update(std::string_view stage, double fraction, double seconds_left) {
  if (!visible_) return;
  const auto now = std::chrono::steady_clock::now();
  if (stage != stage_) {
    stage_ = stage;
    stage_start_ = now;
    last_draw_ = {};
  }
  if (now - last_draw_ < std::chrono::milliseconds(100) && fraction < 1) return;
  last_draw_ = now;
  fraction = std::clamp(fraction, 0.0, 1.0);
  if (seconds_left < 0 && fraction > 0.01) {
    seconds_left = std::chrono::duration<double>(now - stage_start_).count() * (1 - fraction) / fraction;
  }
  constexpr int kWidth = 28;
  const int filled = static_cast<int>(std::lround(fraction * kWidth));
  std::string line = fmt::format("\r\033[K{} [{}{}] {:3.0f} %", one_line(stage), std::string(filled, '#'),
                                 std::string(kWidth - filled, '.'), fraction * 100);
  if (seconds_left >= 0) line += fmt::format(", {} left", human_seconds(seconds_left));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace kascade::cli
