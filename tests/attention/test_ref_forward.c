/* The forward reference against the definition, implemented again from the case and the tensors' elements
   alone: without problem, band or strides. */
#include "attention.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

/* Sequence b of the case: its rows and keys, and where they start in the buffers. */
typedef struct sequence {
    int64_t batch, Sq, Sk, q0, k0;
} sequence;

static int64_t integer(const attention *a, enum tensor_id id, int64_t at) {
    return (int64_t)attention_get(&a->t[id], &at);
}

static sequence sequence_of(const attention *a, int64_t b) {
    sequence s = {b, a->c.Sq, a->c.Sk, 0, 0};
    if (a->present[T_SEQLENS_Q]) s.Sq = integer(a, T_SEQLENS_Q, b);
    if (a->present[T_SEQLENS_K]) s.Sk = integer(a, T_SEQLENS_K, b);
    if (a->present[T_CU_Q]) {
        s.batch = 0, s.q0 = integer(a, T_CU_Q, b), s.k0 = integer(a, T_CU_K, b);
        s.Sq = integer(a, T_CU_Q, b + 1) - s.q0, s.Sk = integer(a, T_CU_K, b + 1) - s.k0;
    }
    return s;
}

static double at(const attention *a, enum tensor_id id, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t index[4] = {b, h, i, j};
    return attention_get(&a->t[id], index);
}

/* Bias: an index along a dimension of size one is 0. */
static double bias_at(const attention *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    int64_t index[4] = {b, h, i, j};
    for (int d = 0; d < 4; ++d)
        if (a->t[T_BIAS].shape[d] == 1) index[d] = 0;
    return attention_get(&a->t[T_BIAS], index);
}

/* s of row i and key j; -inf where the row does not see the key. */
static double score(const attention *a, const sequence *s, int64_t b, int64_t h, int64_t i, int64_t j) {
    const attention_case *c = &a->c;
    const int64_t row = i + c->q_pos0, key = j + c->k_pos0;
    const int64_t off = c->flags & FATTN_CAUSAL_TOP_LEFT ? 0 : s->Sk - s->Sq;
    if (c->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT) && key > row + off) return -INFINITY;
    if (c->flags & FATTN_WINDOW) {
        if (c->window_left >= 0 && key < row + off - c->window_left) return -INFINITY;
        if (c->window_right >= 0 && key > row + off + c->window_right) return -INFINITY;
    }
    double x = 0;
    for (int64_t d = 0; d < c->D; ++d)
        x += at(a, T_Q, s->batch, h, s->q0 + i, d) * at(a, T_K, s->batch, h / (c->Hq / c->Hkv), s->k0 + j, d);
    x *= c->scale > 0 ? (double)c->scale : 1 / sqrt((double)c->D);
    if (c->softcap > 0) x = (double)c->softcap * tanh(x / (double)c->softcap);
    if (c->alibi) x -= at(a, T_ALIBI, h, 0, 0, 0) * fabs((double)(row + off - key));
    if (c->bias) x += bias_at(a, b, h, i, j);
    return x;
}

static double kept(const attention *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    const attention_case *c = &a->c;
    if (c->dropout_p == 0) return 1;
    const fattn_attention_params *p = &a->params;
    const uint32_t T = (uint32_t)lround(32768 * (double)c->dropout_p);
    const int64_t heads = p->rng_heads ? p->rng_heads : c->Hq;
    const uint32_t plane = (uint32_t)((b + p->rng_batch0) * heads + h + p->rng_head0);
    const uint32_t step = c->rng_step ? (uint32_t)integer(a, T_RNG_STEP, 0) : 0;
    const int keep = fattni_keep(p->rng.seed, p->rng.stream, step, plane, i + c->q_pos0, j + c->k_pos0, T);
    return keep ? 32768 / (32768 - (double)T) : 0;
}

static double sum_or_log(double sum) { return sum > 0 ? log(sum) : -INFINITY; }

