/* Analytic gradients of a graph against difference quotients.

   The output y is contracted with a random cotangent c: got = d(c.y)/dx from the tape; want =
   c.(y(x+h) - y(x-h)) / 2h, or with five points
   c.(8 (y(x+h) - y(x-h)) - (y(x+2h) - y(x-2h))) / 12h.
   Outputs are subtracted before they are summed, so that those that do not depend on the coordinate
   cancel exactly. Graphs run on the context's device; coordinates, outputs and sums are on the host.
   The tape's gradients have the inputs' dtype, differences are always taken in F64 at the same points. */
#include "autograd_c/ops/ops.h"
#include "core/tensor/philox.h"

#include <fattn/check.h>

#include <float.h>
#include <math.h>
#include <stdio.h>

enum { COTANGENT_STREAM = 0x67726164, SAMPLE_STREAM = 0x73616d70 };

typedef struct checker {
    fattn_ctx *ctx;
    fattn_graph_fn fn;
    void *user;
    const fattn_tensor *inputs;
    int n, differentiable;
    fattn_gradcheck_options opt;
    fattn_tape *tape;
    fattn_dtype dtype;      /* of the differentiable inputs */
    fattn_param *params;    /* [n] row-major copies in F64; dtype 0 for integers */
    fattn_param *narrow;    /* [n] the same in dtype, with gradients; F64: params */
    fattn_var *in;          /* [n] */
    fattn_tensor cotangent; /* as y in dtype, row-major */
    fattn_tensor x, dx;     /* of the current input, on the host */
    fattn_tensor weights;   /* the cotangent on the host */
    fattn_tensor high, low; /* as y, row-major, on the host: y at x + kh and x - kh */
    fattn_report report;
    double aa, bb, ab, squares, worst; /* worst: largest error over its bound */
    double size;                       /* factor of atol for the current input: 1, or */
    bool rounds;                       /* if set, its largest gradient where that exceeds 1 */
} checker;

/* The last op of the graph: sum of y*c, differentiated with respect to y. */
static fattn_status dot_infer(fattn_op_call *c) {
    c->out[0].dtype = c->in[0].dtype;
    c->fwd_workspace = fattni_reduce_workspace(c->ctx, &c->out[0], &c->in[0]);
    return FATTN_OK;
}

static fattn_status dot_forward(fattn_op_call *c) {
    return fattni_reduce(c->ctx, &c->out[0], true, &c->in[0], &c->in[1], c->workspace);
}

static fattn_status dot_backward(fattn_op_call *c) {
    if (!c->d_in[0].data) return FATTN_OK;
    const fattn_tensor *const t[] = {&c->d_in[0], &c->in[1], &c->d_out[0]};
    return fattni_each_element(c->ctx, &fattni_elementwise_product, t, 3, c->d_in_fresh[0]);
}

static const fattn_op_def dot = {.struct_size = sizeof dot,
                                 .n_out = 1,
                                 .name = "gradcheck",
                                 .infer = dot_infer,
                                 .forward = dot_forward,
                                 .backward = dot_backward};

/* Records the user's graph over these parameters, with these flags; y is its output. */
static fattn_status evaluate(checker *k, fattn_param *params, uint32_t flags, fattn_var *out, fattn_tensor *y) {
    const fattn_dtype dtype = flags & FATTN_PARAM_FROZEN ? FATTN_F64 : k->dtype;
    fattn_tape_reset(k->tape);
    for (int i = 0; i < k->n; ++i) {
        params[i].flags = flags;
        k->in[i] = params[i].value.dtype ? fattn_use(k->tape, &params[i]) : fattn_input(k->tape, &k->inputs[i]);
    }
    *out = k->fn(k->tape, k->in, k->n, k->user);
    FATTNI_TRY(fattn_tape_status(k->tape));
    FATTNI_TRY(fattn_tape_value(k->tape, *out, y));
    if ((fattn_dtype)y->dtype != dtype)
        return fattn_ctx_fail(k->ctx, FATTN_E_DTYPE, "gradcheck: the output is %s, not %s",
                              fattn_dtype_name((fattn_dtype)y->dtype), fattn_dtype_name(dtype));
    return FATTN_OK;
}

