/* fattn_ctx: options, errors, counters; and the ABI rule for every options struct. */
#include "core/cpu/gemm_cpu.h"
#include "core/base/internal.h"
#ifdef FATTNI_HAVE_CUDA
#include "core/cuda/device.h"
#endif

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Without a context the sentence can only go to the log. */
static fattn_status refuse(const fattn_ctx_options *o, fattn_status s, const char *text) {
    if (o->log) o->log(o->log_user, FATTN_LOG_ERROR, text);
    return s;
}

static fattn_allocator default_allocator(fattn_device device) {
#ifdef FATTNI_HAVE_CUDA
    if (device == FATTN_CUDA) return fattni_cuda_allocator();
#endif
    (void)device;
    return fattni_default_allocator();
}

/* The context itself lies in host memory: a GPU's allocator cannot give that. */
static fattn_allocator own_allocator(fattn_device device, fattn_allocator given) {
    return device == FATTN_CPU ? given : fattni_default_allocator();
}

fattn_status fattn_ctx_create(const fattn_ctx_options *opt, fattn_ctx **out) {
    if (!out) return FATTN_E_ARG;
    *out = NULL;
    fattn_ctx_options o = {.struct_size = sizeof o};
    fattn_ctx scratch = {0}; /* takes fattni_take_struct's sentence */
    if (opt) {
        const fattn_status s = fattni_take_struct(&scratch, "fattn_ctx_options", opt, &o, sizeof o);
        if (s != FATTN_OK) return s;
    }
    if (o.device == 0) o.device = FATTN_CPU;
    char text[160];
    if (o.device != FATTN_CPU && o.device != FATTN_CUDA) {
        snprintf(text, sizeof text, "device: %d is neither FATTN_CPU (1) nor FATTN_CUDA (2)",
                 o.device);
        return refuse(&o, FATTN_E_ARG, text);
    }
#ifndef FATTNI_HAVE_CUDA
    if (o.device == FATTN_CUDA)
        return refuse(&o, FATTN_E_UNSUPPORTED,
                      "device: this library was built without CUDA (device 2), it has the CPU only");
#endif
    if (o.device == FATTN_CPU && (o.device_id != 0 || o.stream)) {
        snprintf(text, sizeof text, "the CPU has device_id 0 and no stream, not device_id %d%s",
                 o.device_id, o.stream ? " with a stream" : "");
        return refuse(&o, FATTN_E_ARG, text);
    }
    if (o.flags & ~(uint32_t)(FATTN_CTX_DETERMINISTIC | FATTN_CTX_TUNE) || o.reserved) {
        snprintf(text, sizeof text, "unknown flags 0x%x or non-zero reserved field %d", o.flags,
                 o.reserved);
        return refuse(&o, FATTN_E_ARG, text);
    }
    if (o.flags & FATTN_CTX_DETERMINISTIC && o.flags & FATTN_CTX_TUNE)
        return refuse(&o, FATTN_E_ARG,
                      "FATTN_CTX_DETERMINISTIC and FATTN_CTX_TUNE exclude each other: what is tuned "
                      "depends on the clock");
    if (o.cpu_threads < 0 || o.arch_cap < 0 || o.sm_limit < 0) {
        snprintf(text, sizeof text, "negative cpu_threads %d, arch_cap %d or sm_limit %d",
                 o.cpu_threads, o.arch_cap, o.sm_limit);
        return refuse(&o, FATTN_E_ARG, text);
    }
    if (o.cpu_threads > FATTNI_MOST_THREADS) {
        snprintf(text, sizeof text, "cpu_threads: %d is not in 0..%d (0 = OpenMP's choice)",
                 o.cpu_threads, FATTNI_MOST_THREADS);
        return refuse(&o, FATTN_E_ARG, text);
    }
    if (!o.allocator.alloc != !o.allocator.free)
        return refuse(&o, FATTN_E_ARG, "allocator: alloc and free go together, one of them is NULL");
    if (!o.allocator.alloc) o.allocator = default_allocator((fattn_device)o.device);

    const fattn_allocator host = own_allocator((fattn_device)o.device, o.allocator);
    fattn_ctx *ctx = host.alloc(host.user, sizeof *ctx, FATTNI_ALIGN, NULL);
    if (!ctx) return refuse(&o, FATTN_E_NOMEM, "no memory for a context");
    const int best = fattni_cpu_isa(), cap = o.arch_cap;
    *ctx = (fattn_ctx){
        .device = (fattn_device)o.device,
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
#ifdef FATTNI_HAVE_CUDA
    if (ctx->device == FATTN_CUDA) {
        const fattn_status s = fattni_cuda_open(ctx); /* its sentence has gone to the log */
        if (s != FATTN_OK) {
            fattn_ctx_destroy(ctx);
            return s;
        }
    }
#endif
    const char *const warning = ctx->device == FATTN_CPU ? fattni_gemm_warning(best) : NULL;
    if (warning && ctx->log) ctx->log(ctx->log_user, FATTN_LOG_WARN, warning);
    *out = ctx;
    return FATTN_OK;
}

void fattn_ctx_destroy(fattn_ctx *ctx) {
    if (!ctx) return;
#ifdef FATTNI_HAVE_CUDA
    if (ctx->device == FATTN_CUDA) fattni_cuda_close(ctx);
#endif
    const fattn_allocator host = own_allocator(ctx->device, ctx->allocator);
    host.free(host.user, ctx, sizeof *ctx, NULL);
}

fattn_status fattn_ctx_set_stream(fattn_ctx *ctx, fattn_stream s) {
    if (!ctx) return FATTN_E_ARG;
    if (s && ctx->device == FATTN_CPU)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "stream: the CPU has none, pass NULL");
    ctx->stream = s;
    return FATTN_OK;
}

fattn_status fattn_ctx_sync(fattn_ctx *ctx) {
    if (!ctx) return FATTN_E_ARG;
#ifdef FATTNI_HAVE_CUDA
    if (ctx->device == FATTN_CUDA) return fattni_cuda_sync(ctx);
#endif
    return FATTN_OK;
}

const char *fattn_ctx_error(const fattn_ctx *ctx) { return ctx ? ctx->error : ""; }

fattn_status fattn_ctx_fail(fattn_ctx *ctx, fattn_status s, const char *format, ...) {
    if (!ctx) return s;
    char text[FATTNI_ERROR_BYTES]; /* an argument may be the old sentence */
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

fattn_status fattni_take_struct(fattn_ctx *ctx, const char *name, const void *src, void *dst,
                                size_t dst_size) {
    uint32_t size = 0;
    memcpy(&size, src, sizeof size);
    if (size < 2 * sizeof size)
        return fattn_ctx_fail(ctx, FATTN_E_ABI, "%s: struct_size is %u: set it to sizeof(%s)", name,
                              size, name);
    if (size < dst_size && size % sizeof(void *)) /* would cut a pointer or a 64-bit field in two */
        return fattn_ctx_fail(ctx, FATTN_E_ABI, "%s: struct_size %u is the size of no version", name,
                              size);
    const size_t known = size < dst_size ? size : dst_size;
    for (size_t i = known; i < size; ++i) {
        if (((const unsigned char *)src)[i])
            return fattn_ctx_fail(ctx, FATTN_E_ABI,
                                  "%s: byte %zu of %u is set, but this library knows only %zu: "
                                  "it is older than the header",
                                  name, i, size, dst_size);
    }
    memset(dst, 0, dst_size);
    memcpy(dst, src, known);
    return FATTN_OK;
}
