/* The strides of a tensor without elements are not used: NumPy's are all 0, others may have any value.
   Attention, tensors, params and every op accept them. */
#include "suite.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/internal.h"

TestSuite(empty, .init = open_tape, .fini = close_tape);

static const int64_t strides[] = {0, 1, -3, 7, INT64_MAX, INT64_MIN};
enum { STRIDES = sizeof strides / sizeof *strides };
static double storage[4096];

static fattn_tensor tensor(fattn_dtype dtype, int ndim, const int64_t *shape, int64_t stride) {
    fattn_tensor t = fattn_tensor_view(storage, dtype, FATTN_CPU, 0, ndim, shape);
    for (int d = 0; d < ndim && fattn_tensor_numel(&t) == 0; ++d) t.stride[d] = stride;
    return t;
}
#define T(dtype, stride, ...)                                                                                          \
    tensor(dtype, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), (int64_t[]){__VA_ARGS__}, stride)

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

Test(empty, attention) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    static const int64_t sizes[][3] = {{0, 3, 5}, {2, 0, 5}, {2, 3, 0}, {2, 0, 0}, {0, 0, 0}};
    const size_t room = (size_t)1 << 22;
    void *workspace, *saved;
    MUST(fattni_alloc(ctx, room, &workspace));
    MUST(fattni_alloc(ctx, room, &saved));
    for (int n = 0; n < 4 * 5 * STRIDES; ++n)
        for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
            const int64_t *const of = sizes[n / 4 % 5], B = of[0], Q = of[1], K = of[2];
            const fattn_dtype t = types[n % 4], w = t == FATTN_F64 ? t : FATTN_F32;
            const int64_t s = strides[n / 20];
            double *at = storage; /* outputs at different addresses */
            fattn_tensor q = T(t, s, B, 4, Q, 8), k = T(t, s, B, 2, K, 8), v = T(t, s, B, 2, K, 6);
            fattn_tensor bias = T(t, s, B, 4, Q, K), lengths = T(FATTN_I32, s, B);
            fattn_tensor o = T(t, s, B, 4, Q, 6), lse = T(w, s, B, 4, Q), d_bias = T(w, s, B, 4, Q, K);
            fattn_tensor d_o = o, dq = q, dk = k, dv = v;
            fattn_tensor *const outputs[] = {&o, &lse, &d_bias, &d_o, &dq, &dk, &dv};
            memset(storage, 0, sizeof storage);
            for (int i = 0; i < 7; ++i) outputs[i]->data = at += 256;
            const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = algorithm};
            const fattn_attention_io io = {.struct_size = sizeof io,
                                           .q = &q,
                                           .k = &k,
                                           .v = &v,
                                           .o = &o,
                                           .lse = &lse,
                                           .bias = &bias,
                                           .seqlens_q = &lengths,
                                           .seqlens_k = &lengths,
                                           .d_o = &d_o,
                                           .dq = &dq,
                                           .dk = &dk,
                                           .dv = &dv,
                                           .d_bias = &d_bias,
                                           .saved = saved,
                                           .saved_bytes = room,
                                           .workspace = workspace,
                                           .workspace_bytes = room};
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            MUST(fattn_attention_query(ctx, &p, &io, &plan));
            MUST(fattn_attention_fwd(ctx, &p, &io));
            MUST(fattn_attention_bwd(ctx, &p, &io));
            const fattn_tensor keep = T(FATTN_U8, s, B, 4, Q, K);
            MUST(fattn_dropout_mask(ctx, &p, &io, &keep));
        }
    fattni_free(ctx, workspace, room);
    fattni_free(ctx, saved, room);
}

