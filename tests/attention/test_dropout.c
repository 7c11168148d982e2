/* fattn_dropout_mask returns the bits that both passes use. */
#include "attention.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static void make_mask(const attention *a, fattn_tensor *keep) {
    const int64_t shape[4] = {a->c.B, a->c.Hq, a->c.Sq, a->c.Sk};
    cr_assert_eq(fattn_tensor_alloc(a->ctx, FATTN_U8, 4, shape, keep), FATTN_OK);
    memset(keep->data, 7, (size_t)fattn_tensor_numel(keep));
    cr_assert_eq(fattn_dropout_mask(a->ctx, &a->params, &a->io, keep), FATTN_OK, "%s: %s", a->c.name,
                 fattn_ctx_error(a->ctx));
}

static const attention_case cases[] = {
    {"plain", .B = 2, .Hq = 3, .Sq = 37, .Sk = 50, .D = 2, .dropout_p = 0.3f},
    {"one element", .B = 1, .Hq = 1, .Sq = 1, .Sk = 1, .D = 2, .dropout_p = 0.5f},
    {"positions", .B = 1, .Hq = 2, .Sq = 70, .Sk = 21, .D = 2, .dropout_p = 0.6f, .q_pos0 = 13, .k_pos0 = 1003},
    {"slice of a batch, step", .B = 2, .Hq = 2, .Sq = 20, .Sk = 20, .D = 2, .dropout_p = 0.1f, .rng_step = true},
    {"padded", .B = 3, .Hq = 2, .Sq = 9, .Sk = 18, .D = 2, .dropout_p = 0.5f, .lengths = LENGTHS_PADDED,
     .length_q = {9, 0, 4}, .length_k = {1, 18, 7}},
    {"packed", .B = 3, .Hq = 2, .Sq = 90, .Sk = 18, .D = 2, .dropout_p = 0.5f, .lengths = LENGTHS_PACKED,
     .length_q = {9, 0, 4}, .length_k = {1, 18, 7}},
};
enum { CASES = sizeof cases / sizeof *cases };

/* Every element, also masked ones, equals the result of its own Philox block. */
Test(dropout, mask_is_philox_of_the_position) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < CASES; ++n) {
        attention *const a = attention_new(ctx, &cases[n]);
        const fattn_attention_params *p = &a->params;
        const uint32_t T = (uint32_t)lround(32768 * (double)p->dropout_p);
        const int64_t heads = p->rng_heads ? p->rng_heads : a->c.Hq;
        fattn_tensor keep;
        make_mask(a, &keep);
        int64_t at[4];
        for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) {
            attention_index(&keep, e, at);
            const uint32_t plane = (uint32_t)((at[0] + p->rng_batch0) * heads + at[1] + p->rng_head0);
            const int want = fattni_keep(p->rng.seed, p->rng.stream, a->c.rng_step ? 7 : 0, plane, at[2] + p->q_pos0,
                                         at[3] + p->k_pos0, T);
            cr_assert_eq((int)attention_get(&keep, at), want, "%s [%lld,%lld,%lld,%lld]", a->c.name, (long long)at[0],
                         (long long)at[1], (long long)at[2], (long long)at[3]);
        }
        fattn_tensor_free(ctx, &keep);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

