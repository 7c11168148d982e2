/* The mean of the keys of 16-bit calls, and what is left to add to dQ when keys are used without it.

   delta comes from an O that was rounded to 16 bits, so that a row of dS sums to something else than it should, and
   dQ = scale dS K is off by the difference times the mean of the keys (bwd/cuda/bwd_key_mean.cu). Here the keys' copies
   in floats are less their mean m: scores are less scale q.m, which the rows' base adds again, and dQ lacks scale (sum
   of dS) m, where the sum is known: dL + exp(sink - L) delta. Products of 16 bits remove what the rounded dS sums to,
   times m, with the same effect.

   Any m is right but for roundings, which the distance of a row's keys from m multiplies. So m is of keys that rows
   see, and in each channel not so far from 0 that any of PARTS parts of these keys is farther from m than from 0, or
   than a standard deviation: rows may be on one part alone, and means may drift.

   A softcap's derivative c leaves dS = P c (dP - delta) without a known sum, but P (dP - delta) has that one, and what
   it sums to beyond it is the error e of delta. So dS should sum to sum P c (dP - delta) - e sum P c: three sums of a
   row beside dQ, in floats. Keys are not centred there, since a softcap is of the score itself: dS that is not rounded
   has its own sum times m in dQ, and only e m sum P c is removed. */
#include "bwd/cpu/bwd_row_block.h"

#include <math.h>
#include <string.h>

enum { STRIDE = 8, FEWEST = 64, PARTS = 8, FEWEST_OF_PART = 8 };
static const double MASKING_BIAS = -1000; /* keys that have less are masked by it */

bool fattni_bwd_finds_means(const fattni_problem *p, const fattni_cpu_kernels *k) {
    const bool rounds = k->round || fattni_real(p) != (fattn_dtype)p->o.dtype; /* dS, or the O of delta */
    return fattni_is_narrow(p) && rounds && p->dq.present && !p->delta.present && !(p->flags & FATTN_MERGE);
}

atomic_int *fattni_bwd_huge_head(const fattni_bwd *w, int64_t b, int64_t g) {
    return (atomic_int *)((char *)w->p->workspace + w->huge_heads) + (b * w->p->Hkv + g);
}

/* Scores of huge rows are not those of centred copies less q.m: F32 has too few digits for both. */
const float *fattni_bwd_key_mean(const fattni_bwd *w, int64_t b, int64_t g) {
    if (!w->finds_means) return NULL;
    if (w->centres_copies && atomic_load_explicit(fattni_bwd_huge_head(w, b, g), memory_order_relaxed)) return NULL;
    const float *const mean = (const float *)((const char *)w->p->workspace + w->key_mean);
    const float *const at = mean + (b * w->p->Hkv + g) * (w->p->D + 1);
    return at[w->p->D] != 0 ? at : NULL; /* the last says whether there is one */
}

/* Keys of a head that are looked at: of each `stride` keys that rows see another one, so that no period of them shows,
   unless a bias masks it. */
typedef struct sample {
    const fattni_bwd *w;
    fattni_sequence seq;
    int64_t b, g, begin, stride, count, parts;
} sample;

static sample sample_of(const fattni_bwd *w, int64_t b, int64_t g) {
    sample s = {.w = w, .seq = fattni_sequence_of(w->p, b), .b = b, .g = g};
    if (s.seq.band.Sq == 0) return s;
    const fattni_range seen = fattni_keys_of(&s.seq.band, 0, s.seq.band.Sq);
    const int64_t keys = fattni_max(seen.end - seen.begin, 0);
    s.begin = seen.begin;
    s.stride = fattni_clamp(keys / FEWEST, 1, STRIDE);
    s.count = keys / s.stride;
    s.parts = fattni_clamp(s.count / FEWEST_OF_PART, 1, PARTS);
    return s;
}

/* For the first, the middle and the last row that see key j. */
static bool is_masked(const sample *s, int64_t j) {
    const fattni_array *const bias = &s->w->p->bias;
    if (!bias->present) return false;
    const fattni_range rows = fattni_band_rows(&s->seq.band, j, j + 1);
    const int64_t h = s->g * s->w->p->group, row[] = {rows.begin, (rows.begin + rows.end) / 2, rows.end - 1};
    for (int n = 0; n < 3 && rows.begin < rows.end; ++n)
        if (!(fattni_get(bias, s->b, h, row[n], j) < MASKING_BIAS)) return false;
    return true;
}

