#include "fwd/cpu/fwd_row_block.h"

#include "core/attention/o_rest.h"
#include "fwd/cpu/fwd_fp8.h"

#include <math.h>
#include <string.h>

static size_t bytes_of_o(const fattni_problem *p, const fattni_cpu_kernels *k) {
    return (size_t)fattni_operand_width(k, p->Dv) * fattni_row_bytes(k);
}

static bool is_fp8(const fattni_problem *p) { return p->flags & FATTN_FP8; }

size_t fattni_fwd_key_bytes(const fattni_problem *p, const fattni_cpu_kernels *k) {
    return fattni_is_narrow(p) || is_fp8(p) ? FATTNI_TILE_KEYS * fattni_operand_bytes(k, p->D) : 0;
}
size_t fattni_fwd_value_bytes(const fattni_problem *p, const fattni_cpu_kernels *k) {
    return fattni_is_narrow(p) || is_fp8(p) ? FATTNI_TILE_KEYS * fattni_operand_bytes(k, p->Dv) : 0;
}

fattni_fwd_layout fattni_fwd_lay_out(const fattni_problem *p, const fattni_cpu_kernels *k, int64_t blocks) {
    const size_t row = fattni_row_bytes(k);
    fattni_fwd_layout l = {0};
    l.s = fattni_append(&l.bytes, FATTNI_TILE_BYTES);
    l.decay = fattni_append(&l.bytes, row);
    const size_t bias = fattni_scores_scratch(p);
    l.extra = fattni_append(&l.bytes, bias ? bias : p->drop_T ? FATTNI_TILE_BYTES : 0);
    l.key = fattni_append(&l.bytes, fattni_fwd_key_bytes(p, k));
    l.value = fattni_append(&l.bytes, fattni_fwd_value_bytes(p, k));
    const bool gathers = p->page && p->page < FATTNI_TILE_KEYS;
    const size_t gathered = (size_t)(FATTNI_TILE_KEYS * (p->D + p->Dv)) * fattn_dtype_size(p->dtype);
    l.gathered = fattni_append(&l.bytes, gathers ? gathered : 0);
    l.o_rows = fattni_append(&l.bytes, p->o.dtype != (int32_t)k->dtype || is_fp8(p) ? (size_t)p->Dv * row : 0);
    l.rounded = fattni_append(&l.bytes, k->round ? FATTNI_PAIRS_BYTES : 0);
    const size_t shared = l.bytes;
    l.q = fattni_append(&l.bytes, (size_t)k->rows * fattni_operand_bytes(k, p->D));
    l.max = fattni_append(&l.bytes, row);
    l.sum = fattni_append(&l.bytes, row);
    l.o = fattni_append(&l.bytes, bytes_of_o(p, k));
    l.block = l.bytes - shared;
    l.bytes = shared + (size_t)blocks * l.block;
    return l;
}

fattni_fwd_rows fattni_fwd_rows_of(const fattni_problem *p, const fattni_cpu_kernels *k,
                                   const fattni_fwd_layout *layout, const fattni_sequence *seq, int64_t b, int64_t h,
                                   int64_t i0, char *scratch, int64_t n) {
    char *const block = scratch + (size_t)n * layout->block;
    return (fattni_fwd_rows){
        .p = p,
        .k = k,
        .seq = seq,
        .b = b,
        .h = h,
        .i0 = i0,
        .rows = fattni_min(k->rows, seq->band.Sq - i0),
        .s = scratch + layout->s,
        .decay = scratch + layout->decay,
        .extra = scratch + layout->extra,
        .room = {scratch + layout->key, scratch + layout->value, scratch + layout->gathered},
        .o_rows = scratch + layout->o_rows,
        .rounded = scratch + layout->rounded,
        .q = block + layout->q,
        .o = block + layout->o,
        .max = block + layout->max,
        .sum = block + layout->sum,
    };
}

static void *rows_at(const fattni_fwd_rows *r, const fattni_array *a) {
    return fattni_at(a, r->seq->batch, r->h, r->seq->q0 + r->i0);
}

void fattni_fwd_load_q(const fattni_fwd_rows *r) {
    if (is_fp8(r->p)) {
        fattni_fwd_fp8_load_q(r);
        return;
    }
    const fattni_array *const q = &r->p->q;
    r->k->load_packed(r->rows, r->p->D, (fattn_dtype)q->dtype, rows_at(r, q), q->s[2], r->q);
}

/* What the softmax of row i starts from; -inf: none. */
typedef struct start {
    double sink;   /* a logit without a value */
    double before; /* L over the keys of an earlier call */
    double larger; /* of both */
    double max;    /* the same in the softmax's units, rounded */
    double rest;   /* exp of what the rounding took away */
} start;

