/* AdamW on the CPU. Partial sums are combined in the order of the chunks, so bits never depend on the number
   of threads. */
#include "autograd_c/optim/adamw.h"

#include <math.h>
#include <string.h>

enum { CHUNK = FATTNI_ADAMW_CHUNK, LANES = 8, BLOCK = 256 };

typedef fattni_adamw_slot slot;

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
    a->partial[chunk] = fattni_is_frozen(part.slot->param) ? 0 : norm_of(&part.slot->param->grad, part.begin, part.end);
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
    const float clip = (float)r->clip, shrink = (float)r->shrink, rate = (float)r->rate, eps = (float)r->eps,
                beta1 = (float)r->beta1, beta2 = (float)r->beta2, rest1 = (float)(1 - r->beta1),
                rest2 = (float)(1 - r->beta2), correction2 = (float)r->correction2;
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
            update_f32(r, (float *)p->data + begin, direct ? (float *)grad->data + begin : (float *)(void *)buffer,
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
    memset((char *)grad->data + (size_t)part.begin * size, 0, (size_t)(part.end - part.begin) * size);
}

static fattn_status step(fattn_adamw *a) {
    fattni_parallel(a->ctx, a->chunks, chunk_norm, a);
    const fattn_tensor norms = fattn_tensor_view(a->partial, FATTN_F64, FATTN_CPU, 0, 1, &a->chunks);
    const fattn_adamw_options *o = &a->opt;
    const double beta1 = (double)o->beta1, beta2 = (double)o->beta2;
    fattni_adamw_begin(&a->own, norm_of(&norms, 0, a->chunks), (double)o->max_grad_norm, beta1, beta2);
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

/* What changes from step to step lies in the optimizer itself. */
static fattn_status open_state(fattn_adamw *a) {
    (void)a;
    return FATTN_OK;
}

static void close_state(fattn_adamw *a) { (void)a; }

static fattn_status set(fattn_adamw *a, double lr, int64_t steps) {
    if (lr >= 0) a->own.lr = lr;
    if (steps >= 0) a->own.step = steps;
    return FATTN_OK;
}

static fattn_status read_state(const fattn_adamw *a, fattni_adamw_state *out) {
    *out = a->own;
    return FATTN_OK;
}

const fattni_adamw_code fattni_adamw_cpu = {open_state, close_state, step, set, read_state};
