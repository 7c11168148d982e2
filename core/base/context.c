/* fattn_ctx: options, errors, counters; and the ABI rule for every options struct. */
#include "core/base/device.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Without a context the error message can only go to the log. */
static fattn_status fail_create(const fattn_ctx_options *o, fattn_status s, const char *text) {
    if (o->log) o->log(o->log_user, FATTN_LOG_ERROR, text);
    return s;
}

/* The context itself is in host memory, which a GPU's allocator does not provide. */
static fattn_allocator own_allocator(const fattni_device_ops *ops, fattn_allocator given) {
    return ops->on_host ? given : fattni_default_allocator();
}

fattn_status fattn_ctx_create(const fattn_ctx_options *opt, fattn_ctx **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    fattn_ctx_options o = {.struct_size = sizeof o};
    fattn_ctx scratch = {0}; /* takes fattni_take_struct's error message */
    if (opt) {
        if (opt->struct_size >= offsetof(fattn_ctx_options, log_user) + sizeof opt->log_user)
            scratch.log = opt->log, scratch.log_user = opt->log_user;
        const fattn_status s = fattni_take_struct(&scratch, "fattn_ctx_options", opt, &o, sizeof o);
        if (s != FATTN_OK) return s;
    }
    if (o.device == 0) o.device = FATTN_CPU;
    char text[160];
    if (o.device != FATTN_CPU && o.device != FATTN_CUDA) {
        snprintf(text, sizeof text, "device: %d is neither FATTN_CPU (1) nor FATTN_CUDA (2)", o.device);
        return fail_create(&o, FATTN_E_ARG, text);
    }
    const fattni_device_ops *const ops = fattni_device_ops_of((fattn_device)o.device);
    if (!ops)
        return fail_create(&o, FATTN_E_UNSUPPORTED,
                           "device: this library was built without CUDA (device 2), it supports the CPU only");
    if (!ops->has_streams && (o.device_id != 0 || o.stream)) {
        snprintf(text, sizeof text, "the %s has device_id 0 and no stream, not device_id %d%s", ops->name, o.device_id,
                 o.stream ? " with a stream" : "");
        return fail_create(&o, FATTN_E_ARG, text);
    }
    const uint32_t known =
        FATTN_CTX_DETERMINISTIC | FATTN_CTX_TUNE | FATTN_CTX_F32_PRODUCTS | FATTN_CTX_PLAN_ONLY | FATTN_CTX_TF32;
    if (o.flags & ~known || o.reserved) {
        snprintf(text, sizeof text, "unknown flags 0x%x or non-zero reserved field %d", o.flags, o.reserved);
        return fail_create(&o, FATTN_E_ARG, text);
    }
    if (o.flags & FATTN_CTX_DETERMINISTIC && o.flags & FATTN_CTX_TUNE)
        return fail_create(&o, FATTN_E_ARG,
                           "FATTN_CTX_DETERMINISTIC and FATTN_CTX_TUNE exclude each other: tuning chooses "
                           "by measured times");
    if (o.flags & FATTN_CTX_F32_PRODUCTS && !ops->on_host)
        return fail_create(&o, FATTN_E_UNSUPPORTED,
                           "FATTN_CTX_F32_PRODUCTS: GPU kernels always round P and dS of 16-bit tensors");
    if (o.flags & FATTN_CTX_PLAN_ONLY && ops->on_host)
        return fail_create(&o, FATTN_E_ARG, "FATTN_CTX_PLAN_ONLY is for device FATTN_CUDA");
    if (o.cpu_threads < 0 || o.arch_cap < 0 || o.sm_limit < 0) {
        snprintf(text, sizeof text, "negative cpu_threads %d, arch_cap %d or sm_limit %d", o.cpu_threads, o.arch_cap,
                 o.sm_limit);
        return fail_create(&o, FATTN_E_ARG, text);
    }
    if (o.cpu_threads > FATTNI_MOST_THREADS) {
        snprintf(text, sizeof text, "cpu_threads: %d is not in 0..%d (0 = OpenMP's choice)", o.cpu_threads,
                 FATTNI_MOST_THREADS);
        return fail_create(&o, FATTN_E_ARG, text);
    }
    if (!o.allocator.alloc != !o.allocator.free)
        return fail_create(&o, FATTN_E_ARG, "allocator: alloc and free must both be set, one of them is NULL");
    if (!o.allocator.alloc) o.allocator = ops->default_allocator();

    const fattn_allocator host = own_allocator(ops, o.allocator);
    fattn_ctx *ctx = host.alloc(host.user, sizeof *ctx, FATTNI_ALIGN, NULL);
    if (!ctx) return fail_create(&o, FATTN_E_NOMEM, "no memory for a context");
    const int best = fattni_cpu_isa(), cap = o.arch_cap;
    *ctx = (fattn_ctx){
        .device = (fattn_device)o.device,
        .ops = ops,
        .device_id = o.device_id,
        .stream = o.stream,
        .cpu_threads = o.cpu_threads ? o.cpu_threads : fattni_default_threads(),
        .isa = cap > 0 && cap < 10 && cap < best ? cap : best,
        .arch_cap = cap,
        .sm_limit = o.sm_limit,
        .flags = o.flags,
        .allocator = o.allocator,
        .log = o.log,
        .log_user = o.log_user,
    };
    const fattn_status s = ops->open(ctx); /* on failure the error message is in the log */
    if (s != FATTN_OK) {
        fattn_ctx_destroy(ctx);
        return s;
    }
    *out = ctx;
    return FATTN_OK;
}

