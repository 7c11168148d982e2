/* Every error of the tape: its status, its error message, and that the status is kept. */
#include "suite.h"
#include "tape_ops.h"

#include <stdbool.h>
#include <string.h>

static leaf a;
static fattn_var x;

static void set_up(void) {
    open_tape();
    leaf_init(&a, 2, (int64_t[]){3, 4});
    x = fattn_use(tape, &a.p);
}
TestSuite(tape_errors, .init = set_up, .fini = close_tape);

/* The op failed with this status and an error message that contains these words; all later ops fail with the same
   status; reset clears it. */
static void failed(fattn_var result, fattn_status want, const char *words) {
    double item;
    fattn_tensor view;
    cr_assert_eq(result.id, 0);
    cr_assert_eq(fattn_tape_status(tape), want, "%s: %s", fattn_status_name(fattn_tape_status(tape)),
                 fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), words), "\"%s\" lacks \"%s\"", fattn_ctx_error(ctx), words);
    cr_assert_eq(fattn_use(tape, &a.p).id, 0);
    cr_assert_eq(fattn_input(tape, &a.p.value).id, 0);
    cr_assert_eq(mul(tape, x, x).id, 0);
    cr_assert_eq(fattn_op_attention(tape, x, x, x, NULL).id, 0);
    cr_assert_eq(fattn_tape_backward(tape, x), want);
    cr_assert_eq(fattn_tape_value(tape, x, &view), want);
    cr_assert_eq(fattn_tape_grad(tape, x, &view), want);
    cr_assert_eq(fattn_tape_keep_grad(tape, x), want);
    cr_assert_eq(fattn_tape_item(tape, x, &item), want);
    cr_assert(strstr(fattn_ctx_error(ctx), words), "the message stays: %s", fattn_ctx_error(ctx));
    fattn_tape_reset(tape);
    cr_assert_eq(fattn_tape_status(tape), FATTN_OK);
    x = fattn_use(tape, &a.p);
    cr_assert_eq(x.id, 1);
}

