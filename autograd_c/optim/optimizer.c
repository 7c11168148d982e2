/* What AdamW and SGD share. All params together are one sequence of chunks of fixed size: the tasks of both passes
   (norm, update), which optimizer_cpu.c and optimizer_cuda.c make. */
#include "autograd_c/optim/optimizer.h"
#include "autograd_c/parallel/reducer.h"
#include "autograd_c/tape/tape_nodes.h"
#include "core/base/device.h"
#include "core/base/with_cuda.h"

#include <math.h>
#include <string.h>

extern const fattni_optimizer_code fattni_optimizer_cpu, fattni_optimizer_cuda;

static const fattni_optimizer_code *const codes[] = {[FATTN_CPU] = &fattni_optimizer_cpu,
                                                     FATTNI_WITH_CUDA([FATTN_CUDA] = &fattni_optimizer_cuda)};

typedef fattni_optimizer_slot slot;

/* A scale and its reciprocal are normal numbers. */
static const float LEAST_SCALE = 0x1p-126f, MOST_SCALE = 0x1p126f;

_Static_assert((int)FATTNI_SHARE_ELEMENTS % (int)FATTNI_OPTIMIZER_CHUNK == 0, "a chunk has one owner");

static fattn_status zeros(fattn_ctx *ctx, fattn_dtype dtype, const fattn_tensor *like, fattn_tensor *out) {
    FATTNI_TRY(fattn_tensor_alloc(ctx, dtype, like->ndim, like->shape, out));
    const size_t bytes = (size_t)fattn_tensor_numel(out) * fattn_dtype_size(dtype);
    return ctx->ops->zero_rows(ctx, out->data, bytes, bytes, 1);
}

/* The part of the value whose state is here; without owners in its own shape. */
static fattn_tensor own_value(const fattni_optimizer *a, const slot *s) {
    const fattn_tensor *const t = &s->param->value;
    if (!a->owners) return *t;
    const int64_t n = s->end - s->begin;
    void *const data = n ? (char *)t->data + (size_t)s->begin * fattn_dtype_size(s->dtype) : NULL;
    return fattn_tensor_view(data, s->dtype, (fattn_device)t->device, t->device_id, 1, &n);
}

static fattn_status fill_slot(fattni_optimizer *a, int i, fattn_param *const *params) {
    slot *s = &a->slots[i];
    s->param = params[i];
    s->first_chunk = a->chunks;
    FATTNI_TRY(fattni_check_param(a->ctx, params[i]));
    for (int j = 0; j < i; ++j)
        if (params[j] == params[i])
            return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s: params[%d] and params[%d] are the same", a->name, j, i);
    const fattn_tensor *value = &params[i]->value;
    const fattn_dtype wide = value->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    s->dtype = (fattn_dtype)value->dtype;
    s->is_half = s->dtype == FATTN_F16 || s->dtype == FATTN_BF16;
    s->has_master = s->is_half && !(a->rule.flags & FATTN_OPTIM_NO_MASTERS);
    s->count = fattn_tensor_numel(value);
    s->frozen = fattni_is_frozen(params[i]);
    if (s->frozen) return FATTN_OK;
    a->chunks += fattni_ceil_div(s->count, FATTNI_OPTIMIZER_CHUNK);
    s->end = s->count;
    if (a->owners) FATTNI_TRY(fattn_reducer_share(a->owners, i, &s->begin, &s->end));
    const fattn_tensor own = own_value(a, s);
    if (!a->rule.is_sgd || a->rule.beta1 > 0) FATTNI_TRY(zeros(a->ctx, wide, &own, &s->m));
    if (!a->rule.is_sgd) FATTNI_TRY(zeros(a->ctx, wide, &own, &s->v));
    if (!s->has_master) return FATTN_OK;
    FATTNI_TRY(fattn_tensor_alloc(a->ctx, FATTN_F32, own.ndim, own.shape, &s->master));
    return fattn_tensor_copy(a->ctx, &s->master, &own);
}

