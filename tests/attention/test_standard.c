/* FATTN_ALGO_STANDARD against the reference: every feature, layout, shape and dtype. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static const fattn_tolerance in_f64 = {1e-12, 1e-12, 0};

static void check_f64(fattn_ctx *ctx, const attention_case *c) {
    attention_case standard = *c;
    standard.algorithm = FATTN_ALGO_STANDARD;
    standard.dtype = FATTN_F64;
    attention *const got = attention_new(ctx, &standard);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(got, LIBRARY);
    attention_run(want, REFERENCE);
    attention_match(got, want, NULL, 0, in_f64);
    cr_assert_geq(got->plan.saved_bytes, got->plan.materialized_bytes); /* and L */
    attention_free(got);
    attention_free(want);
}

static void check_f32(fattn_ctx *ctx, const attention_case *c) {
    attention_case standard = *c;
    standard.algorithm = FATTN_ALGO_STANDARD;
    standard.dtype = FATTN_F32;
    attention *const got = attention_new(ctx, &standard);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(got, LIBRARY);
    attention_run(want, REFERENCE);
    attention_match_rounded(got, want);
    attention_free(got);
    attention_free(want);
}

static const fattn_dtype narrow[2] = {FATTN_F16, FATTN_BF16};

/* Forward is computed in F32, so that its errors are those of F32 and of storing O; backward reads
   a P that was rounded: by the baseline rule. */
static void check_16_bits(fattn_ctx *ctx, const attention_case *c, fattn_dtype dtype) {
    attention_case standard = *c;
    standard.algorithm = FATTN_ALGO_STANDARD;
    standard.dtype = dtype;
    if (c->flags & FATTN_MERGE) standard.wide = true; /* a partial result is F32 */
    tiles_check_forward(&standard);
    attention *const got = attention_new(ctx, &standard);
    attention *const low = attention_new(ctx, &standard);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(low, UNFUSED);
    attention_run(want, REFERENCE);
    attention_run(got, LIBRARY);
    cr_assert_geq(got->plan.saved_bytes, got->plan.materialized_bytes); /* and L */
    attention_match_16_bits(got, want, low);
    attention_free(got);
    attention_free(want);
    attention_free(low);
}

static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};

Test(standard, every_feature_and_layout) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < attention_feature_count; ++n)
        for (int layout = 0; layout < 4; ++layout) {
            attention_case c = attention_features[n];
            c.layout = layouts[layout];
            check_f64(ctx, &c);
            check_f32(ctx, &c);
            c.wide = (n + layout) % 3 == 0;
            check_16_bits(ctx, &c, narrow[(n + layout) % 2]);
        }
    fattn_ctx_destroy(ctx);
}

Test(standard, mixed_features) {
    fattn_ctx *const ctx = attention_context(1);
    char name[16];
    for (int n = 0; n < 300; ++n) {
        attention_case c = attention_mix(n);
        snprintf(name, sizeof name, "mix %d", n);
        c.name = name;
        c.layout = layouts[n % 4];
        check_f64(ctx, &c);
        check_f32(ctx, &c);
        if (n % 3 == 0) check_16_bits(ctx, &c, narrow[n % 2]);
    }
    fattn_ctx_destroy(ctx);
}

/* Larger than a task's block of rows, every feature crossing the block's edge. */
static const attention_case crossing[] = {
    {"plain", .B = 1, .Hq = 2, .D = 16},
    {"causal, GQA", .B = 1, .Hq = 4, .Hkv = 2, .D = 8, .flags = FATTN_CAUSAL},
    {"slices", .B = 2, .Hq = 1, .D = 8, .layout = LAYOUT_QKV},
    {"all", .B = 1, .Hq = 2, .Hkv = 1, .D = 5, .Dv = 7, .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 50,
     .softcap = 2, .dropout_p = 0.3f, .alibi = true, .sink = true, .d_lse = true, .bias = BIAS | BIAS_OVER_H,
     .q_pos0 = 5, .k_pos0 = 3},
};

Test(standard, every_shape) {
    fattn_ctx *const ctx = attention_context(1);
    for (int shape = 0; shape < attention_shape_count; ++shape)
        for (size_t n = 0; n < sizeof crossing / sizeof *crossing; ++n) {
            attention_case c = crossing[n];
            c.Sq = attention_shapes[shape].Sq;
            c.Sk = c.layout == LAYOUT_QKV ? c.Sq : attention_shapes[shape].Sk;
            char name[64];
            snprintf(name, sizeof name, "%s, %lld x %lld", c.name, (long long)c.Sq, (long long)c.Sk);
            c.name = name;
            check_f64(ctx, &c);
            check_f32(ctx, &c);
            if (c.Sq * c.Sk < 20000) check_16_bits(ctx, &c, narrow[(shape + (int)n) % 2]);
        }
    fattn_ctx_destroy(ctx);
}

