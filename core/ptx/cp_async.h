/* cp.async: from global to shared memory without passing through registers. Before sm_80 there is none: the copy is
   done when the function returns. */
#ifndef FATTNI_CORE_PTX_CP_ASYNC_H
#define FATTNI_CORE_PTX_CP_ASYNC_H

#include <stdint.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
/* Writes 16 bytes, of which the first `bytes` (0 or 16 here) are read and the others are 0. */
static __device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* The same for 4 bytes. */
static __device__ __forceinline__ void cp_async_4(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Arrives on an mbarrier when this thread's copies so far are complete. */
static __device__ __forceinline__ void cp_async_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
/* Waits until at most the n newest groups are pending; n is a constant. */
#define cp_async_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
#else
static __device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, int bytes) {
    const uint4 x = bytes ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
static __device__ __forceinline__ void cp_async_4(uint32_t to, const void *from, int bytes) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bytes ? *(const uint32_t *)from : 0u) : "memory");
}
static __device__ __forceinline__ void cp_async_commit(void) {}
#define cp_async_wait(n)
#endif

#endif
