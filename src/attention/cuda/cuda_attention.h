// SPDX-License-Identifier: Apache-2.0
// The operator on a CUDA device, for callers that link the CUDA library alone.
#pragma once

#include <cstddef>

#include "kascade/attention.h"

namespace kascade {

/// Decode calls (TileRule::kStep, 1 to 8 rows a sequence) and prefill calls (TileRule::kAligned) on NVIDIA
/// GPUs of compute capability 9.0. All
/// pointers of AttentionParams are device pointers, so the four maxima must be stated.
extern const AttentionKernel cuda_sm90_kernel;

/// Bytes of device memory that cuda_attention needs for any call within the stated maxima; BadArgument and
/// Unsupported as attention().
size_t cuda_attention_workspace_bytes(const AttentionParams& params);

/// attention() with cuda_sm90_kernel: checks, then enqueues the call's kernels on stream (a cudaStream_t).
/// Neither allocates nor synchronises; may be captured in a graph, whose replays read lengths, page tables,
/// budgets and head maps anew. The passes over keys, which fill the GPU, leave spare_multiprocessors of it to
/// other work; results do not depend on it. Throws DeviceError, naming the kernel, when a launch fails.
void cuda_attention(const AttentionParams& params, void* workspace, size_t workspace_bytes, void* stream,
                    int spare_multiprocessors = 0);

}  // namespace kascade
