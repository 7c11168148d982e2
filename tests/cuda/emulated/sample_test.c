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
static void begin(void) {
    ctx = attention_context(1);
    cpu = ctx->ops, ops = *cpu;
    ops.sample = emulated_sample;
    ctx->ops = &ops;
}
static void end(void) {
    ctx->ops = cpu;
    fattn_ctx_destroy(ctx);
}
TestSuite(emulated_sample, .init = begin, .fini = end);

Test(emulated_sample, cases, .timeout = 300) {
    for (int n = 0; n < SAMPLING_CASES; n += 3) sampling_check(ctx, n);
}
Test(emulated_sample, more_cases, .timeout = 300) {
    for (int n = 1; n < SAMPLING_CASES; n += 3) sampling_check(ctx, n);
    sampling_check_large(ctx, 0);
}
Test(emulated_sample, rows_without_a_choice, .timeout = 300) { sampling_check_bad_rows(ctx); }
