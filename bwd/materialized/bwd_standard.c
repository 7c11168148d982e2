/* FATTN_ALGO_STANDARD, backward: the row of the dispatch table. */
#include "bwd/materialized/bwd_standard.h"

#include "core/cpu/scores.h"

#include <stdio.h>

fattni_bwd_standard_layout fattni_bwd_standard_plan(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(fattni_real(p));
    const bool narrow = fattni_is_narrow(p);
    const int64_t rows = FATTNI_STANDARD_ROWS, planes = p->B * p->Hq;
    fattni_bwd_standard_layout l = {0};
    l.dP = fattni_standard_reserve(&l.scratch, planes * p->Sq * p->Sk, element);
    l.delta = fattni_standard_reserve(&l.scratch, planes * p->Sq, element);
    const bool q = fattni_standard_direct(&p->q, p->D), k = fattni_standard_direct(&p->k, p->D);
    const bool v = fattni_standard_direct(&p->v, p->Dv);
    l.q = fattni_standard_reserve(&l.thread, q ? 0 : p->Sq * p->D, element);
    l.k = fattni_standard_reserve(&l.thread, k ? 0 : p->Sk * p->D, element);
    l.v = fattni_standard_reserve(&l.thread, v ? 0 : p->Sk * p->Dv, element);
    l.d_o = fattni_standard_reserve(&l.thread, p->Sq * p->Dv, element); /* a query may lack d_o */
    l.x = fattni_standard_reserve(&l.thread, p->softcap > 0 ? rows * p->Sk : 0, element);
    l.P = fattni_standard_reserve(&l.thread, narrow ? p->Sk : 0, element);
    l.dropped = fattni_standard_reserve(&l.thread, p->drop_T || narrow ? rows * rows : 0, element);
    l.grad = fattni_standard_reserve(&l.thread, rows * p->D, element);
    l.dv = fattni_standard_reserve(&l.thread, rows * p->Dv, element);
    l.sums = fattni_standard_reserve(&l.thread, p->bias.present ? fattni_max(p->max_k, 1) : 0,
                                     sizeof(double));
    return l;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_bwd_standard_layout l = fattni_bwd_standard_plan(p);
    out->workspace = l.scratch + (size_t)fattni_standard_threads(ctx, p) * l.thread;
    out->saved = fattni_standard_saved(p);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_bwd_standard_%s", fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    if (p->dtype == FATTN_F64) return fattni_bwd_standard_f64(ctx, p);
    return fattni_bwd_standard_f32(ctx, p);
}

const fattni_kernel fattni_bwd_standard = {
    .family = "fattn_bwd_standard",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .refuses = fattni_standard_refuses,
    .plan = plan,
    .run = run,
};
