/* The backward reference: fattni_bwd_ref, in double (tests compile it in other types, see
   core/attention/ref_row.inc).

   Per row: P = exp(s - L), of huge rows exp((s - m) - log l) (core/attention/huge.h),
   dP = (dO V^T) keep/(1-p), G = P (dP - delta). Then dbias = sum G, dX = G (1 - (t/cap)^2),
   dQ = scale dX K, dK = scale dX^T Q, dV = (P keep/(1-p))^T dO and
   dsink = -sum P of the sink delta. */
#include "core/attention/huge.h"
#include "core/attention/ref_row.inc"

typedef struct scratch {
    REAL *k, *v;       /* [Sk,D] [Sk,Dv] of one key head */
    REAL *dk, *dv;     /* [Sk,D] [Sk,Dv]: sums over the query heads of its group */
    REAL *q, *dq;      /* [D] of one row */
    REAL *d_o;         /* [Dv] of one row */
    REAL *t, *s;       /* [Sk] of one row */
    REAL *d_sink;      /* [Hq] */
    REAL *d_bias;      /* as d_bias, without its broadcast dimensions */
    int64_t bias_s[4]; /* strides of the latter */
} scratch;

static REAL *take(REAL **rest, int64_t count) {
    REAL *const p = *rest;
    *rest += count;
    return p;
}

/* Lays the arrays out from `block` on; with NULL only computes the size. Returns the number of REALs. */
static int64_t lay_out(const fattni_problem *p, REAL *block, scratch *out) {
    int64_t bias = 1;
    for (int d = 3; d >= 0; --d) {
        const bool varies = p->d_bias.present && p->d_bias.s[d] != 0;
        out->bias_s[d] = varies ? bias : 0;
        if (varies) bias *= p->d_bias.n[d];
    }
    const int64_t keys = p->Sk * (p->D + p->Dv);
    const int64_t count = 2 * keys + 2 * p->D + p->Dv + 2 * p->Sk + p->Hq + bias;
    if (!block) return count;
    REAL *rest = block;
    out->k = take(&rest, p->Sk * p->D);
    out->v = take(&rest, p->Sk * p->Dv);
    out->dk = take(&rest, p->Sk * p->D);
    out->dv = take(&rest, p->Sk * p->Dv);
    out->q = take(&rest, p->D);
    out->dq = take(&rest, p->D);
    out->d_o = take(&rest, p->Dv);
    out->t = take(&rest, p->Sk);
    out->s = take(&rest, p->Sk);
    out->d_sink = take(&rest, p->Hq);
    out->d_bias = take(&rest, bias);
    for (int64_t n = 0; n < count; ++n) block[n] = 0;
    return count;
}

static void put(const fattni_array *a, bool add, int64_t b, int64_t h, int64_t i, int64_t j, REAL x) {
    fattni_set(a, b, h, i, j, (double)(add ? get(a, b, h, i, j) + x : x));
}

/* A row's probabilities from its scores: P = exp((s - max) - log_sum). */
typedef struct normalizer {
    REAL max, log_sum;
} normalizer;

/* From L: max = L, log_sum = 0. For a huge row from its scores; `rounding` is the relative error of L. */
static normalizer normalizer_of(REAL L, REAL sink, int64_t Sk, const REAL *s, REAL rounding) {
    if (!FATTNI_IS_HUGE(L)) return (normalizer){L, 0};
    REAL max = sink, sum = 0;
    for (int64_t j = 0; j < Sk; ++j) max = s[j] > max ? s[j] : max;
    if (is_masked(max)) return (normalizer){L, 0};
    if (!is_masked(sink)) sum = MATH(exp)(sink - max);
    for (int64_t j = 0; j < Sk; ++j)
        if (!is_masked(s[j])) sum += MATH(exp)(s[j] - max);
    const REAL log_sum = MATH(log)(sum), more = L - max - log_sum;
    /* More than rounding: L also covers other keys. */
    const bool others = MATH(fabs)(more) > MATH(fabs)(L) * rounding;
    return (normalizer){max, others ? log_sum + more : log_sum};
}

/* The share of the row's probability that the sink holds. */
static REAL sink_probability(REAL sink, normalizer n) {
    if (is_masked(sink)) return 0;
    return sink == n.max ? MATH(exp)(-n.log_sum) : MATH(exp)(sink - n.max - n.log_sum);
}

