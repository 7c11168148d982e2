/* stmatrix: four 8x8 matrices of 16-bit elements from mma fragments to shared memory, the inverse of
   ldmatrix. Lane l gives the address of row l%8 of matrix l/8. Needs sm_90. */
#ifndef FATTNI_CORE_PTX_STMATRIX_H
#define FATTNI_CORE_PTX_STMATRIX_H

#include <stdint.h>

static __device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Each matrix transposed. */
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

#endif