/* Key number n of the sample; false: it is masked. */
static bool load_key(const sample *s, int64_t n, float *x) {
    const fattni_problem *const p = s->w->p;
    const int64_t j = s->begin + n * s->stride + n * 5 % s->stride;
    if (is_masked(s, j)) return false;
    const void *const key = fattni_at(&p->k, s->seq.batch, s->g, s->seq.k0 + j);
    s->w->k->widen(1, p->D, p->dtype, key, p->k.s[2], x, p->D);
    return true;
}

/* Of the keys of a part, in one channel. */
typedef struct part {
    double mean, square; /* square: sum of the squares of what they are above the mean */
} part;

/* m of one channel, 0 where chance explains it; *z += mean^2 count / variance. Without means z of D channels is about
   chi-square. */
static double mean_of(const part *parts, const int64_t *counts, int64_t n, double *z) {
    double sum = 0, square = 0, least = -INFINITY, most = INFINITY;
    int64_t count = 0;
    for (int64_t k = 0; k < n; ++k) sum += parts[k].mean * (double)counts[k], count += counts[k];
    const double mean = sum / (double)fattni_max(count, 1);
    for (int64_t k = 0; k < n; ++k) {
        if (counts[k] == 0) continue;
        const double above = parts[k].mean - mean, deviation = sqrt(parts[k].square / (double)counts[k]);
        const double reach = fmax(fabs(parts[k].mean), deviation);
        square += parts[k].square + (double)counts[k] * above * above;
        least = fmax(least, parts[k].mean - reach), most = fmin(most, parts[k].mean + reach);
    }
    const double variance = square / (double)fattni_max(count, 1);
    const double y = variance > 0 ? mean * mean / variance * (double)count : mean != 0 ? INFINITY : 0;
    *z += y;
    return y > 4 && isfinite(mean) ? fmax(least, fmin(most, mean)) : 0;
}

/* One key head of one sequence. Twice through its keys, so that large means cost no precision. */
void fattni_bwd_find_key_mean(const fattni_bwd *w, int64_t b, int64_t g) {
    const fattni_problem *const p = w->p;
    const int64_t D = p->D;
    const sample s = sample_of(w, b, g);
    float *const mean = (float *)((char *)p->workspace + w->key_mean) + (b * p->Hkv + g) * (D + 1);
    float x[FATTNI_MAX_HEAD_DIM];
    part parts[FATTNI_MAX_HEAD_DIM][PARTS];
    int64_t counts[PARTS] = {0}, count = 0;
    memset(parts, 0, (size_t)D * sizeof *parts);
    for (int64_t n = 0; n < s.count; ++n) {
        const int64_t k = n * s.parts / s.count;
        if (!load_key(&s, n, x)) continue;
        counts[k] += 1, count += 1;
        for (int64_t d = 0; d < D; ++d) parts[d][k].mean += (double)x[d];
    }
    for (int64_t d = 0; d < D; ++d)
        for (int k = 0; k < PARTS; ++k) parts[d][k].mean /= (double)fattni_max(counts[k], 1);
    for (int64_t n = 0; n < s.count; ++n) {
        const int64_t k = n * s.parts / s.count;
        if (!load_key(&s, n, x)) continue;
        for (int64_t d = 0; d < D; ++d) {
            const double above = (double)x[d] - parts[d][k].mean;
            parts[d][k].square += above * above;
        }
    }
    double z = 0;
    for (int64_t d = 0; d < D; ++d) mean[d] = (float)mean_of(parts[d], counts, s.parts, &z);
    mean[D] = count >= 16 && z > (double)D + 10 * sqrt(2 * (double)D); /* a NaN: no */
}

float *fattni_bwd_capped_sums(const fattni_bwd *w, const fattni_bwd_rows *r) {
    const int64_t block = fattni_bwd_row_block(w, r->seq, r->b, r->h, r->i0);
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
        const fattni_row_sum x = fattni_bwd_row_sum(w, r->seq->batch, r->h, row);
        const double share = exp(fattni_bwd_sink_above(w, sink, x.max) - x.log_sum);
        const double known = d_lse + share * fattni_bwd_delta(w, r->seq->batch, r->h, row);
        const double factor = lacking(w, r, i, known);
        for (int64_t d = 0; d < p->D; ++d) dq[d * w->k->rows + i] += (float)(factor * mean[d]);
    }
}
