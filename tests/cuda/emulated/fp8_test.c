/* fattn_fp8_quantize with the launches and the kernels of a GPU, on the host: all bytes of the CPU's copies. */
#include "attention.h"
#include "fp8.h"

#include "core/base/device.h"
#include "core/fp8/fp8.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

fattn_status emulated_quantize(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *to);

/* All elements of the copies but scratch, also those that no sequence has. */
static void check(const attention_case *c, float rope_base) {
    fattn_ctx *const cpu = attention_context(1), *const gpu = attention_context(1);
    fattni_device_ops ops = *gpu->ops;
    ops.fp8_quantize = emulated_quantize;
    gpu->ops = &ops;
    attention *const a = attention_new(cpu, c), *const b = attention_new(gpu, c);
    fp8_copies want = fp8_quantize_turned(a, rope_base), got = fp8_quantize_turned(b, rope_base);
    static const char *const names[8] = {"q8", "k8", "v8", "q_scale", "q_shift", "k_scale", "v_scale", "v_mean"};
    for (int n = 0; n < 8; ++n) {
        const fattn_tensor *const w = &want.fp8.q8 + n, *const g = &got.fp8.q8 + n;
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t e = 0; e < fattn_tensor_numel(w); ++e) {
            attention_index(w, e, at);
            const double x = fp8_get(g, at[0], at[1], at[2], at[3]), y = fp8_get(w, at[0], at[1], at[2], at[3]);
            cr_assert(memcmp(&x, &y, sizeof x) == 0, "%s %s, D %d, Dv %d: %s[%d, %d, %d, %d] is %g, the CPU has %g",
                      c->name, fattn_dtype_name(c->dtype), (int)c->D, (int)c->Dv, names[n], (int)at[0], (int)at[1],
                      (int)at[2], (int)at[3], x, y);
        }
    }
    fp8_free(&want), fp8_free(&got);
    attention_free(a), attention_free(b);
    gpu->ops = cpu->ops;
    fattn_ctx_destroy(gpu);
    fattn_ctx_destroy(cpu);
}

static const attention_case cases[] = {
    {"one", .B = 1, .Hq = 1, .Sq = 1, .Sk = 1, .D = 8},
    {"around 16 keys", .B = 2, .Hq = 2, .Sq = 17, .Sk = 15, .D = 64},
    {"around a chunk", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 129, .Sk = 129, .D = 128},
    {"several chunks", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 65, .Sk = 500, .D = 32, .Dv = 80},
    {"d 256", .B = 1, .Hq = 2, .Hkv = 1, .Sq = 40, .Sk = 150, .D = 256},
    {"wide values", .B = 1, .Hq = 1, .Sq = 20, .Sk = 128, .D = 16, .Dv = 192},
    {"d 40", .B = 2, .Hq = 1, .Sq = 33, .Sk = 140, .D = 40, .Dv = 96},
    /* F32 in multiples of 16 bytes, not of 8 channels; of one key nothing is left beside the means of v. */
    {"d 20, one key", .B = 1, .Hq = 2, .Sq = 3, .Sk = 1, .D = 20, .Dv = 44},
    {"d 17", .B = 1, .Hq = 2, .Sq = 33, .Sk = 140, .D = 17, .Dv = 59},
    {"d 80, around 32 keys", .B = 3, .Hq = 1, .Sq = 31, .Sk = 97, .D = 80, .lengths = LENGTHS_PADDED_K,
     .length_k = {31, 33, 97}},
    {"d 128, around 32 keys", .B = 4, .Hq = 1, .Sq = 31, .Sk = 65, .D = 128, .lengths = LENGTHS_PACKED,
     .length_q = {1, 1, 1, 1}, .length_k = {32, 0, 65, 1}},
    {"qkv", .B = 2, .Hq = 3, .Sq = 70, .Sk = 70, .D = 64, .layout = LAYOUT_QKV},
    {"padded", .B = 4, .Hq = 2, .Sq = 140, .Sk = 200, .D = 64, .Dv = 32, .lengths = LENGTHS_PADDED,
     .length_q = {140, 0, 1, 77}, .length_k = {127, 200, 0, 129}},
    {"packed", .B = 6, .Hq = 2, .Hkv = 1, .Sq = 129, .Sk = 260, .D = 64, .lengths = LENGTHS_PACKED,
     .length_q = {16, 31, 0, 129, 5, 1}, .length_k = {15, 260, 128, 0, 127, 129}},
};
enum { CASES = sizeof cases / sizeof *cases };

Test(emulated_fp8, copies_have_the_bits_of_the_cpu, .timeout = 300) {
    static const fattn_dtype dtypes[3] = {FATTN_BF16, FATTN_F32, FATTN_F16};
    static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
    for (int n = 0; n < 8 * CASES; ++n) {
        attention_case c = cases[n / 8];
        c.dtype = dtypes[n % 3];
        if (c.layout == LAYOUT_BHSD) c.layout = layouts[n % 4];
        c.flags |= FATTN_FP8 | (n / 4 % 2 ? FATTN_FP8_INT8 : 0u);
        if (n % 2 && c.D >= 16 && (c.D & (c.D - 1)) == 0) c.flags |= FATTN_FP8_HADAMARD;
        c.q_pos0 = n % 5 * 100, c.k_pos0 = n % 3 * 1000;
        check(&c, n % 4 >= 2 && c.D % 16 == 0 ? 10000 : 0);
    }
}
