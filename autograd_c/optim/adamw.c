/* AdamW. All params together are one sequence of chunks of fixed size: the tasks of both passes (norm,
   update), which adamw_cpu.c and adamw_cuda.c make. */
#include "autograd_c/optim/adamw.h"
#include "autograd_c/tape/tape_nodes.h"
#include "core/base/device.h"
#include "core/base/with_cuda.h"

#include <math.h>
#include <string.h>

extern const fattni_adamw_code fattni_adamw_cpu, fattni_adamw_cuda;

static const fattni_adamw_code *const codes[] = {[FATTN_CPU] = &fattni_adamw_cpu,
                                                 FATTNI_WITH_CUDA([FATTN_CUDA] = &fattni_adamw_cuda)};

typedef fattni_adamw_slot slot;

void fattn_adamw_defaults(fattn_adamw_options *opt) {
    if (!opt) return;
    fattn_adamw_options d = {.beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
    d.struct_size = opt->struct_size;
    memcpy(opt, &d, opt->struct_size < sizeof d ? opt->struct_size : sizeof d);
}

static fattn_status check_options(fattn_ctx *ctx, const fattn_adamw_options *o) {
    const bool betas = o->beta1 >= 0 && o->beta1 < 1 && o->beta2 >= 0 && o->beta2 < 1;
    if (betas && o->eps > 0 && isfinite(o->eps) && o->weight_decay >= 0 && isfinite(o->weight_decay) &&
        o->max_grad_norm >= 0 && isfinite(o->max_grad_norm))
        return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_ARG,
                          "adamw: beta1 %g and beta2 %g in [0,1), eps %g > 0, weight_decay %g and "
                          "max_grad_norm %g >= 0 do not all hold",
                          (double)o->beta1, (double)o->beta2, (double)o->eps, (double)o->weight_decay,
                          (double)o->max_grad_norm);
}

static bool is_half(fattn_dtype t) { return t == FATTN_F16 || t == FATTN_BF16; }

static fattn_status zeros(fattn_ctx *ctx, fattn_dtype dtype, const fattn_tensor *like, fattn_tensor *out) {
    FATTNI_TRY(fattn_tensor_alloc(ctx, dtype, like->ndim, like->shape, out));
    const size_t bytes = (size_t)fattn_tensor_numel(out) * fattn_dtype_size(dtype);
    return ctx->ops->zero_rows(ctx, out->data, bytes, bytes, 1);
}

static fattn_status fill_slot(fattn_adamw *a, int i, fattn_param *const *params) {
    slot *s = &a->slots[i];
    s->param = params[i];
    s->first_chunk = a->chunks;
    FATTNI_TRY(fattni_check_param(a->ctx, params[i]));
    for (int j = 0; j < i; ++j)
        if (params[j] == params[i])
            return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw: params[%d] and params[%d] are the same", j, i);
    const fattn_tensor *value = &params[i]->value;
    const fattn_dtype wide = value->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    s->dtype = (fattn_dtype)value->dtype;
    s->count = fattn_tensor_numel(value);
    s->frozen = fattni_is_frozen(params[i]);
    if (s->frozen) return FATTN_OK;
    a->chunks += fattni_ceil_div(s->count, FATTNI_ADAMW_CHUNK);
    FATTNI_TRY(zeros(a->ctx, wide, value, &s->m));
    FATTNI_TRY(zeros(a->ctx, wide, value, &s->v));
    if (!is_half(s->dtype)) return FATTN_OK;
    FATTNI_TRY(fattn_tensor_alloc(a->ctx, FATTN_F32, value->ndim, value->shape, &s->master));
    return fattn_tensor_copy(a->ctx, &s->master, value);
}

static fattn_status fill(fattn_adamw *a, fattn_param *const *params, int n) {
    void *p;
    FATTNI_TRY(fattni_host_alloc(a->ctx, (size_t)n * sizeof *a->slots, &p));
    a->slots = p;
    a->n = n;
    if (n) memset(a->slots, 0, (size_t)n * sizeof *a->slots);
    for (int i = 0; i < n; ++i) FATTNI_TRY(fill_slot(a, i, params));
    FATTNI_TRY(fattni_alloc(a->ctx, (size_t)a->chunks * sizeof *a->partial, &p));
    a->partial = p;
    return a->code->open(a);
}

