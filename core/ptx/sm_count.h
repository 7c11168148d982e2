/* The number of SMs (PTX ISA, "%nsmid"), or a few more where some are disabled: for guesses at which CTA runs where. */
#ifndef FATTNI_CORE_PTX_SM_COUNT_H
#define FATTNI_CORE_PTX_SM_COUNT_H

#include <stdint.h>

static __device__ __forceinline__ uint32_t sm_count(void) {
    uint32_t n;
    asm("mov.u32 %0, %%nsmid;" : "=r"(n));
    return n;
}

#endif