/* A row-major F64 tensor in host memory, with the shape of `like`. */
static fattn_status host_tensor(checker *k, const fattn_tensor *like, fattn_tensor *out) {
    fattn_tensor t = fattn_tensor_view(NULL, FATTN_F64, FATTN_CPU, 0, like->ndim, like->shape);
    FATTNI_TRY(fattni_host_alloc(k->ctx, fattni_tensor_bytes(&t), &t.data));
    *out = t;
    return FATTN_OK;
}

static void free_host_tensor(checker *k, fattn_tensor *t) {
    if (t->data) fattni_host_free(k->ctx, t->data, fattni_tensor_bytes(t));
    t->data = NULL;
}

/* Makes the buffers that are as large as y. */
static fattn_status make_buffers(checker *k, const fattn_tensor *shape) {
    const fattn_tensor y = *shape;
    fattn_tensor *const like_y[] = {&k->weights, &k->high, &k->low};
    FATTNI_TRY(fattn_tensor_alloc(k->ctx, k->dtype, y.ndim, y.shape, &k->cotangent));
    for (int i = 0; i < 3; ++i) FATTNI_TRY(host_tensor(k, &y, like_y[i]));
    const fattn_rng rng = {.seed = k->opt.seed, .stream = COTANGENT_STREAM};
    FATTNI_TRY(fattn_tensor_normal(k->ctx, &k->cotangent, 0, 1, rng));
    return fattn_tensor_copy(k->ctx, &k->weights, &k->cotangent);
}

/* Fills the params' gradients with twice what they should be: stores them, over NaN, and adds them. So an op fails
   that adds where it should overwrite, or overwrites where it should add. */
static fattn_status analytic(checker *k) {
    static const uint32_t passes[] = {FATTN_PARAM_ONE_PASS, 0};
    for (int pass = 0; pass < 2; ++pass) {
        fattn_var out;
        fattn_tensor y;
        FATTNI_TRY(evaluate(k, k->narrow, passes[pass], &out, &y));
        if (pass == 0) FATTNI_TRY(make_buffers(k, &y));
        const fattn_var operands[] = {out, fattn_input(k->tape, &k->cotangent)};
        FATTNI_TRY(fattn_tape_backward(k->tape, fattn_op_custom(k->tape, &dot, operands, 2, NULL)));
    }
    return FATTN_OK;
}

/* A coordinate of an input, and its value. */
typedef struct coordinate {
    const fattn_tensor *input;
    int64_t e;
    double x;
} coordinate;

static fattn_status move_to(checker *k, const coordinate *at, double value) {
    const fattn_tensor place = fattn_tensor_view((double *)at->input->data + at->e, FATTN_F64,
                                                 (fattn_device)at->input->device, at->input->device_id, 0, NULL);
    const fattn_tensor here = fattn_tensor_view(&value, FATTN_F64, FATTN_CPU, 0, 0, NULL);
    return fattn_tensor_copy(k->ctx, &place, &here);
}

/* c.(y(x + step) - y(x - step)); restores the coordinate. */
static fattn_status difference(checker *k, const coordinate *at, double step, double *out) {
    fattn_tensor *const sides[] = {&k->high, &k->low};
    fattn_status s = FATTN_OK;
    for (int side = 0; side < 2 && !s; ++side) {
        fattn_var ignored;
        fattn_tensor y;
        s = move_to(k, at, side ? at->x - step : at->x + step);
        if (!s) s = evaluate(k, k->params, FATTN_PARAM_FROZEN, &ignored, &y);
        if (!s) s = fattn_tensor_copy(k->ctx, sides[side], &y); /* fails if the shape changed */
    }
    if (!s) s = move_to(k, at, at->x);
    if (s) return s;
    double sum = 0;
    const double *high = k->high.data, *low = k->low.data, *c = k->weights.data;
    for (int64_t e = 0, count = fattn_tensor_numel(&k->high); e < count; ++e)
        if (high[e] != low[e]) sum += c[e] * (high[e] - low[e]); /* equal infinities: no change */
    *out = sum;
    return FATTN_OK;
}

