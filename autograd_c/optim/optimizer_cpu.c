/* AdamW and SGD on the CPU. Partial sums are combined in the order of the chunks, so bits never depend on the number
   of threads. */
#include "core/base/isa_clones.h"
#include "autograd_c/optim/optimizer.h"
#include "core/tensor/stochastic_rounding.h"

#include <math.h>
#include <string.h>

enum { CHUNK = FATTNI_OPTIMIZER_CHUNK, LANES = 8, BLOCK = 256 };

typedef fattni_optimizer_slot slot;

/* Chunk number `chunk`: elements [begin, end) of one slot. */
typedef struct piece {
    slot *slot;
    int64_t begin, end;
} piece;

static piece piece_of(const fattni_optimizer *a, int64_t chunk) {
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
    const double squares = sum_squares(g, begin, end, 1), unit = FATTNI_OPTIMIZER_UNIT;
    return isfinite(squares) ? sqrt(squares) : sqrt(sum_squares(g, begin, end, 1 / unit)) * unit;
}

/* Whether the state of the piece is here, not on another rank. */
static bool is_own(const piece *p) { return p->begin >= p->slot->begin && p->begin < p->slot->end; }

static void chunk_norm(void *arg, int64_t chunk, int thread) {
    (void)thread;
    const fattni_optimizer *a = arg;
    const piece part = piece_of(a, chunk);
    const bool counts = !fattni_is_frozen(part.slot->param) && is_own(&part);
    a->partial[chunk] = counts ? norm_of(&part.slot->param->grad, part.begin, part.end) : 0;
}

/* What one step does to every element. */
typedef struct rule {
    const fattni_optimizer *a;
    double norm, factor, shrink, beta1, beta2, rate, correction2, eps; /* norm: of the gradients as they are */
    double lr, decay;                                                  /* of SGD, whose momentum is beta1 */
    bool is_sgd, nesterov;
} rule;

typedef struct update_job {
    fattni_optimizer *a;
    rule decayed, plain;
    bool skip; /* the norm is not finite: no update */
} update_job;

static FATTNI_CLONED void update_f32(const rule *r, float *p, const float *g, float *m, float *v, int64_t n) {
    const float factor = (float)r->factor, shrink = (float)r->shrink, rate = (float)r->rate, eps = (float)r->eps,
                beta1 = (float)r->beta1, beta2 = (float)r->beta2, rest1 = (float)(1 - r->beta1),
                rest2 = (float)(1 - r->beta2), correction2 = (float)r->correction2;
    for (int64_t i = 0; i < n; ++i) {
        const float x = factor * g[i];
        m[i] = beta1 * m[i] + rest1 * x;
        v[i] = beta2 * v[i] + rest2 * x * x;
        p[i] = shrink * p[i] - rate * m[i] / (sqrtf(correction2 * v[i]) + eps);
    }
}

static FATTNI_CLONED void update_f64(const rule *r, double *p, const double *g, double *m, double *v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const double x = r->factor * g[i];
        m[i] = r->beta1 * m[i] + (1 - r->beta1) * x;
        v[i] = r->beta2 * v[i] + (1 - r->beta2) * x * x;
        p[i] = r->shrink * p[i] - r->rate * m[i] / (sqrt(r->correction2 * v[i]) + r->eps);
    }
}

/* m NULL: no momentum. */
static FATTNI_CLONED void sgd_f32(const rule *r, float *p, const float *g, float *m, int64_t n) {
    const float factor = (float)r->factor, lr = (float)r->lr, decay = (float)r->decay, momentum = (float)r->beta1;
    for (int64_t i = 0; i < n; ++i) {
        const float x = factor * g[i] + decay * p[i];
        if (m) m[i] = momentum * m[i] + x;
        p[i] -= lr * (!m ? x : r->nesterov ? x + momentum * m[i] : m[i]);
    }
}

static FATTNI_CLONED void sgd_f64(const rule *r, double *p, const double *g, double *m, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const double x = r->factor * g[i] + r->decay * p[i];
        if (m) m[i] = r->beta1 * m[i] + x;
        p[i] -= r->lr * (!m ? x : r->nesterov ? x + r->beta1 * m[i] : m[i]);
    }
}

/* Element i of t; NULL where there is no such tensor. */
static void *state_at(const fattn_tensor *t, int64_t i) {
    return t->data ? (char *)t->data + (size_t)i * fattn_dtype_size((fattn_dtype)t->dtype) : NULL;
}

/* A 16-bit value's elements begin to begin + n - 1, to or from F32. */
static void load_block(float *x, const fattn_tensor *value, int64_t begin, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = (float)fattni_load(value->data, value->dtype, begin + i);
}
static void store_block(const rule *r, const slot *s, int64_t begin, const float *x, int64_t n) {
    const fattn_tensor *const value = &s->param->value;
    const int32_t param = (int32_t)(s - r->a->slots);
    if (!(r->a->rule.flags & FATTN_OPTIM_STOCHASTIC_ROUNDING)) {
        for (int64_t i = 0; i < n; ++i) fattni_store(value->data, value->dtype, begin + i, (double)x[i]);
        return;
    }
    fattni_block bits = {{0}};
    for (int64_t i = 0; i < n; ++i) { /* blocks begin at multiples of 4 */
        if (i % 4 == 0) bits = fattni_rounding_bits(r->a->rule.seed, r->a->own.step, param, (begin + i) / 4);
        ((uint16_t *)value->data)[begin + i] = fattni_half_stochastic(value->dtype, x[i], bits.w[i % 4]);
    }
}