Test(dropout, mask_goes_to_any_strides) {
    fattn_ctx *const ctx = attention_context(3);
    attention *const a = attention_new(ctx, &cases[0]);
    fattn_tensor keep, wide;
    make_mask(a, &keep);
    const int64_t shape[5] = {50, 37, 3, 2, 2};
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_U8, 5, shape, &wide), FATTN_OK);
    memset(wide.data, 9, (size_t)fattn_tensor_numel(&wide));
    fattn_tensor view = wide; /* [2,3,37,50], transposed, every other byte */
    view.ndim = 4;
    for (int d = 0; d < 4; ++d) view.shape[d] = shape[3 - d], view.stride[d] = wide.stride[3 - d];
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &view), FATTN_OK);
    int64_t at[4];
    for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) {
        attention_index(&keep, e, at);
        cr_assert_eq(attention_get(&view, at), attention_get(&keep, at));
    }
    for (int64_t e = 1; e < fattn_tensor_numel(&wide); e += 2)
        cr_assert_eq(((const uint8_t *)wide.data)[e], 9, "byte %lld between", (long long)e);
    fattn_tensor_free(ctx, &keep);
    fattn_tensor_free(ctx, &wide);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* With V a unit matrix, and one key block after another visible, O gives the mask of forward; with dO a unit
   matrix dV gives that of backward. The matrices are as wide as the number of keys and rows. */
static void check_bits(enum engine by, int32_t algorithm) {
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {
        "bits",     .B = 2, .Hq = 2, .Sq = 40, .Sk = 40, .D = 3, .Dv = 40, .dropout_p = 0.35f, .algorithm = algorithm,
        .q_pos0 = 5};
    attention *const a = attention_new(ctx, &c);
    fattn_tensor keep;
    make_mask(a, &keep);
    int64_t at[4];
    for (int64_t e = 0; e < fattn_tensor_numel(&a->t[T_V]); ++e) {
        attention_index(&a->t[T_V], e, at);
        attention_set(&a->t[T_V], at, at[2] == at[3]);
        attention_set(&a->t[T_D_O], at, at[2] == at[3]);
    }
    attention_run(a, by);
    for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) {
        attention_index(&keep, e, at);
        const int64_t transposed[4] = {at[0], at[1], at[3], at[2]};
        const int want = (int)attention_get(&keep, at);
        cr_assert_eq(attention_get(&a->t[T_O], at) > 0, want);
        cr_assert_eq(attention_get(&a->t[T_DV], transposed) > 0, want);
    }
    fattn_tensor_free(ctx, &keep);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

Test(dropout, forward_and_backward_use_the_mask) {
    check_bits(REFERENCE, 0);
    for (int32_t algorithm = 0; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) check_bits(LIBRARY, algorithm);
}

/* The number kept is binomial; p takes effect as T/32768. */
Test(dropout, keep_rate) {
    static const float rates[] = {0x1p-15f, 0.001f, 0.1f, 0.5f, 0.9f, 32767.0f / 32768};
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < 6; ++n) {
        const attention_case c = {"rate", .B = 2, .Hq = 4, .Sq = 256, .Sk = 256, .D = 1, .dropout_p = rates[n]};
        attention *const a = attention_new(ctx, &c);
        fattn_tensor keep;
        make_mask(a, &keep);
        const double count = (double)fattn_tensor_numel(&keep);
        const double p = 1 - round(32768 * (double)rates[n]) / 32768;
        double kept = 0;
        for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) kept += ((const uint8_t *)keep.data)[e];
        cr_assert_leq(fabs(kept - count * p), 5 * sqrt(count * p * (1 - p)), "%g: %g of %g kept", (double)rates[n],
                      kept, count);
        fattn_tensor_free(ctx, &keep);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* Of two independent masks at p = 1/2, half of the elements agree. */
static void check_independent(double same, double count, const char *what) {
    cr_assert_leq(fabs(same - count / 2), 5 * sqrt(count) / 2, "%s: %g of %g agree", what, same, count);
}

