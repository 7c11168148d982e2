/* Known failures of other attention kernels, and the tests of the CPU's tiles for them:

   very negative L next to padded keys               very_negative_logits, huge_logits
   0 times NaN beyond the mask                       how_far_a_nan_reaches
   rows without keys                                 rows_without_keys_contribute_nothing
   merging with empty parts                          extremes: parts_merge_to_the_whole
   nothing to do, sequences of length zero           nothing_to_do, zero_length_sequences
   masks with Sq != Sk, both alignments              masks_of_unequal_lengths
   packed rows past the last sequence                zero_length_sequences: NaN, and guarded
   32-bit indices: large strides, many sequences     strides_beyond_32_bits, ten_thousand_sequences
   strides: dO, sums, slices, pitches, reversed      layouts; tiles: slices_of_qkv
   races                                             determinism: under_load
   adding 0.0 to rows without a contribution         untouched_rows_keep_their_bits
   softcap's order and derivative                    extremes: bias_comes_after_softcap
   dropout's mask, the same everywhere               dropout
   L in other units, wrong L                         every check compares L
   sinks at the ends                                 sinks_at_the_ends
   sums over a group in 16 bits                      group_sums_are_floats
   head dimensions                                   every_head_dimension
   lengths around the tiles, primes, long and thin   tiles: shapes; slow: of_4224_keys_and_rows */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* anonymous mappings */
#endif
#include "core/cpu/tile.h"
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

enum { MOST = 1280 };

/* Every logit is near -100, L near -93: exp(0 - L) of a padded key would overflow. */
static void very_negative(attention *a) {
    const double root = sqrt(100 / sqrt((double)a->c.D));
    tiles_fill(a, T_Q, root);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        attention_set(&a->t[T_K], at, -root * (1 + 1e-3 * (double)(at[2] % 7)));
    }
}

Test(tiles_extremes, very_negative_logits) {
    static const int64_t S[] = {64, 192, 1000, 1216, MOST};
    for (int n = 0; n < 20; ++n) {
        const attention_case c = {.name = "very negative logits",
                                  .B = 1,
                                  .Hq = 1,
                                  .Sq = n % 2 ? 1 : S[n / 4] / 8 + 1,
                                  .Sk = S[n / 4],
                                  .D = 16,
                                  .dtype = n % 4 < 2 ? FATTN_F64 : FATTN_F32,
                                  .flags = n % 3 ? FATTN_CAUSAL : 0};
        /* |s| = 100 roundings of a unit each, and the gradients are differences of O(1) sums */
        const double eps = c.dtype == FATTN_F64 ? 2.3e-16 : 1.2e-7;
        tiles_check_changed(&c, true, very_negative, (fattn_tolerance){400 * eps, 400 * eps, 1});
    }
}

/* Scores of +-1e4: one key takes all probability, or several nearly equal ones share it. */
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

Test(tiles_extremes, huge_logits) {
    const attention_case c = {
        .name = "huge logits", .B = 2, .Hq = 2, .Sq = 70, .Sk = 97, .D = 8, .flags = FATTN_CAUSAL};
    /* an error of |s| eps in the exponent, times K = 50 in dQ, Q = 100 in dK */
    const double error = 100 * 2e4 * 2.3e-16;
    tiles_check_changed(&c, true, huge, (fattn_tolerance){100 * error, error, 1});
}

/* ---- NaN and infinity ---- */

static bool finite_row(const attention *a, enum tensor_id id, int64_t row) {
    const int64_t columns = id == T_LSE ? 1 : id == T_O || id == T_DV ? a->c.Dv : a->c.D;
    for (int64_t d = 0; d < columns; ++d)
        if (!isfinite(attention_get(&a->t[id], (int64_t[4]){0, 0, row, d}))) return false;
    return true;
}

