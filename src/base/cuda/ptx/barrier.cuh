// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier), named barriers, bulk tensor copies, and what orders them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/cuda/ptx/async_copy.cuh"

namespace kascade::cuda {

__device__ inline void init_barrier(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
/// Makes initialised barriers visible to asynchronous copies.
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The functions below take a barrier, or its address in shared memory: loops keep one address and add to it,
// as finding a variable's address takes dozens of cycles.
__device__ inline void arrive(uint32_t barrier, uint32_t count = 1) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(barrier),
               "r"(count)
               : "memory");
}
__device__ inline void arrive(uint64_t& barrier, uint32_t count = 1) {
  arrive(shared_address(&barrier), count);
}
/// Arrives when all copies that the thread has issued so far are done.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_after_copies(uint64_t& barrier) {
  arrive_after_copies(shared_address(&barrier));
}
/// The barrier's phase also waits for `bytes` of bulk copies.
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void expect_bytes(uint64_t& barrier, uint32_t bytes) {
  expect_bytes(shared_address(&barrier), bytes);
}
/// Until the phase of this parity is over.
__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra "
      "DONE;\nbra "
      "AGAIN;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void wait_barrier(uint64_t& barrier, uint32_t parity) {
  wait_barrier(shared_address(&barrier), parity);
}
/// For two barriers at once.
__device__ inline void wait_barriers(uint32_t first, uint32_t first_parity, uint32_t second,
                                     uint32_t second_parity) {
  asm volatile(
      "{\n.reg .pred done, both;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
      "%1;\nmbarrier.try_wait.parity.shared::cta.b64 both, [%2], %3;\nand.pred both, both, done;\n@both bra "
      "DONE;\nbra "
      "AGAIN;\nDONE:\n}\n" ::"r"(first),
      "r"(first_parity), "r"(second), "r"(second_parity)
      : "memory");
}

/// Whether the phases of these parities are over at both barriers.
__device__ inline bool test_barriers(uint32_t first, uint32_t first_parity, uint32_t second,
                                     uint32_t second_parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done, both;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], "
      "%2;\nmbarrier.test_wait.parity.shared::cta.b64 both, [%3], %4;\nand.pred both, both, done;\nselp.u32 "
      "%0, 1, 0, both;\n}\n"
      : "=r"(done)
      : "r"(first), "r"(first_parity), "r"(second), "r"(second_parity)
      : "memory");
  return done != 0;
}

/// Barrier `id` (1..15) of `threads` threads: waits for all, or arrives and goes on.
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Orders accesses to shared memory by threads before those by the tensor cores and the bulk copy engine.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A box of a tensor of five dimensions to shared memory; `barrier` gets its bytes.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t x0,
                                int32_t x1, int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// The same, called by all lanes of a warp with the same arguments: one of them copies. The assembler knows
/// then that only one does; of `lane == 0` it doesn't, and loops over all that might.
__device__ inline void copy_box_by_one(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t x0,
                                       int32_t x1, int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n@elected "
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2];\n}\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// The other way, from shared memory, also by one lane, to which wait_stored_boxes() belongs.
__device__ inline void store_box_by_one(const CUtensorMap* map, uint32_t shared, int32_t x0, int32_t x1,
                                        int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\n@elected "
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n@elected "
      "cp.async.bulk.commit_group;\n}\n" ::"l"(map),
      "r"(shared), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
/// Until what the warp's stores of boxes read of shared memory may change.
__device__ inline void wait_stored_boxes() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/// Gives registers of the warpgroup back, or takes them, up to `count` a thread.
template <int count>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace kascade::cuda
