/* The entry points of attention: query, forward, backward. */
#include "core/attention/kernel.h"

#include <string.h>

static size_t planes(const fattni_problem *p) { return (size_t)p->B * (size_t)p->Hq; }

/* Saturates: N x N of a large problem may exceed size_t. */
static size_t times(size_t a, size_t b) {
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

fattn_status fattn_attention_query(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io,
                                   fattn_attention_plan *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "query: out is NULL");
    fattn_attention_plan plan;
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_plan", out, &plan, sizeof plan));
    const uint32_t size = plan.struct_size;
    fattni_call f, b;
    FATTNI_TRY(fattni_prepare_both(ctx, p, io, &f, &b));
    const fattni_problem *const fwd = &f.p;

    const size_t rows = fwd->packed ? (size_t)fwd->rows_q * (size_t)fwd->Hq : planes(fwd) * (size_t)fwd->Sq;
    const size_t matrix = times(planes(fwd) * (size_t)fwd->Sq, (size_t)fwd->Sk);
    plan = (fattn_attention_plan){
        .struct_size = size,
        .deterministic = b.plan.deterministic,
        .fwd_workspace = f.plan.workspace,
        .bwd_workspace = b.plan.workspace,
        .saved_bytes = f.plan.saved,
        .lse_bytes = rows * fattn_dtype_size((fattn_dtype)fwd->lse.dtype),
        .materialized_bytes = times(matrix, fattn_dtype_size(fwd->dtype) + (fwd->drop_T ? 1 : 0)),
    };
    _Static_assert(sizeof plan.fwd_kernel == sizeof f.plan.name, "as long");
    memcpy(plan.fwd_kernel, f.plan.name, sizeof plan.fwd_kernel);
    memcpy(plan.bwd_kernel, b.plan.name, sizeof plan.bwd_kernel);
    memcpy(out, &plan, size < sizeof plan ? size : sizeof plan);
    return FATTN_OK;
}

fattn_status fattn_attention_fwd(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io) {
    fattni_call call;
    FATTNI_TRY(fattni_prepare(ctx, p, io, FATTNI_FWD, fattni_fwd_table, &call));
    return fattni_run(ctx, &call);
}

fattn_status fattn_attention_bwd(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io) {
    fattni_call call;
    FATTNI_TRY(fattni_prepare(ctx, p, io, FATTNI_BWD, fattni_bwd_table, &call));
    return fattni_run(ctx, &call);
}