/* Rows first..last must not be finite; other rows may be affected, as 0 times NaN, only within [low, high]. */
static void check_reach(const attention *a, enum tensor_id id, int64_t first, int64_t last, int64_t low, int64_t high) {
    for (int64_t i = 0; i < 100; ++i) {
        const bool hit = !finite_row(a, id, i);
        cr_assert(hit || i < first || i > last, "%s: %s[%d] is finite", a->c.name, attention_names[id], (int)i);
        cr_assert(!hit || (i >= low && i <= high), "%s: %s[%d] is not finite", a->c.name, attention_names[id], (int)i);
    }
}

/* Causal, a NaN in row or key 70: row i sees keys up to i. NUMERICS.md has the table. */
static void damage_and_check(fattn_ctx *ctx, const attention_case *c, enum tensor_id id, int64_t rows, int64_t keys) {
    enum { AT = 70, END = 99, NONE = 200 };
    const int64_t row = AT / rows * rows, key = AT / keys * keys + keys - 1;
    attention *const a = attention_new(ctx, c);
    const int64_t at[4] = {0, 0, AT, 3};
    if (id != T_LSE) attention_set(&a->t[id], at, NAN);
    attention_forward(a, LIBRARY);
    if (id == T_LSE) attention_set(&a->t[T_LSE], at, NAN);
    attention_backward(a, LIBRARY);
    const bool of_row = id == T_Q || id == T_D_O || id == T_LSE;
    if (of_row) {
        const bool forward = id == T_Q;
        check_reach(a, T_O, forward ? AT : NONE, AT, forward ? AT : NONE, AT);
        check_reach(a, T_LSE, id == T_D_O ? NONE : AT, AT, id == T_D_O ? NONE : AT, AT);
        check_reach(a, T_DQ, AT, AT, AT, AT);
        check_reach(a, T_DK, 0, AT, 0, id == T_Q ? key : AT);
        check_reach(a, T_DV, 0, AT, 0, id == T_D_O ? key : AT);
    } else {
        check_reach(a, T_O, AT, END, id == T_V ? row : AT, END);
        check_reach(a, T_LSE, id == T_V ? NONE : AT, END, id == T_V ? NONE : AT, END);
        check_reach(a, T_DQ, AT, END, row, END);
        check_reach(a, T_DK, 0, END, 0, END);
        check_reach(a, T_DV, id == T_V ? NONE : 0, END, id == T_V ? NONE : 0, END);
    }
    attention_free(a);
}

Test(tiles_extremes, how_far_a_nan_reaches) {
    static const enum tensor_id ids[] = {T_Q, T_K, T_V, T_D_O, T_LSE};
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int n = 0; n < 5 * 4 * 2; ++n) {
            fattn_ctx *const ctx = attention_context_isa(1, isa);
            if (!ctx) continue;
            const fattn_dtype dtype = dtypes[n / 5 % 4];
            char name[64];
            snprintf(name, sizeof name, "NaN in %s, %s, %s", attention_names[ids[n % 5]], fattn_dtype_name(dtype),
                     fattni_isa_name(isa));
            const attention_case c = {.name = name,
                                      .B = 1,
                                      .Hq = 1,
                                      .Sq = 100,
                                      .Sk = 100,
                                      .D = 8,
                                      .dtype = dtype,
                                      .flags = FATTN_CAUSAL,
                                      .algorithm = n < 20 ? FATTN_ALGO_AUTO : FATTN_ALGO_FLASH1};
            const int64_t bytes = isa >= FATTNI_ISA_AVX512 ? 64 : isa == FATTNI_ISA_AVX2 ? 32 : 16;
            if (fattni_cpu_kernels_of(ctx, dtype)->round)
                damage_and_check(ctx, &c, ids[n % 5], 32, 32);
            else
                damage_and_check(ctx, &c, ids[n % 5], bytes / (dtype == FATTN_F64 ? 8 : 4), 8);
            fattn_ctx_destroy(ctx);
        }
}

