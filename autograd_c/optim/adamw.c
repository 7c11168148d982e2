/* AdamW: its options and what it shows of its state. */
#include "autograd_c/optim/optimizer.h"
#include "autograd_c/parallel/reducer.h"

#include <math.h>
#include <string.h>

struct fattn_adamw {
    fattni_optimizer o;
};

void fattn_adamw_defaults(fattn_adamw_options *opt) {
    if (!opt) return;
    fattn_adamw_options d = {.beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
    d.struct_size = opt->struct_size;
    memcpy(opt, &d, opt->struct_size < sizeof d ? opt->struct_size : sizeof d);
}

static fattn_status check_options(fattn_ctx *ctx, const fattn_adamw_options *o) {
    if (o->reserved) return fattn_ctx_fail(ctx, FATTN_E_ARG, "adamw: reserved is %u, not 0", o->reserved);
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

fattn_status fattn_adamw_create(fattn_ctx *ctx, const fattn_adamw_options *opt, fattn_param *const *params, int n,
                                fattn_adamw **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "adamw_create: out is NULL");
    *out = NULL;
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_adamw_options", opt, &o, sizeof o));
    FATTNI_TRY(check_options(ctx, &o));
    fattni_optimizer_rule rule = {.beta1 = (double)o.beta1,
                                  .beta2 = (double)o.beta2,
                                  .eps = (double)o.eps,
                                  .weight_decay = (double)o.weight_decay,
                                  .max_grad_norm = (double)o.max_grad_norm};
    FATTNI_TRY(fattni_optimizer_take_scaling(ctx, "adamw", o.loss_scale, &rule));
    FATTNI_TRY(fattni_optimizer_take_rounding(ctx, "adamw", o.flags, o.seed, &rule));
    fattni_optimizer *made;
    FATTNI_TRY(fattni_optimizer_create(ctx, "adamw", &rule, o.owners, sizeof **out, params, n, &made));
    *out = (fattn_adamw *)made;
    return FATTN_OK;
}

void fattn_adamw_destroy(fattn_adamw *a) { fattni_optimizer_destroy(a ? &a->o : NULL, sizeof *a); }
fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr) { return fattni_optimizer_set_lr(a ? &a->o : NULL, lr); }
fattn_status fattn_adamw_step(fattn_adamw *a) { return fattni_optimizer_step(a ? &a->o : NULL); }
fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out) {
    return fattni_optimizer_grad_norm(a ? &a->o : NULL, out);
}
fattn_status fattn_adamw_norm_view(fattn_adamw *a, fattn_tensor *view) {
    return fattni_optimizer_norm_view(a ? &a->o : NULL, view);
}
fattn_status fattn_adamw_loss_scale(fattn_adamw *a, fattn_tensor *view) {
    return fattni_optimizer_scale(a ? &a->o : NULL, view);
}
fattn_status fattn_adamw_get_loss_scale(fattn_adamw *a, fattn_loss_scale_state *out) {
    return fattni_optimizer_get_scale(a ? &a->o : NULL, out);
}
fattn_status fattn_adamw_set_loss_scale(fattn_adamw *a, const fattn_loss_scale_state *state) {
    return fattni_optimizer_set_scale(a ? &a->o : NULL, state);
}

fattn_reducer *fattn_adamw_owners(const fattn_adamw *a) { return a ? a->o.owners : NULL; }
uint32_t fattn_adamw_flags(const fattn_adamw *a) { return a ? a->o.rule.flags : 0; }
uint64_t fattn_adamw_seed(const fattn_adamw *a) { return a ? a->o.rule.seed : 0; }
fattn_param *fattn_adamw_param(const fattn_adamw *a, int i) { return fattni_optimizer_param(a ? &a->o : NULL, i); }

