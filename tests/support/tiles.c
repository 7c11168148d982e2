#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

bool tiles_refuse(const attention_case *c) {
    return c->softcap > 0 || c->alibi || c->bias || c->sink || c->dropout_p > 0 ||
           (c->flags & FATTN_MERGE);
}

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

/* Where few numbers are compared, the largest error of the baseline may by chance be small. The chains
   of roundings say what it may be at least: D products of a score, sums over S keys and rows, half ulps
   that walk at random, on numbers of size 4. */
static double chance(const attention_case *c) {
    const double D = (double)(c->D > c->Dv ? c->D : c->Dv), S = (double)(c->Sk > c->Sq ? c->Sk : c->Sq);
    return 4 * 0x1p-24 * (8 + sqrt(D) + sqrt(S));
}

void tiles_check_changed(const attention_case *c, bool backward, void (*change)(attention *a),
                         fattn_tolerance tol) {
    fattn_ctx *const one = attention_context(1);
    const expected e = expect(one, c, backward, change);
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AVX512; ++isa)
        for (int threads = 1; threads <= 16; threads += 15) { /* backward: one pass; two */
            fattn_ctx *const ctx = attention_context_isa(threads, isa);
            if (!ctx) continue;
            char name[96];
            snprintf(name, sizeof name, "%s, %s, %d threads", c->name, fattni_isa_name(isa), threads);
            attention_case named = *c;
            named.name = name;
            attention *const got = attention_new(ctx, &named);
            if (change) change(got);
            attention_forward(got, LIBRARY);
            if (backward) attention_backward(got, LIBRARY);
            const bool unfused = tol.rtol <= 0 && e.baseline;
            if (unfused) tol.atol = chance(c);
            attention_match(got, e.want, unfused ? e.baseline : NULL, 2, tol);
            attention_free(got);
            fattn_ctx_destroy(ctx);
        }
    attention_free(e.want);
    if (e.baseline) attention_free(e.baseline);
    fattn_ctx_destroy(one);
}

/* Scores and dP are of size 4 to 8, their last place weighs 4.8e-7: two of these are granted beside
   the baseline, since the largest errors of a few elements are luck. */
static fattn_tolerance by_dtype(const attention_case *c) {
    return (fattn_tolerance){.atol = c->dtype == FATTN_F32 ? 9.6e-7 : 0};
}

void tiles_check_forward(const attention_case *c) {
    attention_case only = *c;
    only.omit = NO_DQ | NO_DK | NO_DV | NO_DBIAS | NO_DSINK;
    tiles_check_changed(&only, false, NULL, by_dtype(c));
}

void tiles_check_backward(const attention_case *c) {
    tiles_check_changed(c, true, NULL, by_dtype(c));
}

void tiles_fill(attention *a, enum tensor_id id, double x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x);
    }
}
