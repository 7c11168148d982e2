#include "bwd/cpu/bwd_row_block.h"

#include "core/attention/huge.h"

#include <math.h>
#include <string.h>

static const double log2_e = 1.4426950408889634;

/* What belongs to a column block stays in the second-level cache. */
enum { COLUMN_BYTES = 256 << 10, FEWEST_COLUMNS = 2 * FATTNI_TILE_KEYS, MOST_COLUMNS = 512 };

static int64_t column_size(const fattni_bwd *w) {
    const int64_t copies = fattni_is_narrow(w->p) ? 2 : 1; /* K and V beside dK and dV */
    const int64_t key_bytes = copies * (w->D_pad + w->Dv_pad) * (int64_t)fattn_dtype_size(w->k->dtype);
    const int64_t size = COLUMN_BYTES / key_bytes / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
    const int64_t needed = fattni_round_up(fattni_max(w->p->Sk, 1), FATTNI_TILE_KEYS);
    return fattni_min(fattni_clamp(size, FEWEST_COLUMNS, MOST_COLUMNS), needed);
}

size_t fattni_bwd_dq_bytes(const fattni_bwd *w) {
    return (size_t)fattni_operand_width(w->k, w->p->D) * fattni_row_bytes(w->k);
}

/* Of a block of rows as an operand of add_rows. */
static size_t rows_bytes(const fattni_bwd *w, int64_t pad) {
    return (size_t)(w->k->rows * pad) * fattn_dtype_size(w->k->operand);
}

static fattni_bwd_layout lay_out(const fattni_bwd *w) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const size_t real = fattn_dtype_size(k->dtype), row = fattni_row_bytes(k), tile = FATTNI_TILE_KEYS * row;
    const size_t columns = (size_t)w->columns, D_pad = (size_t)w->D_pad, Dv_pad = (size_t)w->Dv_pad;
    const size_t copied = fattni_is_narrow(p) || w->shares_keys ? columns : 0,
                 rounded = k->round ? columns / FATTNI_TILE_KEYS : 0;
    const size_t dq_blocks = !w->keeps_dq ? 1 : w->chained ? 0 : (size_t)(p->group * w->row_blocks);
    fattni_bwd_layout l = {0};
    l.q = fattni_append(&l.bytes, (size_t)k->rows * fattni_operand_bytes(k, p->D));
    l.d_o = fattni_append(&l.bytes, (size_t)k->rows * fattni_operand_bytes(k, p->Dv));
    l.dq = fattni_append(&l.bytes, w->want & WANT_DQ ? dq_blocks * fattni_bwd_dq_bytes(w) : 0);
    const bool narrow_dq = (w->want & WANT_DQ) && p->dq.dtype != (int32_t)k->dtype;
    l.dq_rows = fattni_append(&l.bytes, narrow_dq ? (size_t)p->D * row : 0);
    l.lse = fattni_append(&l.bytes, 3 * row);
    l.delta = fattni_append(&l.bytes, row);
    l.p = fattni_append(&l.bytes, tile);
    l.ds = fattni_append(&l.bytes, tile);
    l.keep = fattni_append(&l.bytes, p->drop_T ? tile : 0);
    l.dcap = fattni_append(&l.bytes, p->softcap > 0 ? tile : 0);
    l.bias = fattni_append(&l.bytes, fattni_scores_scratch(p));
    l.q_rows =
        fattni_append(&l.bytes, w->copy_q || w->want & WANT_DK ? (size_t)k->blocks * rows_bytes(w, w->D_pad) : 0);
    l.d_o_rows =
        fattni_append(&l.bytes, w->copy_d_o || w->want & WANT_DV ? (size_t)k->blocks * rows_bytes(w, w->Dv_pad) : 0);
    l.key = fattni_append(&l.bytes, copied * fattni_operand_bytes(k, p->D));
    l.value = fattni_append(&l.bytes, copied * fattni_operand_bytes(k, p->Dv));
    l.key_transposed = fattni_append(&l.bytes, k->round ? copied * fattni_operand_bytes(k, p->D) : 0);
    l.p_rows = fattni_append(&l.bytes, w->want & WANT_DV ? rounded * FATTNI_ROWS_BYTES : 0);
    l.ds_pairs = fattni_append(&l.bytes, k->round && w->want & WANT_DQ ? FATTNI_PAIRS_BYTES : 0);
    l.ds_rows = fattni_append(&l.bytes, w->want & WANT_DK ? rounded * FATTNI_ROWS_BYTES : 0);
    l.dk = fattni_append(&l.bytes, w->want & WANT_DK ? columns * D_pad * real : 0);
    l.dv = fattni_append(&l.bytes, w->want & WANT_DV ? columns * Dv_pad * real : 0);
    return l;
}

