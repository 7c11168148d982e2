/* reshape, permute, transpose, slice, concat. */
#include "opcheck.h"
#include "suite.h"

#include "autograd_c/tape/tape_nodes.h"

#include <string.h>

/* The case's numbers; graphs and references read them here. */
static struct {
    int ndim;                                            /* of y */
    int64_t shape[FATTN_MAX_DIMS], from[FATTN_MAX_DIMS]; /* of y and of x */
    int order[FATTN_MAX_DIMS];
    int dim, parts;
    int64_t begin, end, extent[3];
} now;

static int64_t count_of(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= shape[d];
    return n;
}

static void split(int64_t e, int ndim, const int64_t *shape, int64_t *index) {
    for (int d = ndim - 1; d >= 0; --d) {
        index[d] = e % shape[d];
        e /= shape[d];
    }
}

static int64_t joined(int ndim, const int64_t *shape, const int64_t *index) {
    int64_t e = 0;
    for (int d = 0; d < ndim; ++d) e = e * shape[d] + index[d];
    return e;
}

static fattn_var reshape(fattn_tape *t, const fattn_var *in) { return fattn_op_reshape(t, in[0], now.ndim, now.shape); }
static void reshape_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_of(now.ndim, now.from); ++e) y[e] = in[0][e];
}

static void check_reshape(int n, const int64_t *from, int m, const int64_t *to) {
    op_case c = {.name = "reshape",
                 .graph = reshape,
                 .reference = reshape_reference,
                 .n = 1,
                 .in = {{.ndim = n}},
                 .any_strides = true};
    memcpy(c.in[0].shape, from, (size_t)n * sizeof *from);
    now.ndim = m;
    memcpy(now.shape, to, (size_t)m * sizeof *to);
    /* The reference counts with x's own shape. */
    now.from[0] = count_of(n, from);
    for (int d = 1; d < FATTN_MAX_DIMS; ++d) now.from[d] = 1;
    if (m == 0) now.from[0] = 1;
    opcheck_values(&c);
    opcheck_f32(&c);
    if (count_of(n, from)) opcheck(&c);
}
#define SHAPE(...)                                                                                                     \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

Test(reshape, shapes) {
    check_reshape(SHAPE(6), SHAPE(2, 3));
    check_reshape(SHAPE(2, 3), SHAPE(-1));
    check_reshape(SHAPE(2, 3, 4), SHAPE(6, 4));
    check_reshape(SHAPE(2, 3, 4), SHAPE(2, -1));
    check_reshape(SHAPE(2, 12), SHAPE(2, 3, 2, 2));
    check_reshape(SHAPE(4, 6), SHAPE(3, 8)); /* no run splits: strided inputs are copied */
    check_reshape(SHAPE(2, 1, 3), SHAPE(1, 3, 1, 2, 1));
    check_reshape(SHAPE(1, 1), SHAPE(1));
    check_reshape(SHAPE(2, 2, 3, 2, 2), SHAPE(4, 3, 4));
    check_reshape(SHAPE(1, 5), SHAPE(5, 1));
    check_reshape(1, (int64_t[]){1}, 0, (int64_t[]){0});
    check_reshape(0, (int64_t[]){0}, SHAPE(1, 1));
    check_reshape(SHAPE(3, 0), SHAPE(0));
    check_reshape(SHAPE(3, 0), SHAPE(2, 0, 7));
}

static fattn_var permute(fattn_tape *t, const fattn_var *in) { return fattn_op_permute(t, in[0], now.ndim, now.order); }
static void permute_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_of(now.ndim, now.shape); ++e) {
        int64_t at[FATTN_MAX_DIMS], index[FATTN_MAX_DIMS];
        split(e, now.ndim, now.shape, at);
        for (int d = 0; d < now.ndim; ++d) index[now.order[d]] = at[d];
        y[e] = in[0][joined(now.ndim, now.from, index)];
    }
}

