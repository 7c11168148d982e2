/* Repeats every attention kernel of this build: O, L, dK and dV must have the same bits each time, dQ the same
   numbers up to the order of its sums. One context uses all SMs, another three, so that a CTA has many tiles.
   Built with FATTN_DELAYS, waits inside the Hopper kernels take random times (core/ptx/mbarrier.h), which
   exposes missing barriers.
   Arguments: runs of each case, one head_dim instead of all. Returns 77 without a device. */
#include "call.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 77 };

#define SHAPE .B = 1, .Hq = 4, .Hkv = 2, .Sq = 330, .Sk = 521
static const attention_case cases[] = {
    {SHAPE, .name = "full"},
    {SHAPE, .name = "causal", .flags = FATTN_CAUSAL},
    {.B = 2, .Hq = 4, .Sq = 250, .Sk = 250, .name = "short", .flags = FATTN_CAUSAL},
    {.B = 2, .Hq = 4, .Sq = 500, .Sk = 500, .name = "short 4", .flags = FATTN_CAUSAL | FATTN_EXACT_DELTA},
    {.B = 2, .Hq = 3, .Sq = 380, .Sk = 380, .name = "short, full"},
    {SHAPE, .name = "ordered", .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC},
    {SHAPE, .name = "window", .flags = FATTN_WINDOW, .window_left = 100, .window_right = 7, .softcap = 5, .alibi = true,
     .sink = true},
    {SHAPE, .name = "means"},
    {.B = 2, .Hq = 6, .Sq = 400, .Sk = 700, .name = "means, ordered", .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC},
    {SHAPE, .name = "softcap, means", .softcap = 20, .sink = true},
    {SHAPE, .name = "dropout", .dropout_p = 0.2f},
    {.B = 2, .Hq = 4, .Hkv = 2, .Sq = 330, .Sk = 528, .name = "bias", .bias = BIAS | BIAS_OVER_B},
    {.B = 4,
     .Hq = 4,
     .Sq = 330,
     .Sk = 330,
     .name = "packed",
     .flags = FATTN_CAUSAL,
     .lengths = LENGTHS_PACKED,
     .length_q = {330, 0, 33, 200},
     .length_k = {330, 4, 80, 129}},
    {.B = 2, .Hq = 8, .Hkv = 2, .Sq = 3, .Sk = 9000, .name = "few rows"},
    {.B = 2, .Hq = 32, .Hkv = 4, .Sq = 7, .Sk = 9000, .name = "rows of a group"},
    {.B = 2, .Hq = 8, .Hkv = 2, .Sq = 50, .Sk = 9000, .name = "split"},
};

/* dQ of two runs: sums of the same numbers in another order, then rounded: a unit in the last place. */
static int64_t apart(const double *x, const double *y, int64_t count, double ulp) {
    double top = 0;
    for (int64_t n = 0; n < count; ++n) top = fmax(top, fabs(x[n]));
    int64_t wrong = 0;
    for (int64_t n = 0; n < count; ++n) wrong += !(fabs(x[n] - y[n]) <= ulp * fabs(x[n]) + 1e-5 * top);
    return wrong;
}

/* Keys with a mean: backward has another kernel then, and one more with a softcap. */
static void add_to_keys(call *c, double mean) {
    double *const k = call_read(c, CALL_K);
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[CALL_K]); ++n) k[n] += mean;
    call_write(c, CALL_K, k);
    free(k);
}

/* The number of failed runs. */
static int64_t repeat(fattn_ctx *ctx, const attention_case *a, int runs) {
    call *const c = call_new(ctx, a);
    const int64_t count = fattn_tensor_numel(&c->t[CALL_DQ]);
    const double ulp = a->dtype == FATTN_BF16 ? 0x1p-7 : 0x1p-10;
    int64_t failures = 0;
    if (strstr(a->name, "means")) add_to_keys(c, 5);
    call_run(c);
    const uint64_t o = call_bits(c, CALL_O, CALL_LSE), dkv = call_bits(c, CALL_DK, CALL_DV),
                   dq_bits = call_bits(c, CALL_DQ, CALL_DQ);
    double *const dq = call_read(c, CALL_DQ);
    for (int n = 1; n < runs; ++n) {
        for (int id = CALL_O; id <= CALL_DV && n % 16 == 1; ++id)
            if (id <= CALL_LSE || id >= CALL_DQ) call_fill(c, (enum call_tensor)id, NAN);
        call_run(c);
        const bool forward = call_bits(c, CALL_O, CALL_LSE) == o;
        const bool columns = call_bits(c, CALL_DK, CALL_DV) == dkv;
        bool rows = call_bits(c, CALL_DQ, CALL_DQ) == dq_bits;
        if (!rows && !(a->flags & FATTN_DETERMINISTIC)) {
            double *const again = call_read(c, CALL_DQ);
            rows = apart(dq, again, count, ulp) == 0;
            free(again);
        }
        if (forward && columns && rows) continue;
        if (failures++ == 0)
            printf("FAILED %s %s, run %d: %s%s%s\n", a->name, fattn_dtype_name(a->dtype), n,
                   forward ? "" : "O or L differs ", columns ? "" : "dK or dV differs ", rows ? "" : "dQ differs");
    }
    printf("%-9s %-5s D %-4lld %s %s: %lld of %d runs differ\n", a->name, fattn_dtype_name(a->dtype), (long long)a->D,
           c->plan.fwd_kernel, c->plan.bwd_kernel, (long long)failures, runs);
    free(dq);
    call_free(c);
    return failures;
}

int main(int argc, char **argv) {
    const int runs = argc > 1 ? atoi(argv[1]) : 20, only = argc > 2 ? atoi(argv[2]) : 0;
    static const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F16};
    static const int64_t dims[][2] = {{64, 64},   {80, 80},   {96, 96},  {128, 128},
                                      {192, 128}, {192, 192}, {256, 256}}; /* D, Dv */
    int64_t failures = 0;
    for (int limit = 0; limit <= 3; limit += 3) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .device = FATTN_CUDA, .sm_limit = limit, .arch_cap = call_arch()};
        fattn_ctx *ctx;
        if (fattn_ctx_create(&o, &ctx) != FATTN_OK) {
            printf("skipped: no CUDA device\n");
            return SKIPPED;
        }
        for (int t = 0; t < 2; ++t)
            for (int d = 0; d < 7; ++d)
                for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
                    attention_case a = cases[n];
                    a.dtype = dtypes[t], a.D = dims[d][0], a.Dv = dims[d][1];
                    if ((only && only != a.D) || (a.dtype == FATTN_BF16 && !call_has_bf16())) continue;
                    failures += repeat(ctx, &a, runs);
                }
        fattn_ctx_destroy(ctx);
    }
    printf("%lld failures\n", (long long)failures);
    return failures != 0;
}
