/* A custom op that uses all of the public struct: attributes, an absent input, two outputs, saved memory,
   workspace, strided inputs; with views and several times in a graph. */
#include "suite.h"
#include "tape_ops.h"

#include <math.h>
#include <string.h>

static void set_up(void) { open_context(1); }
TestSuite(custom_op, .init = set_up, .fini = close_context);

/* Over rows of x [N,C]: s = x/temperature + bias, P = softmax(s) and L = log sum exp(s); bias [C] may
   be absent. */
enum fault { RIGHT, IGNORES_FRESH, FORGETS_L, FORGETS_BIAS };
typedef struct softmax {
    double temperature;
    enum fault fault;
} softmax;

static fattn_status softmax_infer(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0], *bias = &c->in[1];
    if (x->ndim != 2 || x->dtype != FATTN_F64)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "softmax: x has %d dimensions", x->ndim);
    if (bias->dtype && (bias->ndim != 1 || bias->shape[0] != x->shape[1]))
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "softmax: bias is not [%lld]", (long long)x->shape[1]);
    c->out[0].ndim = 2, c->out[1].ndim = 1;
    c->out[0].dtype = c->out[1].dtype = FATTN_F64;
    c->out[0].shape[0] = c->out[1].shape[0] = x->shape[0];
    c->out[0].shape[1] = x->shape[1];
    c->saved_bytes = sizeof(double); /* 1/temperature, to have something */
    c->fwd_workspace = c->bwd_workspace = (size_t)x->shape[1] * sizeof(double);
    return FATTN_OK;
}

static fattn_status softmax_forward(fattn_op_call *c) {
    const int64_t N = c->in[0].shape[0], C = c->in[0].shape[1];
    double *s = c->workspace;
    *(double *)c->saved = 1 / ((const softmax *)c->attr)->temperature;
    for (int64_t i = 0; i < N; ++i) {
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < C; ++j) {
            s[j] = *element(&c->in[0], i * C + j) * *(double *)c->saved;
            if (c->in[1].dtype) s[j] += *element(&c->in[1], j);
            max = fmax(max, s[j]);
        }
        for (int64_t j = 0; j < C; ++j) sum += exp(s[j] - max);
        for (int64_t j = 0; j < C; ++j) *element(&c->out[0], i * C + j) = exp(s[j] - max) / sum;
        *element(&c->out[1], i) = max + log(sum);
    }
    return FATTN_OK;
}

/* ds = P (dP - sum dP P) + dL P; dx = ds / temperature; dbias = sum over rows. */
static fattn_status softmax_backward(fattn_op_call *c) {
    const softmax *f = c->attr;
    const int64_t N = c->in[0].shape[0], C = c->in[0].shape[1];
    double *ds = c->workspace;
    if (c->d_in[1].data && c->d_in_fresh[1])
        for (int64_t j = 0; j < C; ++j) *element(&c->d_in[1], j) = 0;
    for (int64_t i = 0; i < N; ++i) {
        double dot = 0;
        const double dL = c->d_out[1].data && f->fault != FORGETS_L ? *element(&c->d_out[1], i) : 0;
        for (int64_t j = 0; j < C && c->d_out[0].data; ++j)
            dot += *element(&c->d_out[0], i * C + j) * *element(&c->out[0], i * C + j);
        for (int64_t j = 0; j < C; ++j) {
            const double dP = c->d_out[0].data ? *element(&c->d_out[0], i * C + j) : 0;
            ds[j] = *element(&c->out[0], i * C + j) * (dP - dot + dL);
        }
        for (int64_t j = 0; j < C; ++j) {
            if (c->d_in[0].data) {
                double *dx = element(&c->d_in[0], i * C + j);
                const bool overwrites = c->d_in_fresh[0] || f->fault == IGNORES_FRESH;
                *dx = ds[j] * *(double *)c->saved + (overwrites ? 0 : *dx);
            }
            if (c->d_in[1].data && f->fault != FORGETS_BIAS) *element(&c->d_in[1], j) += ds[j];
        }
    }
    return FATTN_OK;
}

static const fattn_op_def softmax_def = {.struct_size = sizeof softmax_def,
                                         .attr_size = sizeof(softmax),
                                         .n_out = 2,
                                         .name = "softmax",
                                         .infer = softmax_infer,
                                         .forward = softmax_forward,
                                         .backward = softmax_backward};

typedef struct plan {
    softmax op;
    bool biased, transposed;
    int outputs; /* 1 = P, 2 = L, 3 = both */
} plan;