void fattn_ctx_destroy(fattn_ctx *ctx) {
    if (!ctx) return;
    ctx->ops->close(ctx);
    const fattn_allocator host = own_allocator(ctx->ops, ctx->allocator);
    host.free(host.user, ctx, sizeof *ctx, NULL);
}

fattn_status fattn_ctx_set_stream(fattn_ctx *ctx, fattn_stream s) {
    if (!ctx) return FATTN_E_ARG;
    if (s && !ctx->ops->has_streams)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "stream: the %s has no streams, pass NULL", ctx->ops->name);
    ctx->stream = s;
    return FATTN_OK;
}

fattn_status fattn_ctx_sync(fattn_ctx *ctx) { return ctx ? ctx->ops->sync(ctx) : FATTN_E_ARG; }

fattn_status fattn_ctx_describe(fattn_ctx *ctx, char *text, size_t bytes) {
    if (!ctx) return FATTN_E_ARG;
    if (!text || bytes == 0) return fattn_ctx_fail(ctx, FATTN_E_ARG, "text: %p of %zu bytes", (void *)text, bytes);
    return ctx->ops->describe(ctx, text, bytes);
}

const char *fattn_ctx_error(const fattn_ctx *ctx) { return ctx ? ctx->error : ""; }

fattn_status fattn_ctx_fail(fattn_ctx *ctx, fattn_status s, const char *format, ...) {
    if (!ctx) return s;
    char text[FATTNI_ERROR_BYTES]; /* an argument may be the old error message */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    memcpy(ctx->error, text, sizeof text);
    if (ctx->log) ctx->log(ctx->log_user, FATTN_LOG_ERROR, ctx->error);
    return s;
}

fattn_mem fattn_ctx_mem(const fattn_ctx *ctx) { return ctx ? ctx->mem : (fattn_mem){0}; }

fattn_device fattn_ctx_device(const fattn_ctx *ctx) { return ctx ? ctx->device : FATTN_CPU; }

void fattn_ctx_mem_reset_peak(fattn_ctx *ctx) {
    if (ctx) ctx->mem.peak = ctx->mem.live;
}

fattn_status fattni_take_struct(fattn_ctx *ctx, const char *name, const void *src, void *dst, size_t dst_size) {
    uint32_t size = 0;
    memcpy(&size, src, sizeof size);
    if (size < 2 * sizeof size)
        return fattn_ctx_fail(ctx, FATTN_E_ABI, "%s: struct_size is %u: set it to sizeof(%s)", name, size, name);
    if (size < dst_size && size % sizeof(void *)) /* would end inside a pointer or a 64-bit field */
        return fattn_ctx_fail(ctx, FATTN_E_ABI, "%s: struct_size %u is not the size of any version", name, size);
    const size_t known = size < dst_size ? size : dst_size;
    for (size_t i = known; i < size; ++i) {
        if (((const unsigned char *)src)[i])
            return fattn_ctx_fail(ctx, FATTN_E_ABI,
                                  "%s: byte %zu of %u is set, but this library reads only %zu: "
                                  "it is older than the header",
                                  name, i, size, dst_size);
    }
    memset(dst, 0, dst_size);
    memcpy(dst, src, known);
    return FATTN_OK;
}