Test(tape_errors, null_is_rejected) {
    fattn_tensor view;
    double item;
    fattn_tape *none = (fattn_tape *)&item;
    cr_assert_eq(fattn_tape_create(NULL, &none), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_create(ctx, NULL), FATTN_E_ARG);
    fattn_tape_destroy(NULL);
    fattn_tape_reset(NULL);
    cr_assert_eq(fattn_tape_status(NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_backward(NULL, x), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_value(NULL, x, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_grad(NULL, x, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_keep_grad(NULL, x), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_item(NULL, x, &item), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_value(tape, x, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_grad(tape, x, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_item(tape, x, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_use(NULL, &a.p).id, 0);
    cr_assert_eq(fattn_input(NULL, &a.p.value).id, 0);
    cr_assert_eq(mul(NULL, x, x).id, 0);
    cr_assert_eq(fattn_tape_status(tape), FATTN_OK, "questions do not break a tape");
    failed(fattn_use(tape, NULL), FATTN_E_ARG, "NULL");
    failed(fattn_input(tape, NULL), FATTN_E_ARG, "NULL");
}

Test(tape_errors, unknown_variables_are_rejected) {
    fattn_tensor view;
    cr_assert_eq(fattn_tape_value(tape, (fattn_var){2}, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_value(tape, (fattn_var){0}, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_tape_value(tape, (fattn_var){-1}, &view), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "variable -1"), "%s", fattn_ctx_error(ctx));
    failed(mul(tape, x, (fattn_var){7}), FATTN_E_ARG, "mul: variable 7");
    failed(mul(tape, (fattn_var){-3}, x), FATTN_E_ARG, "variable -3");
}

static void backward_fails(fattn_var v, fattn_status want, const char *words) {
    cr_assert_eq(fattn_tape_backward(tape, v), want);
    failed((fattn_var){0}, want, words);
}

Test(tape_errors, backward_out_of_order) {
    backward_fails(x, FATTN_E_SHAPE, "[3,4]");
    backward_fails((fattn_var){0}, FATTN_E_ARG, "variable 0");
    backward_fails(sum(tape, fattn_input(tape, &a.p.value)), FATTN_E_STATE, "no parameter");
    const fattn_var s = sum(tape, x);
    cr_assert_eq(fattn_tape_backward(tape, s), FATTN_OK);
    for (int i = 0; i < 12; ++i) cr_assert_eq(a.grad[i], 1);
    backward_fails(s, FATTN_E_STATE, "reset");
    for (int i = 0; i < 12; ++i) cr_assert_eq(a.grad[i], 1);
}

Test(tape_errors, only_what_has_a_gradient_can_keep_one) {
    const fattn_var constant = fattn_input(tape, &a.p.value);
    cr_assert_eq(fattn_tape_keep_grad(tape, constant), FATTN_E_STATE);
    cr_assert(strstr(fattn_ctx_error(ctx), "keep_grad: variable 2 has no gradient"), "%s", fattn_ctx_error(ctx));
}

/* Error messages of the checks of built-in ops; none reads an element. */
Test(tape_errors, operands_of_built_in_ops) {
    const int64_t many[] = {1 << 16, 1 << 16};
    fattn_tensor t = fattn_tensor_permute(&a.p.value, (int[]){1, 0});
    failed(fattn_op_rmsnorm(tape, fattn_input(tape, &t), x, 1e-5f), FATTN_E_UNSUPPORTED,
           "the last dimension of x has stride 4; only 1 is supported");
    int32_t zero = 0;
    fattn_tensor ids = fattn_tensor_view(&zero, FATTN_I32, FATTN_CPU, 0, 2, many);
    ids.stride[0] = ids.stride[1] = 0;
    failed(fattn_op_embedding(tape, x, fattn_input(tape, &ids)), FATTN_E_UNSUPPORTED,
           "embedding: 4294967296 ids, at most 2147483647");
}

Test(tape_errors, item_needs_one_element) {
    double item;
    cr_assert_eq(fattn_tape_item(tape, x, &item), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "[3,4]"), "%s", fattn_ctx_error(ctx));
}

Test(tape_errors, bad_parameters_are_rejected) {
    leaf b;
    const int64_t shape[] = {3, 4};
    leaf_init(&b, 2, shape), b.p.value.dtype = FATTN_I32;
    failed(fattn_use(tape, &b.p), FATTN_E_DTYPE, "leaf: i32");
    leaf_init(&b, 2, shape), b.p.grad.data = NULL;
    failed(fattn_use(tape, &b.p), FATTN_E_ARG, "leaf");
    leaf_init(&b, 2, shape), b.p.grad.shape[1] = 3;
    failed(fattn_use(tape, &b.p), FATTN_E_SHAPE, "[3,3]");
    leaf_init(&b, 2, shape), b.p.grad.ndim = 1;
    failed(fattn_use(tape, &b.p), FATTN_E_SHAPE, "[3]");
    leaf_init(&b, 2, shape), b.p.grad.dtype = FATTN_BF16;
    failed(fattn_use(tape, &b.p), FATTN_E_DTYPE, "bf16");
    leaf_init(&b, 2, shape), b.p.grad.dtype = FATTN_F32;
    failed(fattn_use(tape, &b.p), FATTN_E_DTYPE, "the value is f64, the gradient f32");
    leaf_init(&b, 2, shape), b.p.value = fattn_tensor_permute(&b.p.value, (int[]){1, 0});
    b.p.grad = fattn_tensor_permute(&b.p.grad, (int[]){1, 0});
    failed(fattn_use(tape, &b.p), FATTN_E_SHAPE, "row-major");
    leaf_init(&b, 2, shape), b.p.value.device = FATTN_CUDA, b.p.name = NULL;
    failed(fattn_use(tape, &b.p), FATTN_E_DEVICE, "param");
}

/* An op whose infer has the fault of its attribute. */
typedef enum fault {
    FINE,
    NO_DTYPE,
    BAD_NDIM,
    NEGATIVE_SHAPE,
    HUGE_SHAPE,
    OVERLAP,
    NEGATIVE_STRIDE,
    ELSEWHERE,
    BEYOND,
    OTHER_TYPE,
    COPIES_X,
    HUGE_SAVED,
    HUGE_WORKSPACE,
    INFER_FAILS,
    FORWARD_FAILS,
    BACKWARD_FAILS,
    SPEAKS
} fault;

static fattn_status faulty_infer(fattn_op_call *c) {
    static double elsewhere[12];
    const fault f = *(const fault *)c->attr;
    fattn_tensor *y = &c->out[0];
    y->ndim = 2, y->dtype = FATTN_F64;
    y->shape[0] = 3, y->shape[1] = 4;
    switch (f) {
    case NO_DTYPE: y->dtype = 0; break;
    case BAD_NDIM: y->ndim = 6; break;
    case NEGATIVE_SHAPE: y->shape[1] = -1; break;
    case HUGE_SHAPE: y->shape[0] = y->shape[1] = INT64_MAX / 2; break;
    case OVERLAP: y->stride[0] = 3, y->stride[1] = 1; break;
    case NEGATIVE_STRIDE: y->stride[0] = -4, y->stride[1] = 1; break;
    case ELSEWHERE: y->data = elsewhere; break;
    case BEYOND: y->data = (double *)c->in[0].data + 1; break;
    case OTHER_TYPE: y->data = c->in[0].data, y->dtype = FATTN_I32; break;
    case COPIES_X: *y = c->in[0]; break; /* does not clear data */
    case HUGE_SAVED: c->saved_bytes = SIZE_MAX; break;
    case HUGE_WORKSPACE: c->fwd_workspace = (size_t)1 << 60; break;
    case INFER_FAILS: return FATTN_E_UNSUPPORTED;
    case SPEAKS: return fattn_ctx_fail(c->ctx, FATTN_E_IO, "a message of the op's own");
    default: break;
    }
    return FATTN_OK;
}
static fattn_status faulty_forward(fattn_op_call *c) {
    memset(c->out[0].data, 0, 12 * sizeof(double));
    return *(const fault *)c->attr == FORWARD_FAILS ? FATTN_E_MISMATCH : FATTN_OK;
}
static fattn_status faulty_backward(fattn_op_call *c) {
    return *(const fault *)c->attr == BACKWARD_FAILS ? FATTN_E_NOMEM : FATTN_OK;
}
static const fattn_op_def faulty_def = {.struct_size = sizeof faulty_def,
                                        .attr_size = sizeof(fault),
                                        .n_out = 1,
                                        .name = "faulty",
                                        .infer = faulty_infer,
                                        .forward = faulty_forward,
                                        .backward = faulty_backward};
static fattn_var faulty(fault f) {
    fattn_op_def d = faulty_def;
    d.flags = f == COPIES_X ? 0 : FATTN_OP_MAY_VIEW;
    return fattn_op_custom(tape, &d, &x, 1, &f);
}

Test(tape_errors, what_infer_returns_is_checked) {
    cr_assert_eq(faulty(FINE).id, 2);
    failed(faulty(NO_DTYPE), FATTN_E_DTYPE, "faulty: output 0: unknown dtype 0");
    failed(faulty(BAD_NDIM), FATTN_E_SHAPE, "ndim 6");
    failed(faulty(NEGATIVE_SHAPE), FATTN_E_SHAPE, "-1");
    failed(faulty(HUGE_SHAPE), FATTN_E_SHAPE, "62 bits");
    failed(faulty(OVERLAP), FATTN_E_SHAPE, "overlap");
    failed(faulty(NEGATIVE_STRIDE), FATTN_E_SHAPE, "stride -4");
    failed(faulty(ELSEWHERE), FATTN_E_ARG, "not inside an input");
    failed(faulty(BEYOND), FATTN_E_ARG, "not inside an input");
    failed(faulty(OTHER_TYPE), FATTN_E_ARG, "not inside an input");
    failed(faulty(COPIES_X), FATTN_E_ARG, "FATTN_OP_MAY_VIEW");
    failed(faulty(HUGE_SAVED), FATTN_E_NOMEM, "no memory for 18446744073709551615 bytes");
    failed(faulty(HUGE_WORKSPACE), FATTN_E_NOMEM, "no memory for 1152921504606846976 bytes");
}

Test(tape_errors, failing_ops_stop_the_tape) {
    failed(faulty(INFER_FAILS), FATTN_E_UNSUPPORTED, "faulty: infer returned FATTN_E_UNSUPPORTED");
    failed(faulty(FORWARD_FAILS), FATTN_E_MISMATCH, "faulty: forward returned FATTN_E_MISMATCH");
    failed(faulty(SPEAKS), FATTN_E_IO, "own");
    backward_fails(sum(tape, faulty(BACKWARD_FAILS)), FATTN_E_NOMEM, "faulty: backward");
    fattn_ctx_fail(ctx, FATTN_E_IO, "an older message");
    cr_assert_neq(faulty(FINE).id, 0);
    cr_assert_str_eq(fattn_ctx_error(ctx), "an older message");
}

Test(tape_errors, bad_definitions_are_rejected) {
    const fault fine = FINE;
    fattn_op_def d;
    failed(fattn_op_custom(tape, NULL, &x, 1, NULL), FATTN_E_ARG, "NULL");
    d = faulty_def, d.struct_size = 0;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ABI, "fattn_op_def");
    d = faulty_def, d.infer = NULL;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ARG, "infer");
    d = faulty_def, d.forward = NULL;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ARG, "no forward");
    d = faulty_def, d.flags = 66;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ARG, "flags 0x42");
    d = faulty_def, d.n_out = 0;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ARG, "0 outputs");
    d.n_out = 65;
    failed(fattn_op_custom(tape, &d, &x, 1, &fine), FATTN_E_ARG, "65 outputs");
    failed(fattn_op_custom(tape, &faulty_def, &x, -1, &fine), FATTN_E_ARG, "-1 inputs");
    failed(fattn_op_custom(tape, &faulty_def, &x, 65, &fine), FATTN_E_ARG, "65 inputs");
    failed(fattn_op_custom(tape, &faulty_def, NULL, 1, &fine), FATTN_E_ARG, "in is NULL");
    failed(fattn_op_custom(tape, &faulty_def, &x, 1, NULL), FATTN_E_ARG, "attr is NULL");
    /* Without backward, no gradient is passed on. */
    d = faulty_def, d.backward = NULL;
    backward_fails(sum(tape, fattn_op_custom(tape, &d, &x, 1, &fine)), FATTN_E_STATE, "no parameter");
}

/* An op whose functions call tape functions. */
enum deed { NOTHING, INPUT, USE, ADD, CUSTOM, RESET, BACKWARD, GRAD, DESTROY, LOOK, OTHER, DEEDS };
typedef struct doing {
    enum deed deed;
    int stage;     /* 0: infer, 1: forward, 2: backward */
    bool swallows; /* returns FATTN_OK whatever happens */
} doing;

static fattn_status act(fattn_op_call *c, int stage) {
    const doing *const todo = c->attr;
    fattn_tensor view;
    double item;
    fattn_var v = {1};
    fattn_status s = FATTN_OK;
    if (stage != todo->stage) return FATTN_OK;
    switch (todo->deed) {
    case INPUT: v = fattn_input(tape, &c->in[0]); break;
    case USE: v = fattn_use(tape, &a.p); break;
    case ADD: v = fattn_op_add(tape, x, x); break;
    case CUSTOM: v = mul(tape, x, x); break;
    case RESET: fattn_tape_reset(tape); break;
    case BACKWARD: s = fattn_tape_backward(tape, x); break;
    case GRAD: s = fattn_tape_grad(tape, x, &view); break;
    case DESTROY: fattn_tape_destroy(tape); break;
    case LOOK:
        s = fattn_tape_value(tape, x, &view);
        if (!s && fattn_tape_item(tape, x, &item) != FATTN_E_SHAPE) s = FATTN_E_IO;
        break;
    case OTHER: {
        fattn_tape *other;
        leaf b;
        cr_assert_eq(fattn_tape_create(ctx, &other), FATTN_OK);
        leaf_init(&b, 1, (int64_t[]){2});
        const fattn_var y = fattn_use(other, &b.p);
        s = fattn_tape_backward(other, sum(other, mul(other, y, y)));
        cr_assert_eq(b.grad[1], 3);
        fattn_tape_destroy(other);
        break;
    }
    default: break;
    }
    return todo->swallows ? FATTN_OK : v.id == 0 ? FATTN_E_ARG : s;
}
static fattn_status acting_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F64;
    return act(c, 0);
}
static fattn_status acting_forward(fattn_op_call *c) {
    *(double *)c->out[0].data = 0;
    return act(c, 1);
}
static fattn_status acting_backward(fattn_op_call *c) {
    for (int64_t e = 0; e < 12; ++e) *element(&c->d_in[0], e) = 1;
    return act(c, 2);
}