/* before: the result over other keys, for a merge. Scores here are small: no maximum is needed. */
static void check_row(const attention *a, const attention *before, const sequence *s, int64_t b, int64_t h, int64_t i) {
    const attention_case *c = &a->c;
    const int64_t row = s->q0 + i;
    double sum = c->sink ? exp(at(a, T_SINK, h, 0, 0, 0)) : 0, earlier = 0;
    for (int64_t j = 0; j < s->Sk; ++j) sum += exp(score(a, s, b, h, i, j));
    if (c->flags & FATTN_MERGE) earlier = exp(at(before, T_LSE, s->batch, h, row, 0));
    const double L = sum_or_log(sum + earlier), got_L = at(a, T_LSE, s->batch, h, row, 0);
    cr_assert(got_L == L || fabs(got_L - L) <= 1e-13 * (1 + fabs(L)), "%s: L [%lld,%lld,%lld] is %.17g, not %.17g",
              c->name, (long long)b, (long long)h, (long long)i, got_L, L);
    for (int64_t d = 0; d < c->Dv; ++d) {
        double o = 0;
        for (int64_t j = 0; j < s->Sk; ++j) {
            const double e = exp(score(a, s, b, h, i, j));
            if (e > 0) o += e * kept(a, b, h, i, j) * at(a, T_V, s->batch, h / (c->Hq / c->Hkv), s->k0 + j, d);
        }
        if (earlier > 0) o += earlier * at(before, T_O, s->batch, h, row, d);
        if (sum + earlier > 0) o /= sum + earlier;
        const double got = at(a, T_O, s->batch, h, row, d);
        cr_assert(fabs(got - o) <= 1e-13 * (1 + fabs(o)), "%s: O [%lld,%lld,%lld,%lld] is %.17g, not %.17g", c->name,
                  (long long)b, (long long)h, (long long)i, (long long)d, got, o);
    }
}

static void check(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c), *const before = attention_new(ctx, c);
    attention_forward(a, REFERENCE);
    for (int64_t b = 0; b < a->c.B; ++b) {
        const sequence s = sequence_of(a, b);
        for (int64_t h = 0; h < a->c.Hq; ++h)
            for (int64_t i = 0; i < s.Sq; ++i) check_row(a, before, &s, b, h, i);
    }
    attention_free(a);
    attention_free(before);
}

Test(ref_forward, every_feature_and_layout) {
    static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < attention_feature_count; ++n)
        for (int layout = 0; layout < 4; ++layout) {
            attention_case c = attention_features[n];
            c.layout = layouts[layout];
            check(ctx, &c);
        }
    fattn_ctx_destroy(ctx);
}

Test(ref_forward, mixed_features) {
    fattn_ctx *const ctx = attention_context(1);
    char name[16];
    for (int n = 0; n < 300; ++n) {
        attention_case c = attention_mix(n);
        snprintf(name, sizeof name, "mix %d", n);
        c.name = name;
        check(ctx, &c);
    }
    fattn_ctx_destroy(ctx);
}

/* 16-bit tensors change only the rounding of inputs and outputs. */
Test(ref_forward, every_dtype) {
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    static const double half_ulp[] = {0x1p-24, 0x1p-11, 0x1p-8};
    fattn_ctx *const ctx = attention_context(1);
    for (int t = 0; t < 3; ++t)
        for (int wide = 0; wide < 2; ++wide) {
            attention_case c = {"dtype",      .B = 2,      .Hq = 2, .Sq = 9, .Sk = 7, .D = 5, .dtype = dtypes[t],
                                .wide = wide, .bias = BIAS};
            attention *const got = attention_new(ctx, &c);
            attention *const want = attention_twin(got, FATTN_F64);
            attention_forward(got, REFERENCE);
            attention_forward(want, REFERENCE);
            const double u = wide ? 0x1p-24 : half_ulp[t];
            fattn_report r = {.struct_size = sizeof r};
            const fattn_tolerance tol = {1e-7 * u, 1.001 * u, 1};
            const fattn_status s = fattn_compare(ctx, &got->t[T_O], &want->t[T_O], NULL, 0, tol, &r);
            cr_assert_eq(s, FATTN_OK, "%s %s", fattn_dtype_name(dtypes[t]), fattn_ctx_error(ctx));
            attention_free(got);
            attention_free(want);
        }
    fattn_ctx_destroy(ctx);
}