static fattn_status fill(fattni_optimizer *a, fattn_param *const *params, int n) {
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

fattn_status fattni_optimizer_create(fattn_ctx *ctx, const char *name, const fattni_optimizer_rule *rule,
                                     fattn_reducer *owners, size_t bytes, fattn_param *const *params, int n,
                                     fattni_optimizer **out) {
    if (n < 0 || (n && !params))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s_create: params is NULL, or n is %d", name, n);
    if (owners) FATTNI_TRY(fattni_reducer_check(owners, ctx, name, params, n));
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, bytes, &p));
    fattni_optimizer *a = p;
    *a = (fattni_optimizer){.ctx = ctx,
                            .code = codes[ctx->device],
                            .name = name,
                            .rule = *rule,
                            .owners = owners,
                            .own = {.lr = (double)1e-3f, .scale = rule->first_scale}};
    const fattn_status s = fill(a, params, n);
    if (s) {
        fattni_optimizer_destroy(a, bytes);
        return s;
    }
    *out = a;
    return FATTN_OK;
}

void fattni_optimizer_destroy(fattni_optimizer *a, size_t bytes) {
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
    fattni_host_free(ctx, a, bytes);
}

fattn_status fattni_optimizer_set_lr(fattni_optimizer *a, float lr) {
    if (!a) return FATTN_E_ARG;
    if (!(lr >= 0 && isfinite(lr)))
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s: learning rate %g", a->name, (double)lr);
    return a->code->set(a, &(fattni_optimizer_change){(double)lr, -1, -1, -1, -1, 0});
}

/* The caller owns the params: they may have changed since creation. */
static fattn_status check_slots(const fattni_optimizer *a) {
    for (int i = 0; i < a->n; ++i) {
        const slot *s = &a->slots[i];
        FATTNI_TRY(fattni_check_param(a->ctx, s->param));
        const bool thawed = s->frozen && !fattni_is_frozen(s->param);
        const fattn_tensor *value = &s->param->value;
        if (thawed || value->dtype != (int32_t)s->dtype || fattn_tensor_numel(value) != s->count)
            return fattn_ctx_fail(a->ctx, FATTN_E_STATE,
                                  "%s: params[%d] had %lld elements of %s%s at creation, now "
                                  "%lld of %s%s",
                                  a->name, i, (long long)s->count, fattn_dtype_name(s->dtype),
                                  s->frozen ? ", frozen," : "", (long long)fattn_tensor_numel(value),
                                  fattn_dtype_name((fattn_dtype)value->dtype), thawed ? ", thawed" : "");
    }
    return FATTN_OK;
}

fattn_status fattni_optimizer_share_norms(const fattni_optimizer *a) {
    if (!a->owners) return FATTN_OK;
    const fattn_tensor norms =
        fattn_tensor_view(a->partial, FATTN_F64, a->ctx->device, a->ctx->device_id, 1, &a->chunks);
    return fattn_comm_all_reduce(fattn_reducer_comm(a->owners), &norms); /* others' chunks are 0 here: exact */
}

static fattn_status step(fattni_optimizer *a) {
    FATTNI_TRY(check_slots(a));
    if (a->owners) FATTNI_TRY(fattni_reducer_check_idle(a->owners, a->name));
    if (a->rule.is_scaled && !a->scale_asked)
        return fattn_ctx_fail(a->ctx, FATTN_E_STATE,
                              "%s_step: gradients would be divided by a loss scale that no backward pass has: nobody "
                              "has called %s_loss_scale, whose tensor fattn_tape_backward_from takes",
                              a->name, a->name);
    a->stepped = true;
    FATTNI_TRY(a->code->step(a));
    if (!a->owners) return FATTN_OK;
    FATTNI_TRY(fattni_reducer_zero_others(a->owners));
    return fattni_reducer_gather_values(a->owners);
}

