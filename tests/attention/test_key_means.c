/* dQ of 16-bit calls whose keys have a mean, but not where a row sees them: what m of bwd/cpu/bwd_key_mean.c may be, so
   that no row is worse off with it. Means that all keys have: tiles_accuracy, keys_with_means. */
#include "core/cpu/tile.h"
#include "key_means.h"

#include <criterion/criterion.h>
#include <math.h>

static const fattn_dtype dtypes[2] = {FATTN_BF16, FATTN_F16};

/* With products of 16 bits, where the CPU has them, and of F32. */
Test(key_means, that_rows_do_not_see) {
    for (int n = 0; n < 4; ++n) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .cpu_threads = 2, .flags = n / 2 ? FATTN_CTX_F32_PRODUCTS : 0};
        fattn_ctx *ctx;
        cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
        for (int k = 0; k < hidden_means_case_count; ++k) {
            attention_case c = hidden_means_cases[k].c;
            c.dtype = dtypes[n % 2];
            key_means_check_hidden(ctx, &c, &hidden_means_cases[k].x, LIBRARY, NULL);
        }
        fattn_ctx_destroy(ctx);
    }
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
        const hidden_means none = {0, 0, c.Sq};
        key_means_add_hidden(plain, 10, &none), key_means_add_hidden(huge, 10, &none);
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
            cr_assert_lt(key_means_hidden_error(plain, c.Sq), key_means_hidden_error(huge, c.Sq));
        else
            cr_assert_leq(key_means_hidden_error(huge, c.Sq), 1.5 * key_means_hidden_error(plain, c.Sq), "%d", n);
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
