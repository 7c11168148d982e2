/* SGD: its options and what it shows of its state. */
#include "autograd_c/optim/optimizer.h"

#include <math.h>

struct fattn_sgd {
    fattni_optimizer o;
};

static fattn_status check_options(fattn_ctx *ctx, const fattn_sgd_options *o) {
    if (o->momentum >= 0 && o->momentum < 1 && o->weight_decay >= 0 && isfinite(o->weight_decay) &&
        o->max_grad_norm >= 0 && isfinite(o->max_grad_norm) && (o->momentum > 0 || !o->nesterov))
        return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_ARG,
                          "sgd: momentum %g in [0,1), weight_decay %g and max_grad_norm %g >= 0, and momentum > 0 for "
                          "nesterov %d do not all hold",
                          (double)o->momentum, (double)o->weight_decay, (double)o->max_grad_norm, o->nesterov);
}

fattn_status fattn_sgd_create(fattn_ctx *ctx, const fattn_sgd_options *opt, fattn_param *const *params, int n,
                              fattn_sgd **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "sgd_create: out is NULL");
    *out = NULL;
    fattn_sgd_options o = {.struct_size = sizeof o};
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_sgd_options", opt, &o, sizeof o));
    FATTNI_TRY(check_options(ctx, &o));
    fattni_optimizer_rule rule = {.is_sgd = true,
                                  .nesterov = o.nesterov != 0,
                                  .beta1 = (double)o.momentum,
                                  .weight_decay = (double)o.weight_decay,
                                  .max_grad_norm = (double)o.max_grad_norm};
    FATTNI_TRY(fattni_optimizer_take_scaling(ctx, "sgd", o.loss_scale, &rule));
    FATTNI_TRY(fattni_optimizer_take_rounding(ctx, "sgd", o.flags, o.seed, &rule));
    fattni_optimizer *made;
    FATTNI_TRY(fattni_optimizer_create(ctx, "sgd", &rule, NULL, sizeof **out, params, n, &made));
    *out = (fattn_sgd *)made;
    return FATTN_OK;
}

void fattn_sgd_destroy(fattn_sgd *s) { fattni_optimizer_destroy(s ? &s->o : NULL, sizeof *s); }
fattn_status fattn_sgd_set_lr(fattn_sgd *s, float lr) { return fattni_optimizer_set_lr(s ? &s->o : NULL, lr); }
fattn_status fattn_sgd_step(fattn_sgd *s) { return fattni_optimizer_step(s ? &s->o : NULL); }
fattn_status fattn_sgd_grad_norm(fattn_sgd *s, double *out) {
    return fattni_optimizer_grad_norm(s ? &s->o : NULL, out);
}
fattn_status fattn_sgd_norm_view(fattn_sgd *s, fattn_tensor *view) {
    return fattni_optimizer_norm_view(s ? &s->o : NULL, view);
}
fattn_status fattn_sgd_loss_scale(fattn_sgd *s, fattn_tensor *view) {
    return fattni_optimizer_scale(s ? &s->o : NULL, view);
}
fattn_status fattn_sgd_get_loss_scale(fattn_sgd *s, fattn_loss_scale_state *out) {
    return fattni_optimizer_get_scale(s ? &s->o : NULL, out);
}
fattn_status fattn_sgd_set_loss_scale(fattn_sgd *s, const fattn_loss_scale_state *state) {
    return fattni_optimizer_set_scale(s ? &s->o : NULL, state);
}
fattn_status fattn_sgd_get_step(fattn_sgd *s, int64_t *t) { return fattni_optimizer_get_step(s ? &s->o : NULL, t); }
fattn_status fattn_sgd_set_step(fattn_sgd *s, int64_t t) { return fattni_optimizer_set_step(s ? &s->o : NULL, t); }
uint32_t fattn_sgd_flags(const fattn_sgd *s) { return s ? s->o.rule.flags : 0; }
uint64_t fattn_sgd_seed(const fattn_sgd *s) { return s ? s->o.rule.seed : 0; }
float fattn_sgd_momentum(const fattn_sgd *s) { return s ? (float)s->o.rule.beta1 : 0; }
fattn_param *fattn_sgd_param(const fattn_sgd *s, int i) { return fattni_optimizer_param(s ? &s->o : NULL, i); }

fattn_status fattn_sgd_state(fattn_sgd *s, int i, fattn_sgd_tensor which, fattn_tensor *view) {
    if (!s) return FATTN_E_ARG;
    fattn_status status;
    const fattni_optimizer_slot *const slot = fattni_optimizer_slot_of(&s->o, i, view, &status);
    if (!slot) return status;
    switch (which) {
    case FATTN_SGD_MOMENTUM:
        if (s->o.rule.beta1 == 0) return fattn_ctx_fail(s->o.ctx, FATTN_E_STATE, "sgd_state: there is no momentum");
        *view = slot->m;
        return FATTN_OK;
    case FATTN_SGD_MASTER: return fattni_optimizer_master(&s->o, i, view);
    default: return fattn_ctx_fail(s->o.ctx, FATTN_E_ARG, "sgd_state: unknown state %d", (int)which);
    }
}
