#include "case_checks.h"

#include "call.h"
#include "device.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int64_t dims[DIMS] = {64, 128, 8, 80, 96, 256, 59, 1, 111, 200};

/* Tensors of `dtype`, products of the precision of `rounding`. */
static void check_rounded(fattn_ctx *cpu, const attention_case *c, fattn_dtype dtype, fattn_dtype rounding) {
    attention_case in_dtype = *c;
    in_dtype.dtype = dtype;
    if (c->flags & FATTN_MERGE) in_dtype.wide = true; /* a partial result is F32 */
    attention_case rounded = in_dtype;
    rounded.dtype = rounding;
    attention *const got = attention_new(cpu, &in_dtype), *const low = attention_new(cpu, &rounded);
    attention_round_d_o(got, dtype);
    attention_round_d_o(low, rounding);
    attention *const want = attention_twin(got, FATTN_F64);
    got->on_device = device_run;
    attention_run(want, REFERENCE);
    attention_run(low, UNFUSED);
    attention_run(got, ON_DEVICE);
    attention_match_16_bits(got, want, low);
    attention_free(got);
    attention_free(want);
    attention_free(low);
}

fattn_dtype half_type(bool bf16) { return bf16 && call_has_bf16() ? FATTN_BF16 : FATTN_F16; }

void check(fattn_ctx *cpu, const attention_case *c, fattn_dtype dtype) {
    dtype = half_type(dtype == FATTN_BF16);
    check_rounded(cpu, c, dtype, dtype);
}

void check_tf32(fattn_ctx *cpu, const attention_case *c) {
    attention_case allowed = *c;
    allowed.flags |= FATTN_TF32;
    check_rounded(cpu, &allowed, FATTN_F32, FATTN_F16);
}

void check_real(const attention_case *c, fattn_dtype dtype) {
    attention_case in_dtype = *c;
    in_dtype.dtype = dtype;
    tiles_check_on_device(&in_dtype, device_run);
}

fattn_ctx *device_or_skip(void) {
    fattn_ctx *ctx = device_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    device_use(ctx);
    return ctx;
}

bool mine(int n) {
    const char *const part = getenv("PART");
    int k = 1, parts = 1;
    cr_assert(!part || sscanf(part, "%d/%d", &k, &parts) == 2, "PART=%s is not k/n", part);
    return n % parts == k - 1;
}

bool is_fused(fattn_ctx *ctx, const attention_case *c) {
    call *const x = call_new(ctx, c);
    const bool fused = !strstr(x->plan.bwd_kernel, "standard");
    call_free(x);
    return fused;
}
