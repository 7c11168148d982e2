/* Flash attention forward on the CPU (FlashAttention-2's order, Dao 2023): rows in parallel, each
   block of them once through all keys that it sees, with an online softmax. See fwd/README.md. */
#include "cpu_tile.h"
#include "kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

/* One thread's scratch: offsets in bytes. All [..][row] arrays hold one block of rows. */
typedef struct layout {
    size_t q, s, o;          /* Q^T [D], S^T [keys], O^T [Dv] */
    size_t max, sum, decay;  /* of the online softmax, log2 units */
    size_t bytes;
} layout;

typedef struct forward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    layout at;
    int64_t blocks; /* of rows, in the longest sequence */
} forward;

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype)};
    const size_t row = FATTNI_TILE_ROW_BYTES;
    f.at.q = fattni_append(&f.at.bytes, (size_t)p->D * row);
    f.at.s = fattni_append(&f.at.bytes, FATTNI_TILE_KEYS * row);
    f.at.o = fattni_append(&f.at.bytes, (size_t)p->Dv * row);
    f.at.max = fattni_append(&f.at.bytes, row);
    f.at.sum = fattni_append(&f.at.bytes, row);
    f.at.decay = fattni_append(&f.at.bytes, row);
    f.blocks = fattni_ceil_div(p->Sq, f.k->rows);
    return f;
}

/* O = O^T / sum, L = (max + log2 sum) ln 2; a row that saw nothing gives 0 and -inf. */
static void finish(const forward *f, const fattni_sequence *seq, int64_t h, int64_t i0, int64_t rows,
                   char *scratch) {
    const fattni_problem *const p = f->p;
    const fattn_dtype type = f->k->dtype;
    void *const inverse = scratch + f->at.decay;
    for (int64_t i = 0; i < rows; ++i) {
        const double max = fattni_load(scratch + f->at.max, type, i);
        const double sum = fattni_load(scratch + f->at.sum, type, i);
        const bool empty = sum == 0;
        fattni_store(inverse, type, i, empty ? 0 : 1 / sum);
        fattni_set(&p->lse, seq->batch, h, seq->q0 + i0 + i, 0,
                   empty ? -INFINITY : max * ln_2 + log(sum));
    }
    f->k->unpack(0, rows, p->Dv, scratch + f->at.o, inverse,
                 fattni_at(&p->o, seq->batch, h, seq->q0 + i0), p->o.s[2]);
}

/* Task: one block of rows of one head. Later rows see more keys when a mask is causal, so they come
   first: short tasks at the end leave no thread idle for long. */
static void attend(void *arg, int64_t task, int thread) {
    const forward *const f = arg;
    const fattni_problem *const p = f->p;
    const fattni_cpu_kernels *const k = f->k;
    const int64_t heads = p->B * p->Hq, b = task % heads / p->Hq, h = task % p->Hq, g = h / p->group;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = (f->blocks - 1 - task / heads) * k->rows;
    const int64_t rows = fattni_min(k->rows, seq.band.Sq - i0);
    if (rows <= 0) return;

    char *const scratch = (char *)p->workspace + (size_t)thread * f->at.bytes;
    void *const s = scratch + f->at.s, *const o = scratch + f->at.o;
    void *const max = scratch + f->at.max, *const sum = scratch + f->at.sum;
    void *const decay = scratch + f->at.decay;
    k->pack(rows, p->D, fattni_at(&p->q, seq.batch, h, seq.q0 + i0), p->q.s[2], scratch + f->at.q);
    memset(o, 0, (size_t)p->Dv * FATTNI_TILE_ROW_BYTES);
    memset(sum, 0, FATTNI_TILE_ROW_BYTES);
    for (int64_t i = 0; i < k->rows; ++i) fattni_store(max, k->dtype, i, -INFINITY);

    const fattni_range keys = fattni_keys_of(&seq.band, i0, i0 + rows);
    for (int64_t j = keys.begin; j < keys.end; j += FATTNI_TILE_KEYS) {
        const fattni_tile t = {
            .rows = rows,
            .keys = fattni_min(FATTNI_TILE_KEYS, keys.end - j),
            .lo = seq.band.lo + i0 - j,
            .hi = seq.band.hi + i0 - j,
        };
        const void *const key = fattni_at(&p->k, seq.batch, g, seq.k0 + j);
        const void *const value = fattni_at(&p->v, seq.batch, g, seq.k0 + j);
        k->scores(&t, p->D, key, p->k.s[2], scratch + f->at.q, s);
        k->softmax(&t, p->scale * log2_e, s, max, sum, decay);
        k->add_keys(&t, p->Dv, value, p->v.s[2], s, decay, o);
    }
    finish(f, &seq, h, i0, rows, scratch);
}

static int64_t task_count(const forward *f) { return f->blocks * f->p->B * f->p->Hq; }

static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    (void)ctx;
    if (p->dtype != FATTN_F32 && p->dtype != FATTN_F64) return "has no 16-bit types";
    if (p->softcap > 0) return "has no softcap; FATTN_ALGO_STANDARD has";
    if (p->alibi.present) return "has no ALiBi; FATTN_ALGO_STANDARD has";
    if (p->bias.present) return "has no bias; FATTN_ALGO_STANDARD has";
    if (p->sink.present) return "has no sink; FATTN_ALGO_STANDARD has";
    if (p->drop_T) return "has no dropout; FATTN_ALGO_STANDARD has";
    if (p->flags & FATTN_MERGE) return "has no FATTN_MERGE; FATTN_ALGO_STANDARD has";
    return NULL;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const forward f = plan_forward(ctx, p);
    const int64_t threads = fattni_min(ctx->cpu_threads, task_count(&f));
    out->workspace = (size_t)threads * f.at.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_cpu_%s_%s", f.k->isa,
             fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    forward f = plan_forward(ctx, p);
    fattni_parallel(ctx, task_count(&f), attend, &f);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_cpu = {
    .family = "fattn_fwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .refuses = refuses,
    .plan = plan,
    .run = run,
};
