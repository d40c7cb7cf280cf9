// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/part_timer.h"

#include "engine/cuda/device_memory.h"

namespace kascade::cuda {

PartTimer::~PartTimer() {
  for (const Mark& mark : marks_) cudaEventDestroy(mark.event);
}

void PartTimer::mark(Part part, bool last, cudaStream_t stream) {
  if (used_ == marks_.size()) {
    Mark& mark = marks_.emplace_back();
    check_call(cudaEventCreate(&mark.event), "cudaEventCreate");
  }
  Mark& mark = marks_[used_++];
  mark.part = part;
  mark.last = last;
  check_call(cudaEventRecord(mark.event, stream), "cudaEventRecord");
}

void PartTimer::begin(Part part, cudaStream_t stream) { mark(part, false, stream); }

void PartTimer::end(cudaStream_t stream) { mark(Part::kRest, true, stream); }

PartTimes PartTimer::take() {
  PartTimes seconds{};
  if (used_ > 0) check_call(cudaEventSynchronize(marks_[used_ - 1].event), "cudaEventSynchronize");
  for (size_t i = 0; i + 1 < used_; ++i) {
    if (marks_[i].last) continue;
    float milliseconds = 0;
    check_call(cudaEventElapsedTime(&milliseconds, marks_[i].event, marks_[i + 1].event),
               "cudaEventElapsedTime");
    seconds[marks_[i].part] += milliseconds / 1e3;
  }
  used_ = 0;
  return seconds;
}

}  // namespace kascade::cuda
