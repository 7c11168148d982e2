/* Flash attention backward on the CPU (FlashAttention-2's order, Dao 2023): column blocks of keys,
   each once through all rows that see it, S and P computed again from L. See bwd/README.md.

   Every sum has one order, independent of the threads: dQ over key tiles, dK and dV over the query
   heads of the group and the row blocks in them, all ascending. So three ways give the same bits, and
   the choice between them may look at the number of threads: a task per (sequence, key head); a task
   per column block of one, in a chain, where each waits at a block of rows until the one before has
   added to its dQ; and two passes, one for dQ by row blocks and one for dK, dV by column blocks. */
#include "bwd/cpu/bwd_row_block.h"
#include "core/attention/kernel.h"
#include "core/attention/o_rest.h"

#include <stdio.h>
#include <string.h>

/* ---- chains: column blocks add to dQ in ascending order ---- */

static int64_t row_block(const fattni_bwd *w, int64_t b, int64_t h, int64_t i0) {
    return (b * w->p->Hq + h) * w->row_blocks + i0 / w->k->rows;
}

/* Of a block of rows: the number of the column block that may add to its dQ; 0 at first. */
static atomic_int *dq_semaphore_of(const fattni_bwd *w, int64_t b, int64_t h, int64_t i0) {
    return (atomic_int *)((char *)w->p->workspace + w->dq_semaphores) + row_block(w, b, h, i0);
}

/* Tasks begin in ascending order, and column blocks of one head are in that order: the one waited for
   is under way or done. */
static void wait_for_dq(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t block) {
    atomic_int *const semaphore = dq_semaphore_of(w, r->b, r->h, r->i0);
    for (int n = 0; atomic_load_explicit(semaphore, memory_order_acquire) != block; ++n) fattni_pause(n);
}
static void release_dq(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t block) {
    atomic_store_explicit(dq_semaphore_of(w, r->b, r->h, r->i0), (int)block + 1, memory_order_release);
}

/* ---- before: delta, and zero gradients of rows that no key reaches ---- */

/* Rows that see some key: contiguous, because every mask is a band. */
static fattni_range live_rows(const fattni_sequence *seq) {
    if (seq->band.Sk == 0) return (fattni_range){0, 0};
    return fattni_band_rows(&seq->band, 0, seq->band.Sk);
}

static void zero_rows(const fattni_array *a, int64_t columns, int64_t batch, int64_t h, int64_t begin, int64_t end) {
    const size_t bytes = (size_t)columns * fattn_dtype_size((fattn_dtype)a->dtype);
    for (int64_t i = begin; i < end; ++i) memset(fattni_at(a, batch, h, i), 0, bytes);
}

/* rowsum(dO O) of rows of one head, with the O that was rounded where forward has kept the rest. */
static void dots_of_o(const fattni_bwd *w, int64_t batch, int64_t h, int64_t row, int64_t rows, void *dots) {
    const fattni_problem *const p = w->p;
    const fattni_array *const d_o = &p->d_o, *const o = &p->o, rest = fattni_o_rest_of(p);
    const fattn_dtype d_o_type = (fattn_dtype)d_o->dtype, o_type = (fattn_dtype)o->dtype;
    if (!p->has_o_rest) {
        w->k->dots(rows, p->Dv, d_o_type, fattni_at(d_o, batch, h, row), d_o->s[2], o_type, fattni_at(o, batch, h, row),
                   o->s[2], dots);
        return;
    }
    const int bits = o_type == FATTN_BF16 ? FATTNI_O_REST_BF16 : FATTNI_O_REST_F16;
    for (int64_t i = row; i < row + rows; ++i) {
        float exact[FATTNI_MAX_HEAD_DIM];
        const int8_t *const r = fattni_at(&rest, batch, h, i);
        w->k->widen(1, p->Dv, o_type, fattni_at(o, batch, h, i), o->s[2], exact, p->Dv);
        for (int64_t d = 0; d < p->Dv; ++d)
            exact[d] = fattni_bits_float(fattni_o_exact(fattni_float_bits(exact[d]), r[d], bits));
        w->k->dots(1, p->Dv, d_o_type, fattni_at(d_o, batch, h, i), d_o->s[2], FATTN_F32, exact, p->Dv,
                   (float *)dots + (i - row));
    }
}

