/* cp.async: from global to shared memory without passing through registers. */
#ifndef FATTNI_CORE_PTX_CP_ASYNC_H
#define FATTNI_CORE_PTX_CP_ASYNC_H

#include <stdint.h>

/* Writes 16 bytes, of which the first `bytes` (0 or 16 here) are read and the others are 0. */
static __device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* The same for 4 bytes. */
static __device__ __forceinline__ void cp_async_4(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until at most the n newest groups are pending; n is a constant. */
#define cp_async_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

#endif
