#include "cli/base/device.h"

#include "cli/base/cli.h"

#include <stdio.h>

static void keep(void *user, fattn_log level, const char *text) {
    if (level == FATTN_LOG_ERROR)
        snprintf(user, DEVICE_MESSAGE, "%s", text);
    else if (level == FATTN_LOG_WARN && !cli_keeps_messages())
        fprintf(stderr, "fattn: %s\n", text);
}

fattn_status device_create_at(int device, int number, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE],
                              fattn_ctx **out) {
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .flags = flags,
                                 .device = device == ON_CUDA ? FATTN_CUDA : FATTN_CPU,
                                 .device_id = device == ON_CUDA ? number : 0,
                                 .cpu_threads = (int32_t)threads,
                                 .log = keep,
                                 .log_user = why};
    why[0] = 0;
    return fattn_ctx_create(&o, out);
}

fattn_status device_create(int device, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE], fattn_ctx **out) {
    return device_create_at(device, 0, flags, threads, why, out);
}

int device_open(int device, uint32_t flags, int64_t threads, char why[DEVICE_MESSAGE], fattn_ctx **out) {
    const fattn_status s = device_create(device, flags, threads, why, out);
    if (!s) return CLI_OK;
    return cli_fail(CLI_FAILURE, "context: %s (%s)", *why ? why : fattn_status_text(s), fattn_status_name(s));
}

fattn_status device_end_recording(fattn_ctx *ctx, fattn_status s, fattn_graph **graph) {
    char why[DEVICE_MESSAGE];
    snprintf(why, sizeof why, "%s", fattn_ctx_error(ctx));
    const fattn_status ended = fattn_graph_end(ctx, graph);
    if (!s) return ended;
    fattn_graph_destroy(ctx, *graph);
    *graph = NULL;
    return fattn_ctx_fail(ctx, s, "%s", why);
}

static fattn_tensor here(const fattn_tensor *t, fattn_dtype dtype, const void *data) {
    return fattn_tensor_view((void *)(uintptr_t)data, dtype, FATTN_CPU, 0, t->ndim, t->shape);
}

fattn_status device_read(fattn_ctx *ctx, const fattn_tensor *t, float *to) {
    const fattn_tensor host = here(t, FATTN_F32, to);
    return fattn_tensor_copy(ctx, &host, t);
}

fattn_status device_write(fattn_ctx *ctx, const fattn_tensor *t, const float *from) {
    const fattn_tensor host = here(t, FATTN_F32, from);
    return fattn_tensor_copy(ctx, t, &host);
}

fattn_status device_write_i32(fattn_ctx *ctx, const fattn_tensor *t, const int32_t *from) {
    const fattn_tensor host = here(t, FATTN_I32, from);
    return fattn_tensor_copy(ctx, t, &host);
}
