/* The forward entry points: query and run. */
#include "core/attention/kernel.h"

#include <string.h>

static size_t planes(const fattni_problem *p) { return (size_t)p->B * (size_t)p->Hq; }

/* Saturates: N x N of a large problem may be more than an address can count. */
static size_t times(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

/* When the query has no d_o, bytes for each that a call may bring: of q's dtype or F32, of any strides,
   the best of which every kernel takes. */
static void plan_backward(const fattn_ctx *ctx, const fattni_kernel *k, const fattni_problem *p,
                          fattni_kernel_plan *out) {
    const int32_t dtypes[2] = {(int32_t)p->dtype, p->lse.dtype};
    k->plan(ctx, p, out);
    for (int n = 0; p->any_d_o && n < 2; ++n) {
        fattni_problem with = *p;
        fattni_kernel_plan plan = {0};
        with.d_o.p = NULL, with.d_o.dtype = dtypes[n];
        with.d_o.s[0] = with.d_o.s[1] = 0, with.d_o.s[2] = fattni_round_up(p->Dv, FATTNI_ALIGN);
        if (k->refuses(ctx, &with)) continue;
        k->plan(ctx, &with, &plan);
        if (plan.workspace > out->workspace) out->workspace = plan.workspace;
    }
}

fattn_status fattn_attention_query(fattn_ctx *ctx, const fattn_attention_params *p,
                                   const fattn_attention_io *io, fattn_attention_plan *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "query: out is NULL");
    fattn_attention_plan plan;
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_plan", out, &plan, sizeof plan));
    const uint32_t size = plan.struct_size;
    fattni_problem fwd, bwd;
    FATTNI_TRY(fattni_problem_init(ctx, p, io, FATTNI_FWD, false, &fwd));
    FATTNI_TRY(fattni_problem_init(ctx, p, io, FATTNI_BWD, false, &bwd));
    const fattni_kernel *fwd_kernel, *bwd_kernel;
    FATTNI_TRY(fattni_pick(ctx, fattni_fwd_table, &fwd, &fwd_kernel));
    FATTNI_TRY(fattni_pick(ctx, fattni_bwd_table, &bwd, &bwd_kernel));
    fattni_kernel_plan f = {0}, b = {0};
    fwd_kernel->plan(ctx, &fwd, &f);
    plan_backward(ctx, bwd_kernel, &bwd, &b);

    const size_t rows = fwd.packed ? (size_t)fwd.rows_q * (size_t)fwd.Hq
                                   : planes(&fwd) * (size_t)fwd.Sq;
    const size_t matrix = times(planes(&fwd) * (size_t)fwd.Sq, (size_t)fwd.Sk);
    plan = (fattn_attention_plan){
        .struct_size = size,
        .deterministic = b.deterministic,
        .fwd_workspace = f.workspace,
        .bwd_workspace = b.workspace,
        .saved_bytes = f.saved,
        .lse_bytes = rows * fattn_dtype_size((fattn_dtype)fwd.lse.dtype),
        .materialized_bytes = times(matrix, fattn_dtype_size(fwd.dtype) + (fwd.drop_T ? 1 : 0)),
    };
    memcpy(plan.fwd_kernel, f.name, sizeof plan.fwd_kernel);
    memcpy(plan.bwd_kernel, b.name, sizeof plan.bwd_kernel);
    memcpy(out, &plan, size < sizeof plan ? size : sizeof plan);
    return FATTN_OK;
}

fattn_status fattn_attention_fwd(fattn_ctx *ctx, const fattn_attention_params *p,
                                 const fattn_attention_io *io) {
    return fattni_run(ctx, p, io, FATTNI_FWD, fattni_fwd_table);
}
