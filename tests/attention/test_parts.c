/* Forward of few rows: keys in parts of 512, on every instruction set against the reference, and bits that depend
   neither on the batch nor on threads. Rows past a sequence's keys hold NaN (attention.h). */
#include "thinned.h"
#include "tiles.h"

#include "fwd/cpu/fwd_parts.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
static const int64_t lengths[] = {0, 1, 511, 512, 513, 1024, 5000};
static const int64_t groups[] = {1, 3, 5, 8, 12};
static const int64_t dims[] = {8, 3, 16, 40, 1, 64, 33};

/* Each call of few rows is planned in parts, others are not. */
Test(parts, which_calls) {
    fattn_ctx *const ctx = attention_context(2);
    for (int64_t Sq = 1; Sq <= 40; ++Sq) {
        const attention_case c = {.name = "which", .dtype = FATTN_F32, .B = 1, .Hq = 2, .Sq = Sq, .Sk = 700, .D = 8};
        attention *const a = attention_new(ctx, &c);
        attention_forward(a, LIBRARY);
        cr_assert_eq(strncmp(a->plan.fwd_kernel, "fattn_fwd_parts", 15) == 0, Sq <= 8);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

static attention_case shape(int n) {
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW};
    return (attention_case){.name = "parts",
                            .dtype = dtypes[n % 4],
                            .B = 1 + n % 2,
                            .Hq = groups[n % 5] * (1 + n / 5 % 2),
                            .Hkv = 1 + n / 5 % 2,
                            .Sq = 1 + n % 17,
                            .Sk = lengths[n % 7],
                            .D = dims[n / 2 % 7],
                            .Dv = dims[n / 3 % 7],
                            .layout = layouts[n / 3 % 4],
                            .flags = masks[n / 4 % 4],
                            .window_left = 40 * (n % 40),
                            .window_right = n % 9 - 4,
                            .wide = n % 3 == 0};
}

static void walk(int first, int count) {
    for (int n = first; n < first + count; n += THINNED(3)) {
        char name[32];
        attention_case c = shape(n);
        snprintf(name, sizeof name, "parts %d", n);
        c.name = name;
        tiles_check_forward(&c);
    }
}
Test(parts, shapes) { walk(0, 40); }
Test(parts, more_shapes) { walk(40, 45); }

/* Sequences with few rows beside others with more, or only such. */
static attention_case ragged(int n) {
    attention_case c = {.name = "lengths",
                        .dtype = dtypes[n % 4],
                        .B = 7,
                        .Hq = groups[n % 5],
                        .Hkv = 1,
                        .Sq = n / 2 % 2 ? 60 : 1 + n % 8,
                        .Sk = n / 4 % 2 ? 5000 : 1300,
                        .D = dims[n % 7],
                        .lengths = n % 2 ? LENGTHS_PACKED : LENGTHS_PADDED,
                        .flags = n / 3 % 2 ? FATTN_CAUSAL : 0,
                        .wide = n % 3 == 0};
    for (int b = 0; b < 7; ++b) {
        c.length_q[b] = (int32_t)((b * 5 + n * 3) % 18);
        if (c.length_q[b] == 17) c.length_q[b] = (int32_t)c.Sq;
        if (c.length_q[b] > c.Sq) c.length_q[b] = (int32_t)c.Sq;
        c.length_k[b] = (int32_t)lengths[(b + n) % 7];
        if (c.length_k[b] > c.Sk) c.length_k[b] = (int32_t)c.Sk;
    }
    return c;
}
Test(parts, ragged_batches) {
    for (int n = 0; n < 20; n += THINNED(3)) {
        const attention_case c = ragged(n);
        tiles_check_forward(&c);
    }
}

/* A small case with many more keys. */
static attention_case with_long_keys(const attention_case *given, int n) {
    attention_case c = *given;
    const int32_t keys = 97 + 61 * (n % 4);
    c.Sk = c.Sk * keys;
    c.window_left *= keys, c.window_right *= keys;
    c.D = c.D * (1 + n % 5), c.Dv = c.Dv * (1 + n % 3);
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        const int64_t k = (int64_t)c.length_k[b] * keys;
        c.length_k[b] = (int32_t)(k < c.Sk ? k : c.Sk);
    }
    return c;
}

static void features(int first, int step) {
    for (int n = first; n < attention_feature_count; n += step * THINNED(3)) {
        char name[64];
        attention_case c = with_long_keys(&attention_features[n], n);
        snprintf(name, sizeof name, "%s, parts", attention_features[n].name);
        c.name = name;
        c.dtype = dtypes[(n + n / 4) % 4];
        c.layout = layouts[n / 2 % 4];
        c.wide = n % 3 == 0;
        tiles_check_forward(&c);
    }
}
Test(parts, each_feature) { features(0, 2); }
Test(parts, each_other_feature) { features(1, 2); }