static fattn_status quotient(checker *k, const coordinate *at, double *out) {
    const double x = at->x, size = k->opt.step * fmax(1, fabs(x));
    const volatile double moved = x + size; /* volatile: rounds to double and is not optimised away */
    const double h = moved - x;
    double one, two;
    FATTNI_TRY(difference(k, at, h, &one));
    if (k->opt.order == 2) {
        *out = one / (2 * h);
        return FATTN_OK;
    }
    FATTNI_TRY(difference(k, at, 2 * h, &two));
    *out = (8 * one - two) / (12 * h);
    return FATTN_OK;
}

static void compare(checker *k, int input, int64_t e, double got, double want) {
    fattn_report *r = &k->report;
    const fattn_tolerance tol = k->opt.tol;
    double excess = INFINITY;
    r->checked += 1;
    if (isfinite(got) && isfinite(want)) {
        const double error = fabs(got - want);
        r->max_abs = fmax(r->max_abs, error);
        r->max_rel = fmax(r->max_rel, error / fmax(fabs(want), tol.atol));
        k->squares += error * error;
        k->aa += got * got, k->bb += want * want, k->ab += got * want;
        excess = error / (tol.atol * k->size + tol.rtol * fabs(want));
    } else {
        r->nonfinite += 1;
    }
    if (excess > 1) r->failed += 1;
    if (excess <= k->worst) return;
    k->worst = excess;
    r->worst_input = input;
    r->worst_got = got;
    r->worst_want = want;
    const fattn_tensor *x = &k->params[input].value;
    for (int d = x->ndim - 1; d >= 0; --d) {
        r->worst_at[d] = e % x->shape[d];
        e /= x->shape[d];
    }
}

/* The k-th of m coordinates out of n: one from each of m ranges of nearly equal size, with the first and last. */
static int64_t sample(uint64_t seed, int input, int64_t k, int64_t m, int64_t n) {
    if (k == 0) return 0;
    if (k == m - 1) return n - 1;
    const int64_t begin = k * (n / m) + fattni_min(k, n % m), size = n / m + (k < n % m);
    const fattni_block counter = {{(uint32_t)k, (uint32_t)(k >> 32), (uint32_t)input, SAMPLE_STREAM}};
    return begin + (int64_t)(fattni_philox(seed, counter).w[0] % (uint64_t)size);
}

static fattn_status check_input(checker *k, int input) {
    const fattn_tensor *const x = &k->params[input].value, *const dx = &k->narrow[input].grad;
    const int64_t n = fattn_tensor_numel(x);
    const int64_t m = k->opt.max_coords ? fattni_min(n, fattni_max(2, k->opt.max_coords)) : n;
    FATTNI_TRY(host_tensor(k, x, &k->x));
    FATTNI_TRY(host_tensor(k, dx, &k->dx));
    FATTNI_TRY(fattn_tensor_copy(k->ctx, &k->x, x));
    FATTNI_TRY(fattn_tensor_copy(k->ctx, &k->dx, dx));
    double *const gradient = k->dx.data;
    for (int64_t e = 0; e < n; ++e) gradient[e] /= 2; /* of two passes */
    k->size = 1;
    for (int64_t e = 0; e < n && k->rounds; ++e)
        if (isfinite(gradient[e])) k->size = fmax(k->size, fabs(gradient[e]));
    for (int64_t c = 0; c < m; ++c) {
        const int64_t e = sample(k->opt.seed, input, c, m, n);
        const coordinate at = {x, e, ((const double *)k->x.data)[e]};
        double want;
        FATTNI_TRY(quotient(k, &at, &want));
        compare(k, input, e, gradient[e], want);
    }
    free_host_tensor(k, &k->x);
    free_host_tensor(k, &k->dx);
    return FATTN_OK;
}

