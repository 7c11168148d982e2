/* FATTN_FP8: the copies against their definition, forward against fp64 on them and on the original inputs, hard cases
   of other libraries, refusals. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "fp8.h"
#include "tiles.h"

#include "core/cpu/tile.h"
#include "core/fp8/rope.h"
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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
    if ((n / 4 + n / 64) % 2) c.flags |= FATTN_FP8_INT8;
    c.omit = 0;
    c.name = name;
    return c;
}

static fattn_ctx *context_of(int n) {
    fattn_ctx *const ctx = attention_context_isa(n % 4 ? 1 : 3, FATTNI_ISA_BASELINE + n % 3);
    return ctx ? ctx : attention_context(1);
}

/* ---- the copies ---- */

/* Whether a code of q or k is a nearest one of x, which is known up to `slack`. */
static bool is_nearest(uint32_t flags, double code, double x, double slack) {
    return code >= fp8_code(flags, x - slack) && code <= fp8_code(flags, x + slack);
}

/* More than half a step from a code to the one beside it. */
static double beside(uint32_t flags, double code) { return flags & FATTN_FP8_INT8 ? 1 : fabs(code) / 12 + 0x1p-9; }

static bool close_to(double x, double want, double tolerance) { return fabs(x - want) <= tolerance * fabs(want); }

/* Against the definition in double. Sums, of F32 numbers around their mean, are off by a few units of 2^-24 of the
   largest, of the head's keys; codes are multiples of 2^-9 up to 448, or integers up to 127. Elements of k_scale whose
   keys do not exist are those of 32 zeros, or of the last keys. */
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
                double k_most = 1e-30;
                for (int64_t j = key0; j < key0 + s.band.Sk; ++j)
                    k_most = fmax(k_most, want.k_scale[j] * fp8_largest(c.flags));
                for (int64_t j = key0; j < key0 + s.band.Sk; ++j)
                    cr_assert(fabs(got.k_scale[j] - want.k_scale[j]) <=
                                  1e-6 * (c.flags & FATTN_FP8_INT8 ? k_most / 127 : want.k_scale[j]),
                              "%s: k_scale %g, not %g", name, got.k_scale[j], want.k_scale[j]);
                for (int64_t d = 0; d < p.Dv; ++d) {
                    const int64_t at = head * p.Dv + d;
                    double mean = want.v_mean[at]; /* on the codes that are there */
                    for (int64_t j = 0; j < s.band.Sk; ++j) {
                        const int64_t e = (key0 + j) * p.Dv + d;
                        mean += want.v_scale[at] * (want.v8[e] - got.v8[e]) / (double)s.band.Sk;
                    }
                    cr_assert(close_to(got.v_scale[at], want.v_scale[at], 1e-6) &&
                                  fabs(got.v_mean[at] - mean) <= 448e-6 * want.v_scale[at] + 1e-30,
                              "%s: v_scale %g, v_mean %g, not %g, %g", name, got.v_scale[at], got.v_mean[at],
                              want.v_scale[at], mean);
                }
                for (int64_t e = key0 * p.D; e < (key0 + s.band.Sk) * p.D; ++e)
                    cr_assert(is_nearest(c.flags, got.k8[e], want.k[e], 9e-7 * k_most / want.k_scale[e / p.D]),
                              "%s: k8 %g of %g", name, got.k8[e], want.k[e]);
                for (int64_t e = key0 * p.Dv; e < (key0 + s.band.Sk) * p.Dv; ++e)
                    cr_assert(is_nearest(0, got.v8[e], want.v[e], 4e-4), "%s: v8 %g of %g", name, got.v8[e], want.v[e]);
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
                        cr_assert(is_nearest(c.flags, got.q8[e], want.q[e], 1e-5 + 2e-6 * fabs(want.q[e])),
                                  "%s: q8 %g of %g", name, got.q8[e], want.q[e]);
                }
        }
        fp8_numbers_free(&got), fp8_numbers_free(&want);
        fp8_free(&copies);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* Turns q and k, as the quantiser does, bit by bit (`exactly`), or in double. */