/* Windows and positions leave whole parts, and rows, without a key. */
Test(parts, empty_parts_and_rows) {
    for (int n = 0; n < 24; n += THINNED(5)) {
        const attention_case c = {.name = "empty parts",
                                  .dtype = dtypes[n % 4],
                                  .B = 1,
                                  .Hq = 3,
                                  .Hkv = 1,
                                  .Sq = 1 + n % 10,
                                  .Sk = n % 5 == 4 ? 5 : 2600,
                                  .D = 16,
                                  .flags = FATTN_WINDOW | (n % 2 ? FATTN_CAUSAL_TOP_LEFT : 0u) |
                                           (n / 12 ? (uint32_t)FATTN_MERGE : 0u),
                                  .window_left = n % 3 ? 5 : 700,
                                  .window_right = n % 7 - 3,
                                  .q_pos0 = n / 4 % 3 * 1290,
                                  .bias = n % 6 == 5 ? BIAS | BIAS_MASKS | BIAS_OVER_H : 0,
                                  .sink = n % 8 == 7};
        tiles_check_forward(&c);
    }
}

/* Logits from -100 to 100, whose sign changes from part to part: weights of parts are exp(-200) to 1. */
static void large_logits(attention *a) {
    const double root = sqrt(100 / sqrt((double)a->c.D));
    int64_t at[FATTN_MAX_DIMS] = {0};
    tiles_fill(a, T_Q, root);
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        const double size = 1 - 1e-3 * (double)(at[2] % 7);
        attention_set(&a->t[T_K], at, (at[2] / 512 % 2 ? root : -root) * size);
    }
}
Test(parts, large_logits) {
    for (int n = 0; n < 16; ++n) {
        const attention_case c = {.name = "large logits",
                                  .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                                  .B = 1,
                                  .Hq = 4,
                                  .Hkv = 2,
                                  .Sq = n / 2 % 4 * 2 + 1,
                                  .Sk = n < 8 ? 1200 : 450,
                                  .D = 16,
                                  .omit = NO_DQ | NO_DK | NO_DV};
        /* |s| = 100 roundings of a unit each */
        const double eps = c.dtype == FATTN_F64 ? 2.3e-16 : 1.2e-7;
        tiles_check_changed(&c, false, large_logits, (fattn_tolerance){400 * eps, 400 * eps, 1});
    }
}

/* Scores of 1e30 in one part and far below in the others. */
static void huge_scores(attention *a) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    tiles_fill(a, T_Q, 1);
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        attention_set(&a->t[T_K], at, at[2] == 700 ? 1e30 : at[2] < 512 ? -1e30 : 1);
    }
}
Test(parts, huge_scores) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int n = 0; n < 4; ++n) {
            fattn_ctx *const ctx = attention_context_isa(2, isa);
            if (!ctx) continue;
            const attention_case c = {
                .name = "huge", .dtype = dtypes[n == 2 ? 1 : n], .B = 1, .Hq = 1, .Sq = 2, .Sk = 1500, .D = 4};
            attention *const a = attention_new(ctx, &c);
            huge_scores(a);
            attention_forward(a, LIBRARY);
            for (int64_t i = 0; i < 2; ++i)
                for (int64_t d = 0; d < 4; ++d)
                    cr_assert_eq(attention_get(&a->t[T_O], (int64_t[]){0, 0, i, d}),
                                 attention_get(&a->t[T_V], (int64_t[]){0, 0, 700, d}));
            attention_free(a);
            fattn_ctx_destroy(ctx);
        }
}

/* ---- bits ---- */

/* First row of sequence b in the buffer. */
static int64_t first_row(const attention *a, enum tensor_id cu, int64_t b) {
    return a->present[cu] ? (int64_t)attention_get(&a->t[cu], &b) : 0;
}

static void copy_rows(const attention *one, const attention *all, int64_t b, enum tensor_id id, enum tensor_id cu) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&one->t[id]); ++n) {
        attention_index(&one->t[id], n, at);
        const int64_t from[4] = {all->present[cu] ? 0 : b, at[1], at[2] + first_row(all, cu, b), at[3]};
        attention_set(&one->t[id], at, attention_get(&all->t[id], from));
    }
}

static void check_bits(const attention *one, const attention *all, int64_t b, enum tensor_id id) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&one->t[id]); ++n) {
        attention_index(&one->t[id], n, at);
        const int64_t from[4] = {all->present[T_CU_Q] ? 0 : b, at[1], at[2] + first_row(all, T_CU_Q, b), at[3]};
        const double x = attention_get(&one->t[id], at), y = attention_get(&all->t[id], from);
        cr_assert(memcmp(&x, &y, sizeof x) == 0, "%s of sequence %d, head %d, row %d: %a alone, %a in the batch",
                  attention_names[id], (int)b, (int)at[1], (int)at[2], x, y);
    }
}

