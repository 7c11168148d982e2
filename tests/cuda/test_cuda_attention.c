/* The CUDA kernels against the fp64 reference (case_checks.h): features, shapes, biases, keys with means, layouts. Few
   rows: test_cuda_few_rows.c. */
#include "call.h"
#include "case_checks.h"
#include "contexts.h"
#include "device.h"
#include "key_means.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

Test(cuda_attention, features, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < attention_feature_count; ++n)
        for (int k = 0; k < 4 && mine(n); ++k) {
            attention_case c = attention_features[n];
            if (c.lengths == LENGTHS_NONE && k >= 2) { /* more rows than one block */
                c.Sq = c.Sq ? c.Sq * 29 + 5 : 0;
                c.Sk = c.Sk ? c.Sk * 23 + 7 : 0;
                c.window_left *= 20, c.window_right *= 20;
            }
            c.D = c.Dv = dims[(n + k) % 10];
            if (k % 2) c.layout = n % 2 ? LAYOUT_BSHD : LAYOUT_PITCH;
            check_real(&c, k % 2 ? FATTN_F64 : FATTN_F32);
            c.sum_d_o = false;
            check(cpu, &c, (n + k) % 2 ? FATTN_BF16 : FATTN_F16);
            if (k % 2 == n % 2) check_tf32(cpu, &c);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

Test(cuda_attention, shapes, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW};
    for (int n = 0; n < attention_shape_count; ++n)
        for (int k = 0; k < 4 && mine(n); ++k) {
            const attention_case c = {.name = "shape",
                                      .B = 1 + n % 2,
                                      .Hq = 2 + 2 * (n % 2),
                                      .Hkv = 2,
                                      .Sq = attention_shapes[n].Sq,
                                      .Sk = attention_shapes[n].Sk,
                                      .D = dims[(n + 3 * k) % 10],
                                      .Dv = dims[(n + 5 * k) % 10],
                                      .flags = masks[k],
                                      .window_left = n,
                                      .window_right = n / 2,
                                      .layout = (enum layout)(n % 2),
                                      .d_lse = k == 2};
            check(cpu, &c, (n + k) % 3 ? FATTN_BF16 : FATTN_F16);
            check_real(&c, (n + k) % 2 ? FATTN_F64 : FATTN_F32);
            if (k == n % 4) check_tf32(cpu, &c);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* A bias that Hopper's biased kernels load by TMA, and for others, whose rows are no multiple of 16 bytes; shared by
   sequences or heads, with and without its gradient's sums. */
Test(cuda_attention, biases, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const attention_case cases[] = {
        {.name = "bias", .B = 1, .Hq = 2, .Sq = 300, .Sk = 520, .bias = BIAS},
        {.name = "bias over b", .B = 3, .Hq = 2, .Hkv = 1, .Sq = 261, .Sk = 264, .bias = BIAS | BIAS_OVER_B},
        {.name = "bias over b and h", .B = 2, .Hq = 4, .Sq = 130, .Sk = 72, .bias = BIAS | BIAS_OVER_B | BIAS_OVER_H},
        {.name = "bias, causal", .B = 2, .Hq = 2, .Sq = 400, .Sk = 336, .flags = FATTN_CAUSAL, .bias = BIAS},
        {.name = "bias, window",
         .B = 2,
         .Hq = 1,
         .Sq = 500,
         .Sk = 504,
         .flags = FATTN_WINDOW,
         .window_left = 100,
         .window_right = 60,
         .bias = BIAS | BIAS_OVER_B},
        {.name = "bias, deterministic",
         .B = 1,
         .Hq = 2,
         .Sq = 300,
         .Sk = 304,
         .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
         .bias = BIAS},
        {.name = "bias, sink, padded",
         .B = 3,
         .Hq = 2,
         .Hkv = 1,
         .Sq = 280,
         .Sk = 400,
         .flags = FATTN_CAUSAL,
         .lengths = LENGTHS_PADDED,
         .length_q = {280, 0, 131},
         .length_k = {71, 40, 400},
         .sink = true,
         .bias = BIAS | BIAS_OVER_B},
        {.name = "bias, packed",
         .B = 3,
         .Hq = 2,
         .Sq = 300,
         .Sk = 320,
         .flags = FATTN_CAUSAL,
         .lengths = LENGTHS_PACKED,
         .length_q = {300, 0, 133},
         .length_k = {171, 4, 320},
         .bias = BIAS},
        {.name = "bias, d_lse", .B = 1, .Hq = 1, .Sq = 200, .Sk = 160, .bias = BIAS, .d_lse = true},
        {.name = "bias of odd rows", .B = 2, .Hq = 2, .Sq = 300, .Sk = 301, .bias = BIAS | BIAS_OVER_B},
        {.name = "bias of one row", .B = 2, .Hq = 2, .Sq = 300, .Sk = 304, .bias = BIAS | BIAS_OVER_I},
        {.name = "bias of one column", .B = 2, .Hq = 2, .Sq = 300, .Sk = 304, .bias = BIAS | BIAS_OVER_J},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n)
        for (int k = 0; k < 6 && mine((int)n); ++k) {
            attention_case c = cases[n];
            c.D = (const int64_t[]){64, 128, 40, 96, 256, 192}[k], c.Dv = k == 2 ? 64 : k == 5 ? 128 : c.D;
            check(cpu, &c, (n + (size_t)k) % 2 ? FATTN_BF16 : FATTN_F16);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Also the kernels of sm_80, and TF32's: STANDARD leaves the mean in. */
Test(cuda_attention, keys_with_means, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0), *const sm80 = device_context(80);
    static const int64_t head_dims[] = {64, 128, 80, 256, 96, 192};
    for (int device = 0; device < 2; ++device) {
        fattn_ctx *const on = device ? sm80 : ctx;
        device_use(on);
        for (int n = 0; n < key_means_case_count; ++n)
            for (int k = 0; k < 6 && mine(n); ++k) {
                attention_case c = key_means_cases[n];
                c.D = c.Dv = head_dims[k];
                if (k == 5) c.Dv = 128; /* kernels of their own */
                c.dtype = half_type((n + k) % 3);
                key_means_check(cpu, &c, 1, ON_DEVICE, device_run);
                c.dtype = FATTN_F32, c.flags |= FATTN_TF32;
                if (on == sm80 && k == n % 6 && is_fused(on, &c)) key_means_check(cpu, &c, 1, ON_DEVICE, device_run);
            }
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Hopper's kernels that find means beside other work, those of short rows, the kernel that finds them before, and those
   of sm_80. */
Test(cuda_attention, means_that_rows_do_not_see, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0), *const sm80 = device_context(80);
    static const int64_t head_dims[] = {64, 128, 80, 256, 192};
    for (int n = 0; n < 2 * hidden_means_case_count; ++n)
        for (int k = 0; k < 5 && mine(n); ++k) {
            attention_case c = hidden_means_cases[n / 2].c;
            device_use(n % 2 ? sm80 : ctx);
            c.D = head_dims[k], c.Dv = k == 4 ? 128 : c.D;
            for (int m = 0; m < 4; ++m) {
                c.dtype = half_type(m % 2);
                c.Hkv = m / 2 + 1; /* 2: as kernels of short rows have them */
                key_means_check_hidden(cpu, &c, &hidden_means_cases[n / 2].x, ON_DEVICE, device_run);
            }
        }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Hopper's kernels of short rows. On three SMs a CTA has several heads. */
Test(cuda_attention, short_rows, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .arch_cap = call_arch(), .sm_limit = 3};
    fattn_ctx *few;
    cr_assert_eq(fattn_ctx_create(&o, &few), FATTN_OK);
    device_use(few);
    static const int64_t rows[] = {1, 20, 128, 129, 250, 300, 512, 640, 768}, head_dims[] = {64, 32, 40, 128, 104};
    for (int n = 0; n < 9; ++n)
        for (int k = 0; k < 10 && mine(n); ++k) {
            const int64_t D = head_dims[k % 5];
            attention_case c = {.name = k < 5 ? "short causal rows" : "short rows",
                                .B = 2,
                                .Hq = 3,
                                .Hkv = 3,
                                .Sq = rows[n],
                                .Sk = rows[n],
                                .D = D,
                                .Dv = D,
                                .flags = (k < 5 ? FATTN_CAUSAL : 0) | (k % 3 == 1 ? FATTN_DETERMINISTIC : 0) |
                                         ((n + k) % 3 ? FATTN_EXACT_DELTA : 0),
                                .layout = n % 2 ? LAYOUT_BSHD : LAYOUT_PITCH};
            check(cpu, &c, (n + k) % 2 ? FATTN_F16 : FATTN_BF16);
            c.dtype = half_type(n % 2 == 0);
            if (rows[n] >= 128) key_means_check(cpu, &c, 1, ON_DEVICE, device_run);
        }
    fattn_ctx_destroy(few);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

Test(cuda_attention, long_keys_with_means, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
#define LONG .B = 1, .Hq = 2, .Hkv = 1, .Sq = 200, .Sk = 8200
    static const attention_case cases[] = {
        {"full", LONG},
        {"causal", LONG, .flags = FATTN_CAUSAL},
        {"causal, d_lse", LONG, .flags = FATTN_CAUSAL, .d_lse = true},
        {"window, sink", LONG, .flags = FATTN_WINDOW, .window_left = 5000, .window_right = -1, .sink = true},
        {"ALiBi, dropout, d_lse, deterministic", LONG, .alibi = true, .dropout_p = 0.1f, .d_lse = true,
         .flags = FATTN_DETERMINISTIC},
        {"padded", LONG, .lengths = LENGTHS_PADDED, .length_q = {150}, .length_k = {8130}, .sink = true},
        {"softcap, sink, d_lse", LONG, .softcap = 30, .sink = true, .d_lse = true},
        {"softcap, window, dropout, padded", LONG, .flags = FATTN_WINDOW, .window_left = 5000, .window_right = 10,
         .softcap = 50, .dropout_p = 0.1f, .lengths = LENGTHS_PADDED, .length_q = {150}, .length_k = {8130}},
    };
    static const int64_t head_dims[] = {64, 128, 80, 256};
    for (int n = 0; n < 8; ++n)
        for (int k = 0; k < 4 && mine(n); ++k) {
            attention_case c = cases[n];
            c.D = c.Dv = head_dims[k];
            c.dtype = half_type((n + k) % 3);
            key_means_check(cpu, &c, 1, ON_DEVICE, device_run);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* How Hopper's kernels share out work on 132 SMs: a full mask whose last key blocks are divided, heads in groups that
   are no power of two, key blocks in several parts for each SM, of rows or of heads, or from not the longest on, and in
   turns upwards and downwards. */
Test(cuda_attention, shares_of_work, .timeout = 900) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const attention_case cases[] = {
        {"last wave", .B = 2, .Hq = 8, .Hkv = 8, .Sq = 1000, .Sk = 1100},
        {"last wave, groups", .B = 1, .Hq = 16, .Hkv = 8, .Sq = 600, .Sk = 2300},
        {"last wave, ALiBi, dropout", .B = 2, .Hq = 8, .Hkv = 8, .Sq = 1000, .Sk = 1100, .alibi = true,
         .dropout_p = 0.1f},
        {"last wave, softcap, sink", .B = 2, .Hq = 8, .Hkv = 8, .Sq = 1000, .Sk = 1100, .softcap = 20, .sink = true},
        {"last wave, dL, added", .B = 1, .Hq = 23, .Hkv = 23, .Sq = 800, .Sk = 800, .d_lse = true,
         .flags = FATTN_ACC_DQ},
        {"last wave, deterministic", .B = 2, .Hq = 8, .Hkv = 8, .Sq = 1000, .Sk = 1100, .flags = FATTN_DETERMINISTIC},
        {"causal from the top left", .B = 1, .Hq = 23, .Hkv = 23, .Sq = 1000, .Sk = 800,
         .flags = FATTN_CAUSAL_TOP_LEFT},
        {"9 heads", .B = 1, .Hq = 9, .Hkv = 9, .Sq = 300, .Sk = 4200, .flags = FATTN_CAUSAL},
        {"25 heads", .B = 1, .Hq = 25, .Hkv = 25, .Sq = 130, .Sk = 4200, .flags = FATTN_CAUSAL},
        {"25 heads, deterministic", .B = 5, .Hq = 5, .Hkv = 5, .Sq = 700, .Sk = 700,
         .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC},
        {"seven heads of a group", .B = 1, .Hq = 28, .Hkv = 4, .Sq = 1000, .Sk = 1000, .flags = FATTN_CAUSAL},
        {"eight heads of a group", .B = 1, .Hq = 16, .Hkv = 2, .Sq = 1500, .Sk = 1500, .flags = FATTN_CAUSAL},
        {"five heads of a group, sink, dL", .B = 2, .Hq = 10, .Hkv = 2, .Sq = 1200, .Sk = 1200, .sink = true,
         .d_lse = true, .flags = FATTN_CAUSAL},
        {"groups turn", .B = 1, .Hq = 56, .Hkv = 28, .Sq = 130, .Sk = 1300, .flags = FATTN_CAUSAL},
        {"groups, dropout, added", .B = 2, .Hq = 36, .Hkv = 12, .Sq = 400, .Sk = 1200, .dropout_p = 0.2f,
         .flags = FATTN_CAUSAL | FATTN_ACC_DQ},
        {"another order", .B = 3, .Hq = 11, .Hkv = 11, .Sq = 1140, .Sk = 1150, .flags = FATTN_CAUSAL},
        {"another order, dL, added", .B = 1, .Hq = 44, .Hkv = 44, .Sq = 1000, .Sk = 1000, .d_lse = true,
         .flags = FATTN_CAUSAL | FATTN_ACC_DQ},
        {"groups, the last in parts", .B = 1, .Hq = 60, .Hkv = 30, .Sq = 1400, .Sk = 1400, .flags = FATTN_CAUSAL},
        {"parts of two heads, the first of one", .B = 1, .Hq = 45, .Hkv = 5, .Sq = 800, .Sk = 800,
         .flags = FATTN_CAUSAL},
        {"groups turn, narrow heads", .B = 1, .Hq = 56, .Hkv = 28, .Sq = 130, .Sk = 1300, .flags = FATTN_CAUSAL},
        {"parts of two heads, sink", .B = 1, .Hq = 45, .Hkv = 5, .Sq = 800, .Sk = 800, .sink = true,
         .flags = FATTN_CAUSAL},
    };
    static const int64_t head_dims[][2] = {{64, 64}, {128, 128}, {192, 128}, {80, 80}};
    for (int n = 0; n < (int)(sizeof cases / sizeof *cases); ++n)
        for (int k = 0; k < 2 && mine(n); ++k) {
            attention_case c = cases[n];
            c.D = head_dims[(n + k) % 4][0], c.Dv = head_dims[(n + k) % 4][1];
            check(cpu, &c, half_type((n + k) % 3));
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Packed sequences that are long on average: Hopper's backward prepares their rows and finishes dQ in one kernel. */
Test(cuda_attention, long_packed_sequences, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
#define PACKED .lengths = LENGTHS_PACKED
    static const attention_case cases[] = {
        {"two", .B = 2, .Hq = 2, .Hkv = 1, .Sq = 1500, .Sk = 900, PACKED, .length_q = {1500, 600},
         .length_k = {500, 900}},
        {"eight heads of a group", .B = 1, .Hq = 8, .Hkv = 1, .Sq = 1030, .Sk = 400, PACKED, .length_q = {1030},
         .length_k = {400}, .flags = FATTN_CAUSAL},
        {"an empty one, sink", .B = 3, .Hq = 3, .Hkv = 3, .Sq = 2200, .Sk = 700, PACKED, .length_q = {900, 0, 2200},
         .length_k = {700, 50, 600}, .flags = FATTN_CAUSAL, .sink = true},
        {"window, deterministic", .B = 2, .Hq = 2, .Hkv = 1, .Sq = 1500, .Sk = 1500, PACKED, .length_q = {601, 1500},
         .length_k = {601, 1500}, .flags = FATTN_WINDOW | FATTN_DETERMINISTIC, .window_left = 300, .window_right = 0},
        {"without keys, d_lse", .B = 2, .Hq = 1, .Hkv = 1, .Sq = 1600, .Sk = 800, PACKED, .length_q = {1600, 500},
         .length_k = {0, 800}, .d_lse = true},
    };
    static const int64_t head_dims[] = {64, 128, 40, 104};
    for (int n = 0; n < 5; ++n)
        for (int k = 0; k < 2 && mine(n); ++k) {
            attention_case c = cases[n];
            c.D = c.Dv = head_dims[n % 2 * 2 + k];
            check(cpu, &c, half_type((n + k) % 3));
            c.dtype = half_type((n + k) % 3);
            if (n < 4) key_means_check(cpu, &c, 1, ON_DEVICE, device_run);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* FATTN_EXACT_DELTA: means of K and V cost neither dQ nor dK anything, but what forward's roundings of P leave in O:
   of a row with few keys they do not sum to 0, and V's mean multiplies them, half of 2^-9 (F16: 2^-12) or less. Without
   the flag O's own rounding does that in every row. */
static void check_exact_delta(fattn_ctx *cpu, const attention_case *c) {
    static const double means[4][2] = {{1, 0.5}, {3, 0.5}, {0, 10}, {10, 10}};
    attention_case exact = *c;
    exact.flags |= FATTN_EXACT_DELTA;
    const gradient_errors none = key_means_errors(cpu, &exact, 0, 0, ON_DEVICE, device_run);
    for (int m = 0; m < 4; ++m) {
        const gradient_errors x = key_means_errors(cpu, &exact, means[m][0], means[m][1], ON_DEVICE, device_run);
        const double of_p = means[m][1] * (c->dtype == FATTN_BF16 ? 0x1p-10 : 0x1p-13);
        cr_assert(x.dq <= 1.5 * hypot(none.dq, of_p) && x.dk <= 1.5 * hypot(none.dk, of_p),
                  "%s %s, D %d: with means of %g in K and %g in V dq is off by %.2e, dk by %.2e, without by %.2e, %.2e",
                  c->name, fattn_dtype_name(c->dtype), (int)c->D, means[m][0], means[m][1], x.dq, x.dk, none.dq,
                  none.dk);
    }
    const gradient_errors rounded = key_means_errors(cpu, c, 0, 10, ON_DEVICE, device_run);
    cr_assert(rounded.dq > 1.5 * none.dq && rounded.dk > 1.5 * none.dk, "%s: dq %.2e, %.2e, dk %.2e, %.2e", c->name,
              rounded.dq, none.dq, rounded.dk, none.dk);
}

Test(cuda_attention, exact_delta, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0), *const sm80 = device_context(80);
    static const int64_t head_dims[] = {64, 128, 80, 256, 96};
    for (int device = 0; device < 2; ++device) {
        device_use(device ? sm80 : ctx);
        for (int n = 0; n < key_means_case_count; ++n)
            for (int k = 0; k < 5 && mine(n); ++k) {
                attention_case c = key_means_cases[n];
                if (c.flags & FATTN_ACC_DQ) continue; /* dq is then as exact as what was there */
                c.D = c.Dv = head_dims[k];
                if (n == 0 && k == 1) c.Dv = 100; /* rows of other sizes */
                c.dtype = half_type((n + k) % 3);
                if (n % 4 == 0 && k == 0) c.algorithm = FATTN_ALGO_FLASH1;
                check_exact_delta(cpu, &c);
            }
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

Test(cuda_attention, mixtures, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 500; ++n) {
        if (!mine(n)) continue;
        attention_case c = attention_mix(n);
        char name[32];
        snprintf(name, sizeof name, "mix %d", n);
        c.name = name;
        const int64_t factor = 1 + n % 3 * 13;
        c.Sq *= factor, c.Sk *= factor;
        for (int b = 0; b < MAX_SEQUENCES; ++b) c.length_q[b] *= (int32_t)factor, c.length_k[b] *= (int32_t)factor;
        const double D = (double)c.D;
        c.D = dims[n % 10], c.Dv = dims[(n / 10) % 10];
        if (c.scale > 0) /* keeps scores at the size that the bounds assume */
            c.scale *= (float)fmin(1, sqrt(D / (double)c.D));
        check(cpu, &c, n % 2 ? FATTN_BF16 : FATTN_F16);
        check_real(&c, n % 2 ? FATTN_F64 : FATTN_F32);
        if (n % 3 == 0) check_tf32(cpu, &c);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Head dims of which V has another kernel width than Q and K, or the same: Hopper's 192. */
Test(cuda_attention, narrow_v, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t widths[][2] = {{192, 128}, {192, 192}, {136, 72}, {192, 64}, {128, 192}, {160, 160}};
    static const int64_t rows[][2] = {{300, 300}, {129, 700}, {1100, 450}, {64, 113}};
    for (int n = 0; n < attention_feature_count; ++n)
        for (int k = 0; k < 4 && mine(n); ++k) {
            attention_case c = attention_features[n];
            if (c.lengths == LENGTHS_NONE) {
                if (c.Sq) c.Sq = rows[k][0];
                if (c.Sk) c.Sk = rows[k][1];
                c.window_left *= 20, c.window_right *= 20;
            }
            c.D = widths[(n + k) % 6][0], c.Dv = widths[(n + k) % 6][1];
            if (k % 2) c.layout = LAYOUT_BSHD;
            c.sum_d_o = false;
            check(cpu, &c, n % 2 ? FATTN_BF16 : FATTN_F16);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Causal, of many more rows than keys: whole row blocks that see none. */
Test(cuda_attention, rows_without_keys, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t widths[][2] = {{64, 64}, {128, 128}, {256, 256}, {80, 80}, {192, 128}, {128, 60}, {64, 20}};
    static const int64_t rows[][2] = {{1300, 300}, {700, 1}, {515, 130}};
    for (int n = 0; n < 42; ++n) {
        if (!mine(n)) continue;
        const attention_case c = {.name = "rows without keys",
                                  .B = 2,
                                  .Hq = 6,
                                  .Hkv = 2,
                                  .Sq = rows[n / 7 % 3][0],
                                  .Sk = rows[n / 7 % 3][1],
                                  .D = widths[n % 7][0],
                                  .Dv = widths[n % 7][1],
                                  .layout = n % 2 ? LAYOUT_BSHD : LAYOUT_BHSD,
                                  .flags = FATTN_CAUSAL,
                                  .d_lse = n % 2};
        check(cpu, &c, half_type(n / 2 % 2));
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Slices of one [B,S,3,H,D], in and out, and rows that lie last to first. */
Test(cuda_attention, layouts, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F32, FATTN_F16, FATTN_F64};
    for (int n = 0; n < 24; ++n) {
        attention_case c = {.name = "slices of qkv",
                            .B = 2,
                            .Hq = 3,
                            .Sq = 131,
                            .Sk = 131,
                            .D = dims[n / 4],
                            .layout = LAYOUT_QKV,
                            .sink = n % 3 == 0,
                            .flags = n % 2 ? FATTN_CAUSAL : FATTN_ACC_DQ | FATTN_ACC_DV};
        for (int k = 0; k < 2; ++k) {
            if (n % 4 == 1) check_tf32(cpu, &c);
            if (n % 4 == 1 || n % 4 == 3)
                check_real(&c, dtypes[n % 4]);
            else
                check(cpu, &c, dtypes[n % 4]);
            c.name = "reversed", c.layout = LAYOUT_REVERSED;
        }
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* No tensor map can have these rows of o, which Hopper's kernels load by TMA: of heads that a CTA has whole, and of
   others. */
Test(cuda_attention, o_reversed, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t rows[] = {131, 384, 1000};
    static const int64_t head_dims[] = {64, 128, 80, 256};
    for (int n = 0; n < 24; ++n) {
        if (!mine(n)) continue;
        const int64_t N = rows[n / 8], D = head_dims[n / 2 % 4];
        const attention_case c = {.name = "o reversed",
                                  .B = 1 + n / 8 % 2,
                                  .Hq = 3,
                                  .Sq = N,
                                  .Sk = N,
                                  .D = D,
                                  .Dv = D,
                                  .layout = LAYOUT_REVERSED_O,
                                  .flags = n % 2 ? FATTN_CAUSAL : 0};
        check(cpu, &c, n / 2 % 2 ? FATTN_F16 : FATTN_BF16);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Backward calls that follow each other without a wait, with one workspace, and launches of a graph of them: kernels
   start before those before them have ended. Counters zeroed by a kernel, and of many heads by a memset. */
Test(cuda_attention, calls_in_a_row, .timeout = 200) {
    static const int64_t head_dims[] = {64, 128, 256};
    fattn_ctx *const ctx = device_or_skip();
    for (int n = 0; n < 12; ++n) {
        if (!mine(n)) continue;
        const bool many = n / 3 % 2;
        const attention_case c = {.name = "in a row",
                                  .B = many ? 64 : 1,
                                  .Hq = many ? 20 : 3,
                                  .Sq = many ? 150 : 1000,
                                  .Sk = many ? 150 : 1000,
                                  .D = head_dims[n % 3],
                                  .Dv = head_dims[n % 3],
                                  .dtype = half_type(n % 2),
                                  .flags = FATTN_DETERMINISTIC | (n / 6 ? FATTN_CAUSAL : 0)};
        call *const x = call_new(ctx, &c);
        fattn_graph *g;
        call_run(x);
        const uint64_t first = call_bits(x, CALL_DQ, CALL_DV);
        for (int k = 0; k < 20; ++k) call_run(x);
        cr_assert_eq(call_bits(x, CALL_DQ, CALL_DV), first, "%s, case %d", x->plan.bwd_kernel, n);
        cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK, "%s", fattn_ctx_error(ctx));
        for (int k = 0; k < 3; ++k) call_run(x);
        cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
        for (int k = 0; k < 3; ++k) {
            call_fill(x, CALL_DQ, NAN), call_fill(x, CALL_DK, NAN), call_fill(x, CALL_DV, NAN);
            cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(call_bits(x, CALL_DQ, CALL_DV), first, "%s, case %d, launch %d", x->plan.bwd_kernel, n, k);
        }
        fattn_graph_destroy(ctx, g);
        call_free(x);
    }
    fattn_ctx_destroy(ctx);
}
