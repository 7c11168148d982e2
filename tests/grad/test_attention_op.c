/* The fused attention as a tape op: every feature through the gradient check, gradients in place, saved memory,
   errors. */
#include "suite.h"
#include "tape_ops.h"

#include "core/tensor/numeric.h"

#include <math.h>
#include <string.h>

static void set_up(void) { open_context(1); }
TestSuite(attention_op, .init = set_up, .fini = close_context);

enum { Q, K, V, BIAS, SINK, SEQLENS_Q, SEQLENS_K, CU_Q, CU_K, INPUTS };
enum output { BOTH, ONLY_O, ONLY_L };

typedef struct setting {
    const char *name;
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv;
    fattn_attention_params p; /* struct_size is filled in */
    enum output output;
    bool bias, sink, alibi, padded, packed;
    int64_t bias_shape[4]; /* 1 = broadcast */
    bool tied;             /* k is v, as one variable; Dv = D */
} setting;

static const setting plain_settings[] = {
    {"plain", 2, 2, 2, 5, 5, 4, 4},
    {"causal", 1, 2, 2, 6, 6, 3, 3, {.flags = FATTN_CAUSAL}},
    {"gqa", 1, 4, 2, 4, 7, 4, 2, {.flags = FATTN_CAUSAL}},
    {"rows_without_keys", 1, 1, 1, 7, 3, 4, 4, {.flags = FATTN_CAUSAL}},
    {"top_left", 1, 2, 1, 3, 6, 4, 5, {.flags = FATTN_CAUSAL_TOP_LEFT, .scale = 0.3f}},
    {"only_o", 1, 2, 2, 5, 5, 4, 4, .output = ONLY_O},
    {"only_l", 1, 2, 2, 5, 5, 4, 4, {.flags = FATTN_CAUSAL}, .output = ONLY_L},
    {"window", 1, 2, 1, 9, 9, 4, 4, {.flags = FATTN_WINDOW, .window_left = 2, .window_right = 1}},
    {"padded", 3, 2, 1, 4, 5, 3, 3, {.flags = FATTN_CAUSAL}, .padded = true},
    {"packed", 1, 2, 1, 9, 8, 3, 3, {.max_seqlen_q = 5, .max_seqlen_k = 4}, .packed = true},
    {"tied", 1, 2, 2, 5, 5, 4, 4, .tied = true},
};
static const setting full_settings[] = {
    {"bias", 2, 2, 2, 4, 5, 3, 3, .bias = true, .bias_shape = {2, 2, 4, 5}},
    {"bias_shared", 2, 2, 1, 4, 5, 3, 3, .bias = true, .bias_shape = {1, 2, 1, 5}},
    {"sink", 2, 2, 1, 4, 5, 3, 3, {.flags = FATTN_CAUSAL}, .sink = true},
    {"alibi", 1, 3, 1, 5, 5, 3, 3, {.flags = FATTN_CAUSAL}, .alibi = true},
    {"softcap", 1, 2, 2, 5, 5, 3, 3, {.softcap = 1.5f}},
    {"dropout", 2, 2, 2, 6, 6, 3, 3, {.dropout_p = 0.3f, .rng = {.seed = 9, .stream = 4}}},
    {"together",
     2,
     4,
     2,
     5,
     6,
     3,
     4,
     {.flags = FATTN_CAUSAL, .softcap = 2, .dropout_p = 0.2f, .rng = {.seed = 3}},
     .bias = true,
     .bias_shape = {2, 1, 5, 6},
     .sink = true,
     .alibi = true,
     .padded = true},
};

static double slope_data[] = {0.5, 0.25, 0.125, 1};
static fattn_tensor slopes; /* have no gradient: not an input of the check */

/* o and L together, or one of them. */
static fattn_var graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const setting *s = user;
    fattn_attention_params p = s->p;
    p.struct_size = sizeof p;
    fattn_attention_vars x = {.struct_size = sizeof x, .q = in[Q], .k = in[K], .v = in[V]};
    if (s->tied) x.v = x.k;
    if (s->bias) x.bias = in[BIAS];
    if (s->sink) x.sink = in[SINK];
    if (s->alibi) x.alibi = fattn_input(t, &slopes);
    if (s->padded) x.seqlens_q = in[SEQLENS_Q], x.seqlens_k = in[SEQLENS_K];
    if (s->packed) x.cu_seqlens_q = in[CU_Q], x.cu_seqlens_k = in[CU_K];
    fattn_var lse;
    const fattn_var o = fattn_op_attention_ex(t, &x, &p, s->output == ONLY_O ? NULL : &lse);
    return s->output == ONLY_O ? o : s->output == ONLY_L ? lse : join(t, o, lse);
}

