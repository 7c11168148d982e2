/* Scores up to the largest float on a device: every dtype, head_dim and both families of 16-bit kernels; and 16-bit
   gradients of rows so long that a P of 1 / Sk is subnormal in F16. */
#include "call.h"
#include "device.h"
#include "huge_scores.h"
#include "key_means.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t dims[] = {64, 128, 256, 80, 40};

static void check(fattn_dtype dtype, int arch_cap, int32_t algorithm, int step) {
    fattn_ctx *const ctx = device_context(arch_cap), *const cpu = attention_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    device_use(ctx);
    for (int n = 0; n < huge_case_count; n += step)
        for (int k = 0; k < 5; ++k) {
            if (k > 2 && (n + k) % 4) continue;
            attention_case c = huge_case(n, dims[k], dtype);
            c.algorithm = algorithm;
            if (n % 2 && !(c.bias & BIAS_OVER_H)) c.flags |= FATTN_DETERMINISTIC; /* dbias there is not */
            huge_check(cpu, n, &c, ON_DEVICE, device_run);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

Test(cuda_huge, bf16, .timeout = 300) { check(FATTN_BF16, 0, FATTN_ALGO_AUTO, 1); }
Test(cuda_huge, f16, .timeout = 300) { check(FATTN_F16, 0, FATTN_ALGO_AUTO, 1); }
Test(cuda_huge, bf16_portable, .timeout = 300) { check(FATTN_BF16, 80, FATTN_ALGO_AUTO, 3); }
Test(cuda_huge, f16_portable, .timeout = 300) { check(FATTN_F16, 80, FATTN_ALGO_AUTO, 3); }
Test(cuda_huge, f32, .timeout = 300) { check(FATTN_F32, 0, FATTN_ALGO_AUTO, 3); }
Test(cuda_huge, f64, .timeout = 300) { check(FATTN_F64, 0, FATTN_ALGO_AUTO, 3); }
Test(cuda_huge, flash1, .timeout = 300) {
    check(FATTN_F32, 0, FATTN_ALGO_FLASH1, 11);
    check(FATTN_BF16, 0, FATTN_ALGO_FLASH1, 11);
}

Test(cuda_huge, parts) {
    fattn_ctx *const ctx = device_context(0), *const cpu = attention_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    device_use(ctx);
    huge_check_parts(cpu, ON_DEVICE, device_run);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* How far dQ is from the fp64 reference where every third row is huge by its bias and four channels of K have a
   mean. */
static double error_of_dq(fattn_ctx *cpu, const attention_case *c, double mean) {
    attention *const got = attention_new(cpu, c);
    int64_t at[FATTN_MAX_DIMS];
    key_means_add(got, (key_means){mean, mean != 0 ? 0.5 : 0, c->D / 4});
    for (int64_t n = 0; n < fattn_tensor_numel(&got->t[T_BIAS]); ++n) {
        attention_index(&got->t[T_BIAS], n, at);
        if (at[2] % 3 == 1) attention_set(&got->t[T_BIAS], at, 1500);
    }
    attention *const want = attention_twin(got, FATTN_F64);
    got->on_device = device_run;
    attention_run(want, REFERENCE);
    attention_run(got, ON_DEVICE);
    double off = 0, size = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(&want->t[T_DQ]); ++n) {
        attention_index(&want->t[T_DQ], n, at);
        const double x = attention_get(&want->t[T_DQ], at), y = attention_get(&got->t[T_DQ], at);
        off += (y - x) * (y - x), size += x * x;
    }
    attention_free(got);
    attention_free(want);
    return sqrt(off / size);
}

/* Scores of 1500 are rounded by up to 2^-14: a relative error of P, and times the mean one of dQ in four channels. */
Test(cuda_huge, keys_with_means, .timeout = 300) {
    fattn_ctx *const ctx = device_context(0), *const sm80 = device_context(80), *const cpu = attention_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    for (int n = 0; n < 24; ++n) {
        attention_case c = {.name = n % 2 ? "huge rows, means, softcap" : "huge rows, means",
                            .B = 1,
                            .Hq = 2,
                            .Sq = 100,
                            .Sk = 200,
                            .D = dims[n / 2 % 3],
                            .dtype = n / 6 % 2 ? FATTN_F16 : FATTN_BF16,
                            .bias = BIAS | BIAS_F32,
                            .softcap = n % 2 ? 50 : 0,
                            .sink = true,
                            .d_lse = n % 3 == 0,
                            .dropout_p = n % 3 == 1 ? 0.2f : 0};
        c.Dv = c.D;
        device_use(n / 12 ? sm80 : ctx);
        const double without = error_of_dq(cpu, &c, 0);
        for (double mean = 10; mean <= 100; mean *= 10) {
            const double with = error_of_dq(cpu, &c, mean), of_scores = mean * sqrt(4.0 / (double)c.D) * 0x1p-14;
            cr_assert(with <= 1.5 * without + of_scores, "%s %s, D %d: means of %g: off by %.2e, without by %.2e",
                      c.name, fattn_dtype_name(c.dtype), (int)c.D, mean, with, without);
        }
    }
    fattn_ctx_destroy(sm80);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(ctx);
}

/* Weights of 1 / 262144: dV in F16 against F32 on the same numbers, relative to its size. */
static double error_of_dv(fattn_ctx *ctx, fattn_dtype dtype, int64_t Sk, uint32_t flags) {
    attention_case c = {.name = "long rows",
                        .dtype = dtype,
                        .B = 1,
                        .Hq = 1,
                        .Sq = 512,
                        .Sk = Sk,
                        .D = 64,
                        .wide = true,
                        .flags = flags};
    attention_case exact = c;
    exact.dtype = FATTN_F32, exact.wide = false;
    call *const got = call_new(ctx, &c), *const want = call_new(ctx, &exact);
    static const enum call_tensor inputs[] = {CALL_Q, CALL_K, CALL_V, CALL_D_O};
    for (int n = 0; n < 4; ++n) {
        double *const x = call_read(got, inputs[n]);
        call_write(want, inputs[n], x);
        free(x);
    }
    call_run(got);
    call_run(want);
    double worst = 0;
    for (int id = CALL_DQ; id <= CALL_DV; ++id) {
        double *const x = call_read(got, (enum call_tensor)id), *const y = call_read(want, (enum call_tensor)id);
        const int64_t count = fattn_tensor_numel(&got->t[id]);
        double off = 0, size = 0;
        for (int64_t n = 0; n < count; ++n) off += (x[n] - y[n]) * (x[n] - y[n]), size += y[n] * y[n];
        const double error = sqrt(off / size);
        if (id == CALL_DV) worst = fmax(worst, error);
        free(x), free(y);
    }
    call_free(got);
    call_free(want);
    return worst;
}

/* A rounding of P and one of O or dO: 2^-12 each, and those of weights far below the mean. */
Test(cuda_huge, f16_weights_of_long_rows, .timeout = 100) {
    for (int portable = 0; portable < 2; ++portable) {
        fattn_ctx *const ctx = device_context(portable ? 80 : 0);
        if (!ctx) cr_skip_test("no CUDA device");
        for (int64_t Sk = 1 << 14; Sk <= 1 << 18; Sk *= 4) {
            const double error = error_of_dv(ctx, FATTN_F16, Sk, Sk == 1 << 16 ? FATTN_CAUSAL : 0);
            printf("Sk %d, %s: dV off by %.2e\n", (int)Sk, portable ? "sm_80" : "Hopper", error);
            cr_assert_lt(error, 6e-4, "Sk %d: %g", (int)Sk, error);
        }
        fattn_ctx_destroy(ctx);
    }
}

/* Keys of far scores that come late (NUMERICS.md, "Limits"): right up to 2^28 in units of log2, NaN beyond
   on Hopper, right everywhere else. Rows and all keys are alike but for key 3, which is visited last. */
Test(cuda_huge, late_scores, .timeout = 100) {
    for (int portable = 0; portable < 2; ++portable) {
        fattn_ctx *const ctx = device_context(portable ? 80 : 0);
        if (!ctx) cr_skip_test("no CUDA device");
        for (int n = 0; n < 12; ++n) {
            const int exponent = n % 3 == 0 ? 20 : n % 3 == 1 ? 27 : 30;
            const attention_case a = {.name = "late",
                                      .dtype = n / 3 % 2 ? FATTN_F16 : FATTN_BF16,
                                      .B = 1,
                                      .Hq = 1,
                                      .Sq = 256,
                                      .Sk = 1024,
                                      .D = n / 6 ? 128 : 64,
                                      .scale = 1};
            call *const c = call_new(ctx, &a);
            double *const q = call_read(c, CALL_Q), *const k = call_read(c, CALL_K), *const v = call_read(c, CALL_V);
            for (int64_t e = 0; e < a.Sq * a.D; ++e) q[e] = e % a.D ? 0 : ldexp(1, exponent / 2);
            for (int64_t e = 0; e < a.Sk * a.D; ++e)
                k[e] = e / a.D == 3 && e % a.D == 0 ? ldexp(1, exponent - exponent / 2) : 0;
            call_write(c, CALL_Q, q);
            call_write(c, CALL_K, k);
            call_run(c);
            double *const o = call_read(c, CALL_O), *const L = call_read(c, CALL_LSE);
            const bool nan = exponent > 27 && strstr(c->plan.fwd_kernel, "sm90");
            for (int64_t i = 0; i < a.Sq; ++i) {
                cr_assert(nan ? isnan(L[i]) : fabs(L[i] / ldexp(1, exponent) - 1) < 0x1p-22, "2^%d, %s: L %g", exponent,
                          c->plan.fwd_kernel, L[i]);
                for (int64_t d = 0; d < a.D; ++d)
                    cr_assert(nan ? isnan(o[i * a.D + d])
                                  : fabs(o[i * a.D + d] - v[3 * a.D + d]) <= 0x1p-7 * fabs(v[3 * a.D + d]),
                              "2^%d, %s: o %g, v %g", exponent, c->plan.fwd_kernel, o[i * a.D + d], v[3 * a.D + d]);
            }
            free(q), free(k), free(v), free(o), free(L);
            call_free(c);
        }
        fattn_ctx_destroy(ctx);
    }
}
