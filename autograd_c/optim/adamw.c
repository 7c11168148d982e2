/* AdamW. All params together are one sequence of chunks of fixed size: the tasks of both passes
   (norm, update). Partial sums are combined in the order of the chunks, so bits never depend on the
   number of threads. */
#include "autograd_c/optim/adamw.h"
#include "autograd_c/ops/op_device.h"
#include "autograd_c/tape/tape_nodes.h"

#include <math.h>
#include <string.h>

enum { CHUNK = FATTNI_ADAMW_CHUNK, LANES = 8, BLOCK = 256 };

typedef fattni_adamw_slot slot;

void fattn_adamw_defaults(fattn_adamw_options *opt) {
    if (!opt) return;
    fattn_adamw_options d = {.beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .weight_decay = 0.01f};
    d.struct_size = opt->struct_size;
    memcpy(opt, &d, opt->struct_size < sizeof d ? opt->struct_size : sizeof d);
}

static fattn_status check_options(fattn_ctx *ctx, const fattn_adamw_options *o) {
    const bool betas = o->beta1 >= 0 && o->beta1 < 1 && o->beta2 >= 0 && o->beta2 < 1;
    if (betas && o->eps > 0 && isfinite(o->eps) && o->weight_decay >= 0 &&
        isfinite(o->weight_decay) && o->max_grad_norm >= 0 && isfinite(o->max_grad_norm))
        return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_ARG,
                          "adamw: beta1 %g and beta2 %g in [0,1), eps %g > 0, weight_decay %g and "
                          "max_grad_norm %g >= 0 do not all hold",
                          (double)o->beta1, (double)o->beta2, (double)o->eps,
                          (double)o->weight_decay, (double)o->max_grad_norm);
}

static bool is_half(fattn_dtype t) { return t == FATTN_F16 || t == FATTN_BF16; }

static fattn_status zeros(fattn_ctx *ctx, fattn_dtype dtype, const fattn_tensor *like,
                          fattn_tensor *out) {
    FATTNI_TRY(fattn_tensor_alloc(ctx, dtype, like->ndim, like->shape, out));
    const size_t bytes = (size_t)fattn_tensor_numel(out) * fattn_dtype_size(dtype);
    return fattni_zero(ctx, out->data, bytes, bytes, 1);
}

static fattn_status fill_slot(fattn_adamw *a, int i, fattn_param *const *params) {
    slot *s = &a->slots[i];
    s->param = params[i];
    s->first_chunk = a->chunks;
    FATTNI_TRY(fattni_check_param(a->ctx, params[i]));
    for (int j = 0; j < i; ++j)
        if (params[j] == params[i])
            return fattn_ctx_fail(a->ctx, FATTN_E_ARG,
                                  "adamw: params[%d] and params[%d] are the same", j, i);
    const fattn_tensor *value = &params[i]->value;
    const fattn_dtype wide = value->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    s->dtype = (fattn_dtype)value->dtype;
    s->count = fattn_tensor_numel(value);
    s->frozen = fattni_is_frozen(params[i]);
    if (s->frozen) return FATTN_OK;
    a->chunks += fattni_ceil_div(s->count, CHUNK);
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
#ifdef FATTNI_HAVE_CUDA
    if (a->ctx->device == FATTN_CUDA) {
        FATTNI_TRY(fattni_alloc(a->ctx, sizeof *a->device, &p));
        a->device = p;
        return fattni_cuda_adamw_set(a, a->own.lr, a->own.step);
    }
#endif
    return FATTN_OK;
}

fattn_status fattn_adamw_create(fattn_ctx *ctx, const fattn_adamw_options *opt,
                                fattn_param *const *params, int n, fattn_adamw **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out || n < 0 || (n && !params))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "adamw_create: out or params is NULL, or n is %d",
                              n);
    *out = NULL;
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    if (opt) FATTNI_TRY(fattni_take_struct(ctx, "fattn_adamw_options", opt, &o, sizeof o));
    FATTNI_TRY(check_options(ctx, &o));
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(fattn_adamw), &p));
    fattn_adamw *a = p;
    *a = (fattn_adamw){.ctx = ctx, .opt = o, .own = {.lr = (double)1e-3f}};
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
    fattni_free(ctx, a->device, sizeof *a->device);
    fattni_host_free(ctx, a, sizeof *a);
}

fattn_status fattn_adamw_set_lr(fattn_adamw *a, float lr) {
    if (!a) return FATTN_E_ARG;
    if (!(lr >= 0 && isfinite(lr)))
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw: learning rate %g", (double)lr);
#ifdef FATTNI_HAVE_CUDA
    if (a->device) return fattni_cuda_adamw_set(a, (double)lr, -1);
#endif
    a->own.lr = (double)lr;
    return FATTN_OK;
}

/* Chunk number `chunk`: elements [begin, end) of one slot. */
typedef struct piece {
    slot *slot;
    int64_t begin, end;
} piece;

