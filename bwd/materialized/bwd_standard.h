/* The textbook backward: one body, two dtypes. */
#ifndef FATTNI_BWD_MATERIALIZED_BWD_STANDARD_H
#define FATTNI_BWD_MATERIALIZED_BWD_STANDARD_H

#include "core/materialized/standard.h"

/* Byte offsets: of arrays in the workspace, and inside one thread's scratch. */
typedef struct fattni_bwd_standard_layout {
    size_t dP;           /* [B,Hq,Sq,Sk]: dP, then G, then dX, in place */
    size_t delta;        /* [B,Hq,Sq] */
    size_t scratch;      /* the threads' areas start here */
    size_t q, k, v, d_o; /* in a thread's area: copies of rows that a BLAS cannot take in place */
    size_t x;            /* [ROWS,Sk] scores again, with a softcap */
    size_t P;            /* [Sk] a row of P, when it is stored in 16 bits */
    size_t dropped;      /* [ROWS,ROWS] keep P, with dropout or from 16 bits */
    size_t grad;         /* [ROWS,D] of dq or dk */
    size_t dv;           /* [ROWS,Dv] */
    size_t sums;         /* [max_k] doubles: one row of d_bias */
    size_t thread;       /* bytes of one area */
} fattni_bwd_standard_layout;

fattni_bwd_standard_layout fattni_bwd_standard_plan(const fattni_problem *p);
fattn_status fattni_bwd_standard_f32(fattn_ctx *ctx, const fattni_problem *p);
fattn_status fattni_bwd_standard_f64(fattn_ctx *ctx, const fattni_problem *p);

#endif
