/* FATTN_FP8: the copies against their definition, forward against fp64 on them and on the original inputs, hard cases
   of other libraries, refusals. */
#include "fp8.h"
#include "tiles.h"

#include "core/cpu/tile.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype dtypes[3] = {FATTN_BF16, FATTN_F32, FATTN_F16};

/* ---- cases ---- */

static const attention_case cases[] = {
    {"one", .B = 1, .Hq = 1, .Sq = 1, .Sk = 1, .D = 8},
    {"d 40", .B = 2, .Hq = 2, .Sq = 63, .Sk = 130, .D = 40, .Dv = 24},
    {"d 64", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 130, .Sk = 129, .D = 64, .flags = FATTN_CAUSAL},
    {"d 96", .B = 1, .Hq = 2, .Sq = 65, .Sk = 191, .D = 96, .Dv = 128, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"d 128", .B = 1, .Hq = 3, .Hkv = 1, .Sq = 97, .Sk = 257, .D = 128, .flags = FATTN_CAUSAL},
    {"d 256", .B = 1, .Hq = 1, .Sq = 49, .Sk = 127, .D = 256, .flags = FATTN_WINDOW, .window_left = 30,
     .window_right = 5},
    {"dv 256", .B = 1, .Hq = 2, .Sq = 17, .Sk = 300, .D = 17, .Dv = 256, .sink = true},
    {"more rows than keys", .B = 2, .Hq = 2, .Hkv = 1, .Sq = 200, .Sk = 70, .D = 32, .flags = FATTN_CAUSAL,
     .sink = true},
    {"no keys", .B = 1, .Hq = 2, .Sq = 5, .Sk = 0, .D = 16},
    {"no rows", .B = 1, .Hq = 2, .Sq = 0, .Sk = 5, .D = 16},
    {"positions", .B = 1, .Hq = 2, .Sq = 40, .Sk = 200, .D = 64, .flags = FATTN_CAUSAL, .q_pos0 = 100, .k_pos0 = 7},
    {"padded", .B = 4, .Hq = 2, .Sq = 140, .Sk = 300, .D = 64, .Dv = 32, .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PADDED, .length_q = {140, 0, 1, 77}, .length_k = {127, 300, 0, 129}},
    {"padded, no window", .B = 3, .Hq = 2, .Hkv = 1, .Sq = 33, .Sk = 260, .D = 128, .lengths = LENGTHS_PADDED_K,
     .length_k = {1, 128, 257}, .sink = true},
    {"packed", .B = 8, .Hq = 2, .Hkv = 1, .Sq = 129, .Sk = 260, .D = 64, .lengths = LENGTHS_PACKED,
     .length_q = {16, 31, 0, 129, 5, 1, 127, 64}, .length_k = {15, 33, 128, 0, 127, 129, 1, 260}},
    {"packed causal", .B = 6, .Hq = 4, .Hkv = 2, .Sq = 100, .Sk = 256, .D = 40, .Dv = 64, .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED, .length_q = {1, 15, 17, 100, 33, 0}, .length_k = {16, 17, 31, 256, 32, 97},
     .sink = true},
    {"packed of nothing", .B = 2, .Hq = 1, .Sq = 10, .Sk = 10, .D = 8, .lengths = LENGTHS_PACKED, .length_q = {0, 0},
     .length_k = {0, 0}},
};
enum { CASES = sizeof cases / sizeof *cases, MIXED = 120 };

/* Case n of the list, or of an endless one of supported features. */
static attention_case case_of(int n, char *name, size_t size) {
    static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
    attention_case c;
    if (n < CASES) {
        c = cases[n];
        snprintf(name, size, "%s", c.name);
    } else {
        c = attention_mix(n);
        c = tiles_enlarge(&c, n);
        c.flags &= ~(uint32_t)(FATTN_MERGE | FATTN_EXACT_DELTA);
        c.bias = 0, c.alibi = false, c.softcap = 0, c.dropout_p = 0;
        snprintf(name, size, "mix %d", n);
    }
    c.algorithm = n % 2 ? FATTN_ALGO_FLASH2 : FATTN_ALGO_AUTO;
    c.dtype = dtypes[n % 3];
    c.wide = n % 4 == 1;
    c.layout = layouts[n / 3 % 4];
    c.flags |= FATTN_FP8;
    if (n % 5 < 2 && (c.D & (c.D - 1)) == 0 && c.D >= 16) c.flags |= FATTN_FP8_HADAMARD;
    c.omit = 0;
    c.name = name;
    return c;
}

static fattn_ctx *context_of(int n) {
    fattn_ctx *const ctx = attention_context_isa(n % 4 ? 1 : 3, FATTNI_ISA_BASELINE + n % 3);
    return ctx ? ctx : attention_context(1);
}

/* ---- the copies ---- */

/* Whether a code is a nearest one of x, which is known up to `slack`. */
static bool is_nearest(double code, double x, double slack) {
    return code >= fp8_round(x - slack) && code <= fp8_round(x + slack);
}

static bool close_to(double x, double want, double tolerance) { return fabs(x - want) <= tolerance * fabs(want); }

/* Against the definition in double. Sums, of F32 numbers around their mean, are off by a few units of 2^-24 of the
   largest; codes are multiples of 2^-9 up to 448. */