static piece piece_of(const fattn_adamw *a, int64_t chunk) {
    int low = 0, high = a->n - 1; /* the last slot that begins at or before the chunk */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a->slots[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    slot *s = &a->slots[low];
    const int64_t begin = (chunk - s->first_chunk) * CHUNK;
    return (piece){s, begin, fattni_min(s->count, begin + CHUNK)};
}

/* Of g's elements [i, end), times factor but for F32, whose squares a double holds. */
static double sum_squares(const fattn_tensor *g, int64_t i, int64_t end, double factor) {
    double lane[LANES] = {0}, sum = 0;
    if (g->dtype == FATTN_F32)
        for (; i + LANES <= end; i += LANES)
            for (int l = 0; l < LANES; ++l) {
                const double x = (double)((const float *)g->data)[i + l];
                lane[l] += x * x;
            }
    for (const double by = g->dtype == FATTN_F32 ? 1 : factor; i < end; ++i) {
        const double x = fattni_load(g->data, g->dtype, i) * by;
        lane[i % LANES] += x * x;
    }
    for (int l = 0; l < LANES; ++l) sum += lane[l];
    return sum;
}

/* A norm may be finite though its squares are not. */
static double norm_of(const fattn_tensor *g, int64_t begin, int64_t end) {
    const double squares = sum_squares(g, begin, end, 1), unit = FATTNI_ADAMW_UNIT;
    return isfinite(squares) ? sqrt(squares) : sqrt(sum_squares(g, begin, end, 1 / unit)) * unit;
}

static void chunk_norm(void *arg, int64_t chunk, int thread) {
    (void)thread;
    const fattn_adamw *a = arg;
    const piece part = piece_of(a, chunk);
    a->partial[chunk] = fattni_is_frozen(part.slot->param)
                            ? 0
                            : norm_of(&part.slot->param->grad, part.begin, part.end);
}

/* What one step does to every element. */
typedef struct rule {
    double norm, clip, shrink, beta1, beta2, rate, correction2, eps; /* rate: lr/(1-beta1^t) */
} rule;

typedef struct update_job {
    fattn_adamw *a;
    rule decayed, plain;
    bool skip; /* the norm is not finite: only zero the gradients */
} update_job;

static void update_f32(const rule *r, float *p, const float *g, float *m, float *v, int64_t n) {
    const float clip = (float)r->clip, shrink = (float)r->shrink, rate = (float)r->rate,
                eps = (float)r->eps, beta1 = (float)r->beta1, beta2 = (float)r->beta2,
                rest1 = (float)(1 - r->beta1), rest2 = (float)(1 - r->beta2),
                correction2 = (float)r->correction2;
    for (int64_t i = 0; i < n; ++i) {
        const float x = clip * g[i];
        m[i] = beta1 * m[i] + rest1 * x;
        v[i] = beta2 * v[i] + rest2 * x * x;
        p[i] = shrink * p[i] - rate * m[i] / (sqrtf(correction2 * v[i]) + eps);
    }
}

static void update_f64(const rule *r, double *p, const double *g, double *m, double *v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const double x = r->clip * g[i];
        m[i] = r->beta1 * m[i] + (1 - r->beta1) * x;
        v[i] = r->beta2 * v[i] + (1 - r->beta2) * x * x;
        p[i] = r->shrink * p[i] - r->rate * m[i] / (sqrt(r->correction2 * v[i]) + r->eps);
    }
}

/* Moments and arithmetic are F32, or F64 for F64 values. Gradients of another dtype are converted, too
   large ones bounded, of which the norm tells whether there may be any; 16-bit values follow their
   masters. */
static void update_piece(const rule *r, const piece *part) {
    const slot *s = part->slot;
    const fattn_tensor *value = &s->param->value, *grad = &s->param->grad;
    const bool wide = value->dtype == FATTN_F64;
    const double most = (wide ? FATTNI_ADAMW_MOST_F64 : (double)FATTNI_ADAMW_MOST_F32) / r->clip;
    const bool direct = grad->dtype == s->m.dtype && r->norm <= most;
    const fattn_tensor *p = s->master.data ? &s->master : value;
    double buffer[BLOCK];
    for (int64_t begin = part->begin; begin < part->end; begin += BLOCK) {
        const int64_t n = fattni_min(BLOCK, part->end - begin);
        for (int64_t i = 0; i < n && !direct; ++i)
            fattni_store(buffer, s->m.dtype, i,
                         fmax(-most, fmin(most, fattni_load(grad->data, grad->dtype, begin + i))));
        if (wide)
            update_f64(r, (double *)p->data + begin, direct ? (double *)grad->data + begin : buffer,
                       (double *)s->m.data + begin, (double *)s->v.data + begin, n);
        else
            update_f32(r, (float *)p->data + begin,
                       direct ? (float *)grad->data + begin : (float *)(void *)buffer,
                       (float *)s->m.data + begin, (float *)s->v.data + begin, n);
        for (int64_t i = begin; i < begin + n && s->master.data; ++i)
            fattni_store(value->data, value->dtype, i, (double)((const float *)p->data)[i]);
    }
}

