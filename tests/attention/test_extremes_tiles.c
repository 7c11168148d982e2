/* Numbers that break attention kernels: numerics.md, the list of what broke elsewhere. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

enum { MOST = 1280 };

/* Every logit is near -100, L near -93: where exp(0 - L) of a key that is not there overflows. */
static void very_negative(attention *a) {
    const double root = sqrt(100 / sqrt((double)a->c.D));
    tiles_fill(a, T_Q, root);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        attention_set(&a->t[T_K], at, -root * (1 + 1e-3 * (double)(at[2] % 7)));
    }
}

Test(extremes, very_negative_logits) {
    static const int64_t S[] = {64, 192, 1000, 1216, MOST};
    for (int n = 0; n < 20; ++n) {
        const attention_case c = {.name = "very negative logits", .B = 1, .Hq = 1,
                                  .Sq = n % 2 ? 1 : S[n / 4] / 8 + 1, .Sk = S[n / 4], .D = 16,
                                  .dtype = n % 4 < 2 ? FATTN_F64 : FATTN_F32,
                                  .flags = n % 3 ? FATTN_CAUSAL : 0};
        /* |s| = 100 roundings of a unit each, and the gradients are differences of O(1) sums */
        const double eps = c.dtype == FATTN_F64 ? 2.3e-16 : 1.2e-7;
        tiles_check_changed(&c, true, very_negative, (fattn_tolerance){400 * eps, 400 * eps, 1});
    }
}

/* Scores of +-1e4: one key takes all, or none does by much. */
static void huge(attention *a) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_Q]); ++n) {
        attention_index(&a->t[T_Q], n, at);
        attention_set(&a->t[T_Q], at, 100 * attention_get(&a->t[T_Q], at));
    }
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        attention_set(&a->t[T_K], at, 50 * attention_get(&a->t[T_K], at));
    }
}

Test(extremes, huge_logits) {
    const attention_case c = {.name = "huge logits", .B = 2, .Hq = 2, .Sq = 70, .Sk = 97, .D = 8,
                              .flags = FATTN_CAUSAL};
    /* an error of |s| eps in the exponent, times K = 50 in dQ, Q = 100 in dK */
    const double error = 100 * 2e4 * 2.3e-16;
    tiles_check_changed(&c, true, huge, (fattn_tolerance){100 * error, error, 1});
}

/* Row r of head 0 and key r hold x; what else is touched must stay finite. */
static void nonfinite(const char *name, double x) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AVX512; ++isa)
        for (int n = 0; n < 2; ++n) {
            fattn_ctx *const ctx = attention_context_isa(1, isa);
            if (!ctx) continue;
            const attention_case c = {.name = name, .B = 1, .Hq = 1, .Sq = 100, .Sk = 100, .D = 8,
                                      .dtype = n ? FATTN_F64 : FATTN_F32, .flags = FATTN_CAUSAL};
            attention *const a = attention_new(ctx, &c);
            int64_t at[4] = {0, 0, 70, 3};
            attention_set(&a->t[T_K], at, x);
            attention_forward(a, LIBRARY);
            for (int64_t i = 0; i < 100; ++i) {
                at[2] = i;
                const double o = attention_get(&a->t[T_O], at), L = attention_get(&a->t[T_LSE], at);
                /* Rows of the same block of 48 or 24 may be hit, others not. */
                if (i >= 70 && isnan(x)) cr_assert(isnan(o) && isnan(L), "%s: row %d", name, (int)i);
                if (i < 70 - 48) cr_assert(isfinite(o) && isfinite(L), "%s: row %d", name, (int)i);
            }
            attention_free(a);
            fattn_ctx_destroy(ctx);
        }
}
Test(extremes, nan_of_a_visible_key_propagates) { nonfinite("NaN key", NAN); }
Test(extremes, infinity_of_a_key_stays_with_its_rows) { nonfinite("infinite key", INFINITY); }

/* Rows that see nothing, with everything else dangerous: dO infinite there, gradients stay clean. */
static void dead_rows(attention *a) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_D_O]); ++n) {
        attention_index(&a->t[T_D_O], n, at);
        if (at[2] < 50) attention_set(&a->t[T_D_O], at, INFINITY);
    }
}

Test(extremes, rows_without_keys_contribute_nothing) {
    for (int n = 0; n < 4; ++n) {
        const attention_case c = {.name = "rows without keys", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 110,
                                  .Sk = 60, .D = 8, .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                                  .flags = FATTN_CAUSAL | (n / 2 ? (uint32_t)FATTN_ACC_DQ : 0u)};
        const double eps = c.dtype == FATTN_F64 ? 1e-12 : 1e-5;
        tiles_check_changed(&c, true, dead_rows, (fattn_tolerance){eps, eps, 1e-9});
    }
}

/* Logits that leave nothing to any key, or take nothing; L is the sink then, to the bit. */
static void sinks_at_the_ends(attention *a) {
    static const double ends[] = {-INFINITY, -3e38, -1e38, -1e30, 1e30, 1e38, 3e38, INFINITY};
    for (int64_t h = 0; h < a->c.Hq; ++h) attention_set(&a->t[T_SINK], &h, ends[h]);
}

Test(extremes, sinks_at_the_ends) {
    for (int n = 0; n < 24; ++n) {
        const attention_case c = {
            .name = "sinks at the ends", .B = 1, .Hq = 8, .Sq = 70, .Sk = 60, .D = 8, .sink = true,
            .d_lse = true, .dtype = (fattn_dtype)(FATTN_F64 + n % 4), .wide = n & 4,
            .flags = (n & 4 ? FATTN_MERGE : 0) | (n & 8 ? FATTN_CAUSAL : 0),
            .algorithm = n < 16 ? FATTN_ALGO_AUTO : FATTN_ALGO_FLASH1};
        tiles_check_changed(&c, true, sinks_at_the_ends, (fattn_tolerance){0});
        fattn_ctx *const ctx = attention_context(1);
        attention *const a = attention_new(ctx, &c);
        sinks_at_the_ends(a);
        if (c.flags & FATTN_MERGE) attention_start(a, T_LSE, -INFINITY);
        attention_forward(a, LIBRARY);
        for (int64_t h = 4; h < 8; ++h)
            for (int64_t i = 0; i < c.Sq; ++i)
                cr_assert_eq(attention_get(&a->t[T_LSE], (int64_t[]){0, h, i}),
                             attention_get(&a->t[T_SINK], &h));
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* A K whose rows repeat one row (stride 0) gives uniform weights; V is its mean. */
Test(extremes, equal_keys) {
    fattn_ctx *const ctx = attention_context(2);
    const attention_case c = {.name = "equal keys", .B = 1, .Hq = 1, .Sq = 30, .Sk = 211, .D = 16,
                              .dtype = FATTN_F64};
    attention *const a = attention_new(ctx, &c);
    a->t[T_K].stride[2] = 0;
    tiles_fill(a, T_V, 0.25);
    attention_run(a, LIBRARY);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_O]); ++n) {
        attention_index(&a->t[T_O], n, at);
        cr_assert_float_eq(attention_get(&a->t[T_O], at), 0.25, 1e-15);
        cr_assert_float_eq(attention_get(&a->t[T_DQ], at), 0, 1e-15);
    }
    attention_free(a);
    fattn_ctx_destroy(ctx);
}