static void turn(attention *a, float base, bool exactly) {
    const bool top_left = a->c.flags & (FATTN_CAUSAL_TOP_LEFT | FATTN_TOP_LEFT);
    for (int m = 0; m < 2; ++m) {
        const fattn_tensor *const t = &a->t[m ? T_K : T_Q];
        const int64_t half = t->shape[3] / 2, off = m || top_left ? 0 : a->c.Sk - a->c.Sq;
        for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
            int64_t at[FATTN_MAX_DIMS] = {0}, other[FATTN_MAX_DIMS];
            attention_index(t, n, at);
            if (at[3] >= half) continue;
            memcpy(other, at, sizeof at), other[3] += half;
            const int64_t position = (m ? a->c.k_pos0 : a->c.q_pos0) + off + at[2];
            const double u = attention_get(t, at), v = attention_get(t, other);
            float c, s;
            fattni_fp8_angle(position, fattni_fp8_frequency((double)base, at[3], half), &c, &s);
            const double angle = (double)position * pow((double)base, -(double)at[3] / (double)half);
            const double low = exactly ? (double)fmaf((float)u, c, -((float)v * s)) : u * cos(angle) - v * sin(angle),
                         high = exactly ? (double)fmaf((float)u, s, (float)v * c) : u * sin(angle) + v * cos(angle);
            attention_set(t, at, low), attention_set(t, other, high);
        }
    }
}

/* With rope_base the copies of q and k, of any dtype, are bit by bit those of F32 tensors that were turned before; to a
   code beside it those of rotations in double. Positions are those of the mask. Forward takes them as they are. */
Test(fp8, turned_copies_are_those_of_turned_rows) {
    static const int64_t sizes[][3] = {{70, 70, 64}, {33, 200, 128}, {130, 40, 48}, {1, 17, 16}, {20, 300, 256}};
    for (int n = 0; n < 30; ++n) {
        const int64_t *const size = sizes[n % 5];
        const float base = n % 4 ? 10000 : 500;
        const attention_case c = {.name = "turned",
                                  .B = 2,
                                  .Hq = 4,
                                  .Hkv = 2,
                                  .Sq = size[0],
                                  .Sk = size[1],
                                  .D = size[2],
                                  .dtype = dtypes[n % 3],
                                  .wide = true,
                                  .q_pos0 = n % 2 * 1000,
                                  .k_pos0 = n % 3 * 70,
                                  .flags = FATTN_FP8 |
                                           (n % 4 == 1   ? FATTN_CAUSAL
                                            : n % 4 == 2 ? FATTN_CAUSAL_TOP_LEFT
                                                         : 0) |
                                           (n % 7 < 3 && size[2] != 48 ? FATTN_FP8_HADAMARD : 0u) |
                                           (n / 2 % 2 ? FATTN_FP8_INT8 : 0u)};
        fattn_ctx *const ctx = context_of(n);
        attention *const a = attention_new(ctx, &c);
        fp8_copies got = fp8_quantize_turned(a, base);
        for (int m = 0; m < 2; ++m) {
            attention *const before = attention_twin(a, FATTN_F32);
            turn(before, base, m == 0);
            fp8_copies want = fp8_quantize(before);
            cr_assert_eq(got.bytes, want.bytes);
            if (m == 0) {
                const size_t end = (size_t)((char *)want.fp8.partials.data - (char *)want.memory);
                cr_assert_eq(memcmp(got.memory, want.memory, end), 0, "case %d", n);
                fp8_forward(a, &got), fp8_forward(before, &want);
                cr_assert_eq(memcmp(a->t[T_O].data, before->t[T_O].data, (size_t)(8 * c.Sq * c.D) * 4), 0);
                cr_assert_eq(memcmp(a->t[T_LSE].data, before->t[T_LSE].data, (size_t)(8 * c.Sq) * 4), 0);
            }
            fp8_numbers x = fp8_numbers_read(a, &got), y = fp8_numbers_read(before, &want);
            for (int64_t e = 0; e < 2 * 4 * c.Sq * c.D; ++e)
                cr_assert(is_nearest(c.flags, x.q8[e], y.q8[e], beside(c.flags, y.q8[e])), "%g, not %g", x.q8[e],
                          y.q8[e]);
            for (int64_t e = 0; e < 2 * 2 * c.Sk * c.D; ++e)
                cr_assert(is_nearest(c.flags, x.k8[e], y.k8[e], beside(c.flags, y.k8[e])), "%g, not %g", x.k8[e],
                          y.k8[e]);
            for (int64_t e = 0; e < 2 * 4 * c.Sq; ++e) cr_assert(close_to(x.q_scale[e], y.q_scale[e], 1e-6));
            fp8_numbers_free(&x), fp8_numbers_free(&y);
            fp8_free(&want);
            attention_free(before);
        }
        fp8_free(&got);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* ---- forward ---- */

/* Against fp64 on the same codes. A weight whose 64 P lies at a tie, up to F32's errors, may be rounded the other way:
   one of 10^5, by 6 %. What these make is left out. */
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
        double *const ties = fp8_values(a, T_O);
        fp8_model(a, &read, want_o, want_lse, ties);
        for (int64_t e = 0; e < fattn_tensor_numel(&a->t[T_O]); ++e)
            if (ties[e] > 0) want_o[e] = fmax(want_o[e] - ties[e], fmin(want_o[e] + ties[e], o[e]));
        const double u = c.wide || c.dtype == FATTN_F32 ? 0 : c.dtype == FATTN_BF16 ? 0x1p-9 : 0x1p-12;
        const double off = fp8_error(a, T_O, o, want_o);
        cr_assert(off <= 0.03 + 100 * u, "%s: O is off by %g %%", name, off);
        const double far = fp8_error(a, T_LSE, lse, want_lse);
        cr_assert(far <= 1e-4, "%s: L is off by %g %%", name, far);
        free(o), free(lse), free(want_o), free(want_lse), free(ties);
        fp8_numbers_free(&read);
        fp8_free(&copies);
        attention_free(a);
        fattn_ctx_destroy(ctx);
    }
}