/* A gradient of a bias that broadcasts, over no rows: zeros. */
Test(empty, a_bias_and_its_gradient_need_not_broadcast_alike) {
    for (int n = 0; n < STRIDES; ++n) {
        const int64_t s = strides[n];
        fattn_tensor q = T(FATTN_F32, s, 2, 4, 0, 8), k = T(FATTN_F32, s, 2, 4, 5, 8), v = k, o = q;
        fattn_tensor lse = T(FATTN_F32, s, 2, 4, 0), bias = T(FATTN_F32, s, 2, 4, 0, 5);
        fattn_tensor d_bias = T(FATTN_F32, s, 2, 4, 1, 5), d_o = o;
        float sums[40], *const workspace = aligned_alloc(256, 1 << 20);
        for (int i = 0; i < 40; ++i) sums[i] = 3;
        d_bias.data = sums;
        const fattn_attention_io io = {.struct_size = sizeof io,
                                       .q = &q,
                                       .k = &k,
                                       .v = &v,
                                       .o = &o,
                                       .lse = &lse,
                                       .bias = &bias,
                                       .d_o = &d_o,
                                       .d_bias = &d_bias,
                                       .workspace = workspace,
                                       .workspace_bytes = 1 << 20};
        MUST(fattn_attention_bwd(ctx, NULL, &io));
        for (int i = 0; i < 40; ++i) cr_assert_eq(sums[i], 0);
        free(workspace);
    }
}

Test(empty, tensors) {
    for (int n = 0; n < STRIDES * 6; ++n) {
        const int64_t s = strides[n / 6];
        fattn_tensor a = T((fattn_dtype)(FATTN_F64 + n % 6), s, 3, 0, 5), b = T(FATTN_F32, s, 3, 0, 5);
        fattn_report r = {.struct_size = sizeof r};
        MUST(fattn_tensor_copy(ctx, &a, &b));
        MUST(fattn_tensor_copy(ctx, &b, &a));
        MUST(fattn_tensor_normal(ctx, &b, 0, 1, (fattn_rng){0}));
        MUST(fattn_tensor_add(ctx, &b, &b));
        MUST(fattn_compare(ctx, &a, &b, &b, 1, (fattn_tolerance){0}, &r));
        for (int d = 0; d < 3; ++d) {
            const fattn_tensor part = fattn_tensor_slice(&a, d, 1, 9);
            cr_assert_eq(part.data, a.data, "nothing to step over");
            MUST(fattn_tensor_copy(ctx, &part, &part));
        }
    }
}

