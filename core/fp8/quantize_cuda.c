/* 8-bit copies on the device: four launches. */
#include "core/fp8/fp8_args.h"

#include "core/cuda/device.h"
#include "core/cuda/launch.h"
#include "core/fp8/fp8.h"
#include "core/fp8/rope.h"

#include <math.h>

extern void fattn_fp8_statistics(fattni_fp8_args);
extern void fattn_fp8_scales(fattni_fp8_args);
extern void fattn_fp8_codes(fattni_fp8_args);
extern void fattn_fp8_statistics_rope(fattni_fp8_args);
extern void fattn_fp8_codes_rope(fattni_fp8_args);
extern void fattn_fp8_codes_int8(fattni_fp8_args);
extern void fattn_fp8_codes_int8_rope(fattni_fp8_args);
extern void fattn_fp8_means(fattni_fp8_args);
_Static_assert(sizeof(fattni_fp8_args) <= 4096, "the limit of a kernel's argument");
_Static_assert((int)FATTNI_FP8_KEYS == (int)FATTNI_FP8_CHUNK, "one number");
_Static_assert((int)FATTNI_FP8_SCALED == (int)FATTNI_FP8_SCALED_KEYS, "one number");
_Static_assert((int)FATTNI_FP8_KEYS_OF_ELEMENT == (int)FATTNI_FP8_KEYS_OF_SCALE, "one number");
_Static_assert(FATTNI_FP8_ROWS *FATTNI_FP8_THREADS / 32 % FATTNI_FP8_SCALED == 0, "rows of a CTA: whole scales");

/* Lanes of 8 channels, a power of two; four rows are added up by as many lanes or more. */
static int32_t lanes_of(int64_t width) {
    int32_t lanes = FATTNI_FP8_ROWS;
    while (8 * lanes < width) lanes *= 2;
    return lanes;
}

fattn_status fattni_fp8_quantize_cuda(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *to) {
    fattni_fp8_args x = {.a = fattni_cuda_args_of(p),
                         .q8 = fattni_cuda_view_of(&to->q),
                         .k8 = fattni_cuda_view_of(&to->k),
                         .v8 = fattni_cuda_view_of(&to->v),
                         .q_scale = fattni_cuda_view_of(&to->q_scale),
                         .q_shift = fattni_cuda_view_of(&to->q_shift),
                         .k_scale = fattni_cuda_view_of(&to->k_scale),
                         .v_scale = fattni_cuda_view_of(&to->v_scale),
                         .v_mean = fattni_cuda_view_of(&to->v_mean),
                         .partials = fattni_cuda_view_of(&to->partials),
                         .chunks = (int32_t)fattni_max(fattni_ceil_div(p->Sk, FATTNI_FP8_KEYS), 1),
                         .lanes_k = lanes_of(p->D),
                         .lanes_v = lanes_of(p->Dv),
                         .hadamard = (p->flags & FATTN_FP8_HADAMARD) != 0,
                         .integers = (p->flags & FATTN_FP8_INT8) != 0,
                         .hadamard_scale = (float)(1 / sqrt((double)p->D))};
    if (p->dtype == FATTN_F32) x.a.kind = FATTNI_FP8_KIND_F32;
    const int64_t rows = FATTNI_FP8_ROWS * (FATTNI_FP8_THREADS / x.lanes_k);
    /* k_scale goes on to the end of a chunk. */
    const int64_t keys = x.integers ? x.chunks * FATTNI_FP8_KEYS : p->Sk;
    x.q_blocks = (int32_t)fattni_ceil_div(p->Sq, rows), x.k_blocks = (int32_t)fattni_ceil_div(keys, rows);
    const int64_t planes = p->B * p->Hkv, items = FATTNI_FP8_THREADS / fattni_max(x.lanes_k, x.lanes_v),
                  parts = fattni_ceil_div(2 * planes * x.chunks, items),
                  blocks = x.q_blocks * p->Hq * p->B + (x.k_blocks + x.chunks) * planes;
    const size_t shared = (size_t)x.lanes_v * 8 * FATTNI_FP8_WORDS * sizeof(uint32_t);
    if (blocks > INT32_MAX || 2 * planes * x.chunks > INT32_MAX)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "FP8: B=%lld Hq=%lld Sq=%lld Sk=%lld: more than 2^31-1 blocks",
                              (long long)p->B, (long long)p->Hq, (long long)p->Sq, (long long)p->Sk);
    const bool turns = to->rope_base > 0;
    for (int64_t d = 0; turns && d < p->D; ++d)
        x.frequency[d % 8][d / 8] = fattni_fp8_frequency((double)to->rope_base, d % (p->D / 2), p->D / 2);
    FATTNI_TRY(turns ? FATTNI_START(ctx, fattn_fp8_statistics_rope, parts, FATTNI_FP8_THREADS, &x)
                     : FATTNI_START(ctx, fattn_fp8_statistics, parts, FATTNI_FP8_THREADS, &x));
    FATTNI_TRY(FATTNI_START(ctx, fattn_fp8_scales, planes, FATTNI_FP8_CHANNELS, &x));
    static const struct {
        const char *name;
        void (*kernel)(fattni_fp8_args);
    } codes[2][2] = {
        {{"fattn_fp8_codes", fattn_fp8_codes}, {"fattn_fp8_codes_rope", fattn_fp8_codes_rope}},
        {{"fattn_fp8_codes_int8", fattn_fp8_codes_int8}, {"fattn_fp8_codes_int8_rope", fattn_fp8_codes_int8_rope}}};
    FATTNI_TRY(fattni_cuda_start(ctx, codes[x.integers][turns].name, (fattni_cuda_any)codes[x.integers][turns].kernel,
                                 blocks, FATTNI_FP8_THREADS, shared, &x));
    return FATTNI_START(ctx, fattn_fp8_means, planes, FATTNI_FP8_CHANNELS / 2, &x);
}
