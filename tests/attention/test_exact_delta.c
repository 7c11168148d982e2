/* FATTN_EXACT_DELTA: what forward saves, what backward makes of it, and how exact gradients become. */
#include "key_means.h"
#include "thinned.h"
#include "tiles.h"

#include "core/attention/o_rest.h"
#include "core/cpu/tile.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fattn_dtype narrow[2] = {FATTN_F16, FATTN_BF16};
static const int32_t algorithms[3] = {FATTN_ALGO_AUTO, FATTN_ALGO_FLASH1, FATTN_ALGO_FLASH2};
static const enum layout layouts[3] = {LAYOUT_BHSD, LAYOUT_PITCH, LAYOUT_BSHD};

/* Case n of every feature, both dtypes, the algorithms and layouts in turn. */
enum { MANY = 200 };
static attention_case case_of(int n, char *name, size_t size) {
    attention_case c = attention_mix(n);
    c = tiles_enlarge(&c, n);
    c.flags &= ~(uint32_t)FATTN_MERGE;
    c.flags |= FATTN_EXACT_DELTA;
    c.dtype = narrow[n % 2];
    c.algorithm = algorithms[n / 2 % 3];
    c.layout = layouts[n / 3 % 3];
    snprintf(name, size, "exact delta %d", n);
    c.name = name;
    return c;
}

static fattn_ctx *context_of(int n) {
    fattn_ctx *const ctx = attention_context_isa(n % 4 ? 1 : 3, FATTNI_ISA_BASELINE + n % 5);
    return ctx ? ctx : attention_context(1);
}

/* O before it was rounded, as backward will know it. */
static double exact_o(const attention *a, const int64_t *at) {
    const attention_case *const c = &a->c;
    const int64_t rows = a->t[T_O].shape[2], pitch = (c->Dv + 15) / 16 * 16;
    const int8_t *const saved = a->io.saved;
    const int rest = saved[((at[0] * c->Hq + at[1]) * rows + at[2]) * pitch + at[3]];
    const uint32_t rounded = fattni_float_bits((float)attention_get(&a->t[T_O], at));
    const int bits = c->dtype == FATTN_BF16 ? FATTNI_O_REST_BF16 : FATTNI_O_REST_F16;
    return (double)fattni_bits_float(fattni_o_exact(rounded, rest, bits));
}

/* O and L have the bits that they have without the flag, and the exact O is that of a call with an o in F32, up to half
   a unit, or one where rounding took off half a last place. A subnormal F16 knows less. */
Test(exact_delta, forward_saves_what_rounding_takes_off) {
    for (int n = 0; n < MANY; n += THINNED(11)) {
        char name[32];
        fattn_ctx *const ctx = context_of(n);
        attention_case c = case_of(n, name, sizeof name);
        attention *const got = attention_new(ctx, &c);
        attention_forward(got, LIBRARY);
        c.flags &= ~(uint32_t)FATTN_EXACT_DELTA;
        attention *const plain = attention_new(ctx, &c);
        attention_forward(plain, LIBRARY);
        c.wide = true;
        attention *const wide = attention_new(ctx, &c);
        attention_forward(wide, LIBRARY);
        attention results = *got;
        for (int m = 2; m < 7; ++m) results.present[attention_outputs[m]] = false;
        attention_same_bits(&results, plain);
        const double u = c.dtype == FATTN_BF16 ? 0x1p-16 : 0x1p-19, least = c.dtype == FATTN_BF16 ? 0x1p-126 : 0x1p-14;
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t m = 0; m < fattn_tensor_numel(&got->t[T_O]); ++m) {
            attention_index(&got->t[T_O], m, at);
            if (!attention_in_use(got, T_O, at)) continue;
            const double x = attention_get(&wide->t[T_O], at), y = attention_get(&got->t[T_O], at);
            const double z = exact_o(got, at), before = fabs(y - x), off = fabs(z - x);
            cr_assert(off <= before, "%s: o is %a, rounded %a, kept as %a", name, x, y, z);
            const bool half = before >= 255 * u * exp2(floor(log2(fabs(x)))) / 2;
            cr_assert(fabs(x) < least || off <= (half ? 2 : 1) * u * fabs(x), "%s: o is %a, rounded %a, kept as %a",
                      name, x, y, z);
        }
        attention_free(got);
        attention_free(plain);
        attention_free(wide);
        fattn_ctx_destroy(ctx);
    }
}

