/* fattn/check.h - compare two tensors; compare a tape's gradients with finite differences. */
#ifndef FATTN_CHECK_H
#define FATTN_CHECK_H

#include <fattn/tape.h>

typedef struct fattn_tolerance {
    double atol, rtol, cosine;
} fattn_tolerance; /* 0 = from dtype */

typedef struct fattn_report {
    uint32_t struct_size;
    int32_t passed;
    int64_t checked, failed, nonfinite; /* nonfinite: NaN or Inf on one side only, in a gradcheck
                                               on either side: also failed */
    double max_abs, max_rel, rms;       /* of got - want; max_rel relative to max(|want|, atol) */
    double cosine;                      /* distance 1 - 2<a,b>/(<a,a>+<b,b>): depends on scale, too */
    int32_t worst_input, reserved;      /* gradcheck: which input */
    int64_t worst_at[FATTN_MAX_DIMS];
    double worst_got, worst_want;
    double baseline; /* compare: max_abs of the low-precision reference */
} fattn_report;

/* got against want, element by element: |got - want| <= atol + rtol*|want|. With baseline != NULL
   the bound is factor times the largest error that an unfused implementation in the same dtype
   makes against want, plus a floor of two roundings of want in got's dtype.
   FATTN_E_MISMATCH when an element fails, or, without a baseline and with rtol below 1, the cosine
   distance exceeds its tolerance, but for tensors that are within atol, or whose squares overflow: errors
   within their bounds may be biased. The report is written either way. */
FATTN_API FATTN_CHECKED fattn_status fattn_compare(fattn_ctx *ctx, const fattn_tensor *got, const fattn_tensor *want,
                                                   const fattn_tensor *baseline, double factor, fattn_tolerance tol,
                                                   fattn_report *out);

/* Builds a graph over in[0..n_in-1]; returns its output, any shape. */
typedef fattn_var (*fattn_graph_fn)(fattn_tape *t, const fattn_var *in, int n_in, void *user);

typedef struct fattn_gradcheck_options {
    uint32_t struct_size;
    int32_t order;       /* 0 = 2: central; 4: five-point */
    double step;         /* 0 = DBL_EPSILON^(1/3), order 4: ^(1/5); times max(1,|x|), rounded so
                            that x+h is exact */
    int64_t max_coords;  /* per input; 0 = all, else a Philox sample that contains the first and last */
    uint64_t seed;       /* of the random cotangent that is contracted with the output */
    fattn_tolerance tol; /* 0 = atol 1e-8, rtol 1e-6; F32 2^-16 both, that atol times the input's
                            largest gradient where it exceeds 1; any cosine distance */
} fattn_gradcheck_options;

/* Inputs are all F64 or all F32, on the context's device; I32 inputs are passed on and not
   differentiated. With F32 the gradients are computed in F32; differences are always taken in F64, at
   the same points: fn must be able to build its graph in both dtypes. Gradients are computed twice, stored
   over NaN and then added: an op that adds where d_in_fresh is 1, or overwrites where it is 0, fails.
   Returns FATTN_E_MISMATCH when a coordinate fails; the report is written either way. */
FATTN_API FATTN_CHECKED fattn_status fattn_gradcheck(fattn_ctx *ctx, fattn_graph_fn fn, void *user,
                                                     const fattn_tensor *inputs, int n,
                                                     const fattn_gradcheck_options *opt, fattn_report *out);

#endif