/* An infinite key makes infinite scores: +inf is NaN in its row, -inf masks the key. */
Test(tiles_extremes, infinity_of_a_key_stays_with_its_rows) {
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int n = 0; n < 8; ++n) {
            fattn_ctx *const ctx = attention_context_isa(1, isa);
            if (!ctx) continue;
            const attention_case c = {.name = "infinite key",
                                      .B = 1,
                                      .Hq = 1,
                                      .Sq = 100,
                                      .Sk = 100,
                                      .D = 8,
                                      .dtype = dtypes[n % 4],
                                      .flags = FATTN_CAUSAL};
            const double x = n < 4 ? INFINITY : -INFINITY;
            attention *const a = attention_new(ctx, &c);
            attention_set(&a->t[T_K], (int64_t[4]){0, 0, 70, 3}, x);
            attention_forward(a, LIBRARY);
            for (int64_t i = 0; i < 100; ++i) {
                const double q = attention_get(&a->t[T_Q], (int64_t[4]){0, 0, i, 3});
                const bool hit = i >= 70 && !(q * x < 0);
                cr_assert(finite_row(a, T_O, i) != hit && finite_row(a, T_LSE, i) != hit, "row %d", (int)i);
            }
            attention_free(a);
            fattn_ctx_destroy(ctx);
        }
}

/* ---- what a row depends on ---- */

static bool same_row(const attention *a, int64_t head, int64_t i, const attention *b, int64_t other_head,
                     int64_t other) {
    static const enum tensor_id ids[] = {T_O, T_LSE, T_DQ};
    for (int n = 0; n < 3; ++n)
        for (int64_t d = 0; d < (ids[n] == T_LSE ? 1 : a->c.D); ++d)
            if (attention_get(&a->t[ids[n]], (int64_t[4]){0, head, i, d}) !=
                attention_get(&b->t[ids[n]], (int64_t[4]){0, other_head, other, d}))
                return false;
    return true;
}

static void copy_row(const attention *to, int64_t head, int64_t i, const attention *from, int64_t other_head,
                     int64_t other, enum tensor_id id) {
    for (int64_t d = 0; d < from->c.D; ++d)
        attention_set(&to->t[id], (int64_t[4]){0, head, i, d},
                      attention_get(&from->t[id], (int64_t[4]){0, other_head, other, d}));
}

/* Rows 17 to 116 of one head alone, or in one of three heads, where rows 17, 22, .. are unchanged and the other
   rows have queries 4000 times as large; at addresses that are not multiples of a vector. */
Test(tiles_extremes, a_row_s_bits_are_its_own) {
    enum { FIRST = 17, ROWS = 100 };
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int n = 0; n < 24; n += THINNED(5)) {
            fattn_ctx *const ctx = attention_context_isa(1, isa);
            if (!ctx) continue;
            const bool narrow = n % 4 > 1;
            attention_case c = {.name = "alone",
                                .B = 1,
                                .Hq = 1,
                                .Sq = 203,
                                .Sk = 203,
                                .D = 24,
                                .dtype = dtypes[n % 4],
                                .flags = n / 4 % 3 ? FATTN_CAUSAL_TOP_LEFT : 0,
                                .softcap = n / 12 ? 3 : 0,
                                .dropout_p = n / 12 && n / 4 % 3 == 0 ? 0.25f : 0};
            if (n / 4 % 3 == 2) c.flags |= FATTN_WINDOW, c.window_left = 31;
            attention *const whole = attention_new(ctx, &c);
            if (c.dropout_p == 0) c.Hq = c.Hkv = 3; /* a head has its own mask */
            c.Sq = ROWS, c.q_pos0 = FIRST, c.layout = narrow ? LAYOUT_BSHD : LAYOUT_PITCH;
            attention *const part = attention_new(ctx, &c);
            const int64_t head = c.Hq / 2;
            for (int64_t j = 0; j < 203; ++j) {
                copy_row(part, head, j, whole, 0, j, T_K);
                copy_row(part, head, j, whole, 0, j, T_V);
            }
            for (int64_t i = 0; i < ROWS; ++i) {
                copy_row(part, head, i, whole, 0, FIRST + i, T_Q);
                copy_row(part, head, i, whole, 0, FIRST + i, T_D_O);
                for (int64_t d = 0; d < c.D && i % 5; ++d) {
                    const int64_t at[4] = {0, head, i, d};
                    attention_set(&part->t[T_Q], at, 4000 * attention_get(&part->t[T_Q], at));
                }
            }
            attention_run(whole, LIBRARY);
            attention_run(part, LIBRARY);
            for (int64_t i = 0; i < ROWS; i += 5)
                cr_assert(same_row(part, head, i, whole, 0, FIRST + i), "%s, %s, case %d: row %d",
                          fattn_dtype_name(c.dtype), fattni_isa_name(isa), n, (int)i);
            attention_free(whole);
            attention_free(part);
            fattn_ctx_destroy(ctx);
        }
}