/* The op on x, on a slice of x that overlaps it, and on its own P: x gets three gradients. */
static fattn_var graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const plan *p = user;
    const fattn_var x = p->transposed ? transpose(t, mul(t, in[0], in[0])) : mul(t, in[0], in[0]);
    fattn_var operands[2] = {x, p->biased ? in[1] : (fattn_var){0}};
    const fattn_var P = fattn_op_custom(t, &softmax_def, operands, 2, &p->op);
    operands[0] = slice(t, x, 0, 1, 3);
    const fattn_var part = fattn_op_custom(t, &softmax_def, operands, 2, &p->op);
    operands[0] = P;
    const fattn_var again = fattn_op_custom(t, &softmax_def, operands, 2, &p->op);
    const fattn_var probabilities = join(t, mul(t, P, again), part);
    const fattn_var logs = join(t, (fattn_var){again.id + 1}, (fattn_var){part.id + 1});
    return p->outputs == 1 ? probabilities : p->outputs == 2 ? logs : join(t, probabilities, logs);
}

enum { SIZE = 4 }; /* square, so that a transposed x fits the same bias */
static fattn_status check(plan p, fattn_report *r) {
    double x[SIZE * SIZE], bias[SIZE];
    const fattn_tensor in[2] = {fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){SIZE, SIZE}),
                                fattn_tensor_view(bias, FATTN_F64, FATTN_CPU, 0, 1, (int64_t[]){SIZE})};
    for (uint32_t i = 0; i < 2; ++i)
        cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, 1, (fattn_rng){31, i, 0}), FATTN_OK);
    *r = (fattn_report){.struct_size = sizeof *r};
    return fattn_gradcheck(ctx, graph, &p, in, p.biased ? 2 : 1, NULL, r);
}

Test(custom_op, right_everywhere_in_a_graph) {
    for (int n = 0; n < 12; ++n) {
        fattn_report r;
        const plan p = {{.temperature = 0.7}, .biased = n & 1, .transposed = n & 2, .outputs = 1 + n / 4};
        cr_assert_eq(check(p, &r), FATTN_OK, "%d: %s", n, fattn_ctx_error(ctx));
        cr_assert_eq(r.checked, SIZE * SIZE + (p.biased ? SIZE : 0));
    }
}

Test(custom_op, usual_mistakes_are_found) {
    static const enum fault faults[] = {IGNORES_FRESH, FORGETS_L, FORGETS_BIAS};
    for (int n = 0; n < 3; ++n) {
        fattn_report r;
        const plan p = {{.temperature = 0.7, .fault = faults[n]}, .biased = true, .outputs = 3};
        cr_assert_eq(check(p, &r), FATTN_E_MISMATCH, "fault %d", (int)faults[n]);
        cr_assert_gt(r.failed, 3);
    }
}

Test(custom_op, its_errors_reach_the_caller) {
    fattn_tape *t;
    double data[6] = {0};
    const softmax f = {.temperature = 1};
    const fattn_tensor x = fattn_tensor_view(data, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){2, 3});
    const fattn_tensor bias = fattn_tensor_view(data, FATTN_F64, FATTN_CPU, 0, 1, (int64_t[]){2});
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    const fattn_var in[2] = {fattn_input(t, &x), fattn_input(t, &bias)};
    cr_assert_eq(fattn_op_custom(t, &softmax_def, in, 2, &f).id, 0);
    cr_assert_eq(fattn_tape_status(t), FATTN_E_SHAPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "bias is not [3]"), "%s", fattn_ctx_error(ctx));
    fattn_tape_destroy(t);
}

/* s = 2 x + r and y = 3 s as one op, which completes the gradient of s: in F64, or in F32 and on its copies. */
static uint32_t overwrote; /* a bit per backward, the last one's is the lowest: d_out_fresh */

static double *number_at(const fattn_tensor *t, int64_t e, double *cell) {
    if (t->dtype == FATTN_F64) return element(t, e);
    *cell = (double)((float *)t->data)[e]; /* copies in F32 are row-major */
    return cell;
}

static void put_any(const fattn_tensor *t, int64_t e, double x) {
    if (t->dtype == FATTN_F64)
        *element(t, e) = x;
    else
        ((float *)t->data)[e] = (float)x;
}

static fattn_status pair_infer(fattn_op_call *c) {
    for (int o = 0; o < 2; ++o) {
        c->out[o].ndim = c->in[0].ndim, c->out[o].dtype = c->in[0].dtype;
        memcpy(c->out[o].shape, c->in[0].shape, sizeof c->out[o].shape);
    }
    return FATTN_OK;
}

static fattn_status pair_forward(fattn_op_call *c) {
    double a, b;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]); ++e) {
        put_any(&c->out[0], e, 2 * *number_at(&c->in[0], e, &a) + *number_at(&c->in[1], e, &b));
        put_any(&c->out[1], e, 3 * *number_at(&c->out[0], e, &a));
    }
    return FATTN_OK;
}

static fattn_status pair_backward(fattn_op_call *c) {
    double a, b;
    overwrote = overwrote << 1 | c->d_out_fresh;
    cr_assert_not_null(c->d_out[0].data);
    cr_assert_null(c->d_in[1].data, "r's gradient is passed on");
    for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]); ++e) {
        if (c->d_out[1].data)
            put_any(&c->d_out[0], e,
                    3 * *number_at(&c->d_out[1], e, &a) + (c->d_out_fresh ? 0 : *number_at(&c->d_out[0], e, &b)));
        if (c->d_in[0].data)
            put_any(&c->d_in[0], e,
                    2 * *number_at(&c->d_out[0], e, &a) + (c->d_in_fresh[0] ? 0 : *number_at(&c->d_in[0], e, &b)));
    }
    return FATTN_OK;
}