static op_case permutation(int n, const int64_t *from, const int *order) {
    op_case c = {.name = "permute",
                 .graph = permute,
                 .reference = permute_reference,
                 .n = 1,
                 .in = {{.ndim = n}},
                 .any_strides = true};
    now.ndim = n;
    for (int d = 0; d < n; ++d) {
        c.in[0].shape[d] = now.from[d] = from[d];
        now.order[d] = order[d];
    }
    for (int d = 0; d < n; ++d) now.shape[d] = from[order[d]];
    return c;
}

Test(permute, orders) {
    static const int orders[][5] = {{1, 0, 2}, {2, 0, 1}, {0, 1, 2}, {2, 1, 0}};
    for (int k = 0; k < 4; ++k) {
        const op_case c = permutation(3, (const int64_t[]){2, 3, 4}, orders[k]);
        opcheck(&c);
    }
    op_case c = permutation(5, (const int64_t[]){2, 1, 3, 2, 2}, (const int[]){4, 2, 0, 1, 3});
    opcheck(&c);
    c = permutation(1, (const int64_t[]){5}, (const int[]){0});
    opcheck(&c);
    c = permutation(2, (const int64_t[]){3, 0}, (const int[]){1, 0});
    opcheck_values(&c);
    c = permutation(0, NULL, NULL);
    opcheck(&c);
}

/* order as the exchange of two: [0,1,2] with 0 and 2 exchanged is {2,1,0}. */
static fattn_var transpose_as_order(fattn_tape *t, const fattn_var *in) { return fattn_op_transpose(t, in[0], 2, 0); }
static fattn_var transpose_same(fattn_tape *t, const fattn_var *in) { return fattn_op_transpose(t, in[0], 1, 1); }

Test(permute, transpose) {
    op_case c = permutation(3, (const int64_t[]){2, 3, 4}, (const int[]){2, 1, 0});
    c.graph = transpose_as_order;
    opcheck(&c);
    c = permutation(3, (const int64_t[]){2, 3, 4}, (const int[]){0, 1, 2});
    c.graph = transpose_same;
    opcheck(&c);
}

static fattn_var slice(fattn_tape *t, const fattn_var *in) {
    return fattn_op_slice(t, in[0], now.dim, now.begin, now.end);
}
static void slice_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_of(now.ndim, now.shape); ++e) {
        int64_t index[FATTN_MAX_DIMS];
        split(e, now.ndim, now.shape, index);
        index[now.dim] += now.begin;
        y[e] = in[0][joined(now.ndim, now.from, index)];
    }
}

static op_case slicing(int n, const int64_t *from, int dim, int64_t begin, int64_t end) {
    op_case c = {.name = "slice",
                 .graph = slice,
                 .reference = slice_reference,
                 .n = 1,
                 .in = {{.ndim = n}},
                 .any_strides = true};
    now.ndim = n, now.dim = dim, now.begin = begin, now.end = end;
    for (int d = 0; d < n; ++d) {
        c.in[0].shape[d] = now.from[d] = from[d];
        now.shape[d] = d == dim ? end - begin : from[d];
    }
    return c;
}

Test(slice, parts) {
    const int64_t shape[] = {3, 4, 5};
    for (int dim = 0; dim < 3; ++dim)
        for (int64_t begin = 0; begin < shape[dim]; ++begin)
            for (int64_t end = begin + 1; end <= shape[dim]; end += 2) {
                const op_case c = slicing(3, shape, dim, begin, end);
                opcheck(&c);
            }
    op_case c = slicing(3, shape, 1, 2, 2); /* nothing */
    opcheck_values(&c);
    c = slicing(2, (const int64_t[]){0, 4}, 1, 1, 3);
    opcheck_values(&c);
    c = slicing(2, (const int64_t[]){0, 4}, 0, 0, 0);
    opcheck_values(&c);
}

