/* BF16 and F16 on the CPU: every op computes in F32 and rounds once, so its results are those of F32 on the same
   numbers, rounded; gradients in F32 are those of F32. */
#include "suite.h"

#include "autograd_c/ops/ops.h"
#include "core/tensor/numeric.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

TestSuite(narrow, .init = open_tape, .fini = close_tape);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

enum { B = 2, S = 5, C = 24, V = 11, INPUTS = 4, ROOM = 4096 };

/* Ops of x [B,S,C], w [V,C], g [C], b [S,1], ids [B,S]; *last: how many there are. */
static fattn_var op(int which, const fattn_var *in, fattn_var ids) {
    const fattn_var x = in[0], w = in[1], g = in[2], b = in[3], none = {0};
    const fattn_rng rng = {.seed = 3};
    switch (which) {
    case 0: return fattn_op_add(tape, x, g);
    case 1: return fattn_op_add(tape, x, x);
    case 2: return fattn_op_mul(tape, x, b);
    case 3: return fattn_op_mul(tape, fattn_op_transpose(tape, x, 0, 2), b);
    case 4: return fattn_op_gelu(tape, x);
    case 5: return fattn_op_silu(tape, fattn_op_slice(tape, x, 2, 1, 20));
    case 6: return fattn_op_relu(tape, x);
    case 7: return fattn_op_tanh(tape, x);
    case 8: return fattn_op_scale(tape, x, 0.3);
    case 9: return fattn_op_swiglu(tape, fattn_op_slice(tape, x, 2, 0, 12), fattn_op_slice(tape, x, 2, 12, 24));
    case 10: return fattn_op_geglu(tape, x, x);
    case 11: return fattn_op_sum(tape, x, (const int[]){0, 2}, 2, 0);
    case 12: return fattn_op_mean(tape, x, (const int[]){1}, 1, 1);
    case 13: return fattn_op_dropout(tape, x, 0.25f, rng, none);
    case 14: return fattn_op_dropout(tape, x, 0, rng, none);
    case 15: return fattn_op_linear(tape, x, w, none);
    case 16: return fattn_op_linear(tape, x, fattn_op_slice(tape, w, 0, 2, 7), fattn_op_slice(tape, g, 0, 3, 8));
    case 17: return fattn_op_matmul(tape, x, x, 0, 1);
    case 18: return fattn_op_rmsnorm(tape, x, g, 1e-5f);
    case 19:
        return fattn_op_layernorm(
            tape, x, g, fattn_op_reshape(tape, fattn_op_slice(tape, w, 0, 4, 5), 1, (const int64_t[]){C}), 1e-5f);
    case 20: return fattn_op_rope(tape, fattn_op_heads(tape, x, 1, 3, 6), 1e4f, 2);
    case 21: return fattn_op_embedding(tape, w, ids);
    case 22: return fattn_op_cross_entropy(tape, x, ids, -1);
    case 23: return fattn_op_linear_cross_entropy(tape, x, w, ids, -1);
    case 24: return fattn_op_reshape(tape, fattn_op_transpose(tape, x, 0, 1), 2, (const int64_t[]){-1, 8});
    case 25: return fattn_op_concat(tape, (const fattn_var[]){x, x}, 2, 1);
    case 26: return fattn_op_softmax(tape, x);
    case 27: return fattn_op_linear_cross_entropy_padded(tape, x, w, ids, V - 1, V - 1);
    default: return none;
    }
}
enum { OPS = 28, SOFTMAX = 26 };

/* Gradients of y that every dtype has exactly: multiples of 1/4. */
static fattn_status weigh_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F32;
    return FATTN_OK;
}
static fattn_status weigh_forward(fattn_op_call *c) {
    *(float *)c->out[0].data = 0;
    return FATTN_OK;
}
static fattn_status weigh_backward(fattn_op_call *c) {
    static float weights[ROOM];
    for (int e = 0; e < ROOM; ++e) weights[e] = (float)(e * 5 % 13 - 6) / 4;
    const fattn_tensor from = fattn_tensor_view(weights, FATTN_F32, FATTN_CPU, 0, c->in[0].ndim, c->in[0].shape);
    return fattn_tensor_copy(c->ctx, &c->d_in[0], &from);
}
static const fattn_op_def weigh = {.struct_size = sizeof weigh,
                                   .n_out = 1,
                                   .name = "weigh",
                                   .infer = weigh_infer,
                                   .forward = weigh_forward,
                                   .backward = weigh_backward};