/* F16 has little range: P times the factor of dropout is 2^k at most (fattni_p_exponent), dS has the scale times a
   power of two, 0.5 to 1, so that it overflows no earlier than P (dP - delta) 2^k. */
static void choose_exponents(fattni_bwd *w) {
    const int k = fattni_p_exponent(w->p);
    int scale;
    if (w->k->operand != FATTN_F16) return;
    frexp(w->p->scale, &scale);
    w->p_exponent = k - fattni_keep_exponent(w->p, w->k);
    w->ds_exponent = k - (int)fattni_clamp(scale, -32, 32);
}

/* Rows of a head lie apart in [B,S,H,D], often by a large power of two, and caches keep few of such rows: those that
   are read several times are copied. There is room for that whatever the strides are. */
static bool lie_apart(const fattni_array *a, int64_t columns) { return a->s[2] != columns; }

fattni_bwd fattni_bwd_plan(const fattn_ctx *ctx, const fattni_problem *p) {
    fattni_bwd w = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype)};
    w.want = (p->dq.present ? WANT_DQ : 0u) | (p->dk.present ? WANT_DK : 0u) | (p->dv.present ? WANT_DV : 0u);
    w.D_pad = fattni_round_up(p->D, w.k->lanes);
    w.Dv_pad = fattni_round_up(p->Dv, w.k->lanes);
    w.row_blocks = fattni_ceil_div(p->Sq, w.k->rows);
    choose_exponents(&w);
    w.columns = column_size(&w);

    /* One pass is 5 products per tile, by key heads or, when that would leave more than 2 of 7 threads
       idle, in chains of column blocks. Two are 7, but have more tasks. */
    const int64_t pairs = p->B * p->Hkv, threads = ctx->cpu_threads;
    const bool both = (w.want & WANT_DQ) && (w.want & WANT_KEYS);
    w.one_pass = both && 5 * fattni_ceil_div(pairs, threads) * threads <= 7 * pairs;
    if (!w.one_pass) {
        const int64_t enough = fattni_ceil_div(4 * threads, fattni_max(pairs, 1));
        const int64_t size = fattni_ceil_div(fattni_max(p->Sk, 1), enough);
        w.columns = fattni_min(w.columns, fattni_round_up(size, FATTNI_TILE_KEYS));
    }
    w.column_blocks = fattni_ceil_div(p->Sk, w.columns);
    w.chained = both && !w.one_pass && 7 * pairs * w.column_blocks >= 5 * threads;

    const bool narrow = fattni_is_narrow(p), by_columns = w.one_pass || w.chained || (w.want && !(w.want & WANT_DQ));
    w.shares_keys = by_columns && p->group * w.row_blocks > 1;
    w.copies_keys = narrow || (w.shares_keys && (lie_apart(&p->k, p->D) || lie_apart(&p->v, p->Dv)));
    if (w.k->round) {
        w.copy_q = w.want & WANT_DK;
        w.copy_d_o = w.want & WANT_DV;
    } else {
        w.copy_q = narrow || ((w.want & WANT_DK) && (w.D_pad != p->D || lie_apart(&p->q, p->D)));
        w.copy_d_o = p->d_o.dtype != (int32_t)w.k->dtype ||
                     ((w.want & WANT_DV) && (w.Dv_pad != p->Dv || lie_apart(&p->d_o, p->Dv)));
    }
    w.keeps_dq = (w.one_pass || w.chained) && w.column_blocks > 1 && p->dq.dtype != (int32_t)w.k->dtype;

    w.bias_tasks = fattni_bwd_bias_tasks(p, w.k);
    if (!w.one_pass) {
        w.row_tasks = (w.want & WANT_DQ) && !w.chained ? p->B * p->Hq * w.row_blocks : 0;
        w.column_tasks = w.want & WANT_KEYS ? pairs * w.column_blocks : 0;
    }
    const int64_t tasks = w.one_pass ? pairs : w.row_tasks + w.column_tasks;
    w.threads = fattni_min(threads, fattni_max(fattni_max(tasks, w.bias_tasks), p->d_sink.present));
    w.layout = lay_out(&w);
    const size_t planes = (size_t)p->Hq * (p->packed ? 1 : (size_t)p->B);
    w.head_blocks = p->packed ? p->rows_q / w.k->rows + p->B : w.row_blocks;
    const size_t row_blocks = planes * (size_t)w.head_blocks;
    const size_t per_row = planes * (size_t)p->rows_q * fattn_dtype_size(w.k->dtype);
    if (!p->delta.present) fattni_append(&w.shared_bytes, per_row);
    w.max = fattni_append(&w.shared_bytes, per_row);
    w.log_sum = fattni_append(&w.shared_bytes, per_row);
    w.finds_means = fattni_bwd_finds_means(p, w.k);
    w.centres_copies = w.finds_means && !w.k->round && !(p->softcap > 0);
    const size_t means = w.finds_means ? (size_t)pairs * (size_t)(p->D + 1) : 0;
    w.key_mean = fattni_append(&w.shared_bytes, means * sizeof(float));
    w.huge_heads = fattni_append(&w.shared_bytes, w.centres_copies ? (size_t)pairs * sizeof(atomic_int) : 0);
    const bool sums = w.finds_means && p->softcap > 0;
    w.capped_sums = fattni_append(&w.shared_bytes, sums ? row_blocks * 3 * fattni_row_bytes(w.k) : 0);
    const size_t blocks = w.chained ? row_blocks : 0;
    w.dq_semaphores = fattni_append(&w.shared_bytes, blocks * sizeof(atomic_int));
    w.shared_dq = fattni_append(&w.shared_bytes, w.keeps_dq ? blocks * fattni_bwd_dq_bytes(&w) : 0);
    return w;
}