Test(standard, bits_do_not_depend_on_threads) {
    static const int threads[] = {2, 3, 8};
    fattn_ctx *const one = attention_context(1);
    for (size_t n = 0; n < 2 * sizeof crossing / sizeof *crossing; ++n) {
        attention_case c = crossing[n / 2];
        c.Sq = 211, c.Sk = c.layout == LAYOUT_QKV ? 211 : 173;
        c.dtype = n % 2 ? FATTN_BF16 : FATTN_F32;
        c.algorithm = FATTN_ALGO_STANDARD;
        attention *const want = attention_new(one, &c);
        attention_run(want, LIBRARY);
        for (int t = 0; t < 3; ++t) {
            fattn_ctx *const ctx = attention_context(threads[t]);
            attention *const got = attention_new(ctx, &c);
            attention_run(got, LIBRARY);
            attention_same_bits(got, want);
            attention_run(got, LIBRARY);
            attention_same_bits(got, want);
            attention_free(got);
            fattn_ctx_destroy(ctx);
        }
        attention_free(want);
    }
    fattn_ctx_destroy(one);
}

/* A query reads no data, so that any size can be queried. */
Test(standard, sizes_beyond_any_memory_are_rejected) {
    fattn_ctx *const ctx = attention_context(1);
    double one = 0;
    const int64_t shape[4] = {1 << 10, 1 << 6, 1 << 28, 1}; /* 2^44 rows of 2^28 keys */
    const fattn_tensor t = fattn_tensor_view(&one, FATTN_F64, FATTN_CPU, 0, 4, shape);
    const fattn_tensor lse = fattn_tensor_view(&one, FATTN_F64, FATTN_CPU, 0, 3, shape);
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &t, .k = &t, .v = &t, .o = &t, .lse = &lse};
    fattn_attention_params p = {.struct_size = sizeof p, .algorithm = FATTN_ALGO_STANDARD};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &p, &io, &plan), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "probabilities"), "%s", fattn_ctx_error(ctx));
    p.algorithm = FATTN_ALGO_AUTO;
    cr_assert_eq(fattn_attention_query(ctx, &p, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(plan.materialized_bytes, SIZE_MAX);
    fattn_ctx_destroy(ctx);
}

/* ---- keys in parts ---- */

/* Keys begin..end-1 of a, with memory of their own. */
static void run_part(attention *a, bool forward, int64_t begin, int64_t end, void **saved) {
    static const enum tensor_id ids[4] = {T_K, T_V, T_DK, T_DV};
    fattn_tensor part[4];
    for (int n = 0; n < 4; ++n) part[n] = fattn_tensor_slice(&a->t[ids[n]], 2, begin, end);
    fattn_attention_params p = a->params;
    fattn_attention_io io = a->io;
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    p.k_pos0 = begin;
    if (begin > 0 || !forward) p.flags |= FATTN_MERGE;
    if (begin > 0 && !forward) p.flags |= FATTN_ACC_DQ;
    io.k = &part[0], io.v = &part[1], io.dk = &part[2], io.dv = &part[3];
    cr_assert_eq(fattn_attention_query(a->ctx, &p, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(a->ctx));
    const size_t bytes = forward ? plan.fwd_workspace : plan.bwd_workspace;
    const int64_t shape = (int64_t)bytes, kept = (int64_t)plan.saved_bytes;
    fattn_tensor workspace, memory;
    cr_assert_eq(fattn_tensor_alloc(a->ctx, FATTN_U8, 1, &shape, &workspace), FATTN_OK);
    if (forward) {
        cr_assert_eq(fattn_tensor_alloc(a->ctx, FATTN_U8, 1, &kept, &memory), FATTN_OK);
        *saved = memory.data;
    }
    io.workspace = workspace.data, io.workspace_bytes = bytes, io.saved = *saved, io.saved_bytes = plan.saved_bytes;
    cr_assert_eq((forward ? fattn_attention_fwd : fattn_attention_bwd)(a->ctx, &p, &io), FATTN_OK, "%s",
                 fattn_ctx_error(a->ctx));
    fattn_tensor_free(a->ctx, &workspace);
    if (forward) return;
    memory = fattn_tensor_view(*saved, FATTN_U8, FATTN_CPU, 0, 1, &kept);
    fattn_tensor_free(a->ctx, &memory);
}

/* Forward over three parts, merging, then backward over each with the merged O and L: P of a part is relative to the L
   of its own call. */
Test(standard, parts_merge_to_the_whole) {
    fattn_ctx *const ctx = attention_context(1);
    static const attention_case cases[] = {
        {"plain", .B = 2, .Hq = 2, .Hkv = 1, .Sq = 6, .Sk = 11, .D = 3, .d_lse = true},
        {"causal, dropout", .B = 1, .Hq = 2, .Sq = 9, .Sk = 11, .D = 3, .dropout_p = 0.3f,
         .flags = FATTN_CAUSAL_TOP_LEFT},
        {"many rows", .B = 1, .Hq = 1, .Sq = 150, .Sk = 90, .D = 8, .flags = FATTN_CAUSAL_TOP_LEFT},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n)
        for (int dtype = FATTN_F64; dtype <= FATTN_F32; ++dtype) {
            attention_case c = cases[n];
            c.algorithm = FATTN_ALGO_STANDARD, c.dtype = (fattn_dtype)dtype;
            attention *const split = attention_new(ctx, &c), *const whole = attention_twin(split, FATTN_F64);
            const int64_t ends[] = {0, c.Sk / 3, c.Sk / 3 + 1, c.Sk};
            void *saved[3];
            attention_run(whole, REFERENCE);
            for (int part = 0; part < 3; ++part) run_part(split, true, ends[part], ends[part + 1], &saved[part]);
            for (int part = 0; part < 3; ++part) run_part(split, false, ends[part], ends[part + 1], &saved[part]);
            const double unit = dtype == FATTN_F64 ? 0x1p-52 : 0x1p-23;
            attention_match(split, whole, NULL, 0, (fattn_tolerance){200 * unit, 2000 * unit, 0});
            attention_free(whole);
            attention_free(split);
        }
    fattn_ctx_destroy(ctx);
}

/* saved has P, as documented in the header: rows that see a key sum to one, up to the rounding of each element;
   with dropout it is followed by the mask of fattn_dropout_mask. */
static void check_saved(fattn_ctx *ctx, fattn_dtype dtype, double rounding) {
    const attention_case c = {"saved",           .B = 2,
                              .Hq = 3,           .Sq = 70,
                              .Sk = 33,          .D = 4,
                              .dropout_p = 0.4f, .flags = FATTN_CAUSAL,
                              .dtype = dtype,    .algorithm = FATTN_ALGO_STANDARD};
    attention *const a = attention_new(ctx, &c);
    attention_run(a, LIBRARY);
    const int64_t rows = c.B * c.Hq * c.Sq, shape[4] = {c.B, c.Hq, c.Sq, c.Sk};
    const size_t size = fattn_dtype_size(dtype);
    const size_t of_L = (size_t)rows * (dtype == FATTN_F64 ? sizeof(double) : sizeof(float));
    cr_assert_eq(a->plan.saved_bytes, ((size_t)(rows * c.Sk) * (size + 1) + 7) / 8 * 8 + of_L);
    for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (int64_t j = 0; j < c.Sk; ++j) sum += fattni_load(a->io.saved, dtype, row * c.Sk + j);
        const bool sees = row % c.Sq + c.Sk - c.Sq >= 0;
        cr_assert_float_eq(sum, sees ? 1 : 0, rounding);
    }
    fattn_tensor keep;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_U8, 4, shape, &keep), FATTN_OK);
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &keep), FATTN_OK);
    const char *const mask = (const char *)a->io.saved + (size_t)(rows * c.Sk) * size;
    cr_assert_eq(memcmp(keep.data, mask, (size_t)(rows * c.Sk)), 0);
    fattn_tensor_free(ctx, &keep);
    attention_free(a);
}

Test(standard, saved_holds_probabilities_and_mask) {
    fattn_ctx *const ctx = attention_context(1);
    check_saved(ctx, FATTN_F64, 1e-14);
    check_saved(ctx, FATTN_F32, 33 * 0x1p-24);
    check_saved(ctx, FATTN_F16, 0x1p-11);
    check_saved(ctx, FATTN_BF16, 0x1p-8);
    fattn_ctx_destroy(ctx);
}