/* Empty views and rows through every op, forward and backward. */
static void every_op(fattn_dtype t, int64_t s, int64_t B, int64_t S) {
    const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = FATTN_ALGO_AUTO};
    const fattn_tensor x = T(t, s, B, S, 12), ids = T(FATTN_I32, s, B, S);
    static double values[144], grads[7][144];
    memset(grads, 0, sizeof grads);
    fattn_param w = {.name = "w"}, g = {.name = "g"}, e = {.name = "e", .value = x, .grad = x};
    w.value = T(t, s, 12, 12), g.value = T(t, s, 12);
    w.value.data = g.value.data = values;
    w.grad = w.value, g.grad = g.value;
    w.grad.data = grads[0], g.grad.data = grads[1];
    const fattn_var none = {0};
    fattn_tape_reset(tape);
    const fattn_var in = fattn_use(tape, &e), W = fattn_use(tape, &w), G = fattn_use(tape, &g);
    fattn_var h = fattn_op_add(tape, in, fattn_input(tape, &x));
    h = fattn_op_mul(tape, h, G);
    h = fattn_op_layernorm(tape, fattn_op_rmsnorm(tape, h, G, 1e-5f), G, G, 1e-5f);
    fattn_var parts[2] = {fattn_op_slice(tape, h, 2, 0, 5), fattn_op_slice(tape, h, 2, 5, 12)};
    h = fattn_op_permute(tape, fattn_op_concat(tape, parts, 2, 2), 3, (const int[]){1, 2, 0});
    h = fattn_op_transpose(tape, fattn_op_permute(tape, h, 3, (const int[]){2, 1, 0}), 1, 2);
    h = fattn_op_reshape(tape, fattn_op_reshape(tape, h, 2, (const int64_t[]){B * S, 12}), 3, x.shape);
    h = fattn_op_add(tape, h, fattn_op_softmax(tape, h));
    h = fattn_op_swiglu(tape, h, fattn_op_geglu(tape, h, in));
    h = fattn_op_dropout(tape, h, 0.5f, (fattn_rng){.seed = 1}, none);
    h = fattn_op_dropout(tape, h, 0, (fattn_rng){.seed = 1}, none);
    h = fattn_op_add(tape, h, fattn_op_sum(tape, h, (const int[]){0, 1}, 2, 0)); /* of nothing: 0 */
    fattn_op_mean(tape, h, (const int[]){2}, 1, 1);
    h = fattn_op_relu(tape, fattn_op_tanh(tape, fattn_op_scale(tape, h, 0.5)));
    h = fattn_op_gelu(tape, fattn_op_silu(tape, fattn_op_linear(tape, h, W, none)));
    const fattn_var first = fattn_input(tape, &x); /* views of an input of the caller's */
    const fattn_var q = fattn_op_rope(tape, fattn_op_heads(tape, h, 1, 2, 4), 1e4f, 0);
    const fattn_var k = fattn_op_heads(tape, first, 0, 2, 4), v = fattn_op_heads(tape, in, 1, 2, 4);
    const fattn_var a = fattn_op_merge(tape, fattn_op_attention(tape, q, k, v, &p));
    fattn_op_merge(tape, k);
    fattn_op_matmul(tape, a, a, 0, 1);
    fattn_op_matmul(tape, h, first, 1, 0);
    fattn_op_cast(tape, h, FATTN_F64);
    const fattn_var id = fattn_input(tape, &ids);
    h = fattn_op_add(tape, h, fattn_op_embedding(tape, W, id));
    fattn_op_cross_entropy(tape, h, id, -1);
    const fattn_var loss = fattn_op_linear_cross_entropy(tape, h, W, id, -1);
    cr_assert_eq(fattn_tape_status(tape), FATTN_OK, "%s, strides %lld: %s", fattn_dtype_name(t), (long long)s,
                 fattn_ctx_error(ctx));
    MUST(fattn_tape_backward(tape, loss));
    for (int i = 0; i < 144; ++i) cr_assert(grads[0][i] == 0 && grads[1][i] == 0);

    fattn_adamw *adam;
    MUST(fattn_adamw_create(ctx, NULL, (fattn_param *[]){&w, &e, &g}, 3, &adam));
    MUST(fattn_adamw_step(adam));
    fattn_adamw_destroy(adam);
}

Test(empty, ops) {
    for (int n = 0; n < STRIDES; ++n)
        for (fattn_dtype t = FATTN_F64; t <= FATTN_BF16; ++t) {
            every_op(t, strides[n], 2, 0);
            every_op(t, strides[n], 0, 3);
            every_op(t, strides[n], 0, 0);
        }
}

/* The tape passes row-major strides to a custom op, and accepts any from its infer. */
static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    cr_assert(x->stride[0] == 0 && x->stride[1] == 5 && x->stride[2] == 1);
    c->out[0] = *x;
    for (int d = 0; d < 3; ++d) c->out[0].stride[d] = *(const int64_t *)c->attr;
    return FATTN_OK;
}

Test(empty, views_of_a_custom_op) {
    const fattn_op_def def = {
        .struct_size = sizeof def, .attr_size = sizeof(int64_t), .n_out = 1, .name = "mine", .infer = infer};
    for (int n = 0; n < STRIDES; ++n) {
        const fattn_tensor x = T(FATTN_F32, strides[n], 3, 0, 5);
        fattn_tensor y;
        fattn_tape_reset(tape);
        const fattn_var in = fattn_input(tape, &x), out = fattn_op_custom(tape, &def, &in, 1, &strides[n]);
        MUST(fattn_tape_value(tape, out, &y));
        cr_assert(y.data == x.data && y.stride[1] == 5);
    }
}