Test(fp8, copies_are_those_of_the_definition) {
    for (int n = 0; n < CASES + MIXED; ++n) {
        char name[32];
        const attention_case c = case_of(n, name, sizeof name);
        fattn_ctx *const ctx = context_of(n);
        attention *const a = attention_new(ctx, &c);
        fp8_copies copies = fp8_quantize(a);
        fp8_numbers got = fp8_numbers_read(a, &copies), want = fp8_numbers_of(a);
        fattni_problem p;
        cr_assert_eq(fattni_problem_init(ctx, &a->params, &a->io, FATTNI_FWD, true, &p), FATTN_OK);
        for (int64_t b = 0; b < p.B; ++b) {
            const fattni_sequence s = fattni_sequence_of(&p, b);
            for (int64_t g = 0; g < p.Hkv; ++g) {
                const int64_t head = b * p.Hkv + g, key0 = (s.batch * p.Hkv + g) * p.rows_k + s.k0;
                cr_assert(close_to(got.k_scale[head], want.k_scale[head], 1e-6), "%s: k_scale %g, not %g", name,
                          got.k_scale[head], want.k_scale[head]);
                for (int64_t d = 0; d < p.Dv; ++d) {
                    const int64_t at = head * p.Dv + d;
                    cr_assert(close_to(got.v_scale[at], want.v_scale[at], 1e-6) &&
                                  fabs(got.v_mean[at] - want.v_mean[at]) <= 448e-6 * want.v_scale[at] + 1e-30,
                              "%s: v_scale %g, v_mean %g, not %g, %g", name, got.v_scale[at], got.v_mean[at],
                              want.v_scale[at], want.v_mean[at]);
                }
                for (int64_t e = key0 * p.D; e < (key0 + s.band.Sk) * p.D; ++e)
                    cr_assert(is_nearest(got.k8[e], want.k[e], 4e-4), "%s: k8 %g of %g", name, got.k8[e], want.k[e]);
                for (int64_t e = key0 * p.Dv; e < (key0 + s.band.Sk) * p.Dv; ++e)
                    cr_assert(is_nearest(got.v8[e], want.v[e], 4e-4), "%s: v8 %g of %g", name, got.v8[e], want.v[e]);
            }
            for (int64_t h = 0; h < p.Hq; ++h)
                for (int64_t i = 0; i < s.band.Sq; ++i) {
                    const int64_t row = (s.batch * p.Hq + h) * p.rows_q + s.q0 + i;
                    const double *const mean = want.k_mean + (b * p.Hkv + h / p.group) * p.D;
                    double size = 0;
                    for (int64_t d = 0; d < p.D; ++d) size += fabs(want.q[row * p.D + d] * want.q_scale[row] * mean[d]);
                    cr_assert(close_to(got.q_scale[row], want.q_scale[row], 1e-6));
                    cr_assert(fabs(got.q_shift[row] - want.q_shift[row]) <= 2e-6 * size + 1e-30,
                              "%s: q_shift %g, not %g", name, got.q_shift[row], want.q_shift[row]);
                    for (int64_t e = row * p.D; e < (row + 1) * p.D; ++e)
                        cr_assert(is_nearest(got.q8[e], want.q[e], 1e-5 + 2e-6 * fabs(want.q[e])), "%s: q8 %g of %g",
                                  name, got.q8[e], want.q[e]);
                }
        }
        fp8_numbers_free(&got), fp8_numbers_free(&want);
        fp8_free(&copies);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* ---- forward ---- */

/* Against fp64 on the same codes. A weight whose 64 P lies at a tie, up to F32's errors, may be rounded the other way:
   one of 10^5, by 6 %. */
Test(fp8, forward_is_that_of_the_codes, .timeout = 600) {
    for (int n = 0; n < CASES + MIXED; ++n) {
        char name[32];
        const attention_case c = case_of(n, name, sizeof name);
        fattn_ctx *const ctx = context_of(n);
        attention *const a = attention_new(ctx, &c);
        fp8_copies copies = fp8_quantize(a);
        fp8_numbers read = fp8_numbers_read(a, &copies);
        attention_forward(a, LIBRARY);
        cr_assert_str_eq(strncmp(a->plan.fwd_kernel, "fattn_fwd_fp8_cpu", 17) ? a->plan.fwd_kernel : "", "");
        double *const o = fp8_values(a, T_O), *const lse = fp8_values(a, T_LSE);
        double *const want_o = fp8_values(a, T_O), *const want_lse = fp8_values(a, T_LSE);
        fp8_model(a, &read, want_o, want_lse);
        const double u = c.wide || c.dtype == FATTN_F32 ? 0 : c.dtype == FATTN_BF16 ? 0x1p-9 : 0x1p-12;
        const double off = fp8_error(a, T_O, o, want_o);
        cr_assert(off <= 0.03 + 100 * u, "%s: O is off by %g %%", name, off);
        const double far = fp8_error(a, T_LSE, lse, want_lse);
        cr_assert(far <= 1e-4, "%s: L is off by %g %%", name, far);
        free(o), free(lse), free(want_o), free(want_lse);
        fp8_numbers_free(&read);
        fp8_free(&copies);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}
