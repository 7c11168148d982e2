/* Flash attention backward on the CPU (FlashAttention-2's order, Dao 2023): column blocks of keys,
   each once through all rows that see it, S and P computed again from L. See bwd/README.md.

   Every sum has one order, whatever the threads do: dQ over key tiles, dK and dV over the query heads
   of the group and the row blocks in them, all ascending. So one pass over (sequence, key head) and two
   passes, one for dQ by row blocks and one for dK, dV by column blocks, give the same bits, and the
   choice between them may look at the number of threads. */
#include "cpu_tile.h"
#include "kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double log2_e = 1.4426950408889634;

enum { WANT_DQ = 1, WANT_DK = 2, WANT_DV = 4, WANT_KEYS = WANT_DK | WANT_DV };

/* dK and dV of a column block stay in the second-level cache. */
enum { COLUMN_BYTES = 256 << 10, FEWEST_COLUMNS = 2 * FATTNI_TILE_KEYS, MOST_COLUMNS = 512 };

/* One thread's scratch, and delta before all of them: offsets in bytes. [..][row] arrays hold one
   block of rows. */
typedef struct layout {
    size_t q, d_o, dq;         /* Q^T [D], dO^T [Dv], dQ^T [D] */
    size_t lse, delta;         /* L in log2 units, and its rounding error */
    size_t p, ds;              /* P^T, dS^T [keys] */
    size_t q_rows, d_o_rows;   /* [row][D_pad], [row][Dv_pad], when D is not whole vectors */
    size_t dk, dv;             /* [column block][D_pad], [..][Dv_pad] */
    size_t bytes;
} layout;

typedef struct backward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    layout at;
    unsigned want;
    bool one_pass;
    int64_t row_blocks, column_blocks; /* in the longest sequence */
    int64_t columns;                   /* of a column block */
    int64_t D_pad, Dv_pad;             /* whole vectors */
    int64_t threads;                   /* that have scratch */
    size_t delta_bytes;
} backward;

static int64_t column_size(const fattni_problem *p, const backward *w) {
    const int64_t key_bytes = (w->D_pad + w->Dv_pad) * (int64_t)fattn_dtype_size(w->k->dtype);
    const int64_t size = COLUMN_BYTES / key_bytes / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
    const int64_t needed = fattni_round_up(fattni_max(p->Sk, 1), FATTNI_TILE_KEYS);
    return fattni_min(fattni_clamp(size, FEWEST_COLUMNS, MOST_COLUMNS), needed);
}

static backward plan_backward(const fattn_ctx *ctx, const fattni_problem *p) {
    backward w = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype)};
    w.want = (p->dq.present ? WANT_DQ : 0u) | (p->dk.present ? WANT_DK : 0u) |
             (p->dv.present ? WANT_DV : 0u);
    w.D_pad = fattni_round_up(p->D, w.k->lanes);
    w.Dv_pad = fattni_round_up(p->Dv, w.k->lanes);
    w.row_blocks = fattni_ceil_div(p->Sq, w.k->rows);
    w.columns = column_size(p, &w);

    /* One pass is 5 products per tile, two are 7 but have more tasks: better when one pass would leave
       more than 2 of 7 threads idle. */
    const int64_t pairs = p->B * p->Hkv, threads = ctx->cpu_threads;
    const bool both = (w.want & WANT_DQ) && (w.want & WANT_KEYS);
    w.one_pass = both && 5 * fattni_ceil_div(pairs, threads) * threads <= 7 * pairs;
    if (!w.one_pass) {
        const int64_t enough = fattni_ceil_div(4 * threads, fattni_max(pairs, 1));
        const int64_t size = fattni_round_up(fattni_ceil_div(fattni_max(p->Sk, 1), enough),
                                             FATTNI_TILE_KEYS);
        w.columns = fattni_min(w.columns, size);
    }
    w.column_blocks = fattni_ceil_div(p->Sk, w.columns);
    const int64_t row_tasks = p->B * p->Hq * w.row_blocks, key_tasks = pairs * w.column_blocks;
    w.threads = fattni_min(threads, w.one_pass ? pairs : fattni_max(row_tasks, key_tasks));

    const size_t real = fattn_dtype_size(w.k->dtype), row = FATTNI_TILE_ROW_BYTES;
    const size_t rows = (size_t)w.k->rows, D = (size_t)p->D, Dv = (size_t)p->Dv;
    const size_t columns = (size_t)w.columns, D_pad = (size_t)w.D_pad, Dv_pad = (size_t)w.Dv_pad;
    layout *const at = &w.at;
    at->q = fattni_append(&at->bytes, D * row);
    at->d_o = fattni_append(&at->bytes, Dv * row);
    at->dq = fattni_append(&at->bytes, w.want & WANT_DQ ? D * row : 0);
    at->lse = fattni_append(&at->bytes, 2 * row);
    at->delta = fattni_append(&at->bytes, row);
    at->p = fattni_append(&at->bytes, FATTNI_TILE_KEYS * row);
    at->ds = fattni_append(&at->bytes, FATTNI_TILE_KEYS * row);
    const bool pad_q = (w.want & WANT_DK) && D_pad != D, pad_d_o = (w.want & WANT_DV) && Dv_pad != Dv;
    at->q_rows = fattni_append(&at->bytes, pad_q ? rows * D_pad * real : 0);
    at->d_o_rows = fattni_append(&at->bytes, pad_d_o ? rows * Dv_pad * real : 0);
    at->dk = fattni_append(&at->bytes, w.want & WANT_DK ? columns * D_pad * real : 0);
    at->dv = fattni_append(&at->bytes, w.want & WANT_DV ? columns * Dv_pad * real : 0);
    if (!p->delta.present)
        fattni_append(&w.delta_bytes, (size_t)p->Hq * (size_t)p->rows_q * real *
                                          (p->packed ? 1 : (size_t)p->B));
    return w;
}

