/* What rounding takes off the values of a channel, on the CPU and on a GPU: its mean belongs to v_mean. Inputs of 16
   bits are few numbers, so that the errors of their codes need not have a mean of 0, and O has that mean whole, however
   many keys it sums over. */
#ifndef FATTNI_CORE_FP8_REST_H
#define FATTNI_CORE_FP8_REST_H

#include "core/tensor/numeric.h"

#include <math.h>

/* value - code, in units of 2^-12: integers, whose sums are the same in any order. At most 16 of a chunk's 128 keys, so
   that their sum has 31 bits; 0 for NaN. Adding 1.5 2^23 leaves the nearest integer in the low bits. */
FATTNI_INLINE int32_t fattni_fp8_rest(float value, float code) {
    const float rest = value - code;
    if (!(fabsf(rest) <= 16)) return 0;
    return (int32_t)(fattni_float_bits(rest * 0x1p12f + 0x1.8p23f) - 0x4b400000u);
}

/* mean + scale mean(value - code). */
FATTNI_INLINE float fattni_fp8_mean(float mean, float scale, int64_t rests, int64_t keys) {
    return fmaf(scale, (float)rests * 0x1p-12f / (float)keys, mean);
}

#endif