static const int64_t shapes[INPUTS][3] = {{B, S, C}, {V, C}, {C}, {S, 1}};
static const int dims[INPUTS] = {3, 2, 1, 2};

/* y in F64, row-major, and the gradients of the inputs, which were 2 before. */
static int64_t run(int which, fattn_dtype dtype, fattn_dtype grad, fattn_dtype like, double *y, double d[][ROOM]) {
    static double values[INPUTS][ROOM], grads[INPUTS][ROOM];
    static int32_t symbols[B * S];
    fattn_param p[INPUTS];
    fattn_var in[INPUTS];
    fattn_tape_reset(tape);
    for (int i = 0; i < INPUTS; ++i) {
        double numbers[ROOM];
        p[i] = (fattn_param){.value = fattn_tensor_view(values[i], dtype, FATTN_CPU, 0, dims[i], shapes[i]),
                             .grad = fattn_tensor_view(grads[i], grad, FATTN_CPU, 0, dims[i], shapes[i])};
        const fattn_tensor all = fattn_tensor_view(numbers, FATTN_F64, FATTN_CPU, 0, dims[i], shapes[i]);
        const fattn_tensor rounded = fattn_tensor_view(values[i], like, FATTN_CPU, 0, dims[i], shapes[i]);
        MUST(fattn_tensor_normal(ctx, &all, 0, 1, (fattn_rng){.seed = 9, .stream = (uint32_t)i}));
        MUST(fattn_tensor_copy(ctx, &rounded, &all)); /* numbers that `like` has */
        MUST(fattn_tensor_copy(ctx, &all, &rounded));
        MUST(fattn_tensor_copy(ctx, &p[i].value, &all));
        MUST(fattn_tensor_normal(ctx, &p[i].grad, 2, 0, (fattn_rng){0}));
        in[i] = fattn_use(tape, &p[i]);
    }
    for (int e = 0; e < B * S; ++e) symbols[e] = (int32_t)(7 * e % V);
    const fattn_tensor ids = fattn_tensor_view(symbols, FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){B, S});
    const fattn_var out = op(which, in, fattn_input(tape, &ids));
    fattn_tensor value;
    MUST(fattn_tape_value(tape, out, &value));
    const bool loss = value.ndim == 0;
    cr_assert_eq(value.dtype, loss ? (int32_t)FATTN_F32 : (int32_t)dtype, "op %d", which);
    const fattn_tensor to = fattn_tensor_view(y, FATTN_F64, FATTN_CPU, 0, value.ndim, value.shape);
    MUST(fattn_tensor_copy(ctx, &to, &value));
    MUST(fattn_tape_backward(tape, loss ? out : fattn_op_custom(tape, &weigh, &out, 1, NULL)));
    for (int i = 0; i < INPUTS; ++i) {
        const fattn_tensor d_to = fattn_tensor_view(d[i], FATTN_F64, FATTN_CPU, 0, dims[i], shapes[i]);
        MUST(fattn_tensor_copy(ctx, &d_to, &p[i].grad));
    }
    return fattn_tensor_numel(&value);
}

static double rounded(double x, fattn_dtype dtype) {
    double cell;
    fattni_store(&cell, (int32_t)dtype, 0, x);
    return fattni_load(&cell, (int32_t)dtype, 0);
}

/* Gradients pass through variables of 16 bits where a view or a copy stands before the op, and softmax's backward reads
   a y that was rounded: there a few roundings of the largest number remain. */