/* Task: one block of rows of one head. */
static void prepare(void *arg, int64_t task, int thread) {
    (void)thread;
    fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t bh = task / w->row_blocks, b = bh / p->Hq, h = bh % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = task % w->row_blocks * w->k->rows, row = seq.q0 + i0;
    if (w->chained) atomic_init(dq_semaphore_of(w, b, h, i0), 0);
    const int64_t rows = fattni_min(w->k->rows, seq.band.Sq - i0);
    if (rows <= 0) return;
    if (fattni_bwd_has_huge_rows(w, &seq, h, i0, rows)) atomic_store(&w->any_huge, true);
    if (!p->delta.present) {
        char *const delta = p->workspace;
        const int64_t at = fattni_bwd_row_at(p, seq.batch, h, row);
        dots_of_o(w, seq.batch, h, row, rows, delta + at * (int64_t)fattn_dtype_size(w->k->dtype));
        for (int64_t i = 0; p->d_lse.present && i < rows; ++i)
            fattni_store(delta, w->k->dtype, at + i,
                         fattni_load(delta, w->k->dtype, at + i) - fattni_get(&p->d_lse, seq.batch, h, row + i, 0));
    }
    if (!(w->want & WANT_DQ) || (p->flags & FATTN_ACC_DQ)) return;
    const fattni_range live = live_rows(&seq);
    zero_rows(&p->dq, p->D, seq.batch, h, row, seq.q0 + fattni_clamp(live.begin, i0, i0 + rows));
    zero_rows(&p->dq, p->D, seq.batch, h, seq.q0 + fattni_clamp(live.end, i0, i0 + rows), row + rows);
}

/* Every w->threads-th block of rows, for so many threads have scratch. */
static void huge_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    for (int64_t n = task; n < p->B * p->Hq * w->row_blocks; n += w->threads) {
        const int64_t b = n / w->row_blocks / p->Hq, i0 = n % w->row_blocks * w->k->rows;
        const fattni_sequence seq = fattni_sequence_of(p, b);
        fattni_bwd_row_sums(w, &seq, b, n / w->row_blocks % p->Hq, i0, fattni_bwd_scratch(w, thread));
    }
}

/* ---- tiles ---- */

/* What the products of a tile's gradients multiply. */
typedef struct products {
    const void *p, *ds;           /* of add_rows */
    const void *key, *ds_of_keys; /* of add_keys */
} products;

/* Rounds P and dS, in scratch s, where products want that. The tile is that of key j in the column block that begins at
   j0. */
static products operands_of(const fattni_bwd *w, const fattni_score_tile *at, unsigned want, int64_t j0, int64_t j,
                            char *s) {
    const fattni_bwd_layout *const l = &w->layout;
    const fattni_cpu_kernels *const k = w->k;
    if (!k->round) return (products){s + l->p, s + l->ds, at->key, s + l->ds};
    if (want & WANT_DV) k->round(&at->tile, s + l->p, s + l->ds_pairs, s + l->p_rows); /* its pairs are not used */
    k->round(&at->tile, s + l->ds, s + l->ds_pairs, s + l->ds_rows);
    const char *const key = s + l->turned + (j - j0) * (int64_t)fattni_operand_bytes(k, w->p->D);
    return (products){s + l->p_rows, s + l->ds_rows, key, s + l->ds_pairs};
}

/* The rows' part in dQ^T, and in dK and dV of the keys [columns.begin, columns.end), tile by tile.
   Wants these keys loaded. */
static void backward_tiles(const fattni_bwd *w, const fattni_bwd_rows *r, fattni_range columns, unsigned want,
                           void *dq) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const fattni_range keys = fattni_keys_of(&r->seq->band, r->i0, r->i0 + r->rows);
    const int64_t end = fattni_min(keys.end, columns.end);
    const int64_t real = (int64_t)fattn_dtype_size(k->dtype);
    char *const s = r->scratch;
    const float *const mean = fattni_bwd_key_mean(w, r->b, r->h / p->group);
    /* Tiles lie on one grid, independent of mask and pass. */
    int64_t j = fattni_max(keys.begin, columns.begin) / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
    for (; j < end; j += FATTNI_TILE_KEYS) {
        const int64_t count = fattni_min(FATTNI_TILE_KEYS, end - j);
        const fattni_score_tile at = fattni_bwd_score_tile(w, r, columns.begin, j, count);
        fattni_bwd_probabilities(w, r, &at, p->softcap > 0 ? 1 : p->scale);
        if (p->softcap > 0) k->multiply(&at.tile, s + w->layout.dcap, s + w->layout.ds);
        if (want & WANT_DV && p->drop_T) k->multiply(&at.tile, s + w->layout.keep, s + w->layout.p);
        const products x = operands_of(w, &at, want, columns.begin, j, s);
        if (want & WANT_DV)
            k->add_rows(&at.tile, w->Dv_pad, x.p, r->d_o, r->d_o_stride,
                        s + w->layout.dv + (j - columns.begin) * w->Dv_pad * real);
        if (want & WANT_DK)
            k->add_rows(&at.tile, w->D_pad, x.ds, r->q, r->q_stride,
                        s + w->layout.dk + (j - columns.begin) * w->D_pad * real);
        if (want & WANT_DQ) k->add_keys(&at.tile, p->D, x.key, at.key_stride, x.ds_of_keys, NULL, dq);
        if (want & WANT_DQ && mean && k->remove_mean) k->remove_mean(&at.tile, p->D, mean, x.ds_of_keys, dq);
    }
}

