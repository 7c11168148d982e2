/* Copies by the TMA unit (PTX ISA, "cp.async.bulk.tensor", "cp.async.bulk", "cp.reduce.async.bulk"): boxes of 4-D
   tensor maps and contiguous bytes, between global and shared memory. One thread issues them; they are asynchronous.
   Needs sm_90. */
#ifndef FATTNI_CORE_PTX_TMA_H
#define FATTNI_CORE_PTX_TMA_H

#include <cuda.h>
#include <stdint.h>

/* Brings a map to the cache of maps; the first copy by it does not wait for that. */
static __device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/* Loads the box at (column, row, head, batch); elements outside of the tensor become 0. The bytes of the whole box are
   completed on mbarrier `bar`. */
static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int column, int row,
                                                int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* Stores the box from shared memory; elements outside of the tensor are not written. */
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, uint32_t from, int column, int row, int head,
                                                 int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* The same for what nothing reads or writes again: it leaves L2 before other data does. */
static __device__ __forceinline__ uint64_t evict_first(void) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
static __device__ __forceinline__ void tma_load_once(uint32_t to, const CUtensorMap *map, uint32_t bar, int column,
                                                     int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(evict_first())
                 : "memory");
}
static __device__ __forceinline__ void tma_store_once(const CUtensorMap *map, uint32_t from, int column, int row,
                                                      int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint "
                 "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(map),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(evict_first())
                 : "memory");
}
/* Loads `bytes` contiguous bytes; addresses and `bytes` are multiples of 16. */
static __device__ __forceinline__ void bulk_load(uint32_t to, const void *from, int bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
/* Prefetches the box to L2. */
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column),
                 "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* Stores `bytes` contiguous bytes of shared memory; addresses and `bytes` as above. */
static __device__ __forceinline__ void bulk_store(void *to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
/* to[] += floats in shared memory; addresses and `bytes` as above. */
static __device__ __forceinline__ void bulk_reduce_add(float *to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Waits until this thread's bulk groups have read their shared memory. */
static __device__ __forceinline__ void bulk_wait_read(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* Waits until they are complete. */
static __device__ __forceinline__ void bulk_wait(void) { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* Orders this thread's writes to shared memory before reads by wgmma and the TMA unit (the async proxy). If another
   thread issues those, a barrier must follow. */
static __device__ __forceinline__ void async_proxy_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for global memory, between CTAs: in the writer before it signals, in the reader after it has seen the
   signal. */
static __device__ __forceinline__ void async_proxy_fence_global(void) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

#endif