Test(narrow, every_op_rounds_f32_once) {
    static double got[ROOM], want[ROOM], d_got[INPUTS][ROOM], d_want[INPUTS][ROOM];
    static const fattn_dtype types[] = {FATTN_BF16, FATTN_F16};
    for (int n = 0; n < OPS * 4; ++n) {
        const int which = n / 4;
        const fattn_dtype dtype = types[n % 2], grad = n / 2 % 2 ? FATTN_F32 : dtype;
        const double unit = dtype == FATTN_BF16 ? 0x1p-8 : 0x1p-11;
        const int64_t count = run(which, dtype, grad, dtype, got, d_got);
        cr_assert_eq(run(which, FATTN_F32, FATTN_F32, dtype, want, d_want), count);
        const bool loss = count == 1;
        for (int64_t e = 0; e < count; ++e)
            cr_assert_eq(got[e], loss ? want[e] : rounded(want[e], dtype), "op %d, %s, y[%ld]: %.9g, F32 %.9g", which,
                         fattn_dtype_name(dtype), (long)e, got[e], want[e]);
        const bool exact = which != SOFTMAX && which != 1 && which != 10 && which != 17 && which != 25;
        for (int i = 0; i < INPUTS; ++i) {
            int64_t all = 1;
            double most = 0;
            for (int k = 0; k < dims[i]; ++k) all *= shapes[i][k];
            for (int64_t e = 0; e < all; ++e) most = fmax(most, fabs(d_want[i][e]));
            for (int64_t e = 0; e < all; ++e) {
                const double right = grad == FATTN_F32 ? d_want[i][e] : rounded(d_want[i][e], dtype);
                cr_assert(exact ? d_got[i][e] == right : fabs(d_got[i][e] - right) <= 4 * unit * most,
                          "op %d, %s with %s, gradient %d [%ld]: %.9g, not %.9g", which, fattn_dtype_name(dtype),
                          fattn_dtype_name(grad), i, (long)e, d_got[i][e], right);
            }
        }
    }
}

static double largest(fattn_var v) {
    fattn_tensor t;
    double most = 0;
    MUST(fattn_tape_value(tape, v, &t));
    for (int64_t e = 0; e < fattn_tensor_numel(&t); ++e) most = fmax(most, fabs(fattni_load(t.data, t.dtype, e)));
    return most;
}

/* A block with attention, and AdamW: the same program in BF16, F16 and F32. As in tests/cuda/test_cuda_tape.c the
   losses differ by a few roundings 2^-9 of weights, activations and gradients, and by two of a logit: a loss is the
   difference of a logit and a weighted mean of logits. Each learns. */
Test(narrow, training) {
    enum { PARAMS = 4, H = 2, D = 8, M = 16, T = 8, STEPS = 12 };
    static const fattn_dtype types[] = {FATTN_F32, FATTN_BF16, FATTN_F16};
    static const int64_t sizes[PARAMS][2] = {{V, M}, {3 * M, M}, {M, M}, {M, 0}};
    int32_t symbols[2][B * T];
    double losses[3][STEPS], logit[STEPS];
    for (int e = 0; e < B * T; ++e) symbols[0][e] = 5 * e % V, symbols[1][e] = e % 7 == 3 ? -1 : (5 * e + 5) % V;
    const fattn_tensor ids = fattn_tensor_view(symbols[0], FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){B, T});
    const fattn_tensor next = fattn_tensor_view(symbols[1], FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){B, T});
    for (int n = 0; n < 3; ++n) {
        const fattn_attention_params ap = {.struct_size = sizeof ap, .flags = FATTN_CAUSAL};
        fattn_param p[PARAMS] = {{.name = "p"}}, *list[PARAMS];
        fattn_adamw *opt;
        size_t allocs = 0;
        for (uint32_t i = 0; i < PARAMS; ++i) {
            const int ndim = sizes[i][1] ? 2 : 1;
            list[i] = &p[i];
            MUST(fattn_tensor_alloc(ctx, types[n], ndim, sizes[i], &p[i].value));
            MUST(fattn_tensor_alloc(ctx, FATTN_F32, ndim, sizes[i], &p[i].grad));
            MUST(fattn_tensor_normal(ctx, &p[i].value, ndim == 1, ndim == 1 ? 0 : 0.3, (fattn_rng){.stream = i}));
            MUST(fattn_tensor_normal(ctx, &p[i].grad, 0, 0, (fattn_rng){0}));
        }
        MUST(fattn_adamw_create(ctx, NULL, list, PARAMS, &opt));
        MUST(fattn_adamw_set_lr(opt, 0.03f));
        for (int step = 0; step < STEPS; ++step) {
            const fattn_var none = {0};
            fattn_tape_reset(tape);
            const fattn_var E = fattn_use(tape, &p[0]);
            const fattn_var x = fattn_op_embedding(tape, E, fattn_input(tape, &ids));
            const fattn_var h = fattn_op_rmsnorm(tape, x, fattn_use(tape, &p[3]), 1e-5f);
            const fattn_var qkv = fattn_op_linear(tape, h, fattn_use(tape, &p[1]), none);
            const fattn_var q = fattn_op_rope(tape, fattn_op_heads(tape, qkv, 0, H, D), 1e4f, 0);
            const fattn_var k = fattn_op_rope(tape, fattn_op_heads(tape, qkv, H, H, D), 1e4f, 0);
            const fattn_var v = fattn_op_heads(tape, qkv, 2 * H, H, D);
            const fattn_var a = fattn_op_merge(tape, fattn_op_attention(tape, q, k, v, &ap));
            const fattn_var y = fattn_op_add(tape, x, fattn_op_linear(tape, a, fattn_use(tape, &p[2]), none));
            const fattn_var loss = fattn_op_linear_cross_entropy(tape, y, E, fattn_input(tape, &next), -1);
            if (n == 0) logit[step] = largest(fattn_op_linear(tape, y, E, none));
            MUST(fattn_tape_backward(tape, loss));
            MUST(fattn_adamw_step(opt));
            MUST(fattn_tape_item(tape, loss, &losses[n][step]));
            if (step == 1) allocs = fattn_ctx_mem(ctx).allocs;
            if (step > 1) cr_assert_eq(fattn_ctx_mem(ctx).allocs, allocs, "step %d allocated", step);
            cr_assert_leq(fabs(losses[n][step] - losses[0][step]), 0.05 * losses[0][step] + 2 * 0x1p-9 * logit[step],
                          "%s, step %d: %g, not %g", fattn_dtype_name(types[n]), step, losses[n][step],
                          losses[0][step]);
        }
        cr_assert_lt(losses[n][STEPS - 1], 0.8 * losses[n][0]);
        if (n) cr_assert_neq(losses[n][1], losses[0][1], "nothing was rounded");
        fattn_adamw_destroy(opt);
        for (int i = 0; i < PARAMS; ++i) {
            fattn_tensor_free(ctx, &p[i].value);
            fattn_tensor_free(ctx, &p[i].grad);
        }
    }
}