/* Where dQ^T of these rows lies. */
static void *packed_dq(const fattni_bwd *w, const fattni_bwd_rows *r) {
    const int64_t block = r->h % w->p->group * w->row_blocks + r->i0 / w->k->rows;
    const size_t bytes = fattni_bwd_dq_bytes(w);
    if (w->keeps_dq && w->chained)
        return (char *)w->p->workspace + w->shared_dq + (size_t)row_block(w, r->b, r->h, r->i0) * bytes;
    return r->scratch + w->layout.dq + (w->keeps_dq ? (size_t)block * bytes : 0);
}

/* dQ^T starts from zero, or from the sum over the column blocks before, in place or in dq.
   A caller's dq to which this is added is there from the start, or is added at the end when it has
   only 16 bits. */
static void load_dq(const fattni_bwd *w, const fattni_bwd_rows *r, bool first) {
    const fattni_problem *const p = w->p;
    const bool narrow = p->dq.dtype != (int32_t)w->k->dtype;
    void *const dq = packed_dq(w, r);
    if (narrow ? first : first && !(p->flags & FATTN_ACC_DQ))
        memset(dq, 0, fattni_bwd_dq_bytes(w));
    else if (!narrow)
        w->k->pack(r->rows, p->D, w->k->dtype, fattni_at(&p->dq, r->seq->batch, r->h, r->seq->q0 + r->i0), p->dq.s[2],
                   NULL, dq);
    if (first) fattni_bwd_add_mean(w, r, dq);
}

static void store_dq(const fattni_bwd *w, const fattni_bwd_rows *r, bool last) {
    const fattni_problem *const p = w->p;
    const fattni_range live = live_rows(r->seq);
    const int64_t begin = fattni_clamp(live.begin - r->i0, 0, r->rows);
    const int64_t end = fattni_clamp(live.end - r->i0, 0, r->rows), row = r->seq->q0 + r->i0;
    if (p->dq.dtype == (int32_t)w->k->dtype) {
        w->k->unpack(begin, end, p->D, packed_dq(w, r), NULL, fattni_at(&p->dq, r->seq->batch, r->h, row), p->dq.s[2]);
    } else if (last && end > begin) {
        char *const rows = r->scratch + w->layout.q_rows; /* Q's are not needed any more */
        w->k->unpack(begin, end, p->D, packed_dq(w, r), NULL, rows, p->D);
        w->k->put(end - begin, p->D, rows + begin * p->D * (int64_t)sizeof(float), p->D, p->flags & FATTN_ACC_DQ,
                  (fattn_dtype)p->dq.dtype, fattni_at(&p->dq, r->seq->batch, r->h, row + begin), p->dq.s[2]);
    }
}

/* Sums of the column block that begins at key `begin` go to dk or dv. Nothing is added to keys that
   no row sees. */
static void store_keys(const fattni_bwd *w, const fattni_sequence *seq, const fattni_array *a, int64_t g, int64_t width,
                       int64_t pad, const char *sums, bool add, fattni_range keys) {
    const int64_t begin = keys.begin;
    if (add) {
        const fattni_range live = fattni_keys_of(&seq->band, 0, fattni_max(seq->band.Sq, 1));
        keys.begin = fattni_clamp(live.begin, keys.begin, keys.end);
        keys.end = seq->band.Sq ? fattni_clamp(live.end, keys.begin, keys.end) : keys.begin;
    }
    if (keys.end <= keys.begin) return;
    const int64_t real = (int64_t)fattn_dtype_size(w->k->dtype);
    w->k->put(keys.end - keys.begin, width, sums + (keys.begin - begin) * pad * real, pad, add, (fattn_dtype)a->dtype,
              fattni_at(a, seq->batch, g, seq->k0 + keys.begin), a->s[2]);
}

