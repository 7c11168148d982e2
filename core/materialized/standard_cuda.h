/* FATTN_ALGO_STANDARD on the device: what the two passes of the textbook share.

   Every operand is first laid out as cuBLAS likes it, dense [B,H,S,D] of q's dtype with zeros past
   the end of a sequence: N x D is nothing beside N x N, and the query heads of one key head are
   then one matrix of group*Sq rows, so that each product of all heads is one call, whatever the
   strides, the lengths or the group. Products are stored in REAL: F64 for F64, else F32.

   A dense row r is (b Hq + h) Sq + i; S, P, dP are [B Hq Sq][Sk]. */
#ifndef FATTNI_CORE_MATERIALIZED_STANDARD_CUDA_H
#define FATTNI_CORE_MATERIALIZED_STANDARD_CUDA_H

#include "core/cuda/args.h"

typedef struct fattni_standard_args {
    fattni_cuda_args a;
    double scale, softcap, keep_scale;
    int32_t dtype, o_dtype, d_o_dtype, bias_dtype, given_dtype; /* given: statistics, F32 or F64 */
    int32_t reserved;
    void *S;       /* REAL: scale q.k, then exp(s - max); the place of P when that is REAL, too */
    void *P;       /* dtype */
    uint8_t *keep; /* NULL without dropout */
    void *dropped; /* dtype: keep P */
    void *kept;    /* REAL [B Hq Sq]: what a merge leaves of the old o; NULL without */
    void *
        weight; /* REAL [B Hq Sq]: sum of P over sum of the rounded P, which cancels the rounding of
                      a weight that dominates its row; NULL: P is not rounded */
    /* backward */
    void *dP;      /* REAL, then G */
    void *X;       /* REAL: scale/cap q.k, with a softcap only */
    void *dX;      /* dtype; the place of dP when that is REAL, too */
    void *delta;   /* REAL [B Hq Sq] */
    int64_t d_bias_lanes; /* threads of a block that share one element */
} fattni_standard_args;

/* A dense buffer and the caller's tensor. */
typedef struct fattni_dense_args {
    fattni_cuda_args a;
    fattni_view view;
    void *dense;          /* [B,heads,rows,width] */
    const void *kept;     /* REAL per dense row, or NULL: view = scale*dense + kept*view */
    const void *weight;   /* REAL per dense row that multiplies dense, or NULL */
    double scale;
    int64_t rows, width;
    int32_t view_dtype, dense_dtype;
    int32_t heads;
    int32_t keys;         /* rows are keys: k0 and Sk of a sequence */
    int32_t add, reserved; /* view += scale*dense */
} fattni_dense_args;

#ifndef __CUDACC__
#include "core/cuda/blas.h"
#include "core/materialized/standard.h"

const char *fattni_cuda_standard_refuses(const fattn_ctx *ctx, const fattni_problem *p);
static inline fattn_dtype fattni_standard_real(const fattni_problem *p) {
    return p->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
}
fattni_standard_args fattni_standard_args_of(const fattni_problem *p);

/* One of the caller's tensors on its way to or from a dense buffer. */
typedef struct fattni_dense {
    const fattni_array *array;
    void *dense;
    fattn_dtype dtype; /* of the dense side */
    int64_t width;
    bool keys;         /* [B,Hkv,Sk,..], not [B,Hq,Sq,..] */
} fattni_dense;
fattn_status fattni_standard_gather(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d);
fattn_status fattni_standard_scatter(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d,
                                     double scale, bool add);
/* o from forward's rows. */
fattn_status fattni_standard_scatter_o(fattn_ctx *ctx, const fattni_problem *p,
                                       const fattni_dense *d, const fattni_standard_args *x);

/* Products of all (b, key head): rows of queries G = group*Sq, keys Sk. a and b have q's dtype, c
   is REAL. */
fattn_status fattni_standard_rows_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                          double alpha, const void *rows, const void *keys, void *c,
                                          void *workspace); /* c[G,Sk] = alpha rows keys^T */
fattn_status fattni_standard_matrix_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                            const void *matrix, const void *keys, void *c,
                                            void *workspace); /* c[G,width] = matrix[G,Sk] keys */
fattn_status fattni_standard_matrix_by_rows(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                            const void *matrix, const void *rows, void *c,
                                            void *workspace); /* c[Sk,width] = matrix^T rows */
#endif

#endif
