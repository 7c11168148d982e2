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
typedef struct fattni_softmax_state_f64 {
    double m, l;
} fattni_softmax_state_f64;
typedef struct fattni_softmax_state_f32 {
    float m, l;
} fattni_softmax_state_f32;

fattni_softmax_state_f64 fattni_softmax_start_f64(void);
fattni_softmax_state_f64 fattni_softmax_add_f64(fattni_softmax_state_f64 x, const double *s, int64_t n);
/* The state of two disjoint parts of a row together. */
fattni_softmax_state_f64 fattni_softmax_merge_f64(fattni_softmax_state_f64 x, fattni_softmax_state_f64 y);
double fattni_softmax_lse_f64(fattni_softmax_state_f64 x); /* L of what it has seen */

fattni_softmax_state_f32 fattni_softmax_start_f32(void);
fattni_softmax_state_f32 fattni_softmax_add_f32(fattni_softmax_state_f32 x, const float *s, int64_t n);
fattni_softmax_state_f32 fattni_softmax_merge_f32(fattni_softmax_state_f32 x, fattni_softmax_state_f32 y);
float fattni_softmax_lse_f32(fattni_softmax_state_f32 x);

#endif
