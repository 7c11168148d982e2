/* Rotary positions (autograd_c/ops/sequence/op_rope.c), for fattn_fp8, with the same bits on the CPU and on a GPU:
   angles are integers, in units of 2^-64 of a turn, cosine and sine Taylor polynomials in F32 within an eighth of a
   turn of 0. They are off by 1e-7 at most, to which a position p adds 1e-16 p. */
#ifndef FATTNI_CORE_FP8_ROPE_H
#define FATTNI_CORE_FP8_ROPE_H

#include "core/tensor/numeric.h"

#include <math.h>

/* Angle from one position to the next of pair i of `half`: base^(-i/half). Host only, so that libm's pow is one. */
static inline uint64_t fattni_fp8_frequency(double base, int64_t i, int64_t half) {
    const double turns = pow(base, -(double)i / (double)half) / 6.283185307179586;
    return (uint64_t)((turns - floor(turns)) * 0x1p64);
}

FATTNI_INLINE void fattni_fp8_angle(int64_t position, uint64_t frequency, float *cosine, float *sine) {
    const uint64_t turns = (uint64_t)position * frequency + ((uint64_t)1 << 61); /* and an eighth */
    const uint32_t quarter = (uint32_t)(turns >> 62);
    const int32_t rest = (int32_t)((uint32_t)(turns >> 30) ^ 0x80000000u); /* of the nearest quarter */
    const float x = (float)rest * (1.5707964f * 0x1p-32f), xx = x * x;
    const float s5 = fmaf(xx, 1 / 362880.0f, -1 / 5040.0f), s3 = fmaf(xx, s5, 1 / 120.0f), s1 = fmaf(xx, s3, -1 / 6.0f),
                s = fmaf(x * xx, s1, x);
    const float c8 = fmaf(xx, -1 / 3628800.0f, 1 / 40320.0f), c6 = fmaf(xx, c8, -1 / 720.0f),
                c4 = fmaf(xx, c6, 1 / 24.0f), c2 = fmaf(xx, c4, -0.5f), c = fmaf(xx, c2, 1.0f);
    const float u = quarter % 2 ? s : c, v = quarter % 2 ? c : s; /* of cosine and sine, but for signs */
    *cosine = quarter == 1 || quarter == 2 ? -u : u;
    *sine = quarter >= 2 ? -v : v;
}

/* The first and the second element of a pair, turned. */
FATTNI_INLINE float fattni_fp8_turn_low(float low, float high, float cosine, float sine) {
    const float product = high * sine;
    return fmaf(low, cosine, -product);
}
FATTNI_INLINE float fattni_fp8_turn_high(float low, float high, float cosine, float sine) {
    const float product = high * cosine;
    return fmaf(low, sine, product);
}

#endif
