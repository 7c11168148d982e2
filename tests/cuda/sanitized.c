/* For compute-sanitizer: every kernel of this build once or twice, on sizes that end inside of
   tiles. One process without forks; results are only checked for NaN. An argument, 64 or 128, leaves out
   wider heads, and a second one, as f16 or tf32, other types, since racecheck is slow. Returns 77 without a device. */
#include "call.h"

#include "core/base/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 77 };

static const attention_case cases[] = {
    {.name = "full", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 70, .Sk = 150, .D = 64},
    {.name = "causal", .B = 1, .Hq = 2, .Sq = 131, .Sk = 150, .D = 40, .flags = FATTN_CAUSAL},
    {.name = "short",
     .B = 67,
     .Hq = 2,
     .Sq = 130,
     .Sk = 130,
     .D = 64,
     .flags = FATTN_CAUSAL | FATTN_EXACT_DELTA}, /* more heads than SMs */
    {.name = "short, full", .B = 67, .Hq = 2, .Sq = 130, .Sk = 130, .D = 64},
    {.name = "last wave", .B = 10, .Hq = 2, .Sq = 1024, .Sk = 1000, .D = 64}, /* more key blocks than SMs */
    {.name = "odd dims", .B = 1, .Hq = 1, .Sq = 67, .Sk = 65, .D = 59, .Dv = 33, .d_lse = true},
    {.name = "features",
     .B = 1,
     .Hq = 2,
     .Sq = 70,
     .Sk = 67,
     .D = 64,
     .softcap = 2,
     .dropout_p = 0.25f,
     .flags = FATTN_WINDOW | FATTN_DETERMINISTIC,
     .window_left = 40,
     .window_right = 9,
     .alibi = true,
     .sink = true,
     .bias = BIAS,
     .rng_step = true},
    {.name = "packed",
     .B = 3,
     .Hq = 2,
     .Sq = 80,
     .Sk = 80,
     .D = 64,
     .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {80, 0, 33},
     .length_k = {71, 4, 80},
     .sink = true,
     .bias = BIAS | BIAS_OVER_B},
    {.name = "packed, long",
     .B = 2,
     .Hq = 2,
     .Hkv = 1,
     .Sq = 1500,
     .Sk = 1500,
     .D = 64,
     .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {1500, 700},
     .length_k = {1500, 700},
     .sink = true},
    {.name = "bias of aligned rows",
     .B = 2,
     .Hq = 2,
     .Sq = 200,
     .Sk = 264,
     .D = 64,
     .flags = FATTN_CAUSAL,
     .sink = true,
     .bias = BIAS | BIAS_OVER_B},
    {.name = "bias of aligned rows, window",
     .B = 1,
     .Hq = 2,
     .Sq = 200,
     .Sk = 264,
     .D = 64,
     .flags = FATTN_WINDOW,
     .window_left = 90,
     .window_right = 30,
     .bias = BIAS},
    {.name = "48, 96, 192", .B = 1, .Hq = 1, .Sq = 70, .Sk = 67, .D = 48},
    {.name = "huge", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 70, .Sk = 150, .D = 64, .bias = BIAS, .sink = true},
    {.name = "wide", .B = 1, .Hq = 1, .Sq = 40, .Sk = 66, .D = 64, .wide = true, .flags = FATTN_CAUSAL},
    {.name = "few rows", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 2, .Sk = 2500, .D = 64, .flags = FATTN_CAUSAL, .sink = true},
    {.name = "split", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 33, .Sk = 4150, .D = 64, .flags = FATTN_CAUSAL, .sink = true},
    {.name = "few rows, general", .B = 1, .Hq = 2, .Sq = 5, .Sk = 1200, .D = 64, .alibi = true, .dropout_p = 0.2f},
    {.name = "few rows, many keys", .B = 1, .Hq = 12, .Hkv = 6, .Sq = 1, .Sk = 8500, .D = 64},
    {.name = "few rows, a batch", .B = 70, .Hq = 2, .Sq = 1, .Sk = 600, .D = 64},
    {.name = "few rows, a batch, 16", .B = 70, .Hq = 16, .Hkv = 2, .Sq = 2, .Sk = 600, .D = 64},
    {.name = "few rows and keys, a batch", .B = 70, .Hq = 2, .Sq = 1, .Sk = 100, .D = 64},
    {.name = "rows of a group", .B = 1, .Hq = 16, .Hkv = 2, .Sq = 5, .Sk = 4200, .D = 64, .flags = FATTN_CAUSAL},
    {.name = "rows of a group, a batch", .B = 8, .Hq = 24, .Hkv = 8, .Sq = 7, .Sk = 4200, .D = 64, .sink = true},
    {.name = "rows of a group, packed",
     .B = 3,
     .Hq = 6,
     .Hkv = 2,
     .Sq = 11,
     .Sk = 4200,
     .D = 64,
     .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {11, 1, 7},
     .length_k = {4200, 30, 1301}},
    /* Of equal keys backward finds a mean. */
    {.name = "means", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 130, .Sk = 150, .D = 64, .sink = true},
    {.name = "means, causal", .B = 1, .Hq = 2, .Sq = 131, .Sk = 150, .D = 40, .flags = FATTN_CAUSAL, .d_lse = true},
    {.name = "means, short", .B = 67, .Hq = 2, .Sq = 130, .Sk = 130, .D = 64, .flags = FATTN_CAUSAL},
    {.name = "means, softcap",
     .B = 2,
     .Hq = 2,
     .Hkv = 1,
     .Sq = 131,
     .Sk = 150,
     .D = 64,
     .flags = FATTN_CAUSAL,
     .softcap = 20,
     .dropout_p = 0.1f,
     .sink = true,
     .d_lse = true,
     .lengths = LENGTHS_PACKED,
     .length_q = {60, 131},
     .length_k = {150, 71}},
    {.name = "means, softcap, full", .B = 1, .Hq = 2, .Sq = 130, .Sk = 150, .D = 64, .softcap = 20},
    {.name = "means, bias", .B = 1, .Hq = 2, .Sq = 136, .Sk = 152, .D = 64, .bias = BIAS},
    {.name = "means, packed",
     .B = 3,
     .Hq = 2,
     .Sq = 80,
     .Sk = 80,
     .D = 64,
     .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
     .lengths = LENGTHS_PACKED,
     .length_q = {80, 0, 33},
     .length_k = {71, 4, 80},
     .sink = true},
    {.name = "8-bit copies", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 200, .Sk = 150, .D = 64, .flags = FATTN_FP8},
    {.name = "8-bit copies, causal",
     .B = 2,
     .Hq = 2,
     .Sq = 200,
     .Sk = 333,
     .D = 64,
     .flags = FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_CAUSAL},
    {.name = "8-bit copies, packed",
     .B = 3,
     .Hq = 2,
     .Sq = 80,
     .Sk = 80,
     .D = 59,
     .flags = FATTN_FP8 | FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {80, 0, 33},
     .length_k = {71, 4, 80},
     .sink = true},
};

