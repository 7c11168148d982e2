/* Loads of what other CTAs have written, from any kind of memory (PTX ISA, "ld", "memory consistency model"): they do
   not come from L1. */
#ifndef FATTNI_CORE_PTX_RELAXED_H
#define FATTNI_CORE_PTX_RELAXED_H

#include <stdint.h>

static __device__ __forceinline__ int load_relaxed_integer(const int32_t *p) {
    int x;
    asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
static __device__ __forceinline__ float load_relaxed(const float *p) {
    float x;
    asm volatile("ld.relaxed.gpu.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
static __device__ __forceinline__ float2 load_relaxed_2(const float *p) {
    float2 x;
    asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
    return x;
}

#endif
