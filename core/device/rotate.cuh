/* Rotary positions on the device: one arithmetic for all kernels, so that they have the same bits; nothing is left to
   the compiler to fuse. Equations in autograd_c/ops/sequence/op_rope.c. */
#ifndef FATTNI_CORE_DEVICE_ROTATE_H
#define FATTNI_CORE_DEVICE_ROTATE_H

#include "core/device/helpers.cuh"

/* base^(-i/half): times a position it is the angle of pair i of `half` pairs. */
DEVICE double rotation_frequency(double base, int64_t i, int64_t half) { return pow(base, -(double)i / (double)half); }

DEVICE void rotation_at(double *cosine, double *sine, double position, double frequency) {
    sincos(__dmul_rn(position, frequency), sine, cosine);
}

/* Turns the pair (x, y). */
DEVICE void rotate_pair_f32(float *x, float *y, float cosine, float sine) {
    const float low = __fmaf_rn(*x, cosine, -__fmul_rn(*y, sine));
    *y = __fmaf_rn(*x, sine, __fmul_rn(*y, cosine));
    *x = low;
}
DEVICE void rotate_pair_f64(double *x, double *y, double cosine, double sine) {
    const double low = __fma_rn(*x, cosine, -__dmul_rn(*y, sine));
    *y = __fma_rn(*x, sine, __dmul_rn(*y, cosine));
    *x = low;
}

#endif
