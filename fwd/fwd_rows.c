#include "fwd_rows.h"

#include <math.h>
#include <string.h>

static const double log2_e = 1.4426950408889634, ln_2 = 0.6931471805599453;

fattni_fwd_layout fattni_fwd_lay_out(const fattni_problem *p) {
    const size_t row = FATTNI_TILE_ROW_BYTES;
    fattni_fwd_layout at = {0};
    at.q = fattni_append(&at.bytes, (size_t)p->D * row);
    at.s = fattni_append(&at.bytes, FATTNI_TILE_KEYS * row);
    at.o = fattni_append(&at.bytes, (size_t)p->Dv * row);
    at.max = fattni_append(&at.bytes, row);
    at.sum = fattni_append(&at.bytes, row);
    at.decay = fattni_append(&at.bytes, row);
    return at;
}

fattni_fwd_rows fattni_fwd_rows_of(const fattni_problem *p, const fattni_cpu_kernels *k,
                                   const fattni_fwd_layout *at, const fattni_sequence *seq,
                                   int64_t h, int64_t i0, char *scratch) {
    return (fattni_fwd_rows){
        .p = p, .k = k, .seq = seq, .h = h, .i0 = i0,
        .rows = fattni_min(k->rows, seq->band.Sq - i0),
        .q = scratch + at->q, .s = scratch + at->s, .o = scratch + at->o,
        .max = scratch + at->max, .sum = scratch + at->sum, .decay = scratch + at->decay,
    };
}

static void *rows_at(const fattni_fwd_rows *r, const fattni_array *a) {
    return fattni_at(a, r->seq->batch, r->h, r->seq->q0 + r->i0);
}

void fattni_fwd_load_q(const fattni_fwd_rows *r) {
    r->k->pack(r->rows, r->p->D, rows_at(r, &r->p->q), r->p->q.s[2], r->q);
}

void fattni_fwd_load_o(const fattni_fwd_rows *r) {
    r->k->pack(r->rows, r->p->Dv, rows_at(r, &r->p->o), r->p->o.s[2], r->o);
}

void fattni_fwd_store_o(const fattni_fwd_rows *r) {
    r->k->unpack(0, r->rows, r->p->Dv, r->o, NULL, rows_at(r, &r->p->o), r->p->o.s[2]);
}

void fattni_fwd_start(const fattni_fwd_rows *r) {
    memset(r->o, 0, (size_t)r->p->Dv * FATTNI_TILE_ROW_BYTES);
    for (int64_t i = 0; i < r->k->rows; ++i) {
        fattni_store(r->max, r->k->dtype, i, -INFINITY);
        fattni_store(r->sum, r->k->dtype, i, 0);
    }
}

void fattni_fwd_tile(const fattni_fwd_rows *r, int64_t j, int64_t keys) {
    const fattni_problem *const p = r->p;
    const fattni_band *const band = &r->seq->band;
    const int64_t batch = r->seq->batch, g = r->h / p->group, key = r->seq->k0 + j;
    const fattni_tile t = {r->rows, keys, .lo = band->lo + r->i0 - j, .hi = band->hi + r->i0 - j};
    r->k->scores(&t, p->D, fattni_at(&p->k, batch, g, key), p->k.s[2], r->q, r->s);
    r->k->softmax(&t, p->scale * log2_e, r->s, r->max, r->sum, r->decay);
    r->k->add_keys(&t, p->Dv, fattni_at(&p->v, batch, g, key), p->v.s[2], r->s, r->decay, r->o);
}

void fattni_fwd_finish(const fattni_fwd_rows *r) {
    const fattni_problem *const p = r->p;
    const fattn_dtype type = r->k->dtype;
    void *const inverse = r->decay;
    for (int64_t i = 0; i < r->rows; ++i) {
        const double max = fattni_load(r->max, type, i), sum = fattni_load(r->sum, type, i);
        const bool empty = sum == 0;
        fattni_store(inverse, type, i, empty ? 0 : 1 / sum);
        fattni_set(&p->lse, r->seq->batch, r->h, r->seq->q0 + r->i0 + i, 0,
                   empty ? -INFINITY : max * ln_2 + log(sum));
    }
    r->k->unpack(0, r->rows, p->Dv, r->o, inverse, rows_at(r, &p->o), p->o.s[2]);
}

const char *fattni_fwd_refuses(const fattni_problem *p) {
    if (p->dtype != FATTN_F32 && p->dtype != FATTN_F64)
        return "computes in f32 and f64 only";
    if (p->softcap > 0) return "has no softcap; FATTN_ALGO_STANDARD has";
    if (p->alibi.present) return "has no ALiBi; FATTN_ALGO_STANDARD has";
    if (p->bias.present) return "has no bias; FATTN_ALGO_STANDARD has";
    if (p->sink.present) return "has no sink; FATTN_ALGO_STANDARD has";
    if (p->drop_T) return "has no dropout; FATTN_ALGO_STANDARD has";
    if (p->flags & FATTN_MERGE) return "has no FATTN_MERGE; FATTN_ALGO_STANDARD has";
    return NULL;
}