int64_t fattni_bwd_row_at(const fattni_problem *p, int64_t batch, int64_t h, int64_t row) {
    return (batch * p->Hq + h) * p->rows_q + row;
}

double fattni_bwd_delta(const fattni_bwd *w, int64_t batch, int64_t h, int64_t row) {
    const fattni_problem *const p = w->p;
    if (p->delta.present) return fattni_get(&p->delta, batch, h, row, 0);
    return fattni_load(p->workspace, w->k->dtype, fattni_bwd_row_at(p, batch, h, row));
}

fattni_row_sum fattni_bwd_row_sum(const fattni_bwd *w, int64_t batch, int64_t h, int64_t row) {
    const double L = fattni_get(&w->p->lse, batch, h, row, 0);
    if (!FATTNI_IS_HUGE(L)) return (fattni_row_sum){0, L};
    const char *const workspace = w->p->workspace;
    const int64_t at = fattni_bwd_row_at(w->p, batch, h, row);
    return (fattni_row_sum){fattni_load(workspace + w->max, w->k->dtype, at),
                            fattni_load(workspace + w->log_sum, w->k->dtype, at)};
}

/* q.m of row i of the copy of Q, in units of scores: what centred copies take from them. */
static double score_of_mean(const fattni_bwd *w, const fattni_bwd_rows *r, const float *mean, int64_t i) {
    const float *const q = (const float *)r->q + i * r->q_stride;
    double sum = 0;
    for (int64_t d = 0; d < w->p->D; ++d) sum += (double)q[d] * mean[d];
    return sum * w->p->scale / fattni_score_unit(w->p);
}

/* A row without keys, and the padding, get l = +inf, which makes P = 0. */
static void pack_statistics(const fattni_bwd *w, const fattni_bwd_rows *r) {
    const float *const mean = w->centres_copies ? fattni_bwd_key_mean(w, r->b, r->h / w->p->group) : NULL;
    const fattn_dtype type = w->k->dtype;
    char *const base = r->scratch + w->layout.lse, *const delta = r->scratch + w->layout.delta;
    char *const lse = base + fattni_row_bytes(w->k);
    const int64_t batch = r->seq->batch, row = r->seq->q0 + r->i0;
    for (int64_t i = 0; i < w->k->rows; ++i) {
        fattni_row_sum x = {0, -INFINITY};
        if (i < r->rows) x = fattni_bwd_row_sum(w, batch, r->h, row + i);
        const bool empty = x.log_sum == -INFINITY;
        const double whole = empty ? INFINITY : x.log_sum * log2_e - w->p_exponent;
        fattni_store(base, type, i, mean && i < r->rows ? x.max - score_of_mean(w, r, mean, i) : x.max);
        fattni_store(lse, type, i, whole);
        const double rounded = fattni_load(lse, type, i);
        fattni_store(lse, type, w->k->rows + i, isfinite(rounded) ? whole - rounded : 0);
        fattni_store(delta, type, i, empty ? 0 : fattni_bwd_delta(w, batch, r->h, row + i));
    }
}

