/* FlashAttention-1's loop order gives the same results; its state is in the workspace. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};

Test(flash1, shapes) {
    char name[32];
    for (int n = 0; n < attention_shape_count; ++n) {
        attention_case c = tiles_case(n + 7, dtypes[n % 4]);
        snprintf(name, sizeof name, "FLASH1 walk %d", n);
        c.name = name;
        c.algorithm = FATTN_ALGO_FLASH1;
        tiles_check_backward(&c); /* the backward of FlashAttention-2 */
    }
}

Test(flash1, features) {
    for (int n = 0; n < attention_feature_count; ++n) {
        attention_case c = attention_features[n];
        c.dtype = dtypes[(n + n / 4) % 4];
        c.wide = n % 8 < 4;
        c.algorithm = FATTN_ALGO_FLASH1;
        c.layout = LAYOUT_PITCH;
        tiles_check_forward(&c);
    }
}

/* max and sum of all rows per thread, and no more than one thread per head. */
Test(flash1, workspace) {
    fattn_ctx *const ctx = attention_context(16);
    size_t bytes[2];
    for (int n = 0; n < 2; ++n) {
        const attention_case c = {.name = "workspace",
                                  .dtype = FATTN_F32,
                                  .B = 1,
                                  .Hq = 3,
                                  .Sq = 480 << n,
                                  .Sk = 100,
                                  .D = 64,
                                  .algorithm = FATTN_ALGO_FLASH1};
        attention *const a = attention_new(ctx, &c);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &a->params, &a->io, &plan), FATTN_OK);
        cr_assert(strstr(plan.fwd_kernel, "flash1"), "%s", plan.fwd_kernel);
        cr_assert(!strstr(plan.bwd_kernel, "flash1"), "%s", plan.bwd_kernel);
        bytes[n] = plan.fwd_workspace;
        attention_free(a);
    }
    /* 480 more rows, 3 heads at a time, 2 floats; each part rounded up to 256 bytes */
    const size_t more = bytes[1] - bytes[0];
    cr_assert(more > 3 * (480 * 8 - 512) && more < 3 * (480 * 8 + 512), "%zu", more);
    fattn_ctx_destroy(ctx);
}