Test(tape_errors, an_op_cannot_change_the_tape_that_runs_it) {
    static const char *const stages[] = {"infer", "forward", "backward"};
    const fattn_op_def def = {.struct_size = sizeof def,
                              .attr_size = sizeof(doing),
                              .n_out = 1,
                              .name = "acting",
                              .infer = acting_infer,
                              .forward = acting_forward,
                              .backward = acting_backward};
    for (int n = 0; n < DEEDS * 3 * 2; ++n) {
        const doing todo = {(enum deed)(n / 6), n % 3, n / 3 % 2};
        fattn_tape_reset(tape);
        x = fattn_use(tape, &a.p);
        const fattn_var copy = mul(tape, x, x), y = fattn_op_custom(tape, &def, &copy, 1, &todo);
        const bool fine = todo.deed == NOTHING || todo.deed == LOOK || todo.deed == OTHER;
        cr_assert_eq(y.id != 0, fine || todo.stage == 2, "deed %d in %s: id %d", (int)todo.deed, stages[todo.stage],
                     y.id);
        const fattn_status s = fattn_tape_backward(tape, y);
        cr_assert_eq(s, fine ? FATTN_OK : FATTN_E_STATE, "deed %d in %s: %s", (int)todo.deed, stages[todo.stage],
                     fattn_ctx_error(ctx));
        if (fine) continue;
        cr_assert(strstr(fattn_ctx_error(ctx), "not allowed while the tape runs the"), "%s", fattn_ctx_error(ctx));
        cr_assert(strstr(fattn_ctx_error(ctx), stages[todo.stage]), "%s", fattn_ctx_error(ctx));
        cr_assert(strstr(fattn_ctx_error(ctx), "acting"), "%s", fattn_ctx_error(ctx));
    }
}
