/* Ops near the limits of their types. */
#include "extremes.h"

#include <criterion/criterion.h>

static fattn_ctx *ctx;

static void set_up(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void tear_down(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(op_extremes, .init = set_up, .fini = tear_down);

Test(op_extremes, unary_f32) { extremes_unary(ctx, FATTN_F32); }
Test(op_extremes, unary_f64) { extremes_unary(ctx, FATTN_F64); }
Test(op_extremes, unary_bf16) { extremes_unary(ctx, FATTN_BF16); }
Test(op_extremes, unary_f16) { extremes_unary(ctx, FATTN_F16); }
Test(op_extremes, norm_f32) { extremes_norm(ctx, FATTN_F32); }
Test(op_extremes, norm_f64) { extremes_norm(ctx, FATTN_F64); }
Test(op_extremes, norm_bf16) { extremes_norm(ctx, FATTN_BF16); }
Test(op_extremes, norm_f16) { extremes_norm(ctx, FATTN_F16); }
Test(op_extremes, cross_entropy_f32) { extremes_cross_entropy(ctx, FATTN_F32); }
Test(op_extremes, cross_entropy_f64) { extremes_cross_entropy(ctx, FATTN_F64); }
Test(op_extremes, cross_entropy_bf16) { extremes_cross_entropy(ctx, FATTN_BF16); }
Test(op_extremes, cross_entropy_f16) { extremes_cross_entropy(ctx, FATTN_F16); }
Test(op_extremes, rope_f32) { extremes_rope(ctx, FATTN_F32); }
Test(op_extremes, rope_f64) { extremes_rope(ctx, FATTN_F64); }
Test(op_extremes, rope_bf16) { extremes_rope(ctx, FATTN_BF16); }
Test(op_extremes, rope_f16) { extremes_rope(ctx, FATTN_F16); }