/* Two dtypes do not mix, on the CPU as on a GPU. */
Test(narrow, dtypes_must_agree) {
    float x[4] = {0};
    const fattn_tensor a = fattn_tensor_view(x, FATTN_BF16, FATTN_CPU, 0, 1, (const int64_t[]){4});
    const fattn_tensor b = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){4});
    fattn_op_add(tape, fattn_input(tape, &a), fattn_input(tape, &b));
    cr_assert_eq(fattn_tape_status(tape), FATTN_E_DTYPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "add: b is f32, but the first input is bf16"), "%s", fattn_ctx_error(ctx));
}

/* A built-in op whose def lacks FATTN_OP_F32_ON_CPU says so instead of reading 16 bits as 32. */
Test(narrow, without_the_flag) {
    uint16_t x[4] = {0};
    const fattn_tensor a = fattn_tensor_view(x, FATTN_F16, FATTN_CPU, 0, 1, (const int64_t[]){4});
    fattn_op_def copy = fattni_op_gelu;
    copy.flags = 0;
    const fattn_var in = fattn_input(tape, &a);
    fattn_op_custom(tape, &copy, &in, 1, NULL);
    cr_assert_eq(fattn_tape_status(tape), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "gelu: x is f16; on the CPU this op takes f32 and f64"), "%s",
              fattn_ctx_error(ctx));
}

