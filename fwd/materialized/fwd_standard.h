/* The textbook forward: one body, two dtypes. */
#ifndef FATTNI_FWD_MATERIALIZED_FWD_STANDARD_H
#define FATTNI_FWD_MATERIALIZED_FWD_STANDARD_H

#include "core/materialized/standard.h"

/* One thread's scratch: byte offsets, and the bytes in all. */
typedef struct fattni_fwd_standard_scratch {
    size_t q, k, v; /* copies of rows that a BLAS cannot take in place */
    size_t P;       /* [ROWS,Sk] 16 bits: before they are rounded */
    size_t dropped; /* [ROWS,Sk] keep P */
    size_t o;       /* [ROWS,Dv] */
    size_t bytes;
} fattni_fwd_standard_scratch;

fattni_fwd_standard_scratch fattni_fwd_standard_layout(const fattni_problem *p);
fattn_status fattni_fwd_standard_f32(fattn_ctx *ctx, const fattni_problem *p);
fattn_status fattni_fwd_standard_f64(fattn_ctx *ctx, const fattni_problem *p);

#endif
