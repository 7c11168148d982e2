/* Clusters: CTAs that run at once and reach each other's shared memory (PTX ISA, "Cluster of CTAs",
   "mapa", "cp.async.bulk"). Needs sm_90. */
#ifndef FATTNI_CORE_PTX_CLUSTER_H
#define FATTNI_CORE_PTX_CLUSTER_H

#include "core/ptx/mbarrier.h"

#include <stdint.h>

/* All threads of all CTAs; what they wrote before is seen after. */
static __device__ __forceinline__ void cluster_sync(void) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/* Where CTA `rank` of the cluster has what lies at `address` here. */
static __device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
/* Arrives on another CTA's barrier, a cluster address. Orders nothing: for what products have
   read, which are over once waited for; a release here would wait for every reduction before it. */
static __device__ __forceinline__ void cluster_arrive(uint32_t bar) {
    random_delay();
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar)
                 : "memory");
}
/* `bytes` of this CTA's shared memory, a multiple of 16, to another's; they count on `bar`
   there. `to` and `bar` are cluster addresses. */
static __device__ __forceinline__ void cluster_copy(uint32_t to, uint32_t from, int bytes,
                                                    uint32_t bar) {
    random_delay();
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

#endif
