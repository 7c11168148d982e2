/* fattn_fp8_layout and fattn_fp8_quantize. */
#include "core/attention/kernel.h"
#include "core/base/device.h"
#include "core/fp8/fp8.h"

#include <fattn/fp8.h>

/* Checked as forward calls are, also whether a kernel supports it. */
static fattn_status prepare(fattn_ctx *ctx, const char *who, const fattn_attention_params *p,
                            const fattn_attention_io *io, bool running, fattni_call *call) {
    FATTNI_TRY(fattni_problem_init(ctx, p, io, FATTNI_FWD, running, &call->p));
    if (!(call->p.flags & FATTN_FP8)) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: params.flags lacks FATTN_FP8", who);
    return fattni_pick(ctx, fattni_fwd_table, &call->p, &call->kernel, &call->plan);
}

static fattn_tensor tensor_of(const fattn_ctx *ctx, const fattni_array *a, int ndim) {
    fattn_tensor t =
        fattn_tensor_view(a->empty ? NULL : a->p, (fattn_dtype)a->dtype, ctx->device, ctx->device_id, ndim, a->n);
    for (int d = 0; d < ndim; ++d) t.stride[d] = a->s[d];
    return t;
}

fattn_status fattn_fp8_layout(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io,
                              void *memory, size_t *bytes, fattn_fp8 *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!bytes || !io || (memory && !out))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "fp8_layout: %s is NULL", !io ? "io" : !bytes ? "bytes" : "out");
    fattn_attention_io without; /* whatever copies it names */
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_attention_io", io, &without, sizeof without));
    without.struct_size = sizeof without;
    without.fp8 = NULL;
    fattni_call call;
    FATTNI_TRY(prepare(ctx, "fp8_layout", p, &without, false, &call));
    const size_t needed = fattni_fp8_bytes(&call.p);
    if (!memory) {
        *bytes = needed;
        return FATTN_OK;
    }
    if (*bytes < needed)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "fp8_layout: %zu bytes needed, %zu given", needed, *bytes);
    if ((uintptr_t)memory % FATTNI_ALIGN)
        return fattn_ctx_fail(ctx, FATTN_E_WORKSPACE, "fp8_layout: memory %p is not aligned to %d bytes", memory,
                              FATTNI_ALIGN);
    const fattni_fp8 at = fattni_fp8_lay_out(&call.p, memory);
    *out = (fattn_fp8){.struct_size = sizeof *out,
                       .q8 = tensor_of(ctx, &at.q, 4),
                       .k8 = tensor_of(ctx, &at.k, 4),
                       .v8 = tensor_of(ctx, &at.v, 4),
                       .q_scale = tensor_of(ctx, &at.q_scale, 3),
                       .q_shift = tensor_of(ctx, &at.q_shift, 3),
                       .k_scale = tensor_of(ctx, &at.k_scale, call.p.flags & FATTN_FP8_INT8 ? 3 : 2),
                       .v_scale = tensor_of(ctx, &at.v_scale, 3),
                       .v_mean = tensor_of(ctx, &at.v_mean, 3),
                       .partials = tensor_of(ctx, &at.partials, 4)};
    return FATTN_OK;
}

fattn_status fattn_fp8_quantize(fattn_ctx *ctx, const fattn_attention_params *p, const fattn_attention_io *io) {
    fattni_call call;
    FATTNI_TRY(prepare(ctx, "fp8_quantize", p, io, true, &call));
    if (!call.p.fp8.q.present) return fattn_ctx_fail(ctx, FATTN_E_ARG, "fp8_quantize: io.fp8 is NULL");
    FATTNI_TRY(fattni_check_fp8_overlaps(ctx, &call.p));
    return ctx->ops->fp8_quantize(ctx, &call.p, &call.p.fp8);
}
