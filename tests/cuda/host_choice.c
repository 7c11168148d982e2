/* Which kernels the CUDA backend's host code takes for a call, tested without a GPU. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/attention/kernel.h"
#include "fwd/cuda/fwd_cuda.h"
#include "host_calls.h"

#include <criterion/criterion.h>
#include <fattn/fp8.h>
#include <string.h>

/* No mask, causal, a window; then with a bias, ALiBi, softcap, a sink and dropout. */
enum { MASKS = 6 };
static void describe_call(shapes *x, fattn_tensor *extra, fattn_dtype dtype, int64_t Sq, int64_t Sk, int64_t D,
                          int mask, bool tf32) {
    describe(x, dtype, 4, Sq, Sk, D);
    x->p.flags = (mask % 3 == 1 ? FATTN_CAUSAL : mask % 3 == 2 ? FATTN_WINDOW : 0) | (tf32 ? FATTN_TF32 : 0);
    x->p.window_left = x->p.window_right = 100;
    if (mask < 3) return;
    const fattn_dtype statistic = (fattn_dtype)x->lse.dtype;
    extra[0] = fattn_tensor_view(place(50), dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, 4, Sq, Sk});
    extra[1] = fattn_tensor_view(place(51), statistic, FATTN_CUDA, 0, 1, (int64_t[]){4});
    extra[2] = fattn_tensor_view(place(52), statistic, FATTN_CUDA, 0, 1, (int64_t[]){4});
    x->io.bias = &extra[0], x->io.alibi = &extra[1], x->io.sink = &extra[2];
    x->p.softcap = 30, x->p.dropout_p = 0.1f;
}

/* Why a device has no fused kernels, in the error message; NULL: it has. */
static const char *refusal(int arch, fattn_dtype dtype, int64_t D) {
    const size_t kib = fattni_cuda_shared_of(arch) >> 10;
    if (arch < 80 && dtype == FATTN_BF16) return "needs sm_80 or later for BF16; F16 and F32 run here";
    if (dtype == FATTN_F16 || dtype == FATTN_BF16 || kib >= 163) return NULL;
    return D > 128 || (arch < 80 && dtype == FATTN_F64) ? "FATTN_ALGO_STANDARD and AUTO need none" : NULL;
}

/* Every dtype, head_dim and feature has kernels that fit; or AUTO is STANDARD, but for BF16 before sm_80. */
Test(host_choice, every_architecture_has_kernels) {
    static const int64_t dims[] = {1, 8, 33, 64, 72, 80, 96, 100, 128, 136, 192, 255, 256};
    for (int n = 0; n < ARCHITECTURES; ++n) {
        const int arch = architectures[n];
        const size_t limit = fattni_cuda_shared_of(arch);
        fattn_ctx *const ctx = planner(arch);
        for (int m = 0; m < 13 * 5 * MASKS; ++m) {
            const int64_t D = dims[m % 13];
            const fattn_dtype dtype = dtypes[m / 13 % 5 % 4];
            const bool tf32 = m / 13 % 5 == 4;
            shapes x;
            fattn_tensor extra[3];
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            describe_call(&x, extra, tf32 ? FATTN_F32 : dtype, 1000, 1100, D, m / 65, tf32);
            const char *const why = refusal(arch, tf32 ? FATTN_F32 : dtype, D);
            x.p.algorithm = FATTN_ALGO_FLASH2;
            const fattn_status s = fattn_attention_query(ctx, &x.p, &x.io, &plan);
            cr_assert_eq(s, why ? FATTN_E_UNSUPPORTED : FATTN_OK, "sm_%d, %s, head_dim %lld, mask %d: %s", arch,
                         fattn_dtype_name(dtype), (long long)D, m / 65, fattn_ctx_error(ctx));
            cr_assert(!why || strstr(fattn_ctx_error(ctx), why), "sm_%d: %s", arch, fattn_ctx_error(ctx));
            x.p.algorithm = FATTN_ALGO_AUTO;
            const bool none = arch < 80 && dtype == FATTN_BF16 && !tf32;
            cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), none ? FATTN_E_UNSUPPORTED : FATTN_OK, "%s",
                         fattn_ctx_error(ctx));
            if (none) continue;
            cr_assert_eq((strstr(plan.fwd_kernel, "fattn_fwd_standard_cuda") != NULL), why != NULL, "%s",
                         plan.fwd_kernel);
            cr_assert_eq((strstr(plan.bwd_kernel, "fattn_bwd_standard_cuda") != NULL), why != NULL, "%s",
                         plan.bwd_kernel);
            cr_assert((plan.saved_bytes >= 4 * 1000 * 1100 * 4) == (why != NULL));
            if (why) continue;
            const fattni_cuda_kernel *const fwd = kernel_called(fattni_fwd_cuda_kernels, plan.fwd_kernel),
                                            *const bwd = kernel_called(fattni_bwd_cuda_kernels, plan.bwd_kernel);
            cr_assert(fwd->shared <= limit && bwd->shared <= limit);
            cr_assert_eq(fwd->tf32, bwd->tf32, "%s, %s: delta must be that of the rounded O", fwd->name, bwd->name);
            cr_assert(fwd->D >= D && fwd->Dv >= D && bwd->D >= D && bwd->Dv >= D && fwd->dtype == x.t[Q].dtype &&
                      bwd->dtype == x.t[Q].dtype);
            const int64_t padded = 2 * (D > 64 ? D : 64);
            cr_assert(fwd->D < padded && bwd->D < padded, "sm_%d, head_dim %lld: %s, %s", arch, (long long)D, fwd->name,
                      bwd->name);
            cr_assert((arch == 90) == (fwd->arch == 90) || arch == 90);
            cr_assert(arch >= 80 || (fwd->arch == 75 && bwd->arch == 75));
            /* 8 warps per SM, where another kernel of this dtype and head_dim would have them */
            const int64_t most = (int64_t)(limit + 1024);
            if (dtype == FATTN_BF16 && !tf32) {
                cr_assert_geq(most / (int64_t)(fwd->shared + 1024) * (fwd->threads / 32), 8, "%s", fwd->name);
                cr_assert_geq(most / (int64_t)(bwd->shared + 1024) * (bwd->threads / 32), 8, "%s", bwd->name);
            }
        }
        fattn_ctx_destroy(ctx);
    }
}