/* Moments and arithmetic are F32, or F64 for F64 values. Gradients of another dtype are converted, too large ones
   bounded, of which the norm tells whether there may be any; 16-bit values follow their masters, or are converted, too.
   */
static FATTNI_CLONED void update_piece(const rule *r, const piece *part) {
    const slot *s = part->slot;
    const fattn_tensor *value = &s->param->value, *grad = &s->param->grad;
    const bool wide = value->dtype == FATTN_F64;
    const fattn_dtype dtype = wide ? FATTN_F64 : FATTN_F32;
    const double most =
        r->is_sgd ? INFINITY : (wide ? FATTNI_OPTIMIZER_MOST_F64 : (double)FATTNI_OPTIMIZER_MOST_F32) / r->factor;
    const bool direct = grad->dtype == (int32_t)dtype && r->norm <= most;
    const int64_t first = s->begin; /* element 0 of state */
    double buffer[BLOCK];
    float narrow[BLOCK];
    for (int64_t begin = part->begin; begin < part->end; begin += BLOCK) {
        const int64_t n = fattni_min(BLOCK, part->end - begin);
        for (int64_t i = 0; i < n && !direct; ++i)
            fattni_store(buffer, (int32_t)dtype, i,
                         fmax(-most, fmin(most, fattni_load(grad->data, grad->dtype, begin + i))));
        void *const g = direct ? state_at(grad, begin) : buffer;
        void *const at = s->has_master ? state_at(&s->master, begin - first)
                         : s->is_half  ? narrow
                                       : state_at(value, begin);
        if (at == narrow) load_block(narrow, value, begin, n);
        void *const m = state_at(&s->m, begin - first), *const v = state_at(&s->v, begin - first);
        if (r->is_sgd && wide)
            sgd_f64(r, at, g, m, n);
        else if (r->is_sgd)
            sgd_f32(r, at, g, m, n);
        else if (wide)
            update_f64(r, at, g, m, v, n);
        else
            update_f32(r, at, g, m, v, n);
        if (s->is_half) store_block(r, s, begin, at, n);
    }
}

static FATTNI_CLONED void run_update(void *arg, int64_t chunk, int thread) {
    (void)thread;
    const update_job *job = arg;
    const piece part = piece_of(job->a, chunk);
    const fattn_tensor *grad = &part.slot->param->grad;
    if (fattni_is_frozen(part.slot->param) || !is_own(&part)) return;
    const bool decays = !(part.slot->param->flags & FATTN_PARAM_NO_DECAY);
    if (!job->skip) update_piece(decays ? &job->decayed : &job->plain, &part);
    if (fattni_is_one_pass(part.slot->param)) return;
    const size_t size = fattn_dtype_size((fattn_dtype)grad->dtype);
    memset((char *)grad->data + (size_t)part.begin * size, 0, (size_t)(part.end - part.begin) * size);
}

FATTNI_TASKS_BY_ISA(run_update)

static fattn_status step(fattni_optimizer *a) {
    fattni_parallel(a->ctx, a->chunks, chunk_norm, a);
    FATTNI_TRY(fattni_optimizer_share_norms(a));
    const fattn_tensor norms = fattn_tensor_view(a->partial, FATTN_F64, FATTN_CPU, 0, 1, &a->chunks);
    const fattni_optimizer_rule *const o = &a->rule;
    const double norm = norm_of(&norms, 0, a->chunks);
    const double t = (double)(a->own.step + 1);
    fattni_optimizer_begin(&a->own, norm, o->max_grad_norm, pow(o->beta1, t), pow(o->beta2, t), &o->scaling);
    update_job job = {.a = a, .skip = a->own.skip};
    job.plain = (rule){
        .a = a,
        .norm = norm,
        .factor = a->own.factor,
        .shrink = 1,
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .rate = a->own.rate,
        .correction2 = a->own.correction2,
        .eps = o->eps,
        .lr = a->own.lr,
        .is_sgd = o->is_sgd,
        .nesterov = o->nesterov,
    };
    job.decayed = job.plain;
    job.decayed.shrink = 1 - a->own.lr * o->weight_decay;
    job.decayed.decay = o->weight_decay;
    fattni_parallel(a->ctx, a->chunks, run_update_by_isa[a->ctx->isa], &job);
    return FATTN_OK;
}

/* What changes from step to step lies in the optimizer itself. */
static fattn_status open_state(fattni_optimizer *a) {
    (void)a;
    return FATTN_OK;
}

static void close_state(fattni_optimizer *a) { (void)a; }

static fattn_status set(fattni_optimizer *a, const fattni_optimizer_change *c) {
    fattni_optimizer_apply(&a->own, c);
    return FATTN_OK;
}

static fattn_status read_state(const fattni_optimizer *a, fattni_optimizer_state *out) {
    *out = a->own;
    return FATTN_OK;
}

const fattni_optimizer_code fattni_optimizer_cpu = {open_state, close_state, step, set, read_state};