static void run(const setting *base, fattn_algorithm algorithm) {
    setting s = *base;
    s.p.algorithm = (int32_t)algorithm;
    static const int32_t padded_q[] = {4, 0, 2}, padded_k[] = {5, 3, 0};
    static const int32_t cu_q[] = {0, 4, 4, 9}, cu_k[] = {0, 3, 7, 8};
    const int64_t shapes[INPUTS][4] = {{s.B, s.Hq, s.Sq, s.D},
                                       {s.B, s.Hkv, s.Sk, s.D},
                                       {s.B, s.Hkv, s.Sk, s.Dv},
                                       {s.bias_shape[0], s.bias_shape[1], s.bias_shape[2], s.bias_shape[3]},
                                       {s.Hq},
                                       {s.B},
                                       {s.B},
                                       {4},
                                       {4}};
    const int ndims[INPUTS] = {4, 4, 4, 4, 1, 1, 1, 1, 1};
    const int32_t *const lengths[INPUTS] = {
        [SEQLENS_Q] = padded_q, [SEQLENS_K] = padded_k, [CU_Q] = cu_q, [CU_K] = cu_k};
    fattn_tensor in[INPUTS];
    slopes = fattn_tensor_view(slope_data, FATTN_F64, FATTN_CPU, 0, 1, &s.Hq);
    for (uint32_t i = 0; i < INPUTS; ++i) {
        const fattn_dtype type = lengths[i] ? FATTN_I32 : FATTN_F64;
        cr_assert_eq(fattn_tensor_alloc(ctx, type, ndims[i], shapes[i], &in[i]), FATTN_OK);
        const int64_t n = fattn_tensor_numel(&in[i]);
        if (lengths[i])
            memcpy(in[i].data, lengths[i], (size_t)n * sizeof(int32_t));
        else
            cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, 1, (fattn_rng){1, i, 0}), FATTN_OK);
    }
    fattn_report r = {.struct_size = sizeof r};
    const fattn_status status = fattn_gradcheck(ctx, graph, &s, in, INPUTS, NULL, &r);
    cr_assert_eq(status, FATTN_OK, "%s, algorithm %d: %s", s.name, (int)algorithm, fattn_ctx_error(ctx));
    cr_assert_geq(r.checked, s.B * (s.Hq * s.Sq + s.Hkv * s.Sk) * s.D);
    for (int i = 0; i < INPUTS; ++i) fattn_tensor_free(ctx, &in[i]);
}

#define COUNT(list) (sizeof(list) / sizeof *(list))

Test(attention_op, gradients_of_every_algorithm) {
    const fattn_algorithm all[] = {FATTN_ALGO_AUTO, FATTN_ALGO_STANDARD, FATTN_ALGO_FLASH1, FATTN_ALGO_FLASH2};
    for (size_t a = 0; a < COUNT(all); ++a)
        for (size_t n = 0; n < COUNT(plain_settings); ++n) run(&plain_settings[n], all[a]);
}

Test(attention_op, gradients_of_every_feature) {
    for (size_t n = 0; n < COUNT(full_settings); ++n) run(&full_settings[n], FATTN_ALGO_STANDARD);
}

/* ---- one packed projection ---- */

/* x [B,S,3*H*D] -> heads [first, first + H) as [B,H,S,D], a view. */
enum { B = 2, S = 5, H = 2, D = 3, C = 3 * H * D };
static fattn_status part_infer(fattn_op_call *c) {
    const int *first = c->attr;
    fattn_tensor *y = &c->out[0];
    *y = c->in[0];
    y->ndim = 4;
    y->data = (double *)c->in[0].data + *first * D;
    memcpy(y->shape, (int64_t[]){B, H, S, D}, 4 * sizeof(int64_t));
    memcpy(y->stride, (int64_t[]){S * C, D, C, 1}, 4 * sizeof(int64_t));
    return FATTN_OK;
}
static fattn_var part(fattn_tape *t, fattn_var x, int first) {
    static const fattn_op_def def = {
        .struct_size = sizeof def, .attr_size = sizeof(int), .n_out = 1, .name = "part", .infer = part_infer};
    return fattn_op_custom(t, &def, &x, 1, &first);
}

static fattn_var packed_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const fattn_attention_params p = {
        .struct_size = sizeof p, .flags = FATTN_CAUSAL, .algorithm = *(const int32_t *)user};
    const fattn_var x = mul(t, in[0], in[1]);
    const fattn_var q = part(t, x, 0), k = part(t, x, H), v = part(t, x, 2 * H);
    const fattn_var once = fattn_op_attention(t, q, k, v, &p);
    /* k and v again, with the first result as query: gradients add up. */
    return fattn_op_attention(t, once, k, v, NULL);
}

Test(attention_op, packed_projections_are_used_in_place) {
    double data[2][B * S * C];
    fattn_tensor in[2];
    for (uint32_t i = 0; i < 2; ++i) {
        in[i] = fattn_tensor_view(data[i], FATTN_F64, FATTN_CPU, 0, 3, (int64_t[]){B, S, C});
        cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, 1, (fattn_rng){2, i, 0}), FATTN_OK);
    }
    for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_STANDARD; ++algorithm) {
        fattn_report r = {.struct_size = sizeof r};
        cr_assert_eq(fattn_gradcheck(ctx, packed_graph, &algorithm, in, 2, NULL, &r), FATTN_OK, "%s",
                     fattn_ctx_error(ctx));
    }
}