/* Which kernels the tables of bench/results/cards_h200.txt are of. */
Test(host_choice, kernels_by_shared_memory) {
    static const struct {
        int arch;
        int64_t D;
        const char *fwd, *bwd;
    } calls[] = {{80, 64, "mma16_bf16_d64_plain_128x128", "mma16_ahead_bf16_d64_plain_64x64"},
                 {80, 128, "mma16_bf16_d128_plain_128x64", "mma16_bf16_d128_plain_64x128"},
                 {80, 256, "mma16_pairs_bf16_d256_plain_128x64", "mma16_mid_bf16_d256_plain_64x64"},
                 {89, 64, "mma16_bf16_d64_plain_128x128", "mma16_mid_bf16_d64_plain_64x64"},
                 {89, 128, "mma16_bf16_d128_full_128x32", "mma16_keys_bf16_d128_plain_64x128"},
                 {89, 256, "mma16_lean_bf16_d256_plain_128x64", "mma16_mid_bf16_d256_plain_32x64"},
                 {100, 64, "mma16_bf16_d64_plain_128x128", "mma16_bf16_d64_plain_64x64"},
                 {100, 256, "mma16_bf16_d256_plain_64x64", "mma16_bf16_d256_plain_64x64"}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; ++n) {
        fattn_ctx *const ctx = planner(calls[n].arch);
        shapes x;
        describe(&x, FATTN_BF16, 4, 4096, 4096, calls[n].D);
        const fattn_attention_plan plan = plan_of(ctx, &x);
        cr_assert_str_eq(plan.fwd_kernel + strlen("fattn_fwd_"), calls[n].fwd, "sm_%d", calls[n].arch);
        cr_assert_str_eq(plan.bwd_kernel + strlen("fattn_bwd_"), calls[n].bwd, "sm_%d", calls[n].arch);
        fattn_ctx_destroy(ctx);
    }
}

/* Hopper's kernels for head_dim up to 192: V has a width of its own; and where O cannot be stored by its tensor map the
   banded forward runs, if the plain one knows no other way. */
