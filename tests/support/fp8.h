/* A second statement of FATTN_FP8 in double: the copies from their definition in fattn/fp8.h, or those that the library
   has made, and forward on them. */
#ifndef TEST_FP8_H
#define TEST_FP8_H

#include "attention.h"

#include <fattn/fp8.h>

/* The copies of the library, in memory whose bytes were all 0xff. */
typedef struct fp8_copies {
    fattn_fp8 fp8;
    void *memory;
    size_t bytes;
} fp8_copies;
/* By fattn_fp8_layout and fattn_fp8_quantize, with this rope_base; a->io.fp8 is as before. */
fp8_copies fp8_quantize_turned(const attention *a, float rope_base);
fp8_copies fp8_quantize(const attention *a); /* without */
/* fattn_attention_fwd that reads them. */
void fp8_forward(attention *a, const fp8_copies *copies);
void fp8_free(fp8_copies *c);

/* An element, also of dimensions with a stride of 0. */
double fp8_get(const fattn_tensor *t, int64_t n0, int64_t n1, int64_t n2, int64_t n3);
/* The column of v8 in which key j of a sequence lies, counted from the sequence's first. */
int64_t fp8_column(int64_t j);
/* The nearest E4M3 number; ties to even, beyond 448 it is 448. */
double fp8_round(double x);
/* The nearest code of q or k: that, or with FATTN_FP8_INT8 the integer in -127..127; ties to even. */
double fp8_code(uint32_t flags, double x);
/* The largest. */
double fp8_largest(uint32_t flags);

/* Codes as numbers, and what they are multiplied by, all row-major: q8 [B,Hq,Sq,D], k8 [B,Hkv,Sk,D],
   v8 [B,Hkv,Sk,Dv], k_scale [B,Hkv,Sk] for each key, others as in fattn/fp8.h. Before rounding, too: q, k, v over their
   scales. */
typedef struct fp8_numbers {
    double *q8, *k8, *v8, *q, *k, *v;
    double *q_scale, *q_shift, *k_scale, *v_scale, *v_mean, *k_mean;
} fp8_numbers;
fp8_numbers fp8_numbers_of(const attention *a);                             /* in double from q, k, v */
fp8_numbers fp8_numbers_read(const attention *a, const fp8_copies *copies); /* the library's; q, k, v, k_mean NULL */
void fp8_numbers_free(fp8_numbers *n);

/* Forward in double on these, with P rounded relative to the maximum so far, by tiles of 64 keys. o as T_O, lse as
   T_LSE, row-major; elements not in use are NaN. ties, as o unless it is NULL: by what O changes where every 64 P that
   lies at a tie, up to errors of F32 in its score, is rounded the other way. */
void fp8_model(const attention *a, const fp8_numbers *n, double *o, double *lse, double *ties);

/* 100 |x - want| / |want|, as norms over what is in use of tensor id. */
double fp8_error(const attention *a, enum tensor_id id, const double *x, const double *want);
/* Row-major, as double. */
double *fp8_values(const attention *a, enum tensor_id id);

#endif