static char *scratch_of(const backward *w, int thread) {
    return (char *)w->p->workspace + w->delta_bytes + (size_t)thread * w->at.bytes;
}

/* Place of (batch, h, row) in the workspace's delta. */
static int64_t delta_index(const fattni_problem *p, int64_t batch, int64_t h, int64_t row) {
    return (batch * p->Hq + h) * p->rows_q + row;
}

/* ---- before: delta, and zero gradients of rows that no key reaches ---- */

/* Rows that see some key: one run, because every mask is a band. */
static fattni_range live_rows(const fattni_sequence *seq) {
    if (seq->band.Sk == 0) return (fattni_range){0, 0};
    return fattni_rows_of(&seq->band, 0, seq->band.Sk);
}

static void zero_rows(const fattni_array *a, int64_t columns, int64_t batch, int64_t h, int64_t begin,
                      int64_t end) {
    const size_t bytes = (size_t)columns * fattn_dtype_size((fattn_dtype)a->dtype);
    for (int64_t i = begin; i < end; ++i) memset(fattni_at(a, batch, h, i), 0, bytes);
}

/* Task: one block of rows of one head. */
static void prepare(void *arg, int64_t task, int thread) {
    (void)thread;
    const backward *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t bh = task / w->row_blocks, b = bh / p->Hq, h = bh % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = task % w->row_blocks * w->k->rows, row = seq.q0 + i0;
    const int64_t rows = fattni_min(w->k->rows, seq.band.Sq - i0);
    if (rows <= 0) return;
    if (!p->delta.present) {
        char *const delta = p->workspace;
        const int64_t at = delta_index(p, seq.batch, h, row);
        w->k->dots(rows, p->Dv, fattni_at(&p->d_o, seq.batch, h, row), p->d_o.s[2],
                   fattni_at(&p->o, seq.batch, h, row), p->o.s[2],
                   delta + at * (int64_t)fattn_dtype_size(w->k->dtype));
        for (int64_t i = 0; p->d_lse.present && i < rows; ++i)
            fattni_store(delta, w->k->dtype, at + i,
                         fattni_load(delta, w->k->dtype, at + i) -
                             fattni_get(&p->d_lse, seq.batch, h, row + i, 0));
    }
    if (!(w->want & WANT_DQ) || (p->flags & FATTN_ACC_DQ)) return;
    const fattni_range live = live_rows(&seq);
    zero_rows(&p->dq, p->D, seq.batch, h, row, seq.q0 + fattni_clamp(live.begin, i0, i0 + rows));
    zero_rows(&p->dq, p->D, seq.batch, h, seq.q0 + fattni_clamp(live.end, i0, i0 + rows), row + rows);
}

