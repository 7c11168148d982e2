/* Divisions of ints by numbers that a launch knows. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_CORE_CUDA_DIVIDER_H
#define FATTNI_CORE_CUDA_DIVIDER_H

#include <stdint.h>

#ifdef __CUDACC__
#define FATTNI_DIVIDER static __host__ __device__ __forceinline__
#else
#define FATTNI_DIVIDER static inline
#endif

/* n / by for 0 <= n < 2^31, by a multiplication (Granlund and Montgomery 1994). */
typedef struct fattni_divider {
    uint32_t by, multiplier, shift;
} fattni_divider;
FATTNI_DIVIDER fattni_divider fattni_divider_of(int32_t by) {
    fattni_divider d = {(uint32_t)by, 0, 31};
    while ((uint64_t)1 << (d.shift - 31) < d.by) d.shift += 1;
    d.multiplier = (uint32_t)(((uint64_t)1 << d.shift) / d.by + 1);
    return d;
}
FATTNI_DIVIDER int fattni_divided(int n, const fattni_divider *d) {
    return (int)((uint64_t)(uint32_t)n * d->multiplier >> d->shift);
}
/* n becomes n / by; gives n % by. */
FATTNI_DIVIDER int fattni_divide(int *n, const fattni_divider *d) {
    const int quotient = fattni_divided(*n, d), rest = *n - quotient * (int)d->by;
    *n = quotient;
    return rest;
}

#endif