static void backward_row(const fattni_problem *p, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i,
                         scratch *w) {
    const int64_t batch = seq->batch, row = seq->q0 + i;
    for (int64_t d = 0; d < p->D; ++d) w->dq[d] = 0;
    const REAL L = get(&p->lse, batch, h, row, 0);
    if (is_masked(L)) return; /* the row has no visible key */

    load(&p->q, batch, h, row, 1, p->D, w->q);
    load(&p->d_o, batch, h, row, 1, p->Dv, w->d_o);
    REAL delta = 0;
    if (p->delta.present) {
        delta = get(&p->delta, batch, h, row, 0);
    } else {
        for (int64_t d = 0; d < p->Dv; ++d) delta += w->d_o[d] * get(&p->o, batch, h, row, d);
        if (p->d_lse.present) delta -= get(&p->d_lse, batch, h, row, 0);
    }
    score_row(p, seq, b, h, i, w->q, w->k, w->t, w->s);
    const double rounding = p->lse.dtype == FATTN_F64 ? FATTNI_HUGE_ROUNDING_F64 : FATTNI_HUGE_ROUNDING_F32;
    const normalizer n = normalizer_of(L, sink_of(p, h), seq->band.Sk, w->s, (REAL)rounding);
    w->d_sink[h] -= sink_probability(sink_of(p, h), n) * delta;
    for (int64_t j = 0; j < seq->band.Sk; ++j) {
        if (is_masked(w->s[j])) continue;
        const REAL P = STORED(MATH(exp)(w->s[j] - n.max - n.log_sum));
        const REAL factor = dropout_factor(p, b, h, i, j);
        const REAL dP = STORED(factor * dot(w->d_o, w->v + j * p->Dv, p->Dv));
        const REAL G = STORED(P * (dP - delta));
        const int64_t *const bs = w->bias_s;
        w->d_bias[b * bs[0] + h * bs[1] + i * bs[2] + j * bs[3]] += G;
        const REAL slope = p->softcap > 0 ? w->t[j] / (REAL)p->softcap : 0; /* tanh */
        const REAL dX = (REAL)p->scale * G * (1 - slope * slope);
        for (int64_t d = 0; d < p->D; ++d) {
            w->dq[d] += dX * w->k[j * p->D + d];
            w->dk[j * p->D + d] += dX * w->q[d];
        }
        for (int64_t d = 0; d < p->Dv; ++d) w->dv[j * p->Dv + d] += P * factor * w->d_o[d];
    }
}

/* Writes all of d_bias: zero where no row and key of any sequence contributes. */
static void store_bias(const fattni_problem *p, const scratch *w) {
    const bool add = p->flags & FATTN_ACC_DBIAS;
    const int64_t *const s = w->bias_s;
    int64_t n[4]; /* extents of what is stored: broadcast dimensions hold one element */
    for (int d = 0; d < 4; ++d) n[d] = s[d] ? p->d_bias.n[d] : fattni_min(p->d_bias.n[d], 1);
    for (int64_t b = 0; b < n[0]; ++b)
        for (int64_t h = 0; h < n[1]; ++h)
            for (int64_t i = 0; i < n[2]; ++i)
                for (int64_t j = 0; j < n[3]; ++j)
                    put(&p->d_bias, add, b, h, i, j, w->d_bias[b * s[0] + h * s[1] + i * s[2] + j * s[3]]);
}

fattn_status FN(bwd_ref)(fattn_ctx *ctx, const fattni_problem *p) {
    scratch w = {0};
    const size_t bytes = (size_t)lay_out(p, NULL, &w) * sizeof(REAL);
    void *block;
    FATTNI_TRY(fattni_alloc(ctx, bytes, &block));
    lay_out(p, block, &w);
    for (int64_t b = 0; b < p->B; ++b) {
        const fattni_sequence seq = fattni_sequence_of(p, b);
        const int64_t Sk = seq.band.Sk, batch = seq.batch;
        for (int64_t g = 0; g < p->Hkv; ++g) {
            load(&p->k, batch, g, seq.k0, Sk, p->D, w.k);
            load(&p->v, batch, g, seq.k0, Sk, p->Dv, w.v);
            for (int64_t n = 0; n < Sk * p->D; ++n) w.dk[n] = 0;
            for (int64_t n = 0; n < Sk * p->Dv; ++n) w.dv[n] = 0;
            for (int64_t h = g * p->group; h < (g + 1) * p->group; ++h)
                for (int64_t i = 0; i < seq.band.Sq; ++i) {
                    backward_row(p, &seq, b, h, i, &w);
                    for (int64_t d = 0; p->dq.present && d < p->D; ++d)
                        put(&p->dq, p->flags & FATTN_ACC_DQ, batch, h, seq.q0 + i, d, w.dq[d]);
                }
            for (int64_t j = 0; j < Sk; ++j) {
                for (int64_t d = 0; p->dk.present && d < p->D; ++d)
                    put(&p->dk, p->flags & FATTN_ACC_DK, batch, g, seq.k0 + j, d, w.dk[j * p->D + d]);
                for (int64_t d = 0; p->dv.present && d < p->Dv; ++d)
                    put(&p->dv, p->flags & FATTN_ACC_DV, batch, g, seq.k0 + j, d, w.dv[j * p->Dv + d]);
            }
        }
    }
    if (p->d_bias.present) store_bias(p, &w);
    for (int64_t h = 0; p->d_sink.present && h < p->Hq; ++h)
        put(&p->d_sink, p->flags & FATTN_ACC_DSINK, h, 0, 0, 0, w.d_sink[h]);
    fattni_free(ctx, block, bytes);
    return FATTN_OK;
}
