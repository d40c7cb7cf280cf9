// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products (wgmma): c[64 x N] (+)= a[64 x 16] b[16 x N] of 16-bit floats with fp32 sums.
// Operands in shared memory are tiles of 64 columns (128 bytes a row) in the 128-byte swizzle, 1024-byte
// aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kascade::cuda {

/// Between what a thread did to the registers of a product and the product.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `pending` of the latest groups are unfinished.
template <int pending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Keeps the compiler from moving uses of registers that a product in flight reads or writes.
template <int count>
__device__ inline void pin(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// A matrix in shared memory. K runs along the rows of 64 (K-major: group_bytes is not used), or over the
/// rows (then columns 64 further lie group_bytes away). Eight rows take 1024 bytes; the next eight lie
/// rows_bytes further.
__device__ inline uint64_t matrix_descriptor(uint32_t address, uint32_t group_bytes,
                                             uint32_t rows_bytes = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{rows_bytes >> 4} << 32 | uint64_t{group_bytes >> 4} << 16 |
         ((address & 0x3FFFFu) >> 4);
}
/// The same matrix `bytes` further.
__device__ inline uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

template <class T, int N>
struct Product;

// The N / 2 sums of a thread as operands of an asm statement.
#define KASCADE_SUMS_8(c, i)                                                                  \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define KASCADE_SUMS_32(c, i) \
  KASCADE_SUMS_8(c, i), KASCADE_SUMS_8(c, i + 8), KASCADE_SUMS_8(c, i + 16), KASCADE_SUMS_8(c, i + 24)
#define KASCADE_SUMS_64(c, i) KASCADE_SUMS_32(c, i), KASCADE_SUMS_32(c, i + 32)
#define KASCADE_SUMS_128(c, i) KASCADE_SUMS_64(c, i), KASCADE_SUMS_64(c, i + 64)

// accumulate = 0: the sums start at zero. In both forms b lies in shared memory; with transpose_b its K runs
// over rows.
#define KASCADE_PRODUCT(T, TYPE, N, COUNT, SUMS, A, B, P, R0, R1, R2, R3, RB, RP)                            \
  template <>                                                                                                \
  struct Product<T, N> {                                                                                     \
    __device__ static void shared(float (&c)[COUNT], uint64_t a, uint64_t b, int accumulate) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N        \
                   "k16.f32." TYPE "." TYPE " {" SUMS "}, " A ", " B ", p, 1, 1, 0, 0;\n}\n"                 \
                   : KASCADE_SUMS_##COUNT(c, 0)                                                              \
                   : "l"(a), "l"(b), "r"(accumulate));                                                       \
    }                                                                                                        \
    template <int transpose_b>                                                                               \
    __device__ static void registers(float (&c)[COUNT], const uint32_t (&a)[4], uint64_t b,                  \
                                     int accumulate) {                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " RP ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N       \
                   "k16.f32." TYPE "." TYPE " {" SUMS "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " RB             \
                   ", p, 1, 1, %" KASCADE_TRANSPOSE_##COUNT ";\n}\n"                                         \
                   : KASCADE_SUMS_##COUNT(c, 0)                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(transpose_b)); \
    }                                                                                                        \
  }
#define KASCADE_TRANSPOSE_32 "38"
#define KASCADE_TRANSPOSE_64 "70"
#define KASCADE_TRANSPOSE_128 "134"
#define KASCADE_NAMES_32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KASCADE_NAMES_64                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KASCADE_NAMES_128                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

KASCADE_PRODUCT(__nv_bfloat16, "bf16", 64, 32, KASCADE_NAMES_32, "%32", "%33", "%34", "%32", "%33", "%34",
                "%35", "%36", "%37");
KASCADE_PRODUCT(__half, "f16", 64, 32, KASCADE_NAMES_32, "%32", "%33", "%34", "%32", "%33", "%34", "%35",
                "%36", "%37");
KASCADE_PRODUCT(__nv_bfloat16, "bf16", 128, 64, KASCADE_NAMES_64, "%64", "%65", "%66", "%64", "%65", "%66",
                "%67", "%68", "%69");
KASCADE_PRODUCT(__half, "f16", 128, 64, KASCADE_NAMES_64, "%64", "%65", "%66", "%64", "%65", "%66", "%67",
                "%68", "%69");
KASCADE_PRODUCT(__nv_bfloat16, "bf16", 256, 128, KASCADE_NAMES_128, "%128", "%129", "%130", "%128", "%129",
                "%130", "%131", "%132", "%133");
KASCADE_PRODUCT(__half, "f16", 256, 128, KASCADE_NAMES_128, "%128", "%129", "%130", "%128", "%129", "%130",
                "%131", "%132", "%133");

#undef KASCADE_PRODUCT
#undef KASCADE_SUMS_8
#undef KASCADE_SUMS_32
#undef KASCADE_SUMS_64
#undef KASCADE_SUMS_128
#undef KASCADE_TRANSPOSE_32
#undef KASCADE_TRANSPOSE_64
#undef KASCADE_TRANSPOSE_128
#undef KASCADE_NAMES_32
#undef KASCADE_NAMES_64
#undef KASCADE_NAMES_128

}  // namespace kascade::cuda
