/* Sequences with more than 2^31 elements. */
#include "contexts.h"

#include <math.h>
#include <stdlib.h>

static fattn_tensor room(fattn_ctx *ctx, fattn_dtype dtype, int64_t rows, int64_t D, uint32_t stream) {
    fattn_tensor t;
    call_must(ctx, fattn_tensor_alloc(ctx, dtype, D ? 4 : 3, (int64_t[]){1, 1, rows, D}, &t), "room");
    if (stream)
        call_must(ctx, fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){.seed = 5, .stream = stream}), "room");
    else
        must(cudaMemset(t.data, 0xff, (size_t)fattn_tensor_numel(&t) * fattn_dtype_size(dtype)), "memset");
    return t;
}

/* Rows [begin, begin + count), row-major, as double; the caller frees them. */
static double *rows_of(fattn_ctx *ctx, const fattn_tensor *t, int64_t begin, int64_t count) {
    const fattn_tensor part = fattn_tensor_slice(t, 2, begin, begin + count);
    double *const x = malloc((size_t)fattn_tensor_numel(&part) * sizeof *x);
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, t->ndim, part.shape);
    call_must(ctx, fattn_tensor_copy(ctx, &host, &part), "rows");
    return x;
}

static void run_both(fattn_ctx *ctx, fattn_attention_io io) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    call_must(ctx, fattn_attention_query(ctx, NULL, &io, &plan), "query");
    const size_t bytes = plan.fwd_workspace > plan.bwd_workspace ? plan.fwd_workspace : plan.bwd_workspace;
    fattn_tensor memory;
    call_must(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)bytes}, &memory), "workspace");
    io.workspace = memory.data, io.workspace_bytes = bytes;
    call_must(ctx, fattn_attention_fwd(ctx, NULL, &io), plan.fwd_kernel);
    call_must(ctx, fattn_attention_bwd(ctx, NULL, &io), plan.bwd_kernel);
    call_must(ctx, fattn_ctx_sync(ctx), plan.bwd_kernel);
    fattn_tensor_free(ctx, &memory);
}

enum { FEW = 128 };
static void need_memory(size_t bytes) {
    size_t free_bytes = 0, all = 0;
    must(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    if (free_bytes < bytes) cr_skip_test("%zu bytes of %zu are free", free_bytes, bytes);
}

/* Every row sees the same FEW keys, so that rows of a long call equal those of a short one. */
static void check_long_rows(fattn_dtype dtype, int64_t D, int64_t S, int arch_cap) {
    need_memory((size_t)90 << 30);
    fattn_ctx *const ctx = context_of(NULL, 0, arch_cap);
    const fattn_dtype statistic = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const fattn_tensor k = room(ctx, dtype, FEW, D, 1), v = room(ctx, dtype, FEW, D, 2);
    const fattn_tensor q = room(ctx, dtype, S, D, 3); /* d_o, too */
    fattn_tensor t[] = {q,
                        k,
                        v,
                        room(ctx, dtype, S, D, 0),
                        room(ctx, statistic, S, 0, 0),
                        room(ctx, dtype, S, D, 0),
                        room(ctx, dtype, FEW, D, 0),
                        room(ctx, dtype, FEW, D, 0)};
    run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                       .q = &q,
                                       .k = &k,
                                       .v = &v,
                                       .o = &t[3],
                                       .lse = &t[4],
                                       .d_o = &q,
                                       .dq = &t[5],
                                       .dk = &t[6],
                                       .dv = &t[7]});
    const int64_t begins[] = {0, ((int64_t)1 << 31) / D - FEW / 2, S / 2, S - FEW};
    for (int n = 0; n < 4; ++n) {
        const fattn_tensor part = fattn_tensor_slice(&q, 2, begins[n], begins[n] + FEW);
        fattn_tensor few[] = {room(ctx, dtype, FEW, D, 0), room(ctx, statistic, FEW, 0, 0), room(ctx, dtype, FEW, D, 0),
                              room(ctx, dtype, FEW, D, 0), room(ctx, dtype, FEW, D, 0)};
        run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                           .q = &part,
                                           .k = &k,
                                           .v = &v,
                                           .o = &few[0],
                                           .lse = &few[1],
                                           .d_o = &part,
                                           .dq = &few[2],
                                           .dk = &few[3],
                                           .dv = &few[4]});
        for (int i = 0; i < 3; ++i) {
            double *const got = rows_of(ctx, &t[3 + i], begins[n], FEW), *const want = rows_of(ctx, &few[i], 0, FEW);
            const double unit = dtype == FATTN_BF16  ? 0x1p-8
                                : dtype == FATTN_F16 ? 0x1p-11
                                : dtype == FATTN_F32 ? 0x1p-20
                                                     : 0x1p-45;
            double most = 0;
            for (int64_t e = 0; e < fattn_tensor_numel(&few[i]); ++e) most = fmax(most, fabs(want[e]));
            for (int64_t e = 0; e < fattn_tensor_numel(&few[i]); ++e)
                cr_assert(fabs(got[e] - want[e]) <= 4 * unit * most, "%s d %lld, tensor %d, row %lld: %g, not %g",
                          fattn_dtype_name(dtype), (long long)D, i, (long long)(begins[n] + e / (i == 1 ? 1 : D)),
                          got[e], want[e]);
            free(got);
            free(want);
        }
        for (int i = 0; i < 5; ++i) fattn_tensor_free(ctx, &few[i]);
    }
    for (int i = 0; i < 8; ++i) fattn_tensor_free(ctx, &t[i]);
    call_must(ctx, fattn_ctx_sync(ctx), "free");
    fattn_ctx_destroy(ctx);
}

