/* fattn_sample with the launch and the kernel of a GPU, on the host: every token against a sort of all. */
#include "attention.h"
#include "sampling.h"

#include "core/base/device.h"
#include "core/sampling/sample.h"

#include <criterion/criterion.h>

fattn_status emulated_sample(fattn_ctx *ctx, const fattni_sample *a); /* fattni_cuda_sample */

static fattn_ctx *ctx;
static fattni_device_ops ops;
static const fattni_device_ops *cpu;
static void use(int arch) {
    ctx = attention_context(1);
    cpu = ctx->ops, ops = *cpu;
    ops.sample = emulated_sample;
    ctx->ops = &ops, ctx->gpu.arch = arch;
}
static void end(void) {
    ctx->ops = cpu;
    fattn_ctx_destroy(ctx);
}

/* Rows of one CTA, and of clusters where they are long. */
static void walk(int arch, int first) {
    use(arch);
    for (int n = first; n < SAMPLING_CASES; n += 4) sampling_check(ctx, n);
    sampling_check_large(ctx, first);
    if (arch >= 90) sampling_check_large(ctx, 1); /* the likeliest of all */
    sampling_check_bad_rows(ctx);
    end();
}
Test(emulated_sample, one_cta, .timeout = 300) { walk(80, 0); }
Test(emulated_sample, one_cta_more, .timeout = 300) { walk(80, 1); }
Test(emulated_sample, clusters, .timeout = 300) { walk(90, 2); }
Test(emulated_sample, clusters_more, .timeout = 300) { walk(90, 3); }
