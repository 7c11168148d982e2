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

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- chains: column blocks add to dQ in ascending order ---- */

/* Of a block of rows: the number of the column block that may add to its dQ; 0 at first. */
static atomic_int *dq_semaphore_of(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0) {
    return (atomic_int *)((char *)w->p->workspace + w->dq_semaphores) + fattni_bwd_row_block(w, seq, b, h, i0);
}

/* Tasks begin in ascending order, and column blocks of one head are in that order: the one waited for
   is under way or done. */
static void wait_for_dq(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t block) {
    atomic_int *const semaphore = dq_semaphore_of(w, r->seq, r->b, r->h, r->i0);
    for (int n = 0; atomic_load_explicit(semaphore, memory_order_acquire) != block; ++n) fattni_pause(n);
}
static void release_dq(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t block) {
    atomic_store_explicit(dq_semaphore_of(w, r->seq, r->b, r->h, r->i0), (int)block + 1, memory_order_release);
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

/* The first tasks, with finds_means: the mean of the keys of one head. The others: one block of rows of one
   head. */
static void prepare(void *arg, int64_t task, int thread) {
    (void)thread;
    fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t means = w->finds_means ? p->B * p->Hkv : 0;
    if (task < means) {
        fattni_bwd_find_key_mean(w, task / p->Hkv, task % p->Hkv);
        return;
    }
    task -= means;
    const int64_t bh = task / w->row_blocks, b = bh / p->Hq, h = bh % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t i0 = task % w->row_blocks * w->k->rows, row = seq.q0 + i0;
    const int64_t rows = fattni_min(w->k->rows, seq.band.Sq - i0);
    if (rows <= 0) return;
    if (w->chained) atomic_init(dq_semaphore_of(w, &seq, b, h, i0), 0);
    if (fattni_bwd_has_huge_rows(w, &seq, h, i0, rows)) {
        atomic_store(&w->any_huge, true);
        if (w->centres_copies) atomic_store(fattni_bwd_huge_head(w, b, h / p->group), 1);
    }
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
    if (!atomic_load(&w->any_huge)) return;
    for (int64_t n = task; n < p->B * p->Hq * w->row_blocks; n += w->threads) {
        const int64_t b = n / w->row_blocks / p->Hq, i0 = n % w->row_blocks * w->k->rows;
        const fattni_sequence seq = fattni_sequence_of(p, b);
        fattni_bwd_row_sums(w, &seq, b, n / w->row_blocks % p->Hq, i0, fattni_bwd_scratch(w, thread));
    }
}

/* ---- tiles ---- */

/* Where P or dS of a tile lies as operands of add_rows: those of block n of rows, of the key j in the column block that
   begins at j0. */
static char *rounded_rows(const fattni_bwd *w, char *scratch, size_t rows, int64_t n, int64_t j0, int64_t j) {
    const size_t tile = (size_t)((j - j0) / FATTNI_TILE_KEYS);
    return scratch + rows + tile * FATTNI_ROWS_BYTES + (size_t)(n * w->k->rows) * fattn_dtype_size(w->k->operand);
}

/* dK and dV of a tile's keys: P^T dO, dS^T Q of `count` blocks of rows. */
static void add_rows_of(const fattni_bwd *w, const fattni_tile *tiles, int64_t count, const fattni_bwd_rows *r,
                        const void *p, const void *ds, int64_t j0, int64_t j, unsigned want) {
    char *const s = r->scratch;
    const int64_t real = (int64_t)fattn_dtype_size(w->k->dtype);
    if (want & WANT_DV)
        w->k->add_rows(tiles, count, w->Dv_pad, p, r->d_o, r->d_o_stride,
                       s + w->layout.dv + (j - j0) * w->Dv_pad * real);
    if (want & WANT_DK)
        w->k->add_rows(tiles, count, w->D_pad, ds, r->q, r->q_stride, s + w->layout.dk + (j - j0) * w->D_pad * real);
}

/* The keys of the column block that these rows see, from the beginning of a tile on: tiles lie on one grid,
   independent of mask and pass. */
static fattni_range seen_columns(const fattni_bwd_rows *r, fattni_range columns) {
    const fattni_range keys = fattni_keys_of(&r->seq->band, r->i0, r->i0 + r->rows);
    const int64_t begin = fattni_max(keys.begin, columns.begin) / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
    return (fattni_range){begin, fattni_max(begin, fattni_min(keys.end, columns.end))};
}

/* The rows' part in dQ^T, and in dK and dV of the keys [columns.begin, columns.end), tile by tile; with 16-bit products
   P and dS are left to add_rounded_rows instead, as those of block n. Wants these keys loaded. */
static void backward_tiles(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t n, fattni_range columns,
                           unsigned want, void *dq) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const fattni_bwd_layout *const l = &w->layout;
    const fattni_range keys = seen_columns(r, columns);
    const float *const mean = fattni_bwd_key_mean(w, r->b, r->h / p->group);
    float *const capped_sums = p->softcap > 0 && mean && want & WANT_DQ ? fattni_bwd_capped_sums(w, r) : NULL;
    char *const s = r->scratch;
    for (int64_t j = keys.begin; j < keys.end; j += FATTNI_TILE_KEYS) {
        const int64_t count = fattni_min(FATTNI_TILE_KEYS, keys.end - j);
        const fattni_score_tile at = fattni_bwd_score_tile(w, r, columns.begin, j, count);
        fattni_bwd_probabilities(w, r, &at, ldexp(p->softcap > 0 ? 1 : p->scale, w->ds_exponent - w->p_exponent));
        if (capped_sums)
            k->multiply_and_sum(&at.tile, s + l->p, s + l->dcap, s + l->ds, capped_sums);
        else if (p->softcap > 0)
            k->multiply(&at.tile, s + l->dcap, s + l->ds);
        if (want & WANT_DV && p->drop_T) k->multiply(&at.tile, s + l->keep, s + l->p);
        if (!k->round) {
            add_rows_of(w, &at.tile, 1, r, s + l->p, s + l->ds, columns.begin, j, want);
            if (want & WANT_DQ) k->add_keys(&at.tile, p->D, at.key, at.key_stride, s + l->ds, NULL, dq);
            continue;
        }
        if (want & WANT_DV) k->round(&at.tile, s + l->p, NULL, rounded_rows(w, s, l->p_rows, n, columns.begin, j));
        char *const ds_pairs = want & WANT_DQ ? s + l->ds_pairs : NULL;
        k->round(&at.tile, s + l->ds, ds_pairs,
                 want & WANT_DK ? rounded_rows(w, s, l->ds_rows, n, columns.begin, j) : NULL);
        if (!ds_pairs) continue;
        const char *const key = s + l->key_transposed + (j - columns.begin) * (int64_t)fattni_operand_bytes(k, p->D);
        k->add_keys(&at.tile, p->D, key, at.key_stride, ds_pairs, NULL, dq);
        if (mean) k->remove_mean(&at.tile, p->D, mean, ds_pairs, dq);
    }
}

