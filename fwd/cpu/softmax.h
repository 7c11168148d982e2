/* Softmax of one row, two ways, in double and float.

   L = log( sum_j exp s_j + exp sink ), P_j = exp(s_j - L). A logit of -inf is masked: P is exactly
   0 there. A row without any logit has L = -inf. A sink of -inf means none, one of +inf takes all:
   P = 0, L = +inf. A NaN or +inf among the s_j makes L, and every P_j that is not 0, NaN. */
#ifndef FATTNI_FWD_CPU_SOFTMAX_H
#define FATTNI_FWD_CPU_SOFTMAX_H

#include "core/base/internal.h"

/* The safe softmax in three passes over memory: maximum, exponentials and their sum, quotients.
   P[n] may be s[n] itself. Returns L. */
double fattni_softmax_f64(const double *s, int64_t n, double sink, double *P);
float fattni_softmax_f32(const float *s, int64_t n, float sink, float *P);

/* The online softmax (Milakov and Gimelshein 2018) reads the row once. After any part of it, m is
   the maximum and l = sum exp(s_j - m); nothing yet: m = -inf, l = 0. FlashAttention is this, with
   the sum of P V rescaled along with l. */
typedef struct fattni_softmax_f64_state { double m, l; } fattni_softmax_f64_state;
typedef struct fattni_softmax_f32_state { float m, l; } fattni_softmax_f32_state;

fattni_softmax_f64_state fattni_softmax_f64_start(void);
fattni_softmax_f64_state fattni_softmax_f64_add(fattni_softmax_f64_state x, const double *s,
                                                int64_t n);
/* The state of two disjoint parts of a row together. */
fattni_softmax_f64_state fattni_softmax_f64_merge(fattni_softmax_f64_state x,
                                                  fattni_softmax_f64_state y);
double fattni_softmax_f64_lse(fattni_softmax_f64_state x); /* L of what it has seen */

fattni_softmax_f32_state fattni_softmax_f32_start(void);
fattni_softmax_f32_state fattni_softmax_f32_add(fattni_softmax_f32_state x, const float *s,
                                                int64_t n);
fattni_softmax_f32_state fattni_softmax_f32_merge(fattni_softmax_f32_state x,
                                                  fattni_softmax_f32_state y);
float fattni_softmax_f32_lse(fattni_softmax_f32_state x);

#endif
