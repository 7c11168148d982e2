/* embedding, rope, heads, merge, cast. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <math.h>
#include <string.h>

static int64_t V, C, ROWS;

static fattn_var embedding(fattn_tape *t, const fattn_var *in) { return fattn_op_embedding(t, in[0], in[1]); }

static void embedding_reference(const double *const *in, const int32_t *const *ids, double *y) {
    for (int64_t e = 0; e < ROWS * C; ++e) y[e] = in[0][ids[1][e / C] * C + e % C];
}

static void embedding_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)in;
    for (int64_t e = 0; e < V * C; ++e) d[0][e] = 0;
    for (int64_t e = 0; e < ROWS * C; ++e) d[0][ids[1][e / C] * C + e % C] += dy[e];
}

static op_case embed(int64_t v, int64_t columns, int ndim, int64_t b, int64_t s) {
    V = v, C = columns, ROWS = ndim == 0 ? 1 : ndim == 1 ? s : b * s;
    op_case c = {.name = "embedding",
                 .graph = embedding,
                 .reference = embedding_reference,
                 .gradient = embedding_gradient,
                 .n = 2,
                 .in = {{2, {V, C}}, {.ndim = ndim, .classes = (int32_t)V, .ignore = (int32_t)V - 1}},
                 .roundings = 4 + (double)ROWS};
    if (ndim == 1) c.in[1].shape[0] = s;
    if (ndim == 2) c.in[1].shape[0] = b, c.in[1].shape[1] = s;
    return c;
}

Test(embedding, gradients) {
    for (int ndim = 0; ndim <= 2; ++ndim) {
        const op_case c = embed(5, 3, ndim, 3, 4);
        opcheck(&c);
    }
    const op_case one = embed(1, 1, 1, 1, 6);
    opcheck(&one);
}

Test(embedding, large) {
    const op_case c = embed(99, 301, 2, 5, 211);
    opcheck_values(&c);
    opcheck_f32(&c);
    opcheck_threads(&c);
    const op_case repeated = embed(2, 7, 1, 1, 3001);
    opcheck_values(&repeated);
    opcheck_threads(&repeated);
}

Test(embedding, nothing) {
    const op_case c = embed(5, 3, 2, 0, 4);
    opcheck_values(&c);
    opcheck_f32(&c);
    const op_case narrow = embed(5, 0, 1, 1, 4);
    opcheck_values(&narrow);
}

/* ids as every second number of a buffer. */
Test(embedding, strided_ids) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    float table[3] = {10, 11, 12};
    int32_t ids[8] = {2, 99, 0, 99, 1, 99, 2, 99};
    const fattn_tensor tt = fattn_tensor_view(table, FATTN_F32, FATTN_CPU, 0, 2, (const int64_t[]){3, 1});
    fattn_tensor it = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 2, (const int64_t[]){2, 2});
    it.stride[0] = 4, it.stride[1] = 2;
    fattn_tensor y;
    cr_assert_eq(fattn_tape_value(t, fattn_op_embedding(t, fattn_input(t, &tt), fattn_input(t, &it)), &y), FATTN_OK);
    const float want[] = {12, 10, 11, 12};
    cr_assert(memcmp(y.data, want, sizeof want) == 0);
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(embedding, errors) {
    const op_error list[] = {
        {embedding,
         FATTN_E_ARG,
         "ids[0] is 97, the table has rows 0..95",
         2,
         {{FATTN_F32, 2, {96, 4}}, {FATTN_I32, 2, {2, 3}, 97}}},
        {embedding, FATTN_E_ARG, "ids[0] is -1", 2, {{FATTN_F32, 2, {96, 4}}, {FATTN_I32, 2, {2, 3}, -1}}},
        {embedding,
         FATTN_E_ARG,
         "ids[0] is 0, the table has rows 0..-1",
         2,
         {{FATTN_F32, 2, {0, 4}}, {FATTN_I32, 1, {3}}}},
        {embedding, FATTN_E_DTYPE, "ids is f32, not i32", 2, {{FATTN_F32, 2, {96, 4}}, {FATTN_F32, 1, {3}}}},
        {embedding, FATTN_E_SHAPE, "table is [96]", 2, {{FATTN_F32, 1, {96}}, {FATTN_I32, 1, {3}}}},
        {embedding,
         FATTN_E_SHAPE,
         "at most 4 dimensions",
         2,
         {{FATTN_F32, 2, {96, 4}}, {FATTN_I32, 5, {1, 1, 1, 1, 1}}}},
        {embedding, FATTN_E_ARG, "table is absent", 1, {{0}}},
        {embedding, FATTN_E_ARG, "ids is absent", 1, {{FATTN_F32, 2, {96, 4}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

static int64_t B, H, S, D, position;
static float base;

static fattn_var rope(fattn_tape *t, const fattn_var *in) { return fattn_op_rope(t, in[0], base, position); }

static void rope_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t row = 0; row < B * H * S; ++row)
        for (int64_t i = 0; i < D / 2; ++i) {
            const double angle = (double)(position + row % S) / pow((double)base, 2.0 * (double)i / (double)D);
            const double a = in[0][row * D + i], b = in[0][row * D + i + D / 2];
            y[row * D + i] = a * cos(angle) - b * sin(angle);
            y[row * D + i + D / 2] = a * sin(angle) + b * cos(angle);
        }
}

static op_case rope_case(int64_t b, int64_t h, int64_t s, int64_t d, int64_t at) {
    B = b, H = h, S = s, D = d, position = at, base = 1e4f;
    return (op_case){
        .name = "rope", .graph = rope, .reference = rope_reference, .n = 1, .in = {{4, {B, H, S, D}}}, .roundings = 16};
}

/* Positions out of order, some twice. */
static fattn_var rope_at(fattn_tape *t, const fattn_var *in) { return fattn_op_rope_at(t, in[0], base, in[1]); }

static void rope_at_reference(const double *const *in, const int32_t *const *ids, double *y) {
    for (int64_t row = 0; row < B * H * S; ++row)
        for (int64_t i = 0; i < D / 2; ++i) {
            const double angle = (double)ids[1][row % S] / pow((double)base, 2.0 * (double)i / (double)D);
            const double a = in[0][row * D + i], b = in[0][row * D + i + D / 2];
            y[row * D + i] = a * cos(angle) - b * sin(angle);
            y[row * D + i + D / 2] = a * sin(angle) + b * cos(angle);
        }
}

Test(rope, at_positions) {
    const int64_t sizes[][4] = {{2, 3, 5, 4}, {1, 2, 17, 6}};
    for (int i = 0; i < 2; ++i) {
        op_case c = rope_case(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], 0);
        c.name = "rope_at", c.graph = rope_at, c.reference = rope_at_reference, c.n = 2;
        c.in[1] = (op_input){1, {S}, .classes = 1000, .ignore = 7};
        c.roundings *= 1000; /* rounding of the angle, in double */
        opcheck(&c);
    }
    const op_error list[] = {
        {rope_at,
         FATTN_E_SHAPE,
         "positions are i32 [4], not i32 [5]",
         2,
         {{FATTN_F32, 4, {2, 3, 5, 4}}, {FATTN_I32, 1, {4}}}},
        {rope_at, FATTN_E_DTYPE, "positions are f32", 2, {{FATTN_F32, 4, {2, 3, 5, 4}}, {FATTN_F32, 1, {5}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

Test(rope, gradients) {
    const int64_t sizes[][5] = {{2, 3, 5, 4, 0}, {1, 1, 1, 2, 7}, {2, 1, 9, 6, 3}};
    for (int i = 0; i < 3; ++i) {
        const op_case c = rope_case(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], sizes[i][4]);
        opcheck(&c);
    }
}

Test(rope, large_and_nothing) {
    op_case c = rope_case(3, 4, 131, 66, 1000);
    opcheck_f32(&c);
    opcheck_threads(&c);
    c.roundings *= 1131; /* rounding of the angle, in double */
    opcheck_values(&c);
    const int64_t empty[][4] = {{0, 3, 5, 4}, {2, 0, 5, 4}, {2, 3, 0, 4}, {2, 3, 5, 0}};
    for (int i = 0; i < 4; ++i) {
        const op_case none = rope_case(empty[i][0], empty[i][1], empty[i][2], empty[i][3], 0);
        opcheck_values(&none);
    }
}

/* The product of two rotated rows depends on their distance alone, also far from the start. */
Test(rope, products_depend_on_distance) {
    double far[2];
    for (int k = 0; k < 2; ++k) {
        const op_case c = rope_case(1, 1, 3, 8, k ? 1000000 : 5);
        op_result r = op_run(&c, OP_PLAIN, FATTN_F64, 1);
        const double *y = r.y.data;
        far[k] = 0;
        for (int i = 0; i < 8; ++i) far[k] += y[i] * y[2 * 8 + i];
        op_release(&r);
    }
    cr_assert_float_eq(far[0], far[1], 1e-9);
}

static fattn_var odd_base(fattn_tape *t, const fattn_var *in) { return fattn_op_rope(t, in[0], -3.0f, 0); }

Test(rope, errors) {
    const op_error list[] = {
        {rope, FATTN_E_SHAPE, "x is [1,2,3,5], not [B,H,S,D] with D even", 1, {{FATTN_F32, 4, {1, 2, 3, 5}}}},
        {rope, FATTN_E_SHAPE, "x is [2,3,4]", 1, {{FATTN_F32, 3, {2, 3, 4}}}},
        {odd_base, FATTN_E_ARG, "base is -3", 1, {{FATTN_F32, 4, {1, 2, 3, 4}}}},
        {rope, FATTN_E_ARG, "x is absent", 1, {{0}}},
    };
    base = 1e4f, position = 0;
    opcheck_errors(list, sizeof list / sizeof *list);
}

static int first, heads_taken;

static fattn_var heads(fattn_tape *t, const fattn_var *in) {
    return fattn_op_heads(t, in[0], first, heads_taken, (int)D);
}

static void heads_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t h = 0; h < heads_taken; ++h)
            for (int64_t s = 0; s < S; ++s)
                for (int64_t d = 0; d < D; ++d) *y++ = in[0][(b * S + s) * H * D + (first + h) * D + d];
}

Test(heads, gradients) {
    B = 2, H = 5, S = 3, D = 4;
    const int takes[][2] = {{0, 5}, {0, 2}, {2, 2}, {4, 1}};
    for (int i = 0; i < 4; ++i) {
        first = takes[i][0], heads_taken = takes[i][1];
        opcheck(&(op_case){.name = "heads",
                           .graph = heads,
                           .reference = heads_reference,
                           .n = 1,
                           .in = {{3, {B, S, H * D}}},
                           .any_strides = true,
                           .roundings = 4});
    }
    B = 0, first = 0, heads_taken = 5;
    opcheck_values(&(op_case){.name = "heads",
                              .graph = heads,
                              .reference = heads_reference,
                              .n = 1,
                              .in = {{3, {B, S, H * D}}},
                              .roundings = 4});
}

Test(heads, errors) {
    const op_error list[] = {
        {heads, FATTN_E_ARG, "2 heads of 4 from head 3 on do not lie in [2,3,16]", 1, {{FATTN_F32, 3, {2, 3, 16}}}},
        {heads, FATTN_E_SHAPE, "x is [2,16], not [B,S,C]", 1, {{FATTN_F32, 2, {2, 16}}}},
        {heads, FATTN_E_ARG, "x is absent", 1, {{0}}},
    };
    D = 4, first = 3, heads_taken = 2;
    opcheck_errors(list, 3);
    first = -1;
    opcheck_errors(&(op_error){heads, FATTN_E_ARG, "from head -1 on", 1, {{FATTN_F32, 3, {2, 3, 16}}}}, 1);
    first = 0, heads_taken = 0;
    opcheck_errors(&(op_error){heads, FATTN_E_ARG, "0 heads of 4", 1, {{FATTN_F32, 3, {2, 3, 16}}}}, 1);
}

static fattn_var merge(fattn_tape *t, const fattn_var *in) { return fattn_op_merge(t, in[0]); }

static void merge_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t b = 0; b < B; ++b)
        for (int64_t s = 0; s < S; ++s)
            for (int64_t h = 0; h < H; ++h)
                for (int64_t d = 0; d < D; ++d) *y++ = in[0][((b * H + h) * S + s) * D + d];
}

Test(merge, gradients) {
    const int64_t sizes[][4] = {{2, 3, 5, 4}, {1, 1, 5, 4}, {2, 3, 1, 4}, {2, 3, 5, 1}, {1, 1, 1, 1}, {2, 1, 1, 3}};
    for (int i = 0; i < 6; ++i) {
        B = sizes[i][0], H = sizes[i][1], S = sizes[i][2], D = sizes[i][3];
        opcheck(&(op_case){.name = "merge",
                           .graph = merge,
                           .reference = merge_reference,
                           .n = 1,
                           .in = {{4, {B, H, S, D}}},
                           .any_strides = true,
                           .roundings = 4});
    }
    B = 2, H = 3, S = 0, D = 4;
    opcheck_values(&(op_case){.name = "merge",
                              .graph = merge,
                              .reference = merge_reference,
                              .n = 1,
                              .in = {{4, {B, H, S, D}}},
                              .roundings = 4});
}

/* merge after heads is a view: no copy. */
Test(merge, undoes_heads_in_place) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    float x[2 * 3 * 8];
    const fattn_tensor xt = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 3, (const int64_t[]){2, 3, 8});
    const fattn_var v = fattn_input(t, &xt);
    fattn_tensor y;
    cr_assert_eq(fattn_tape_value(t, fattn_op_merge(t, fattn_op_heads(t, v, 1, 2, 2)), &y), FATTN_OK);
    cr_assert_eq(y.data, x + 2);
    cr_assert_eq(y.stride[0], 24);
    cr_assert_eq(y.stride[1], 8);
    cr_assert_eq(y.stride[2], 1);
    cr_assert_eq(y.shape[2], 4);
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(merge, errors) {
    const op_error list[] = {
        {merge, FATTN_E_SHAPE, "x is [2,3,4], not [B,H,S,D]", 1, {{FATTN_F32, 3, {2, 3, 4}}}},
        {merge, FATTN_E_ARG, "x is absent", 1, {{0}}},
    };
    opcheck_errors(list, 2);
}

static fattn_dtype via;

/* To the type and back, as the gradient. */
static fattn_var cast(fattn_tape *t, const fattn_var *in) {
    return fattn_op_cast(t, fattn_op_cast(t, in[0], via), FATTN_F64);
}

static void cast_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int e = 0; e < 24; ++e) y[e] = in[0][e];
}

