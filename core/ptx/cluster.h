/* Clusters: CTAs that run at the same time and can access each other's shared memory (PTX ISA, "Cluster of CTAs",
   "mapa", "cp.async.bulk"). Needs sm_90. */
#ifndef FATTNI_CORE_PTX_CLUSTER_H
#define FATTNI_CORE_PTX_CLUSTER_H

#include "core/ptx/mbarrier.h"

#include <stdint.h>

/* A barrier of all threads of the cluster; writes before it are visible after it. */
static __device__ __forceinline__ void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/* The cluster address of `address` in the shared memory of CTA `rank`. */
static __device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
/* The same for a pointer to shared memory, to be read by ordinary loads. */
static __device__ __forceinline__ const void *cluster_pointer(const void *p, uint32_t rank) {
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((uint64_t)p), "r"(rank));
    return (const void *)there;
}
/* Arrives on an mbarrier of another CTA, given by a cluster address. Relaxed, it orders no memory accesses: enough to
   say that wgmma has read a tile, since that is complete after wgmma_wait. A release would wait for all earlier
   reductions of this thread. */
static __device__ __forceinline__ void cluster_arrive(uint32_t bar) {
    random_delay();
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Copies `bytes`, a multiple of 16, from this CTA's shared memory to another's, and completes them on mbarrier `bar`
   there. `to` and `bar` are cluster addresses. */
static __device__ __forceinline__ void cluster_copy(uint32_t to, uint32_t from, int bytes, uint32_t bar) {
    random_delay();
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

#endif
