#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

attention_case tiles_case(int n, fattn_dtype dtype) {
    static const int64_t D[] = {64, 1, 128, 3, 96, 8, 59, 256, 80, 16, 111, 32};
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW,
                                     FATTN_CAUSAL | FATTN_WINDOW};
    static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH};
    const attention_shape s = attention_shapes[n % attention_shape_count];
    return (attention_case){
        .name = "walk", .dtype = dtype, .B = 1 + n % 2, .Hq = 1 + n / 2 % 3, .Hkv = 1,
        .Sq = s.Sq, .Sk = s.Sk, .D = D[n % 12], .Dv = D[n % 3 ? n % 12 : (n + 5) % 12],
        .flags = masks[n % 5], .window_left = n % 41, .window_right = n % 29 - 1,
        .layout = layouts[n % 3]};
}

attention_case tiles_enlarge(const attention_case *given, int n) {
    attention_case c = *given;
    const int32_t rows = 11 + 7 * (n % 3), keys = 9 + 8 * (n % 4); /* for each one of before */
    c.Sq = c.Sq * rows - n % 2;
    c.Sk = c.Sk * keys - n % 3;
    if (c.Sq < 0) c.Sq = 0;
    if (c.Sk < 0) c.Sk = 0;
    c.D = c.D * (5 + n % 17);
    c.Dv = c.Dv * (3 + n % 19);
    c.window_left *= keys / 2;
    c.window_right *= keys / 2;
    c.q_pos0 *= 5;
    c.k_pos0 *= 7;
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        const int64_t q = (int64_t)c.length_q[b] * rows, k = (int64_t)c.length_k[b] * keys;
        c.length_q[b] = (int32_t)(q < c.Sq ? q : c.Sq);
        c.length_k[b] = (int32_t)(k < c.Sk ? k : c.Sk);
    }
    return c;
}

/* The oracle's results; in F32, those of FATTN_ALGO_STANDARD beside them: tiles may be twice as far
   from the oracle as an unfused computation in the same type is. */
typedef struct expected {
    attention *want, *baseline;
} expected;

static expected expect(fattn_ctx *ctx, const attention_case *c, bool backward,
                       void (*change)(attention *a)) {
    attention_case unfused = *c;
    unfused.algorithm = FATTN_ALGO_STANDARD;
    attention *const inputs = attention_new(ctx, &unfused);
    if (change) change(inputs);
    const expected e = {attention_twin(inputs, FATTN_F64), c->dtype == FATTN_F32 ? inputs : NULL};
    attention_forward(e.want, REFERENCE);
    if (backward) attention_backward(e.want, REFERENCE);
    if (!e.baseline) attention_free(inputs);
    else if (backward) attention_run(e.baseline, LIBRARY);
    else attention_forward(e.baseline, LIBRARY);
    return e;
}

static double largest(const fattn_tensor *t) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    double most = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        const double x = fabs(attention_get(t, at));
        if (isfinite(x)) most = fmax(most, x);
    }
    return most;
}

/* F32 errors that are granted beside twice the baseline's, whose largest may by chance be small where
   few numbers are compared. Half units walk at random along D products of a score and sums over S keys
   and rows. Scores are of size 8 (with ALiBi, of the size of the distances), dP is of size 3 sqrt(Dv)
   before delta is taken away: s and L, which the baseline does not go through, P and dP carry as many
   half units, and what is made of them a relative error of as much. What is summed over rows adds up
   as a random walk, also where the sum itself is 0. */
static double granted(const attention *want, enum tensor_id id) {
    const attention_case *const c = &want->c;
    const int64_t off = c->q_pos0 - c->k_pos0, reach = c->Sq + c->Sk + (off < 0 ? -off : off);
    const double score = c->alibi ? fmax(8, 0.75 * (double)reach) : 8;
    const double D = (double)(c->D > c->Dv ? c->D : c->Dv), S = (double)(c->Sk > c->Sq ? c->Sk : c->Sq);
    const double size = fmax(score, 3 * sqrt((double)c->Dv)), chains = 4 * (8 + sqrt(D) + sqrt(S));
    const bool sums = id == T_D_BIAS || id == T_D_SINK;
    const double walk = sums ? sqrt((double)(c->B * c->Hq * c->Sq + 1)) : 1;
    return 0x1p-24 * fmax(chains, size * fmax(walk, fmax(1, largest(&want->t[id]))));
}

static void match(const attention *got, const expected *e, fattn_tolerance tol) {
    if (tol.rtol > 0 || !e->baseline) {
        attention_match(got, e->want, NULL, 0, tol);
        return;
    }
    for (int n = 0; n < 7; ++n) {
        if (!got->present[attention_outputs[n]]) continue;
        attention one = *got;
        for (int m = 0; m < 7; ++m) one.present[attention_outputs[m]] &= m == n;
        const fattn_tolerance floor = {.atol = granted(e->want, attention_outputs[n])};
        attention_match(&one, e->want, e->baseline, 2, floor);
    }
}

void tiles_check_changed(const attention_case *c, bool backward, void (*change)(attention *a),
                         fattn_tolerance tol) {
    fattn_ctx *const one = attention_context(1);
    const expected e = expect(one, c, backward, change);
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AVX512; ++isa)
        for (int threads = 1; threads <= 16; threads += 15) { /* backward: one pass; two */
            fattn_ctx *const ctx = attention_context_isa(threads, isa);
            if (!ctx) continue;
            if (threads > 1 && isa < one->isa) { /* the best will do */
                fattn_ctx_destroy(ctx);
                continue;
            }
            char name[96];
            snprintf(name, sizeof name, "%s, %s, %d threads", c->name, fattni_isa_name(isa), threads);
            attention_case named = *c;
            named.name = name;
            attention *const got = attention_new(ctx, &named);
            if (change) change(got);
            attention_forward(got, LIBRARY);
            if (backward) attention_backward(got, LIBRARY);
            match(got, &e, tol);
            attention_free(got);
            fattn_ctx_destroy(ctx);
        }
    attention_free(e.want);
    if (e.baseline) attention_free(e.baseline);
    fattn_ctx_destroy(one);
}

void tiles_check_forward(const attention_case *c) {
    attention_case only = *c;
    only.omit = NO_DQ | NO_DK | NO_DV | NO_DBIAS | NO_DSINK;
    tiles_check_changed(&only, false, NULL, (fattn_tolerance){0});
}

void tiles_check_backward(const attention_case *c) {
    tiles_check_changed(c, true, NULL, (fattn_tolerance){0});
}

void tiles_fill(attention *a, enum tensor_id id, double x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x);
    }
}
