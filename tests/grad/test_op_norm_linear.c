/* norm_linear: the bits of the two ops, values and gradients; what it refuses. */
#include "attention.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <string.h>

enum { X, GAIN, NORM_BIAS, W, ADDED, PARAMS };
enum { ROWS = 3, K = 24, N = 10 };
static const float eps = 1e-5f;

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

static fattn_tensor normal(fattn_ctx *ctx, fattn_dtype dtype, int i) {
    static const int64_t shapes[PARAMS][2] = {{ROWS, K}, {K}, {K}, {N, K}, {N}};
    const int ndim = i == X || i == W ? 2 : 1;
    fattn_tensor wide, t;
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, ndim, shapes[i], &wide));
    MUST(fattn_tensor_alloc(ctx, dtype, ndim, shapes[i], &t));
    MUST(fattn_tensor_normal(ctx, &wide, 0.2, 0.7, (fattn_rng){.seed = 3, .stream = (uint32_t)i}));
    MUST(fattn_tensor_copy(ctx, &t, &wide));
    fattn_tensor_free(ctx, &wide);
    return t;
}

static fattn_var two_ops(fattn_tape *t, const fattn_var *in, uint32_t flags) {
    const fattn_var h = flags & FATTN_NORM_RMS ? fattn_op_rmsnorm(t, in[X], in[GAIN], eps)
                                               : fattn_op_layernorm(t, in[X], in[GAIN], in[NORM_BIAS], eps);
    return flags & FATTN_LINEAR_GELU ? fattn_op_linear_gelu(t, h, in[W], in[ADDED])
                                     : fattn_op_linear(t, h, in[W], in[ADDED]);
}

static void run(fattn_ctx *ctx, fattn_dtype dtype, uint32_t flags, bool apart, fattn_tensor out[1 + PARAMS]) {
    fattn_param p[PARAMS];
    fattn_var in[PARAMS];
    fattn_tape *t;
    fattn_tensor y;
    memset(p, 0, sizeof p);
    MUST(fattn_tape_create(ctx, &t));
    for (int i = 0; i < PARAMS; ++i) {
        p[i].value = normal(ctx, dtype, i), p[i].grad = normal(ctx, dtype, i);
        in[i] = i == NORM_BIAS && flags & FATTN_NORM_RMS ? (fattn_var){0} : fattn_use(t, &p[i]);
    }
    const fattn_var v = apart ? two_ops(t, in, flags)
                              : fattn_op_norm_linear(t, in[X], in[GAIN], in[NORM_BIAS], eps, in[W], in[ADDED], flags);
    MUST(fattn_tape_backward(t, fattn_op_sum(t, fattn_op_mul(t, v, v), NULL, 0, 0)));
    MUST(fattn_tape_value(t, v, &y));
    MUST(fattn_tensor_alloc(ctx, dtype, 2, y.shape, &out[PARAMS]));
    MUST(fattn_tensor_copy(ctx, &out[PARAMS], &y));
    for (int i = 0; i < PARAMS; ++i) out[i] = p[i].grad, fattn_tensor_free(ctx, &p[i].value);
    fattn_tape_destroy(t);
}

Test(norm_linear, has_the_bits_of_two_ops) {
    static const fattn_dtype dtypes[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    fattn_ctx *const ctx = attention_context(2);
    for (int d = 0; d < 4; ++d)
        for (uint32_t flags = 0; flags < 4; ++flags) {
            fattn_tensor one[1 + PARAMS], two[1 + PARAMS];
            run(ctx, dtypes[d], flags, false, one);
            run(ctx, dtypes[d], flags, true, two);
            for (int i = 0; i <= PARAMS; ++i) {
                const size_t bytes = (size_t)fattn_tensor_numel(&one[i]) * fattn_dtype_size(dtypes[d]);
                cr_assert_arr_eq(one[i].data, two[i].data, bytes, "%s flags %u output %d", fattn_dtype_name(dtypes[d]),
                                 flags, i);
                fattn_tensor_free(ctx, &one[i]), fattn_tensor_free(ctx, &two[i]);
            }
        }
    fattn_ctx_destroy(ctx);
}

Test(norm_linear, refuses) {
    fattn_ctx *const ctx = attention_context(1);
    fattn_tensor value[PARAMS];
    fattn_var in[PARAMS];
    fattn_tape *t;
    static const char *const messages[] = {"norm_linear: unknown flags: 0x9",
                                           "norm_linear: FATTN_NORM_RMS with a norm_bias"};
    MUST(fattn_tape_create(ctx, &t));
    for (int i = 0; i < PARAMS; ++i) value[i] = normal(ctx, FATTN_F32, i);
    for (uint32_t n = 0; n < 2; ++n) {
        for (int i = 0; i < PARAMS; ++i) in[i] = fattn_input(t, &value[i]);
        const fattn_var y =
            fattn_op_norm_linear(t, in[X], in[GAIN], in[NORM_BIAS], eps, in[W], in[ADDED], n ? FATTN_NORM_RMS : 9);
        cr_assert_eq(y.id, 0);
        cr_assert_eq(fattn_tape_status(t), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), messages[n]), "%s", fattn_ctx_error(ctx));
        fattn_tape_reset(t);
    }
    for (int i = 0; i < PARAMS; ++i) in[i] = fattn_input(t, &value[i]);
    cr_assert_eq(fattn_op_norm_linear(NULL, in[X], in[GAIN], in[NORM_BIAS], eps, in[W], in[ADDED], 0).id, 0);
    cr_assert_eq(fattn_op_norm_linear(t, in[X], in[ADDED], in[NORM_BIAS], eps, in[W], in[ADDED], 0).id, 0);
    cr_assert_eq(fattn_tape_status(t), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "layernorm"), "%s", fattn_ctx_error(ctx));
    fattn_tape_destroy(t);
    for (int i = 0; i < PARAMS; ++i) fattn_tensor_free(ctx, &value[i]);
    fattn_ctx_destroy(ctx);
}
