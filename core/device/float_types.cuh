/* The number type of the F32 and F64 kernels. Include after defining K_F64 (1 or 0). */
#ifndef FATTNI_CORE_DEVICE_FLOAT_TYPES_H
#define FATTNI_CORE_DEVICE_FLOAT_TYPES_H

#include "core/device/sequence.cuh"

#include <fattn/attention.h>

#if K_F64
typedef double real;
#define ARG(a, name) ((a)->name##_f64) /* scale, softcap, keep_scale */
#else
typedef float real;
#define ARG(a, name) ((a)->name)
#endif

enum { VECTOR = 16 / sizeof(real) };
typedef struct __align__(16) vector {
    real e[VECTOR];
}
vector;

DEVICE real real_at(const fattni_line *line, int n) { return ((const real *)line->p)[n * line->step]; }

/* Where row i of (sequence, head) lies in a view, and in arrays [B,Hq,rows_q] of the workspace. */
DEVICE real *row_at(const fattni_view *view, const sequence *s, int head, int64_t row) {
    return (real *)view->p + s->batch * view->b + head * view->h + row * view->row;
}
DEVICE int64_t row_number(const fattni_attention_args *a, const sequence *s, int h, int i) {
    return ((int64_t)s->batch * a->Hq + h) * a->rows_q + s->q0 + i;
}

/* Rounded: not fused with the subtraction of a row's maximum, which has been rounded. */
DEVICE real rounded_product(real x, real y) {
#if K_F64
    return __dmul_rn(x, y);
#else
    return __fmul_rn(x, y);
#endif
}

/* exp(part - whole), where part is a term of whole = log(sum of exp): never inf - inf. */
DEVICE real share_of(real part, real whole) { return part == whole ? (real)1 : exp(part - whole); }

#endif