static const fattn_op_def pair_def = {.struct_size = sizeof pair_def,
                                      .n_out = 2,
                                      .flags = FATTN_OP_COMPLETES_GRAD | FATTN_OP_PASS_GRAD_LAST | FATTN_OP_F32_ON_CPU,
                                      .name = "pair",
                                      .infer = pair_infer,
                                      .forward = pair_forward,
                                      .backward = pair_backward};

/* Twice, so that a gradient passes from one s to the other. users: 1: all of the second s, 2: columns of it, 4: its
   gradient is kept, and shared when it reaches the first, 8: the second y. */
static fattn_var pairs(fattn_tape *t, const fattn_var *in, int users, fattn_var *s, fattn_var *y) {
    const fattn_var x = fattn_op_scale(t, in[0], 1), r = fattn_op_scale(t, in[1], 1);
    s[0] = fattn_op_custom(t, &pair_def, (fattn_var[]){x, r}, 2, NULL);
    y[0] = (fattn_var){s[0].id + 1};
    s[1] = fattn_op_custom(t, &pair_def, (fattn_var[]){y[0], s[0]}, 2, NULL);
    y[1] = (fattn_var){s[1].id + 1};
    if (users & 4) cr_assert_eq(fattn_tape_keep_grad(t, s[1]), FATTN_OK);
    fattn_var sum = {0};
    const fattn_var parts[] = {s[1], fattn_op_slice(t, s[1], 1, 1, 3), y[1]};
    const int bits[] = {1, 2, 8};
    for (int k = 0; k < 3; ++k) {
        if (!(users & bits[k])) continue;
        const fattn_var part = fattn_op_sum(t, parts[k], NULL, 0, 0);
        sum = sum.id ? fattn_op_add(t, sum, part) : part;
    }
    return sum;
}

/* Every number here is exact, in 16 bits, too. */
Test(custom_op, completes_a_gradient) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    const int64_t shape[] = {2, 4};
    for (int n = 0; n < 16 * 4; ++n) {
        const int users = n % 16;
        if (!(users & 11)) continue;
        fattn_param p[2];
        fattn_var in[2], s[2], y[2];
        fattn_tape *t;
        cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
        for (int i = 0; i < 2; ++i) {
            memset(&p[i], 0, sizeof p[i]);
            cr_assert_eq(fattn_tensor_alloc(ctx, types[n / 16], 2, shape, &p[i].value), FATTN_OK);
            cr_assert_eq(fattn_tensor_alloc(ctx, types[n / 16], 2, shape, &p[i].grad), FATTN_OK);
            cr_assert_eq(fattn_tensor_normal(ctx, &p[i].value, 1 + i, 0, (fattn_rng){0}), FATTN_OK);
            cr_assert_eq(fattn_tensor_normal(ctx, &p[i].grad, 0, 0, (fattn_rng){0}), FATTN_OK);
            in[i] = fattn_use(t, &p[i]);
        }
        const fattn_var sum = pairs(t, in, users, s, y);
        overwrote = 0;
        cr_assert_eq(fattn_tape_backward(t, sum), FATTN_OK, "%s", fattn_ctx_error(ctx));
        /* The first, which runs last, has the gradient that the second passes on; what only y brings is new. */
        cr_assert_eq(overwrote, (users & 11) == 8 ? 2 : 0);
        fattn_tensor grads[3] = {p[0].grad, p[1].grad}, read;
        if (users & 4) cr_assert_eq(fattn_tape_grad(t, s[1], &grads[2]), FATTN_OK);
        for (int k = 0; k < (users & 4 ? 3 : 2); ++k) {
            double wide[8];
            read = fattn_tensor_view(wide, FATTN_F64, FATTN_CPU, 0, 2, shape);
            cr_assert_eq(fattn_tensor_copy(ctx, &read, &grads[k]), FATTN_OK);
            for (int e = 0; e < 8; ++e) {
                const int column = e % 4;
                const double ds = (users & 1) + (users & 2 && column >= 1 && column < 3 ? 1 : 0) + (users & 8 ? 3 : 0);
                /* Of the first: s gets ds, and 3 times what reaches its y, 2 ds. */
                const double want = k == 2 ? ds : k == 1 ? 7 * ds : 14 * ds;
                cr_assert_eq(wide[e], want, "%s, users %d, %d[%d]: %g, not %g", fattn_dtype_name(types[n / 16]), users,
                             k, e, wide[e], want);
            }
        }
        fattn_tape_destroy(t);
        for (int i = 0; i < 2; ++i) fattn_tensor_free(ctx, &p[i].value), fattn_tensor_free(ctx, &p[i].grad);
    }
}
