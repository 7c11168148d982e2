/* FATTN_ALGO_STANDARD, backward on the CPU. P comes from forward; dP is stored whole. Tasks, in
   this order:

     rows of a head     delta = rowsum(dO O) - dL, dP = keep (dO V^T)/(1-p), G = P (dP - delta)
     rows of d_bias     sum of G over what broadcasts
     rows of a head     dX = G (1 - tanh(x/cap)^2), dQ = scale dX K
     keys of a head     dK = scale dX^T Q, dV = (keep P)^T dO/(1-p), over the query heads of a group
     heads              dsink = -sum exp(sink - L) delta */
#include "core/attention/huge.h"
#include "core/cpu/scores.h"
#include "core/materialized/standard.h"

#include <math.h>
#include <string.h>

/* Byte offsets: of arrays in the workspace, and inside one thread's scratch. */
typedef struct layout {
    size_t dP;           /* [B,Hq,Sq,Sk]: dP, then G, then dX, in place */
    size_t delta;        /* [B,Hq,Sq] */
    size_t scratch;      /* the threads' areas start here */
    size_t q, k, v, d_o; /* in a thread's area: copies of rows that a BLAS cannot take in place */
    size_t x;            /* [ROWS,Sk] scores again, with a softcap */
    size_t P;            /* [Sk] a row of P, where it is copied (copies_P) */
    size_t dropped;      /* [ROWS,ROWS] keep P, likewise */
    size_t grad;         /* [ROWS,D] of dq or dk */
    size_t dv;           /* [ROWS,Dv] */
    size_t sums;         /* [max_k] doubles: one row of d_bias */
    size_t thread;       /* bytes of one area */
} layout;

/* Whether products read a copy of P: from 16 bits, with dropout, or of a part of the keys. */
static bool copies_P(const fattni_problem *p) { return fattni_is_narrow(p) || p->drop_T || (p->flags & FATTN_MERGE); }

static layout layout_of(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(fattni_real(p));
    const int64_t rows = FATTNI_STANDARD_ROWS, planes = p->B * p->Hq;
    layout l = {0};
    l.dP = fattni_standard_reserve(&l.scratch, planes * p->Sq * p->Sk, element);
    l.delta = fattni_standard_reserve(&l.scratch, planes * p->Sq, element);
    const bool q = fattni_standard_direct(&p->q, p->D), k = fattni_standard_direct(&p->k, p->D);
    const bool v = fattni_standard_direct(&p->v, p->Dv);
    l.q = fattni_standard_reserve(&l.thread, q ? 0 : p->Sq * p->D, element);
    l.k = fattni_standard_reserve(&l.thread, k ? 0 : p->Sk * p->D, element);
    l.v = fattni_standard_reserve(&l.thread, v ? 0 : p->Sk * p->Dv, element);
    l.d_o = fattni_standard_reserve(&l.thread, p->Sq * p->Dv, element); /* a query may lack d_o */
    l.x = fattni_standard_reserve(&l.thread, p->softcap > 0 ? rows * p->Sk : 0, element);
    l.P = fattni_standard_reserve(&l.thread, copies_P(p) ? p->Sk : 0, element);
    l.dropped = fattni_standard_reserve(&l.thread, copies_P(p) ? rows * rows : 0, element);
    l.grad = fattni_standard_reserve(&l.thread, rows * p->D, element);
    l.dv = fattni_standard_reserve(&l.thread, rows * p->Dv, element);
    l.sums = fattni_standard_reserve(&l.thread, p->bias.present ? fattni_max(p->max_k, 1) : 0, sizeof(double));
    return l;
}

typedef struct job {
    const fattn_ctx *ctx;
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    layout layout;
    int64_t blocks; /* of rows, or keys, per head */
} job;

/* Element n of an array of reals in the workspace. */
static void *real_at(const job *w, size_t offset, int64_t n) {
    return (char *)w->p->workspace + offset + (size_t)n * fattn_dtype_size(w->k->dtype);
}

