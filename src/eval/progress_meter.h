// SPDX-License-Identifier: Apache-2.0
// Counts the work of one stage, whichever thread does it, and tells how long the rest will take.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "eval/calibration_run.h"

namespace kascade {

class ProgressMeter {
 public:
  using Listener = std::function<void(const CalibrationProgress&)>;

  ProgressMeter(const Listener& listener, std::string stage, int64_t total) : listener_(listener) {
    state_.stage = std::move(stage);
    state_.total = total;
    report();
  }

  void add(int64_t amount) {
    const std::lock_guard lock(mutex_);
    state_.done += amount;
    report();
  }

  /// Work that an earlier run did: done, but no measure of this run's speed.
  void skip(int64_t amount) {
    const std::lock_guard lock(mutex_);
    skipped_ += amount;
    state_.done += amount;
    report();
  }

  void set(int64_t done, int64_t total) {
    const std::lock_guard lock(mutex_);
    state_.done = done;
    state_.total = total;
    report();
  }

 private:
  void report() {
    if (!listener_) return;
    state_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const int64_t worked = state_.done - skipped_;
    state_.seconds_left = worked > 0 ? state_.seconds * static_cast<double>(state_.total - state_.done) /
                                           static_cast<double>(worked)
                                     : -1;
    listener_(state_);
  }

  const Listener& listener_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  int64_t skipped_ = 0;
  CalibrationProgress state_;
};

}  // namespace kascade