static start start_of(const fattni_fwd_rows *r, int64_t i) {
    const fattni_problem *const p = r->p;
    const int64_t row = r->seq->q0 + r->i0 + i;
    const bool merge = (p->flags & FATTN_MERGE) && i < r->rows;
    start x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, .rest = 1};
    if (p->sink.present) x.sink = fattni_get(&p->sink, r->h, 0, 0, 0);
    if (merge) x.before = fattni_get(&p->lse, r->seq->batch, r->h, row, 0);
    x.larger = x.sink > x.before ? x.sink : x.before; /* before, when that is NaN */
    if (x.larger == -INFINITY) return x;
    const fattni_logit logit = fattni_logit_of(p, r->k, x.larger);
    x.max = logit.score;
    x.rest = exp(logit.rest);
    return x;
}

/* exp(part - larger): never inf - inf. */
static double weight(double part, double larger) {
    if (part == -INFINITY) return 0;
    return part == larger ? 1 : exp(part - larger);
}

/* Scores of 8-bit copies lack q.mean(k): their sink comes last. */
static bool starts_from_nothing(const fattni_problem *p) {
    return is_fp8(p) || (!p->sink.present && !(p->flags & FATTN_MERGE));
}

void fattni_fwd_start(const fattni_fwd_rows *r) {
    const fattni_problem *const p = r->p;
    const fattn_dtype type = r->k->dtype;
    void *const kept = r->decay; /* the weight of the o that is there */
    if (starts_from_nothing(p)) {
        for (int64_t i = 0; i < r->k->rows; ++i) fattni_store(r->max, type, i, -INFINITY);
        memset(r->sum, 0, fattni_row_bytes(r->k));
        memset(r->o, 0, bytes_of_o(p, r->k));
        return;
    }
    for (int64_t i = 0; i < r->k->rows; ++i) {
        const start x = start_of(r, i);
        const double old = weight(x.before, x.larger), sink = weight(x.sink, x.larger);
        fattni_store(r->max, type, i, x.max);
        fattni_store(r->sum, type, i, x.larger == INFINITY ? 1 : x.rest * (old + sink));
        fattni_store(kept, type, i, ldexp(x.rest * old, -fattni_keep_exponent(p, r->k)));
    }
    memset(r->o, 0, bytes_of_o(p, r->k));
    if (p->flags & FATTN_MERGE) r->k->pack(r->rows, p->Dv, type, rows_at(r, &p->o), p->o.s[2], kept, r->o);
}

/* Rows of `columns` elements, one after the other, of one page after the other. */
static void gather(const fattni_problem *p, const fattni_array *from, const fattni_sequence *seq, int64_t g,
                   fattni_range keys, int64_t columns, char *to) {
    const size_t size = fattn_dtype_size(p->dtype), row = (size_t)columns * size;
    for (int64_t j = keys.begin, end; j < keys.end; j = end) {
        const char *x = fattni_key_at(p, from, seq, g, j);
        end = fattni_min((j / p->page + 1) * p->page, keys.end);
        for (int64_t n = j; n < end; ++n, to += row, x += from->s[2] * (int64_t)size) memcpy(to, x, row);
    }
}

fattni_fwd_keys fattni_fwd_find_keys(const fattni_problem *p, const fattni_sequence *seq, int64_t g, fattni_range keys,
                                     void *gathered) {
    if (!p->page || keys.begin / p->page == (keys.end - 1) / p->page)
        return (fattni_fwd_keys){fattni_key_at(p, &p->k, seq, g, keys.begin),
                                 fattni_key_at(p, &p->v, seq, g, keys.begin), p->k.s[2], p->v.s[2]};
    const size_t bytes = (size_t)((keys.end - keys.begin) * p->D) * fattn_dtype_size(p->dtype);
    char *const k = gathered, *const v = k + bytes;
    gather(p, &p->k, seq, g, keys, p->D, k);
    gather(p, &p->v, seq, g, keys, p->Dv, v);
    return (fattni_fwd_keys){k, v, p->D, p->Dv};
}

fattni_fwd_keys fattni_fwd_loaded_keys(const fattni_problem *p, const fattni_cpu_kernels *k,
                                       const fattni_fwd_room *room) {
    return (fattni_fwd_keys){room->key, room->value, fattni_operand_width(k, p->D), fattni_operand_width(k, p->Dv)};
}