static void *in_scratch(const job *w, int thread, size_t offset) {
    return (char *)w->p->workspace + w->layout.scratch + (size_t)thread * w->layout.thread + offset;
}

/* A block of rows, or keys, of one head of one sequence. */
typedef struct part {
    fattni_sequence seq;
    int64_t b, h, begin, count; /* count <= 0: past the end */
} part;

static part part_of(const job *w, int64_t task, int64_t heads, bool of_keys) {
    const int64_t block = task % w->blocks, plane = task / w->blocks;
    part x = {.b = plane / heads, .h = plane % heads, .begin = block * FATTNI_STANDARD_ROWS};
    x.seq = fattni_sequence_of(w->p, x.b);
    const int64_t rest = (of_keys ? x.seq.band.Sk : x.seq.band.Sq) - x.begin;
    x.count = fattni_min(FATTNI_STANDARD_ROWS, rest);
    return x;
}

/* Rows of a gradient from x[count, width]: overwritten or added to. */
static void put(const job *w, const fattni_array *a, bool add, int64_t b, int64_t h, int64_t row, int64_t count,
                int64_t width, const void *x) {
    w->k->put(count, width, x, width, add, (fattn_dtype)a->dtype, fattni_at(a, b, h, row), a->s[2]);
}

/* P from element `at` on, where it is stored. */
static const void *stored_P(const fattni_problem *p, int64_t at) {
    return (const char *)p->saved + (size_t)at * fattn_dtype_size(p->dtype);
}

/* What index n along dimension d of d_bias stands for: itself, or all. */
static fattni_range along(const fattni_array *d_bias, int d, int64_t n, int64_t all) {
    return d_bias->s[d] ? (fattni_range){n, n + 1} : (fattni_range){0, all};
}

static int64_t bias_blocks(const fattni_problem *p) {
    return fattni_ceil_div(fattni_distinct(&p->d_bias, 2), FATTNI_STANDARD_ROWS);
}

/* The tasks that compute with elements. */
#define BODY "bwd/materialized/bwd_standard.inc"
#include "core/base/for_each_real.inc"

/* dv += (keep P)^T dO/(1-p) for query head h; P's element `at` is of the block's first key. */
static void add_value_gradients(const job *w, int thread, const part *x, int64_t h, int64_t at, fattni_matrix d_o,
                                void *dv) {
    const fattni_problem *const p = w->p;
    const int64_t Sq = x->seq.band.Sq;
    const uint8_t *const mask = fattni_standard_mask(p);
    if (!copies_P(p)) {
        const fattni_matrix P = {stored_P(p, at), p->Sk};
        fattni_standard_add_at_b(w->ctx, w->k->dtype, x->count, p->Dv, Sq, 1, P, d_o, dv);
        return;
    }
    void *const dropped = in_scratch(w, thread, w->layout.dropped);
    const size_t real = fattn_dtype_size(w->k->dtype);
    for (int64_t i = 0; i < Sq; i += FATTNI_STANDARD_ROWS) {
        const int64_t rows = fattni_min(FATTNI_STANDARD_ROWS, Sq - i), first = at + i * p->Sk;
        const fattni_matrix rows_of_d_o = {(const char *)d_o.p + (size_t)(i * d_o.ld) * real, d_o.ld};
        fattni_standard_drop(w->k, p->dtype, stored_P(p, first), mask ? mask + first : NULL, p->Sk, rows, x->count,
                             dropped);
        (w->k->dtype == FATTN_F64 ? scale_rows_f64 : scale_rows_f32)(p, &x->seq, x->b, h, i, rows, x->count, dropped);
        fattni_standard_add_at_b(w->ctx, w->k->dtype, x->count, p->Dv, rows, p->keep_scale,
                                 (fattni_matrix){dropped, x->count}, rows_of_d_o, dv);
    }
}