/* Rows without visible keys, with an infinite dO: gradients stay finite. */
static void dead_rows(attention *a) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_D_O]); ++n) {
        attention_index(&a->t[T_D_O], n, at);
        if (at[2] < 50) attention_set(&a->t[T_D_O], at, INFINITY);
    }
}

Test(tiles_extremes, rows_without_keys_contribute_nothing) {
    for (int n = 0; n < 4; ++n) {
        const attention_case c = {.name = "rows without keys",
                                  .B = 1,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = 110,
                                  .Sk = 60,
                                  .D = 8,
                                  .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                                  .flags = FATTN_CAUSAL | (n / 2 ? (uint32_t)FATTN_ACC_DQ : 0u)};
        const double eps = c.dtype == FATTN_F64 ? 1e-12 : 1e-5;
        tiles_check_changed(&c, true, dead_rows, (fattn_tolerance){eps, eps, 1e-9});
    }
}

/* Sinks that take all probability, where L is the sink bitwise, or none. */
static void sinks_at_the_ends(attention *a) {
    static const double ends[] = {-INFINITY, -3e38, -1e38, -1e30, 1e30, 1e38, 3e38, INFINITY};
    for (int64_t h = 0; h < a->c.Hq; ++h) attention_set(&a->t[T_SINK], &h, ends[h]);
}

