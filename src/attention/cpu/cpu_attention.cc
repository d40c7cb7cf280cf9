// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of kernels.inc: one per instruction set that the build compiles.
#include <fmt/format.h>

#include "attention/cpu/launch.h"
#include "attention/cpu/limits.h"
#include "attention/kernels.h"

namespace kascade {

#if defined(__x86_64__)
#define KASCADE_FOR_EACH_ISA(x) x(baseline) x(avx2) x(avx512) x(avx512_bf16)
#else
#define KASCADE_FOR_EACH_ISA(x) x(baseline)
#endif

#define KASCADE_DECLARE(isa)                   \
  namespace isa {                              \
  extern const cpu::Kernels kAttentionKernels; \
  }
KASCADE_FOR_EACH_ISA(KASCADE_DECLARE)
#undef KASCADE_DECLARE

namespace {

enum class Level { baseline, avx2, avx512, avx512_bf16 };

Level machine_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("aes")))
    return Level::baseline;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return Level::avx2;
  if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
        __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512bf16")))
    return Level::avx512;
  return Level::avx512_bf16;
#else
  return Level::baseline;
#endif
}

template <Level level>
bool available() {
  static const Level machine = machine_level();
  return level <= machine;
}

std::string unsupported(const AttentionParams& params) {
  if (params.q_dtype != DType::kF32)
    return fmt::format("q_dtype is {}; only f32 is supported", dtype_name(params.q_dtype));
  if (params.out_dtype != DType::kF32)
    return fmt::format("out_dtype is {}; only f32 is supported", dtype_name(params.out_dtype));
  if (params.selection_k != nullptr) return "selection_k is given; only null is supported";
  return "";
}

template <const cpu::Kernels& kernels>
size_t workspace_bytes(const AttentionParams& params, int threads) {
  if (params.batch == 0) return 0;
  return params.tile_rule == TileRule::kStep ? cpu::decode_workspace_bytes(params, kernels, threads)
                                             : cpu::prefill_workspace_bytes(params, kernels, threads);
}

template <const cpu::Kernels& kernels>
void launch(const AttentionParams& params, void* workspace, const AttentionContext& context) {
  if (params.status != nullptr) *params.status |= clamp_status(params, resolve_maxima(params));
  if (params.tile_rule == TileRule::kStep) {
    cpu::launch_decode(params, kernels, workspace, context.pool);
  } else {
    cpu::launch_prefill(params, kernels, workspace, context.pool);
  }
}

}  // namespace

#define KASCADE_DEFINE(isa)                                                                    \
  const AttentionKernel cpu_##isa##_kernel = {"cpu-" #isa, available<Level::isa>, unsupported, \
                                              workspace_bytes<isa::kAttentionKernels>,         \
                                              launch<isa::kAttentionKernels>};
KASCADE_FOR_EACH_ISA(KASCADE_DEFINE)
#undef KASCADE_DEFINE

const cpu::Kernels* cpu::kernels_of(const AttentionKernel& kernel) {
#define KASCADE_FIND(isa) \
  if (kernel.launch == cpu_##isa##_kernel.launch) return &isa::kAttentionKernels;
  KASCADE_FOR_EACH_ISA(KASCADE_FIND)
#undef KASCADE_FIND
  return nullptr;
}

}  // namespace kascade