/* q, k, v all one variable: the gradients would overlap. */
static fattn_var self_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in, (void)user;
    return fattn_op_attention(t, in[0], in[0], in[0], NULL);
}

Test(attention_op, one_variable_three_times) {
    double data[2 * 2 * 5 * 3];
    fattn_tensor x = fattn_tensor_view(data, FATTN_F64, FATTN_CPU, 0, 4, (int64_t[]){2, 2, 5, 3});
    cr_assert_eq(fattn_tensor_normal(ctx, &x, 0, 1, (fattn_rng){3, 0, 0}), FATTN_OK);
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_gradcheck(ctx, self_graph, NULL, &x, 1, NULL, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

/* ---- memory kept for backward ---- */

static fattn_param params[3];

static void begin(fattn_dtype type, const int64_t (*shapes)[4]) {
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    for (uint32_t i = 0; i < 3; ++i) {
        params[i] = (fattn_param){.name = "qkv"};
        fattn_tensor *const both[] = {&params[i].value, &params[i].grad};
        for (int n = 0; n < 2; ++n) {
            cr_assert_eq(fattn_tensor_alloc(ctx, type, 4, shapes[i], both[n]), FATTN_OK);
            cr_assert_eq(fattn_tensor_normal(ctx, both[n], 0, n ? 0 : 1, (fattn_rng){4, i, 0}), FATTN_OK);
        }
    }
}
static void end(void) {
    fattn_tape_destroy(tape);
    for (int i = 0; i < 3; ++i) {
        fattn_tensor_free(ctx, &params[i].value);
        fattn_tensor_free(ctx, &params[i].grad);
    }
}
static fattn_attention_vars use_all(void) {
    return (fattn_attention_vars){.struct_size = sizeof(fattn_attention_vars),
                                  .q = fattn_use(tape, &params[0]),
                                  .k = fattn_use(tape, &params[1]),
                                  .v = fattn_use(tape, &params[2])};
}

Test(attention_op, keeps_o_and_l_only) {
    enum { N = 512, WIDTH = 64 };
    const int64_t shape[3][4] = {{1, 2, N, WIDTH}, {1, 2, N, WIDTH}, {1, 2, N, WIDTH}};
    size_t bytes[2];
    for (int n = 0; n < 2; ++n) {
        begin(FATTN_F32, shape);
        const size_t before = fattn_ctx_mem(ctx).live;
        const fattn_attention_vars x = use_all();
        const fattn_attention_params p = {.struct_size = sizeof p,
                                          .algorithm = n ? FATTN_ALGO_STANDARD : FATTN_ALGO_AUTO};
        const fattn_attention_io io = {.struct_size = sizeof io,
                                       .q = &params[0].value,
                                       .k = &params[1].value,
                                       .v = &params[2].value,
                                       .o = &params[0].value,
                                       .lse = &(fattn_tensor){.data = ctx,
                                                              .ndim = 3,
                                                              .shape = {1, 2, N},
                                                              .stride = {2 * N, N, 1},
                                                              .dtype = FATTN_F32,
                                                              .device = FATTN_CPU}};
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &p, &io, &plan), FATTN_OK);
        fattn_var lse;
        fattn_tensor o, l;
        const fattn_var out = fattn_op_attention_ex(tape, &x, &p, &lse);
        cr_assert_eq(fattn_tape_value(tape, out, &o), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(fattn_tape_value(tape, lse, &l), FATTN_OK);
        cr_assert(o.stride[0] == N * 2 * WIDTH && o.stride[1] == WIDTH && o.stride[2] == 2 * WIDTH && o.stride[3] == 1);
        cr_assert(l.ndim == 3 && l.stride[1] == N && l.dtype == FATTN_F32);
        bytes[n] = fattn_ctx_mem(ctx).live - before;
        const size_t o_and_l = sizeof(float) * 2 * N * (WIDTH + 1);
        const size_t records = 104 << 10; /* nodes, variables, the ends of chunks */
        cr_assert_geq(bytes[n], o_and_l + plan.saved_bytes + plan.fwd_workspace);
        cr_assert_leq(bytes[n], o_and_l + plan.saved_bytes + plan.fwd_workspace + records);
        end();
    }
    cr_assert_geq(bytes[1], bytes[0] + sizeof(float) * 2 * N * N / 2);
}

/* ---- rng_step ---- */

enum { DROPPED = 2 * 2 * 16 * 4 };

/* o and the gradients of q, k, v with dropout; step NULL: none. */
static void drop(uint32_t stream, int32_t *step, double (*out)[DROPPED]) {
    const int64_t shapes[3][4] = {{2, 2, 16, 4}, {2, 2, 16, 4}, {2, 2, 16, 4}};
    const fattn_attention_params p = {
        .struct_size = sizeof p, .dropout_p = 0.5f, .rng = {.seed = 11, .stream = stream}};
    begin(FATTN_F64, shapes);
    fattn_attention_vars x = use_all();
    const fattn_tensor number = fattn_tensor_view(step, FATTN_I32, FATTN_CPU, 0, 0, NULL);
    if (step) x.rng_step = fattn_input(tape, &number);
    const fattn_var o = fattn_op_attention_ex(tape, &x, &p, NULL);
    fattn_tensor value;
    cr_assert_eq(fattn_tape_value(tape, o, &value), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int64_t n = 0; n < DROPPED; ++n) out[3][n] = fattni_load(value.data, FATTN_F64, n);
    cr_assert_eq(fattn_tape_backward(tape, sum(tape, mul(tape, o, o))), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < 3; ++i) memcpy(out[i], params[i].grad.data, sizeof out[i]);
    end();
}

/* The step counts in the stream's word (core/tensor/philox.h), in both passes. */
Test(attention_op, a_step_selects_the_dropout_mask) {
    static double with[4][DROPPED], without[4][DROPPED];
    for (int32_t step = 0; step < 3; ++step) {
        drop(4, &step, with);
        drop(4 + 0x9E3779B1u * (uint32_t)step, NULL, without);
        cr_assert_eq(memcmp(with, without, sizeof with), 0, "step %d", step);
        drop(4, NULL, without);
        for (int i = 0; i < 4; ++i)
            cr_assert_eq(memcmp(with[i], without[i], sizeof with[i]) == 0, step == 0, "step %d, %d", step, i);
    }
}

Test(attention_op, reserved_fields_are_zero) {
    const int64_t shapes[3][4] = {{1, 1, 4, 4}, {1, 1, 4, 4}, {1, 1, 4, 4}};
    for (int n = 0; n < 2; ++n) {
        begin(FATTN_F32, shapes);
        fattn_attention_vars x = use_all();
        *(n ? &x.reserved2 : &x.reserved) = 5;
        cr_assert_eq(fattn_op_attention_ex(tape, &x, NULL, NULL).id, 0);
        cr_assert_eq(fattn_tape_status(tape), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), n ? "reserved2 5" : "reserved is 5"), "%s", fattn_ctx_error(ctx));
        end();
    }
}

