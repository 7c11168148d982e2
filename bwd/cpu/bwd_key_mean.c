/* The mean of the keys of 16-bit calls, and what is left to add to dQ when keys are used without it.

   delta comes from an O that was rounded to 16 bits, so that a row of dS sums to something else than it should, and
   dQ = scale dS K is off by the difference times the mean of the keys (bwd/cuda/bwd_key_mean.cu, which has the same
   statistics). Here the keys' copies in floats are less their mean m: scores are less scale q.m, which the rows' base
   adds again, and dQ lacks scale (sum of dS) m, where the sum is known: dL + exp(sink - L) delta. */
#include "bwd/cpu/bwd_row_block.h"

#include <math.h>
#include <string.h>

enum { STRIDE = 8, FEWEST = 64 };

bool fattni_bwd_may_centre_keys(const fattni_problem *p) {
    return fattni_is_narrow(p) && fattni_real(p) != (fattn_dtype)p->o.dtype && p->dq.present && !p->delta.present &&
           !(p->flags & FATTN_MERGE) && !(p->softcap > 0);
}

const float *fattni_bwd_key_mean(const fattni_bwd *w, int64_t b, int64_t g) {
    if (!w->centred) return NULL;
    const float *const mean = (const float *)((const char *)w->p->workspace + w->key_mean);
    const float *const at = mean + (b * w->p->Hkv + g) * (w->p->D + 1);
    return at[w->p->D] != 0 ? at : NULL; /* the last says whether there is one */
}

/* Of each `stride` keys another one, so that no period of them shows. */
static int64_t sampled_key(int64_t n, int64_t stride) { return n * stride + n * 5 % stride; }

/* Task: one key head of one sequence. Twice through a channel, so that large means cost no precision. */
static void mean_task(void *arg, int64_t task, int thread) {
    (void)thread;
    const fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const int64_t b = task / p->Hkv, g = task % p->Hkv;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const int64_t stride = fattni_clamp(seq.band.Sk / FEWEST, 1, STRIDE), count = seq.band.Sk / stride;
    float *const mean = (float *)((char *)p->workspace + w->key_mean) + task * (p->D + 1);
    double chi_square = 0;
    for (int64_t d = 0; d < p->D; ++d) {
        double sum = 0, square = 0;
        for (int64_t n = 0; n < count; ++n) sum += fattni_get(&p->k, seq.batch, g, seq.k0 + sampled_key(n, stride), d);
        const double m = sum / (double)fattni_max(count, 1);
        for (int64_t n = 0; n < count; ++n) {
            const double x = fattni_get(&p->k, seq.batch, g, seq.k0 + sampled_key(n, stride), d) - m;
            square += x * x;
        }
        const double variance = square / (double)fattni_max(count, 1);
        const double z = variance > 0 ? m * m / variance * (double)count : m != 0 ? INFINITY : 0;
        chi_square += z;
        mean[d] = z > 4 && isfinite(m) ? (float)m : 0;
    }
    mean[p->D] = count >= 16 && chi_square > (double)p->D + 10 * sqrt(2 * (double)p->D); /* a NaN: no */
}

void fattni_bwd_key_means(const fattn_ctx *ctx, fattni_bwd *w) {
    w->centred = fattni_bwd_may_centre_keys(w->p) && !atomic_load(&w->any_huge);
    if (w->centred) fattni_parallel(ctx, w->p->B * w->p->Hkv, mean_task, w);
}

void fattni_bwd_add_mean(const fattni_bwd *w, const fattni_bwd_rows *r, float *dq) {
    const fattni_problem *const p = w->p;
    const float *const mean = fattni_bwd_key_mean(w, r->b, r->h / p->group);
    if (!mean || !(p->sink.present || p->d_lse.present)) return;
    const double sink = p->sink.present ? fattni_get(&p->sink, r->h, 0, 0, 0) : -INFINITY;
    for (int64_t i = 0; i < r->rows; ++i) {
        const int64_t row = r->seq->q0 + r->i0 + i;
        const double L = fattni_get(&p->lse, r->seq->batch, r->h, row, 0);
        if (!isfinite(L)) continue;
        const double d_lse = p->d_lse.present ? fattni_get(&p->d_lse, r->seq->batch, r->h, row, 0) : 0;
        const double sum = d_lse + exp(sink - L) * fattni_bwd_delta(w, r->seq->batch, r->h, row);
        for (int64_t d = 0; d < p->D; ++d) dq[d * w->k->rows + i] += (float)(p->scale * sum * mean[d]);
    }
}
