/* Inputs with negative strides, as NumPy's x[::-1]: every op gives the same bits as for a copy. */
#include "suite.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

TestSuite(reversed, .init = open_tape, .fini = close_tape);

enum { B = 2, S = 5, C = 24, D = 4 };
static double values[B * S * C];

static fattn_tensor flipped(fattn_tensor t, int dim) {
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)t.dtype);
    t.data = (char *)t.data + (t.shape[dim] - 1) * t.stride[dim] * size;
    t.stride[dim] = -t.stride[dim];
    return t;
}

/* Records ops of x [B,S,C], w [6,C], g [C] and ids [B,S] into `out`; returns their number. Ops that need rows of
   contiguous elements only with `rows`. */
static int graph(fattn_var x, fattn_var w, fattn_var g, fattn_var ids, bool rows, fattn_var *out) {
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL};
    const fattn_var none = {0}, h = fattn_op_heads(tape, x, 1, 3, D);
    int n = 0;
    out[n++] = h;
    out[n++] = fattn_op_merge(tape, h);
    out[n++] = fattn_op_heads(tape, fattn_op_merge(tape, h), 1, 2, D);
    out[n++] = fattn_op_add(tape, x, g);
    out[n++] = fattn_op_mul(tape, h, h);
    out[n++] = fattn_op_gelu(tape, x);
    out[n++] = fattn_op_silu(tape, h);
    out[n++] = fattn_op_reshape(tape, x, 4, (const int64_t[]){B, S, 2, C / 2});
    out[n++] = fattn_op_reshape(tape, h, 2, (const int64_t[]){-1, D});
    out[n++] = fattn_op_permute(tape, h, 4, (const int[]){3, 1, 0, 2});
    out[n++] = fattn_op_transpose(tape, x, 0, 2);
    out[n++] = fattn_op_slice(tape, x, 1, 1, S);
    out[n++] = fattn_op_concat(tape, (const fattn_var[]){x, x}, 2, 1);
    out[n++] = fattn_op_sum(tape, x, (const int[]){1}, 1, 0);
    out[n++] = fattn_op_mean(tape, h, (const int[]){0, 3}, 2, 1);
    out[n++] = fattn_op_dropout(tape, h, 0.3f, (fattn_rng){.seed = 1}, none);
    out[n++] = fattn_op_swiglu(tape, x, x);
    out[n++] = fattn_op_geglu(tape, h, h);
    out[n++] = fattn_op_relu(tape, h);
    out[n++] = fattn_op_tanh(tape, x);
    out[n++] = fattn_op_scale(tape, h, 3);
    out[n++] = fattn_op_linear(tape, x, w, none);
    out[n++] = fattn_op_linear_gelu(tape, x, w, none);
    out[n++] = fattn_op_linear_residual(tape, x, w, none, fattn_op_linear(tape, x, w, none));
    out[n++] = fattn_op_matmul(tape, x, x, 0, 1);
    out[n++] = fattn_op_matmul(tape, h, h, 1, 0);
    out[n++] = fattn_op_cast(tape, x, FATTN_F64);
    if (!rows) return n;
    out[n++] = fattn_op_rope(tape, h, 1e4f, 2);
    out[n++] = fattn_op_attention(tape, h, fattn_op_heads(tape, x, 0, 3, D), fattn_op_heads(tape, x, 2, 3, D), &p);
    out[n++] = fattn_op_softmax(tape, h);
    out[n++] = fattn_op_rmsnorm(tape, x, g, 1e-5f);
    out[n++] = fattn_op_layernorm(tape, x, g, g, 1e-5f);
    out[n++] = fattn_op_embedding(tape, w, ids);
    out[n++] = fattn_op_cross_entropy(tape, x, ids, -1);
    out[n++] = fattn_op_linear_cross_entropy(tape, x, w, ids, -1);
    return n;
}
enum { OPS = 35 };

/* Runs the ops on x itself, or on a row-major copy of the same elements, and keeps their results. */
static int results(const fattn_tensor *x, const fattn_tensor *w, const fattn_tensor *g, const fattn_tensor *ids,
                   bool rows, fattn_tensor *to) {
    fattn_var out[OPS];
    fattn_tape_reset(tape);
    const int n =
        graph(fattn_input(tape, x), fattn_input(tape, w), fattn_input(tape, g), fattn_input(tape, ids), rows, out);
    cr_assert_eq(fattn_tape_status(tape), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < n; ++i) {
        fattn_tensor y;
        cr_assert_eq(fattn_tape_value(tape, out[i], &y), FATTN_OK);
        cr_assert_eq(fattn_tensor_alloc(ctx, (fattn_dtype)y.dtype, y.ndim, y.shape, &to[i]), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &to[i], &y), FATTN_OK);
    }
    return n;
}

static fattn_tensor copy_of(const fattn_tensor *t) {
    fattn_tensor copy;
    cr_assert_eq(fattn_tensor_alloc(ctx, (fattn_dtype)t->dtype, t->ndim, t->shape, &copy), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(ctx, &copy, t), FATTN_OK);
    return copy;
}

/* Every set of dimensions: bits 0..2 of x, 3..4 of w, 5 of g, 6..7 of ids. */
static void check(fattn_dtype dtype, unsigned set) {
    static double w_values[6 * C], g_values[C];
    static const int32_t ids_values[B * S] = {0, 5, 3, -1, 2, 1, 4, 4, 0, 3};
    int32_t symbols[B * S];
    memcpy(symbols, ids_values, sizeof symbols);
    symbols[3] = 1;
    fattn_tensor of[4] = {fattn_tensor_view(values, dtype, FATTN_CPU, 0, 3, (int64_t[]){B, S, C}),
                          fattn_tensor_view(w_values, dtype, FATTN_CPU, 0, 2, (int64_t[]){6, C}),
                          fattn_tensor_view(g_values, dtype, FATTN_CPU, 0, 1, (int64_t[]){C}),
                          fattn_tensor_view(symbols, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S})};
    fattn_tensor copy[4], got[OPS], want[OPS];
    for (int i = 0, bit = 0; i < 4; ++i) {
        if (i < 3) cr_assert_eq(fattn_tensor_normal(ctx, &of[i], 0, 1, (fattn_rng){.seed = (uint64_t)i}), FATTN_OK);
        for (int d = 0; d < of[i].ndim; ++d, ++bit)
            if (set >> bit & 1) of[i] = flipped(of[i], d);
        copy[i] = copy_of(&of[i]);
    }
    const bool rows = !(set & (1u << 2 | 1u << 4 | 1u << 5)); /* last dimensions, except those of ids */
    const int n = results(&of[0], &of[1], &of[2], &of[3], rows, got);
    results(&copy[0], &copy[1], &copy[2], &copy[3], rows, want);
    for (int i = 0; i < n; ++i) {
        const size_t bytes = (size_t)fattn_tensor_numel(&got[i]) * fattn_dtype_size((fattn_dtype)got[i].dtype);
        cr_assert(memcmp(got[i].data, want[i].data, bytes) == 0, "op %d, set 0x%x, %s", i, set,
                  fattn_dtype_name(dtype));
        fattn_tensor_free(ctx, &got[i]);
        fattn_tensor_free(ctx, &want[i]);
    }
    for (int i = 0; i < 4; ++i) fattn_tensor_free(ctx, &copy[i]);
}

Test(reversed, every_op_takes_inputs_with_negative_strides) {
    for (unsigned set = 0; set < 256; ++set) {
        check(FATTN_F32, set);
        check(FATTN_F64, set);
    }
}
