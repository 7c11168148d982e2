/* F16 has little range. Where P and dS are rounded to it, powers of two keep them there: gradients of long rows, with
   scales far from 1 and under dropout are as exact as others. With F32 products these are easy; the models of AMX-FP16
   run the same tests. O and gradients are F32. */
#include "key_means.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>

static void multiply(attention *a, enum tensor_id id, double factor) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, factor * attention_get(&a->t[id], at));
    }
}

/* Of the whole tensor, as norms. */
static double relative_error(const attention *got, const attention *want, enum tensor_id id) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    double off = 0, size = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(&want->t[id]); ++n) {
        attention_index(&want->t[id], n, at);
        const double x = attention_get(&got->t[id], at), y = attention_get(&want->t[id], at);
        off += (x - y) * (x - y), size += y * y;
    }
    return sqrt(off / size);
}

/* A rounding of P, or of dS, is off by 2^-12 or less of it, and what few of them lose below 2^-14 by as much; O and
   delta have as much from P in forward. */
static const double bound = 0x1p-11;

/* Both passes beside the reference on the same inputs. */
static void check(const attention_case *c, int threads, double q, double d_o) {
    fattn_ctx *const ctx = attention_context(threads);
    attention *const got = attention_new(ctx, c);
    multiply(got, T_Q, q), multiply(got, T_D_O, d_o);
    attention_round_d_o(got, FATTN_F16);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(want, REFERENCE), attention_run(got, LIBRARY);
    static const enum tensor_id ids[] = {T_O, T_DQ, T_DK, T_DV};
    for (int n = 0; n < 4; ++n) {
        const double error = relative_error(got, want, ids[n]);
        cr_assert(error < bound, "%s, %d threads: %s off by %.2e", c->name, threads, attention_names[ids[n]], error);
    }
    attention_free(got);
    attention_free(want);
    fattn_ctx_destroy(ctx);
}

/* P is 1 / Sk or so. */
Test(f16_range, long_rows, .timeout = 200) {
    for (int n = 0; n < 2; ++n)
        check(&(attention_case){.name = n ? "long rows, softcap" : "long rows",
                                .dtype = FATTN_F16,
                                .wide = true,
                                .B = 1,
                                .Hq = 1,
                                .Sq = 24,
                                .Sk = n ? 1 << 15 : 1 << 17,
                                .D = 8,
                                .Dv = 8,
                                .softcap = n ? 4.0f : 0},
              n ? 16 : 1, 0.25, 1);
}

/* dS has the scale in it, or the softcap's derivative, which has it: 2^-25 would lose all bits, 4096 overflow. Sums are
   added to what is there, from one block of columns to the next, too. */
Test(f16_range, scales, .timeout = 200) {
    static const float scales[] = {1e-9f, 1e-7f, 1e-3f, 300, 4096, 1e5f};
    for (int n = 0; n < 24; ++n) {
        const float scale = scales[n % 6];
        check(&(attention_case){.name = n / 6 % 2 ? "scales, softcap" : "scales",
                                .dtype = FATTN_F16,
                                .wide = true,
                                .B = 1,
                                .Hq = 2,
                                .Hkv = n < 12 ? 2 : 1,
                                .Sq = 70,
                                .Sk = 700,
                                .D = 16,
                                .Dv = 32,
                                .flags = n % 2 ? FATTN_CAUSAL : 0u,
                                .scale = scale,
                                .softcap = n / 6 % 2 ? 8.0f : 0},
              n % 3 ? 16 : 1, scale > 1 ? 0.25 / (double)scale : 1, 64);
    }
}

/* What dQ lacks with a mean, where there is a sink, a d_lse or a softcap, has dS's power of two, too. */
Test(f16_range, keys_with_means, .timeout = 200) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 4; ++n)
        key_means_check(ctx,
                        &(attention_case){.name = "keys with means",
                                          .dtype = FATTN_F16,
                                          .B = 1,
                                          .Hq = 2,
                                          .Sq = 100,
                                          .Sk = 520,
                                          .D = 64,
                                          .scale = n % 2 ? 1e-3f : 0,
                                          .softcap = n / 2 ? 8 : 0,
                                          .sink = true,
                                          .d_lse = true},
                        3, LIBRARY, NULL);
    fattn_ctx_destroy(ctx);
}

/* 1 / (1 - p) is 32768: of a row's only key, P times it is 32768 or 0. Its dS is 0 but for rounding. */
Test(f16_range, dropout, .timeout = 200) {
    const attention_case c = {.name = "dropout",
                              .dtype = FATTN_F16,
                              .wide = true,
                              .B = 1,
                              .Hq = 4,
                              .Hkv = 1,
                              .Sq = 1 << 16,
                              .Sk = 1,
                              .D = 1,
                              .Dv = 4,
                              .dropout_p = 32767.0f / 32768,
                              .omit = NO_DQ | NO_DK};
    fattn_ctx *const ctx = attention_context(16);
    attention *const got = attention_new(ctx, &c);
    attention_round_d_o(got, FATTN_F16);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(want, REFERENCE), attention_run(got, LIBRARY);
    cr_assert(isfinite(relative_error(got, want, T_O)), "nothing is kept");
    attention_match(got, want, NULL, 0, (fattn_tolerance){0});
    attention_free(got);
    attention_free(want);
    fattn_ctx_destroy(ctx);
}