enum { RAGGED = 5000 };
Test(cuda_long, long_rows_bf16_d64, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 64, (1 << 27) + RAGGED, 0);
}
Test(cuda_long, long_rows_f16_d128, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F16, 128, (1 << 26) + RAGGED, 0);
}
Test(cuda_long, long_rows_bf16_d256, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 256, (1 << 25) + RAGGED, 0);
}
Test(cuda_long, long_rows_portable, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_BF16, 64, (1 << 27) + RAGGED, 80);
}
Test(cuda_long, long_rows_f32, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F32, 64, (1 << 26) + RAGGED, 0);
}
Test(cuda_long, long_rows_f64, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    check_long_rows(FATTN_F64, 64, (1 << 25) + RAGGED, 0);
}

/* Few rows and very many keys: L is that of as many normal scores, and gradients reach the last key. */
Test(cuda_long, long_keys, .timeout = 60) {
    fattn_ctx_destroy(context_or_skip());
    need_memory((size_t)75 << 30);
    for (int arch_cap = 0; arch_cap <= 80; arch_cap += 80) {
        fattn_ctx *const ctx = context_of(NULL, 0, arch_cap);
        const int64_t S = (1 << 27) + RAGGED, D = 64;
        const fattn_dtype dtype = FATTN_BF16;
        fattn_tensor t[] = {room(ctx, dtype, FEW, D, 1), room(ctx, dtype, S, D, 2),       room(ctx, dtype, S, D, 3),
                            room(ctx, dtype, FEW, D, 0), room(ctx, FATTN_F32, FEW, 0, 0), room(ctx, dtype, FEW, D, 0),
                            room(ctx, dtype, S, D, 0),   room(ctx, dtype, S, D, 0)};
        run_both(ctx, (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                           .q = &t[0],
                                           .k = &t[1],
                                           .v = &t[2],
                                           .o = &t[3],
                                           .lse = &t[4],
                                           .d_o = &t[0],
                                           .dq = &t[5],
                                           .dk = &t[6],
                                           .dv = &t[7]});
        double *const L = rows_of(ctx, &t[4], 0, FEW);
        for (int i = 0; i < FEW; ++i) cr_assert(L[i] > 18.7 && L[i] < 21, "row %d: L %g", i, L[i]);
        free(L);
        const int64_t begins[] = {0, S / 2, S - FEW};
        for (int n = 0; n < 6; ++n) {
            double *const x = rows_of(ctx, &t[6 + n / 3], begins[n % 3], FEW);
            for (int64_t e = 0; e < FEW * D; ++e)
                cr_assert(isfinite(x[e]), "%s of key %lld: %g", n / 3 ? "dv" : "dk", (long long)(begins[n % 3] + e / D),
                          x[e]);
            free(x);
        }
        for (int i = 0; i < 8; ++i) fattn_tensor_free(ctx, &t[i]);
        call_must(ctx, fattn_ctx_sync(ctx), "free");
        fattn_ctx_destroy(ctx);
    }
}