/* y = x x^T of a user's op, whose code is for F32 alone; x^T is saved. */
static fattn_status gram_infer(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    const int64_t n = x->shape[0];
    c->out[0].ndim = 2, c->out[0].dtype = x->dtype;
    c->out[0].shape[0] = c->out[0].shape[1] = n;
    c->saved_bytes = (size_t)(fattn_tensor_numel(x) * (int64_t)fattn_dtype_size((fattn_dtype)x->dtype));
    return FATTN_OK;
}
static fattn_status gram_forward(fattn_op_call *c) {
    const int64_t n = c->in[0].shape[0], k = c->in[0].shape[1];
    const float *const x = c->in[0].data;
    float *const y = c->out[0].data, *const saved = c->saved;
    if (c->in[0].dtype != FATTN_F32 || c->out[0].dtype != FATTN_F32 || c->saved_bytes != (size_t)(n * k) * sizeof *x ||
        c->in[0].stride[0] != k || c->in[0].stride[1] != 1)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "gram: not row-major f32");
    for (int64_t i = 0; i < n * k; ++i) saved[i % k * n + i / k] = x[i];
    for (int64_t i = 0; i < n * n; ++i) {
        y[i] = 0;
        for (int64_t e = 0; e < k; ++e) y[i] += x[i / n * k + e] * saved[e * n + i % n];
    }
    return FATTN_OK;
}
static fattn_status gram_backward(fattn_op_call *c) {
    const int64_t n = c->in[0].shape[0], k = c->in[0].shape[1];
    const float *const dy = c->d_out[0].data, *const saved = c->saved;
    float *const dx = c->d_in[0].data;
    if (c->d_in[0].dtype != FATTN_F32 || c->d_out[0].dtype != FATTN_F32)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "gram: gradients are not f32");
    for (int64_t i = 0; i < n * k; ++i) {
        float sum = c->d_in_fresh[0] ? 0 : dx[i];
        for (int64_t j = 0; j < n; ++j) sum += (dy[i / k * n + j] + dy[j * n + i / k]) * saved[i % k * n + j];
        dx[i] = sum;
    }
    return FATTN_OK;
}

/* The flag serves a user's op as it does the built-in ones, on an x that is not row-major, too. All numbers are
   multiples of 1/4 of at most 8 bits, and their sums are exact in F32: results are exact, rounded to x's dtype. */
Test(narrow, a_custom_op) {
    enum { N = 5, K = 7 };
    static const fattn_dtype types[] = {FATTN_F32, FATTN_BF16, FATTN_F16};
    const fattn_op_def gram = {.struct_size = sizeof gram,
                               .n_out = 1,
                               .flags = FATTN_OP_F32_ON_CPU,
                               .name = "gram",
                               .infer = gram_infer,
                               .forward = gram_forward,
                               .backward = gram_backward};
    for (int n = 0; n < 6; ++n) {
        const fattn_dtype type = types[n / 2], grad = n % 2 ? FATTN_F32 : type;
        float x[K * N]; /* [K,N]: the op gets its transpose */
        double cells[K * N], d_cells[K * N];
        fattn_param p = {.value = fattn_tensor_view(cells, type, FATTN_CPU, 0, 2, (const int64_t[]){K, N}),
                         .grad = fattn_tensor_view(d_cells, grad, FATTN_CPU, 0, 2, (const int64_t[]){K, N})};
        for (int e = 0; e < K * N; ++e) {
            x[e] = (float)(e * 11 % 17 - 8) / 4;
            fattni_store(cells, (int32_t)type, e, (double)x[e]);
            fattni_store(d_cells, (int32_t)grad, e, 0);
        }
        fattn_tape_reset(tape);
        fattn_var v = fattn_op_transpose(tape, fattn_use(tape, &p), 0, 1);
        fattn_tensor y;
        if (type == FATTN_F32) v = fattn_op_cast(tape, v, FATTN_F32); /* as the header says: strides are the op's */
        v = fattn_op_custom(tape, &gram, &v, 1, NULL);
        MUST(fattn_tape_value(tape, v, &y));
        cr_assert_eq(y.dtype, (int32_t)type);
        for (int i = 0; i < N * N; ++i) {
            double sum = 0;
            for (int e = 0; e < K; ++e) sum += (double)x[e * N + i / N] * (double)x[e * N + i % N];
            cr_assert_eq(fattni_load(y.data, y.dtype, i), rounded(sum, type), "%s, y[%d]", fattn_dtype_name(type), i);
        }
        MUST(fattn_tape_backward(tape, fattn_op_custom(tape, &weigh, &v, 1, NULL)));
        for (int e = 0; e < K * N; ++e) {
            double sum = 0;
            const int i = e % N;
            for (int j = 0; j < N; ++j)
                sum += (double)((i * N + j) * 5 % 13 - 6 + (j * N + i) * 5 % 13 - 6) / 4 * (double)x[e / N * N + j];
            const double got = fattni_load(d_cells, (int32_t)grad, e);
            /* with a 16-bit gradient the view's gradient is p's: one rounding; with F32 none */
            cr_assert_eq(got, rounded(sum, grad), "%s, gradient in %s [%d]: %g, not %g", fattn_dtype_name(type),
                         fattn_dtype_name(grad), e, got, sum);
        }
    }
}