Test(attention_op, a_step_is_one_integer) {
    const int64_t shapes[3][4] = {{1, 1, 4, 4}, {1, 1, 4, 4}, {1, 1, 4, 4}};
    const fattn_attention_params p = {.struct_size = sizeof p, .dropout_p = 0.5f};
    float number = 1;
    int32_t two[2] = {1, 2};
    const fattn_tensor wrong[] = {fattn_tensor_view(&number, FATTN_F32, FATTN_CPU, 0, 0, NULL),
                                  fattn_tensor_view(two, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2})};
    begin(FATTN_F64, shapes);
    for (int n = 0; n < 2; ++n) {
        fattn_attention_vars x = use_all();
        x.rng_step = fattn_input(tape, &wrong[n]);
        cr_assert_eq(fattn_op_attention_ex(tape, &x, &p, NULL).id, 0);
        cr_assert_eq(fattn_tape_status(tape), n ? FATTN_E_SHAPE : FATTN_E_DTYPE, "%s", fattn_ctx_error(ctx));
        cr_assert(strstr(fattn_ctx_error(ctx), "rng_step"), "%s", fattn_ctx_error(ctx));
        fattn_tape_reset(tape);
    }
    end();
}

/* ---- FATTN_EXACT_DELTA ---- */

enum { ROWS = 200, HEADS = 2, WIDE = 64, NUMBERS = HEADS * ROWS * WIDE };

/* Numbers of BF16 in any type, V with a mean of 10; the loss is o times fixed numbers, added up. Writes the gradients
   of q, k, v, returns what is kept between the passes. */