/* What is here of a state: all of it, or this rank's elements. */
static fattn_status state_of(fattn_adamw *a, int i, fattn_adam_state which, fattn_tensor *view) {
    fattn_status status;
    const fattni_optimizer_slot *const s = fattni_optimizer_slot_of(&a->o, i, view, &status);
    if (!s) return status;
    switch (which) {
    case FATTN_ADAM_M: *view = s->m; return FATTN_OK;
    case FATTN_ADAM_V: *view = s->v; return FATTN_OK;
    case FATTN_ADAM_MASTER: return fattni_optimizer_master(&a->o, i, view);
    default: return fattn_ctx_fail(a->o.ctx, FATTN_E_ARG, "adamw_state: unknown state %d", (int)which);
    }
}

fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
    fattn_tensor here = {.ndim = 0};
    FATTNI_TRY(state_of(a, i, which, view ? &here : NULL));
    if (a->o.owners)
        return fattn_ctx_fail(a->o.ctx, FATTN_E_STATE,
                              "adamw_state: the ranks divide the state: fattn_adamw_get_state gives all of it");
    *view = here;
    return FATTN_OK;
}

/* Elements [begin, end) of a row-major tensor, in one dimension. */
static fattn_tensor elements_of(const fattn_tensor *t, int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    const size_t before = (size_t)begin * fattn_dtype_size((fattn_dtype)t->dtype);
    return fattn_tensor_view(n > 0 ? (char *)t->data + before : NULL, (fattn_dtype)t->dtype, (fattn_device)t->device,
                             t->device_id, 1, &n);
}

static fattn_status get_divided(fattn_adamw *a, const fattni_optimizer_slot *s, int i, const fattn_tensor *here,
                                const fattn_tensor *to) {
    fattn_ctx *const ctx = a->o.ctx;
    const fattn_tensor *const value = &s->param->value;
    fattn_tensor all;
    FATTNI_TRY(fattn_tensor_alloc(ctx, (fattn_dtype)here->dtype, value->ndim, value->shape, &all));
    const fattn_tensor own = elements_of(&all, s->begin, s->end);
    fattn_status status = fattn_tensor_copy(ctx, &own, here);
    if (!status)
        status = fattni_reducer_gather_first(a->o.owners, i, all.data, fattn_dtype_size((fattn_dtype)all.dtype));
    if (!status && fattn_comm_rank(fattn_reducer_comm(a->o.owners)) == 0) status = fattn_tensor_copy(ctx, to, &all);
    fattn_tensor_free(ctx, &all);
    return status;
}

fattn_status fattn_adamw_get_state(fattn_adamw *a, int i, fattn_adam_state which, const fattn_tensor *to) {
    if (!a) return FATTN_E_ARG;
    fattn_tensor here = {.ndim = 0};
    fattn_status s = state_of(a, i, which, &here);
    if (!a->o.owners) return s ? s : fattn_tensor_copy(a->o.ctx, to, &here);
    if (!s) s = get_divided(a, &a->o.slots[i], i, &here, to);
    return fattni_reducer_end(a->o.owners, s);
}

fattn_status fattn_adamw_set_state(fattn_adamw *a, int i, fattn_adam_state which, const fattn_tensor *from) {
    if (!a) return FATTN_E_ARG;
    fattn_tensor here = {.ndim = 0};
    FATTNI_TRY(state_of(a, i, which, &here));
    if (!a->o.owners) return fattn_tensor_copy(a->o.ctx, &here, from);
    const fattni_optimizer_slot *const s = &a->o.slots[i];
    if (!from || !fattni_is_row_major(from) || fattn_tensor_numel(from) != s->count)
        return fattn_ctx_fail(a->o.ctx, FATTN_E_SHAPE,
                              "adamw_set_state: NULL, or not row-major with the %lld elements of params[%d]",
                              (long long)s->count, i);
    const fattn_tensor own = elements_of(from, s->begin, s->end);
    return fattn_tensor_copy(a->o.ctx, &here, &own);
}

fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t) { return fattni_optimizer_get_step(a ? &a->o : NULL, t); }
fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t) { return fattni_optimizer_set_step(a ? &a->o : NULL, t); }
