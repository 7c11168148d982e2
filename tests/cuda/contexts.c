#include "contexts.h"
#include "device.h"

#include <stdlib.h>
#include <string.h>

fattn_dtype dtype_of(int n) {
    static const fattn_dtype dtypes[4] = {FATTN_BF16, FATTN_F32, FATTN_F64, FATTN_F16};
    return n % 4 || call_has_bf16() ? dtypes[n % 4] : FATTN_F16;
}

void must(cudaError_t e, const char *what) { cr_assert_eq(e, cudaSuccess, "%s: %s", what, cudaGetErrorString(e)); }

static int capped(int arch_cap) {
    const int most = call_arch();
    return most && (!arch_cap || most < arch_cap) ? most : arch_cap;
}

fattn_ctx *context_of(fattn_stream stream, int sm_limit, int arch_cap) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return NULL;
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .device = FATTN_CUDA,
                                 .stream = stream,
                                 .sm_limit = sm_limit,
                                 .arch_cap = capped(arch_cap)};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}
fattn_ctx *context(fattn_stream stream, int sm_limit) { return context_of(stream, sm_limit, 0); }

fattn_ctx *context_or_skip(void) {
    fattn_ctx *const ctx = context(NULL, 0);
    if (!ctx) cr_skip_test("no CUDA device");
    return ctx;
}

attention_case wide_case(int n) {
    static const int64_t dims[] = {64, 80, 64, 80, 256, 128};
    attention_case c = {.name = "many blocks",
                        .dtype = dtype_of(n),
                        .B = 3,
                        .Hq = 8,
                        .Hkv = 2,
                        .Sq = 500,
                        .Sk = 700,
                        .D = dims[n / 4],
                        .flags = FATTN_DETERMINISTIC};
    if (n / 4 == 1) c.flags |= FATTN_CAUSAL;
    if (n / 4 == 2) {
        c.flags |= FATTN_WINDOW;
        c.window_left = 90, c.window_right = 33, c.Sq = 250, c.Sk = 350;
        c.bias = BIAS, c.sink = true, c.dropout_p = 0.2f, c.softcap = 3;
    }
    if (n / 4 == 3)
        c.Sq = 300, c.Sk = 310, c.flags |= FATTN_CAUSAL, c.lengths = LENGTHS_PACKED, c.sink = true,
        memcpy(c.length_q, (int32_t[]){300, 0, 177}, 12), memcpy(c.length_k, (int32_t[]){211, 5, 310}, 12);
    if (n / 4 == 4) c.Sq = 200, c.Sk = 330, c.flags |= FATTN_CAUSAL;
    if (n / 4 == 5) c.flags |= FATTN_CAUSAL_TOP_LEFT, c.alibi = true;
    return c;
}

fattn_ctx *hopper_or_skip(void) {
    fattn_ctx *const ctx = context_or_skip();
    if (ctx->gpu.arch != 90) {
        fattn_ctx_destroy(ctx);
        cr_skip_test("the device is not sm_90, or capped");
    }
    device_use(ctx);
    return ctx;
}
