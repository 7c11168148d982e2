/* The cluster's barrier in two steps, once in a kernel (PTX ISA, "barrier.cluster"). */
#ifndef FATTNI_CORE_PTX_CLUSTER_BARRIER_H
#define FATTNI_CORE_PTX_CLUSTER_BARRIER_H

/* Makes no writes visible but initialised mbarriers, after mbarrier_init_fence. A thread may end without waiting. */
static __device__ __forceinline__ void cluster_arrive_started(void) {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
static __device__ __forceinline__ void cluster_wait_started(void) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

#endif
