/* FATTN_UNIFIED_MAX: results within the bounds of calls without it, whatever the maximum is, on every instruction set;
   parts whose sums leave their range are computed with maxima; what is refused; backward. */
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const fattn_dtype dtypes[3] = {FATTN_F64, FATTN_F32, FATTN_BF16};
/* Near the scores, which are below 8; so far that sums have few bits left below and above; beyond. */
static const float maxima[] = {0, 5, -9, 48, -36, 70, -60, 1e4f, -1e4f, 3e38f, -3e38f};
enum { MAXIMA = sizeof maxima / sizeof *maxima };

static attention_case shape(int n) {
    static const int64_t groups[] = {1, 3, 8}, dims[] = {16, 40, 33, 64}, keys[] = {700, 1, 2100, 512, 64, 1023};
    static const uint32_t masks[] = {0, FATTN_CAUSAL, FATTN_WINDOW, FATTN_CAUSAL_TOP_LEFT};
    return (attention_case){.name = "unified",
                            .dtype = dtypes[n % 3],
                            .B = 1 + n % 2,
                            .Hq = 2 * groups[n / 2 % 3],
                            .Hkv = 2,
                            .Sq = 1 + n % 4,
                            .Sk = keys[n % 6],
                            .D = dims[n % 4],
                            .Dv = dims[n / 3 % 4],
                            .flags = masks[n / 2 % 4] | FATTN_UNIFIED_MAX,
                            .unified_max = maxima[n % MAXIMA],
                            .window_left = 300,
                            .window_right = 5,
                            .sink = n % 5 == 3,
                            .wide = n % 7 == 2};
}

static void check(int n, attention_case c) {
    char name[96];
    snprintf(name, sizeof name, "%s %d, maximum %g", c.name, n, (double)c.unified_max);
    c.name = name;
    tiles_check_forward(&c);
}

Test(unified, shapes) {
    for (int n = 0; n < 3 * MAXIMA; n += THINNED(7)) check(n, shape(n));
}

Test(unified, features) {
    for (int n = 0; n < 30; n += THINNED(5)) {
        attention_case c = shape(n + 7);
        c.unified_max = maxima[n / 3 % MAXIMA];
        if (n % 6 == 0) c.bias = BIAS | BIAS_MASKS | BIAS_OVER_H;
        if (n % 6 == 1) c.softcap = 4, c.flags |= FATTN_MERGE;
        if (n % 6 == 2) c.dropout_p = 0.3f;
        if (n % 6 == 3) c.alibi = true;
        if (n % 6 == 4) c.layout = LAYOUT_REVERSED, c.scale = 0.05f;
        if (n % 6 == 5) {
            c.lengths = n / 6 % 2 ? LENGTHS_PACKED : LENGTHS_PADDED;
            for (int b = 0; b < c.B; ++b)
                c.length_q[b] = (int32_t)(c.Sq - b), c.length_k[b] = (int32_t)(c.Sk / (1 + 2 * b));
        }
        check(n, c);
    }
}

/* Of the parts, 512 keys each, one has logits of -100, the next of 100: with maxima between only these are computed
   again, or none, or all. */
static void large_logits(attention *a) {
    const double root = sqrt(100 / sqrt((double)a->c.D));
    int64_t at[FATTN_MAX_DIMS] = {0};
    tiles_fill(a, T_Q, root);
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        attention_set(&a->t[T_K], at, at[2] / 512 % 2 ? root : -root);
    }
}
Test(unified, parts_fall_back_alone) {
    for (int n = 0; n < 2 * MAXIMA; ++n) {
        const double eps = n % 2 ? 1.2e-7 : 2.3e-16;
        const attention_case c = {.name = "large logits",
                                  .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                                  .B = 1,
                                  .Hq = 4,
                                  .Hkv = 2,
                                  .Sq = 1 + n % 5,
                                  .Sk = 2000,
                                  .D = 16,
                                  .flags = FATTN_UNIFIED_MAX,
                                  .unified_max = n / 2 == 1   ? 90
                                                 : n / 2 == 2 ? -80
                                                              : maxima[n / 2],
                                  .omit = NO_DQ | NO_DK | NO_DV};
        tiles_check_changed(&c, false, large_logits, (fattn_tolerance){400 * eps, 400 * eps, 1});
    }
}