static void run_update(void *arg, int64_t chunk, int thread) {
    (void)thread;
    const update_job *job = arg;
    const piece part = piece_of(job->a, chunk);
    const fattn_tensor *grad = &part.slot->param->grad;
    if (fattni_is_frozen(part.slot->param)) return;
    const bool decays = !(part.slot->param->flags & FATTN_PARAM_NO_DECAY);
    if (!job->skip) update_piece(decays ? &job->decayed : &job->plain, &part);
    const size_t size = fattn_dtype_size((fattn_dtype)grad->dtype);
    memset((char *)grad->data + (size_t)part.begin * size, 0,
           (size_t)(part.end - part.begin) * size);
}

/* The caller owns the params: they may have changed since creation. */
static fattn_status check_slots(const fattn_adamw *a) {
    for (int i = 0; i < a->n; ++i) {
        const slot *s = &a->slots[i];
        FATTNI_TRY(fattni_check_param(a->ctx, s->param));
        const bool thawed = s->frozen && !fattni_is_frozen(s->param);
        const fattn_tensor *value = &s->param->value;
        if (thawed || value->dtype != (int32_t)s->dtype || fattn_tensor_numel(value) != s->count)
            return fattn_ctx_fail(
                a->ctx, FATTN_E_STATE,
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
#ifdef FATTNI_HAVE_CUDA
    if (a->device) return fattni_cuda_adamw_step(a);
#endif
    fattni_parallel(a->ctx, a->chunks, chunk_norm, a);
    const fattn_tensor norms =
        fattn_tensor_view(a->partial, FATTN_F64, FATTN_CPU, 0, 1, &a->chunks);
    const fattn_adamw_options *o = &a->opt;
    const double beta1 = (double)o->beta1, beta2 = (double)o->beta2;
    fattni_adamw_begin(&a->own, norm_of(&norms, 0, a->chunks), (double)o->max_grad_norm, beta1,
                       beta2);
    update_job job = {.a = a, .skip = a->own.skip};
    job.plain = (rule){
        .norm = a->own.norm,
        .clip = a->own.clip,
        .shrink = 1,
        .beta1 = beta1,
        .beta2 = beta2,
        .rate = a->own.rate,
        .correction2 = a->own.correction2,
        .eps = (double)o->eps,
    };
    job.decayed = job.plain;
    job.decayed.shrink = 1 - a->own.lr * (double)o->weight_decay;
    fattni_parallel(a->ctx, a->chunks, run_update, &job);
    return FATTN_OK;
}

/* As it stands after all that is enqueued. */
static fattn_status read_state(const fattn_adamw *a, fattni_adamw_state *out) {
#ifdef FATTNI_HAVE_CUDA
    if (a->device) return fattni_cuda_adamw_read(a, out);
#endif
    *out = a->own;
    return FATTN_OK;
}

fattn_status fattn_adamw_grad_norm(fattn_adamw *a, double *out) {
    if (!a) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_grad_norm: out is NULL");
    if (!a->stepped)
        return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "adamw_grad_norm: no step has been made");
    fattni_adamw_state now;
    FATTNI_TRY(read_state(a, &now));
    *out = now.norm;
    return FATTN_OK;
}

fattn_status fattn_adamw_state(fattn_adamw *a, int i, fattn_adam_state which, fattn_tensor *view) {
    if (!a) return FATTN_E_ARG;
    if (!view || i < 0 || i >= a->n)
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG,
                              "adamw_state: view is NULL, or %d is not in 0..%d", i, a->n - 1);
    const slot *s = &a->slots[i];
    if (s->frozen)
        return fattn_ctx_fail(a->ctx, FATTN_E_STATE, "adamw_state: params[%d] is frozen", i);
    switch (which) {
    case FATTN_ADAM_M: *view = s->m; return FATTN_OK;
    case FATTN_ADAM_V: *view = s->v; return FATTN_OK;
    case FATTN_ADAM_MASTER:
        if (!is_half(s->dtype))
            return fattn_ctx_fail(a->ctx, FATTN_E_STATE,
                                  "adamw_state: params[%d] is %s: it has no master", i,
                                  fattn_dtype_name(s->dtype));
        *view = s->master;
        return FATTN_OK;
    default:
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_state: unknown state %d", (int)which);
    }
}

fattn_status fattn_adamw_get_step(fattn_adamw *a, int64_t *t) {
    if (!a) return FATTN_E_ARG;
    if (!t) return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_get_step: t is NULL");
    fattni_adamw_state now;
    FATTNI_TRY(read_state(a, &now));
    *t = now.step;
    return FATTN_OK;
}

fattn_status fattn_adamw_set_step(fattn_adamw *a, int64_t t) {
    if (!a) return FATTN_E_ARG;
    if (t < 0 || t > FATTNI_ADAMW_STEPS)
        return fattn_ctx_fail(a->ctx, FATTN_E_ARG, "adamw_set_step: %lld is not in 0..%lld",
                              (long long)t, (long long)FATTNI_ADAMW_STEPS);
#ifdef FATTNI_HAVE_CUDA
    if (a->device) return fattni_cuda_adamw_set(a, -1, t);
#endif
    a->own.step = t;
    return FATTN_OK;
}
