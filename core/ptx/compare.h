/* Comparisons of two 16-bit numbers at once (PTX ISA, "set"). */
#ifndef FATTNI_CORE_PTX_COMPARE_H
#define FATTNI_CORE_PTX_COMPARE_H

#include <stdint.h>

/* All bits of each half of the result where F16's |x| >= y, or one of them is NaN. */
static __device__ __forceinline__ uint32_t not_below_2(uint32_t x, uint32_t y) {
    uint32_t mask;
    asm("{.reg .b32 size; abs.f16x2 size, %1; set.geu.u32.f16x2 %0, size, %2;}" : "=r"(mask) : "r"(x), "r"(y));
    return mask;
}

#endif
