/* Context: options, ABI rule, error sentences, memory counters. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <stdlib.h>
#include <string.h>

Test(context, defaults_give_a_cpu) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_str_eq(fattn_ctx_error(ctx), "");
    cr_assert_eq(fattn_ctx_device(ctx), FATTN_CPU);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}

static void keep_text(void *user, fattn_log level, const char *text) {
    (void)level;
    strncpy(user, text, 255);
}

Test(context, cuda_is_refused_with_a_sentence) {
    char text[256] = "";
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .log = keep_text,
                                 .log_user = text};
    fattn_ctx *ctx = (fattn_ctx *)text;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_E_UNSUPPORTED);
    cr_assert_null(ctx);
    cr_assert(strstr(text, "CUDA"), "%s", text);
}

Test(context, abi_rule) {
    struct { fattn_ctx_options o; uint64_t future; } newer = {{.struct_size = sizeof newer}, 0};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_OK);
    fattn_ctx_destroy(ctx);
    newer.future = 1;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
    newer.o.struct_size = 0;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
}

static void *refuse_large(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)s;
    ++*(int *)user;
    return bytes > 4096 ? NULL : aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void count_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)bytes, (void)s;
    --*(int *)user;
    free(p);
}

Test(context, allocator_is_used_and_counted) {
    int live = 0;
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .allocator = {refuse_large, count_free, &live}};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    fattn_tensor small, large = {0};
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){10}, &small), FATTN_OK);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 40);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){5000}, &large), FATTN_E_NOMEM);
    cr_assert(strstr(fattn_ctx_error(ctx), "20000"), "%s", fattn_ctx_error(ctx));
    cr_assert_null(large.data);
    fattn_tensor_free(ctx, &small);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    cr_assert_eq(fattn_ctx_mem(ctx).peak, 40);
    fattn_ctx_destroy(ctx);
    cr_assert_eq(live, 1, "the failed call is the only one left"); /* counted, never freed */
}