/* ---- tiles ---- */

/* A block of rows of one head, packed into a thread's scratch. */
typedef struct row_block {
    const fattni_sequence *seq;
    int64_t h, i0, rows;
    char *scratch;
    const void *q, *d_o;           /* [row][..] for dK and dV: the caller's, or padded copies */
    int64_t q_stride, d_o_stride;
} row_block;

static void pad_rows(const backward *w, int64_t rows, int64_t columns, int64_t pad, const void **x,
                     int64_t *stride, char *copy) {
    const size_t real = fattn_dtype_size(w->k->dtype);
    for (int64_t i = 0; i < rows; ++i) {
        char *const to = copy + (size_t)(i * pad) * real;
        memcpy(to, (const char *)*x + i * *stride * (int64_t)real, (size_t)columns * real);
        memset(to + (size_t)columns * real, 0, (size_t)(pad - columns) * real);
    }
    *x = copy;
    *stride = pad;
}

static row_block pack_rows(const backward *w, const fattni_sequence *seq, int64_t h, int64_t i0,
                           char *scratch) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const int64_t row = seq->q0 + i0;
    row_block r = {.seq = seq, .h = h, .i0 = i0, .rows = fattni_min(k->rows, seq->band.Sq - i0),
                   .scratch = scratch, .q_stride = p->q.s[2], .d_o_stride = p->d_o.s[2]};
    r.q = fattni_at(&p->q, seq->batch, h, row);
    r.d_o = fattni_at(&p->d_o, seq->batch, h, row);
    k->pack(r.rows, p->D, r.q, r.q_stride, scratch + w->at.q);
    k->pack(r.rows, p->Dv, r.d_o, r.d_o_stride, scratch + w->at.d_o);
    for (int64_t i = 0; i < k->rows; ++i) {
        /* A row without keys, and the padding: L = +inf makes P = 0. */
        double lse = INFINITY, delta = 0;
        if (i < r.rows) {
            const double given = fattni_get(&p->lse, seq->batch, h, row + i, 0);
            if (given != -INFINITY) {
                lse = given * log2_e;
                delta = p->delta.present ? fattni_get(&p->delta, seq->batch, h, row + i, 0)
                                         : fattni_load(p->workspace, k->dtype,
                                                       delta_index(p, seq->batch, h, row + i));
            }
        }
        char *const L = scratch + w->at.lse;
        fattni_store(L, k->dtype, i, lse);
        fattni_store(L, k->dtype, k->rows + i,
                     lse < INFINITY ? lse - fattni_load(L, k->dtype, i) : 0);
        fattni_store(scratch + w->at.delta, k->dtype, i, delta);
    }
    if ((w->want & WANT_DK) && w->D_pad != p->D)
        pad_rows(w, r.rows, p->D, w->D_pad, &r.q, &r.q_stride, scratch + w->at.q_rows);
    if ((w->want & WANT_DV) && w->Dv_pad != p->Dv)
        pad_rows(w, r.rows, p->Dv, w->Dv_pad, &r.d_o, &r.d_o_stride, scratch + w->at.d_o_rows);
    return r;
}