/* Puts the tensor into F32, in memory of its own, which is to be freed. */
static void *in_f32(attention *a, enum tensor_id id) {
    const fattn_tensor from = a->t[id];
    void *const memory = calloc((size_t)fattn_tensor_numel(&from) + 1, sizeof(float));
    a->t[id] = fattn_tensor_view(memory, FATTN_F32, FATTN_CPU, 0, from.ndim, from.shape);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&from); ++n) {
        attention_index(&from, n, at);
        attention_set(&a->t[id], at, attention_get(&from, at) * (1 + (double)(n % 63) * 0x1p-18)); /* not of 16 bits */
    }
    return memory;
}

/* The same bits as without the flag, from the exact O in F32. */
Test(exact_delta, backward_is_that_of_the_exact_o) {
    for (int n = 0; n < MANY; n += THINNED(11)) {
        char name[32];
        fattn_ctx *const ctx = context_of(n);
        attention_case c = case_of(n, name, sizeof name);
        c.delta = false;
        c.sum_d_o = n % 7 == 0;
        const bool wide_d_o = n % 5 == 0;
        attention *const got = attention_new(ctx, &c);
        c.flags &= ~(uint32_t)FATTN_EXACT_DELTA;
        attention *const want = attention_new(ctx, &c);
        void *const memory[3] = {wide_d_o ? in_f32(got, T_D_O) : NULL, wide_d_o ? in_f32(want, T_D_O) : NULL,
                                 in_f32(want, T_O)};
        attention_run(got, LIBRARY);
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t m = 0; m < fattn_tensor_numel(&got->t[T_O]); ++m) {
            attention_index(&got->t[T_O], m, at);
            attention_set(&want->t[T_O], at, attention_in_use(got, T_O, at) ? exact_o(got, at) : NAN);
        }
        cr_assert_eq(fattn_tensor_copy(ctx, &want->t[T_LSE], &got->t[T_LSE]), FATTN_OK);
        attention_backward(want, LIBRARY);
        want->present[T_O] = false;
        attention_same_bits(got, want);
        attention_free(got);
        attention_free(want);
        for (int m = 0; m < 3; ++m) free(memory[m]);
        fattn_ctx_destroy(ctx);
    }
}

static void check_no_effect(const attention_case *given, bool saves) {
    attention_case c = *given;
    fattn_ctx *const ctx = attention_context(1);
    attention *const without = attention_new(ctx, &c);
    c.flags |= FATTN_EXACT_DELTA;
    attention *const with = attention_new(ctx, &c);
    attention_run(without, LIBRARY);
    attention_run(with, LIBRARY);
    attention_same_bits(with, without);
    const size_t saved = without->plan.saved_bytes;
    if (!saves) cr_assert_eq(with->plan.saved_bytes, saved, "%s: %zu bytes", c.name, with->plan.saved_bytes);
    cr_assert_eq(with->plan.fwd_workspace, without->plan.fwd_workspace);
    cr_assert_eq(with->plan.bwd_workspace, without->plan.bwd_workspace);
    attention_free(with);
    attention_free(without);
    fattn_ctx_destroy(ctx);
}

#define SHAPE .B = 2, .Hq = 2, .Hkv = 1, .Sq = 70, .Sk = 90, .D = 24, .Dv = 40
Test(exact_delta, has_no_effect_on_wide_o_and_a_given_delta) {
    for (int n = 0; n < 4; ++n) {
        const int32_t algorithm = n; /* of fattn_algorithm */
        check_no_effect(&(attention_case){"f64", SHAPE, .dtype = FATTN_F64, .algorithm = algorithm}, false);
        check_no_effect(&(attention_case){"f32", SHAPE, .dtype = FATTN_F32, .algorithm = algorithm}, false);
        check_no_effect(&(attention_case){"wide", SHAPE, .dtype = FATTN_BF16, .wide = true, .algorithm = algorithm},
                        false);
        check_no_effect(&(attention_case){"merge", SHAPE, .dtype = FATTN_F16, .wide = true, .flags = FATTN_MERGE,
                                          .algorithm = algorithm},
                        false);
        if (algorithm == FATTN_ALGO_STANDARD) continue;
        check_no_effect(&(attention_case){"delta", SHAPE, .dtype = FATTN_BF16, .delta = true, .algorithm = algorithm},
                        true);
    }
}

