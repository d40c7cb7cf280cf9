// SPDX-License-Identifier: Apache-2.0
#include "ops/isa.h"

#include <dnnl.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/check.h"

namespace kascade {

#if defined(__x86_64__)
#define KASCADE_FOR_EACH_ISA(x) x(baseline) x(avx2) x(avx512) x(avx512_bf16)
#else
#define KASCADE_FOR_EACH_ISA(x) x(baseline)
#endif

#define KASCADE_DECLARE(isa)       \
  namespace isa {                  \
  extern const OpKernels kKernels; \
  }
KASCADE_FOR_EACH_ISA(KASCADE_DECLARE)
#undef KASCADE_DECLARE

namespace {

#define KASCADE_ADDRESS(isa) &isa::kKernels,
constexpr const OpKernels* kCompiled[] = {KASCADE_FOR_EACH_ISA(KASCADE_ADDRESS)};
#undef KASCADE_ADDRESS

// Rank of the best instruction set that the processor and the system support, as an index of kCompiled.
int best_index() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("aes")))
    return 0;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return 1;
  if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
        __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("gfni") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512bf16")))
    return 2;
  return 3;
#else
  return 0;
#endif
}

// The same, or the lesser one that KASCADE_ISA names.
int choose_index() {
  const int best = best_index();
  const char* wanted = std::getenv("KASCADE_ISA");
  if (wanted == nullptr || *wanted == '\0') return best;
  std::string names;
  for (int index = 0; index <= best; ++index) {
    if (std::string_view(wanted) == kCompiled[index]->name) {
#if defined(__x86_64__)
      // oneDNN follows, so that a forced run computes what a lesser machine would. It refuses once it has
      // run.
      constexpr dnnl_cpu_isa_t kLimits[] = {dnnl_cpu_isa_sse41, dnnl_cpu_isa_avx2, dnnl_cpu_isa_avx512_core,
                                            dnnl_cpu_isa_avx512_core_bf16};
      static_cast<void>(dnnl_set_max_cpu_isa(kLimits[index]));
#endif
      return index;
    }
    names += std::string(index == 0 ? "" : ", ") + kCompiled[index]->name;
  }
  throw_error<BadArgument>("KASCADE_ISA: expected one of {}, got '{}'", names, wanted);
}

int chosen_index() {
  static const int index = choose_index();
  return index;
}

std::atomic<const OpKernels*> scoped{nullptr};

}  // namespace

std::span<const OpKernels* const> compiled_op_kernels() { return kCompiled; }

bool op_kernels_available(const OpKernels& kernels) {
  for (int index = 0; index <= chosen_index(); ++index)
    if (kCompiled[index] == &kernels) return true;
  return false;
}

const OpKernels& op_kernels() {
  if (const OpKernels* kernels = scoped.load(std::memory_order_acquire)) return *kernels;
  return *kCompiled[chosen_index()];
}

ScopedOpKernels::ScopedOpKernels(const OpKernels& kernels)
    : previous_(scoped.exchange(&kernels, std::memory_order_acq_rel)) {}

ScopedOpKernels::~ScopedOpKernels() { scoped.store(previous_, std::memory_order_release); }

}  // namespace kascade