Test(parts, a_sequence_alone_and_in_any_batch) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int n = 0; n < 16; n += THINNED(3)) {
            fattn_ctx *const ctx = attention_context_isa(1 + n % 3, isa), *const other = attention_context_isa(2, isa);
            if (!ctx || !other) continue;
            attention_case c = ragged(n);
            c.softcap = n % 5 == 4 ? 3 : 0;
            c.layout = layouts[n / 2 % 3];
            attention *const all = attention_new(ctx, &c);
            attention_forward(all, LIBRARY);
            for (int64_t b = 0; b < c.B; ++b) {
                attention_case alone = c;
                alone.B = 1, alone.lengths = LENGTHS_NONE, alone.layout = LAYOUT_BHSD;
                alone.Sq = c.length_q[b], alone.Sk = c.length_k[b];
                attention *const one = attention_new(other, &alone);
                copy_rows(one, all, b, T_Q, T_CU_Q);
                copy_rows(one, all, b, T_K, T_CU_K);
                copy_rows(one, all, b, T_V, T_CU_K);
                attention_forward(one, LIBRARY);
                check_bits(one, all, b, T_O);
                check_bits(one, all, b, T_LSE);
                attention_free(one);
            }
            attention_free(all);
            fattn_ctx_destroy(ctx);
            fattn_ctx_destroy(other);
        }
}

Test(parts, any_number_of_threads) {
    static const int counts[] = {2, 3, 7};
    fattn_ctx *const single = attention_context(1);
    for (int n = 0; n < 24; n += THINNED(5)) {
        attention_case c = n % 3 ? shape(n) : ragged(n);
        if (n % 3 == 1) c.dropout_p = 0.25f;
        if (n % 3 == 2) c.alibi = true;
        attention *const want = attention_new(single, &c);
        attention_forward(want, LIBRARY);
        for (int m = 0; m < 3; ++m) {
            fattn_ctx *const ctx = attention_context(counts[m]);
            attention *const got = attention_new(ctx, &c);
            attention_forward(got, LIBRARY);
            attention_same_bits(want, got);
            attention_free(got);
            fattn_ctx_destroy(ctx);
        }
        attention_free(want);
    }
    fattn_ctx_destroy(single);
}

/* 250 runs with more threads than cores. */
Test(parts, runs_repeat) {
    const attention_case c = {
        .name = "repeated", .dtype = FATTN_F32, .B = 2, .Hq = 4, .Hkv = 2, .Sq = 3, .Sk = 3000, .D = 24, .flags = 1};
    fattn_ctx *const one = attention_context(1), *const many = attention_context(7);
    attention *const want = attention_new(one, &c), *const got = attention_new(many, &c);
    attention_forward(want, LIBRARY);
    for (int n = 0; n < 250; n += THINNED(10)) {
        attention_forward(got, LIBRARY);
        attention_same_bits(want, got);
    }
    attention_free(want);
    attention_free(got);
    fattn_ctx_destroy(one);
    fattn_ctx_destroy(many);
}

/* ---- decoding ---- */

/* A causal forward over all rows, and row by row over the keys so far. Each is off by at most what attention of S keys
   may be: chains of roundings along D and S, and scores of size 8 (tests/support/tiles.c). */
Test(parts, decoding_is_one_forward) {
    enum { N = 1100, D = 16 };
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 4; ++n) {
        attention_case c = {.name = "decoding",
                            .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                            .B = 1,
                            .Hq = n < 2 ? 1 : 4,
                            .Hkv = 1,
                            .Sq = N,
                            .Sk = N,
                            .D = D,
                            .flags = FATTN_CAUSAL};
        const double unit = n % 2 ? 0x1p-24 : 0x1p-53, size = 8;
        const double bound = 2 * unit * size * (4 * (8 + sqrt(D) + sqrt(N)));
        attention *const whole = attention_new(ctx, &c);
        attention_forward(whole, LIBRARY);
        for (int64_t i = n; i < N; i += i < 40 ? 1 : 97) {
            c.Sq = 1, c.Sk = i + 1;
            attention *const row = attention_new(ctx, &c);
            copy_rows(row, whole, 0, T_K, T_CU_K);
            copy_rows(row, whole, 0, T_V, T_CU_K);
            for (int64_t h = 0; h < c.Hq; ++h)
                for (int64_t d = 0; d < D; ++d)
                    attention_set(&row->t[T_Q], (int64_t[]){0, h, 0, d},
                                  attention_get(&whole->t[T_Q], (int64_t[]){0, h, i, d}));
            attention_forward(row, LIBRARY);
            for (int64_t h = 0; h < c.Hq; ++h)
                for (int64_t d = 0; d < D + 1; ++d) {
                    const enum tensor_id id = d < D ? T_O : T_LSE;
                    const double x = attention_get(&row->t[id], (int64_t[]){0, h, 0, d});
                    const double y = attention_get(&whole->t[id], (int64_t[]){0, h, i, d});
                    cr_assert_leq(fabs(x - y), bound, "%s, row %d: %g and %g", attention_names[id], (int)i, x, y);
                }
            attention_free(row);
        }
        attention_free(whole);
    }
    fattn_ctx_destroy(ctx);
}