/* A mask and itself, moved in b, h, i or j. */
Test(dropout, masks_of_neighbours_are_independent) {
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"pairs", .B = 2, .Hq = 2, .Sq = 257, .Sk = 257, .D = 1, .dropout_p = 0.5f};
    attention *const a = attention_new(ctx, &c);
    fattn_tensor keep;
    make_mask(a, &keep);
    static const int64_t shifts[][4] = {{1, 0, 0, 0},  {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 8, 0},
                                        {0, 0, 16, 0}, {0, 0, 0, 1}, {0, 0, 0, 8}, {0, 0, 0, 16}};
    for (int n = 0; n < 8; ++n) {
        double same = 0, count = 0;
        int64_t at[4];
        for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) {
            attention_index(&keep, e, at);
            const double first = attention_get(&keep, at);
            bool inside = true;
            for (int d = 0; d < 4; ++d) {
                at[d] += shifts[n][d];
                inside = inside && at[d] < keep.shape[d];
            }
            if (!inside) continue;
            same += first == attention_get(&keep, at);
            count += 1;
        }
        check_independent(same, count, "a shift");
    }
    fattn_tensor_free(ctx, &keep);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

Test(dropout, another_seed_stream_or_step_is_another_mask) {
    static const char *const changed[3] = {"seed", "stream", "step"};
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"change",  .B = 1, .Hq = 2,           .Sq = 200,
                              .Sk = 200, .D = 1, .dropout_p = 0.5f, .rng_step = true};
    attention *const a = attention_new(ctx, &c);
    fattn_tensor before, after;
    make_mask(a, &before);
    for (int n = 0; n < 3; ++n) {
        const fattn_rng rng = a->params.rng;
        if (n == 0) a->params.rng.seed += 1;
        if (n == 1) a->params.rng.stream += 1;
        if (n == 2) attention_set(&a->t[T_RNG_STEP], NULL, 8);
        make_mask(a, &after);
        const double count = (double)fattn_tensor_numel(&before);
        double same = 0;
        for (int64_t e = 0; e < fattn_tensor_numel(&before); ++e)
            same += ((const uint8_t *)before.data)[e] == ((const uint8_t *)after.data)[e];
        check_independent(same, count, changed[n]);
        a->params.rng = rng;
        fattn_tensor_free(ctx, &after);
    }
    fattn_tensor_free(ctx, &before);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* p = 0 is bitwise no dropout for any seed; and the mask is all ones. */
Test(dropout, zero_is_none) {
    fattn_ctx *const ctx = attention_context(1);
    for (int way = 0; way < 5; ++way) {
        const attention_case c = {"p = 0", .B = 1, .Hq = 2, .Sq = 20, .Sk = 30, .D = 3, .algorithm = way % 4};
        attention *const a = attention_new(ctx, &c), *const b = attention_new(ctx, &c);
        b->params.rng = (fattn_rng){.seed = 99, .stream = 1};
        attention_run(a, way ? LIBRARY : REFERENCE);
        attention_run(b, way ? LIBRARY : REFERENCE);
        attention_same_bits(a, b);
        fattn_tensor keep;
        make_mask(b, &keep);
        for (int64_t e = 0; e < fattn_tensor_numel(&keep); ++e) cr_assert_eq(((const uint8_t *)keep.data)[e], 1);
        fattn_tensor_free(ctx, &keep);
        attention_free(a);
        attention_free(b);
    }
    fattn_ctx_destroy(ctx);
}

Test(dropout, errors) {
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = attention_new(ctx, &cases[0]);
    fattn_tensor keep;
    make_mask(a, &keep);
    fattn_tensor bad = keep;
    bad.shape[3] -= 1;
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &bad), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "[2,3,37,50]"), "%s", fattn_ctx_error(ctx));
    bad = keep, bad.stride[2] = 0;
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &bad), FATTN_E_SHAPE);
    bad = keep, bad.ndim = 3;
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &bad), FATTN_E_SHAPE);
    bad = keep, bad.dtype = FATTN_I32;
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &bad), FATTN_E_DTYPE);
    bad = keep, bad.data = NULL;
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, &bad), FATTN_E_ARG);
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, &a->io, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_dropout_mask(ctx, &a->params, NULL, &keep), FATTN_E_ARG);
    cr_assert_eq(fattn_dropout_mask(NULL, &a->params, &a->io, &keep), FATTN_E_ARG);
    fattn_tensor_free(ctx, &keep);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}
