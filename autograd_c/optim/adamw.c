/* AdamW: its options and what it shows of its state. */
#include "autograd_c/optim/optimizer.h"

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
    fattni_optimizer *made;
    FATTNI_TRY(fattni_optimizer_create(ctx, "adamw", &rule, sizeof **out, params, n, &made));
    *out = (fattn_adamw *)made;
    return FATTN_OK;
}

void fattn_adamw_destroy(fattn_adamw *a) { fattni_optimizer_destroy(a ? &a->o : NULL, sizeof *a); }
fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr) { return fattni_optimizer_set_lr(a ? &a->o : NULL, lr); }
fattn_status fattn_adamw_step(fattn_adamw *a) { return fattni_optimizer_step(a ? &a->o : NULL); }
fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out) {
    return fattni_optimizer_grad_norm(a ? &a->o : NULL, out);
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

fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
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

fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t) {
    if (!a) return FATTN_E_ARG;
    if (!t) return fattn_ctx_fail(a->o.ctx, FATTN_E_ARG, "adamw_get_step: t is NULL");
    fattni_optimizer_state now;
    FATTNI_TRY(a->o.code->read(&a->o, &now));
    *t = now.step;
    return FATTN_OK;
}

fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t) {
    if (!a) return FATTN_E_ARG;
    if (t < 0 || t > FATTNI_OPTIMIZER_STEPS)
        return fattn_ctx_fail(a->o.ctx, FATTN_E_ARG, "adamw_set_step: %lld is not in 0..%lld", (long long)t,
                              (long long)FATTNI_OPTIMIZER_STEPS);
    return a->o.code->set(&a->o, &(fattni_optimizer_change){-1, t, -1, -1, -1, 0});
}
