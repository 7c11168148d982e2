/* Stores to the shared memory of a CTA of the cluster that complete on an mbarrier there; both are given by cluster
   addresses (PTX ISA, "st.async"). Who waits for the mbarrier sees them: no fence, no barrier of the cluster. */
#ifndef FATTNI_CORE_PTX_STORE_ASYNC_H
#define FATTNI_CORE_PTX_STORE_ASYNC_H

#include <stdint.h>

static __device__ __forceinline__ void store_async(uint32_t to, float x, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x), "r"(bar)
                 : "memory");
}
static __device__ __forceinline__ void store_async_4(uint32_t to, float4 x, uint32_t bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(bar)
                 : "memory");
}

#endif