static size_t saved_bytes(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    attention_free(a);
    return plan.saved_bytes;
}

/* Rows of Dv bytes, each rounded up to 16, of o's buffer. */
Test(exact_delta, saved_bytes) {
    fattn_ctx *const ctx = attention_context(2);
    static const int64_t Dv[] = {1, 16, 17, 64, 255};
    for (int n = 0; n < 5; ++n) {
        attention_case c = {"sizes",
                            .B = 3,
                            .Hq = 4,
                            .Hkv = 2,
                            .Sq = 11,
                            .Sk = 5,
                            .D = 8,
                            .Dv = Dv[n],
                            .dtype = narrow[n % 2],
                            .flags = FATTN_EXACT_DELTA};
        const size_t row = (size_t)(Dv[n] + 15) / 16 * 16;
        cr_assert_eq(saved_bytes(ctx, &c), 3 * 4 * 11 * row);
        c.delta = true; /* forward does not know */
        cr_assert_eq(saved_bytes(ctx, &c), 3 * 4 * 11 * row);
        c.delta = false;
        c.lengths = LENGTHS_PADDED;
        cr_assert_eq(saved_bytes(ctx, &c), 3 * 4 * 11 * row);
        c.lengths = LENGTHS_PACKED, c.length_q[0] = 11, c.length_q[2] = 3;
        attention *const a = attention_new(ctx, &c);
        const size_t rows = (size_t)a->t[T_O].shape[2];
        attention_free(a);
        cr_assert_eq(saved_bytes(ctx, &c), 4 * rows * row);
        c.Sq = 0, c.length_q[0] = c.length_q[2] = 0, c.lengths = LENGTHS_NONE;
        cr_assert_eq(saved_bytes(ctx, &c), 0);
    }
    fattn_ctx_destroy(ctx);
}

