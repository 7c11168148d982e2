/* 64-bit indices: tensors whose rows, heads or batches are more than 2^31 and 2^32 elements apart, in memory
   that is only reserved. Every operation gives the same bits as on dense tensors. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "attention.h"

#include <criterion/criterion.h>
#include <fattn/tape.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const int64_t distances[] = {((int64_t)1 << 31) + 8, ((int64_t)1 << 32) + 64, -((int64_t)1 << 32) - 64};
enum { DISTANCES = 3, MOST = 32 };

static fattn_ctx *ctx;
static struct {
    void *p;
    size_t bytes;
} reserved[MOST];
static int reservations;

static void open_context(void) { ctx = attention_context(2); }
static void release(void) {
    while (reservations > 0) {
        --reservations;
        munmap(reserved[reservations].p, reserved[reservations].bytes);
    }
}
static void close_context(void) {
    release();
    fattn_ctx_destroy(ctx);
}
TestSuite(far_strides, .init = open_context, .fini = close_context);

/* t's dtype and shape, dense except for dimension dim, in new memory. */
static fattn_tensor far_apart(const fattn_tensor *t, int dim, int64_t distance) {
    fattn_tensor far = fattn_tensor_view(NULL, (fattn_dtype)t->dtype, FATTN_CPU, 0, t->ndim, t->shape);
    const size_t element = fattn_dtype_size((fattn_dtype)t->dtype);
    const int64_t reach = distance * (t->shape[dim] - 1), length = reach < 0 ? -reach : reach;
    const size_t bytes = ((size_t)length + (size_t)fattn_tensor_numel(t)) * element;
    void *const p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) cr_skip_test("cannot reserve %zu bytes of addresses", bytes);
    cr_assert_lt(reservations, MOST);
    reserved[reservations].p = p;
    reserved[reservations++].bytes = bytes;
    far.stride[dim] = distance;
    far.data = (char *)p + (reach < 0 ? (size_t)length * element : 0);
    return far;
}

static fattn_tensor dense(fattn_dtype t, int ndim, const int64_t *shape, uint32_t stream) {
    fattn_tensor x;
    cr_assert_eq(fattn_tensor_alloc(ctx, t, ndim, shape, &x), FATTN_OK);
    const fattn_rng rng = {.seed = 5, .stream = stream};
    if (t != FATTN_I32) cr_assert_eq(fattn_tensor_normal(ctx, &x, 0, 1, rng), FATTN_OK);
    return x;
}

static void assert_same(const fattn_tensor *got, const fattn_tensor *want, const char *what) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(want); ++n) {
        attention_index(want, n, at);
        cr_assert_eq(attention_get(got, at), attention_get(want, at), "%s, element %lld", what, (long long)n);
    }
}

/* ---- tensors ---- */

Test(far_strides, copy_add_normal_compare) {
    const int64_t shape[3] = {3, 2, 5};
    fattn_tensor x = dense(FATTN_F32, 3, shape, 1), y = dense(FATTN_F32, 3, shape, 2);
    fattn_tensor sum = dense(FATTN_F32, 3, shape, 2), half = dense(FATTN_F16, 3, shape, 3);
    cr_assert_eq(fattn_tensor_copy(ctx, &half, &x), FATTN_OK);
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &x), FATTN_OK);
    for (int n = 0; n < DISTANCES * 3; ++n) {
        const int dim = n % 3;
        const fattn_tensor far = far_apart(&x, dim, distances[n / 3]);
        const fattn_tensor far_sum = far_apart(&y, dim, distances[n / 3]);
        const fattn_tensor far_half = far_apart(&half, dim, distances[n / 3]);
        cr_assert_eq(fattn_tensor_copy(ctx, &far, &x), FATTN_OK);
        assert_same(&far, &x, "copy to");
        cr_assert_eq(fattn_tensor_copy(ctx, &far_half, &far), FATTN_OK);
        assert_same(&far_half, &half, "conversion");
        cr_assert_eq(fattn_tensor_copy(ctx, &far_sum, &y), FATTN_OK);
        cr_assert_eq(fattn_tensor_add(ctx, &far_sum, &far), FATTN_OK);
        assert_same(&far_sum, &sum, "add");
        cr_assert_eq(fattn_tensor_normal(ctx, &far, 0, 1, (fattn_rng){.seed = 5, .stream = 2}), FATTN_OK);
        assert_same(&far, &y, "normal");
        fattn_report r = {.struct_size = sizeof r};
        cr_assert_eq(fattn_compare(ctx, &far, &y, NULL, 0, (fattn_tolerance){0}, &r), FATTN_OK);
        cr_assert_eq(fattn_compare(ctx, &far, &x, NULL, 0, (fattn_tolerance){0}, &r), FATTN_E_MISMATCH);
        cr_assert_eq(r.failed, 30);
        release();
    }
    fattn_tensor_free(ctx, &x), fattn_tensor_free(ctx, &y);
    fattn_tensor_free(ctx, &sum), fattn_tensor_free(ctx, &half);
}

/* A matrix product copies an operand with large strides; elementwise ops and losses do not. */
static double train(const fattn_tensor *x, fattn_param *w, const fattn_tensor *target) {
    fattn_tape *t;
    double loss = 0;
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    const fattn_var none = {0}, in = fattn_input(t, x);
    fattn_var y = fattn_op_linear(t, fattn_op_gelu(t, fattn_op_mul(t, in, in)), fattn_use(t, w), none);
    y = fattn_op_add(t, y, in);
    y = fattn_op_cross_entropy(t, y, fattn_input(t, target), -1);
    cr_assert_eq(fattn_tape_backward(t, y), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_tape_item(t, y, &loss), FATTN_OK);
    fattn_tape_destroy(t);
    return loss;
}