/* What `count` blocks of rows, r[0] the first, have left of P and dS goes into dK and dV. */
static void add_rounded_rows(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t count, fattni_range columns,
                             unsigned want) {
    for (int64_t j = columns.begin; j < columns.end; j += FATTNI_TILE_KEYS) {
        fattni_tile tiles[FATTNI_MOST_BLOCKS];
        for (int64_t n = 0; n < count; ++n) {
            const fattni_range keys = seen_columns(r + n, columns);
            const int64_t seen = j < keys.begin ? 0 : fattni_clamp(keys.end - j, 0, FATTNI_TILE_KEYS);
            tiles[n] = fattni_bwd_score_tile(w, r + n, columns.begin, j, seen).tile;
        }
        add_rows_of(w, tiles, count, r, rounded_rows(w, r->scratch, w->layout.p_rows, 0, columns.begin, j),
                    rounded_rows(w, r->scratch, w->layout.ds_rows, 0, columns.begin, j), columns.begin, j, want);
    }
}

/* Of sums with F16 products: floats. */
static void times_power(void *x_, size_t count, int exponent) {
    float *const x = x_;
    const float power = ldexpf(1, exponent);
    for (size_t n = 0; exponent && n < count; ++n) x[n] *= power;
}

/* Where dQ^T of these rows lies. */
static void *packed_dq(const fattni_bwd *w, const fattni_bwd_rows *r) {
    const int64_t block = r->h % w->p->group * w->row_blocks + r->i0 / w->k->rows;
    const size_t bytes = fattni_bwd_dq_bytes(w);
    if (w->keeps_dq && w->chained)
        return (char *)w->p->workspace + w->shared_dq +
               (size_t)fattni_bwd_row_block(w, r->seq, r->b, r->h, r->i0) * bytes;
    return r->scratch + w->layout.dq + (w->keeps_dq ? (size_t)block * bytes : 0);
}

/* dQ^T starts from zero, or from the sum over the column blocks before, in place or in dq.
   A caller's dq to which this is added is there from the start, or is added at the end when it has
   only 16 bits. */
static void load_dq(const fattni_bwd *w, const fattni_bwd_rows *r, bool first) {
    const fattni_problem *const p = w->p;
    const bool narrow = p->dq.dtype != (int32_t)w->k->dtype;
    void *const dq = packed_dq(w, r);
    const size_t count = (size_t)(p->D * w->k->rows);
    if (narrow ? first : first && !(p->flags & FATTN_ACC_DQ))
        memset(dq, 0, fattni_bwd_dq_bytes(w));
    else if (!narrow) {
        w->k->pack(r->rows, p->D, w->k->dtype, fattni_at(&p->dq, r->seq->batch, r->h, r->seq->q0 + r->i0), p->dq.s[2],
                   NULL, dq);
        times_power(dq, count, w->ds_exponent);
    }
    if (first && w->finds_means && p->softcap > 0) memset(fattni_bwd_capped_sums(w, r), 0, 3 * fattni_row_bytes(w->k));
}

