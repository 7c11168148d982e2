/* From a validated problem to the kernel that runs it. */
#include "core/attention/kernel.h"
#include "core/base/device.h"
#include "core/fp8/fp8.h"

#include <stdio.h>

static const char *algorithm_name(int32_t a) {
    static const char *const names[] = {"AUTO", "STANDARD", "FLASH1", "FLASH2"};
    return names[a];
}

fattn_status fattni_pick(fattn_ctx *ctx, const fattni_kernel *const *table, const fattni_problem *p,
                         const fattni_kernel **out, fattni_kernel_plan *plan) {
    const bool fp8 = p->flags & FATTN_FP8, unified = p->pass == FATTNI_FWD && (p->flags & FATTN_UNIFIED_MAX);
    const char *reason = unified ? "has no kernel with FATTN_UNIFIED_MAX for it"
                         : fp8   ? "has no kernel for FATTN_FP8 on this device"
                                 : "has no kernel for this algorithm";
    const char *family = "this build";
    if (ctx->ops->use && !fp8) ctx->ops->use(ctx, p->dtype);
    for (; *table; ++table) {
        const fattni_kernel *const k = *table;
        if (k->device != ctx->device || k->fp8 != fp8 || !(k->algorithms & (1u << p->algorithm)) ||
            (k->dtypes && !(k->dtypes & (1u << p->dtype))) || (unified && !k->unified))
            continue;
        *plan = (fattni_kernel_plan){0};
        const char *const why_not = k->plan(ctx, p, plan);
        if (!why_not) {
            plan->saved += fattni_o_rest_bytes(p);
            *out = k;
            return FATTN_OK;
        }
        reason = why_not;
        family = k->family;
    }
    char text[160];
    fattni_problem_text(p, text, sizeof text);
    return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "%s, algorithm %s: %s %s", text, algorithm_name(p->algorithm),
                          family, reason);
}

static fattn_status check_memory(fattn_ctx *ctx, const char *name, const void *p, size_t given, size_t needed) {
    if (needed == 0) return FATTN_OK;
    if (!p || given < needed)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "%s: %zu bytes needed, %zu given%s", name, needed, p ? given : 0,
                              p ? "" : " (NULL)");
    if ((uintptr_t)p % FATTNI_ALIGN)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "%s: %p is not aligned to %d bytes", name, p, FATTNI_ALIGN);
    return FATTN_OK;
}

/* Backward's problem with o and lse at the begin of the workspace, which goes on after them. */
static fattni_problem renewed_of(const fattni_problem *p, size_t *bytes) {
    fattni_problem renewed = *p;
    *bytes = fattni_fp8_renew(&renewed, p->workspace);
    if (p->workspace) renewed.workspace = (char *)p->workspace + *bytes;
    return renewed;
}

/* FATTN_FP8_RENEW: the forward call of the original tensors, one after the other with backward in one workspace. */
static fattn_status plan_renewal(fattn_ctx *ctx, fattni_call *call) {
    call->renewal = NULL;
    if (call->p.pass != FATTNI_BWD || !(call->p.flags & FATTN_FP8_RENEW)) return FATTN_OK;
    size_t bytes;
    const fattni_problem renewed = renewed_of(&call->p, &bytes), forward = fattni_forward_of(&renewed);
    FATTNI_TRY(fattni_pick(ctx, fattni_fwd_table, &forward, &call->renewal, &call->renewal_plan));
    const fattni_kernel_plan *const plan = &call->renewal_plan;
    if (plan->saved)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "FATTN_FP8_RENEW: %s stores N x N, %zu bytes",
                              call->renewal->family, plan->saved);
    call->plan.workspace = bytes + (plan->workspace > call->plan.workspace ? plan->workspace : call->plan.workspace);
    return FATTN_OK;
}

fattn_status fattni_prepare(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                            enum fattni_pass pass, const fattni_kernel *const *table, fattni_call *out) {
    FATTNI_TRY(fattni_problem_init(ctx, params, io, pass, true, &out->p));
    FATTNI_TRY(fattni_pick(ctx, table, &out->p, &out->kernel, &out->plan));
    return plan_renewal(ctx, out);
}

/* Without d_o: the largest sizes over all d_o that a call may pass: of q's dtype or F32, and with strides that every
   kernel supports. */
static void plan_any_d_o(const fattn_ctx *ctx, fattni_call *call) {
    const int32_t dtypes[2] = {(int32_t)call->p.dtype, call->p.lse.dtype};
    for (int n = 0; n < 2; ++n) {
        fattni_problem with = call->p;
        fattni_kernel_plan plan = {0};
        with.d_o.p = NULL, with.d_o.dtype = dtypes[n];
        with.d_o.s[0] = with.d_o.s[1] = 0, with.d_o.s[2] = fattni_round_up(with.Dv, FATTNI_ALIGN);
        if (!call->kernel->plan(ctx, &with, &plan) && plan.workspace > call->plan.workspace)
            call->plan.workspace = plan.workspace;
    }
}

fattn_status fattni_prepare_both(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                                 fattni_call *fwd, fattni_call *bwd) {
    FATTNI_TRY(fattni_problem_init(ctx, params, io, FATTNI_BWD, false, &bwd->p));
    fwd->p = fattni_forward_of(&bwd->p);
    fwd->renewal = NULL;
    fattni_forget_fp8(&bwd->p);
    FATTNI_TRY(fattni_pick(ctx, fattni_fwd_table, &fwd->p, &fwd->kernel, &fwd->plan));
    bwd->plan = (fattni_kernel_plan){0};
    if (bwd->p.page) return FATTN_OK; /* there is no backward */
    FATTNI_TRY(fattni_pick(ctx, fattni_bwd_table, &bwd->p, &bwd->kernel, &bwd->plan));
    if (bwd->p.any_d_o) plan_any_d_o(ctx, bwd);
    return plan_renewal(ctx, bwd);
}

fattn_status fattni_run(fattn_ctx *ctx, const fattni_call *call) {
    const fattni_problem *const p = &call->p;
    const fattni_kernel_plan *const plan = &call->plan;
    FATTNI_TRY(check_memory(ctx, "workspace", p->workspace, p->workspace_bytes, plan->workspace));
    FATTNI_TRY(check_memory(ctx, "saved", p->saved, p->saved_bytes, plan->saved));
    FATTNI_TRY(fattni_check_overlaps(ctx, p, plan->workspace, plan->saved));
    if (!call->renewal) return call->kernel->run(ctx, p, plan);
    size_t bytes;
    const fattni_problem renewed = renewed_of(p, &bytes), forward = fattni_forward_of(&renewed);
    FATTNI_TRY(call->renewal->run(ctx, &forward, &call->renewal_plan));
    return call->kernel->run(ctx, &renewed, plan);
}