/* Rows of Q or dO, *x, as operands: of scores at `packed`, of add_rows at `copy`, which takes the place of *x,
   unless it is NULL. */
static void load_rows(const fattni_bwd *w, int64_t rows, int64_t columns, fattn_dtype from, void *copy, int64_t pitch,
                      const void **x, int64_t *stride, void *packed) {
    const fattni_cpu_kernels *const k = w->k;
    if (k->round) k->load_packed(rows, columns, from, *x, *stride, packed);
    if (copy) {
        k->load_rows(rows, columns, from, *x, *stride, copy, pitch);
        *x = copy, *stride = pitch;
    }
    if (!k->round) k->load_packed(rows, columns, k->dtype, *x, *stride, packed);
}

/* The rows of q. */
static fattni_bwd_rows pack_q(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                              int64_t n, char *scratch) {
    const fattni_problem *const p = w->p;
    char *const copy = scratch + w->layout.q_rows + (size_t)n * rows_bytes(w, w->D_pad);
    fattni_bwd_rows r = {
        .seq = seq,
        .b = b,
        .h = h,
        .i0 = i0,
        .rows = fattni_min(w->k->rows, seq->band.Sq - i0),
        .scratch = scratch,
        .q = fattni_at(&p->q, seq->batch, h, seq->q0 + i0),
        .q_stride = p->q.s[2],
    };
    load_rows(w, r.rows, p->D, p->dtype, w->copy_q ? copy : NULL, w->D_pad, &r.q, &r.q_stride, scratch + w->layout.q);
    return r;
}

fattni_bwd_rows fattni_bwd_pack(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                                int64_t n, char *scratch) {
    const fattni_problem *const p = w->p;
    fattni_bwd_rows r = pack_q(w, seq, b, h, i0, n, scratch);
    char *const copy = scratch + w->layout.d_o_rows + (size_t)n * rows_bytes(w, w->Dv_pad);
    r.d_o = fattni_at(&p->d_o, seq->batch, h, seq->q0 + i0), r.d_o_stride = p->d_o.s[2];
    load_rows(w, r.rows, p->Dv, (fattn_dtype)p->d_o.dtype, w->copy_d_o ? copy : NULL, w->Dv_pad, &r.d_o, &r.d_o_stride,
              scratch + w->layout.d_o);
    pack_statistics(w, &r);
    return r;
}

void fattni_bwd_load_keys(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t g, fattni_range columns,
                          char *scratch) {
    const fattni_problem *const p = w->p;
    if (!w->copies_keys) return;
    const fattni_cpu_kernels *const k = w->k;
    const int64_t count = columns.end - columns.begin, row = seq->k0 + columns.begin;
    const int64_t width = fattni_operand_width(k, p->D);
    const void *const K = fattni_at(&p->k, seq->batch, g, row), *const V = fattni_at(&p->v, seq->batch, g, row);
    k->load_keys(count, p->D, p->dtype, K, p->k.s[2], scratch + w->layout.key, width);
    k->load_keys(count, p->Dv, p->dtype, V, p->v.s[2], scratch + w->layout.value, fattni_operand_width(k, p->Dv));
    if (k->round) {
        k->load_transposed(count, p->D, p->dtype, K, p->k.s[2], scratch + w->layout.key_transposed, width);
        return;
    }
    const float *const mean = w->centres_copies ? fattni_bwd_key_mean(w, b, g) : NULL;
    float *key = (float *)(scratch + w->layout.key);
    for (int64_t j = columns.begin; mean && j < columns.end; ++j, key += w->p->D)
        for (int64_t d = 0; d < w->p->D; ++d) key[d] -= mean[d];
}

fattni_score_tile fattni_bwd_score_tile(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t j0, int64_t j,
                                        int64_t keys) {
    const fattni_problem *const p = w->p;
    fattni_score_tile at = fattni_score_tile_of(p, w->k, r->seq, r->b, r->h, r->i0, r->rows, j, keys);
    if (!w->copies_keys) return at;
    const int64_t key_bytes = (int64_t)fattni_operand_bytes(w->k, p->D),
                  value_bytes = (int64_t)fattni_operand_bytes(w->k, p->Dv);
    at.key = r->scratch + w->layout.key + (j - j0) * key_bytes, at.key_stride = fattni_operand_width(w->k, p->D);
    at.value = r->scratch + w->layout.value + (j - j0) * value_bytes;
    at.value_stride = fattni_operand_width(w->k, p->Dv);
    return at;
}