static size_t gradients_of(fattn_dtype type, fattn_dtype attention_type, uint32_t flags, double (*grads)[NUMBERS]) {
    const int64_t shape[3][4] = {{1, HEADS, ROWS, WIDE}, {1, HEADS, ROWS, WIDE}, {1, HEADS, ROWS, WIDE}};
    static double weight_data[NUMBERS];
    fattn_tensor weights = fattn_tensor_view(weight_data, FATTN_F64, FATTN_CPU, 0, 4, shape[0]);
    begin(type, shape);
    cr_assert_eq(fattn_tensor_normal(ctx, &weights, 0, 1, (fattn_rng){5, 0, 0}), FATTN_OK);
    for (int i = 0; i < 4; ++i)
        for (int64_t n = 0; n < NUMBERS; ++n) {
            const fattn_tensor *const t = i < 3 ? &params[i].value : &weights;
            const float x = (float)fattni_load(t->data, t->dtype, n); /* of every type the same */
            uint16_t cell;
            fattni_store(&cell, FATTN_BF16, 0, (double)x + (i == 2 ? 10 : 0));
            fattni_store(t->data, t->dtype, n, fattni_load(&cell, FATTN_BF16, 0));
        }
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL | flags};
    fattn_attention_vars x = use_all();
    x.q = fattn_op_cast(tape, x.q, attention_type), x.k = fattn_op_cast(tape, x.k, attention_type);
    x.v = fattn_op_cast(tape, x.v, attention_type);
    const size_t before = fattn_ctx_mem(ctx).live;
    const fattn_var o = fattn_op_attention_ex(tape, &x, &p, NULL);
    const size_t kept = fattn_ctx_mem(ctx).live - before;
    const fattn_var loss = sum(tape, mul(tape, fattn_op_cast(tape, o, FATTN_F64), fattn_input(tape, &weights)));
    cr_assert_eq(fattn_tape_backward(tape, loss), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < 3; ++i)
        for (int64_t n = 0; n < NUMBERS; ++n) grads[i][n] = fattni_load(params[i].grad.data, type, n);
    end();
    return kept;
}

static double distance(const double *x, const double *want) {
    double error = 0, size = 0;
    for (int64_t n = 0; n < NUMBERS; ++n) error += (x[n] - want[n]) * (x[n] - want[n]), size += want[n] * want[n];
    return sqrt(error / size);
}

/* With the flag what is left is the last rounding of each gradient, at most 2^-8 of it; without, delta is off by 1.8 %
   of dP - delta (tests/attention/test_exact_delta.c). */
Test(attention_op, exact_delta) {
    static double want[3][NUMBERS], with[3][NUMBERS], without[3][NUMBERS];
    gradients_of(FATTN_F64, FATTN_F64, FATTN_EXACT_DELTA, want);
    const size_t kept = gradients_of(FATTN_F32, FATTN_BF16, FATTN_EXACT_DELTA, with);
    const size_t kept_without = gradients_of(FATTN_F32, FATTN_BF16, 0, without);
    cr_assert_geq(kept, kept_without + NUMBERS);
    for (int i = 0; i < 3; ++i) {
        const double error = distance(with[i], want[i]), rounded = distance(without[i], want[i]);
        cr_assert_leq(error, 0x1p-8, "input %d: %g", i, error);
        cr_assert(i == 2 || rounded > 0x1p-8, "input %d: %g without the flag", i, rounded);
    }
}

/* ---- FATTN_FP8 ---- */

static fattn_tensor like(const fattn_tensor *t, fattn_dtype type, int ndim) {
    fattn_tensor y;
    cr_assert_eq(fattn_tensor_alloc(ctx, type, ndim, t->shape, &y), FATTN_OK);
    return y;
}

static void same_numbers(const fattn_tensor *x, const fattn_tensor *y) {
    static double values[2][NUMBERS];
    const int64_t count = fattn_tensor_numel(x);
    const fattn_tensor *const both[2] = {x, y};
    for (int n = 0; n < 2; ++n) {
        const fattn_tensor to = fattn_tensor_view(values[n], FATTN_F64, FATTN_CPU, 0, x->ndim, x->shape);
        cr_assert_eq(fattn_tensor_copy(ctx, &to, both[n]), FATTN_OK);
    }
    cr_assert_eq(memcmp(values[0], values[1], (size_t)count * sizeof(double)), 0);
}

/* O and L are those of a call with the flag, gradients those of one without it on this O and L, renewed ones those of
   both passes without it, in every dtype. */
