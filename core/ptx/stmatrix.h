/* stmatrix: four 8x8 matrices of 16-bit elements from mma fragments to shared memory, the inverse of
   ldmatrix. Lane l gives the address of row l%8 of matrix l/8. Needs sm_90. */
#ifndef FATTNI_PTX_STMATRIX_H
#define FATTNI_PTX_STMATRIX_H

#include <stdint.h>

static __device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Each matrix transposed. */
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ void store_shared_4(uint32_t address, const float x[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}
static __device__ __forceinline__ void store_shared_words(uint32_t address, const uint32_t x[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3])
                 : "memory");
}
static __device__ __forceinline__ void load_shared_4(uint32_t x[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

#endif