static void cast_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)in, (void)ids;
    for (int e = 0; e < 24; ++e) d[0][e] = dy[e];
}

/* Errors of one rounding to each type, forward and backward. */
Test(cast, values_and_gradients) {
    const struct {
        fattn_dtype t;
        double roundings;
    } types[] = {{FATTN_F64, 0}, {FATTN_F32, 0x1p29}, {FATTN_F16, 0x1p42}, {FATTN_BF16, 0x1p45}};
    for (int i = 0; i < 4; ++i) {
        via = types[i].t;
        const op_case c = {.name = "cast",
                           .graph = cast,
                           .reference = cast_reference,
                           .gradient = cast_gradient,
                           .n = 1,
                           .in = {{3, {2, 3, 4}}},
                           .any_strides = true,
                           .roundings = types[i].roundings};
        opcheck_values(&c);
    }
}

static fattn_var to_nothing(fattn_tape *t, const fattn_var *in) { return fattn_op_cast(t, in[0], (fattn_dtype)77); }
static fattn_var to_integer(fattn_tape *t, const fattn_var *in) { return fattn_op_cast(t, in[0], FATTN_I32); }

Test(cast, to_its_own_type_is_a_view) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    uint16_t x[6] = {0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0};
    fattn_tensor xt = fattn_tensor_view(x, FATTN_BF16, FATTN_CPU, 0, 1, (const int64_t[]){6}), y;
    cr_assert_eq(fattn_tape_value(t, fattn_op_cast(t, fattn_input(t, &xt), FATTN_BF16), &y), FATTN_OK);
    cr_assert_eq(y.data, x);
    cr_assert_eq(fattn_tape_value(t, fattn_op_cast(t, fattn_input(t, &xt), FATTN_F32), &y), FATTN_OK);
    for (int i = 0; i < 6; ++i) cr_assert_eq(((const float *)y.data)[i], (float)(i + 1));
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(cast, errors) {
    const op_error list[] = {
        {to_nothing, FATTN_E_DTYPE, "f32 to ?", 1, {{FATTN_F32, 1, {4}}}},
        {to_integer, FATTN_E_DTYPE, "f32 to i32", 1, {{FATTN_F32, 1, {4}}}},
        {cast, FATTN_E_DTYPE, "i32 to f64", 1, {{FATTN_I32, 1, {4}}}},
        {cast, FATTN_E_ARG, "x is absent", 1, {{0}}},
    };
    via = FATTN_F64;
    opcheck_errors(list, sizeof list / sizeof *list);
}
