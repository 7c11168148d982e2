/* dQ of 16-bit calls whose keys have a mean, but not where a row sees them: what m of bwd/cpu/bwd_key_mean.c may be, so
   that no row is worse off with it. Means that all keys have: tiles_accuracy, keys_with_means. */
#include "attention.h"
#include "core/cpu/tile.h"

#include <criterion/criterion.h>
#include <math.h>

static const fattn_dtype dtypes[2] = {FATTN_BF16, FATTN_F16};

/* Adds to four channels of the keys [begin, end) of every head, and half a deviation to all of V, so that O has a
   mean. */
static void add_to_keys(attention *a, double mean, int64_t begin, int64_t end) {
    int64_t at[FATTN_MAX_DIMS];
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_K]); ++n) {
        attention_index(&a->t[T_K], n, at);
        if (at[2] < begin || at[2] >= end || at[3] % (a->c.D / 4)) continue;
        attention_set(&a->t[T_K], at, attention_get(&a->t[T_K], at) + mean);
    }
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_V]); ++n) {
        attention_index(&a->t[T_V], n, at);
        attention_set(&a->t[T_V], at, attention_get(&a->t[T_V], at) + 0.5);
    }
}

static void set_bias(attention *a, double x, int64_t begin, int64_t end) {
    int64_t at[FATTN_MAX_DIMS];
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_BIAS]); ++n) {
        attention_index(&a->t[T_BIAS], n, at);
        attention_set(&a->t[T_BIAS], at, at[3] >= begin && at[3] < end ? x : 0);
    }
}

/* Of dQ's rows [0, rows), relative to the reference's. */
static double error_of(const attention *got, int64_t rows) {
    attention *const want = attention_twin(got, FATTN_F64);
    double error = 0, size = 0;
    int64_t at[FATTN_MAX_DIMS];
    attention_run(want, REFERENCE);
    for (int64_t n = 0; n < fattn_tensor_numel(&want->t[T_DQ]); ++n) {
        attention_index(&want->t[T_DQ], n, at);
        if (at[2] >= rows) continue;
        const double x = attention_get(&want->t[T_DQ], at), y = attention_get(&got->t[T_DQ], at);
        error += (y - x) * (y - x), size += x * x;
    }
    attention_free(want);
    return sqrt(error / size);
}

/* Runs a case whose keys from `begin` on have a mean, and which `mask` changes. */
static double error_with(fattn_ctx *ctx, const attention_case *c, double mean, int64_t begin, double mask,
                         int64_t rows) {
    attention *const a = attention_new(ctx, c);
    add_to_keys(a, mean, begin, c->Sk);
    if (c->bias) set_bias(a, mask, begin, c->Sk);
    attention_run(a, LIBRARY);
    const double error = error_of(a, rows);
    attention_free(a);
    return error;
}

/* With products of 16 bits, where the CPU has them, and of F32. */
static void check(attention_case c, int64_t begin, double mask, int64_t rows) {
    for (int n = 0; n < 4; ++n) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .cpu_threads = 2, .flags = n / 2 ? FATTN_CTX_F32_PRODUCTS : 0};
        fattn_ctx *ctx;
        cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
        c.dtype = dtypes[n % 2];
        const double without = error_with(ctx, &c, 0, begin, mask, rows);
        for (double mean = 3; mean < 1e4; mean *= 10) {
            const double with = error_with(ctx, &c, mean, begin, mask, rows);
            cr_assert(with <= 1.5 * without, "%s, %s: with a mean of %g dq is off by %.2e, without by %.2e", c.name,
                      fattn_dtype_name(c.dtype), mean, with, without);
        }
        fattn_ctx_destroy(ctx);
    }
}

#define SHAPE .B = 1, .Hq = 2, .Hkv = 1, .D = 64

Test(key_means, of_keys_that_a_bias_masks) {
    static const double masks[] = {-INFINITY, -1e9, -1e4};
    static const int64_t begin[] = {128, 24, 200}; /* most keys are masked, or few */
    for (int n = 0; n < 3; ++n) {
        const attention_case c = {"masked keys", SHAPE, .Sq = 130, .Sk = 256, .bias = BIAS | BIAS_OVER_I | BIAS_F32};
        check(c, begin[n], masks[n], c.Sq);
    }
}