static fattn_var concat(fattn_tape *t, const fattn_var *in) { return fattn_op_concat(t, in, now.parts, now.dim); }
static void concat_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_of(now.ndim, now.shape); ++e) {
        int64_t index[FATTN_MAX_DIMS] = {0}, from[FATTN_MAX_DIMS];
        int part = 0;
        split(e, now.ndim, now.shape, index);
        while (index[now.dim] >= now.extent[part]) index[now.dim] -= now.extent[part++];
        memcpy(from, now.shape, sizeof from);
        from[now.dim] = now.extent[part];
        y[e] = in[part][joined(now.ndim, from, index)];
    }
}

static op_case joining(int n, const int64_t *shape, int dim, int parts, const int64_t *extent) {
    op_case c = {.name = "concat", .graph = concat, .reference = concat_reference, .n = parts, .any_strides = true};
    now.ndim = n, now.dim = dim, now.parts = parts;
    memcpy(now.shape, shape, (size_t)n * sizeof *shape);
    now.shape[dim] = 0;
    for (int i = 0; i < parts; ++i) {
        c.in[i].ndim = n;
        memcpy(c.in[i].shape, shape, (size_t)n * sizeof *shape);
        c.in[i].shape[dim] = now.extent[i] = extent[i];
        now.shape[dim] += extent[i];
    }
    return c;
}

Test(concat, parts) {
    for (int dim = 0; dim < 3; ++dim) {
        op_case c = joining(3, (const int64_t[]){3, 2, 4}, dim, 3, (const int64_t[]){2, 1, 3});
        opcheck(&c);
        c = joining(3, (const int64_t[]){3, 2, 4}, dim, 1, (const int64_t[]){2});
        opcheck(&c);
        c = joining(3, (const int64_t[]){3, 2, 4}, dim, 3, (const int64_t[]){2, 0, 1}); /* one is empty */
        opcheck_values(&c);
        opcheck_f32(&c);
    }
    op_case c = joining(1, (const int64_t[]){0}, 0, 2, (const int64_t[]){0, 0});
    opcheck_values(&c);
    c = joining(2, (const int64_t[]){0, 1}, 1, 2, (const int64_t[]){3, 4});
    opcheck_values(&c);
}

TestSuite(shape, .init = open_tape, .fini = close_tape);

static const void *data_of(fattn_var v) {
    fattn_tensor t;
    cr_assert_eq(fattn_tape_value(tape, v, &t), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return t.data;
}

/* Heads as a user writes them: [B,S,H*D] to [B,H,S,D] without a copy; back with one; and every dtype. */
Test(shape, views_where_strides_allow) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_I32, FATTN_U8};
    double storage[2 * 3 * 8] = {0};
    for (int k = 0; k < 6; ++k) {
        fattn_tape_reset(tape);
        const fattn_tensor x = fattn_tensor_view(storage, types[k], FATTN_CPU, 0, 3, (const int64_t[]){2, 3, 8});
        const fattn_var in = fattn_input(tape, &x);
        const fattn_var split_up = fattn_op_reshape(tape, in, 4, (const int64_t[]){2, 3, 2, 4});
        const fattn_var heads = fattn_op_permute(tape, split_up, 4, (const int[]){0, 2, 1, 3});
        const fattn_var k1 = fattn_op_slice(tape, heads, 1, 1, 2);
        const fattn_var back = fattn_op_reshape(tape, fattn_op_transpose(tape, heads, 1, 2), 3, x.shape);
        const fattn_var flat = fattn_op_reshape(tape, heads, 1, (const int64_t[]){-1});
        cr_assert_eq(data_of(heads), storage);
        cr_assert_eq((const char *)data_of(k1), (const char *)storage + 4 * fattn_dtype_size(types[k]));
        cr_assert_eq(data_of(back), storage, "a run of two dimensions");
        cr_assert_neq(data_of(flat), storage, "[B,H,S,D] is no run: copied");
    }
}

