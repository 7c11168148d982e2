/* Memory as the device reports it: attention calls and later steps of a tape allocate nothing, and the context's
   counters match its pool. */
#include "call.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <fattn/fattn.h>

static fattn_ctx *context_or_skip(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) cr_skip_test("no CUDA device");
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .arch_cap = call_arch()};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

static size_t free_memory(void) {
    size_t left, all;
    cr_assert_eq(cudaDeviceSynchronize(), cudaSuccess);
    cr_assert_eq(cudaMemGetInfo(&left, &all), cudaSuccess);
    return left;
}

static const attention_case cases[] = {
    {.name = "flash", .dtype = FATTN_BF16, .B = 1, .Hq = 16, .Sq = 4096, .Sk = 4096, .D = 64, .flags = FATTN_CAUSAL},
    {.name = "general",
     .dtype = FATTN_BF16,
     .B = 1,
     .Hq = 4,
     .Sq = 500,
     .Sk = 700,
     .D = 64,
     .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
     .dropout_p = 0.1f,
     .sink = true},
    {.name = "float", .dtype = FATTN_F32, .B = 1, .Hq = 4, .Sq = 1024, .Sk = 1024, .D = 64},
    {.name = "parts", .dtype = FATTN_BF16, .B = 2, .Hq = 4, .Sq = 100, .Sk = 9000, .D = 128},
};

/* After the first one, which may load code. */
Test(cuda_memory, calls_take_nothing_from_the_device) {
    fattn_ctx *const ctx = context_or_skip();
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
        call *const c = call_new(ctx, &cases[n]);
        call_run(c);
        const size_t before = free_memory();
        const fattn_mem counted = fattn_ctx_mem(ctx);
        for (int i = 0; i < 3; ++i) call_run(c);
        cr_expect_eq(free_memory(), before, "%s: the device has other %zu bytes free, not %zu", cases[n].name,
                     free_memory(), before);
        cr_expect_eq(fattn_ctx_mem(ctx).allocs, counted.allocs, "%s allocated", cases[n].name);
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* The default allocator is the device's default pool: its high-water mark is the context's peak, up to the pool's
   granularity for each of the call's tensors. */
Test(cuda_memory, the_pool_holds_what_is_counted) {
    enum { GRANULARITY = 2 << 20 };
    fattn_ctx *const ctx = context_or_skip();
    cudaMemPool_t pool;
    uint64_t high = 0;
    attention_case a = cases[0];
    a.Sq = a.Sk = 16384;
    cr_assert_eq(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
    cr_assert_eq(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high), cudaSuccess);
    call *const c = call_new(ctx, &a);
    call_run(c);
    cr_assert_eq(fattn_ctx_sync(ctx), FATTN_OK);
    cr_assert_eq(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high), cudaSuccess);
    const fattn_mem counted = fattn_ctx_mem(ctx);
    cr_assert_geq(high, counted.peak);
    cr_assert_leq(high, counted.peak + counted.allocs * GRANULARITY, "%zu in the pool, %zu counted", (size_t)high,
                  counted.peak);
    call_free(c);
    fattn_ctx_destroy(ctx);
}
