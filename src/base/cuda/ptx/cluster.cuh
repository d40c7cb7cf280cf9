// SPDX-License-Identifier: Apache-2.0
// The barrier of a cluster of blocks in two halves, and shared memory of its other blocks.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace kascade::cuda {

/// Announces that the thread's writes so far may be read; every arrival is followed by one wait.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
/// The same for what the thread wrote to its own block's shared memory, and for nothing else: waits for no
/// write to global memory, which takes longer, and for no load. What was read of other blocks must have been
/// used before the arrival after which they may leave.
__device__ inline void cluster_arrive_own() {
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
/// Until all threads of the cluster have arrived.
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

__device__ inline int cluster_size() {
  return static_cast<int>(cooperative_groups::cluster_group::num_blocks());
}
/// Of the cluster among those of the grid, which has one dimension.
__device__ inline int cluster_index() {
  int index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ inline int cluster_rank() {
  return static_cast<int>(cooperative_groups::cluster_group::block_rank());
}

/// What `mine` is in the shared memory of block `rank` of the cluster.
template <class T>
__device__ inline T* in_block(T* mine, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(mine, static_cast<unsigned>(rank));
}

}  // namespace kascade::cuda
