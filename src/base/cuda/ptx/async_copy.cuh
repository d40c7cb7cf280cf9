// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory, 16 bytes a thread.
#pragma once

#include <cstdint>

namespace kascade::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The same value as one that the compiler knows nothing about, so that it keeps it instead of making it
/// again.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Copies 16 bytes past the first-level cache; with bytes = 0 nothing is read and zeros are written.
__device__ inline void copy_async_16(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// The same with 4 bytes, by way of the first-level cache.
__device__ inline void copy_async_4(uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// How soon a copied line leaves the second-level cache: before all others, or like them (what `createpolicy`
// makes).
constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictNormal = 0x1000000000000000;
/// The same with such a policy.
__device__ inline void copy_async_16(uint32_t shared, const void* global, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of the thread's latest groups are unfinished.
template <int pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// What lies at `global`, or `otherwise` without a look: not by a branch, which would wait for the load where
/// it ends.
__device__ inline int32_t load_if(bool wanted, const int32_t* global, int32_t otherwise) {
  int32_t x = otherwise;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}\n"
               : "+r"(x)
               : "l"(global), "r"(static_cast<int>(wanted)));
  return x;
}

/// Loads the 32-byte sector that four bytes lie in into the first-level cache and waits for nothing.
__device__ inline void touch(const void* global) {
  [[maybe_unused]] uint32_t unused;
  asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(unused) : "l"(global));
}

/// Brings a line into the second-level cache and waits for nothing.
__device__ inline void prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace kascade::cuda