/* Memory that is missing, too small or not aligned, and the algorithm that has P there. */
Test(exact_delta, errors) {
    fattn_ctx *const ctx = attention_context(1);
    attention_case c = {"errors", SHAPE, .dtype = FATTN_BF16, .flags = FATTN_EXACT_DELTA};
    attention *const a = attention_new(ctx, &c);
    attention_run(a, LIBRARY);
    void *const saved = a->io.saved;
    const size_t needed = 2 * 2 * 70 * 48;
    cr_assert_eq(a->io.saved_bytes, needed);
    typedef fattn_status pass(fattn_ctx *, const fattn_attention_params *, const fattn_attention_io *);
    pass *const passes[2] = {fattn_attention_fwd, fattn_attention_bwd};
    for (int n = 0; n < 2; ++n) {
        a->io.workspace_bytes = n ? a->plan.bwd_workspace : a->plan.fwd_workspace;
        a->io.saved = NULL;
        cr_assert_eq(passes[n](ctx, &a->params, &a->io), FATTN_E_WORKSPACE);
        cr_assert_str_eq(fattn_ctx_error(ctx), "saved: 13440 bytes needed, 0 given (NULL)");
        a->io.saved = saved, a->io.saved_bytes = needed - 1;
        cr_assert_eq(passes[n](ctx, &a->params, &a->io), FATTN_E_WORKSPACE);
        cr_assert_str_eq(fattn_ctx_error(ctx), "saved: 13440 bytes needed, 13439 given");
        a->io.saved = (char *)saved + 16, a->io.saved_bytes = needed;
        cr_assert_eq(passes[n](ctx, &a->params, &a->io), FATTN_E_WORKSPACE);
        cr_assert(strstr(fattn_ctx_error(ctx), "is not aligned to 256 bytes"), "%s", fattn_ctx_error(ctx));
        a->io.saved = saved;
        a->params.algorithm = FATTN_ALGO_STANDARD;
        cr_assert_eq(passes[n](ctx, &a->params, &a->io), FATTN_E_UNSUPPORTED);
        cr_assert(strstr(fattn_ctx_error(ctx), "standard has EXACT_DELTA only with an o in f32"), "%s",
                  fattn_ctx_error(ctx));
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), FATTN_E_UNSUPPORTED);
        a->params.algorithm = FATTN_ALGO_AUTO;
        cr_assert_eq(passes[n](ctx, &a->params, &a->io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    }
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* ---- accuracy ---- */

static const attention_case accuracy_cases[] = {
    {"full", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520},
    {"full", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520},
    {"causal, GQA", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 400, .Sk = 400, .flags = FATTN_CAUSAL},
    {"window", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520, .flags = FATTN_WINDOW, .window_left = 150, .window_right = 90},
    {"sink, d_lse", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520, .sink = true, .d_lse = true},
    {"dropout", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520, .dropout_p = 0.2f},
    {"softcap", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520, .softcap = 50},
    {"packed", .B = 3, .Hq = 2, .Sq = 200, .Sk = 300, .lengths = LENGTHS_PACKED, .length_q = {200, 0, 150},
     .length_k = {300, 40, 260}, .sink = true},
};
enum { ACCURACY_CASES = sizeof accuracy_cases / sizeof *accuracy_cases };

/* A rest of half a unit, on average, instead of a rounding by 128 units: the part of the error that comes from delta is
   256 times smaller, and adds, squared, to that of a call without means, which is mostly the last rounding of dQ and
   dK. `of_p`: in a row with few keys forward's roundings of P, half of 2^-9 (F16: 2^-12) or less, do not sum to 0, and
   V's mean multiplies them. */
static void check_gradient(const char *what, double none, double with, double without, double of_p) {
    cr_assert(with <= 1.5 * hypot(hypot(none, without / 256), of_p),
              "%s: off by %.2e, without means by %.2e, without the flag %.2e", what, with, none, without);
}

/* The rounded O, without the flag. A mean of 10 in V gives O a last place of 1/16 (F16: 1/128) and delta an error of
   1/16 sqrt(Dv / 12) beside a dP - delta of sqrt(Dv): 1.8 % of each row of dS, of dK as much, and of dQ where K has no
   mean; their last rounding is 0.17 %. A dropout of 0.2 makes dP - delta 5 times larger, for dropped and kept values
   differ by that mean: 0.36 %, added, squared, to 0.17 %, or where P and dS are rounded, too, to 0.24 %. */
static void check_without(const attention_case *c, double key, double value, bool rounds, gradient_errors none,
                          gradient_errors without) {
    const double more = rounds ? 1.5 : 2;
    if (value == 10) cr_assert(without.dk > more * none.dk, "%s: dk %.2e, %.2e", c->name, without.dk, none.dk);
    if (value == 10 && key == 1)
        cr_assert(without.dq > more * none.dq, "%s: dq %.2e, %.2e", c->name, without.dq, none.dq);
}

Test(exact_delta, means_of_keys_and_values_cost_nothing) {
    fattn_ctx *const ctx = attention_context(2);
    static const double keys[] = {1, 3, 10}, values[] = {0.5, 10};
    for (int n = 0; n < ACCURACY_CASES; n += THINNED(3)) {
        attention_case c = accuracy_cases[n];
        c.dtype = narrow[n % 2];
        c.D = n % 3 ? 64 : 40;
        c.algorithm = n % 4 < 2 ? FATTN_ALGO_FLASH2 : FATTN_ALGO_FLASH1;
        const attention_case rounded = c;
        c.flags |= FATTN_EXACT_DELTA;
        const gradient_errors none = key_means_errors(ctx, &c, 0, 0, LIBRARY, NULL);
        for (int m = 0; m < 6; m += THINNED(5)) {
            const double key = keys[m / 2], value = values[m % 2];
            const gradient_errors with = key_means_errors(ctx, &c, key, value, LIBRARY, NULL);
            const gradient_errors without = key_means_errors(ctx, &rounded, key, value, LIBRARY, NULL);
            char what[96];
            snprintf(what, sizeof what, "%s %s, means of %g in K and %g in V", c.name, fattn_dtype_name(c.dtype), key,
                     value);
            const bool rounds = fattni_cpu_kernels_of(ctx, c.dtype)->round;
            const double of_p = rounds ? value * (c.dtype == FATTN_F16 ? 0x1p-13 : 0x1p-10) : 0;
            check_gradient(what, none.dq, with.dq, without.dq, of_p);
            check_gradient(what, none.dk, with.dk, without.dk, of_p);
            check_without(&rounded, key, value, rounds, none, without);
        }
    }
    fattn_ctx_destroy(ctx);
}
