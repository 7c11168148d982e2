/* Scores of F32 and F64 calls, one at a time, for kernels that are rare. */
#ifndef FATTNI_CORE_DEVICE_SCORE_REAL_H
#define FATTNI_CORE_DEVICE_SCORE_REAL_H

#include "core/device/float_types.cuh"

/* Score of row i and key j from its dot product, -inf where the row does not see the key; every step rounded by
   itself, so that the bits are the same wherever this is inlined. dcap: 1 - tanh^2 under a softcap. */
DEVICE real score(real x, real *dcap, const fattni_attention_args *a, const sequence *s, int b, int h, int i, int j) {
    if (i >= s->Sq || j >= s->Sk || j < i + s->lo || j > i + s->hi) return -(real)INFINITY;
    x = rounded_product(ARG(a, scale), x);
    if (ARG(a, softcap) > 0) {
        const real t = tanh(x / ARG(a, softcap));
        *dcap = 1 - t * t;
        x = rounded_product(ARG(a, softcap), t);
    }
    if (a->alibi.p) x = fma(-real_at(&a->alibi, h), fabs((real)(i - j + s->diagonal)), x);
    if (a->bias.p) x += ((const real *)a->bias.p)[b * a->bias.b + h * a->bias.h + i * a->bias.row + j * a->bias.column];
    return x;
}

#endif
