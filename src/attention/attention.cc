// SPDX-License-Identifier: Apache-2.0
#include "kascade/attention.h"

#include <array>
#include <cstdlib>

#include "attention/check.h"
#include "attention/kernels.h"
#include "attention/params.h"
#include "base/check.h"
#include "kascade/thread_pool.h"

namespace kascade {
namespace {

constexpr size_t kWorkspaceAlignment = 64;

std::string kernel_names() {
  std::string names;
  for (const AttentionKernel& kernel : attention_kernels()) {
    if (!names.empty()) names += ", ";
    names += kernel.name;
    if (!kernel.available()) names += " (not on this machine)";
  }
  return names;
}

/// on_device: may be one that takes pointers of a GPU.
const AttentionKernel& kernel_named(const std::string& name, const char* source, bool on_device) {
  for (const AttentionKernel& kernel : attention_kernels()) {
    if (name != kernel.name) continue;
    require<BadArgument>(
        on_device || !kernel.on_device,
        "{} '{}' takes pointers of a GPU, must be a kernel for the host's; this build has {}", source, name,
        kernel_names());
    require<Unsupported>(kernel.available(), "{} '{}' cannot run on this machine; this build has {}", source,
                         name, kernel_names());
    return kernel;
  }
  throw_error<BadArgument>("{} '{}' is unknown; this build has {}", source, name, kernel_names());
}

void check_supported(const AttentionParams& params, const AttentionKernel& kernel) {
  const std::string reason = kernel.unsupported(params);
  require<Unsupported>(reason.empty(), "attention kernel '{}': {}", kernel.name, reason);
}

}  // namespace

std::span<const AttentionKernel> attention_kernels() {
  static const std::array kernels = {
#define KASCADE_ATTENTION_KERNEL(x) x##_kernel,
#include "attention/kernels.inc"
#undef KASCADE_ATTENTION_KERNEL
  };
  return kernels;
}

const AttentionKernel& select_attention_kernel(const std::string& name) {
  if (!name.empty()) return kernel_named(name, "attention kernel", true);
  static const std::string forced = [] {
    const char* value = std::getenv("KASCADE_ATTENTION");
    return std::string(value != nullptr ? value : "");
  }();
  if (!forced.empty()) return kernel_named(forced, "KASCADE_ATTENTION:", false);
  for (const AttentionKernel& kernel : attention_kernels())
    if (!kernel.on_device && kernel.available()) return kernel;
  throw_error<Unsupported>("no attention kernel runs on this machine; this build has {}", kernel_names());
}

size_t attention_workspace_bytes(const AttentionParams& params, const AttentionKernel& kernel, int threads) {
  require<BadArgument>(threads >= 1, "threads is {}, must be 1 or more", threads);
  check_workspace_params(params);
  check_supported(params, kernel);
  return kernel.workspace_bytes(params, threads);
}

void attention(const AttentionParams& params, const AttentionKernel& kernel, void* workspace,
               size_t workspace_bytes, const AttentionContext& context) {
  // Unless all maxima are stated, check_params reads arrays that may be on a device; such kernels refuse
  // that.
  if (kernel.on_device) {
    check_workspace_params(params);
    check_supported(params, kernel);
  }
  check_params(params);
  check_supported(params, kernel);
  if (params.batch == 0) return;
  const Maxima maxima = resolve_maxima(params);
  if (maxima.total_q == 0 || maxima.q_len == 0) return;
  const int threads = context.pool != nullptr ? context.pool->threads() : 1;
  const size_t needed = kernel.workspace_bytes(params, threads);
  require<BadArgument>(workspace_bytes >= needed, "workspace_bytes is {}, must be at least {} for {} threads",
                       workspace_bytes, needed, threads);
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  require<BadArgument>(needed == 0 || workspace != nullptr, "workspace is null, must hold {} bytes", needed);
  require<BadArgument>(address % kWorkspaceAlignment == 0,
                       "workspace is at address {:#x}, must be {}-byte aligned", address,
                       kWorkspaceAlignment);
  kernel.launch(params, workspace, context);
}

}  // namespace kascade