Test(attention_op, fp8) {
    static const fattn_dtype types[3] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    const int64_t shape[3][4] = {{1, HEADS, ROWS, WIDE}, {1, HEADS, ROWS, WIDE}, {1, HEADS, ROWS, WIDE}};
    for (int n = 0; n < 12; ++n) {
        const fattn_dtype type = types[n % 3];
        const bool renews = n / 3 % 2;
        begin(type, shape);
        fattn_tensor weights = like(&params[0].value, type, 4), want_o = like(&weights, type, 4);
        fattn_tensor want_l = like(&weights, FATTN_F32, 3), o, l, d[3], room;
        cr_assert_eq(fattn_tensor_normal(ctx, &weights, 0, 1, (fattn_rng){5, 0, 0}), FATTN_OK);
        for (int i = 0; i < 3; ++i) d[i] = like(&weights, type, 4);
        fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL | FATTN_FP8 | FATTN_FP8_HADAMARD};
        if (renews) p.flags |= FATTN_FP8_RENEW;
        if (n >= 6) p.flags |= FATTN_FP8_INT8;
        const fattn_attention_vars x = use_all();
        fattn_var lse;
        const fattn_var out = fattn_op_attention_ex(tape, &x, &p, &lse);
        cr_assert_eq(fattn_tape_value(tape, out, &o), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(fattn_tape_value(tape, lse, &l), FATTN_OK);
        const fattn_var loss = fattn_op_sum(tape, fattn_op_mul(tape, out, fattn_input(tape, &weights)), NULL, 0, 0);
        cr_assert_eq(fattn_tape_backward(tape, loss), FATTN_OK, "%s", fattn_ctx_error(ctx));

        fattn_attention_io io = {.struct_size = sizeof io,
                                 .q = &params[0].value,
                                 .k = &params[1].value,
                                 .v = &params[2].value,
                                 .o = &want_o,
                                 .lse = &want_l,
                                 .d_o = &weights,
                                 .dq = &d[0],
                                 .dk = &d[1],
                                 .dv = &d[2]};
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, &p, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        const int64_t bytes = (int64_t)(plan.fwd_workspace + plan.bwd_workspace);
        cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_U8, 1, &bytes, &room), FATTN_OK);
        io.workspace = room.data, io.workspace_bytes = (size_t)bytes;
        cr_assert_eq(fattn_attention_fwd(ctx, &p, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
        same_numbers(&o, &want_o), same_numbers(&l, &want_l);
        p.flags = FATTN_CAUSAL;
        if (renews) cr_assert_eq(fattn_attention_fwd(ctx, &p, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(fattn_attention_bwd(ctx, &p, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
        for (int i = 0; i < 3; ++i) same_numbers(&params[i].grad, &d[i]), fattn_tensor_free(ctx, &d[i]);
        fattn_tensor_free(ctx, &weights), fattn_tensor_free(ctx, &want_o), fattn_tensor_free(ctx, &want_l);
        fattn_tensor_free(ctx, &room);
        end();
    }
}

Test(attention_op, rows_past_the_end_are_zero) {
    const int64_t shapes[3][4] = {{2, 2, 6, 3}, {2, 1, 7, 3}, {2, 1, 7, 3}};
    int32_t rows[2] = {4, 0}, keys[2] = {3, 7};
    const fattn_tensor lengths_q = fattn_tensor_view(rows, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2});
    const fattn_tensor lengths_k = fattn_tensor_view(keys, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2});
    begin(FATTN_F64, shapes);
    fattn_attention_vars x = use_all();
    /* Products with one: the gradients of q, k, v are then fresh memory of the tape, NaN at first. */
    for (int i = 0; i < 3; ++i)
        for (int64_t e = 0; e < fattn_tensor_numel(&params[i].value); ++e) *element(&params[i].value, e) = 1;
    x.q = mul(tape, x.q, x.q), x.k = mul(tape, x.k, x.k), x.v = mul(tape, x.v, x.v);
    x.seqlens_q = fattn_input(tape, &lengths_q);
    x.seqlens_k = fattn_input(tape, &lengths_k);
    fattn_var lse;
    const fattn_var o = fattn_op_attention_ex(tape, &x, NULL, &lse);
    const fattn_var loss = add(tape, sum(tape, o), sum(tape, lse));
    cr_assert_eq(fattn_tape_backward(tape, loss), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_tensor out, l;
    cr_assert_eq(fattn_tape_value(tape, o, &out), FATTN_OK);
    cr_assert_eq(fattn_tape_value(tape, lse, &l), FATTN_OK);
    for (int64_t e = 0; e < 2 * 2 * 6 * 3; ++e) {
        const bool used = e / 36 == 0 && e / 3 % 6 < 4;
        cr_assert_eq(*element(&out, e), used ? 1 : 0);
        if (used) continue;
        cr_assert_eq(*element(&l, e / 3), 0);
        cr_assert_eq(*element(&params[0].grad, e), 0);
    }
    for (int64_t e = 0; e < 2 * 7 * 3; ++e) {
        const bool used = e / 21 == 0 && e / 3 % 7 < 3;
        if (used)
            cr_assert_neq(*element(&params[2].grad, e), 0);
        else
            cr_assert(*element(&params[1].grad, e) == 0 && *element(&params[2].grad, e) == 0);
    }
    end();
}

/* ---- a bias in 16 bits ---- */

typedef struct bias_case {
    fattn_dtype bias, grad; /* of the parameter */
    bool scaled, twice;     /* an intermediate variable; added to by a second call */
    bool lengths, sliced;   /* the bias are the elements after the first one of the parameter */
    int64_t shape[4];
} bias_case;

/* o's gradient with respect to the bias, as F32 numbers; the values are exact in BF16. */
static void bias_gradient(const bias_case *c, fattn_dtype type, float *out) {
    enum { LENGTH = 5, MOST = 2 * 2 * LENGTH * LENGTH + 1 };
    const int64_t shapes[3][4] = {{2, 2, LENGTH, 8}, {2, 2, LENGTH, 8}, {2, 2, LENGTH, 8}};
    int32_t rows[2] = {3, 5}, keys[2] = {5, 2};
    const fattn_tensor q = fattn_tensor_view(rows, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2});
    const fattn_tensor k = fattn_tensor_view(keys, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2});
    float numbers[MOST], zeros[MOST] = {0};
    fattn_param bias = {.name = "bias"};
    begin(type, shapes);
    const int64_t n = c->shape[0] * c->shape[1] * c->shape[2] * c->shape[3], first = c->sliced, all = first + n;
    cr_assert_eq(fattn_tensor_alloc(ctx, c->bias, 1, &all, &bias.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, c->grad, 1, &all, &bias.grad), FATTN_OK);
    for (int64_t e = 0; e < n; ++e) numbers[first + e] = (float)(e * 7 % 11 - 5) / 8;
    numbers[0] = first ? 0 : numbers[0];
    const fattn_tensor from = fattn_tensor_view(numbers, FATTN_F32, FATTN_CPU, 0, 1, &all);
    const fattn_tensor none = fattn_tensor_view(zeros, FATTN_F32, FATTN_CPU, 0, 1, &all);
    const fattn_tensor to = fattn_tensor_view(out, FATTN_F32, FATTN_CPU, 0, 1, &n);
    cr_assert_eq(fattn_tensor_copy(ctx, &bias.value, &from), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(ctx, &bias.grad, &none), FATTN_OK);
    for (int i = 0; i < 3; ++i) /* exact in BF16 */
        for (int64_t e = 0; e < fattn_tensor_numel(&params[i].value); ++e)
            fattni_store(params[i].value.data, (int32_t)type, e, (double)((e * (5 + 2 * i) + i) % 17 - 8) / 8);
    fattn_attention_vars x = use_all();
    x.bias = fattn_op_slice(tape, fattn_use(tape, &bias), 0, first, all);
    x.bias = fattn_op_reshape(tape, x.bias, 4, c->shape);
    if (c->scaled) x.bias = fattn_op_scale(tape, x.bias, 2);
    if (c->lengths) x.seqlens_q = fattn_input(tape, &q), x.seqlens_k = fattn_input(tape, &k);
    fattn_var o = fattn_op_attention_ex(tape, &x, NULL, NULL);
    if (c->twice) o = fattn_op_add(tape, o, fattn_op_attention_ex(tape, &x, NULL, NULL));
    const fattn_var square = fattn_op_mul(tape, o, o);
    cr_assert_eq(fattn_tape_backward(tape, fattn_op_sum(tape, square, NULL, 0, 0)), FATTN_OK, "%s",
                 fattn_ctx_error(ctx));
    const fattn_tensor d_bias = fattn_tensor_slice(&bias.grad, 0, first, all);
    cr_assert_eq(fattn_tensor_copy(ctx, &to, &d_bias), FATTN_OK);
    fattn_tensor_free(ctx, &bias.value);
    fattn_tensor_free(ctx, &bias.grad);
    end();
}

/* Fresh memory is NaN: rows past the end must have been written. Eight roundings to 16 bits, as errors of the whole:
   P, o, a second o, their sum, its square, dO, and d_bias twice, in the intermediate variable and in the parameter. */
Test(attention_op, a_bias_in_16_bits_has_a_gradient) {
    enum { MOST = 2 * 2 * 5 * 5 };
    for (int n = 0; n < 128; ++n) {
        const fattn_dtype half = n & 1 ? FATTN_BF16 : FATTN_F16;
        bias_case c = {.bias = half,
                       .grad = n & 2 ? FATTN_F32 : half,
                       .scaled = n & 4,
                       .twice = n & 8,
                       .lengths = n & 16,
                       .sliced = n & 64, /* of 2 bytes: aligned to no F32 */
                       .shape = {n & 32 ? 1 : 2, 2, n & 32 ? 1 : 5, 5}};
        float got[MOST], want[MOST];
        bias_gradient(&c, half, got);
        c.bias = c.grad = FATTN_F32;
        bias_gradient(&c, FATTN_F32, want);
        double error = 0, norm = 0;
        for (int64_t e = 0; e < c.shape[0] * c.shape[1] * c.shape[2] * c.shape[3]; ++e) {
            error += pow((double)(got[e] - want[e]), 2), norm += pow((double)want[e], 2);
            if (want[e] == 0) cr_assert_eq(got[e], 0);
        }
        cr_assert_gt(norm, 0);
        cr_assert_leq(sqrt(error / norm), half == FATTN_BF16 ? 8 * 0x1p-9 : 8 * 0x1p-12, "case %d: %g", n,
                      sqrt(error / norm));
    }
}

/* With threads: a plan for another set of gradients would need another workspace. */
Test(attention_op, empty_problems) {
    fattn_ctx_destroy(ctx);
    ctx = failing_context(&memory, 4);
    const int64_t cases[4][3][4] = {{{1, 2, 0, 3}, {1, 2, 4, 3}, {1, 2, 4, 3}},
                                    {{1, 2, 4, 3}, {1, 2, 0, 3}, {1, 2, 0, 3}},
                                    {{0, 2, 4, 3}, {0, 2, 4, 3}, {0, 2, 4, 3}},
                                    {{1, 3, 34, 8}, {1, 3, 0, 8}, {1, 3, 0, 8}}};
    for (int n = 0; n < 4; ++n)
        for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_STANDARD; ++algorithm) {
            begin(FATTN_F64, cases[n]);
            const fattn_attention_vars x = use_all();
            const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = algorithm};
            fattn_var lse;
            double total = NAN;
            const fattn_var o = fattn_op_attention_ex(tape, &x, &p, &lse), loss = sum(tape, o);
            cr_assert_eq(fattn_tape_backward(tape, loss), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_tape_item(tape, loss, &total), FATTN_OK);
            cr_assert_eq(total, 0);
            fattn_tensor l;
            cr_assert_eq(fattn_tape_value(tape, lse, &l), FATTN_OK);
            for (int64_t e = 0; e < fattn_tensor_numel(&l); ++e) cr_assert_eq(*element(&l, e), -INFINITY);
            for (int i = 0; i < 3; ++i)
                for (int64_t e = 0; e < fattn_tensor_numel(&params[i].grad); ++e)
                    cr_assert_eq(*element(&params[i].grad, e), 0);
            end();
        }
}