/* Column block number `block` of one key head, against all rows of its query heads. */
static void column_block(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t g, int64_t block,
                         unsigned want, char *scratch) {
    const fattni_problem *const p = w->p;
    const size_t real = fattn_dtype_size(w->k->dtype);
    const fattni_range columns = {block * w->columns, fattni_min((block + 1) * w->columns, seq->band.Sk)};
    if (columns.end <= columns.begin) return;
    /* BF16 products add zeros to whole tiles. */
    const size_t count = (size_t)fattni_round_up(columns.end - columns.begin, 16);
    if (want & WANT_DK) memset(scratch + w->layout.dk, 0, count * (size_t)w->D_pad * real);
    if (want & WANT_DV) memset(scratch + w->layout.dv, 0, count * (size_t)w->Dv_pad * real);
    fattni_bwd_load_keys(w, seq, b, g, columns, scratch);
    const fattni_range rows = fattni_band_rows(&seq->band, columns.begin, columns.end);
    const int64_t i_begin = rows.begin < rows.end ? rows.begin / w->k->rows * w->k->rows : rows.end;
    for (int64_t h = g * p->group; h < (g + 1) * p->group; ++h)
        for (int64_t i0 = i_begin; i0 < rows.end; i0 += w->k->rows) {
            const fattni_bwd_rows r = fattni_bwd_pack(w, seq, b, h, i0, scratch);
            const fattni_range keys = fattni_keys_of(&seq->band, i0, i0 + r.rows);
            const bool first = keys.begin >= columns.begin;
            if (w->chained && !first) wait_for_dq(w, &r, block);
            if (want & WANT_DQ) load_dq(w, &r, first);
            backward_tiles(w, &r, columns, want, packed_dq(w, &r));
            if (want & WANT_DQ) store_dq(w, &r, keys.end <= columns.end);
            if (w->chained) release_dq(w, &r, block);
        }
    if (want & WANT_DK)
        store_keys(w, seq, &p->dk, g, p->D, w->D_pad, scratch + w->layout.dk, p->flags & FATTN_ACC_DK, columns);
    if (want & WANT_DV)
        store_keys(w, seq, &p->dv, g, p->Dv, w->Dv_pad, scratch + w->layout.dv, p->flags & FATTN_ACC_DV, columns);
}

/* ---- tasks ---- */

/* One key head: everything. */
static void head_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    const int64_t b = task / w->p->Hkv, g = task % w->p->Hkv;
    const fattni_sequence seq = fattni_sequence_of(w->p, b);
    for (int64_t n = 0; n < w->column_blocks; ++n)
        column_block(w, &seq, b, g, n, w->want, fattni_bwd_scratch(w, thread));
}

/* One column block of one key head: dK and dV, in a chain dQ, too. The first blocks see most rows when
   a mask is causal; as in forward, long tasks come first. */
static void column_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    const int64_t pairs = w->p->B * w->p->Hkv, pair = task % pairs, b = pair / w->p->Hkv;
    const fattni_sequence seq = fattni_sequence_of(w->p, b);
    column_block(w, &seq, b, pair % w->p->Hkv, task / pairs, w->chained ? w->want : w->want & WANT_KEYS,
                 fattni_bwd_scratch(w, thread));
}

/* One row block of one query head: dQ. */
static void row_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t planes = p->B * p->Hq, b = task % planes / p->Hq, h = task % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = (w->row_blocks - 1 - task / planes) * w->k->rows;
    const fattni_range live = live_rows(&seq);
    if (i0 >= live.end || i0 + w->k->rows <= live.begin) return;
    const fattni_bwd_rows r = fattni_bwd_pack(w, &seq, b, h, i0, fattni_bwd_scratch(w, thread));
    const fattni_range keys = fattni_keys_of(&seq.band, i0, i0 + r.rows);
    load_dq(w, &r, true);
    for (int64_t j = keys.begin / w->columns * w->columns; j < keys.end; j += w->columns) {
        const fattni_range columns = {fattni_max(j, keys.begin / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS),
                                      fattni_min(j + w->columns, keys.end)};
        fattni_bwd_load_keys(w, &seq, b, h / p->group, columns, r.scratch);
        backward_tiles(w, &r, columns, WANT_DQ, packed_dq(w, &r));
    }
    store_dq(w, &r, true);
}

/* Both passes in one parallel loop: row blocks fill the threads that finish their column blocks
   early. */
static void two_pass_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    if (task < w->column_tasks)
        column_task(arg, task, thread);
    else
        row_task(arg, task - w->column_tasks, thread);
}

/* ---- the table's row ---- */

/* Every feature, every dtype. */
static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_bwd w = fattni_bwd_plan(ctx, p);
    out->workspace = w.shared_bytes + (size_t)w.threads * w.layout.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_bwd_cpu_%s_%s", w.k->isa, fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    fattni_bwd w = fattni_bwd_plan(ctx, p);
    fattni_parallel(ctx, p->B * p->Hq * w.row_blocks, prepare, &w);
    fattni_bwd_key_means(ctx, &w);
    if (atomic_load(&w.any_huge)) fattni_cpu_tasks(ctx, w.k, w.threads, huge_task, &w);
    if (w.one_pass)
        fattni_cpu_tasks(ctx, w.k, p->B * p->Hkv, head_task, &w);
    else
        fattni_cpu_tasks(ctx, w.k, w.row_tasks + w.column_tasks, two_pass_task, &w);
    fattni_bwd_bias(ctx, &w);
    fattni_bwd_sink(ctx, &w);
    return FATTN_OK;
}

const fattni_kernel fattni_bwd_cpu = {
    .family = "fattn_bwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
};