/* dK and dV of a block of keys of a key head. */
static void key_gradients(void *arg, int64_t task, int thread) {
    const job *const w = arg;
    const fattni_problem *const p = w->p;
    const part x = part_of(w, task, p->Hkv, true);
    if (x.count <= 0) return;
    const int64_t Sq = x.seq.band.Sq, batch = x.seq.batch;
    const size_t real = fattn_dtype_size(w->k->dtype);
    void *const dk = in_scratch(w, thread, w->layout.grad);
    void *const dv = in_scratch(w, thread, w->layout.dv);
    memset(dk, 0, (size_t)(x.count * p->D) * real);
    memset(dv, 0, (size_t)(x.count * p->Dv) * real);
    for (int64_t h = x.h * p->group; h < (x.h + 1) * p->group; ++h) {
        const int64_t at = fattni_standard_at(p, x.b, h, 0) + x.begin;
        if (p->dk.present) {
            const fattni_matrix dX = {real_at(w, w->layout.dP, at), p->Sk};
            const fattni_matrix q =
                fattni_standard_rows(w->k, &p->q, batch, h, x.seq.q0, Sq, p->D, in_scratch(w, thread, w->layout.q));
            fattni_standard_add_at_b(w->ctx, w->k->dtype, x.count, p->D, Sq, p->scale, dX, q, dk);
        }
        if (p->dv.present) {
            const fattni_matrix d_o = fattni_standard_rows(w->k, &p->d_o, batch, h, x.seq.q0, Sq, p->Dv,
                                                           in_scratch(w, thread, w->layout.d_o));
            add_value_gradients(w, thread, &x, h, at, d_o, dv);
        }
    }
    const int64_t row = x.seq.k0 + x.begin;
    if (p->dk.present) put(w, &p->dk, p->flags & FATTN_ACC_DK, batch, x.h, row, x.count, p->D, dk);
    if (p->dv.present) put(w, &p->dv, p->flags & FATTN_ACC_DV, batch, x.h, row, x.count, p->Dv, dv);
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_standard_why_unsupported(p);
    if (reason) return reason;
    const layout l = layout_of(p);
    const size_t workspace = l.scratch + (size_t)fattni_standard_threads(ctx, p) * l.thread;
    fattni_standard_plan(p, "fattn_bwd_standard", workspace, out);
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    const bool f64 = p->dtype == FATTN_F64;
    const int64_t row_blocks = fattni_ceil_div(p->Sq, FATTNI_STANDARD_ROWS);
    const int64_t key_blocks = fattni_ceil_div(p->Sk, FATTNI_STANDARD_ROWS);
    job w = {
        .ctx = ctx, .p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype), .layout = layout_of(p), .blocks = row_blocks};
    fattni_parallel(ctx, p->B * p->Hq * row_blocks, f64 ? score_gradients_f64 : score_gradients_f32, &w);
    if (p->d_bias.present)
        fattni_parallel(ctx, fattni_distinct(&p->d_bias, 0) * fattni_distinct(&p->d_bias, 1) * bias_blocks(p),
                        f64 ? bias_gradients_f64 : bias_gradients_f32, &w);
    if (p->dq.present || p->softcap > 0)
        fattni_parallel(ctx, p->B * p->Hq * row_blocks, f64 ? query_gradients_f64 : query_gradients_f32, &w);
    w.blocks = key_blocks;
    if (p->dk.present || p->dv.present) fattni_parallel(ctx, p->B * p->Hkv * key_blocks, key_gradients, &w);
    if (p->d_sink.present) fattni_parallel(ctx, p->Hq, f64 ? sink_gradient_f64 : sink_gradient_f32, &w);
    return FATTN_OK;
}

const fattni_kernel fattni_bwd_standard = {
    .family = "fattn_bwd_standard",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .plan = plan,
    .run = run,
};