static fattn_status take_options(checker *k, const fattn_gradcheck_options *opt) {
    fattn_gradcheck_options o = {.struct_size = sizeof o};
    if (opt) FATTNI_TRY(fattni_take_struct(k->ctx, "fattn_gradcheck_options", opt, &o, sizeof o));
    if (o.order != 0 && o.order != 2 && o.order != 4)
        return fattn_ctx_fail(k->ctx, FATTN_E_ARG, "gradcheck: order %d is neither 2 nor 4", o.order);
    const double numbers[] = {o.step, o.tol.atol, o.tol.rtol, o.tol.cosine, (double)o.max_coords};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i)
        if (!(numbers[i] >= 0 && isfinite(numbers[i])))
            return fattn_ctx_fail(k->ctx, FATTN_E_ARG,
                                  "gradcheck: step %g, atol %g, rtol %g, cosine %g, max_coords %g: "
                                  "negative or not finite",
                                  numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]);
    if (o.order == 0) o.order = 2;
    if (o.step == 0) o.step = pow(DBL_EPSILON, 1.0 / (o.order + 1));
    /* F32: 256 roundings of terms as large as the input's largest gradient, or 1: a smaller gradient may be a sum of
       such terms. */
    const bool exact = k->dtype == FATTN_F64;
    k->rounds = !exact && o.tol.atol == 0;
    if (o.tol.atol == 0) o.tol.atol = exact ? 1e-8 : 0x1p-16;
    if (o.tol.rtol == 0) o.tol.rtol = exact ? 1e-6 : 0x1p-16;
    k->opt = o;
    return FATTN_OK;
}

/* Also sets the dtype of the differentiable inputs. */
static fattn_status check_inputs(checker *k) {
    for (int i = 0; i < k->n; ++i) {
        char name[32];
        snprintf(name, sizeof name, "gradcheck: input %d", i);
        FATTNI_TRY(fattni_check_tensor(k->ctx, name, &k->inputs[i]));
        const fattn_dtype dtype = (fattn_dtype)k->inputs[i].dtype;
        if (dtype == FATTN_I32) continue;
        if (dtype != FATTN_F64 && dtype != FATTN_F32)
            return fattn_ctx_fail(k->ctx, FATTN_E_DTYPE, "%s is %s, neither f64, f32 nor i32", name,
                                  fattn_dtype_name(dtype));
        if (k->differentiable++ && dtype != k->dtype)
            return fattn_ctx_fail(k->ctx, FATTN_E_DTYPE, "%s is %s, another is %s", name, fattn_dtype_name(dtype),
                                  fattn_dtype_name(k->dtype));
        k->dtype = dtype;
    }
    if (k->differentiable) return FATTN_OK;
    return fattn_ctx_fail(k->ctx, FATTN_E_ARG, "gradcheck: none of the %d inputs is f64 or f32", k->n);
}

/* Row-major copies of the differentiable inputs in this dtype; with gradients, of NaN, if requested. */
static fattn_status make_params(checker *k, fattn_dtype dtype, bool gradients, fattn_param **out) {
    void *params;
    FATTNI_TRY(fattni_host_alloc(k->ctx, (size_t)k->n * sizeof **out, &params));
    *out = params;
    memset(params, 0, (size_t)k->n * sizeof **out);
    for (int i = 0; i < k->n; ++i) {
        const fattn_tensor *x = &k->inputs[i];
        fattn_param *p = &(*out)[i];
        if (x->dtype == FATTN_I32) continue;
        FATTNI_TRY(fattn_tensor_alloc(k->ctx, dtype, x->ndim, x->shape, &p->value));
        FATTNI_TRY(fattn_tensor_copy(k->ctx, &p->value, x));
        if (!gradients) continue;
        FATTNI_TRY(fattn_tensor_alloc(k->ctx, dtype, x->ndim, x->shape, &p->grad));
        FATTNI_TRY(fattni_fill(k->ctx, &p->grad, (double)NAN, true));
    }
    return FATTN_OK;
}

