/* fattn_kv_append with the launch and the kernels of a GPU, on the host: all bytes without rotation, and within its
   roundings with one. */
#include "attention.h"
#include "kv.h"

#include "core/base/device.h"
#include "core/kv_cache/kv_append.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

fattn_status emulated_append(fattn_ctx *ctx, const fattni_kv_append *a); /* fattni_cuda_kv_append */

/* An F32 rotation of numbers up to 4 with or without a fused product: 3 roundings of sums below 8, and one of the
   result. */
static double bound(fattn_dtype dtype) {
    if (dtype == FATTN_F64) return 8 * 3 * 0x1p-53;
    return 8 * 3 * 0x1p-24 + (dtype == FATTN_F16 ? 0x1p-8 : dtype == FATTN_BF16 ? 0x1p-5 : 0);
}

static void check(const kv_case *c, int n, int sms) {
    fattn_ctx *const cpu = attention_context(1), *const gpu = attention_context(1);
    fattni_device_ops ops = *gpu->ops;
    fattn_tape *tape;
    cr_assert_eq(fattn_tape_create(cpu, &tape), FATTN_OK);
    ops.kv_append = emulated_append;
    gpu->ops = &ops, gpu->gpu.sms = sms;
    kv *const got = kv_new(c), *const want = kv_new(c);
    kv_expect(cpu, tape, want);
    cr_assert_eq(fattn_kv_append(gpu, &got->io), FATTN_OK, "%s", fattn_ctx_error(gpu));
    const char *const different = kv_difference(got, want);
    cr_assert(c->base > 0 || !different, "case %d, %s: %s differs", n, fattn_dtype_name(c->dtype), different);
    for (int id = 0; id < KV_COUNT; ++id) {
        int64_t at[FATTN_MAX_DIMS];
        for (int64_t e = 0; want->t[id].dtype && e < fattn_tensor_numel(&want->t[id]); ++e) {
            attention_index(&want->t[id], e, at);
            const double x = attention_get(&got->t[id], at), y = attention_get(&want->t[id], at);
            cr_assert(isnan(y) ? isnan(x) : fabs(x - y) <= bound(c->dtype), "case %d, %s: %s[%d,%d,%d,%d]: %g %g", n,
                      fattn_dtype_name(c->dtype), kv_names[id], (int)at[0], (int)at[1], (int)at[2], (int)at[3], x, y);
        }
    }
    kv_free(got);
    kv_free(want);
    fattn_tape_destroy(tape);
    gpu->ops = cpu->ops;
    fattn_ctx_destroy(gpu);
    fattn_ctx_destroy(cpu);
}

/* With and without room for all rows; rows shared by one, two or many CTAs. */
static void walk(int first, int count) {
    static const int sms[] = {1, 132, 4};
    for (int n = first; n < first + count; ++n) {
        kv_case c = kv_case_of(n, n % 2);
        if (c.S > 5) c.S = 6;
        for (int b = 0; b < KV_SEQUENCES; ++b)
            if (c.rows[b] > c.S) c.rows[b] = (int32_t)c.S;
        check(&c, n, sms[n % 3]);
    }
}
Test(emulated_kv_append, cases, .timeout = 300) { walk(0, 24); }
Test(emulated_kv_append, more_cases, .timeout = 300) { walk(24, 24); }

Test(emulated_kv_append, nothing_to_append) {
    for (int n = 0; n < 12; ++n) {
        kv_case c = kv_case_of(4 * n + 1, true);
        if (n % 3 == 0) c.B = 0;
        if (n % 3 == 1) c.S = 0;
        c.ragged = n % 3 == 2;
        for (int b = 0; b < KV_SEQUENCES; ++b) c.rows[b] = 0, c.lengths[b] = (int32_t)c.room;
        check(&c, n, 132);
    }
}

/* What the CPU refuses: clamped lengths and numbers of rows; rows whose entry is no page are left out. */
Test(emulated_kv_append, values_out_of_range) {
    const kv_case c = {.dtype = FATTN_F16,
                       .B = 4,
                       .Hkv = 2,
                       .Hq = 4,
                       .S = 5,
                       .D = 64,
                       .Dv = 64,
                       .room = 64,
                       .page = 16,
                       .ragged = true,
                       .lengths = {0, 64, 14, 59},
                       .rows = {5, 0, 2, 5}};
    fattn_ctx *const cpu = attention_context(1), *const gpu = attention_context(1);
    fattni_device_ops ops = *gpu->ops;
    ops.kv_append = emulated_append;
    gpu->ops = &ops, gpu->gpu.sms = 132;
    kv *const got = kv_new(&c), *const want = kv_new(&c);
    kv_expect(cpu, NULL, want);
    int32_t *const lengths = (int32_t *)got->memory[KV_LENGTHS], *const rows = (int32_t *)got->memory[KV_NEW_ROWS];
    int32_t *const table = (int32_t *)got->memory[KV_TABLE];
    lengths[0] = -7, rows[0] = 9;
    lengths[1] = 1000, rows[1] = 3;
    rows[2] = 4, table[2 * 4 + 1] = (int32_t)got->t[KV_K_CACHE].shape[0];
    rows[3] = 100;
    cr_assert_eq(fattn_kv_append(gpu, &got->io), FATTN_OK, "%s", fattn_ctx_error(gpu));
    static const enum kv_tensor results[] = {KV_K_CACHE, KV_V_CACHE, KV_Q_ROTATED};
    for (int n = 0; n < 3; ++n)
        cr_assert(memcmp(got->memory[results[n]], want->memory[results[n]], got->bytes[results[n]]) == 0, "%s",
                  kv_names[results[n]]);
    const int32_t *const after = (const int32_t *)got->memory[KV_AFTER];
    cr_assert(after[0] == 5 && after[1] == 64 && after[2] == 18 && after[3] == 64, "%d %d %d %d", after[0], after[1],
              after[2], after[3]);
    kv_free(got);
    kv_free(want);
    gpu->ops = cpu->ops;
    fattn_ctx_destroy(gpu);
    fattn_ctx_destroy(cpu);
}
