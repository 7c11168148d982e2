/* Bytes of two words in any order, or their signs (PTX ISA, "prmt"). */
#ifndef FATTNI_CORE_PTX_PERMUTE_H
#define FATTNI_CORE_PTX_PERMUTE_H

#include <stdint.h>

/* Byte n of the result is byte s % 8 of y above x, s being nibble n of the selector; where s is 8 and more, 0xff if
   that byte's highest bit is set, else 0. */
static __device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
    return z;
}

#endif