/* Scores that are a bias alone. */
static void sinks_beside_a_bias_at_the_ends(attention *a) {
    static const double ends[4][2] = {
        {-0x1.fffffep127, -0x1.fffffep127}, {2.7e38, 3e38}, {3e38, 2.7e38}, {-3e38, -2.7e38}};
    int64_t at[FATTN_MAX_DIMS] = {0};
    tiles_fill(a, T_Q, 0);
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_BIAS]); ++n) {
        attention_index(&a->t[T_BIAS], n, at);
        attention_set(&a->t[T_BIAS], at, ends[at[1]][0]);
    }
    for (int64_t h = 0; h < a->c.Hq; ++h) attention_set(&a->t[T_SINK], &h, ends[h][1]);
}
Test(tiles_extremes, sinks_beside_a_bias_at_the_ends) {
    for (int n = 0; n < 8; ++n) {
        const attention_case c = {.name = "sinks and a bias at the ends",
                                  .B = 1,
                                  .Hq = 4,
                                  .Sq = 5,
                                  .Sk = 1,
                                  .D = 8,
                                  .sink = true,
                                  .bias = BIAS | BIAS_OVER_I | BIAS_F32,
                                  .omit = NO_DBIAS,
                                  .dtype = (fattn_dtype)(FATTN_F64 + n % 4),
                                  .algorithm = n < 4 ? FATTN_ALGO_AUTO : FATTN_ALGO_FLASH1};
        tiles_check_changed(&c, true, sinks_beside_a_bias_at_the_ends, (fattn_tolerance){0});
    }
}
Test(tiles_extremes, sinks_at_the_ends) {
    for (int n = 0; n < 24; ++n) {
        const attention_case c = {.name = "sinks at the ends",
                                  .B = 1,
                                  .Hq = 8,
                                  .Sq = 70,
                                  .Sk = 60,
                                  .D = 8,
                                  .sink = true,
                                  .d_lse = true,
                                  .dtype = (fattn_dtype)(FATTN_F64 + n % 4),
                                  .wide = n & 4,
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
                cr_assert_eq(attention_get(&a->t[T_LSE], (int64_t[]){0, h, i}), attention_get(&a->t[T_SINK], &h));
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* A K whose rows repeat one row (stride 0) gives uniform weights; V is its mean. */
Test(tiles_extremes, equal_keys) {
    fattn_ctx *const ctx = attention_context(2);
    const attention_case c = {.name = "equal keys", .B = 1, .Hq = 1, .Sq = 30, .Sk = 211, .D = 16, .dtype = FATTN_F64};
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

/* ---- sizes ---- */

Test(tiles_extremes, nothing_to_do) {
    static const int64_t sizes[][3] = {{0, 30, 30}, {2, 0, 30}, {2, 30, 0}, {2, 0, 0}, {0, 0, 0}};
    for (int n = 0; n < 40; ++n) {
        const int64_t *const size = sizes[n % 5];
        const attention_case c = {.name = "nothing to do",
                                  .B = size[0],
                                  .Hq = 2,
                                  .Sq = size[1],
                                  .Sk = size[2],
                                  .D = 16,
                                  .dtype = dtypes[n / 5 % 4],
                                  .sink = n >= 20,
                                  .bias = n >= 20 ? BIAS | BIAS_OVER_B : 0u,
                                  .dropout_p = n >= 20 ? 0.25f : 0};
        tiles_check_backward(&c);
    }
}

/* Empty sequences first, in the middle and last, in q or in k; in buffers with rows of no sequence. */
Test(tiles_extremes, zero_length_sequences) {
    for (int n = 0; n < 16; ++n) {
        const attention_case c = {.name = "zero-length sequences",
                                  .B = 7,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = 97,
                                  .Sk = 130,
                                  .D = 24,
                                  .dtype = dtypes[n % 4],
                                  .flags = n & 4 ? FATTN_CAUSAL : 0,
                                  .lengths = n & 8 ? LENGTHS_PADDED : LENGTHS_PACKED,
                                  .length_q = {0, 97, 50, 0, 13, 48, 0},
                                  .length_k = {0, 64, 0, 31, 130, 65, 0}};
        tiles_check_backward(&c);
    }
}

Test(tiles_extremes, masks_of_unequal_lengths) {
    static const int64_t lengths[][2] = {{130, 70}, {70, 130}, {300, 20}, {20, 300}, {1, 129}, {129, 1}};
    static const uint32_t masks[] = {FATTN_CAUSAL, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW, FATTN_CAUSAL | FATTN_WINDOW,
                                     FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW};
    for (int n = 0; n < 30; ++n) {
        const attention_case c = {.name = "unequal lengths",
                                  .B = 1,
                                  .Hq = 1,
                                  .Sq = lengths[n % 6][0],
                                  .Sk = lengths[n % 6][1],
                                  .D = 16,
                                  .dtype = dtypes[n % 4],
                                  .flags = masks[n / 6],
                                  .window_left = 17 + n,
                                  .window_right = n % 7 - 1};
        tiles_check_backward(&c);
    }
}

Test(tiles_extremes, every_head_dimension) {
    for (int64_t D = 1; D <= 256; D += THINNED(3)) {
        const attention_case c = {.name = "head dimension",
                                  .B = 1,
                                  .Hq = 1,
                                  .Sq = 5,
                                  .Sk = 9,
                                  .D = D,
                                  .Dv = 257 - D,
                                  .dtype = dtypes[D % 4],
                                  .wide = D % 8 < 4};
        tiles_check_backward(&c);
    }
}

Test(tiles_extremes, ten_thousand_sequences) {
    for (int n = 0; n < 2; ++n) {
        const attention_case c = {.name = "many sequences",
                                  .B = 10007,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = 3,
                                  .Sk = 2,
                                  .D = 2,
                                  .dtype = n ? FATTN_BF16 : FATTN_F32,
                                  .flags = FATTN_CAUSAL,
                                  .sink = true};
        tiles_check_backward(&c);
    }
}

/* ---- strides ---- */

Test(tiles_extremes, layouts) {
    for (int n = 0; n < 40; ++n) {
        const attention_case c = {
            .name = "layouts",
            .B = 1 + n % 2,
            .Hq = 4,
            .Hkv = n % 3 ? 4 : 1,
            .Sq = 65,
            .Sk = 49,
            .D = 20,
            .Dv = 36,
            .dtype = dtypes[n % 4],
            .layout = (enum layout[]){LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED}[n / 4 % 4],
            .sum_d_o = n >= 32,
            .bias = BIAS | BIAS_OVER_B};
        tiles_check_backward(&c);
    }
}

/* Two sequences at least 2^33 bytes apart, in memory that is only reserved: the same bits as in adjacent
   memory. */
Test(tiles_extremes, strides_beyond_32_bits) {
    enum { MOVED = 9 };
    static const enum tensor_id ids[MOVED] = {T_Q, T_K, T_V, T_O, T_D_O, T_DQ, T_DK, T_DV, T_BIAS};
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 4; ++n) {
        const attention_case c = {
            .name = "far apart", .B = 2, .Hq = 2, .Sq = 70, .Sk = 50, .D = 8, .dtype = dtypes[n], .bias = BIAS};
        attention *const near = attention_new(ctx, &c), *const far = attention_new(ctx, &c);
        const int64_t stride = ((int64_t)1 << 32) + 64; /* elements, of 2 bytes at least */
        attention_run(near, LIBRARY);
        attention_run(far, LIBRARY); /* allocates a workspace; the moved results are overwritten */
        void *reserved[MOVED];
        const size_t bytes = (size_t)stride * fattn_dtype_size(FATTN_F64) + (1 << 20);
        for (int m = 0; m < MOVED; ++m) {
            fattn_tensor *const t = &far->t[ids[m]];
            reserved[m] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (reserved[m] == MAP_FAILED) cr_skip_test("cannot reserve %zu bytes of addresses", bytes);
            t->data = reserved[m];
            t->stride[0] = stride;
            cr_assert_eq(fattn_tensor_copy(ctx, t, &near->t[ids[m]]), FATTN_OK);
            if (m == 3 || (m >= 5 && m < 8)) memset(t->data, 0xff, 4096);
        }
        const size_t forward = far->plan.fwd_workspace, backward = far->plan.bwd_workspace;
        far->io.workspace_bytes = forward > backward ? forward : backward;
        cr_assert_eq(fattn_attention_fwd(ctx, &far->params, &far->io), FATTN_OK);
        cr_assert_eq(fattn_attention_bwd(ctx, &far->params, &far->io), FATTN_OK);
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int m = 0; m < MOVED; ++m)
            for (int64_t e = 0; e < fattn_tensor_numel(&near->t[ids[m]]); ++e) {
                attention_index(&near->t[ids[m]], e, at);
                cr_assert_eq(attention_get(&far->t[ids[m]], at), attention_get(&near->t[ids[m]], at), "%s, %s",
                             attention_names[ids[m]], fattn_dtype_name(dtypes[n]));
            }
        for (int m = 0; m < MOVED; ++m) munmap(reserved[m], bytes);
        attention_free(near);
        attention_free(far);
    }
    fattn_ctx_destroy(ctx);
}

/* ---- sums ---- */

/* -0, subnormals and signalling NaNs: bits that an addition of 0 would change. */
static uint64_t odd_bits(fattn_dtype t, int64_t n) {
    static const uint64_t negative_zero[] = {1ull << 63, 1u << 31, 1u << 15, 1u << 15};
    static const uint64_t infinity[] = {0x7ffull << 52, 0xffu << 23, 0x1fu << 10, 0xffu << 7};
    const uint64_t small = 1 + (uint64_t)n % 5;
    return n % 3 == 0 ? negative_zero[t - FATTN_F64] : n % 3 == 1 ? small : infinity[t - FATTN_F64] + small;
}

/* Gradients that are added to, where the mask leaves nothing to add. */
Test(tiles_extremes, untouched_rows_keep_their_bits) {
    static const enum tensor_id ids[3] = {T_DQ, T_DK, T_DV};
    for (int n = 0; n < 8; ++n) {
        fattn_ctx *const ctx = attention_context(n < 4 ? 1 : 16);
        const attention_case c = {.name = "untouched",
                                  .B = 1,
                                  .Hq = 2,
                                  .Sq = 120,
                                  .Sk = 100,
                                  .D = 20,
                                  .dtype = dtypes[n % 4],
                                  .k_pos0 = 40, /* row i sees i - 70 .. i - 40 */
                                  .flags =
                                      FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV,
                                  .window_left = 30,
                                  .window_right = 0};
        attention *const a = attention_new(ctx, &c);
        attention_run(a, LIBRARY);
        const size_t element = fattn_dtype_size(c.dtype); /* of little-endian numbers, row-major */
        for (int m = 0; m < 3; ++m)
            for (int64_t e = 0; e < fattn_tensor_numel(&a->t[ids[m]]); ++e) {
                const uint64_t odd = odd_bits(c.dtype, e);
                memcpy((char *)a->t[ids[m]].data + (size_t)e * element, &odd, element);
            }
        cr_assert_eq(fattn_attention_bwd(ctx, &a->params, &a->io), FATTN_OK);
        int64_t changed = 0;
        for (int m = 0; m < 3; ++m)
            for (int64_t e = 0; e < fattn_tensor_numel(&a->t[ids[m]]); ++e) {
                const uint64_t odd = odd_bits(c.dtype, e);
                const char *const now = (char *)a->t[ids[m]].data + (size_t)e * element;
                const int64_t row = m == 0 ? e / c.D % c.Sq : e / c.D % c.Sk;
                const bool alone = m == 0 ? row < 40 : row > 119 - 40;
                const bool same = memcmp(now, &odd, element) == 0;
                cr_assert(!alone || same, "%s %s row %d", fattn_dtype_name(c.dtype), attention_names[ids[m]], (int)row);
                changed += !same;
            }
        cr_assert_gt(changed, 2 * 80 * 20, "nothing was added");
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* One key head for 16 query heads, and enough rows that a sum in 16 bits would stagnate: dK and dV must have
   only one rounding. */
static void positive(attention *a) {
    static const enum tensor_id ids[3] = {T_Q, T_V, T_D_O};
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int m = 0; m < 3; ++m)
        for (int64_t n = 0; n < fattn_tensor_numel(&a->t[ids[m]]); ++n) {
            attention_index(&a->t[ids[m]], n, at);
            attention_set(&a->t[ids[m]], at, fabs(attention_get(&a->t[ids[m]], at)));
        }
}

Test(tiles_extremes, group_sums_are_floats) {
    for (int n = 0; n < 2; ++n) {
        const attention_case c = {
            .name = "group", .B = 1, .Hq = 16, .Hkv = 1, .Sq = 200, .Sk = 5, .D = 8, .dtype = dtypes[2 + n]};
        tiles_check_changed(&c, true, positive, (fattn_tolerance){0});
    }
}

/* Column blocks that no row sees come after the last row block, and must not add its dQ again: Sq ends within a
   row block, dQ has fewer bits than its sum. 400 keys are several blocks also with one thread. */
Test(tiles_extremes, keys_beyond_the_last_row_add_nothing) {
    for (int n = 0; n < 4; ++n) {
        const attention_case c = {.name = "50 rows, keys beyond",
                                  .B = 1,
                                  .Hq = 2,
                                  .Hkv = n / 2 ? 1 : 2,
                                  .Sq = 50,
                                  .Sk = n % 2 ? 155 : 1200,
                                  .D = 24,
                                  .dtype = n % 2 ? FATTN_F16 : FATTN_BF16,
                                  .flags = FATTN_CAUSAL_TOP_LEFT | FATTN_ACC_DQ};
        tiles_check_backward(&c);
    }
}
