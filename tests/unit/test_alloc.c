/* The allocation hook: alignment, counters, exhaustion. */
#include "autograd_c/tape/arena.h"
#include "core/base/device.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

Test(alloc, memory_is_aligned_writable_and_counted) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    static const size_t sizes[] = {1, 8, 255, 256, 257, 1 << 20, (5 << 20) + 1};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    void *blocks[COUNT];
    size_t live = 0;
    for (int i = 0; i < COUNT; ++i) {
        cr_assert_eq(fattni_alloc(ctx, sizes[i], &blocks[i]), FATTN_OK);
        cr_assert_eq((uintptr_t)blocks[i] % FATTNI_ALIGN, 0);
        memset(blocks[i], 0xa5, sizes[i]);
        live += sizes[i];
        cr_assert_eq(fattn_ctx_mem(ctx).live, live);
        cr_assert_eq(fattn_ctx_mem(ctx).allocs, (size_t)i + 1);
    }
    const size_t peak = live;
    for (int i = 0; i < COUNT; ++i) {
        fattni_free(ctx, blocks[i], sizes[i]);
        live -= sizes[i];
        cr_assert_eq(fattn_ctx_mem(ctx).live, live);
        cr_assert_eq(fattn_ctx_mem(ctx).peak, peak);
    }
    cr_assert_eq(fattni_alloc(ctx, 10, &blocks[0]), FATTN_OK);
    cr_assert_eq(fattn_ctx_mem(ctx).peak, peak);
    fattn_ctx_mem_reset_peak(ctx);
    cr_assert_eq(fattn_ctx_mem(ctx).peak, 10);
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, COUNT + 1);
    fattni_free(ctx, blocks[0], 10);
    fattn_ctx_destroy(ctx);
}

Test(alloc, zero_bytes_give_null) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    void *p = ctx;
    cr_assert_eq(fattni_alloc(ctx, 0, &p), FATTN_OK);
    cr_assert_null(p);
    fattni_free(ctx, NULL, 0);
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, 0);
    cr_assert_eq(fattn_ctx_mem(NULL).live, 0);
    fattn_ctx_mem_reset_peak(NULL);
    fattn_ctx_destroy(ctx);
}

Test(alloc, too_much_is_rejected_with_the_numbers) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    void *kept, *p = ctx;
    cr_assert_eq(fattni_alloc(ctx, 100, &kept), FATTN_OK);
    cr_assert_eq(fattni_alloc(ctx, (size_t)PTRDIFF_MAX, &p), FATTN_E_NOMEM);
    cr_assert_null(p);
    cr_assert_str_eq(fattn_ctx_error(ctx), "no memory for 9223372036854775807 bytes (100 in use)");
    cr_assert_eq(fattn_ctx_mem(ctx).live, 100);
    fattni_free(ctx, kept, 100);
    fattn_ctx_destroy(ctx);
}

Test(alloc, byte_counts_do_not_wrap) {
    size_t bytes;
    cr_assert(fattni_bytes(3, 8, &bytes));
    cr_assert_eq(bytes, 24);
    cr_assert(fattni_bytes(PTRDIFF_MAX, 1, &bytes));
    cr_assert_not(fattni_bytes(PTRDIFF_MAX, 2, &bytes));
    cr_assert_not(fattni_bytes((int64_t)1 << 61, 8, &bytes));
}

/* Sizes beyond any memory are rejected before an overflow. */
Test(alloc, an_arena_rejects_sizes_that_overflow) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    fattni_arena arena = {.ctx = ctx, .align = 64, .least = 4096};
    void *p = &arena;
    for (size_t less = 0; less < 64; less += 21) {
        cr_assert_eq(fattni_arena_take(&arena, SIZE_MAX - less, &p), FATTN_E_NOMEM);
        cr_assert_null(p);
        cr_assert(strstr(fattn_ctx_error(ctx), "no memory for 18446744073709551"), "%s", fattn_ctx_error(ctx));
    }
    cr_assert_eq(fattni_arena_take(&arena, 100, &p), FATTN_OK);
    memset(p, 1, 100);
    fattni_arena_free(&arena);
    fattn_ctx_destroy(ctx);
}

/* With a GPU, records are in host memory, whose allocation may fail, too. */
Test(alloc, no_host_memory) {
    static const fattni_device_ops elsewhere = {.on_host = false};
    fattn_ctx gpu = {.device = FATTN_CUDA, .ops = &elsewhere};
    void *p = &gpu;
    cr_assert_eq(fattni_host_alloc(&gpu, (size_t)PTRDIFF_MAX - FATTNI_ALIGN, &p), FATTN_E_NOMEM);
    cr_assert_null(p);
    cr_assert(strstr(gpu.error, "on the host"), "%s", gpu.error);
    cr_assert_eq(fattni_host_alloc(&gpu, 10, &p), FATTN_OK);
    fattni_host_free(&gpu, p, 10);
}
