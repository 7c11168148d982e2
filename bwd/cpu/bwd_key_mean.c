/* The mean of the keys of 16-bit calls, and what is left to add to dQ when keys are used without it.

   delta comes from an O that was rounded to 16 bits, so that a row of dS sums to something else than it should, and
   dQ = scale dS K is off by the difference times the mean of the keys (bwd/cuda/bwd_key_mean.cu, which has the same
   statistics). Here the keys' copies in floats are less their mean m: scores are less scale q.m, which the rows' base
   adds again, and dQ lacks scale (sum of dS) m, where the sum is known: dL + exp(sink - L) delta. Products of 16 bits
   remove what the rounded dS sums to, times m, with the same effect.

   A softcap's derivative c leaves dS = P c (dP - delta) without a known sum, but P (dP - delta) has that one, and what
   it sums to beyond it is the error e of delta. So dS should sum to sum P c (dP - delta) - e sum P c: three sums of a
   row beside dQ, in floats. Keys are not centred there, since a softcap is of the score itself: dS that is not rounded
   has its own sum times m in dQ, and only e m sum P c is removed. */
#include "bwd/cpu/bwd_row_block.h"

#include <math.h>
#include <string.h>

enum { STRIDE = 8, FEWEST = 64 };

bool fattni_bwd_finds_means(const fattni_problem *p, const fattni_cpu_kernels *k) {
    const bool rounds = k->round || fattni_real(p) != (fattn_dtype)p->o.dtype; /* dS, or the O of delta */
    return fattni_is_narrow(p) && rounds && p->dq.present && !p->delta.present && !(p->flags & FATTN_MERGE);
}

const float *fattni_bwd_key_mean(const fattni_bwd *w, int64_t b, int64_t g) {
    if (!w->finds_means || atomic_load_explicit(&w->any_huge, memory_order_relaxed)) return NULL;
    const float *const mean = (const float *)((const char *)w->p->workspace + w->key_mean);
    const float *const at = mean + (b * w->p->Hkv + g) * (w->p->D + 1);
    return at[w->p->D] != 0 ? at : NULL; /* the last says whether there is one */
}

/* Of each `stride` keys another one, so that no period of them shows. */
static int64_t sampled_key(int64_t n, int64_t stride) { return n * stride + n * 5 % stride; }

/* One key head of one sequence. Twice through its keys, so that large means cost no precision. */
void fattni_bwd_find_key_mean(const fattni_bwd *w, int64_t b, int64_t g) {
    const fattni_problem *const p = w->p;
    const int64_t D = p->D;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t stride = fattni_clamp(seq.band.Sk / FEWEST, 1, STRIDE), count = seq.band.Sk / stride;
    float *const mean = (float *)((char *)p->workspace + w->key_mean) + (b * p->Hkv + g) * (D + 1);
    float x[FATTNI_MAX_HEAD_DIM];
    double m[FATTNI_MAX_HEAD_DIM] = {0}, square[FATTNI_MAX_HEAD_DIM] = {0};
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t n = 0; n < count; ++n) {
            const void *const key = fattni_at(&p->k, seq.batch, g, seq.k0 + sampled_key(n, stride));
            w->k->widen(1, D, p->dtype, key, p->k.s[2], x, D);
            if (pass == 0)
                for (int64_t d = 0; d < D; ++d) m[d] += x[d];
            else
                for (int64_t d = 0; d < D; ++d) square[d] += (x[d] - m[d]) * (x[d] - m[d]);
        }
        for (int64_t d = 0; pass == 0 && d < D; ++d) m[d] /= (double)fattni_max(count, 1);
    }
    double chi_square = 0;
    for (int64_t d = 0; d < D; ++d) {
        const double variance = square[d] / (double)fattni_max(count, 1);
        const double z = variance > 0 ? m[d] * m[d] / variance * (double)count : m[d] != 0 ? INFINITY : 0;
        chi_square += z;
        mean[d] = z > 4 && isfinite(m[d]) ? (float)m[d] : 0;
    }
    mean[D] = count >= 16 && chi_square > (double)D + 10 * sqrt(2 * (double)D); /* a NaN: no */
}

float *fattni_bwd_capped_sums(const fattni_bwd *w, const fattni_bwd_rows *r) {
    const int64_t block = fattni_bwd_row_block(w, r->b, r->h, r->i0);
    return (float *)((char *)w->p->workspace + w->capped_sums) + block * 3 * w->k->rows;
}

/* What dQ of row i lacks over m, times 2^ds_exponent: `known` is what P (dP - delta) sums to. */
static double lacking(const fattni_bwd *w, const fattni_bwd_rows *r, int64_t i, double known) {
    if (!(w->p->softcap > 0)) return ldexp(w->p->scale * known, w->ds_exponent);
    const float *const sums = fattni_bwd_capped_sums(w, r) + i; /* G, P c, dS */
    const int64_t rows = w->k->rows;
    const double error = (double)sums[0] - ldexp(known, w->ds_exponent);
    return (w->k->round ? (double)sums[2 * rows] : 0) - ldexp(error * (double)sums[rows], -w->p_exponent);
}

void fattni_bwd_add_mean(const fattni_bwd *w, const fattni_bwd_rows *r, float *dq) {
    const fattni_problem *const p = w->p;
    const float *const mean = fattni_bwd_key_mean(w, r->b, r->h / p->group);
    if (!mean || !(p->sink.present || p->d_lse.present || p->softcap > 0)) return;
    const double sink = p->sink.present ? fattni_get(&p->sink, r->h, 0, 0, 0) : -INFINITY;
    for (int64_t i = 0; i < r->rows; ++i) {
        const int64_t row = r->seq->q0 + r->i0 + i;
        const double L = fattni_get(&p->lse, r->seq->batch, r->h, row, 0);
        if (!isfinite(L)) continue;
        const double d_lse = p->d_lse.present ? fattni_get(&p->d_lse, r->seq->batch, r->h, row, 0) : 0;
        const double known = d_lse + exp(sink - L) * fattni_bwd_delta(w, r->seq->batch, r->h, row);
        const double factor = lacking(w, r, i, known);
        for (int64_t d = 0; d < p->D; ++d) dq[d * w->k->rows + i] += (float)(factor * mean[d]);
    }
}
