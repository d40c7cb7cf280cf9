// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most, measured with a kernel's own instruction set: what benches compare with.
#pragma once

#include <cstdint>

#include "attention/cpu/work.h"
#include "kascade/attention.h"
#include "kascade/thread_pool.h"

namespace kascade::cpu {

/// The functions behind a kernel of this folder, null for any other. attention_kernels() holds the kernel
/// itself.
const Kernels* kernels_of(const AttentionKernel& kernel);

struct Limits {
  double read_gb_per_s = 0;     // reading memory that no cache holds, all threads
  double f32_tflop_per_s = 0;   // fp32 multiply-adds in registers
  double bf16_tflop_per_s = 0;  // products of bf16 summed in fp32; the fp32 figure where the machine has none
};

/// The best of several runs on all threads of the pool. buffer is read for the bandwidth; it should hold
/// several times last_level_cache_bytes() and must have been written. A call takes about a second.
Limits measure_limits(const Kernels& kernels, ThreadPool& pool, const void* buffer, int64_t buffer_bytes);

/// Size of the last-level cache; 32 MiB when the system does not say.
int64_t last_level_cache_bytes();

}  // namespace kascade::cpu