/* The rows' part in dQ^T, and in dK and dV of the keys [columns.begin, columns.end), tile by tile. */
static void backward_tiles(const backward *w, const row_block *r, fattni_range columns, unsigned want) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const fattni_band *const band = &r->seq->band;
    const fattni_range keys = fattni_keys_of(band, r->i0, r->i0 + r->rows);
    const int64_t end = fattni_min(keys.end, columns.end), g = r->h / p->group;
    const int64_t real = (int64_t)fattn_dtype_size(k->dtype);
    char *const s = r->scratch, *const probability = s + w->at.p, *const ds = s + w->at.ds;
    /* Tiles lie on one grid, whatever the mask and the pass. */
    int64_t j = fattni_max(keys.begin, columns.begin) / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
    for (; j < end; j += FATTNI_TILE_KEYS) {
        const fattni_tile t = {
            .rows = r->rows,
            .keys = fattni_min(FATTNI_TILE_KEYS, end - j),
            .lo = band->lo + r->i0 - j,
            .hi = band->hi + r->i0 - j,
        };
        const void *const key = fattni_at(&p->k, r->seq->batch, g, r->seq->k0 + j);
        const void *const value = fattni_at(&p->v, r->seq->batch, g, r->seq->k0 + j);
        k->scores(&t, p->D, key, p->k.s[2], s + w->at.q, probability);
        k->scores(&t, p->Dv, value, p->v.s[2], s + w->at.d_o, ds);
        k->gradient(&t, p->scale * log2_e, p->scale, s + w->at.lse, s + w->at.delta, probability, ds);
        if (want & WANT_DV)
            k->add_rows(&t, w->Dv_pad, probability, r->d_o, r->d_o_stride,
                        s + w->at.dv + (j - columns.begin) * w->Dv_pad * real);
        if (want & WANT_DK)
            k->add_rows(&t, w->D_pad, ds, r->q, r->q_stride,
                        s + w->at.dk + (j - columns.begin) * w->D_pad * real);
        if (want & WANT_DQ) k->add_keys(&t, p->D, key, p->k.s[2], ds, NULL, s + w->at.dq);
    }
}

/* dQ^T starts from zero, or from dq: what the caller wants to add to, or column blocks before. */
static void load_dq(const backward *w, const row_block *r, bool from_dq) {
    const fattni_problem *const p = w->p;
    void *const dq = r->scratch + w->at.dq;
    if (from_dq)
        w->k->pack(r->rows, p->D, fattni_at(&p->dq, r->seq->batch, r->h, r->seq->q0 + r->i0),
                   p->dq.s[2], dq);
    else
        memset(dq, 0, (size_t)p->D * FATTNI_TILE_ROW_BYTES);
}

static void store_dq(const backward *w, const row_block *r) {
    const fattni_problem *const p = w->p;
    const fattni_range live = live_rows(r->seq);
    w->k->unpack(fattni_clamp(live.begin - r->i0, 0, r->rows),
                 fattni_clamp(live.end - r->i0, 0, r->rows), p->D, r->scratch + w->at.dq, NULL,
                 fattni_at(&p->dq, r->seq->batch, r->h, r->seq->q0 + r->i0), p->dq.s[2]);
}

/* Sums of the column block that begins at key `begin` go to dk or dv. Nothing is added to keys that
   no row sees. */
static void store_keys(const backward *w, const fattni_sequence *seq, const fattni_array *a, int64_t g,
                       int64_t width, int64_t pad, const char *sums, bool add, fattni_range keys) {
    const int64_t begin = keys.begin;
    if (add) {
        const fattni_range live = fattni_keys_of(&seq->band, 0, fattni_max(seq->band.Sq, 1));
        keys.begin = fattni_clamp(live.begin, keys.begin, keys.end);
        keys.end = seq->band.Sq ? fattni_clamp(live.end, keys.begin, keys.end) : keys.begin;
    }
    if (keys.end <= keys.begin) return;
    const int64_t real = (int64_t)fattn_dtype_size(w->k->dtype);
    w->k->put(keys.end - keys.begin, width, sums + (keys.begin - begin) * pad * real, pad, add,
              fattni_at(a, seq->batch, g, seq->k0 + keys.begin), a->s[2]);
}

/* Column block number `block` of one key head, against all rows of its query heads. */
static void column_block(const backward *w, const fattni_sequence *seq, int64_t g, int64_t block,
                         unsigned want, char *scratch) {
    const fattni_problem *const p = w->p;
    const size_t real = fattn_dtype_size(w->k->dtype);
    const fattni_range columns = {block * w->columns,
                                  fattni_min((block + 1) * w->columns, seq->band.Sk)};
    if (columns.end <= columns.begin) return;
    const size_t count = (size_t)(columns.end - columns.begin);
    if (want & WANT_DK) memset(scratch + w->at.dk, 0, count * (size_t)w->D_pad * real);
    if (want & WANT_DV) memset(scratch + w->at.dv, 0, count * (size_t)w->Dv_pad * real);
    const fattni_range rows = fattni_rows_of(&seq->band, columns.begin, columns.end);
    for (int64_t h = g * p->group; h < (g + 1) * p->group; ++h)
        for (int64_t i0 = rows.begin / w->k->rows * w->k->rows; i0 < rows.end; i0 += w->k->rows) {
            const row_block r = pack_rows(w, seq, h, i0, scratch);
            if (want & WANT_DQ) {
                const fattni_range keys = fattni_keys_of(&seq->band, i0, i0 + r.rows);
                load_dq(w, &r, (p->flags & FATTN_ACC_DQ) || keys.begin < columns.begin);
            }
            backward_tiles(w, &r, columns, want);
            if (want & WANT_DQ) store_dq(w, &r);
        }
    if (want & WANT_DK)
        store_keys(w, seq, &p->dk, g, p->D, w->D_pad, scratch + w->at.dk, p->flags & FATTN_ACC_DK,
                   columns);
    if (want & WANT_DV)
        store_keys(w, seq, &p->dv, g, p->Dv, w->Dv_pad, scratch + w->at.dv, p->flags & FATTN_ACC_DV,
                   columns);
}