static fattn_status run(checker *k) {
    void *in;
    FATTNI_TRY(fattni_host_alloc(k->ctx, (size_t)k->n * sizeof *k->in, &in));
    k->in = in;
    FATTNI_TRY(make_params(k, FATTN_F64, k->dtype == FATTN_F64, &k->params));
    if (k->dtype == FATTN_F64)
        k->narrow = k->params;
    else
        FATTNI_TRY(make_params(k, k->dtype, true, &k->narrow));
    FATTNI_TRY(fattn_tape_create(k->ctx, &k->tape));
    FATTNI_TRY(analytic(k));
    for (int i = 0; i < k->n; ++i)
        if (k->params[i].value.dtype) FATTNI_TRY(check_input(k, i));
    return FATTN_OK;
}

static void free_params(checker *k, fattn_param *params) {
    for (int i = 0; i < k->n && params; ++i) {
        fattn_tensor_free(k->ctx, &params[i].value);
        fattn_tensor_free(k->ctx, &params[i].grad);
    }
    fattni_host_free(k->ctx, params, (size_t)k->n * sizeof *params);
}

static void release(checker *k) {
    fattn_tape_destroy(k->tape);
    fattn_tensor_free(k->ctx, &k->cotangent);
    fattn_tensor *const on_host[] = {&k->x, &k->dx, &k->weights, &k->high, &k->low};
    for (int i = 0; i < 5; ++i) free_host_tensor(k, on_host[i]);
    fattni_host_free(k->ctx, k->in, (size_t)k->n * sizeof *k->in);
    if (k->narrow != k->params) free_params(k, k->narrow);
    free_params(k, k->params);
}

/* Completes the report; MISMATCH with an error message. */
static fattn_status judge(checker *k) {
    fattn_report *r = &k->report;
    const int64_t finite = r->checked - r->nonfinite;
    r->rms = finite ? sqrt(k->squares / (double)finite) : 0;
    r->cosine = k->aa + k->bb > 0 ? 1 - 2 * k->ab / (k->aa + k->bb) : 0;
    r->passed = r->failed == 0 && (k->opt.tol.cosine == 0 || r->cosine <= k->opt.tol.cosine);
    if (r->passed) return FATTN_OK;
    return fattn_ctx_fail(k->ctx, FATTN_E_MISMATCH,
                          "gradcheck: %lld of %lld coordinates fail (%lld non-finite), cosine "
                          "distance %.3g; worst: input %d at [%lld,%lld,%lld,%lld,%lld]: gradient "
                          "%.12g, difference quotient %.12g",
                          (long long)r->failed, (long long)r->checked, (long long)r->nonfinite, r->cosine,
                          r->worst_input, (long long)r->worst_at[0], (long long)r->worst_at[1],
                          (long long)r->worst_at[2], (long long)r->worst_at[3], (long long)r->worst_at[4], r->worst_got,
                          r->worst_want);
}

fattn_status fattn_gradcheck(fattn_ctx *ctx, fattn_graph_fn fn, void *user, const fattn_tensor *inputs, int n,
                             const fattn_gradcheck_options *opt, fattn_report *out) {
    if (!ctx) return FATTN_E_ARG;
    if (!fn || !inputs || n < 1 || !out)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "gradcheck: fn, inputs or report is NULL, or n is %d", n);
    checker k = {.ctx = ctx, .fn = fn, .user = user, .inputs = inputs, .n = n, .worst = -1};
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_report", out, &k.report, sizeof k.report));
    const uint32_t size = k.report.struct_size;
    k.report = (fattn_report){.struct_size = size};
    FATTNI_TRY(check_inputs(&k));
    FATTNI_TRY(take_options(&k, opt));
    fattn_status s = run(&k);
    release(&k);
    if (s) return s;
    s = judge(&k);
    memcpy(out, &k.report, size < sizeof k.report ? size : sizeof k.report);
    return s;
}