fattn_status fattni_optimizer_step(fattni_optimizer *a) {
    if (!a) return FATTN_E_ARG;
    const fattn_status s = step(a);
    return a->owners ? fattni_reducer_end(a->owners, s) : s;
}

fattn_status fattni_optimizer_grad_norm(fattni_optimizer *a, double *out) {
    if (!a) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_grad_norm: out is NULL", a->name);
    if (!a->stepped) return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "%s_grad_norm: no step has been made", a->name);
    fattni_optimizer_state now;
    FATTNI_TRY(a->code->read(a, &now));
    *out = now.norm;
    return FATTN_OK;
}

static fattni_optimizer_state *state_of(fattni_optimizer *a) { return a->device ? a->device : &a->own; }

fattn_status fattni_optimizer_norm_view(fattni_optimizer *a, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
    if (!view) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_norm_view: view is NULL", a->name);
    *view = fattn_tensor_view(&state_of(a)->norm, FATTN_F64, a->ctx->device, a->ctx->device_id, 0, NULL);
    return FATTN_OK;
}

fattn_status fattni_optimizer_get_step(fattni_optimizer *a, int64_t *t) {
    if (!a) return FATTN_E_ARG;
    if (!t) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_get_step: t is NULL", a->name);
    fattni_optimizer_state now;
    FATTNI_TRY(a->code->read(a, &now));
    *t = now.step;
    return FATTN_OK;
}

fattn_status fattni_optimizer_set_step(fattni_optimizer *a, int64_t t) {
    if (!a) return FATTN_E_ARG;
    if (t < 0 || t > FATTNI_OPTIMIZER_STEPS)
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_set_step: %lld is not in 0..%lld", a->name, (long long)t,
                              (long long)FATTNI_OPTIMIZER_STEPS);
    return a->code->set(a, &(fattni_optimizer_change){-1, t, -1, -1, -1, 0});
}

fattn_status fattni_optimizer_take_rounding(fattn_ctx *ctx, const char *who, uint32_t flags, uint64_t seed,
                                            fattni_optimizer_rule *rule) {
    if (flags & ~(uint32_t)(FATTN_OPTIM_NO_MASTERS | FATTN_OPTIM_STOCHASTIC_ROUNDING))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: unknown flags 0x%x", who, flags);
    if (seed && !(flags & FATTN_OPTIM_STOCHASTIC_ROUNDING))
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "%s: seed %llu has no use: flags 0x%x lack FATTN_OPTIM_STOCHASTIC_ROUNDING", who,
                              (unsigned long long)seed, flags);
    rule->flags = flags;
    rule->seed = seed;
    return FATTN_OK;
}

/* ---- loss scale ---- */

void fattn_loss_scale_defaults(fattn_loss_scale_options *opt) {
    if (!opt) return;
    fattn_loss_scale_options d = {.initial = 0x1p16f, .minimum = 1, .maximum = 0x1p24f, .interval = 2000};
    d.struct_size = opt->struct_size;
    memcpy(opt, &d, opt->struct_size < sizeof d ? opt->struct_size : sizeof d);
}

fattn_status fattni_optimizer_take_scaling(fattn_ctx *ctx, const char *who, const fattn_loss_scale_options *opt,
                                           fattni_optimizer_rule *rule) {
    fattn_loss_scale_options o = {.initial = 1, .minimum = 1, .maximum = 1};
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_loss_scale_options", opt, &o, sizeof o));
    const bool ordered = o.minimum <= o.initial && o.initial <= o.maximum; /* false where one is NaN */
    if (!ordered || o.minimum < LEAST_SCALE || o.maximum > MOST_SCALE || o.interval < 0)
        return fattn_ctx_fail(ctx, FATTN_E_ARG,
                              "%s: loss scale: initial %g in minimum %g to maximum %g, these in 2^-126 to 2^126, and "
                              "interval %lld >= 0 do not all hold",
                              who, (double)o.initial, (double)o.minimum, (double)o.maximum, (long long)o.interval);
    rule->is_scaled = opt != NULL;
    rule->first_scale = o.initial;
    rule->scaling = (fattni_loss_scaling){o.minimum, o.maximum, o.interval};
    return FATTN_OK;
}

