/* Context: options, ABI rule, error messages, memory counters. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <stddef.h>
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

Test(context, describes_itself) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 3, .arch_cap = 1};
    fattn_ctx *ctx;
    char text[64] = "";
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    cr_assert_eq(fattn_ctx_describe(ctx, text, sizeof text), FATTN_OK);
    cr_assert_str_eq(text, "baseline, 3 threads");
    cr_assert_eq(fattn_ctx_describe(ctx, text, 5), FATTN_OK);
    cr_assert_str_eq(text, "base");
    cr_assert_eq(fattn_ctx_describe(ctx, NULL, 5), FATTN_E_ARG);
    cr_assert_eq(fattn_ctx_describe(ctx, text, 0), FATTN_E_ARG);
    cr_assert_eq(fattn_ctx_describe(NULL, text, 5), FATTN_E_ARG);
    fattn_ctx_destroy(ctx);
}

Test(context, only_gpus_are_planned_for) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .flags = FATTN_CTX_PLAN_ONLY, .arch_cap = 89};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_E_ARG);
    cr_assert_null(ctx);
}

static void keep_text(void *user, fattn_log level, const char *text) {
    (void)level;
    strncpy(user, text, 255);
}

Test(context, cuda_is_rejected_with_a_message) {
    char text[256] = "";
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .log = keep_text, .log_user = text};
    fattn_ctx *ctx = (fattn_ctx *)text;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_E_UNSUPPORTED);
    cr_assert_null(ctx);
    cr_assert(strstr(text, "CUDA"), "%s", text);
}

Test(context, abi_rule) {
    struct {
        fattn_ctx_options o;
        uint64_t future;
    } newer = {{.struct_size = sizeof newer}, 0};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_OK);
    fattn_ctx_destroy(ctx);
    newer.future = 1;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
    char text[256] = ""; /* there is no context to keep the message */
    newer.o.log = keep_text, newer.o.log_user = text;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
    cr_assert(strstr(text, "it is older than the header"), "%s", text);
    text[0] = 0;
    newer.o.struct_size = (uint32_t)offsetof(fattn_ctx_options, log_user) + 4; /* log_user is not there */
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
    newer.o.struct_size = 0;
    cr_assert_eq(fattn_ctx_create(&newer.o, &ctx), FATTN_E_ABI);
    cr_assert_str_eq(text, "");
}

static void *fail_large(void *user, size_t bytes, size_t align, fattn_stream s) {
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
    const fattn_ctx_options o = {.struct_size = sizeof o, .allocator = {fail_large, count_free, &live}};
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

/* If no context is created, the error message goes to the log. */
static void rejected(fattn_ctx_options o, fattn_status status, const char *says) {
    char text[256] = "";
    o.struct_size = sizeof o;
    o.log = keep_text, o.log_user = text;
    fattn_ctx *ctx = (fattn_ctx *)text;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), status);
    cr_assert_null(ctx);
    cr_assert(strstr(text, says), "%s", text);
}

static void *no_memory(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)bytes, (void)align, (void)s;
    return NULL;
}

Test(context, every_error) {
    int place;
    const fattn_stream stream = (fattn_stream)(void *)&place;
    rejected((fattn_ctx_options){.device = 7}, FATTN_E_ARG, "device: 7");
    rejected((fattn_ctx_options){.device_id = 2}, FATTN_E_ARG, "not device_id 2");
    rejected((fattn_ctx_options){.stream = stream}, FATTN_E_ARG, "device_id 0 with a stream");
    rejected((fattn_ctx_options){.flags = 36}, FATTN_E_ARG, "unknown flags 0x24");
    rejected((fattn_ctx_options){.flags = FATTN_CTX_DETERMINISTIC | FATTN_CTX_TUNE}, FATTN_E_ARG, "exclude each other");
    rejected((fattn_ctx_options){.reserved = 5}, FATTN_E_ARG, "reserved field 5");
    rejected((fattn_ctx_options){.cpu_threads = -1}, FATTN_E_ARG, "negative cpu_threads -1");
    rejected((fattn_ctx_options){.cpu_threads = 4097}, FATTN_E_ARG, "cpu_threads: 4097");
    rejected((fattn_ctx_options){.cpu_threads = 2000000000}, FATTN_E_ARG, "not in 0..4096");
    rejected((fattn_ctx_options){.cpu_threads = INT32_MAX}, FATTN_E_ARG, "2147483647");
    rejected((fattn_ctx_options){.arch_cap = -2}, FATTN_E_ARG, "arch_cap -2");
    rejected((fattn_ctx_options){.sm_limit = -3}, FATTN_E_ARG, "sm_limit -3");
    rejected((fattn_ctx_options){.allocator = {.alloc = no_memory}}, FATTN_E_ARG, "must both be set");
    rejected((fattn_ctx_options){.allocator = {.free = count_free}}, FATTN_E_ARG, "must both be set");
    rejected((fattn_ctx_options){.allocator = {no_memory, count_free, NULL}}, FATTN_E_NOMEM, "no memory");
    cr_assert_eq(fattn_ctx_create(NULL, NULL), FATTN_E_ARG);
    fattn_ctx_destroy(NULL);
}

Test(context, the_cpu_has_no_stream_and_nothing_to_wait_for) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_ctx_set_stream(ctx, NULL), FATTN_OK);
    cr_assert_eq(fattn_ctx_set_stream(ctx, (fattn_stream)(void *)ctx), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "stream"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_ctx_sync(ctx), FATTN_OK);
    cr_assert_eq(fattn_ctx_set_stream(NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_ctx_sync(NULL), FATTN_E_ARG);
    fattn_ctx_destroy(ctx);
}

Test(context, the_cpu_has_no_graphs) {
    fattn_ctx *ctx;
    fattn_graph *g = (fattn_graph *)&ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "graph: the CPU has none"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_E_UNSUPPORTED);
    cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_E_UNSUPPORTED);
    cr_assert_null(g);
    fattn_graph_destroy(ctx, NULL);
    fattn_graph_destroy(NULL, NULL);
    cr_assert_eq(fattn_graph_begin(NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_graph_end(NULL, &g), FATTN_E_ARG);
    cr_assert_eq(fattn_graph_launch(NULL, NULL), FATTN_E_ARG);
    fattn_ctx_destroy(ctx);
}

Test(context, messages_are_truncated_and_may_quote_each_other) {
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_ctx_fail(ctx, FATTN_E_STATE, "k: Sk=%d but v: Sk=%d", 77, 76), FATTN_E_STATE);
    cr_assert_eq(fattn_ctx_fail(ctx, FATTN_E_IO, "op 3: %s", fattn_ctx_error(ctx)), FATTN_E_IO);
    cr_assert_str_eq(fattn_ctx_error(ctx), "op 3: k: Sk=77 but v: Sk=76");
    cr_assert_eq(fattn_ctx_fail(ctx, FATTN_E_IO, "%*d", 600, 7), FATTN_E_IO);
    cr_assert_eq(strlen(fattn_ctx_error(ctx)), 511);
    cr_assert_eq(fattn_ctx_fail(NULL, FATTN_E_IO, "no context"), FATTN_E_IO);
    cr_assert_str_eq(fattn_ctx_error(NULL), "");
    fattn_ctx_destroy(ctx);
}