bool fattni_bwd_has_huge_rows(const fattni_bwd *w, const fattni_sequence *seq, int64_t h, int64_t i0, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i)
        if (FATTNI_IS_HUGE(fattni_get(&w->p->lse, seq->batch, h, seq->q0 + i0 + i, 0))) return true;
    return false;
}

double fattni_bwd_sink_above(const fattni_bwd *w, double sink, double max) {
    const fattni_logit x = fattni_logit_of(w->p, w->k, sink);
    return max == x.score ? x.rest : sink - max * fattni_score_unit(w->p);
}

/* The online softmax of forward, on the tiles of backward, without V. Max, sum and decay lie where
   pack_statistics puts L later. */
void fattni_bwd_row_sums(const fattni_bwd *w, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                         char *scratch) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    const int64_t rows = fattni_min(k->rows, seq->band.Sq - i0);
    if (!fattni_bwd_has_huge_rows(w, seq, h, i0, rows)) return;
    const double unit = fattni_score_unit(p);
    const double sink = p->sink.present ? fattni_get(&p->sink, h, 0, 0, 0) : -INFINITY;
    const fattni_bwd_rows r = pack_q(w, seq, b, h, i0, 0, scratch);
    char *const max = scratch + w->layout.lse, *const sum = max + fattni_row_bytes(k),
                *const decay = sum + fattni_row_bytes(k);
    const bool none = sink == -INFINITY;
    const fattni_logit first = fattni_logit_of(p, k, sink); /* a sink is a key that was there first */
    for (int64_t i = 0; i < k->rows; ++i) {
        fattni_store(max, k->dtype, i, none ? sink : first.score);
        fattni_store(sum, k->dtype, i, none ? 0 : exp(first.rest));
    }
    const fattni_range keys = fattni_keys_of(&seq->band, i0, i0 + rows);
    for (int64_t j = keys.begin / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS; j < keys.end; j += FATTNI_TILE_KEYS) {
        const int64_t count = fattni_min(FATTNI_TILE_KEYS, keys.end - j);
        fattni_bwd_load_keys(w, seq, b, h / p->group, (fattni_range){j, j + count}, scratch);
        const fattni_score_tile at = fattni_bwd_score_tile(w, &r, j, j, count);
        fattni_scores(&at, scratch + w->layout.q, scratch + w->layout.bias, scratch + w->layout.p, NULL);
        k->softmax(&at.tile, fattni_log2_factor(p), scratch + w->layout.p, max, sum, decay);
    }
    const double rounding = k->dtype == FATTN_F64 ? FATTNI_HUGE_ROUNDING_F64 : (double)FATTNI_HUGE_ROUNDING_F32;
    char *const workspace = p->workspace;
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = seq->q0 + i0 + i, to = fattni_bwd_row_at(p, seq->batch, h, row);
        const double L = fattni_get(&p->lse, seq->batch, h, row, 0);
        const bool empty = fattni_load(sum, k->dtype, i) == 0;
        const double m = empty ? 0 : fattni_load(max, k->dtype, i);
        double log_sum = empty ? INFINITY : log(fattni_load(sum, k->dtype, i));
        const double top = m == first.score && !none ? sink - first.rest : m * unit;
        const double more = L - (top + log_sum); /* than rounding: L is of other keys, too */
        if (!empty && fabs(more) > fabs(L) * rounding) log_sum += more;
        fattni_store(workspace + w->max, k->dtype, to, m);
        fattni_store(workspace + w->log_sum, k->dtype, to, log_sum);
    }
}

void fattni_bwd_probabilities(const fattni_bwd *w, const fattni_bwd_rows *r, const fattni_score_tile *at,
                              double scale) {
    const fattni_problem *const p = w->p;
    const fattni_cpu_kernels *const k = w->k;
    char *const s = r->scratch;
    void *const dcap = p->softcap > 0 ? s + w->layout.dcap : NULL;
    fattni_scores(at, s + w->layout.q, s + w->layout.bias, s + w->layout.p, dcap);
    k->scores(&at->tile, p->Dv, at->value, at->value_stride, s + w->layout.d_o, s + w->layout.ds);
    if (p->drop_T) {
        fattni_keep_mask(at, p->keep_scale, s + w->layout.keep);
        k->multiply(&at->tile, s + w->layout.keep, s + w->layout.ds);
    }
    k->gradient(&at->tile, fattni_log2_factor(p), scale, s + w->layout.lse, s + w->layout.delta, s + w->layout.p,
                s + w->layout.ds);
}