/* An input whose rows are one row: a view of it would have elements that share addresses. */
Test(shape, a_stride_of_0_is_copied) {
    const float row[3] = {1, 2, 3};
    fattn_tensor x = fattn_tensor_view((void *)(uintptr_t)row, FATTN_F32, FATTN_CPU, 0, 2, (const int64_t[]){2, 3});
    x.stride[0] = 0;
    const fattn_var in = fattn_input(tape, &x);
    const float *y = data_of(fattn_op_transpose(tape, in, 0, 1));
    for (int e = 0; e < 6; ++e) cr_assert_eq(y[e], (float)(1 + e / 2));
    y = data_of(fattn_op_permute(tape, in, 2, (const int[]){1, 0}));
    for (int e = 0; e < 6; ++e) cr_assert_eq(y[e], (float)(1 + e / 2));
    y = data_of(fattn_op_slice(tape, in, 1, 1, 3));
    for (int e = 0; e < 4; ++e) cr_assert_eq(y[e], (float)(2 + e % 2));
    y = data_of(fattn_op_reshape(tape, in, 2, (const int64_t[]){3, 2}));
    for (int e = 0; e < 6; ++e) cr_assert_eq(y[e], (float)(1 + e % 3));
    cr_assert_eq(data_of(fattn_op_slice(tape, in, 0, 1, 2)), row, "one row of it is a view");
}

/* Nothing, anywhere in a view with gaps: at its end, too. */
Test(shape, empty_slices_of_views) {
    double value[12] = {0}, grad[12] = {0};
    const int64_t shape[] = {4, 3};
    fattn_param p = {.value = fattn_tensor_view(value, FATTN_F64, FATTN_CPU, 0, 2, shape),
                     .grad = fattn_tensor_view(grad, FATTN_F64, FATTN_CPU, 0, 2, shape)};
    for (int64_t begin = 0; begin <= 4; ++begin) {
        const fattn_var x = fattn_use(tape, &p), left = fattn_op_slice(tape, x, 1, 0, 2);
        const fattn_var none = fattn_op_slice(tape, left, 0, begin, begin);
        const fattn_var last = fattn_op_slice(tape, fattn_op_slice(tape, left, 0, 1, 4), 1, 2, 2);
        const fattn_var y = fattn_op_concat(tape, (const fattn_var[]){none, left}, 2, 0);
        const fattn_var sums[] = {fattn_op_sum(tape, y, NULL, 0, 0), fattn_op_sum(tape, last, NULL, 0, 0)};
        cr_assert_eq(fattn_tape_backward(tape, fattn_op_add(tape, sums[0], sums[1])), FATTN_OK, "%s",
                     fattn_ctx_error(ctx));
        for (int e = 0; e < 12; ++e) cr_assert_eq(grad[e], e % 3 < 2 ? (double)(begin + 1) : 0);
        fattn_tape_reset(tape);
    }
}

/* Two halves of one product, used by one op and joined again: each gradient arrives once. */
Test(shape, halves_and_their_gradients) {
    double value[12], grad[12] = {0};
    for (int e = 0; e < 12; ++e) value[e] = e;
    const int64_t shape[] = {2, 6};
    fattn_param p = {.value = fattn_tensor_view(value, FATTN_F64, FATTN_CPU, 0, 2, shape),
                     .grad = fattn_tensor_view(grad, FATTN_F64, FATTN_CPU, 0, 2, shape)};
    const fattn_var x = fattn_op_scale(tape, fattn_use(tape, &p), 1);
    const fattn_var a = fattn_op_slice(tape, x, 1, 0, 3), b = fattn_op_slice(tape, x, 1, 3, 6);
    const fattn_var y = fattn_op_concat(tape, (const fattn_var[]){b, fattn_op_mul(tape, a, b), b}, 3, 1);
    const fattn_var one = fattn_op_reshape(tape, y, 1, (const int64_t[]){18});
    cr_assert_eq(fattn_tape_backward(tape, op_contract(tape, fattn_op_concat(tape, &one, 1, 0))), FATTN_OK);
    double w[18], got[18]; /* op_contract's weights, from a linear graph */
    for (int e = 0; e < 18; ++e) got[e] = 0;
    fattn_param q = {.value = fattn_tensor_view(w, FATTN_F64, FATTN_CPU, 0, 1, (const int64_t[]){18}),
                     .grad = fattn_tensor_view(got, FATTN_F64, FATTN_CPU, 0, 1, (const int64_t[]){18})};
    memset(w, 0, sizeof w);
    fattn_tape_reset(tape);
    cr_assert_eq(fattn_tape_backward(tape, op_contract(tape, fattn_use(tape, &q))), FATTN_OK);
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 3; ++j) {
            const double *const d = got + 9 * i, want_a = d[3 + j] * value[6 * i + 3 + j];
            const double want_b = d[j] + d[3 + j] * value[6 * i + j] + d[6 + j];
            cr_assert_float_eq(grad[6 * i + j], want_a, 1e-13);
            cr_assert_float_eq(grad[6 * i + 3 + j], want_b, 1e-13);
        }
}