/* ---- copies that the caller has made ---- */

static void clear_gradients(attention *a) {
    for (int n = 2; n < 7; ++n) a->present[attention_outputs[n]] = false;
}

/* The same bits as with those in the workspace, which shrinks by their size. */
Test(fp8, explicit_copies) {
    for (int n = 0; n < CASES + 40; ++n) {
        char name[32];
        const attention_case c = case_of(n, name, sizeof name);
        fattn_ctx *const ctx = context_of(n);
        attention *const a = attention_new(ctx, &c), *const b = attention_new(ctx, &c);
        attention_forward(a, LIBRARY);
        fp8_copies copies = fp8_quantize(b);
        fp8_forward(b, &copies);
        clear_gradients(a), clear_gradients(b);
        attention_same_bits(a, b);
        cr_assert_eq(a->plan.fwd_workspace - b->plan.fwd_workspace, copies.bytes, "%s", name);
        attention_reset(b);
        memset(copies.fp8.partials.data, 0xff, 4); /* forward does not read them */
        fp8_forward(b, &copies);
        attention_same_bits(a, b);
        fp8_free(&copies);
        attention_free(a), attention_free(b);
        fattn_ctx_destroy(ctx);
    }
}

static void multiply(const fattn_tensor *t, float by) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        attention_set(t, at, attention_get(t, at) * (double)by);
    }
}

static double at_index(const fattn_tensor *t, int64_t n) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    attention_index(t, n, at);
    return attention_get(t, at);
}

/* What codes are multiplied by is read, not derived: powers of two move from scales into results, exactly. */
static void check_scales(uint32_t flags) {
    fattn_ctx *const ctx = attention_context(2);
    const attention_case c = {
        "scales",      .B = 2,  .Hq = 4,  .Hkv = 2,           .Sq = 70,
        .Sk = 140,     .D = 64, .Dv = 40, .dtype = FATTN_F32, .flags = FATTN_FP8 | FATTN_CAUSAL | flags,
        .scale = 0.25f};
    attention *const a = attention_new(ctx, &c), *const b = attention_new(ctx, &c);
    fp8_copies copies = fp8_quantize(a);
    fp8_forward(a, &copies);
    multiply(&copies.fp8.q_scale, 8), multiply(&copies.fp8.k_scale, 0.5f), multiply(&copies.fp8.q_shift, 4);
    multiply(&copies.fp8.v_scale, 2), multiply(&copies.fp8.v_mean, 2);
    b->params.scale = 0.0625f;
    fp8_forward(b, &copies);
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_O]); ++n)
        cr_assert_eq(at_index(&b->t[T_O], n), 2 * at_index(&a->t[T_O], n));
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_LSE]); ++n)
        cr_assert_eq(at_index(&b->t[T_LSE], n), at_index(&a->t[T_LSE], n));
    multiply(&copies.fp8.q_shift, 0);
    fp8_forward(b, &copies);
    double off = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_LSE]); ++n)
        off = fmax(off, fabs(at_index(&b->t[T_LSE], n) - at_index(&a->t[T_LSE], n)));
    cr_assert_gt(off, 0.01, "L has q.mean(k)");
    fp8_free(&copies);
    attention_free(a), attention_free(b);
    fattn_ctx_destroy(ctx);
}