Test(far_strides, ops) {
    const int64_t shape[3] = {2, 3, 8}, square[2] = {8, 8};
    fattn_tensor x = dense(FATTN_F32, 3, shape, 1), target = dense(FATTN_I32, 2, shape, 0);
    fattn_param near = {.value = dense(FATTN_F32, 2, square, 2), .grad = dense(FATTN_F32, 2, square, 3)};
    fattn_param far = {.value = near.value, .grad = dense(FATTN_F32, 2, square, 3)};
    for (int n = 0; n < 6; ++n) ((int32_t *)target.data)[n] = n;
    const double loss = train(&x, &near, &target);
    for (int n = 0; n < DISTANCES * 2; ++n) {
        const fattn_tensor far_x = far_apart(&x, n % 2, distances[n / 2]);
        const fattn_tensor far_target = far_apart(&target, n % 2, distances[n / 2]);
        cr_assert_eq(fattn_tensor_copy(ctx, &far_x, &x), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &far_target, &target), FATTN_OK);
        cr_assert_eq(fattn_tensor_normal(ctx, &far.grad, 0, 1, (fattn_rng){.seed = 5, .stream = 3}), FATTN_OK);
        cr_assert_eq(train(&far_x, &far, &far_target), loss);
        assert_same(&far.grad, &near.grad, "gradient");
        release();
    }
    fattn_tensor_free(ctx, &x), fattn_tensor_free(ctx, &target);
    fattn_tensor_free(ctx, &near.value);
    fattn_tensor_free(ctx, &near.grad), fattn_tensor_free(ctx, &far.grad);
}

/* ---- attention ---- */

static void *room(size_t bytes) {
    void *const p = aligned_alloc(256, (bytes + 256) / 256 * 256);
    cr_assert_not_null(p);
    return p;
}

/* Moves all tensors of a that have the dimension, contents and all. */
static void move(attention *a, int dim, int64_t distance) {
    for (int id = 0; id < T_COUNT; ++id) {
        fattn_tensor *const t = &a->t[id];
        if (!a->present[id] || dim >= t->ndim) continue;
        const fattn_tensor far = far_apart(t, dim, distance);
        cr_assert_eq(fattn_tensor_copy(ctx, &far, t), FATTN_OK, "%s", fattn_ctx_error(ctx));
        *t = far;
    }
}

static void check_attention(const attention_case *c) {
    attention *const near = attention_new(ctx, c);
    attention_run(near, LIBRARY);
    for (int n = 0; n < DISTANCES * 3; ++n) {
        attention *const far = attention_new(ctx, c);
        move(far, n % 3, distances[n / 3]);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &far->params, &far->io, &plan), FATTN_OK);
        void *const forward = room(plan.fwd_workspace), *const backward = room(plan.bwd_workspace);
        void *const saved = room(plan.saved_bytes);
        fattn_attention_io io = far->io;
        io.saved = saved, io.saved_bytes = plan.saved_bytes;
        io.workspace = forward, io.workspace_bytes = plan.fwd_workspace;
        cr_assert_eq(fattn_attention_fwd(ctx, &far->params, &io), FATTN_OK);
        io.workspace = backward, io.workspace_bytes = plan.bwd_workspace;
        cr_assert_eq(fattn_attention_bwd(ctx, &far->params, &io), FATTN_OK);
        for (int k = 0; k < 7; ++k) {
            const enum tensor_id id = attention_outputs[k];
            if (near->present[id]) assert_same(&far->t[id], &near->t[id], attention_names[id]);
        }
        free(forward), free(backward), free(saved);
        release();
        attention_free(far);
    }
    attention_free(near);
}

Test(far_strides, attention) {
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F64, FATTN_F16, FATTN_BF16};
    for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm)
        for (int n = 0; n < (algorithm == FATTN_ALGO_AUTO ? 4 : 1); ++n) {
            const attention_case c = {.name = "far strides",
                                      .B = 2,
                                      .Hq = 4,
                                      .Hkv = 2,
                                      .Sq = 7,
                                      .Sk = 5,
                                      .D = 8,
                                      .dtype = dtypes[n],
                                      .algorithm = algorithm,
                                      .flags = FATTN_CAUSAL,
                                      .bias = BIAS,
                                      .alibi = true,
                                      .sink = true,
                                      .d_lse = true};
            check_attention(&c);
        }
}

Test(far_strides, lengths) {
    const attention_case padded = {.name = "far lengths",
                                   .B = 3,
                                   .Hq = 2,
                                   .Sq = 7,
                                   .Sk = 5,
                                   .D = 8,
                                   .dtype = FATTN_F32,
                                   .lengths = LENGTHS_PADDED,
                                   .length_q = {7, 0, 3},
                                   .length_k = {2, 5, 5}};
    attention_case packed = padded;
    packed.lengths = LENGTHS_PACKED;
    attention_case cases[2] = {padded, packed};
    for (int n = 0; n < 2; ++n) {
        attention *const near = attention_new(ctx, &cases[n]), *const far = attention_new(ctx, &cases[n]);
        attention_run(near, LIBRARY);
        for (int id = T_SEQLENS_Q; id <= T_CU_K; ++id) {
            if (!far->present[id]) continue;
            const fattn_tensor t = far_apart(&far->t[id], 0, distances[1]);
            cr_assert_eq(fattn_tensor_copy(ctx, &t, &far->t[id]), FATTN_OK);
            far->t[id] = t;
        }
        attention_run(far, LIBRARY);
        attention_same_bits(far, near);
        release();
        attention_free(near);
        attention_free(far);
    }
}