Test(host_choice, hopper_of_head_dim_192) {
    enum { FULL, CAUSAL, WINDOW, SOFTCAP, WIDE, WIDE_CAUSAL };
    static const struct {
        int64_t D, Dv;
        int call;
        const char *fwd, *bwd;
    } calls[] = {
        {192, 128, FULL, "d192_v128_full_128x128", "d192_v128_full_64x128"},
        {192, 128, CAUSAL, "d192_v128_causal_128x128", "d192_v128_causal_64x128"},
        {192, 128, WINDOW, "d192_v128_banded_128x128", "d192_v128_banded_64x128"},
        {192, 128, SOFTCAP, "d192_v128_general_128x112", "d192_v128_capped_64x64"},
        {192, 128, WIDE, "d192_v128_banded_128x128", "d192_v128_full_64x128"},
        {192, 128, WIDE_CAUSAL, "d192_v128_banded_128x128", "d192_v128_causal_64x128"},
        {136, 8, CAUSAL, "d192_v128_causal_128x128", "d192_v128_causal_64x128"},
        {192, 136, FULL, "d192_full_128x112", "d256_full_64x64"},
        {192, 192, CAUSAL, "d192_causal_128x112", "d256_causal_64x64"},
        {192, 192, WINDOW, "d192_banded_128x112", "d256_banded_64x64"},
        {192, 192, SOFTCAP, "d192_general_128x112", "d256_capped_64x64"},
        {192, 192, WIDE, "d192_full_128x112", "d256_full_64x64"},
        {128, 192, FULL, "d192_full_128x112", "d256_full_64x64"},
        {128, 128, CAUSAL, "d128_causal_128x128", "d128_causal_64x128"},
        {200, 128, FULL, "d256_full_128x80", "d256_full_64x64"},
        {192, 200, CAUSAL, "d256_short_128x64", "d256_causal_64x64"},
        {96, 80, FULL, "d96_full_128x128", "d96_full_64x128"},
        {256, 256, WIDE_CAUSAL, "d256_causal_128x80", "d256_causal_64x64"},
    };
    for (int arch = 80; arch <= 90; arch += 10)
        for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
            const int64_t D = calls[n / 2].D, Dv = calls[n / 2].Dv;
            const int call = calls[n / 2].call;
            fattn_ctx *const ctx = planner(arch);
            shapes x;
            describe(&x, dtypes[n % 2], 40, 1000, 1000, D);
            static const int of_v[] = {V, O, D_O, DV};
            for (int t = 0; t < 4; ++t)
                x.t[of_v[t]] =
                    fattn_tensor_view(place(of_v[t]), call >= WIDE && of_v[t] == O ? FATTN_F32 : dtypes[n % 2],
                                      FATTN_CUDA, 0, 4, (int64_t[]){1, 40, 1000, Dv});
            x.p.flags = call == CAUSAL || call == WIDE_CAUSAL ? FATTN_CAUSAL : call == WINDOW ? FATTN_WINDOW : 0;
            x.p.window_left = x.p.window_right = 100;
            x.p.softcap = call == SOFTCAP ? 30 : 0;
            const fattn_attention_plan plan = plan_of(ctx, &x);
            cr_assert_eq(strstr(plan.fwd_kernel, calls[n / 2].fwd) != NULL, arch == 90, "sm_%d, %lld, %lld: %s", arch,
                         (long long)D, (long long)Dv, plan.fwd_kernel);
            const fattni_cuda_kernel *const bwd = kernel_called(fattni_bwd_cuda_kernels, plan.bwd_kernel);
            cr_assert(bwd->D >= D && bwd->Dv >= Dv, "%s", bwd->name);
            cr_assert_eq(strstr(bwd->name, calls[n / 2].bwd) != NULL && bwd->arch == 90, arch == 90,
                         "sm_%d, %lld, %lld: %s", arch, (long long)D, (long long)Dv, bwd->name);
            fattn_ctx_destroy(ctx);
        }
}