/* ---- tasks ---- */

/* One key head: everything. */
static void head_task(void *arg, int64_t task, int thread) {
    const backward *const w = arg;
    const fattni_sequence seq = fattni_sequence_of(w->p, task / w->p->Hkv);
    for (int64_t n = 0; n < w->column_blocks; ++n)
        column_block(w, &seq, task % w->p->Hkv, n, w->want, scratch_of(w, thread));
}

/* One column block of one key head: dK and dV. The first blocks see most rows when a mask is causal;
   as in forward, long tasks come first. */
static void column_task(void *arg, int64_t task, int thread) {
    const backward *const w = arg;
    const int64_t pairs = w->p->B * w->p->Hkv, pair = task % pairs;
    const fattni_sequence seq = fattni_sequence_of(w->p, pair / w->p->Hkv);
    column_block(w, &seq, pair % w->p->Hkv, task / pairs, w->want & WANT_KEYS, scratch_of(w, thread));
}

/* One row block of one query head: dQ. */
static void row_task(void *arg, int64_t task, int thread) {
    const backward *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t planes = p->B * p->Hq, b = task % planes / p->Hq, h = task % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = (w->row_blocks - 1 - task / planes) * w->k->rows;
    const fattni_range live = live_rows(&seq);
    if (i0 >= live.end || i0 + w->k->rows <= live.begin) return;
    const row_block r = pack_rows(w, &seq, h, i0, scratch_of(w, thread));
    load_dq(w, &r, p->flags & FATTN_ACC_DQ);
    backward_tiles(w, &r, (fattni_range){0, seq.band.Sk}, WANT_DQ);
    store_dq(w, &r);
}

/* ---- the table's row ---- */

static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    (void)ctx;
    if (p->dtype != FATTN_F32 && p->dtype != FATTN_F64) return "computes in f32 and f64 only";
    if (p->softcap > 0) return "has no softcap; FATTN_ALGO_STANDARD has";
    if (p->alibi.present) return "has no ALiBi; FATTN_ALGO_STANDARD has";
    if (p->bias.present) return "has no bias; FATTN_ALGO_STANDARD has";
    if (p->sink.present) return "has no sink; FATTN_ALGO_STANDARD has";
    if (p->drop_T) return "has no dropout; FATTN_ALGO_STANDARD has";
    return NULL;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const backward w = plan_backward(ctx, p);
    out->workspace = w.delta_bytes + (size_t)w.threads * w.at.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_bwd_cpu_%s_%s", w.k->isa,
             fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    backward w = plan_backward(ctx, p);
    const int64_t pairs = p->B * p->Hkv, row_tasks = p->B * p->Hq * w.row_blocks;
    fattni_parallel(ctx, row_tasks, prepare, &w);
    if (w.one_pass) {
        fattni_parallel(ctx, pairs, head_task, &w);
    } else {
        if (w.want & WANT_DQ) fattni_parallel(ctx, row_tasks, row_task, &w);
        if (w.want & WANT_KEYS) fattni_parallel(ctx, pairs * w.column_blocks, column_task, &w);
    }
    return FATTN_OK;
}

const fattni_kernel fattni_bwd_cpu = {
    .family = "fattn_bwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2,
    .refuses = refuses,
    .plan = plan,
    .run = run,
};