fattni_fwd_keys fattni_fwd_load_keys(const fattni_problem *p, const fattni_cpu_kernels *k, const fattni_sequence *seq,
                                     int64_t g, fattni_range keys, const fattni_fwd_room *room) {
    if (is_fp8(p)) return fattni_fwd_fp8_load_keys(p, k, seq, g, keys, room);
    const fattni_fwd_keys rows = fattni_fwd_find_keys(p, seq, g, keys, room->gathered);
    const fattni_fwd_keys copy = fattni_fwd_loaded_keys(p, k, room);
    const int64_t count = keys.end - keys.begin;
    if (!fattni_is_narrow(p)) return rows;
    k->load_keys(count, p->D, p->dtype, rows.key, rows.key_stride, room->key, copy.key_stride);
    k->load_transposed(count, p->Dv, p->dtype, rows.value, rows.value_stride, room->value, copy.value_stride);
    return copy;
}

void fattni_fwd_tile(const fattni_fwd_rows *r, fattni_range keys, const fattni_fwd_keys *operands) {
    const fattni_problem *const p = r->p;
    const int64_t j = keys.begin;
    fattni_score_tile at = fattni_score_tile_of(p, r->k, r->seq, r->b, r->h, r->i0, r->rows, j, keys.end - j);
    at.key = operands->key, at.key_stride = operands->key_stride;
    at.value = operands->value, at.value_stride = operands->value_stride;
    fattni_scores(&at, r->q, r->extra, r->s, NULL);
    r->k->softmax(&at.tile, fattni_log2_factor(p), r->s, r->max, r->sum, r->decay);
    if (p->drop_T) {
        fattni_keep_mask(&at, ldexp(p->keep_scale, -fattni_keep_exponent(p, r->k)), r->extra);
        r->k->multiply(&at.tile, r->extra, r->s);
    }
    if (is_fp8(p)) r->k->round_e4m3(&at.tile, r->s);
    if (r->k->round) r->k->round(&at.tile, r->s, r->rounded, NULL);
    r->k->add_keys(&at.tile, p->Dv, at.value, at.value_stride, r->k->round ? r->rounded : r->s, r->decay, r->o);
}

/* What rounding took off O, which lies in `o_rows`. O^T is not needed any more. */
static void store_o_rest(const fattni_fwd_rows *r) {
    const fattni_problem *const p = r->p;
    const fattni_array *const o = &p->o, rest = fattni_o_rest_of(p);
    const int bits = o->dtype == FATTN_BF16 ? FATTNI_O_REST_BF16 : FATTNI_O_REST_F16;
    const float *exact = r->o_rows, *rounded = r->o;
    int8_t *to = rows_at(r, &rest);
    r->k->widen(r->rows, p->Dv, (fattn_dtype)o->dtype, rows_at(r, o), o->s[2], r->o, p->Dv);
    for (int64_t i = 0; i < r->rows; ++i, exact += p->Dv, rounded += p->Dv, to += rest.s[2])
        for (int64_t d = 0; d < p->Dv; ++d)
            to[d] = (int8_t)fattni_o_rest(fattni_float_bits(exact[d]), fattni_float_bits(rounded[d]), bits);
}

void fattni_fwd_finish(const fattni_fwd_rows *r) {
    const fattni_problem *const p = r->p;
    const fattn_dtype type = r->k->dtype;
    if (is_fp8(p)) {
        fattni_fwd_fp8_finish(r);
        return;
    }
    const bool fresh = starts_from_nothing(p);
    void *const inverse = r->decay;
    for (int64_t i = 0; i < r->rows; ++i) {
        const double max = fattni_load(r->max, type, i), sum = fattni_load(r->sum, type, i);
        double L = sum == 0 ? -INFINITY : max * fattni_score_unit(p) + log(sum);
        double scale = sum == 0 ? 0 : ldexp(1 / sum, fattni_keep_exponent(p, r->k));
        if (!fresh && sum != 0) {
            const start x = start_of(r, i);
            if (max == x.max) L = x.larger + log(sum / x.rest); /* exactly a sink of 1e38 */
            if (x.larger == INFINITY) L = INFINITY, scale = 0;
        }
        fattni_store(inverse, type, i, scale);
        fattni_set(&p->lse, r->seq->batch, r->h, r->seq->q0 + r->i0 + i, 0, L);
    }
    void *const o = rows_at(r, &p->o);
    if ((int32_t)type == p->o.dtype) {
        r->k->unpack(0, r->rows, p->Dv, r->o, inverse, o, p->o.s[2]);
    } else {
        r->k->unpack(0, r->rows, p->Dv, r->o, inverse, r->o_rows, p->Dv);
        r->k->put(r->rows, p->Dv, r->o_rows, p->Dv, false, (fattn_dtype)p->o.dtype, o, p->o.s[2]);
        if (p->has_o_rest) store_o_rest(r);
    }
}
