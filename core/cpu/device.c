/* The CPU as a device. */
#include "core/base/device.h"

#include "core/attention/dropout.h"
#include "core/cpu/gemm_bf16.h"
#include "core/fp8/fp8.h"
#include "core/kv_cache/kv_append.h"
#include "core/sampling/sample.h"
#include "core/tensor/host.h"

#include <stdio.h>

static fattn_status open_cpu(fattn_ctx *ctx) {
    fattni_gemm_open(ctx);
    return FATTN_OK;
}

/* Asks for AMX when it is first needed, for the answer binds the whole process (fattn/context.h). */
static void use(fattn_ctx *ctx, fattn_dtype dtype) {
    const bool multiplies =
        (dtype == FATTN_BF16 && ctx->isa >= FATTNI_ISA_AMX) || (dtype == FATTN_F16 && ctx->isa >= FATTNI_ISA_AMXFP16);
    if (!multiplies || ctx->flags & FATTN_CTX_F32_PRODUCTS) return;
    if (!ctx->may_use_amx) ctx->may_use_amx = fattni_allow_amx();
    if (ctx->may_use_amx) return;
    ctx->isa = FATTNI_ISA_AVX512; /* on CPUs with AMX faster than AVX512-BF16 */
    if (ctx->log)
        ctx->log(ctx->log_user, FATTN_LOG_WARN,
                 "the operating system does not let this process use AMX: products of 16-bit tensors are those of F32");
}

static void close_cpu(fattn_ctx *ctx) { fattni_bf16_close(ctx); }

/* Calls return when their work is done. */
static fattn_status sync_cpu(fattn_ctx *ctx) {
    (void)ctx;
    return FATTN_OK;
}

static fattn_status describe(fattn_ctx *ctx, char *text, size_t bytes) {
    snprintf(text, bytes, "%s, %d thread%s", fattni_isa_name(ctx->isa), ctx->cpu_threads,
             ctx->cpu_threads == 1 ? "" : "s");
    return FATTN_OK;
}

static fattn_status enter(fattn_ctx *ctx, bool *entered) {
    (void)ctx;
    *entered = false;
    return FATTN_OK;
}

static void leave(const fattn_ctx *ctx, bool entered) { (void)ctx, (void)entered; }

static fattn_status copy_pairs(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n) {
    for (int i = 0; i < n; ++i)
        if (fattn_tensor_numel(&pairs[i].to) > 0) FATTNI_TRY(fattni_host_copy(ctx, &pairs[i].to, &pairs[i].from));
    return FATTN_OK;
}

const fattni_device_ops fattni_cpu_device = {
    .name = "CPU",
    .on_host = true,
    .default_allocator = fattni_default_allocator,
    .open = open_cpu,
    .close = close_cpu,
    .sync = sync_cpu,
    .describe = describe,
    .enter = enter,
    .leave = leave,
    .use = use,
    .copy = fattni_host_copy,
    .copy_pairs = copy_pairs,
    .add = fattni_host_add,
    .normal = fattni_host_normal,
    .zero_rows = fattni_host_zero_rows,
    .dropout_mask = fattni_host_mask,
    .kv_append = fattni_host_kv_append,
    .sample = fattni_host_sample,
    .fp8_quantize = fattni_fp8_quantize_cpu,
};