/* Which instance Hopper's backward has: the plainest one that knows a call's features. */
Test(host_choice, hopper_backward_variants) {
    enum { FULL, CAUSAL, WINDOW, SINK, PADDED, PACKED, ALIBI, CAPPED_WINDOW };
    static const struct {
        int64_t D;
        int call;
        const char *bwd;
    } calls[] = {
        {64, FULL, "d64_full_128x128"},     {64, CAUSAL, "d64_causal_128x128"},  {64, WINDOW, "d64_banded_128x128"},
        {64, SINK, "d64_banded_128x128"},   {64, PADDED, "d64_banded_128x128"},  {64, PACKED, "d64_banded_128x128"},
        {64, ALIBI, "d64_general_128x128"}, {40, WINDOW, "d64_banded_128x128"},  {80, WINDOW, "d128_banded_64x128"},
        {96, CAUSAL, "d96_causal_64x128"},  {128, PACKED, "d128_banded_64x128"}, {128, ALIBI, "d128_general_64x128"},
        {128, CAUSAL, "d128_causal"},       {128, CAPPED_WINDOW, "d128_capped"}, {136, WINDOW, "d256_banded_64x64"},
        {256, SINK, "d256_banded_64x64"},   {256, PADDED, "d256_general_64x64"}, {256, PACKED, "d256_general_64x64"},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        const int call = calls[n / 2].call;
        const int64_t lengths[1] = {call == PACKED ? 3 : 1};
        fattn_ctx *const ctx = planner(90);
        shapes x;
        describe(&x, dtypes[n % 2], 4, 1100, 1100, calls[n / 2].D);
        fattn_tensor length = fattn_tensor_view(place(50), FATTN_I32, FATTN_CUDA, 0, 1, lengths),
                     head = fattn_tensor_view(place(51), FATTN_F32, FATTN_CUDA, 0, 1, (int64_t[]){4});
        x.p.flags = call == CAUSAL ? FATTN_CAUSAL : call == WINDOW || call == CAPPED_WINDOW ? FATTN_WINDOW : 0;
        x.p.window_left = x.p.window_right = 100;
        if (call == SINK) x.io.sink = &head;
        if (call == ALIBI) x.io.alibi = &head;
        if (call == PADDED) x.io.seqlens_k = &length;
        if (call == PACKED) x.io.cu_seqlens_q = x.io.cu_seqlens_k = &length;
        if (call == PACKED) x.p.max_seqlen_q = x.p.max_seqlen_k = 700;
        if (call == CAPPED_WINDOW) x.p.softcap = 30;
        const fattn_attention_plan plan = plan_of(ctx, &x);
        cr_assert(strstr(plan.bwd_kernel, calls[n / 2].bwd), "head_dim %lld, call %d: %s", (long long)calls[n / 2].D,
                  call, plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Short rows: a CTA has all key blocks of a head, where heads keep the SMs busy. */
Test(host_choice, hopper_short_rows) {
    enum { PLAIN, ORDERED, FULL, GROUPED, LONGER, ADDS, EXACT, D_LSE };
    static const struct {
        int64_t B, N, D;
        int call;
        const char *kernel; /* NULL: none of these */
    } calls[] = {
        {1, 1, 64, PLAIN, "d64_short_1"},
        {8, 256, 32, PLAIN, "d64_short_1"},
        {64, 256, 64, PLAIN, "d64_short_1"},
        {8, 256, 64, ORDERED, "d64_short_1"},
        {20, 257, 64, PLAIN, "d64_short_1"},
        {33, 512, 64, PLAIN, "d64_short_1"},
        {1, 257, 64, PLAIN, NULL},
        {34, 512, 64, PLAIN, NULL},
        {48, 512, 64, PLAIN, "d64_short_1"},
        {66, 513, 64, PLAIN, "d64_heads_1"},
        {64, 256, 72, PLAIN, NULL},
        {64, 256, 64, FULL, "d64_heads_full"},
        {64, 256, 64, GROUPED, NULL},
        {64, 256, 64, LONGER, NULL},
        {64, 256, 64, ADDS, NULL},
        {64, 256, 64, EXACT, "d64_short_1"},
        {64, 256, 64, D_LSE, NULL},
        {50, 640, 64, FULL, NULL},
        {66, 640, 64, FULL, "d64_heads_full"},
        {66, 641, 64, FULL, NULL},
        {64, 384, 128, FULL, "d128_heads_full"},
        {64, 385, 128, FULL, NULL},
        {66, 768, 128, PLAIN, "d128_heads_6"},
        {66, 769, 128, PLAIN, NULL},
        {25, 512, 128, PLAIN, "d128_heads_6"},
        {10, 512, 128, PLAIN, NULL},
        {40, 512, 128, PLAIN, NULL},
        {64, 100, 112, PLAIN, "d128_heads_6"},
        {66, 1024, 64, PLAIN, "d64_heads_1"},
        {66, 1025, 64, PLAIN, NULL},
        {1, 512, 128, ORDERED, "d128_heads_6"},
        {66, 513, 64, ORDERED, NULL},
        {64, 256, 96, PLAIN, NULL},
        {128, 512, 128, ORDERED, "d128_heads_6"},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        const int call = calls[n / 2].call;
        const int64_t B = calls[n / 2].B, N = calls[n / 2].N, D = calls[n / 2].D;
        fattn_ctx *const ctx = planner(90);
        shapes x;
        describe(&x, dtypes[n % 2], 4, N, call == LONGER ? N + 1 : N, D);
        static const int of_keys[] = {K, V, DK, DV};
        for (int t = 0; t < TENSORS; ++t) x.t[t].shape[0] = B;
        x.lse.shape[0] = B, ctx->gpu.sms = 132;
        for (int t = 0; t < 4 && call == GROUPED; ++t) x.t[of_keys[t]].shape[1] = 2;
        fattn_tensor d_lse = fattn_tensor_view(place(50), FATTN_F32, FATTN_CUDA, 0, 3, (int64_t[]){B, 4, N});
        if (call == D_LSE) x.io.d_lse = &d_lse;
        x.p.flags = call == FULL ? 0 : FATTN_CAUSAL;
        x.p.flags |= call == ORDERED ? FATTN_DETERMINISTIC : call == ADDS ? FATTN_ACC_DQ : 0;
        x.p.flags |= call == EXACT ? FATTN_EXACT_DELTA : 0;
        const fattn_attention_plan plan = plan_of(ctx, &x);
        const char *const kernel = calls[n / 2].kernel;
        cr_assert(kernel ? strstr(plan.bwd_kernel, kernel) != NULL
                         : !strstr(plan.bwd_kernel, "short") && !strstr(plan.bwd_kernel, "heads"),
                  "%lld, %lld, head_dim %lld, call %d: %s", (long long)B, (long long)N, (long long)D, call,
                  plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Which kernels take a bias on Hopper: biased ones of rows that tensor maps can describe, in q's dtype and without
   other general features. */
Test(host_choice, hopper_with_bias) {
    enum { PLAIN, SHARED, PADDED, ODD_ROWS, ONE_ROW, WIDE, ALIBI, CAPPED, DROPPED, CALLS };
    for (int n = 0; n < 2 * 5 * CALLS; ++n) {
        const fattn_dtype dtype = dtypes[n % 2];
        const int64_t D = (const int64_t[]){40, 128, 192, 256, 192}[n / 2 % 5], Sk = 1000;
        const int call = n / 10;
        fattn_ctx *const ctx = planner(90);
        shapes x;
        describe(&x, dtype, 4, 1000, Sk, D);
        static const int of_v[] = {V, DV, O, D_O};
        for (int i = 0; i < 4 && n / 2 % 5 == 4;
             ++i) /* V of 128 beside that: kernels of other sizes for other addresses */
            x.t[of_v[i]] =
                fattn_tensor_view(place(of_v[i]), dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, 4, i < 2 ? Sk : 1000, 128});
        const int64_t shape[4] = {1, call == SHARED ? 1 : 4, call == ONE_ROW ? 1 : 1000, Sk};
        fattn_tensor bias = fattn_tensor_view(place(50), call == WIDE ? FATTN_F32 : dtype, FATTN_CUDA, 0, 4, shape),
                     head = fattn_tensor_view(place(51), FATTN_F32, FATTN_CUDA, 0, 1, (int64_t[]){4}),
                     length = fattn_tensor_view(place(52), FATTN_I32, FATTN_CUDA, 0, 1, (int64_t[]){1});
        if (call == ODD_ROWS) bias.stride[2] += 4, bias.stride[1] = 1000 * bias.stride[2];
        x.io.bias = &bias;
        if (call == ALIBI) x.io.alibi = &head;
        if (call == PADDED) x.io.seqlens_k = &length;
        if (call == CAPPED) x.p.softcap = 30;
        if (call == DROPPED) x.p.dropout_p = 0.1f;
        const fattn_attention_plan plan = plan_of(ctx, &x);
        const bool biased = call <= PADDED;
        cr_assert_eq(strstr(plan.fwd_kernel, "biased") != NULL, biased, "%d: %s", call, plan.fwd_kernel);
        cr_assert_eq(strstr(plan.bwd_kernel, "biased") != NULL, biased, "%d: %s", call, plan.bwd_kernel);
        const size_t workspace = plan.bwd_workspace;
        bias.data = (char *)bias.data + fattn_dtype_size((fattn_dtype)bias.dtype);
        const fattn_attention_plan elsewhere = plan_of(ctx, &x);
        cr_assert(!strstr(elsewhere.bwd_kernel, "biased"), "%d: %s", call, elsewhere.bwd_kernel);
        cr_assert_eq(elsewhere.bwd_workspace, workspace, "%d: at other addresses", call);
        /* Other forward kernels for Hopper above head_dim 128 would leave a bias out. */
        cr_assert_eq(strstr(plan.fwd_kernel, "sm90") != NULL, biased || D <= 128, "%d: %s", call, plan.fwd_kernel);
        cr_assert(strstr(plan.bwd_kernel, "sm90"), "%d: %s", call, plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Few rows of 16 bits have their keys split, on every device, whatever the features and the batch. */
Test(host_choice, few_rows) {
    for (int n = 0; n < ARCHITECTURES; ++n) {
        fattn_ctx *const ctx = planner(architectures[n]);
        for (int m = 0; m < 2 * 3 * 2 * 4 * MASKS; ++m) {
            const fattn_dtype dtype = dtypes[m % 2];
            const int64_t D = (const int64_t[]){40, 128, 200}[m / 2 % 3], keys = m / 6 % 2 ? 100000 : 100;
            const int64_t Sq = (const int64_t[]){1, 7, 16, 17}[m / 12 % 4];
            if (architectures[n] < 80 && dtype == FATTN_BF16) continue;
            shapes x;
            fattn_tensor extra[3];
            describe_call(&x, extra, dtype, Sq, keys, D, m / 48, false);
            const fattn_attention_plan plan = plan_of(ctx, &x);
            cr_assert_eq(strstr(plan.fwd_kernel, "_few_") != NULL, Sq <= 16, "sm_%d, %lld rows: %s", architectures[n],
                         (long long)Sq, plan.fwd_kernel);
            const bool window = m / 48 % 3 == 2; /* of fewer keys than a part has */
            if (Sq > 16) continue;
            if (architectures[n] == 90) /* a cluster needs no memory for eight parts or fewer */
                cr_assert(plan.fwd_workspace == 0 || (keys > 100 && !window), "%zu bytes", plan.fwd_workspace);
            else
                cr_assert_eq(plan.fwd_workspace > 0, keys > 100 && !window, "%zu bytes", plan.fwd_workspace);
        }
        fattn_ctx_destroy(ctx);
    }
}

/* FATTN_FP8_RENEW: backward's kernel is that of calls without FATTN_FP8, its workspace O, L and the larger one of both
   passes without it. Where these store N x N, as on no device that has FATTN_FP8, backward refuses. */
Test(host_choice, fp8_renewed) {
    fattn_ctx *const ctx = planner(90);
    fattn_tensor extra[3];
    shapes x;
    for (int m = 0; m < 3 * 4 * 3 * 4; ++m) {
        const int64_t D = (const int64_t[]){40, 64, 128, 256}[m / 3 % 4];
        const int64_t Sq = (const int64_t[]){1, 16, 99, 1000}[m / 36];
        describe_call(&x, extra, dtypes[m % 3], Sq, 5000, D, m / 12 % 3, false);
        const fattn_attention_plan plain = plan_of(ctx, &x);
        x.p.flags |= FATTN_FP8 | FATTN_FP8_RENEW;
        const fattn_attention_plan plan = plan_of(ctx, &x);
        const int64_t o = fattn_tensor_numel(&x.t[O]) * (int64_t)fattn_dtype_size(dtypes[m % 3]),
                      parts = fattni_round_up(o, FATTNI_ALIGN) + fattni_round_up((int64_t)plan.lse_bytes, FATTNI_ALIGN);
        const size_t larger = plain.fwd_workspace > plain.bwd_workspace ? plain.fwd_workspace : plain.bwd_workspace;
        cr_assert_eq(plan.bwd_workspace, (size_t)parts + larger, "%s: %zu, %zu", plan.bwd_kernel, plan.bwd_workspace,
                     larger);
        cr_assert_str_eq(plan.bwd_kernel, plain.bwd_kernel);
        cr_assert(strstr(plan.fwd_kernel, "_f8_"), "%s", plan.fwd_kernel);
        x.io.d_o = NULL;
        cr_assert_geq(plan_of(ctx, &x).bwd_workspace, (size_t)parts + larger);
    }
    fattn_ctx_destroy(ctx);
    fattn_ctx *const small = planner(86);
    describe_call(&x, extra, FATTN_F32, 100, 100, 256, 0, false);
    x.p.flags = FATTN_FP8 | FATTN_FP8_RENEW;
    fattni_call call;
    cr_assert_eq(fattni_prepare(small, &x.p, &x.io, FATTNI_BWD, fattni_bwd_table, &call), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(small), "FATTN_FP8_RENEW: fattn_fwd_standard_cuda stores N x N, "), "%s",
              fattn_ctx_error(small));
    fattn_ctx_destroy(small);
}

/* FATTN_FP8_INT8: a Hopper kernel of that name, and copies of integers; on other GPUs neither. */
Test(host_choice, fp8_integers) {
    static const int archs[2] = {90, 80};
    for (int n = 0; n < 2; ++n) {
        fattn_ctx *const ctx = planner(archs[n]);
        fattn_tensor extra[3];
        shapes x;
        size_t bytes = 0;
        fattn_fp8 copies;
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        describe_call(&x, extra, FATTN_BF16, 100, 300, 128, 0, false);
        x.p.flags |= FATTN_FP8 | FATTN_FP8_INT8;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), n ? FATTN_E_UNSUPPORTED : FATTN_OK);
        if (n)
            cr_assert(strstr(fattn_ctx_error(ctx), "needs a Hopper GPU"), "%s", fattn_ctx_error(ctx));
        else
            cr_assert(strstr(plan.fwd_kernel, "fwd_sm90_i8_i8_d128_full"), "%s", plan.fwd_kernel);
        cr_assert_eq(fattn_fp8_layout(ctx, &x.p, &x.io, NULL, &bytes, NULL), n ? FATTN_E_UNSUPPORTED : FATTN_OK);
        if (n == 0) {
            cr_assert_eq(fattn_fp8_layout(ctx, &x.p, &x.io, place(60), &bytes, &copies), FATTN_OK);
            cr_assert(copies.q8.dtype == FATTN_I8 && copies.k8.dtype == FATTN_I8 && copies.v8.dtype == FATTN_F8E4M3);
            cr_assert(copies.k_scale.ndim == 3 && copies.k_scale.shape[2] == 3 * 128 / 8);
        }
        fattn_ctx_destroy(ctx);
    }
}

/* FATTN_UNIFIED_MAX: BF16, few rows, no feature of a general kernel; else the reason. */
Test(host_choice, unified_maximum) {
    for (int n = 0; n < ARCHITECTURES; ++n) {
        fattn_ctx *const ctx = planner(architectures[n]);
        for (int m = 0; m < 4 * 2 * MASKS; ++m) {
            const fattn_dtype dtype = dtypes[m % 4];
            const int64_t Sq = m / 4 % 2 ? 17 : 16;
            shapes x;
            fattn_tensor extra[3];
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            if (architectures[n] < 80 && dtype == FATTN_BF16) continue;
            describe_call(&x, extra, dtype, Sq, 5000, 128, m / 8, false);
            x.p.flags |= FATTN_UNIFIED_MAX;
            const fattn_status s = fattn_attention_query(ctx, &x.p, &x.io, &plan);
            const bool runs = dtype == FATTN_BF16 && Sq == 16 && m / 8 < 3;
            cr_assert_eq(s, runs ? FATTN_OK : FATTN_E_UNSUPPORTED, "%s", fattn_ctx_error(ctx));
            cr_assert(runs ? strstr(plan.fwd_kernel, "_few_unified_") : strstr(fattn_ctx_error(ctx), "UNIFIED_MAX"),
                      "%s, %s", plan.fwd_kernel, fattn_ctx_error(ctx));
        }
        fattn_ctx_destroy(ctx);
    }
}

/* More rows of a group than an int counts are not packed into tiles. */
Test(host_choice, few_rows_of_too_many_heads) {
    fattn_ctx *const ctx = planner(90);
    for (int n = 0; n < 2; ++n) {
        shapes x;
        const int64_t H = n ? 1 << 28 : 1 << 20;
        describe(&x, FATTN_BF16, H, 16, 100, 64);
        const int keys[] = {K, V, DK, DV};
        for (int t = 0; t < 4; ++t) x.t[keys[t]].shape[1] = 1;
        const fattn_attention_plan plan = plan_of(ctx, &x);
        cr_assert_eq(strstr(plan.fwd_kernel, "_few_") != NULL, n == 0, "%s", plan.fwd_kernel);
    }
    fattn_ctx_destroy(ctx);
}

/* Calls with too many tiles for the Hopper kernels use other kernels. */
Test(host_choice, too_many_tiles_for_hopper) {
    fattn_ctx *const ctx = planner(90);
    for (int n = 0; n < 4; ++n) {
        shapes x;
        const int64_t H = n % 2 ? 1 << 27 : 1 << 20;
        describe(&x, dtypes[n / 2], H, 100, n % 2 ? 64 : 100, 64);
        const fattn_attention_plan plan = plan_of(ctx, &x);
        cr_assert(strstr(plan.bwd_kernel, n % 2 ? "mma16" : "sm90"), "%s", plan.bwd_kernel);
    }
    fattn_ctx_destroy(ctx);
}

/* Marks the kernel that a plan names. */
static void mark(const fattni_cuda_kernel *const *list, bool *planned, const char *name) {
    for (int n = 0; list[n]; ++n) planned[n] |= !strcmp(list[n]->name, name);
}
/* Names of kernels that no plan has named, but for those that run beside a planned one: of rows and sums that it leaves
   out, of bias's gradient, and of sums that a softcap needs. */
static void add_unplanned(const fattni_cuda_kernel *const *list, const bool *planned, char *text, size_t size) {
    for (int n = 0; list[n]; ++n) {
        const char *const name = list[n]->name;
        const bool beside = strstr(name, "_huge_") || strstr(name, "_add_parts") || strstr(name, "_sm90_dbias_") ||
                            strstr(name, "_capped_sums_");
        if (!planned[n] && !beside && strlen(text) + strlen(name) + 2 < size) strcat(strcat(text, " "), name);
    }
}

/* No kernel is built that no call would get. */
Test(host_choice, every_kernel_is_planned) {
    enum { KERNELS = 1000, DIMS = 8, SIZES = 18, FEATURES = 8 };
    static const int64_t dims[DIMS][2] = {{59, 59},   {64, 64},   {80, 80},   {96, 96},
                                          {128, 128}, {192, 128}, {192, 192}, {256, 256}}; /* D, Dv */
    /* Heads of q, Sq, Sk, heads of k; a planner counts one SM */
    static const int64_t sizes[SIZES][4] = {
        {1, 1, 80, 1},      {2, 1, 80, 2},      {16, 4, 64, 16},   {512, 1, 80, 512},    {512, 16, 80, 512},
        {1, 1, 8192, 1},    {16, 16, 8192, 16}, {64, 100, 64, 64}, {8, 512, 512, 8},     {8, 1000, 512, 8},
        {8, 4096, 4096, 8}, {8, 1, 1 << 20, 8}, {1, 200, 8192, 1}, {64, 4096, 4096, 64}, {16, 4, 8192, 1},
        {16, 16, 8192, 1},  {8, 200, 200, 8},   {8, 700, 700, 8}};
    static bool fwd[KERNELS], bwd[KERNELS];
    for (int a = 0; a < ARCHITECTURES; ++a) {
        fattn_ctx *const ctx = planner(architectures[a]);
        for (int n = 0; n < DIMS * SIZES * 3 * FEATURES * 5; ++n) {
            const int64_t *const d = dims[n % DIMS], *const size = sizes[n / DIMS % SIZES];
            const int calls = n / (DIMS * SIZES), mask = calls % 3, feature = calls / 3 % FEATURES,
                      type = calls / 3 / FEATURES;
            const fattn_dtype dtype = dtypes[type % 4]; /* the fifth type is TF32 */
            const uint32_t int8 = FATTN_FP8 | FATTN_FP8_INT8;
            const int64_t bias[] = {1, size[0], size[1], size[2]};
            shapes x;
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            describe(&x, type == 4 ? FATTN_F32 : dtype, size[0], size[1], size[2], d[0]);
            const int of_k[] = {K, V, DK, DV}, of_v[] = {V, O, D_O, DV};
            for (int t = 0; t < 4; ++t) x.t[of_k[t]].shape[1] = size[3];
            for (int t = 0; t < 4; ++t) {
                const fattn_tensor *const old = &x.t[of_v[t]];
                const int64_t shape[] = {1, old->shape[1], old->shape[2], d[1]};
                x.t[of_v[t]] = fattn_tensor_view(old->data, (fattn_dtype)old->dtype, FATTN_CUDA, 0, 4, shape);
            }
            x.p.flags = (mask == 1 ? FATTN_CAUSAL : mask == 2 ? FATTN_WINDOW : 0) | (type == 4 ? FATTN_TF32 : 0);
            x.p.window_left = x.p.window_right = 100;
            const fattn_tensor scores = fattn_tensor_view(place(50), (fattn_dtype)x.t[Q].dtype, FATTN_CUDA, 0, 4, bias);
            const fattn_tensor sink =
                fattn_tensor_view(place(51), (fattn_dtype)x.lse.dtype, FATTN_CUDA, 0, 1, bias + 1);
            if (feature == 1) x.p.softcap = 30;
            if (feature == 2) x.io.bias = &scores;
            if (feature == 3) x.io.sink = &sink;
            if (feature == 4) x.p.flags |= FATTN_UNIFIED_MAX;
            if (feature == 5) x.p.flags |= FATTN_FP8;
            if (feature == 6) x.p.flags |= int8;
            if (feature == 7) x.p.dropout_p = 0.1f;
            if (fattn_attention_query(ctx, &x.p, &x.io, &plan) != FATTN_OK) continue;
            mark(fattni_fwd_cuda_kernels, fwd, plan.fwd_kernel);
            mark(fattni_bwd_cuda_kernels, bwd, plan.bwd_kernel);
        }
        fattn_ctx_destroy(ctx);
    }
    char names[4000] = "";
    add_unplanned(fattni_fwd_cuda_kernels, fwd, names, sizeof names);
    add_unplanned(fattni_bwd_cuda_kernels, bwd, names, sizeof names);
    cr_assert_str_eq(names, "", "%s", names);
}
