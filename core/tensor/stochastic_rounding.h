/* Stochastic rounding from F32 to BF16 and F16 (Gupta et al. 2015, arXiv 1502.02551): to the neighbour of larger
   magnitude with a probability equal to the part of the distance that lies below x, so that the expected value is x.
   One source for host and device.

   `random` is 32 uniform bits, and the bits of x that do not fit are the fraction: up where random < fraction 2^32. A
   number that fits stays as it is, sign of zero included. Where there is no finite neighbour above, and for infinities
   and NaN, it is rounding to nearest, so that no finite parameter overflows by chance. */
#ifndef FATTNI_CORE_TENSOR_STOCHASTIC_ROUNDING_H
#define FATTNI_CORE_TENSOR_STOCHASTIC_ROUNDING_H

#include "core/tensor/philox.h"

/* Subnormal numbers of BF16 are F32's: all magnitudes are alike, and the step to the next binade is a carry. */
FATTNI_INLINE uint16_t fattni_bf16_stochastic(float x, uint32_t random) {
    const uint32_t u = fattni_float_bits(x);
    if ((u & 0x7fffffffu) >= 0x7f7f0000u) return fattni_float_to_bf16(x);
    return (uint16_t)((u >> 16) + (random < u << 16));
}

/* Below 2^-14 the neighbours are multiples of 2^-24. Of the fraction 32 bits count: all of them from 2^-33 on; below,
   the expected value is less than 2^-56 too small in magnitude. */
FATTNI_INLINE uint16_t fattni_f16_stochastic(float x, uint32_t random) {
    const uint32_t u = fattni_float_bits(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) return fattni_float_to_f16(x);
    if (magnitude >= 0x38800000u)
        return (uint16_t)(sign | (((magnitude - 0x38000000u) >> 13) + (random < magnitude << 19)));
    const float units = fattni_bits_float(magnitude) * 0x1p24f;
    const uint32_t below = (uint32_t)units, fraction = (uint32_t)((units - (float)below) * 0x1p32f); /* exact */
    return (uint16_t)(sign | (below + (random < fraction)));
}

/* dtype: F16 or BF16. */
FATTNI_INLINE uint16_t fattni_half_stochastic(int32_t dtype, float x, uint32_t random) {
    return dtype == FATTN_F16 ? fattni_f16_stochastic(x, random) : fattni_bf16_stochastic(x, random);
}

/* The random bits of elements 4n to 4n + 3 of an optimizer's params[param], in row-major order, in its update number
   `step`: a word each. The counter's plane, b*Hq+h to attention, is one that no dropout has: the seed may be the same.
   After 2^32 steps the bits repeat. */
FATTNI_RANDOM fattni_block fattni_rounding_bits(uint64_t seed, int64_t step, int32_t param, int64_t n) {
    const fattni_block counter = {{(uint32_t)n, (uint32_t)(n >> 32), 0xfffffffeu - (uint32_t)param, (uint32_t)step}};
    return fattni_philox(seed, counter);
}

/* That of element i, at the cost of all four. */
FATTNI_RANDOM uint32_t fattni_rounding_word(uint64_t seed, int64_t step, int32_t param, int64_t i) {
    const fattni_block r = fattni_rounding_bits(seed, step, param, i / 4);
    const uint32_t even = i & 2 ? r.w[2] : r.w[0], odd = i & 2 ? r.w[3] : r.w[1];
    return i & 1 ? odd : even; /* no indexed array, which would not stay in registers */
}

#endif
