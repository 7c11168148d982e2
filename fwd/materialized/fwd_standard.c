/* FATTN_ALGO_STANDARD, forward on the CPU: S = scale Q K^T, P = softmax(S), O = P V, with P
   stored whole. A task is a block of rows of one head. */
#include "core/attention/dropout.h"
#include "core/cpu/scores.h"
#include "core/materialized/standard.h"
#include "fwd/cpu/softmax.h"

#include <math.h>

/* One thread's scratch: byte offsets, and the bytes in all. */
typedef struct layout {
    size_t q, k, v; /* copies of rows that a BLAS cannot take in place */
    size_t P;       /* [ROWS,Sk] 16 bits: before they are rounded */
    size_t dropped; /* [ROWS,Sk] keep P */
    size_t o;       /* [ROWS,Dv] */
    size_t bytes;
} layout;

static layout layout_of(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(fattni_real(p));
    const int64_t rows = fattni_min(p->Sq, FATTNI_STANDARD_ROWS);
    layout s = {0};
    s.q = fattni_standard_reserve(&s.bytes, fattni_standard_direct(&p->q, p->D) ? 0 : rows * p->D, element);
    s.k = fattni_standard_reserve(&s.bytes, fattni_standard_direct(&p->k, p->D) ? 0 : p->Sk * p->D, element);
    s.v = fattni_standard_reserve(&s.bytes, fattni_standard_direct(&p->v, p->Dv) ? 0 : p->Sk * p->Dv, element);
    s.P = fattni_standard_reserve(&s.bytes, fattni_is_narrow(p) ? rows * p->Sk : 0, element);
    s.dropped = fattni_standard_reserve(&s.bytes, p->drop_T ? rows * p->Sk : 0, element);
    s.o = fattni_standard_reserve(&s.bytes, rows * p->Dv, element);
    return s;
}

typedef struct job {
    const fattn_ctx *ctx;
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    layout layout;
    int64_t blocks; /* of rows, per head */
} job;

#define BODY "fwd/materialized/fwd_standard.inc"
#include "core/base/for_each_real.inc"

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_standard_why_unsupported(p);
    if (reason) return reason;
    const size_t workspace = (size_t)fattni_standard_threads(ctx, p) * layout_of(p).bytes;
    fattni_standard_plan(p, "fattn_fwd_standard", workspace, out);
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    job w = {.ctx = ctx,
             .p = p,
             .k = fattni_cpu_kernels_of(ctx, p->dtype),
             .layout = layout_of(p),
             .blocks = fattni_ceil_div(p->Sq, FATTNI_STANDARD_ROWS)};
    fattni_parallel(ctx, p->B * p->Hq * w.blocks, p->dtype == FATTN_F64 ? forward_block_f64 : forward_block_f32, &w);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_standard = {
    .family = "fattn_fwd_standard",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .plan = plan,
    .run = run,
};