Test(key_means, of_keys_that_no_row_sees) {
    const attention_case later = {"later keys", SHAPE, .Sq = 90, .Sk = 512, .flags = FATTN_CAUSAL_TOP_LEFT};
    check(later, 90, 0, 90);
    const attention_case short_row = {"few rows",   SHAPE, .Sq = 20, .Sk = 400, .flags = FATTN_CAUSAL_TOP_LEFT,
                                      .softcap = 30};
    check(short_row, 20, 0, 20);
}

/* Rows of the first half see no key of the second, whose mean is another one. */
Test(key_means, that_drift) {
    const attention_case c = {"drifting means", SHAPE, .Sq = 300, .Sk = 300, .flags = FATTN_CAUSAL};
    check(c, 150, 0, 150);
    attention_case capped = c;
    capped.name = "drifting means, softcap", capped.softcap = 50, capped.sink = true;
    check(capped, 150, 0, 150);
}

/* A row whose scores are huge leaves the bits of dQ in other heads and sequences alone; and with 16-bit products it is
   as exact as others. */
Test(key_means, beside_huge_rows) {
    for (int n = 0; n < 8; ++n) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .cpu_threads = 2, .flags = n / 2 % 2 ? FATTN_CTX_F32_PRODUCTS : 0};
        fattn_ctx *ctx;
        cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
        const attention_case c = {.name = "a huge row",
                                  .B = 2,
                                  .Hq = 2,
                                  .Hkv = 2,
                                  .Sq = 100,
                                  .Sk = 200,
                                  .D = 64,
                                  .dtype = dtypes[n % 2],
                                  .bias = BIAS | BIAS_F32,
                                  .softcap = n / 4 ? 50 : 0,
                                  .sink = true};
        attention *const plain = attention_new(ctx, &c), *const huge = attention_new(ctx, &c);
        int64_t at[FATTN_MAX_DIMS] = {1, 1, 7, 0};
        add_to_keys(plain, 10, 0, c.Sk), add_to_keys(huge, 10, 0, c.Sk);
        for (; at[3] < c.Sk; ++at[3]) attention_set(&huge->t[T_BIAS], at, 1500);
        attention_run(plain, LIBRARY);
        attention_run(huge, LIBRARY);
        for (int64_t e = 0; e < fattn_tensor_numel(&plain->t[T_DQ]); ++e) {
            attention_index(&plain->t[T_DQ], e, at);
            if (at[0] == 1 && at[1] == 1) continue;
            cr_assert_eq(attention_get(&plain->t[T_DQ], at), attention_get(&huge->t[T_DQ], at), "%d: b %d, h %d", n,
                         (int)at[0], (int)at[1]);
        }
        if (!(c.softcap > 0) &&
            !fattni_cpu_kernels_of(ctx, c.dtype)->round) /* F32 copies of that head are as they are */
            cr_assert_lt(error_of(plain, c.Sq), error_of(huge, c.Sq));
        else
            cr_assert_leq(error_of(huge, c.Sq), 1.5 * error_of(plain, c.Sq), "%d", n);
        attention_free(plain);
        attention_free(huge);
        fattn_ctx_destroy(ctx);
    }
}

/* Sums of rows of packed sequences need as much memory as there are rows, whatever the longest may have. */
Test(key_means, memory_of_packed_sequences) {
    attention_case c = {.name = "packed",
                        .B = 8,
                        .Hq = 4,
                        .Sq = 4000,
                        .Sk = 4000,
                        .D = 64,
                        .dtype = FATTN_BF16,
                        .softcap = 20,
                        .lengths = LENGTHS_PACKED,
                        .length_q = {16, 16, 16, 16, 16, 16, 16, 16},
                        .length_k = {16, 16, 16, 16, 16, 16, 16, 16}};
    fattn_ctx *const ctx = attention_context(1);
    size_t bytes[2];
    for (int n = 0; n < 2; ++n) {
        c.softcap = n ? 20 : 0;
        attention *const a = attention_new(ctx, &c);
        attention_forward(a, LIBRARY);
        bytes[n] = a->plan.bwd_workspace;
        attention_free(a);
    }
    cr_assert_leq(bytes[1], bytes[0] + (size_t)(64 << 10), "%zu, without a softcap %zu", bytes[1], bytes[0]);
    fattn_ctx_destroy(ctx);
}
