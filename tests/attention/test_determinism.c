/* The CPU's bits do not depend on the number of threads, nor on the run. */
#include "key_means.h"
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <string.h>

static const int thread_counts[] = {1, 2, 3, 8, 16};
static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

/* With one thread backward makes one pass over (sequence, key head), with 16 one by rows and one by columns. `mean`:
   of keys. */
static void check_with_mean(const attention_case *c, double mean) {
    const key_means means = {mean, 0, 1};
    fattn_ctx *const one = attention_context(1);
    attention *const want = attention_new(one, c);
    if (mean != 0) key_means_add(want, means);
    attention_run(want, LIBRARY);
    cr_assert(want->plan.deterministic, "%s", c->name);
    for (size_t n = 0; n < sizeof thread_counts / sizeof *thread_counts; ++n) {
        fattn_ctx *const ctx = attention_context(thread_counts[n]);
        attention *const got = attention_new(ctx, c);
        if (mean != 0) key_means_add(got, means);
        attention_run(got, LIBRARY);
        attention_same_bits(want, got);
        attention_free(got);
        fattn_ctx_destroy(ctx);
    }
    attention_free(want);
    fattn_ctx_destroy(one);
}
static void check(const attention_case *c) { check_with_mean(c, 0); }

Test(determinism, shapes) {
    for (int n = 0; n < attention_shape_count; n += THINNED(7)) {
        const attention_case c = tiles_case(n, dtypes[n % 4]);
        check(&c);
    }
}

/* Several column blocks, window, accumulation, few heads and many. */
Test(determinism, long_sequences) {
    for (int n = 0; n < 8; n += THINNED(3)) {
        const attention_case c = {.name = "long",
                                  .dtype = dtypes[n % 4],
                                  .B = 1,
                                  .Hq = n < 4 ? 2 : 6,
                                  .Hkv = n < 4 ? 1 : 3,
                                  .Sq = 700,
                                  .Sk = 613,
                                  .D = 64,
                                  .layout = LAYOUT_BSHD,
                                  .flags = (n & 2 ? FATTN_CAUSAL : FATTN_WINDOW) |
                                           (n & 4 ? FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV : 0u),
                                  .window_left = 150,
                                  .window_right = 90};
        check(&c);
    }
}

/* Beside a softcap sums of a row go from one column block to the next. */
Test(determinism, keys_with_means) {
    for (int n = 0; n < 4; ++n) {
        const attention_case c = {.name = n < 2 ? "means" : "means, softcap",
                                  .dtype = dtypes[2 + n % 2],
                                  .B = 1,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = 90,
                                  .Sk = 290,
                                  .D = 40,
                                  .softcap = n < 2 ? 0 : 10,
                                  .sink = true};
        check_with_mean(&c, 10);
    }
}

Test(determinism, features) {
    for (int n = 0; n < attention_feature_count; n += THINNED(5)) {
        attention_case c = attention_features[n];
        if (n % 2) c = tiles_enlarge(&attention_features[n], n / 2);
        c.name = attention_features[n].name;
        c.dtype = dtypes[(n + n / 4) % 4];
        c.wide = c.flags & FATTN_MERGE || n % 3 == 0;
        check(&c);
    }
}

Test(determinism, flash1) {
    for (int n = 0; n < attention_shape_count; n += THINNED(7)) {
        attention_case c = tiles_case(n, dtypes[n % 4]);
        c.algorithm = FATTN_ALGO_FLASH1;
        check(&c);
    }
}

/* 50 runs with more threads than cores. */
Test(determinism, under_load) {
    const attention_case c = {.name = "under load",
                              .dtype = FATTN_F32,
                              .B = 2,
                              .Hq = 4,
                              .Hkv = 2,
                              .Sq = 257,
                              .Sk = 300,
                              .D = 40,
                              .flags = FATTN_CAUSAL};
    fattn_ctx *const one = attention_context(1), *const many = attention_context(13);
    attention *const want = attention_new(one, &c), *const got = attention_new(many, &c);
    attention_run(want, LIBRARY);
    for (int n = 0; n < 50; n += THINNED(10)) {
        attention_run(got, LIBRARY);
        attention_same_bits(want, got);
    }
    attention_free(want);
    attention_free(got);
    fattn_ctx_destroy(one);
    fattn_ctx_destroy(many);
}