Test(fp8, scales_are_read) {
    check_scales(0);
    check_scales(FATTN_FP8_INT8);
}

/* Copies that lie anywhere: every tensor in memory of its own, rows and heads further apart. */
static void check_strides(uint32_t flags) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = cases[13]; /* packed */
    c.dtype = FATTN_BF16, c.flags |= FATTN_FP8 | flags;
    attention *const a = attention_new(ctx, &c), *const b = attention_new(ctx, &c);
    fp8_copies copies = fp8_quantize(a);
    fp8_forward(a, &copies);
    fp8_copies moved = {.fp8 = copies.fp8};
    void *places[9];
    for (int n = 0; n < 9; ++n) {
        fattn_tensor *const t = &moved.fp8.q8 + n;
        int64_t stride = 1;
        for (int d = t->ndim - 1; d >= 0; --d) {
            t->stride[d] = stride;
            stride = (stride * t->shape[d] + 31) / 16 * 16;
        }
        const size_t bytes = (size_t)stride * fattn_dtype_size((fattn_dtype)t->dtype);
        places[n] = aligned_alloc(256, (bytes + 511) / 256 * 256);
        memset(places[n], 0xff, (bytes + 511) / 256 * 256);
        t->data = (char *)places[n] + 16;
    }
    b->io.fp8 = &moved.fp8;
    cr_assert_eq(fattn_fp8_quantize(ctx, &b->params, &b->io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fp8_forward(b, &moved);
    clear_gradients(a), clear_gradients(b);
    attention_same_bits(a, b);
    for (int n = 0; n < 9; ++n) free(places[n]);
    fp8_free(&copies);
    attention_free(a), attention_free(b);
    fattn_ctx_destroy(ctx);
}

Test(fp8, copies_with_other_strides) {
    check_strides(0);
    check_strides(FATTN_FP8_INT8);
}

/* The scale of 32 keys is that of these 32: four times as large, with each of them in turn, their scores are. */
Test(fp8, scales_of_32_keys) {
    enum { KEYS = 200, D = 32 };
    fattn_ctx *const ctx = attention_context(1);
    attention_case c = {"32 keys", .B = 1, .Hq = 1, .Sq = KEYS, .Sk = KEYS, .D = D, .dtype = FATTN_F32};
    c.flags = FATTN_FP8 | FATTN_FP8_INT8 | FATTN_WINDOW; /* row i sees key i alone: L is its score */
    attention *const a = attention_new(ctx, &c);
    fp8_copies copies = fp8_quantize(a);
    multiply(&copies.fp8.q_shift, 0);
    fp8_forward(a, &copies);
    double *const before = fp8_values(a, T_LSE);
    float *const scale = copies.fp8.k_scale.data;
    for (int n = 0; n < 7; ++n) {
        for (int e = 0; e < 4; ++e) scale[4 * n + e] *= 4;
        fp8_forward(a, &copies);
        for (int64_t i = 0; i < KEYS; ++i)
            cr_assert_eq(at_index(&a->t[T_LSE], i), (i / 32 == n ? 4 : 1) * before[i], "row %d", (int)i);
        for (int e = 0; e < 4; ++e) scale[4 * n + e] /= 4;
    }
    free(before);
    fp8_free(&copies);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Signs come from the seed and the stream. */
Test(fp8, other_seeds_give_other_codes) {
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"seeds",
                              .B = 1,
                              .Hq = 1,
                              .Sq = 20,
                              .Sk = 30,
                              .D = 128,
                              .dtype = FATTN_BF16,
                              .flags = FATTN_FP8 | FATTN_FP8_HADAMARD};
    attention *const a = attention_new(ctx, &c);
    fp8_copies first = fp8_quantize(a);
    const size_t codes = (size_t)((char *)first.fp8.v8.data - (char *)first.memory);
    for (int n = 0; n < 3; ++n) {
        if (n == 1) a->params.rng.seed += 1;
        if (n == 2) a->params.rng.seed -= 1, a->params.rng.stream += 1;
        fp8_copies other = fp8_quantize(a);
        size_t different = 0;
        for (size_t e = 0; e < codes; ++e) different += ((uint8_t *)first.memory)[e] != ((uint8_t *)other.memory)[e];
        cr_assert(n ? different > codes / 4 : different == 0, "%d: %zu of %zu", n, different, codes);
        fp8_free(&other);
    }
    fp8_free(&first);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* ---- backward ---- */

static void copy_outputs(attention *to, const attention *from) {
    for (int m = 0; m < 2; ++m) {
        const enum tensor_id id = attention_outputs[m];
        memcpy(to->fields[id].memory, from->fields[id].memory, from->fields[id].size);
    }
}

/* With the O and L of this forward, the flag changes nothing. */
Test(fp8, backward_ignores_the_flag) {
    for (int n = 0; n < CASES + 40; ++n) {
        char name[32];
        attention_case c = case_of(n, name, sizeof name);
        c.delta = false;
        fattn_ctx *const ctx = context_of(n);
        attention *const a = attention_new(ctx, &c);
        c.flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
        attention *const b = attention_new(ctx, &c);
        attention_run(a, LIBRARY);
        attention_forward(b, LIBRARY);
        cr_assert(strncmp(a->plan.bwd_kernel, b->plan.bwd_kernel, sizeof a->plan.bwd_kernel) == 0);
        copy_outputs(b, a);
        attention_backward(b, LIBRARY);
        attention_same_bits(a, b);
        attention_free(a), attention_free(b);
        fattn_ctx_destroy(ctx);
    }
}

static size_t aligned(size_t bytes) { return (bytes + FATTNI_ALIGN - 1) / FATTNI_ALIGN * FATTNI_ALIGN; }

/* With FATTN_FP8_RENEW gradients have the bits of both passes without FATTN_FP8. O and L of the call, which forward has
   written as ever, are not read, and the workspace is what the two passes take one after the other, and theirs. */
Test(fp8, renewed_gradients_are_those_without_fp8) {
    int sinks = 0, gradients_of_lse = 0, packed = 0;
    for (int n = 0; n < CASES + 60; ++n) {
        char name[32];
        attention_case c = case_of(n, name, sizeof name);
        c.delta = false;
        fattn_ctx *const ctx = context_of(n);
        attention *const fp8 = attention_new(ctx, &c);
        c.flags |= FATTN_FP8_RENEW;
        attention *const a = attention_new(ctx, &c);
        c.flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8 | FATTN_FP8_RENEW);
        attention *const plain = attention_new(ctx, &c);
        attention_forward(fp8, LIBRARY), attention_forward(a, LIBRARY);
        attention_run(plain, LIBRARY);
        for (int m = 0; m < 2; ++m) {
            const field *const f = &a->fields[attention_outputs[m]], *const g = &fp8->fields[attention_outputs[m]];
            cr_assert(f->size == g->size && memcmp(f->memory, g->memory, f->size) == 0, "%s", name);
            memset(f->memory, 0xff, f->size);
        }
        attention_backward(a, LIBRARY);
        copy_outputs(a, plain);
        attention_same_bits(a, plain);

        const fattn_attention_plan *const p = &plain->plan, *const q = &a->plan;
        const size_t o = (size_t)fattn_tensor_numel(&a->t[T_O]) * fattn_dtype_size((fattn_dtype)a->t[T_O].dtype),
                     larger = p->fwd_workspace > p->bwd_workspace ? p->fwd_workspace : p->bwd_workspace;
        cr_assert_eq(q->fwd_workspace, fp8->plan.fwd_workspace, "%s", name);
        cr_assert_eq(q->bwd_workspace, aligned(o) + aligned(q->lse_bytes) + larger, "%s: %zu", name, q->bwd_workspace);
        cr_assert_str_eq(q->bwd_kernel, p->bwd_kernel);
        cr_assert_eq(q->saved_bytes, 0u);
        if (q->bwd_workspace) {
            a->io.workspace_bytes = q->bwd_workspace - 1;
            cr_assert_eq(fattn_attention_bwd(ctx, &a->params, &a->io), FATTN_E_WORKSPACE, "%s", name);
        }
        sinks += a->present[T_D_SINK], gradients_of_lse += a->present[T_D_LSE], packed += a->present[T_CU_Q];
        attention_free(a), attention_free(fp8), attention_free(plain);
        fattn_ctx_destroy(ctx);
    }
    cr_assert(sinks > 5 && gradients_of_lse > 5 && packed > 5, "%d %d %d", sinks, gradients_of_lse, packed);
}

/* A gradient may take the place of O, which is not read. */
Test(fp8, renewed_gradients_in_the_place_of_o) {
    const attention_case c = {.name = "in place",
                              .B = 1,
                              .Hq = 2,
                              .Sq = 70,
                              .Sk = 70,
                              .D = 64,
                              .dtype = FATTN_BF16,
                              .flags = FATTN_FP8 | FATTN_FP8_RENEW | FATTN_CAUSAL};
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = attention_new(ctx, &c), *const b = attention_new(ctx, &c);
    attention_run(a, LIBRARY), attention_forward(b, LIBRARY);
    b->io.dq = b->io.o;
    b->io.workspace = a->io.workspace;
    b->io.workspace_bytes = a->plan.bwd_workspace;
    cr_assert_eq(fattn_attention_bwd(ctx, &b->params, &b->io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(memcmp(a->t[T_DQ].data, b->t[T_O].data, 2 * 70 * 64 * 2), 0);
    b->params.flags &= ~(uint32_t)FATTN_FP8_RENEW;
    cr_assert_eq(fattn_attention_bwd(ctx, &b->params, &b->io), FATTN_E_ARG);
    attention_free(a), attention_free(b);
    fattn_ctx_destroy(ctx);
}

/* Before it has an address O overlaps nothing, not even a dq at 1 MiB, below where a larger O would end. */
Test(fp8, renewed_at_low_addresses) {
    const attention_case c = {.name = "low",
                              .B = 1,
                              .Hq = 1,
                              .Sq = 4096,
                              .Sk = 3,
                              .D = 128,
                              .dtype = FATTN_F32,
                              .flags = FATTN_FP8 | FATTN_FP8_RENEW};
    const size_t bytes = 4096 * 128 * 4;
    void *const low =
        mmap((void *)(uintptr_t)(1 << 20), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(low, MAP_FAILED);
    fattn_ctx *const ctx = attention_context(1);
    attention *const a = attention_new(ctx, &c);
    attention_run(a, LIBRARY);
    fattn_tensor dq = a->t[T_DQ];
    dq.data = low, a->io.dq = &dq;
    a->io.workspace_bytes = a->plan.bwd_workspace;
    cr_assert_eq(fattn_attention_bwd(ctx, &a->params, &a->io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(memcmp(low, a->t[T_DQ].data, bytes), 0);
    munmap(low, bytes);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* ---- determinism and memory ---- */

Test(fp8, bits_do_not_depend_on_threads) {
    static const int threads[4] = {1, 2, 3, 8};
    for (int n = 2; n < CASES; ++n) {
        attention *a[4];
        fattn_ctx *ctx[4];
        char name[32];
        const attention_case c = case_of(n, name, sizeof name);
        for (int t = 0; t < 4; ++t) {
            ctx[t] = attention_context(threads[t]);
            a[t] = attention_new(ctx[t], &c);
            attention_forward(a[t], LIBRARY);
            clear_gradients(a[t]);
            if (t) attention_same_bits(a[0], a[t]);
        }
        for (int t = 0; t < 4; ++t) attention_free(a[t]), fattn_ctx_destroy(ctx[t]);
    }
}

/* Beside the copies: what a call in F32 takes, and for each thread a tile of K and V, and O of a block. */
Test(fp8, workspace) {
    fattn_ctx *const ctx = attention_context(2);
    attention_case c = {"workspace", .B = 1, .Hq = 2, .Sq = 512, .Sk = 512, .D = 64, .Dv = 128, .dtype = FATTN_F32};
    attention *const plain = attention_new(ctx, &c);
    c.flags = FATTN_FP8;
    c.dtype = FATTN_BF16;
    attention *const a = attention_new(ctx, &c);
    attention_forward(plain, LIBRARY), attention_forward(a, LIBRARY);
    fp8_copies copies = fp8_quantize(a);
    cr_assert_eq(a->plan.fwd_workspace,
                 copies.bytes + plain->plan.fwd_workspace + 2 * (64 * (64 + 128) * 4 + 128 * 192));
    a->io.workspace_bytes = a->plan.fwd_workspace - 1;
    cr_assert_eq(fattn_attention_fwd(ctx, &a->params, &a->io), FATTN_E_WORKSPACE);
    fp8_free(&copies);
    attention_free(a), attention_free(plain);
    fattn_ctx_destroy(ctx);
}

/* A NaN or an infinity is not lost: of a row of q in its results, of k in those of the head, of v in its channel. */
Test(fp8, nan) {
    fattn_ctx *const ctx = attention_context(1);
    attention_case c = {"nan", .B = 1, .Hq = 2, .Sq = 9, .Sk = 140, .D = 64, .dtype = FATTN_BF16};
    for (int m = 0; m < 12; ++m) {
        const int n = m % 3;
        c.flags = FATTN_FP8 | (m / 3 % 2 ? FATTN_FP8_INT8 : 0u);
        attention *const a = attention_new(ctx, &c);
        const int64_t bad[4] = {0, 1, 5, 7};
        attention_set(&a->t[n], bad, m / 6 ? -INFINITY : NAN);
        attention_forward(a, LIBRARY);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t i = 0; i < 9; ++i)
                for (int64_t d = 0; d < 64; ++d) {
                    const int64_t at[4] = {0, h, i, d};
                    const bool want = h == 1 && (n == 0 ? i == 5 : n == 1 || d == 7);
                    cr_assert_eq(isnan(attention_get(&a->t[T_O], at)) != 0, want, "%d: %d %d %d", n, (int)h, (int)i,
                                 (int)d);
                    cr_assert_eq(isnan(attention_get(&a->t[T_LSE], at)) != 0, want && n != 2, "%d", n);
                }
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* Sinks at the ends of their range, with keys and without. */
Test(fp8, sinks_at_the_ends) {
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"sinks",
                              .B = 1,
                              .Hq = 3,
                              .Sq = 4,
                              .Sk = 2,
                              .D = 16,
                              .dtype = FATTN_F32,
                              .sink = true,
                              .flags = FATTN_FP8 | FATTN_CAUSAL}; /* rows 0 and 1 see no key */
    attention *const a = attention_new(ctx, &c), *const plain = attention_new(ctx, &c);
    plain->params.flags &= ~(uint32_t)FATTN_FP8;
    static const double sinks[3] = {-INFINITY, INFINITY, 0.5};
    for (int64_t h = 0; h < 3; ++h)
        attention_set(&a->t[T_SINK], &h, sinks[h]), attention_set(&plain->t[T_SINK], &h, sinks[h]);
    attention_forward(a, LIBRARY), attention_forward(plain, LIBRARY);
    for (int64_t h = 0; h < 3; ++h)
        for (int64_t i = 0; i < 4; ++i) {
            const int64_t at[4] = {0, h, i, 0};
            const double L = attention_get(&a->t[T_LSE], at), want = attention_get(&plain->t[T_LSE], at);
            cr_assert(L == want || fabs(L - want) < 0.05, "%d %d: %g, not %g", (int)h, (int)i, L, want);
            if (i < 2 || h == 1) cr_assert_eq(attention_get(&a->t[T_O], at), 0);
        }
    attention_free(a), attention_free(plain);
    fattn_ctx_destroy(ctx);
}