/* ---- errors ---- */

static void rejected(fattn_var o, fattn_status want, const char *words) {
    cr_assert_eq(o.id, 0);
    cr_assert_eq(fattn_tape_status(tape), want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), words), "\"%s\" lacks \"%s\"", fattn_ctx_error(ctx), words);
    fattn_tape_reset(tape);
}

Test(attention_op, errors) {
    const int64_t shapes[3][4] = {{1, 2, 4, 3}, {1, 2, 5, 3}, {1, 2, 5, 3}};
    begin(FATTN_F64, shapes);
    fattn_var lse = {77};
    fattn_attention_vars x = use_all();
    rejected(fattn_op_attention_ex(tape, NULL, NULL, &lse), FATTN_E_ARG, "NULL");
    cr_assert_eq(lse.id, 0);
    x = use_all(), x.struct_size = 0;
    rejected(fattn_op_attention_ex(tape, &x, NULL, NULL), FATTN_E_ABI, "fattn_attention_vars");
    fattn_attention_params p = {0};
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_ABI, "fattn_attention_params");
    struct newer {
        fattn_attention_params p;
        uint64_t future;
    } newer = {{.struct_size = sizeof newer}, 0};
    x = use_all(), x.v = x.k;
    cr_assert_neq(fattn_op_attention_ex(tape, &x, &newer.p, NULL).id, 0, "%s", fattn_ctx_error(ctx));
    newer.future = 1;
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &newer.p, NULL), FATTN_E_ABI, "fattn_attention_params");
    p.struct_size = sizeof p;
    p.flags = FATTN_ACC_DK;
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_ARG, "0x200");
    p.flags = FATTN_MERGE;
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_ARG, "MERGE");
    p.flags = FATTN_FP8;
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_UNSUPPORTED, "FATTN_FP8 has no F64");
    uint8_t codes[2 * 4 * 3] = {0};
    const fattn_tensor q8 = fattn_tensor_view(codes, FATTN_F8E4M3, FATTN_CPU, 0, 4, shapes[0]);
    p.flags = 0;
    x = use_all(), x.q = fattn_input(tape, &q8);
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_DTYPE, "q: dtype f8e4m3");
    p.flags = 0, p.scale = -1;
    x = use_all();
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_ARG, "scale");
    x = use_all(), x.v = (fattn_var){0};
    rejected(fattn_op_attention_ex(tape, &x, NULL, NULL), FATTN_E_ARG, "v is absent");
    x = use_all();
    rejected(fattn_op_attention(tape, x.q, x.k, sum(tape, x.v), NULL), FATTN_E_SHAPE, "v has 0");
    x = use_all();
    rejected(fattn_op_attention(tape, x.q, x.k, x.q, NULL), FATTN_E_SHAPE, "Sk=5");
    double two[2] = {1, 2}, gradients[2];
    fattn_param alibi = {.value = fattn_tensor_view(two, FATTN_F64, FATTN_CPU, 0, 1, (int64_t[]){2}),
                         .grad = fattn_tensor_view(gradients, FATTN_F64, FATTN_CPU, 0, 1, (int64_t[]){2})};
    p = (fattn_attention_params){.struct_size = sizeof p, .algorithm = FATTN_ALGO_STANDARD};
    x = use_all(), x.alibi = fattn_use(tape, &alibi);
    rejected(fattn_op_attention_ex(tape, &x, &p, NULL), FATTN_E_UNSUPPORTED, "ALiBi");
    alibi.flags = FATTN_PARAM_FROZEN;
    x = use_all(), x.alibi = fattn_use(tape, &alibi);
    cr_assert_neq(fattn_op_attention_ex(tape, &x, &p, NULL).id, 0, "%s", fattn_ctx_error(ctx));
    end();
}
