/* FATTN_ALGO_STANDARD and FATTN_ALGO_FLASH1 on the device against the reference: every feature and dtype; as
   graphs; unsupported calls have an error message. */
#include "device.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static fattn_ctx *device_or_skip(void) {
    fattn_ctx *ctx = device_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    device_use(ctx);
    return ctx;
}

static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
static const int64_t dims[] = {64, 8, 80, 59, 1, 111, 200, 5};

static void check_features(int32_t algorithm) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < attention_feature_count; ++n)
        for (int k = 0; k < 4; ++k) {
            attention_case c = attention_features[n];
            c.algorithm = algorithm;
            c.dtype = types[k];
            c.layout = layouts[(n + k) % 4];
            if (k >= 2) c.sum_d_o = false;
            device_check(cpu, &c);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

static void check_mixtures(int32_t algorithm) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < 200; ++n) {
        attention_case c = attention_mix(n);
        char name[32];
        snprintf(name, sizeof name, "mix %d", n);
        c.name = name;
        c.algorithm = algorithm;
        c.dtype = types[n % 4];
        c.layout = layouts[n / 4 % 4];
        c.D = dims[n % 8], c.Dv = dims[n / 8 % 8];
        device_check(cpu, &c);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

static void check_shapes(int32_t algorithm) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    for (int n = 0; n < attention_shape_count; ++n)
        for (int k = 0; k < 4; ++k) {
            const attention_case c = {.name = "shape",
                                      .B = 2,
                                      .Hq = 4,
                                      .Hkv = 2,
                                      .Sq = attention_shapes[n].Sq,
                                      .Sk = attention_shapes[n].Sk,
                                      .D = dims[(n + k) % 8],
                                      .Dv = dims[(n + 3 * k) % 8],
                                      .flags = n % 2 ? FATTN_CAUSAL : 0,
                                      .dtype = types[k],
                                      .algorithm = algorithm,
                                      .d_lse = k == 2};
            device_check(cpu, &c);
        }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

Test(cuda_standard, features, .timeout = 200) { check_features(FATTN_ALGO_STANDARD); }
Test(cuda_standard, mixtures, .timeout = 200) { check_mixtures(FATTN_ALGO_STANDARD); }
Test(cuda_standard, shapes, .timeout = 200) { check_shapes(FATTN_ALGO_STANDARD); }
Test(cuda_flash1, features, .timeout = 200) { check_features(FATTN_ALGO_FLASH1); }
Test(cuda_flash1, mixtures, .timeout = 200) { check_mixtures(FATTN_ALGO_FLASH1); }
Test(cuda_flash1, shapes, .timeout = 200) { check_shapes(FATTN_ALGO_FLASH1); }

static const attention_case all_at_once = {.name = "all",
                                           .B = 2,
                                           .Hq = 4,
                                           .Hkv = 2,
                                           .Sq = 70,
                                           .Sk = 90,
                                           .D = 16,
                                           .Dv = 24,
                                           .flags = FATTN_CAUSAL,
                                           .softcap = 2,
                                           .dropout_p = 0.3f,
                                           .alibi = true,
                                           .sink = true,
                                           .d_lse = true,
                                           .bias = BIAS | BIAS_OVER_B,
                                           .lengths = LENGTHS_PADDED,
                                           .length_q = {70, 31},
                                           .length_k = {90, 47}};

/* Eager, then captured: the same bits; nothing allocates, synchronises or adds in a random order. */
Test(cuda_standard, graph) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    for (int k = 0; k < 4; ++k) {
        attention_case c = all_at_once;
        c.algorithm = FATTN_ALGO_STANDARD;
        c.dtype = types[k];
        attention *const eager = attention_new(cpu, &c), *const graph = attention_new(cpu, &c);
        eager->on_device = graph->on_device = device_run;
        attention_run(eager, ON_DEVICE);
        device_capture(true);
        attention_run(graph, ON_DEVICE);
        device_capture(false);
        attention_same_bits(eager, graph);
        attention_free(eager);
        attention_free(graph);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* The plan counts P, the mask and L, and what N x N takes. */
Test(cuda_standard, plan) {
    fattn_ctx *const gpu = device_or_skip();
    const int64_t q[4] = {2, 4, 100, 16}, L[3] = {2, 4, 100};
    fattn_tensor x = fattn_tensor_view(gpu, FATTN_BF16, FATTN_CUDA, 0, 4, q);
    fattn_tensor lse = fattn_tensor_view(gpu, FATTN_F32, FATTN_CUDA, 0, 3, L);
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &x, .k = &x, .v = &x, .o = &x, .lse = &lse};
    fattn_attention_params p = {.struct_size = sizeof p, .algorithm = FATTN_ALGO_STANDARD};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(gpu, &p, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(gpu));
    cr_assert_eq(plan.materialized_bytes, 2u * 4 * 100 * 100 * 2);
    cr_assert_eq(plan.saved_bytes, plan.materialized_bytes + 2u * 4 * 100 * 4);
    cr_assert_eq(plan.deterministic, 1u);
    const size_t without = plan.fwd_workspace;
    p.dropout_p = 0.5f;
    cr_assert_eq(fattn_attention_query(gpu, &p, &io, &plan), FATTN_OK);
    cr_assert_eq(plan.saved_bytes, 2u * 4 * 100 * (100 * 3 + 4));
    cr_assert_eq(plan.fwd_workspace, without + 2 * 4 * 100 * 100 * 2); /* keep P: whole 256s */
    cr_assert(strstr(plan.fwd_kernel, "standard_cuda_bf16"), "%s", plan.fwd_kernel);
    fattn_ctx_destroy(gpu);
}
