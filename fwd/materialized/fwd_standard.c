/* FATTN_ALGO_STANDARD, forward: the row of the dispatch table. */
#include "fwd/materialized/fwd_standard.h"

#include "core/cpu/scores.h"

#include <stdio.h>

fattni_fwd_standard_scratch fattni_fwd_standard_layout(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(fattni_real(p));
    const int64_t rows = fattni_min(p->Sq, FATTNI_STANDARD_ROWS);
    fattni_fwd_standard_scratch s = {0};
    s.q = fattni_standard_reserve(&s.bytes, fattni_standard_direct(&p->q, p->D) ? 0 : rows * p->D,
                                  element);
    s.k = fattni_standard_reserve(&s.bytes, fattni_standard_direct(&p->k, p->D) ? 0 : p->Sk * p->D,
                                  element);
    s.v = fattni_standard_reserve(
        &s.bytes, fattni_standard_direct(&p->v, p->Dv) ? 0 : p->Sk * p->Dv, element);
    s.P = fattni_standard_reserve(&s.bytes, fattni_is_narrow(p) ? rows * p->Sk : 0, element);
    s.dropped = fattni_standard_reserve(&s.bytes, p->drop_T ? rows * p->Sk : 0, element);
    s.o = fattni_standard_reserve(&s.bytes, rows * p->Dv, element);
    return s;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_fwd_standard_scratch s = fattni_fwd_standard_layout(p);
    out->workspace = (size_t)fattni_standard_threads(ctx, p) * s.bytes;
    out->saved = fattni_standard_saved(p);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_standard_%s", fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    if (p->dtype == FATTN_F64) return fattni_fwd_standard_f64(ctx, p);
    return fattni_fwd_standard_f32(ctx, p);
}

const fattni_kernel fattni_fwd_standard = {
    .family = "fattn_fwd_standard",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .refuses = fattni_standard_refuses,
    .plan = plan,
    .run = run,
};
