/* Tensor copies by the TMA unit (PTX ISA, "cp.async.bulk"): boxes of a 4-D tensor map to shared memory,
   and shared memory added to global memory. One thread issues, the unit does the rest. Needs sm_90. */
#ifndef FATTNI_CORE_PTX_TMA_H
#define FATTNI_CORE_PTX_TMA_H

#include <cuda.h>
#include <stdint.h>

/* The box at (column, row, head, batch); what lies outside of the tensor arrives as 0. The bytes of the
   whole box count on `bar`. */
static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                                int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* The box from shared memory; what lies outside of the tensor is not written. */
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t from, int column, int row,
                                                 int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* `bytes` contiguous bytes, a multiple of 16 and aligned to it on both sides. */
static __device__ __forceinline__ void bulk_load(uint32_t to, const void *from, int bytes,
                                                 uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
/* The box to L2. */
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map, int column, int row, int head,
                                                    int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* to[] += floats in shared memory, `bytes` as above. */
static __device__ __forceinline__ void bulk_reduce_add(float *to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void bulk_commit(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until this thread's bulk groups have read their shared memory. */
static __device__ __forceinline__ void bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* Until they are complete. */
static __device__ __forceinline__ void bulk_wait(void) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* Between this thread's writes to shared memory and wgmma's or the TMA unit's reads of them; then a
   barrier. */
static __device__ __forceinline__ void async_proxy_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for global memory, between CTAs: on the side that wrote before it says so, on the other after it
   has heard. */
static __device__ __forceinline__ void async_proxy_fence_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