fattn_status fattn_adamw_create(fattn_ctx *ctx, const fattn_adamw_options *opt, fattn_param *const *params, int n,
                                fattn_adamw **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out || n < 0 || (n && !params))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "adamw_create: out or params is NULL, or n is %d", n);
    *out = NULL;
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_adamw_options", opt, &o, sizeof o));
    FATTNI_TRY(check_options(ctx, &o));
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(fattn_adamw), &p));
    fattn_adamw *a = p;
    *a = (fattn_adamw){.ctx = ctx, .code = codes[ctx->device], .opt = o, .own = {.lr = (double)1e-3f}};
    const fattn_status s = fill(a, params, n);
    if (s) {
        fattn_adamw_destroy(a);
        return s;
    }
    *out = a;
    return FATTN_OK;
}

void fattn_adamw_destroy(fattn_adamw *a) {
    if (!a) return;
    fattn_ctx *ctx = a->ctx;
    for (int i = 0; i < a->n; ++i) {
        fattn_tensor_free(ctx, &a->slots[i].m);
        fattn_tensor_free(ctx, &a->slots[i].v);
        fattn_tensor_free(ctx, &a->slots[i].master);
    }
    fattni_host_free(ctx, a->slots, (size_t)a->n * sizeof *a->slots);
    if (a->partial) fattni_free(ctx, a->partial, (size_t)a->chunks * sizeof *a->partial);
    a->code->close(a);
    fattni_host_free(ctx, a, sizeof *a);
}

fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr) {
    if (!a) return FATTN_E_ARG;
    if (!(lr >= 0 && isfinite(lr))) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw: learning rate %g", (double)lr);
    return a->code->set(a, (double)lr, -1);
}

/* The caller owns the params: they may have changed since creation. */
static fattn_status check_slots(const fattn_adamw *a) {
    for (int i = 0; i < a->n; ++i) {
        const slot *s = &a->slots[i];
        FATTNI_TRY(fattni_check_param(a->ctx, s->param));
        const bool thawed = s->frozen && !fattni_is_frozen(s->param);
        const fattn_tensor *value = &s->param->value;
        if (thawed || value->dtype != (int32_t)s->dtype || fattn_tensor_numel(value) != s->count)
            return fattn_ctx_fail(a->ctx, FATTN_E_STATE,
                                  "adamw: params[%d] had %lld elements of %s%s at creation, now "
                                  "%lld of %s%s",
                                  i, (long long)s->count, fattn_dtype_name(s->dtype), s->frozen ? ", frozen," : "",
                                  (long long)fattn_tensor_numel(value), fattn_dtype_name((fattn_dtype)value->dtype),
                                  thawed ? ", thawed" : "");
    }
    return FATTN_OK;
}

fattn_status fattn_adamw_step(fattn_adamw *a) {
    if (!a) return FATTN_E_ARG;
    FATTNI_TRY(check_slots(a));
    a->stepped = true;
    return a->code->step(a);
}

fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out) {
    if (!a) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_grad_norm: out is NULL");
    if (!a->stepped) return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "adamw_grad_norm: no step has been made");
    fattni_adamw_state now;
    FATTNI_TRY(a->code->read(a, &now));
    *out = now.norm;
    return FATTN_OK;
}

fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
    if (!view || i < 0 || i >= a->n)
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_state: view is NULL, or %d is not in 0..%d", i, a->n - 1);
    const slot *s = &a->slots[i];
    if (s->frozen) return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "adamw_state: params[%d] is frozen", i);
    switch (which) {
    case FATTN_ADAM_M: *view = s->m; return FATTN_OK;
    case FATTN_ADAM_V: *view = s->v; return FATTN_OK;
    case FATTN_ADAM_MASTER:
        if (!is_half(s->dtype))
            return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "adamw_state: params[%d] is %s: it has no master", i,
                                  fattn_dtype_name(s->dtype));
        *view = s->master;
        return FATTN_OK;
    default: return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_state: unknown state %d", (int)which);
    }
}

fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t) {
    if (!a) return FATTN_E_ARG;
    if (!t) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_get_step: t is NULL");
    fattni_adamw_state now;
    FATTNI_TRY(a->code->read(a, &now));
    *t = now.step;
    return FATTN_OK;
}

fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t) {
    if (!a) return FATTN_E_ARG;
    if (t < 0 || t > FATTNI_ADAMW_STEPS)
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_set_step: %lld is not in 0..%lld", (long long)t,
                              (long long)FATTNI_ADAMW_STEPS);
    return a->code->set(a, -1, t);
}
