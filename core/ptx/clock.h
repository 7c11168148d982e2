/* The SM's cycle counter, for waits of a few hundred cycles; 32 bits, so it wraps around. */
#ifndef FATTNI_CORE_PTX_CLOCK_H
#define FATTNI_CORE_PTX_CLOCK_H

#include <stdint.h>

static __device__ __forceinline__ uint32_t clock_now(void) {
    uint32_t cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

#endif