/* Sums of up to 2^60, whose product with these values does not fit: O is not infinite. */
static void large_values(attention *a) { tiles_fill(a, T_V, 1e30); }
Test(unified, large_values) {
    attention_case c = shape(1);
    c.unified_max = -34, c.sink = false, c.flags = FATTN_UNIFIED_MAX;
    tiles_check_changed(&c, false, large_values, (fattn_tolerance){1e-5, 1e-5, 1});
}

static attention *run(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c);
    attention_forward(a, LIBRARY);
    return a;
}

static bool same(const attention *a, const attention *b) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    bool equal = true;
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_O]); ++n) {
        attention_index(&a->t[T_O], n, at);
        equal = equal && attention_get(&a->t[T_O], at) == attention_get(&b->t[T_O], at);
    }
    return equal;
}

/* A part that is computed again has the bits of a call without the flag; others differ, so that the maximum is used. */
Test(unified, the_maximum_is_used_where_it_is_near) {
    fattn_ctx *const ctx = attention_context(2), *const one = attention_context(1);
    for (int n = 0; n < 2 * MAXIMA; ++n) {
        attention_case c = shape(0);
        c.dtype = dtypes[n % 2];
        c.Sk = 2100, c.D = c.Dv = 40, c.unified_max = maxima[n / 2] + 0.3f, c.layout = LAYOUT_BHSD;
        attention *const got = run(ctx, &c), *const again = run(one, &c);
        attention_same_bits(got, again);
        c.flags &= ~(uint32_t)FATTN_UNIFIED_MAX;
        attention *const plain = run(ctx, &c);
        const double distance = fabs((double)c.unified_max);
        if (distance < 30) cr_assert(!same(got, plain), "maximum %g: the same bits", (double)c.unified_max);
        if (distance > (n % 2 ? 60 : 1000))
            cr_assert(same(got, plain), "maximum %g: other bits", (double)c.unified_max);
        attention_free(got);
        attention_free(again);
        attention_free(plain);
    }
    fattn_ctx_destroy(ctx);
    fattn_ctx_destroy(one);
}

static void refused(attention_case c, fattn_status want, const char *message) {
    fattn_ctx *const ctx = attention_context(1);
    attention_case legal = c;
    legal.flags = 0;
    attention *const a = attention_new(ctx, &legal);
    a->params.flags = c.flags, a->params.unified_max = c.unified_max;
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_attention_fwd(ctx, &a->params, &a->io), want, "%s", fattn_ctx_error(ctx));
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

Test(unified, what_is_refused) {
    attention_case c = {
        .name = "refused", .dtype = FATTN_F16, .B = 1, .Hq = 1, .Sq = 1, .Sk = 40, .D = 8, .flags = FATTN_UNIFIED_MAX};
    refused(c, FATTN_E_UNSUPPORTED, "FATTN_UNIFIED_MAX in f16: P, not relative to a row's own maximum");
    c.dtype = FATTN_F32, c.Sq = 9;
    refused(c, FATTN_E_UNSUPPORTED, "takes FATTN_UNIFIED_MAX with few rows only: 8");
    c.Sq = 1, c.unified_max = NAN;
    refused(c, FATTN_E_ARG, "unified_max: nan is not finite");
    c.unified_max = INFINITY;
    refused(c, FATTN_E_ARG, "unified_max: inf is not finite");
    c.unified_max = 0;
    for (int32_t algorithm = FATTN_ALGO_STANDARD; algorithm <= FATTN_ALGO_FLASH1; ++algorithm) {
        c.algorithm = algorithm;
        refused(c, FATTN_E_UNSUPPORTED, "has no kernel with FATTN_UNIFIED_MAX for it");
    }
}

/* Any number of rows, F16 too: the flag says nothing about backward. */
Test(unified, backward_ignores_it) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 2; ++n) {
        const attention_case c = {.name = "backward",
                                  .dtype = n ? FATTN_F16 : FATTN_F32,
                                  .B = 1,
                                  .Hq = 2,
                                  .Sq = n ? 30 : 3,
                                  .Sk = 600,
                                  .D = 16};
        attention *const want = attention_new(ctx, &c), *const got = attention_new(ctx, &c);
        attention_run(want, LIBRARY);
        attention_forward(got, LIBRARY);
        got->params.flags = FATTN_UNIFIED_MAX, got->params.unified_max = NAN;
        cr_assert_eq(fattn_attention_bwd(ctx, &got->params, &got->io), FATTN_E_ARG);
        got->params.unified_max = 1;
        attention_backward(got, LIBRARY);
        attention_same_bits(want, got);
        attention_free(want);
        attention_free(got);
    }
    fattn_ctx_destroy(ctx);
}