fattn_status fattni_optimizer_scale(fattni_optimizer *a, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
    if (!view) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_loss_scale: view is NULL", a->name);
    *view = fattn_tensor_view(&state_of(a)->scale, FATTN_F32, a->ctx->device, a->ctx->device_id, 0, NULL);
    a->scale_asked = true;
    return FATTN_OK;
}

fattn_status fattni_optimizer_get_scale(fattni_optimizer *a, fattn_loss_scale_state *out) {
    if (!a) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_get_loss_scale: out is NULL", a->name);
    const uint32_t size = out->struct_size;
    if (size != sizeof *out)
        return fattn_ctx_fail(a->ctx, FATTN_E_ABI, "fattn_loss_scale_state: struct_size is %u, not %zu", size,
                              sizeof *out);
    fattni_optimizer_state now;
    FATTNI_TRY(a->code->read(a, &now));
    *out = (fattn_loss_scale_state){.struct_size = size,
                                    .scale = now.scale,
                                    .finite_steps = now.finite,
                                    .skipped_steps = now.skipped,
                                    .interval = a->rule.scaling.interval};
    return FATTN_OK;
}

fattn_status fattni_optimizer_set_scale(fattni_optimizer *a, const fattn_loss_scale_state *s) {
    if (!a) return FATTN_E_ARG;
    if (!s) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_set_loss_scale: the state is NULL", a->name);
    fattn_loss_scale_state to;
    FATTNI_TRY(fattni_take_struct(a->ctx, "fattn_loss_scale_state", s, &to, sizeof to));
    const fattni_loss_scaling *const r = &a->rule.scaling;
    const int64_t most = fattni_max(0, r->interval - 1);
    const bool counts = to.finite_steps >= 0 && to.finite_steps <= most && to.skipped_steps >= 0 &&
                        to.skipped_steps <= FATTNI_OPTIMIZER_STEPS;
    if (!counts || !(to.scale >= r->minimum && to.scale <= r->maximum))
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG,
                              "%s_set_loss_scale: scale %g in %g to %g, finite_steps %lld in 0..%lld and skipped_steps "
                              "%lld in 0..2^53 do not all hold",
                              a->name, (double)to.scale, (double)r->minimum, (double)r->maximum,
                              (long long)to.finite_steps, (long long)most, (long long)to.skipped_steps);
    return a->code->set(a, &(fattni_optimizer_change){-1, -1, to.finite_steps, to.skipped_steps, to.scale, 0});
}

/* ---- views ---- */

fattn_param *fattni_optimizer_param(const fattni_optimizer *a, int i) {
    return a && i >= 0 && i < a->n ? a->slots[i].param : NULL;
}

const fattni_optimizer_slot *fattni_optimizer_slot_of(fattni_optimizer *a, int i, const fattn_tensor *view,
                                                      fattn_status *s) {
    *s = FATTN_OK;
    if (!view || i < 0 || i >= a->n)
        *s = fattn_ctx_fail(a->ctx, FATTN_E_ARG, "%s_state: view is NULL, or %d is not in 0..%d", a->name, i, a->n - 1);
    else if (a->slots[i].frozen)
        *s = fattn_ctx_fail(a->ctx, FATTN_E_STATE, "%s_state: params[%d] is frozen", a->name, i);
    return *s ? NULL : &a->slots[i];
}

fattn_status fattni_optimizer_master(const fattni_optimizer *a, int i, fattn_tensor *view) {
    const slot *const s = &a->slots[i];
    if (!s->has_master)
        return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "%s_state: params[%d] is %s%s: it has no master", a->name, i,
                              fattn_dtype_name(s->dtype), s->is_half ? ", with FATTN_OPTIM_NO_MASTERS" : "");
    *view = s->master;
    return FATTN_OK;
}