static void store_dq(const fattni_bwd *w, const fattni_bwd_rows *r, bool last) {
    const fattni_problem *const p = w->p;
    const fattni_range live = live_rows(r->seq);
    const int64_t begin = fattni_clamp(live.begin - r->i0, 0, r->rows);
    const int64_t end = fattni_clamp(live.end - r->i0, 0, r->rows), row = r->seq->q0 + r->i0;
    const bool narrow = p->dq.dtype != (int32_t)w->k->dtype;
    if (last) fattni_bwd_add_mean(w, r, packed_dq(w, r));
    if (!narrow || last) times_power(packed_dq(w, r), (size_t)(p->D * w->k->rows), -w->ds_exponent);
    if (!narrow) {
        w->k->unpack(begin, end, p->D, packed_dq(w, r), NULL, fattni_at(&p->dq, r->seq->batch, r->h, row), p->dq.s[2]);
    } else if (last && end > begin) {
        char *const rows = r->scratch + w->layout.dq_rows;
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
    /* 16-bit products add zeros to whole tiles. */
    const size_t count = (size_t)fattni_round_up(columns.end - columns.begin, 16);
    if (want & WANT_DK) memset(scratch + w->layout.dk, 0, count * (size_t)w->D_pad * real);
    if (want & WANT_DV) memset(scratch + w->layout.dv, 0, count * (size_t)w->Dv_pad * real);
    fattni_bwd_load_keys(w, seq, b, g, columns, scratch);
    const fattni_range rows = fattni_band_rows(&seq->band, columns.begin, columns.end);
    const int64_t i_begin = rows.begin < rows.end ? rows.begin / w->k->rows * w->k->rows : rows.end;
    fattni_bwd_rows r[FATTNI_MOST_BLOCKS];
    int64_t n = 0; /* blocks of rows whose P and dS are not in dK and dV yet */
    for (int64_t h = g * p->group; h < (g + 1) * p->group; ++h)
        for (int64_t i0 = i_begin; i0 < rows.end; i0 += w->k->rows) {
            r[n] = fattni_bwd_pack(w, seq, b, h, i0, n, scratch);
            const fattni_range keys = fattni_keys_of(&seq->band, i0, i0 + r[n].rows);
            const bool first = keys.begin >= columns.begin;
            if (w->chained && !first) wait_for_dq(w, &r[n], block);
            if (want & WANT_DQ) load_dq(w, &r[n], first);
            backward_tiles(w, &r[n], n, columns, want, packed_dq(w, &r[n]));
            if (want & WANT_DQ) store_dq(w, &r[n], keys.end <= columns.end);
            if (w->chained) release_dq(w, &r[n], block);
            if (!w->k->round || ++n < w->k->blocks) continue;
            add_rounded_rows(w, r, n, columns, want);
            n = 0;
        }
    if (n) add_rounded_rows(w, r, n, columns, want);
    if (want & WANT_DK) times_power(scratch + w->layout.dk, count * (size_t)w->D_pad, -w->ds_exponent);
    if (want & WANT_DV) times_power(scratch + w->layout.dv, count * (size_t)w->Dv_pad, -w->p_exponent);
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
    const fattni_bwd_rows r = fattni_bwd_pack(w, &seq, b, h, i0, 0, fattni_bwd_scratch(w, thread));
    const fattni_range keys = fattni_keys_of(&seq.band, i0, i0 + r.rows);
    load_dq(w, &r, true);
    for (int64_t j = keys.begin / w->columns * w->columns; j < keys.end; j += w->columns) {
        const fattni_range columns = {fattni_max(j, keys.begin / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS),
                                      fattni_min(j + w->columns, keys.end)};
        fattni_bwd_load_keys(w, &seq, b, h / p->group, columns, r.scratch);
        backward_tiles(w, &r, 0, columns, WANT_DQ, packed_dq(w, &r));
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
    for (int64_t n = 0; w.centres_copies && n < p->B * p->Hkv; ++n)
        atomic_init(fattni_bwd_huge_head(&w, n / p->Hkv, n % p->Hkv), 0);
    const fattni_stage stages[] = {
        {(w.finds_means ? p->B * p->Hkv : 0) + p->B * p->Hq * w.row_blocks, prepare},
        {w.threads, huge_task},
        w.one_pass ? (fattni_stage){p->B * p->Hkv, head_task}
                   : (fattni_stage){w.row_tasks + w.column_tasks, two_pass_task},
    };
    fattni_cpu_stages(ctx, w.threads, w.k, stages, 3, &w);
    w.copies_keys = fattni_is_narrow(p); /* each tile is read once */
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
