/* The forward reference: fattni_fwd_ref, in double (tests compile it in other types, see
   core/attention/ref_row.inc). */
#include "core/attention/ref_row.inc"

/* Attention of row i: returns L, writes o[Dv]. s is a row of scores. */
static REAL attend(const fattni_problem *p, int64_t b, int64_t h, int64_t i, int64_t Sk, const REAL *s, const REAL *v,
                   REAL *o) {
    const REAL sink = sink_of(p, h);
    for (int64_t d = 0; d < p->Dv; ++d) o[d] = 0;
    if (sink == (REAL)INFINITY) return sink;
    REAL max = sink;
    for (int64_t j = 0; j < Sk; ++j) max = s[j] > max ? s[j] : max;
    REAL sum = is_masked(sink) ? 0 : MATH(exp)(sink - max);
    bool empty = is_masked(sink);
    for (int64_t j = 0; j < Sk; ++j) {
        if (is_masked(s[j])) continue; /* a NaN is not masked */
        empty = false;
        const REAL e = MATH(exp)(s[j] - max), w = STORED(e) * dropout_factor(p, b, h, i, j);
        sum += e;
        for (int64_t d = 0; d < p->Dv; ++d) o[d] += w * v[j * p->Dv + d];
    }
    if (empty) return -(REAL)INFINITY;
    for (int64_t d = 0; d < p->Dv; ++d) o[d] /= sum;
    return max + MATH(log)(sum);
}

/* exp(part - whole) where part is one of the terms of whole; avoids inf - inf. */
static REAL share(REAL part, REAL whole) { return part == whole ? 1 : MATH(exp)(part - whole); }

/* log(exp a + exp b) */
static REAL add_logs(REAL a, REAL b) {
    const REAL high = a > b ? a : b, low = a > b ? b : a;
    if (is_masked(low) || high == (REAL)INFINITY) return high;
    return high + MATH(log1p)(MATH(exp)(low - high));
}

/* Merges (o, L), over this call's keys, with the result over other keys in the problem's o and lse. A
   part without keys (L = -inf) has weight 0, whatever its o holds. Returns the merged L. */
static REAL merge(const fattni_problem *p, int64_t batch, int64_t h, int64_t row, REAL L, REAL *o) {
    const REAL before = get(&p->lse, batch, h, row, 0);
    if (is_masked(before)) return L;
    const REAL joint = add_logs(before, L);
    const REAL kept = share(before, joint), added = share(L, joint);
    for (int64_t d = 0; d < p->Dv; ++d) o[d] = kept * get(&p->o, batch, h, row, d) + added * o[d];
    return joint;
}

fattn_status FN(fwd_ref)(fattn_ctx *ctx, const fattni_problem *p) {
    const int64_t count = p->D + p->Sk * (p->D + p->Dv + 2) + p->Dv;
    void *block;
    FATTNI_TRY(fattni_alloc(ctx, (size_t)count * sizeof(REAL), &block));
    REAL *const q = block, *const k = q + p->D, *const v = k + p->Sk * p->D;
    REAL *const t = v + p->Sk * p->Dv, *const s = t + p->Sk, *const o = s + p->Sk;
    for (int64_t b = 0; b < p->B; ++b) {
        const fattni_sequence seq = fattni_sequence_of(p, b);
        for (int64_t h = 0; h < p->Hq; ++h) {
            load(&p->k, seq.batch, h / p->group, seq.k0, seq.band.Sk, p->D, k);
            load(&p->v, seq.batch, h / p->group, seq.k0, seq.band.Sk, p->Dv, v);
            for (int64_t i = 0; i < seq.band.Sq; ++i) {
                const int64_t row = seq.q0 + i;
                load(&p->q, seq.batch, h, row, 1, p->D, q);
                score_row(p, &seq, b, h, i, q, k, t, s);
                REAL L = attend(p, b, h, i, seq.band.Sk, s, v, o);
                if (p->flags & FATTN_MERGE) L = merge(p, seq.batch, h, row, L, o);
                for (int64_t d = 0; d < p->Dv; ++d) PUT(&p->o, seq.batch, h, row, d, o[d]);
                PUT(&p->lse, seq.batch, h, row, 0, L);
            }
        }
    }
    fattni_free(ctx, block, (size_t)count * sizeof(REAL));
    return FATTN_OK;
}
