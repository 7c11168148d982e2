/* A load with acquire and an addition with release semantics, between CTAs of the device (PTX ISA, "memory consistency
   model"): a thread that loads the sum sees what was written before the addition, also by other threads of that CTA if
   a CTA barrier came in between. */
#ifndef FATTNI_CORE_PTX_ACQUIRE_H
#define FATTNI_CORE_PTX_ACQUIRE_H

#include <stdint.h>

static __device__ __forceinline__ int load_acquire(const int32_t *p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
static __device__ __forceinline__ void add_release(int32_t *p, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

#endif