static fattn_var bad_order(fattn_tape *t, const fattn_var *in) {
    return fattn_op_permute(t, in[0], 2, (const int[]){1, 1});
}
static fattn_var far_order(fattn_tape *t, const fattn_var *in) {
    return fattn_op_permute(t, in[0], 2, (const int[]){2, 0});
}
static fattn_var short_order(fattn_tape *t, const fattn_var *in) {
    return fattn_op_permute(t, in[0], 1, (const int[]){0});
}
static fattn_var no_order(fattn_tape *t, const fattn_var *in) { return fattn_op_permute(t, in[0], 2, NULL); }
static fattn_var long_order(fattn_tape *t, const fattn_var *in) { return fattn_op_permute(t, in[0], 6, now.order); }
static fattn_var far_transpose(fattn_tape *t, const fattn_var *in) { return fattn_op_transpose(t, in[0], 0, -1); }
static fattn_var no_shape(fattn_tape *t, const fattn_var *in) { return fattn_op_reshape(t, in[0], 1, NULL); }
static fattn_var six(fattn_tape *t, const fattn_var *in) { return fattn_op_reshape(t, in[0], 6, now.shape); }
static fattn_var below(fattn_tape *t, const fattn_var *in) { return fattn_op_reshape(t, in[0], -1, now.shape); }
#define RESHAPE(name, ...)                                                                                             \
    static fattn_var name(fattn_tape *t, const fattn_var *in) { return fattn_op_reshape(t, in[0], SHAPE(__VA_ARGS__)); }
RESHAPE(to_5, 5)
RESHAPE(to_two_open, -1, -1)
RESHAPE(to_minus_2, -2, 3)
RESHAPE(to_open_5, 5, -1)
RESHAPE(to_open_0, 0, -1)
RESHAPE(to_huge, INT64_MAX / 2, INT64_MAX / 2)
#define SLICE(name, dim, begin, end)                                                                                   \
    static fattn_var name(fattn_tape *t, const fattn_var *in) { return fattn_op_slice(t, in[0], dim, begin, end); }
SLICE(slice_dim, 2, 0, 1)
SLICE(slice_below, 0, -1, 1)
SLICE(slice_beyond, 1, 1, 5)
SLICE(slice_back, 1, 3, 2)
#define CONCAT(name, n, dim)                                                                                           \
    static fattn_var name(fattn_tape *t, const fattn_var *in) { return fattn_op_concat(t, in, n, dim); }
CONCAT(concat_2, 2, 0)
CONCAT(concat_dim, 2, 2)
CONCAT(concat_none, 0, 0)
CONCAT(concat_less, -1, 0)
static fattn_var concat_null(fattn_tape *t, const fattn_var *in) {
    (void)in;
    return fattn_op_concat(t, NULL, 2, 0);
}
static fattn_var concat_65(fattn_tape *t, const fattn_var *in) {
    fattn_var many[65];
    for (int i = 0; i < 65; ++i) many[i] = in[0];
    return fattn_op_concat(t, many, 65, 0);
}

