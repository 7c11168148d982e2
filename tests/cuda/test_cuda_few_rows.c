/* Forward of few rows on the device, and of few row blocks, whose keys are split into parts: against the fp64 reference
   (case_checks.h), and the same bits alone, in batches and each time. */
#include "case_checks.h"
#include "contexts.h"
#include "device.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <fattn/graph.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Three of them to a case that is packed or padded; one sequence has all rows, another all keys. */
static void give_lengths(attention_case *c) {
    if (c->lengths == LENGTHS_NONE) return;
    c->B = 3;
    for (int b = 0; b < 3; ++b) {
        c->length_q[b] = (int32_t)(b == 1 ? c->Sq : c->Sq / (b + 1));
        c->length_k[b] = (int32_t)(b == 2 ? c->Sk : c->Sk / (2 * b + 3));
    }
}

Test(cuda_few_rows, few_rows, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t queries[] = {1, 2, 5, 16, 9, 3, 17}, groups[] = {1, 3, 8, 12, 5},
                         keys[] = {0, 1, 63, 64, 65, 127, 128, 129, 500, 1100, 4111};
    static const attention_case features[] = {
        {.name = "few rows"},
        {.name = "few rows, causal, sink", .flags = FATTN_CAUSAL, .sink = true},
        {.name = "few rows, window", .flags = FATTN_WINDOW, .window_left = 70, .window_right = 3, .softcap = 8},
        {.name = "few rows, merge", .flags = FATTN_MERGE, .sink = true},
        {.name = "few rows, alibi, bias", .alibi = true, .bias = BIAS | BIAS_OVER_B},
        {.name = "few rows, dropout", .dropout_p = 0.2f, .flags = FATTN_CAUSAL | FATTN_EXACT_DELTA},
        {.name = "few rows, padded", .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED},
        {.name = "few rows, packed", .sink = true, .lengths = LENGTHS_PACKED},
    };
    for (int n = 0; n < 11 * 8; ++n) {
        if (!mine(n)) continue;
        attention_case c = features[n % 8];
        c.B = 2, c.Sk = keys[n / 8], c.Sq = queries[n % 7], c.Hkv = 1 + n % 2, c.Hq = c.Hkv * groups[n % 5];
        c.D = dims[n % 10], c.Dv = dims[n / 3 % 10];
        c.layout = n % 3 ? LAYOUT_BHSD : LAYOUT_BSHD;
        give_lengths(&c);
        check(cpu, &c, n % 3 ? FATTN_BF16 : FATTN_F16);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* More rows of a group than decoding's smallest tiles have: calls whose CTAs have parts of a tile, or several tiles. */
Test(cuda_few_rows, few_rows_of_large_groups, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t queries[] = {3, 16, 5, 9, 12}, groups[] = {8, 4, 16, 2, 11, 25},
                         keys[] = {1, 2048, 4096, 4097, 5001, 700};
    static const attention_case features[] = {
        {.name = "large groups"},
        {.name = "large groups, causal, sink", .flags = FATTN_CAUSAL, .sink = true},
        {.name = "large groups, window", .flags = FATTN_WINDOW, .window_left = 300, .window_right = 3},
        {.name = "large groups, merge", .flags = FATTN_MERGE | FATTN_CAUSAL},
        {.name = "large groups, padded", .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED},
        {.name = "large groups, packed", .sink = true, .lengths = LENGTHS_PACKED},
    };
    for (int n = 0; n < 6 * 6; ++n) {
        if (!mine(n)) continue;
        attention_case c = features[n % 6];
        c.B = 2, c.Sk = keys[n / 6], c.Sq = queries[n % 5], c.Hkv = 1 + n % 3 / 2;
        c.Hq = c.Hkv * groups[n / 2 % 6];
        if (n == 26) c.Sk = 5001, c.Sq = 16, c.window_left = 2016, c.window_right = 0; /* begins in a block */
        if (n == 21) c.B = 70, c.Hkv = 2, c.Hq = 6, c.Sq = 7;                          /* more tiles than SMs */
        c.D = n / 3 % 2 ? 64 : 128;
        c.layout = n % 3 ? LAYOUT_BHSD : LAYOUT_BSHD;
        if (n >= 24 && n < 30 && n != 26) {                      /* about as many SMs as two CTAs for each tile */
            c.B = 8, c.Hkv = c.lengths == LENGTHS_NONE ? 8 : 20; /* with lengths B becomes 3 */
            c.Hq = 5 * c.Hkv, c.Sq = 11;
        }
        give_lengths(&c);
        check(cpu, &c, n % 4 ? FATTN_BF16 : FATTN_F16);
    }
    /* One tile of 64 rows, of 128, two, in several CTAs that are no cluster, three and two that are, and alone. */
    for (int n = 0; n < 16 && mine(0); ++n) {
        const attention_case c = {.name = "large groups",
                                  .B = (const int64_t[]){1, 5, 8, 40}[n % 4],
                                  .Hq = (const int64_t[]){32, 64, 72, 24}[n / 4],
                                  .Hkv = 8,
                                  .Sq = 16,
                                  .Sk = 5000,
                                  .D = (n / 4 + n) % 2 ? 128 : 64,
                                  .dtype = half_type(n % 3 != 1),
                                  .wide = true};
        call *const x = call_new(ctx, &c);
        call_forward(x);
        if (ctx->gpu.arch == 90) cr_assert(strstr(x->plan.fwd_kernel, "_decode_rows_"), "%s", x->plan.fwd_kernel);
        const uint64_t bits = call_bits(x, CALL_O, CALL_LSE);
        for (int m = 0; m < 100; ++m) {
            call_forward(x);
            cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), bits, "%s, run %d", x->plan.fwd_kernel, m);
        }
        call_free(x);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* With a maximum near the scores, and so far that parts are computed again; O differs in bits only where it is near. */
Test(cuda_few_rows, unified_maximum, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t queries[] = {1, 2, 5, 16, 9}, groups[] = {1, 3, 8, 12, 5},
                         keys[] = {0, 1, 65, 128, 500, 1100, 4111, 20000};
    static const float maxima[] = {0, 4, 40, -30, 70, -70, 3e38f};
    static const attention_case features[] = {
        {.name = "unified"},
        {.name = "unified, causal, sink", .flags = FATTN_CAUSAL, .sink = true},
        {.name = "unified, window", .flags = FATTN_WINDOW, .window_left = 70, .window_right = 3},
        {.name = "unified, merge", .flags = FATTN_MERGE, .sink = true},
        {.name = "unified, padded", .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED},
        {.name = "unified, packed, exact", .flags = FATTN_EXACT_DELTA, .lengths = LENGTHS_PACKED},
    };
    for (int n = 0; n < 8 * 7 && call_has_bf16(); ++n) {
        if (!mine(n)) continue;
        attention_case c = features[n % 6];
        c.B = 2, c.Sk = keys[n % 8], c.Sq = queries[n % 5], c.Hkv = 1 + n % 2, c.Hq = c.Hkv * groups[n / 2 % 5];
        c.D = dims[n % 10], c.Dv = dims[n / 3 % 10];
        c.layout = n % 3 ? LAYOUT_BHSD : LAYOUT_BSHD;
        c.flags |= FATTN_UNIFIED_MAX;
        c.unified_max = maxima[n / 8];
        give_lengths(&c);
        check(cpu, &c, FATTN_BF16);
    }
    for (int n = 0; n < 6 && call_has_bf16() && mine(0); ++n) {
        attention_case c = {.name = "unified", .B = 1, .Hq = 8, .Hkv = 2, .Sq = 1, .Sk = 20000, .dtype = FATTN_BF16};
        c.D = (const int64_t[]){64, 128, 256}[n / 2];
        c.wide = true;
        call *const plain = call_new(ctx, &c);
        c.flags = FATTN_UNIFIED_MAX, c.unified_max = n % 2 ? 1000 : 0.3f;
        call *const x = call_new(ctx, &c);
        call_forward(plain), call_forward(x);
        cr_assert(strstr(x->plan.fwd_kernel, "_few_unified_"), "%s", x->plan.fwd_kernel);
        const uint64_t bits = call_bits(x, CALL_O, CALL_LSE);
        /* Those of calls without the flag where these have the same kernel but for it, and of any other far maximum. */
        if (!strstr(plain->plan.fwd_kernel, "_decode_"))
            cr_assert_eq(bits == call_bits(plain, CALL_O, CALL_LSE), n % 2, "%s, maximum %g", x->plan.fwd_kernel,
                         (double)c.unified_max);
        c.unified_max = n % 2 ? -2000 : 0.7f;
        call *const other = call_new(ctx, &c);
        call_forward(other);
        cr_assert_eq(bits == call_bits(other, CALL_O, CALL_LSE), n % 2, "%s, maximum %g", x->plan.fwd_kernel,
                     (double)c.unified_max);
        call_free(other);
        for (int m = 0; m < 50; ++m) {
            call_forward(x);
            cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), bits, "%s, run %d", x->plan.fwd_kernel, m);
        }
        call_free(x);
        call_free(plain);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

static bool same(const double *x, const double *y, int64_t count) {
    return memcmp(x, y, (size_t)count * sizeof *x) == 0; /* one zero is not the other */
}

/* A sequence has the same bits alone and as one of a padded batch, at each place in it; alone it is not padded, or
   (`padded`) it is to the batch's bounds. kernel: a part of the kernel's name. */
static void check_alone(fattn_ctx *ctx, const attention_case *c, bool padded, const char *kernel) {
    call *const batch = call_new(ctx, c);
    const int64_t H = c->Hq, G = c->Hkv, D = c->D;
    double *const q = call_read(batch, CALL_Q), *const k = call_read(batch, CALL_K),
                  *const v = call_read(batch, CALL_V);
    call_forward(batch);
    double *const o = call_read(batch, CALL_O), *const lse = call_read(batch, CALL_LSE);
    for (int64_t b = 0; b < c->B; ++b) {
        const int64_t Sq = c->length_q[b], Sk = c->length_k[b];
        attention_case one = *c;
        one.B = 1, one.length_q[0] = (int32_t)Sq, one.length_k[0] = (int32_t)Sk;
        if (!padded) one.lengths = LENGTHS_NONE, one.Sq = Sq, one.Sk = Sk;
        call *const alone = call_new(ctx, &one);
        double *const x = calloc((size_t)(H * (one.Sq + one.Sk) * D + 1), sizeof *x);
        for (int64_t h = 0; h < H; ++h)
            memcpy(x + h * one.Sq * D, q + (b * H + h) * c->Sq * D, (size_t)(Sq * D) * sizeof *x);
        call_write(alone, CALL_Q, x);
        for (int which = 0; which < 2; ++which) {
            for (int64_t h = 0; h < G; ++h)
                memcpy(x + h * one.Sk * D, (which ? v : k) + (b * G + h) * c->Sk * D, (size_t)(Sk * D) * sizeof *x);
            call_write(alone, which ? CALL_V : CALL_K, x);
        }
        call_forward(alone);
        double *const own = call_read(alone, CALL_O), *const L = call_read(alone, CALL_LSE);
        cr_assert(strstr(alone->plan.fwd_kernel, kernel), "%s, not %s", alone->plan.fwd_kernel, kernel);
        for (int64_t h = 0; h < H; ++h)
            cr_assert(same(own + h * one.Sq * D, o + (b * H + h) * c->Sq * D, Sq * D) &&
                          same(L + h * one.Sq, lse + (b * H + h) * c->Sq, Sq),
                      "D %d, sequence %d, head %d of %d rows and %d keys has other bits alone", (int)D, (int)b, (int)h,
                      (int)Sq, (int)Sk);
        free(own), free(L), free(x);
        call_free(alone);
    }
    free(q), free(k), free(v), free(o), free(lse);
    call_free(batch);
}

/* A tile has two CTAs, which exchange rows, alone more; or has one, which keeps a half, alone two. */
Test(cuda_few_rows, halves_alone_or_in_a_batch, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip();
    for (int n = 0; n < 4 && mine(0); ++n) {
        const int64_t heads = n % 2 ? 50 : 20;
        const attention_case c = {.name = "alone, in halves",
                                  .B = 3,
                                  .Hq = heads * (n / 2 == n % 2 ? 5 : 3),
                                  .Hkv = heads,
                                  .Sq = 16,
                                  .Sk = 2200,
                                  .D = n < 2 ? 64 : 128,
                                  .dtype = half_type(n != 1),
                                  .flags = n ? FATTN_CAUSAL : 0,
                                  .lengths = LENGTHS_PADDED,
                                  .length_q = {16, 3, 11},
                                  .length_k = {2200, 1100, 777}};
        check_alone(ctx, &c, true, ctx->gpu.arch == 90 ? "_decode_rows_" : "_");
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_few_rows, few_rows_alone_or_in_a_batch, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip();
    static const int64_t head_dims[] = {64, 128, 256, 80};
    for (int n = 0; n < 16 && mine(0); ++n) {
        const attention_case c = {.name = "alone",
                                  .B = 5,
                                  .Hq = n % 3 ? 8 : 4,
                                  .Hkv = n % 2 ? 4 : 1,
                                  .Sq = n % 2 ? 16 : 3,
                                  .Sk = 9000,
                                  .D = head_dims[n % 4],
                                  .dtype = half_type(n % 3 != 1),
                                  .flags = n % 2 ? FATTN_CAUSAL : 0,
                                  .sink = n % 5 == 1,
                                  .softcap = n % 7 == 3 ? 20.0f : 0.0f,
                                  .lengths = LENGTHS_PADDED,
                                  .length_q = {1, 3, n % 2 ? 11 : 2, 2, n % 2 ? 16 : 1},
                                  .length_k = {9000, 1, 4097, 130, 777}};
        const bool bounded = c.Sq * c.Hq / c.Hkv > 16; /* kernels follow from the bound of rows */
        check_alone(ctx, &c, bounded, "_few_");
    }
    for (int n = 0; n < 4 && mine(0); ++n) { /* a tile has three CTAs, alone 16 */
        const attention_case c = {.name = "alone, of large groups",
                                  .B = 5,
                                  .Hq = n % 2 ? 64 : 32,
                                  .Hkv = 8,
                                  .Sq = 16,
                                  .Sk = 9000,
                                  .D = n < 2 ? 64 : 128,
                                  .dtype = half_type(n != 1),
                                  .flags = n == 2 ? FATTN_CAUSAL : 0,
                                  .lengths = LENGTHS_PADDED,
                                  .length_q = {16, 3, 11, 16, 7},
                                  .length_k = {9000, 1, 4097, 2100, 777}};
        check_alone(ctx, &c, true, ctx->gpu.arch == 90 ? "_decode_rows_" : "_");
    }
    for (int n = 0; n < 8 && mine(0); ++n) { /* parts that meet in clusters, in memory, in their CTA */
        const attention_case c = {.name = "alone, long",
                                  .B = 5,
                                  .Hq = n % 2 ? 40 : 8,
                                  .Hkv = 8,
                                  .Sq = n % 4 == 2 ? 3 : 1,
                                  .Sk = 20000,
                                  .D = head_dims[n % 3],
                                  .dtype = half_type(n % 3 != 1),
                                  .flags = FATTN_CAUSAL,
                                  .lengths = LENGTHS_PADDED,
                                  .length_q = {1, 1, n % 4 == 2 ? 3 : 1, 1, 1},
                                  .length_k = {20000, 9000, 16384, 8191, 600}};
        check_alone(ctx, &c, false, ctx->gpu.arch == 90 ? "_decode_" : "_few_");
    }
    for (int n = 0; n < 6 && mine(0); ++n) { /* more tiles than SMs, alone fewer: other kernels, and parts of a CTA */
        const int64_t most = n % 2 ? 256 : 2000;
        const attention_case c = {.name = "alone, of many heads",
                                  .B = 5,
                                  .Hq = n < 2   ? 64
                                        : n < 4 ? 256
                                                : 1024,
                                  .Hkv = 64,
                                  .Sq = 1,
                                  .Sk = most,
                                  .D = n % 2 ? 128 : 64,
                                  .dtype = half_type(n % 3 != 1),
                                  .lengths = LENGTHS_PADDED,
                                  .length_q = {1, 1, 1, 1, 1},
                                  .length_k = {(int32_t)most, 1, 256, 130, 77}};
        check_alone(ctx, &c, false, "_few_");
    }
    fattn_ctx_destroy(ctx);
}

/* O and L have the same bits in every run. */
static void check_repeats(fattn_ctx *ctx, const attention_case *c, int runs) {
    call *const x = call_new(ctx, c);
    call_forward(x);
    const uint64_t first = call_bits(x, CALL_O, CALL_LSE);
    for (int m = 0; m < runs; ++m) {
        if (m % 50 == 0) call_fill(x, CALL_O, NAN), call_fill(x, CALL_LSE, NAN);
        call_forward(x);
        cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), first, "%s, D %d, run %d", x->plan.fwd_kernel, (int)c->D, m);
    }
    call_free(x);
}

Test(cuda_few_rows, few_rows_repeat, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip();
    for (int n = 0; n < 4 && mine(0); ++n) {
        const attention_case c = {.name = "repeat",
                                  .B = 2,
                                  .Hq = 8,
                                  .Hkv = n % 2 ? 8 : 2,
                                  .Sq = 1 + 4 * (n / 2),
                                  .Sk = 20000,
                                  .D = n % 2 ? 64 : 128,
                                  .dtype = half_type(n != 1)};
        check_repeats(ctx, &c, 250);
    }
    fattn_ctx_destroy(ctx);
}

/* ---- small grids: keys of row blocks are split into parts ---- */

/* Cases that are split in every dtype where they have enough keys: F32 and F64 more than 256, TF32 512, 16 bits 1024,
   which Hopper divides in another way. */
static const attention_case split_features[] = {
    {.name = "split"},
    {.name = "split, causal, sink", .flags = FATTN_CAUSAL, .sink = true},
    {.name = "split, window", .flags = FATTN_WINDOW, .window_left = 2100, .window_right = 3, .softcap = 8},
    {.name = "split, merge", .flags = FATTN_MERGE, .sink = true},
    {.name = "split, alibi, bias", .alibi = true, .bias = BIAS | BIAS_OVER_B},
    {.name = "split, dropout", .dropout_p = 0.2f, .flags = FATTN_CAUSAL},
    {.name = "split, exact", .flags = FATTN_CAUSAL_TOP_LEFT | FATTN_EXACT_DELTA},
    {.name = "split, padded", .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED},
    {.name = "split, packed", .sink = true, .lengths = LENGTHS_PACKED},
};
enum { SPLIT_FEATURES = sizeof split_features / sizeof *split_features };

static attention_case split_case(int n, int64_t Sq, int64_t Sk) {
    attention_case c = split_features[n % SPLIT_FEATURES];
    c.B = 2, c.Sq = Sq, c.Sk = Sk, c.Hkv = 1 + n % 2, c.Hq = c.Hkv * (1 + n % 3);
    c.D = dims[n % 10], c.Dv = dims[n / 3 % 10];
    c.layout = n % 3 ? LAYOUT_BHSD : LAYOUT_BSHD;
    if (c.lengths != LENGTHS_NONE) {
        c.B = 3;
        for (int b = 0; b < 3; ++b) {
            c.length_q[b] = (int32_t)(b == 1 ? c.Sq : c.Sq / (b + 1));
            c.length_k[b] = (int32_t)(b == 2 ? c.Sk : c.Sk / (2 * b + 3));
        }
    }
    return c;
}

Test(cuda_few_rows, split_keys, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t queries[] = {1, 7, 17, 33, 64, 65, 100, 130}, keys[] = {256, 257, 511, 1100, 2049, 4111};
    for (int n = 0; n < 6 * SPLIT_FEATURES; ++n) {
        if (!mine(n)) continue;
        attention_case c = split_case(n, queries[n % 8], keys[n / SPLIT_FEATURES]);
        c.flags &= ~(uint32_t)FATTN_EXACT_DELTA; /* of 16 bits */
        check_real(&c, n % 2 ? FATTN_F64 : FATTN_F32);
        check_tf32(cpu, &c);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* A part is a multiple of a tile of keys: 8192 keys of 8 heads have 32 parts of 256, 8208 have 26 of 320. */
Test(cuda_few_rows, split_keys_of_which_the_longest_has_fewer_parts, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0), *const sm80 = device_context(80);
    for (int n = 0; n < 4; ++n) {
        const int32_t most = n / 2 ? 32784 : 8208;
        if (!mine(n)) continue;
        attention_case c = {.name = "fewer parts", .B = 3, .Hq = 8, .Hkv = 8, .Sq = 17, .Sk = most, .D = 64, .Dv = 64};
        c.lengths = n % 2 ? LENGTHS_PACKED : LENGTHS_PADDED;
        for (int b = 0; b < 3; ++b) c.length_q[b] = 17, c.length_k[b] = b == 1 ? most : most - 16;
        device_use(n / 2 ? sm80 : ctx);
        if (n / 2)
            check(cpu, &c, FATTN_BF16);
        else
            check_real(&c, FATTN_F32);
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* As sm_80: Hopper's own kernels divide them in another way (divided_keys). */
Test(cuda_few_rows, split_keys_16_bits, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0), *const sm80 = device_context(80);
    device_use(sm80);
    static const int64_t queries[] = {17, 33, 64, 65, 100}, keys[] = {1024, 1025, 2049, 4096, 4111, 9001};
    for (int n = 0; n < 6 * SPLIT_FEATURES; ++n) {
        if (!mine(n)) continue;
        attention_case c = split_case(n, queries[n % 5], keys[n / SPLIT_FEATURES]);
        check(cpu, &c, n % 3 ? FATTN_BF16 : FATTN_F16);
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

static bool is_divided(fattn_ctx *ctx, const attention_case *c) {
    attention_case without = *c;
    without.flags &= ~(uint32_t)FATTN_MERGE; /* whose o is F32 */
    call *const x = call_new(ctx, &without);
    const bool divided = strstr(x->plan.fwd_kernel, "_parts_");
    call_free(x);
    return divided;
}

/* On Hopper 8 heads have tiles of 128 rows at head_dim 64, 33 of 192: the same bits. */
Test(cuda_few_rows, heads_have_the_same_bits_in_tiles_of_fewer_rows, .timeout = 200) {
    fattn_ctx *const ctx = device_or_skip();
    for (int n = 0; n < 6 && mine(0) && ctx->gpu.arch == 90; ++n) {
        attention_case c = {.name = "few of the heads",
                            .B = 1,
                            .Hq = 33,
                            .Sq = n < 4 ? 4096 : 4001,
                            .Sk = n < 4 ? 4096 : 4001,
                            .D = 64,
                            .flags = n % 2 ? FATTN_CAUSAL : 0,
                            .dtype = half_type(n / 2 % 2)};
        const int64_t some = 8 * c.Sq * c.D, rows = 8 * c.Sq;
        call *const all = call_new(ctx, &c);
        c.Hq = 8;
        call *const few = call_new(ctx, &c);
        cr_assert(strstr(all->plan.fwd_kernel, "_192x128") && strstr(few->plan.fwd_kernel, "_128x128"), "%s, %s",
                  all->plan.fwd_kernel, few->plan.fwd_kernel);
        for (int id = CALL_Q; id <= CALL_V; ++id) {
            double *const x = call_read(all, (enum call_tensor)id);
            call_write(few, (enum call_tensor)id, x);
            free(x);
        }
        call_forward(all);
        call_forward(few);
        double *const o = call_read(all, CALL_O), *const own = call_read(few, CALL_O);
        double *const lse = call_read(all, CALL_LSE), *const L = call_read(few, CALL_LSE);
        cr_assert(same(o, own, some) && same(lse, L, rows), "case %d", n);
        free(o), free(own), free(lse), free(L);
        call_free(all);
        call_free(few);
    }
    fattn_ctx_destroy(ctx);
}

/* Bits of launches of a graph, whose counters are zeroed each time. */
static void check_graph(fattn_ctx *ctx, const attention_case *c) {
    call *const x = call_new(ctx, c);
    fattn_graph *g;
    call_forward(x);
    const uint64_t first = call_bits(x, CALL_O, CALL_LSE);
    call_fill(x, CALL_O, NAN), call_fill(x, CALL_LSE, NAN);
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK, "%s", fattn_ctx_error(ctx));
    call_forward(x);
    cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int n = 0; n < 3; ++n) {
        cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(call_bits(x, CALL_O, CALL_LSE), first, "%s, launch %d", x->plan.fwd_kernel, n);
    }
    fattn_graph_destroy(ctx, g);
    call_free(x);
}

/* Hopper's: with softcap, ALiBi, bias, dropout and packed sequences row blocks are whole. */
Test(cuda_few_rows, divided_keys, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const cpu = attention_context(0);
    static const int64_t queries[] = {17, 130, 300, 641, 200}, keys[] = {3001, 4111, 6000, 9001};
    int divided = 0, cases = 0;
    for (int n = 0; n < 4 * SPLIT_FEATURES && ctx->gpu.arch == 90; ++n) {
        if (!mine(n)) continue;
        attention_case c = split_case(n, queries[n % 5], keys[n / SPLIT_FEATURES]);
        c.softcap = 0, c.alibi = false, c.bias = 0, c.dropout_p = 0;
        if (c.lengths == LENGTHS_PACKED) c.lengths = LENGTHS_PADDED, c.window_left = 500, c.flags |= FATTN_WINDOW;
        c.dtype = half_type(n % 3);
        check(cpu, &c, c.dtype);
        divided += is_divided(ctx, &c), ++cases;
    }
    cr_assert(5 * divided >= cases, "%d of %d", divided, cases);
    for (int n = 0; n < 4 && mine(0) && ctx->gpu.arch == 90; ++n) {
        attention_case c = {.name = "repeat",
                            .B = 1,
                            .Hq = 1 + n,
                            .Hkv = 1 + n,
                            .Sq = 1000,
                            .Sk = 8000,
                            .D = (const int64_t[]){64, 128, 192, 256}[n],
                            .Dv = n == 2 ? 128 : 0, /* 0: as D */
                            .flags = n % 2 ? FATTN_CAUSAL : 0,
                            .dtype = half_type(n % 2)};
        cr_assert(is_divided(ctx, &c));
        check_repeats(ctx, &c, 250);
        check_graph(ctx, &c);
        c.flags |= FATTN_DETERMINISTIC;
        cr_assert(!is_divided(ctx, &c));
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* 16 bits have other kernels for whole batches that are not split than for padded ones; rows of the others are in one
   block, alone and in the batch. */
Test(cuda_few_rows, split_keys_alone_or_in_a_batch, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const sm80 = device_context(80);
    static const int64_t head_dims[] = {64, 128, 256, 80};
    static const char *const kernels[] = {"fma_f32", "mma_f64", "mma_tf32", "mma16"};
    for (int n = 0; n < 16 && mine(0); ++n) {
        const int type = n / 4;
        const attention_case c = {
            .name = "alone",
            .B = 5,
            .Hq = n % 3 ? 4 : 2,
            .Hkv = n % 2 ? 2 : 1,
            .Sq = type == 3 && n % 2 ? 100 : 20,
            .Sk = 9000,
            .D = head_dims[n % 4],
            .dtype = type == 3   ? half_type(n % 2)
                     : type == 1 ? FATTN_F64
                                 : FATTN_F32,
            .flags = (n % 2 ? FATTN_CAUSAL : 0) | (type == 2 ? FATTN_TF32 : 0),
            .sink = n % 5 == 1,
            .softcap = n % 7 == 3 ? 20.0f : 0.0f,
            .lengths = LENGTHS_PADDED,
            .length_q = {1, 20, type == 3 && n % 2 ? 100 : 7, 2, type == 3 && n % 2 ? 65 : 19},
            .length_k = {9000, 1, 4097, 130, 777},
        };
        if (!is_fused(ctx, &c)) continue;
        check_alone(type == 3 ? sm80 : ctx, &c, type == 3, !call_has_bf16() && type == 2 ? "fma_f32" : kernels[type]);
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(ctx);
}

Test(cuda_few_rows, split_keys_repeat, .timeout = 400) {
    fattn_ctx *const ctx = device_or_skip(), *const sm80 = device_context(80);
    for (int n = 0; n < 8 && mine(0); ++n) {
        const int type = n / 2;
        const attention_case c = {.name = "repeat",
                                  .B = 2,
                                  .Hq = 8,
                                  .Hkv = n % 2 ? 8 : 2,
                                  .Sq = type == 3 ? 60 : 1 + 70 * (n % 2),
                                  .Sk = 20000,
                                  .D = n % 2 ? 64 : 128,
                                  .flags = type == 2 ? FATTN_TF32 : 0,
                                  .dtype = type == 3   ? half_type(n % 2)
                                           : type == 1 ? FATTN_F64
                                                       : FATTN_F32};
        if (is_fused(ctx, &c)) check_repeats(type == 3 ? sm80 : ctx, &c, 100);
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(ctx);
}
