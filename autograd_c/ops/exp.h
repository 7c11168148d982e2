/* exp for loops: in float one that compilers vectorize, in double libm's. */
#ifndef FATTNI_AUTOGRAD_OPS_EXP_H
#define FATTNI_AUTOGRAD_OPS_EXP_H

#include "core/tensor/numeric.h"

#include <math.h>

/* x = n ln 2 + r, |r| <= ln(2)/2; exp(r) = 1 + r + r^2 q(r), q fitted to the least relative error
   (3e-9). Within 1.4 units of 2^-24; 0 below -87.33, infinity above 88.37, NaN for NaN. */
static inline float fattni_exp_f32(float x) {
    const float shift = 0x1.8p23f; /* the sum's low bits are n */
    const float shifted = x * 1.44269504f + shift, n = shifted - shift;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float q = 1.38145289e-3f;
    q = q * r + 8.3687501e-3f;
    q = q * r + 4.16683927e-2f;
    q = q * r + 1.66665196e-1f;
    q = q * r + 4.9999994e-1f;
    const float scale = fattni_bits_float((fattni_float_bits(shifted) << 23) + 0x3f800000u);
    const float y = (q * (r * r) + r + 1.0f) * scale;
    /* Masks instead of choices: compilers that honour floating-point traps do not vectorize
       choices. */
    const uint32_t under = 0u - (uint32_t)(x < -87.33f), over = 0u - (uint32_t)(x > 88.37f);
    return fattni_bits_float((fattni_float_bits(y) & ~(under | over)) | (over & 0x7f800000u));
}

static inline double fattni_exp_f64(double x) { return exp(x); }

#endif