/* FATTN_FP8 is for Hopper, and has no F64; here it has one pass in F32. */
static bool has_kernels(const fattn_ctx *ctx, const attention_case *c) {
    if (c->dtype == FATTN_BF16 && !call_has_bf16()) return false;
    return !(c->flags & FATTN_FP8) || (ctx->gpu.arch == 90 && c->dtype != FATTN_F64 && !(c->flags & FATTN_TF32));
}

static int64_t not_finite(call *c) {
    int64_t count = 0;
    for (int id = CALL_O; id <= CALL_D_SINK; ++id) {
        if (!c->t[id].dtype) continue;
        double *const x = call_read(c, (enum call_tensor)id);
        for (int64_t n = 0; n < fattn_tensor_numel(&c->t[id]); ++n) count += !isfinite(x[n]);
        free(x);
    }
    return count;
}

int main(int argc, char **argv) {
    const int64_t widest = argc > 1 ? atoll(argv[1]) : 256;
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F16, FATTN_F32, FATTN_F64, FATTN_F32};
    static const char *const names[] = {"bf16", "f16", "f32", "f64", "tf32"};
    static const int64_t factors[][2] = {{1, 1}, {2, 2}, {3, 2}, {3, 3}, {4, 4}}; /* D, Dv = 64, ..., 256 */
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .arch_cap = call_arch()};
    fattn_ctx *ctx;
    if (fattn_ctx_create(&o, &ctx) != FATTN_OK) {
        printf("skipped: no CUDA device\n");
        return SKIPPED;
    }
    int calls = 0;
    int64_t bad = 0;
    for (int t = 0; t < 5; ++t) {
        if (argc > 2 && strcmp(argv[2], names[t]) != 0) continue;
        for (int f = 0; f < 5 && 64 * factors[f][0] <= widest; ++f)
            for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
                attention_case a = cases[n];
                a.dtype = dtypes[t];
                if (t == 4) a.flags |= FATTN_TF32;
                if (!has_kernels(ctx, &a) || (factors[f][0] == 3 && t > 1)) continue; /* 192: of 16 bits */
                if (factors[f][0] == 3) a.flags &= ~(uint32_t)FATTN_FP8_HADAMARD;     /* for powers of two */
                if (a.Dv == 0) a.Dv = a.D;
                a.D *= factors[f][0], a.Dv *= factors[f][1];
                call *const c = call_new(ctx, &a);
                if (!strcmp(a.name, "huge")) call_fill(c, CALL_BIAS, -6e4);
                if (!strncmp(a.name, "means", 5)) call_fill(c, CALL_K, 3);
                call_run(c);
                bad += not_finite(c);
                call_free(c);
                ++calls;
            }
    }
    fattn_ctx_destroy(ctx);
    printf("%d calls, %lld results are not finite\n", calls, (long long)bad);
    return bad != 0 || !calls; /* no calls: the type is unknown, or not of this device */
}
