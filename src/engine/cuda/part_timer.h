// SPDX-License-Identifier: Apache-2.0
// Where the time of a forward call on a GPU goes, part by part.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "engine/parts.h"

namespace kascade::cuda {

/// Marks lie between the parts on the stream; reading them waits for the device.
class PartTimer {
 public:
  PartTimer() = default;
  ~PartTimer();
  PartTimer(const PartTimer&) = delete;
  PartTimer& operator=(const PartTimer&) = delete;

  /// What follows on the stream belongs to part.
  void begin(Part part, cudaStream_t stream);
  void end(cudaStream_t stream);
  /// Seconds of each part since the last call.
  PartTimes take();

 private:
  struct Mark {
    cudaEvent_t event = nullptr;
    Part part{};
    bool last = false;
  };
  void mark(Part part, bool last, cudaStream_t stream);
  std::vector<Mark> marks_;
  size_t used_ = 0;
};

}  // namespace kascade::cuda