Test(shape, errors) {
#define X                                                                                                              \
    1, {                                                                                                               \
        {                                                                                                              \
            FATTN_F32, 2, { 3, 4 }                                                                                     \
        }                                                                                                              \
    }
    const op_error list[] = {
        {to_5, FATTN_E_SHAPE, "reshape: x is [3,4], of 12 elements, which [5] cannot hold", X},
        {to_two_open, FATTN_E_ARG, "dimension 1 is -1; one may be -1", X},
        {to_minus_2, FATTN_E_ARG, "reshape: dimension 0 is -2", X},
        {to_open_5, FATTN_E_SHAPE, "which [5,-1] cannot hold", X},
        {to_open_0, FATTN_E_SHAPE, "which [0,-1] cannot hold", 1, {{FATTN_F32, 2, {3, 0}}}},
        {to_huge, FATTN_E_SHAPE, "reshape: x is [3,4]", X},
        {no_shape, FATTN_E_ARG, "reshape: shape is NULL", X},
        {six, FATTN_E_ARG, "6 dimensions are not 0..5", X},
        {below, FATTN_E_ARG, "-1 dimensions are not 0..5", X},
        {to_5, FATTN_E_ARG, "reshape: x is absent", 1, {{0}}},
        {bad_order, FATTN_E_ARG, "permute: order[1] is 1, which is there twice", X},
        {far_order, FATTN_E_ARG, "permute: order[0] is 2, no dimension of x", X},
        {short_order, FATTN_E_SHAPE, "permute: x is [3,4], the order has 1 dimensions", X},
        {no_order, FATTN_E_ARG, "permute: order is NULL", X},
        {long_order, FATTN_E_ARG, "6 dimensions are not 0..5", X},
        {bad_order, FATTN_E_ARG, "permute: x is absent", 1, {{0}}},
        {far_transpose, FATTN_E_ARG, "transpose: x is [3,4], without a dimension -1", X},
        {far_transpose, FATTN_E_ARG, "transpose: x is absent", 1, {{0}}},
        {slice_dim, FATTN_E_ARG, "slice: x is [3,4], without a dimension 2", X},
        {slice_below, FATTN_E_ARG, "slice: -1..1 does not lie in dimension 0 of [3,4]", X},
        {slice_beyond, FATTN_E_ARG, "slice: 1..5 does not lie in dimension 1 of [3,4]", X},
        {slice_back, FATTN_E_ARG, "slice: 3..2 does not lie", X},
        {slice_dim, FATTN_E_ARG, "slice: x is absent", 1, {{0}}},
        {concat_2,
         FATTN_E_SHAPE,
         "concat: x[0] is [3,4], x[1] is [3,5]: only the joined dimension may differ",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {3, 5}}}},
        {concat_2, FATTN_E_SHAPE, "x[1] is [12]", 2, {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 1, {12}}}},
        {concat_2,
         FATTN_E_DTYPE,
         "concat: x[0] is f32, x[1] is f64",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F64, 2, {3, 4}}}},
        {concat_2, FATTN_E_ARG, "concat: x[1] is absent", 1, {{FATTN_F32, 2, {3, 4}}}},
        {concat_dim,
         FATTN_E_ARG,
         "concat: x[0] is [3,4], without a dimension 2",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {3, 4}}}},
        {concat_none, FATTN_E_ARG, "concat: no inputs", X},
        {concat_less, FATTN_E_ARG, "concat: -1 inputs (must be 0..64)", X},
        {concat_null, FATTN_E_ARG, "concat: in is NULL", X},
        {concat_65, FATTN_E_ARG, "concat: 65 inputs", X},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

/* Sums of extents that do not fit, over inputs without elements. */
Test(shape, concat_of_huge_empty_inputs) {
    fattn_tensor x = fattn_tensor_view(NULL, FATTN_F32, FATTN_CPU, 0, 2, (const int64_t[]){0, INT64_C(1) << 61});
    const fattn_var in = fattn_input(tape, &x);
    fattn_op_concat(tape, (const fattn_var[]){in, in, in, in}, 4, 1);
    cr_assert_eq(fattn_tape_status(tape), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "2^63") || strstr(fattn_ctx_error(ctx), "too large"), "%s",
              fattn_ctx_error(ctx));
}
