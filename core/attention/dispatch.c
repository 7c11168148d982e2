/* From a validated problem to the kernel that runs it. */
#include "core/attention/kernel.h"

#include <stdio.h>

static const char *algorithm_name(int32_t a) {
    static const char *const names[] = {"AUTO", "STANDARD", "FLASH1", "FLASH2"};
    return names[a];
}

fattn_status fattni_pick(fattn_ctx *ctx, const fattni_kernel *const *table, const fattni_problem *p,
                         const fattni_kernel **out) {
    const char *reason = "has no kernel for this algorithm", *family = "this build";
    for (; *table; ++table) {
        const fattni_kernel *const k = *table;
        if (k->device != ctx->device || !(k->algorithms & (1u << p->algorithm)) ||
            (k->dtypes && !(k->dtypes & (1u << p->dtype))))
            continue;
        const char *refusal = k->refuses(ctx, p);
        if (!refusal) {
            *out = k;
            return FATTN_OK;
        }
        reason = refusal;
        family = k->family;
    }
    char text[160];
    fattni_problem_text(p, text, sizeof text);
    return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "%s, algorithm %s: %s %s", text,
                          algorithm_name(p->algorithm), family, reason);
}

static fattn_status check_memory(fattn_ctx *ctx, const char *name, const void *p, size_t given,
                                 size_t needed) {
    if (needed == 0) return FATTN_OK;
    if (!p || given < needed)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "%s: %zu bytes needed, %zu given%s", name, needed,
                              p ? given : 0, p ? "" : " (NULL)");
    if ((uintptr_t)p % FATTNI_ALIGN)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "%s: %p is not aligned to %d bytes", name, p,
                              FATTNI_ALIGN);
    return FATTN_OK;
}

fattn_status fattni_run(fattn_ctx *ctx, const fattn_attention_params *params,
                        const fattn_attention_io *io, enum fattni_pass pass,
                        const fattni_kernel *const *table) {
    fattni_problem p;
    FATTNI_TRY(fattni_problem_init(ctx, params, io, pass, true, &p));
    const fattni_kernel *kernel;
    FATTNI_TRY(fattni_pick(ctx, table, &p, &kernel));
    fattni_kernel_plan plan = {0};
    kernel->plan(ctx, &p, &plan);
    FATTNI_TRY(check_memory(ctx, "workspace", p.workspace, p.workspace_bytes, plan.workspace));
    FATTNI_TRY(check_memory(ctx, "saved", p.saved, p.saved_bytes, plan.saved));
    FATTNI_TRY(fattni_check_overlaps(ctx, &p, plan.workspace, plan.saved));
    return kernel->run(ctx, &p);
}
