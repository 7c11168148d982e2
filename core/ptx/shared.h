/* Loads and stores of shared memory by 32-bit addresses; those of 16 bytes at multiples of 16. */
#ifndef FATTNI_CORE_PTX_SHARED_H
#define FATTNI_CORE_PTX_SHARED_H

#include <stdint.h>

static __device__ __forceinline__ void store_shared_4(uint32_t address, const float x[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
static __device__ __forceinline__ void store_shared_words(uint32_t address, const uint32_t x[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
static __device__ __forceinline__ void load_shared_4(uint32_t x[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
static __device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
static __device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
static __device__ __forceinline__ void store_shared_half(uint32_t address, uint16_t x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}
/* By threads that store the same to one address, in no order: a race without a consequence, which the emulation of
   tests/cuda/emulated knows by these names. */
static __device__ __forceinline__ void store_same(float *to, float x) { *to = x; }
static __device__ __forceinline__ void store_same_integer(volatile int *to, int x) { *to = x; }
static __device__ __forceinline__ void store_same_4(uint32_t address, const float x[4]) { store_shared_4(address, x); }

#endif
