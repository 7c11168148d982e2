/* exp and tanh for loops: in float such that compilers vectorize, in double libm's. */
#ifndef FATTNI_AUTOGRAD_OPS_EXP_H
#define FATTNI_AUTOGRAD_OPS_EXP_H

#include "core/tensor/numeric.h"

#include <math.h>

/* exp(x) = (1 + tail) scale: x = n ln 2 + r, |r| <= ln(2)/2, scale = 2^n; tail = r + r^2 q(r), q fitted to the
   least relative error (3e-9). For -87.33 <= x <= 88.37. */
typedef struct fattni_exp_parts {
    float tail, scale;
} fattni_exp_parts;

static inline fattni_exp_parts fattni_exp_parts_of(float x) {
    const float shift = 0x1.8p23f; /* the sum's low bits are n */
    const float shifted = x * 1.44269504f + shift, n = shifted - shift;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float q = 1.38145289e-3f;
    q = q * r + 8.3687501e-3f;
    q = q * r + 4.16683927e-2f;
    q = q * r + 1.66665196e-1f;
    q = q * r + 4.9999994e-1f;
    return (fattni_exp_parts){q * (r * r) + r, fattni_bits_float((fattni_float_bits(shifted) << 23) + 0x3f800000u)};
}

/* Within 1.4 units of 2^-24; 0 below -87.33, infinity above 88.37, NaN for NaN. */
static inline float fattni_exp_f32(float x) {
    const fattni_exp_parts e = fattni_exp_parts_of(x);
    const float y = (e.tail + 1.0f) * e.scale;
    /* Masks instead of choices: compilers that honour floating-point traps do not vectorize
       choices. */
    const uint32_t under = 0u - (uint32_t)(x < -87.33f), over = 0u - (uint32_t)(x > 88.37f);
    return fattni_bits_float((fattni_float_bits(y) & ~(under | over)) | (over & 0x7f800000u));
}

static inline double fattni_exp_f64(double x) { return exp(x); }

/* tanh |x| = -t / (2 + t), t = exp(-2|x|) - 1 = (scale - 1) + scale tail, which keeps the last bits of a small x; from
   10 on it is 1. Integers are compared, for the reason above. NaN for NaN. */
static inline float fattni_tanh_f32(float x) {
    const uint32_t bits = fattni_float_bits(x), size = bits & 0x7fffffffu, ten = 0x41200000u;
    const fattni_exp_parts e = fattni_exp_parts_of(-2.0f * fattni_bits_float(size < ten ? size : ten));
    const float t = (e.scale - 1.0f) + e.scale * e.tail;
    const float y = (0.0f - t) / (2.0f + t);
    const uint32_t not_a_number = 0u - (uint32_t)(size > 0x7f800000u);
    return fattni_bits_float(fattni_float_bits(y) | (bits & 0x80000000u) | (not_a_number & 0x7fc00000u));
}

static inline double fattni_tanh_f64(double x) { return tanh(x); }

#endif
