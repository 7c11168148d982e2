/* ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to mma fragments. Lane l gives the address of row
   l%8 of matrix l/8; register n gets matrix n. */
#ifndef FATTNI_CORE_PTX_LDMATRIX_H
#define FATTNI_CORE_PTX_LDMATRIX_H

#include <stdint.h>

/* The 32-bit address of p in the shared state space, and back. */
static __device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
static __device__ __forceinline__ void *shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* Each matrix transposed. */
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#endif
