/* The gradient check: passes for right gradients, fails for wrong ones, reports the position. */
#include "suite.h"
#include "tape_ops.h"

#include <math.h>
#include <string.h>

/* y = a sin(w b), elementwise, optionally with an error in the gradient of b. */
typedef struct wave {
    double w;
    double stretch;  /* all of d_b is multiplied by this */
    double at_end;   /* added to the last element of d_b */
    fattn_dtype out; /* 0 = F64 */
    int ignores;     /* d_in_fresh: it always overwrites, or adds */
} wave;
enum { OVERWRITES = 1, ADDS };

static fattn_status wave_infer(fattn_op_call *c) {
    const wave *f = c->attr;
    c->out[0].ndim = c->in[0].ndim;
    c->out[0].dtype = f->out ? (int32_t)f->out : FATTN_F64;
    memcpy(c->out[0].shape, c->in[0].shape, sizeof c->out[0].shape);
    return FATTN_OK;
}
static fattn_status wave_forward(fattn_op_call *c) {
    const wave *f = c->attr;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]) && !f->out; ++e)
        *element(&c->out[0], e) = *element(&c->in[0], e) * sin(f->w * *element(&c->in[1], e));
    return FATTN_OK;
}
static fattn_status wave_backward(fattn_op_call *c) {
    const wave *f = c->attr;
    const int64_t n = fattn_tensor_numel(&c->in[0]);
    for (int64_t e = 0; e < n; ++e) {
        const double a = *element(&c->in[0], e), b = *element(&c->in[1], e), d = *element(&c->d_out[0], e);
        const double gradient[] = {d * sin(f->w * b),
                                   f->stretch * d * a * f->w * cos(f->w * b) + (e == n - 1 ? f->at_end : 0)};
        for (int i = 0; i < 2; ++i) {
            if (!c->d_in[i].data) continue;
            double *to = element(&c->d_in[i], e);
            const bool fresh = f->ignores ? f->ignores == OVERWRITES : c->d_in_fresh[i];
            *to = gradient[i] + (fresh ? 0 : *to);
        }
    }
    return FATTN_OK;
}
static const fattn_op_def wave_def = {
    .struct_size = sizeof wave_def,
    .attr_size = sizeof(wave),
    .n_out = 1,
    .name = "wave",
    .infer = wave_infer,
    .forward = wave_forward,
    .backward = wave_backward,
};

static fattn_var wave_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    cr_assert_eq(n_in, 3);
    fattn_tensor ids; /* integers are passed on unchanged */
    if (fattn_tape_value(t, in[2], &ids)) return (fattn_var){0};
    cr_assert_eq(ids.dtype, FATTN_I32);
    cr_assert_eq(((const int32_t *)ids.data)[1], 8);
    return fattn_op_custom(t, &wave_def, in, 2, user);
}

enum { ROWS = 5, COLUMNS = 7, COUNT = ROWS * COLUMNS };

static double a_data[COUNT], b_data[COUNT];
static int32_t id_data[2] = {7, 8};
static fattn_tensor inputs[3];

static void set_up(void) {
    open_context(1);
    inputs[0] = fattn_tensor_view(a_data, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){ROWS, COLUMNS});
    /* The second one is transposed. */
    inputs[1] = fattn_tensor_view(b_data, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){COLUMNS, ROWS});
    inputs[1] = fattn_tensor_permute(&inputs[1], (int[]){1, 0});
    inputs[2] = fattn_tensor_view(id_data, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){2});
    for (uint32_t i = 0; i < 2; ++i)
        cr_assert_eq(fattn_tensor_normal(ctx, &inputs[i], 0, 1, (fattn_rng){.seed = 1, .stream = i}), FATTN_OK);
}
TestSuite(gradcheck, .init = set_up, .fini = close_context);

static fattn_status check(wave f, fattn_gradcheck_options o, fattn_report *r) {
    o.struct_size = sizeof o;
    *r = (fattn_report){.struct_size = sizeof *r};
    return fattn_gradcheck(ctx, wave_graph, &f, inputs, 3, &o, r);
}

Test(gradcheck, right_gradients_pass) {
    const wave right = {.w = 2, .stretch = 1};
    double before[COUNT];
    memcpy(before, b_data, sizeof before);
    for (int order = 0; order <= 4; order += 2) {
        fattn_report r;
        cr_assert_eq(check(right, (fattn_gradcheck_options){.order = order}, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(r.passed, 1);
        cr_assert_eq(r.checked, 2 * COUNT);
        cr_assert_eq(r.failed + r.nonfinite, 0);
        /* Rounding of y over the step, and the step's own error: far below the default rtol. */
        cr_assert_lt(r.max_abs, 1e-9);
        cr_assert(r.max_abs > 0 && r.rms > 0 && r.rms <= r.max_abs && r.cosine < 1e-15);
    }
    cr_assert_arr_eq(before, b_data, sizeof before, "the inputs are the caller's");
}

/* Though its gradients are right where a graph uses its inputs once, and begins with zeros. */
Test(gradcheck, an_op_that_always_overwrites_or_adds_fails) {
    fattn_report r;
    cr_assert_eq(check((wave){.w = 2, .stretch = 1, .ignores = OVERWRITES}, (fattn_gradcheck_options){.order = 2}, &r),
                 FATTN_E_MISMATCH);
    cr_assert(r.failed == 2 * COUNT && r.nonfinite == 0);
    cr_assert_eq(check((wave){.w = 2, .stretch = 1, .ignores = ADDS}, (fattn_gradcheck_options){.order = 2}, &r),
                 FATTN_E_MISMATCH);
    cr_assert_eq(r.nonfinite, 2 * COUNT);
}

Test(gradcheck, five_points_are_better_than_two) {
    const wave steep = {.w = 30, .stretch = 1};
    fattn_report two, four;
    const double step = 1e-3; /* large: what is left is the error of the formula */
    const fattn_tolerance loose = {.atol = 1, .rtol = 1};
    cr_assert_eq(check(steep, (fattn_gradcheck_options){.order = 2, .step = step, .tol = loose}, &two), FATTN_OK);
    cr_assert_eq(check(steep, (fattn_gradcheck_options){.order = 4, .step = step, .tol = loose}, &four), FATTN_OK);
    /* sin(w(b+h)): errors (wh)^2/6 and (wh)^4/30, relative to the largest derivative. */
    cr_assert(two.max_abs > 1e-4 && two.max_abs < 3 * 30 * 1.5e-4 * 3, "%g", two.max_abs);
    cr_assert_lt(four.max_abs, two.max_abs / 500);
}

Test(gradcheck, a_small_factor_is_found) {
    const wave wrong = {.w = 2, .stretch = 1 + 1e-5};
    for (int order = 2; order <= 4; order += 2) {
        fattn_report r;
        cr_assert_eq(check(wrong, (fattn_gradcheck_options){.order = order}, &r), FATTN_E_MISMATCH);
        cr_assert_eq(r.passed, 0);
        cr_assert_eq(r.worst_input, 1);
        cr_assert_gt(r.failed, COUNT * 9 / 10); /* all but those close to zero */
        cr_assert_leq(r.failed, COUNT);
        cr_assert_float_eq(r.worst_got / r.worst_want, 1 + 1e-5, 1e-7);
        cr_assert_float_eq(r.max_rel, 1e-5, 1e-6);
        cr_assert(strstr(fattn_ctx_error(ctx), "input 1"), "%s", fattn_ctx_error(ctx));
    }
    fattn_report r;
    const fattn_tolerance loose = {.rtol = 1e-4};
    cr_assert_eq(check(wrong, (fattn_gradcheck_options){.tol = loose}, &r), FATTN_OK);
    /* The cosine distance finds twice the gradient, too: 1 - 2*2/(1+4). */
    const wave twice = {.w = 2, .stretch = 2};
    const fattn_tolerance cosine = {.atol = 100, .rtol = 100, .cosine = 1e-3};
    cr_assert_eq(check(twice, (fattn_gradcheck_options){.tol = cosine}, &r), FATTN_E_MISMATCH);
    cr_assert_eq(r.failed, 0);
}

Test(gradcheck, a_sample_has_both_ends) {
    const wave right = {.w = 2, .stretch = 1}, wrong_end = {.w = 2, .stretch = 1, .at_end = 1e-3};
    for (int64_t max_coords = 1; max_coords <= COUNT + 3; max_coords += 3) {
        const fattn_gradcheck_options o = {.max_coords = max_coords, .seed = (uint64_t)max_coords};
        const int64_t want = max_coords < 2 ? 2 : max_coords > COUNT ? COUNT : max_coords;
        fattn_report r;
        cr_assert_eq(check(right, o, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(r.checked, 2 * want);
        cr_assert_eq(check(wrong_end, o, &r), FATTN_E_MISMATCH);
        cr_assert_eq(r.failed, 1);
        cr_assert(r.worst_input == 1 && r.worst_at[0] == ROWS - 1 && r.worst_at[1] == COLUMNS - 1);
    }
}

/* Records which coordinates of in[0] differ from a_data: those that are checked. */
typedef struct watch {
    int evaluations, differentiated;
    bool moved[COUNT];
} watch;
static fattn_status watched_infer(fattn_op_call *c) {
    watch *w = *(watch *const *)c->attr;
    ++w->evaluations;
    w->differentiated += c->wanted[0];
    for (int64_t e = 0; e < COUNT; ++e)
        if (*element(&c->in[0], e) != a_data[e]) w->moved[e] = true;
    c->out[0] = c->in[0]; /* a view */
    return FATTN_OK;
}
static fattn_status nothing(fattn_op_call *c) { return c ? FATTN_OK : FATTN_E_ARG; }
static fattn_var watched_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .attr_size = sizeof(watch *),
                                     .n_out = 1,
                                     .name = "watched",
                                     .infer = watched_infer,
                                     .backward = nothing};
    return fattn_op_custom(t, &def, in, 1, &user);
}

Test(gradcheck, a_sample_is_spread_and_the_rest_is_cheap) {
    for (int64_t m = 2; m <= COUNT; ++m) {
        watch w = {0};
        fattn_report r = {.struct_size = sizeof r};
        const fattn_gradcheck_options o = {.struct_size = sizeof o, .max_coords = m, .seed = (uint64_t)m};
        cr_assert_eq(fattn_gradcheck(ctx, watched_graph, &w, inputs, 1, &o, &r), FATTN_OK);
        int64_t count = 0, gap = 0, widest = 0;
        for (int e = 0; e < COUNT; ++e) {
            count += w.moved[e];
            gap = w.moved[e] ? 0 : gap + 1;
            widest = gap > widest ? gap : widest;
        }
        cr_assert_eq(count, m, "%ld different coordinates, not %ld", (long)count, (long)m);
        cr_assert_lt(widest, 2 * (COUNT + m - 1) / m, "one from every %ld", (long)(COUNT / m));
        cr_assert(w.moved[0] && w.moved[COUNT - 1]);
        cr_assert_eq(w.evaluations, 2 + 2 * m);
        cr_assert_eq(w.differentiated, 2, "values alone need no gradients");
    }
}

static fattn_var double_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in, (void)user;
    return add(t, in[0], in[0]);
}
static fattn_var square_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in, (void)user;
    return mul(t, in[0], in[0]);
}

Test(gradcheck, steps_are_exact_and_scaled) {
    fattn_report r = {.struct_size = sizeof r};
    /* 45 ulps: only a step that x + h and x - h take exactly gives 2 to six places. */
    for (int i = 0; i < COUNT; ++i) a_data[i] = 1.25 + 0.37 * i / COUNT;
    const fattn_gradcheck_options tiny = {.struct_size = sizeof tiny, .step = 1.03e-14};
    cr_assert_eq(fattn_gradcheck(ctx, double_graph, NULL, inputs, 1, &tiny, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
    /* x^2 near 1e6 is known to 1e-4: an unscaled step of 6e-6 would see nothing else. */
    for (int i = 0; i < COUNT; ++i) a_data[i] = 1e6 / 3 * (1 + i);
    cr_assert_eq(fattn_gradcheck(ctx, square_graph, NULL, inputs, 1, NULL, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

Test(gradcheck, non_finite_gradients_fail) {
    const wave wrong = {.w = 2, .stretch = 1, .at_end = NAN};
    fattn_report r;
    cr_assert_eq(check(wrong, (fattn_gradcheck_options){0}, &r), FATTN_E_MISMATCH);
    cr_assert(r.nonfinite == 1 && r.failed == 1 && isnan(r.worst_got));
    a_data[3] = NAN; /* outputs, and all that is summed with them */
    cr_assert_eq(check((wave){.w = 2, .stretch = 1}, (fattn_gradcheck_options){0}, &r), FATTN_E_MISMATCH);
    cr_assert_eq(r.nonfinite, 2 * COUNT);
}

/* Its first output element never changes: minus infinity, like L of a row without keys. */
static fattn_status log_forward(fattn_op_call *c) {
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e)
        *element(&c->out[0], e) = e ? *element(&c->in[0], e) * *element(&c->in[0], e) : -INFINITY;
    return FATTN_OK;
}
static fattn_status log_backward(fattn_op_call *c) {
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e) {
        const double d = e ? 2 * *element(&c->in[0], e) * *element(&c->d_out[0], e) : 0;
        *element(&c->d_in[0], e) = d + (c->d_in_fresh[0] ? 0 : *element(&c->d_in[0], e));
    }
    return FATTN_OK;
}
static fattn_var infinite_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .attr_size = sizeof(wave),
                                     .n_out = 1,
                                     .name = "infinite",
                                     .infer = wave_infer,
                                     .forward = log_forward,
                                     .backward = log_backward};
    return fattn_op_custom(t, &def, in, 1, user);
}
static fattn_var identity_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)t, (void)n_in, (void)user;
    return in[0];
}

Test(gradcheck, constant_infinities_and_identity_pass) {
    wave unused = {.w = 0};
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_gradcheck(ctx, infinite_graph, &unused, inputs, 1, NULL, &r), FATTN_OK, "%s",
                 fattn_ctx_error(ctx));
    cr_assert_eq(fattn_gradcheck(ctx, identity_graph, NULL, inputs, 1, NULL, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(r.checked, COUNT);
}

static fattn_var no_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)t, (void)in, (void)n_in, (void)user;
    return (fattn_var){0};
}

Test(gradcheck, bad_arguments_are_rejected_and_write_nothing) {
    const wave right = {.w = 2, .stretch = 1};
    fattn_report r = {.struct_size = sizeof r, .checked = -5};
    cr_assert_eq(fattn_gradcheck(NULL, no_graph, NULL, inputs, 1, NULL, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, NULL, NULL, inputs, 1, NULL, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, NULL, 1, NULL, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, inputs, 0, NULL, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, inputs, 1, NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, inputs, 1, NULL, &r), FATTN_E_ARG);
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, &inputs[2], 1, NULL, &r), FATTN_E_ARG);
    fattn_gradcheck_options o = {.struct_size = 0};
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, inputs, 1, &o, &r), FATTN_E_ABI);
    fattn_report no_size = {0};
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, inputs, 1, NULL, &no_size), FATTN_E_ABI);
    fattn_tensor other[] = {inputs[0], inputs[0]};
    other[1].dtype = FATTN_F16;
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, &other[1], 1, NULL, &r), FATTN_E_DTYPE);
    other[1].dtype = FATTN_F32;
    cr_assert_eq(fattn_gradcheck(ctx, no_graph, NULL, other, 2, NULL, &r), FATTN_E_DTYPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "input 1 is f32, another is f64"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(r.checked, -5);

    cr_assert_eq(check(right, (fattn_gradcheck_options){.order = 3}, &r), FATTN_E_ARG);
    cr_assert_eq(check(right, (fattn_gradcheck_options){.step = -1}, &r), FATTN_E_ARG);
    cr_assert_eq(check(right, (fattn_gradcheck_options){.step = NAN}, &r), FATTN_E_ARG);
    cr_assert_eq(check(right, (fattn_gradcheck_options){.max_coords = -1}, &r), FATTN_E_ARG);
    cr_assert_eq(check(right, (fattn_gradcheck_options){.tol = {.rtol = -1}}, &r), FATTN_E_ARG);
    const wave single_out = {.w = 2, .stretch = 1, .out = FATTN_F32};
    cr_assert_eq(check(single_out, (fattn_gradcheck_options){0}, &r), FATTN_E_DTYPE);
    cr_assert(strstr(fattn_ctx_error(ctx), "f32"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
}

/* gelu(a) b; of F32 times *user. */
static fattn_var product(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    fattn_tensor a;
    cr_assert_eq(n_in, 2);
    if (fattn_tape_value(t, in[0], &a)) return (fattn_var){0};
    const fattn_var y = fattn_op_mul(t, fattn_op_gelu(t, in[0]), in[1]);
    if (a.dtype == FATTN_F64) return y;
    static float factor[COUNT];
    for (int e = 0; e < COUNT; ++e) factor[e] = *(const float *)user;
    const fattn_tensor f = fattn_tensor_view(factor, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){ROWS, COLUMNS});
    return fattn_op_mul(t, y, fattn_input(t, &f));
}

Test(gradcheck, gradients_in_f32_meet_differences_in_f64) {
    float values[2][COUNT];
    fattn_tensor x[2];
    for (uint32_t i = 0; i < 2; ++i) {
        x[i] = fattn_tensor_view(values[i], FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){ROWS, COLUMNS});
        const fattn_rng rng = {.seed = 2, .stream = i};
        cr_assert_eq(fattn_tensor_normal(ctx, &x[i], 0, 1, rng), FATTN_OK);
    }
    for (int wrong = 0; wrong < 2; ++wrong) {
        float factor = wrong ? 1 + 0x1p-12f : 1;
        fattn_report r = {.struct_size = sizeof r};
        const fattn_status s = fattn_gradcheck(ctx, product, &factor, x, 2, NULL, &r);
        cr_assert_eq(s, wrong ? FATTN_E_MISMATCH : FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(r.checked, 2 * COUNT);
        /* F32 rounds: a few units of 2^-24 of numbers up to 9. */
        if (!wrong) cr_assert(r.max_abs > 1e-9 && r.max_abs < 9 * 8 * 0x1p-24, "%g", r.max_abs);
    }
    for (long n = 0;; ++n) {
        float factor = 1;
        fattn_report r = {.struct_size = sizeof r};
        memory.left = n;
        const fattn_status s = fattn_gradcheck(ctx, product, &factor, x, 2, NULL, &r);
        memory.left = -1;
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0, "allocation %ld", n);
        if (s == FATTN_OK) break;
        cr_assert_eq(s, FATTN_E_NOMEM, "allocation %ld: %s", n, fattn_status_name(s));
    }
}

static fattn_var linear(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)user;
    cr_assert_eq(n_in, 2);
    return fattn_op_linear(t, in[0], in[1], (fattn_var){0});
}

/* Among 3000 gradients of about 6e4 some are below 100: their rounding errors are those of the large terms of their
   sums. */
/* An input without elements has no coordinates, in either dtype. */
static fattn_var concat_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)user;
    return fattn_op_concat(t, in, n_in, 0);
}

Test(gradcheck, empty_inputs) {
    float x[4] = {1, 2, 3, 4};
    double y[4] = {1, 2, 3, 4};
    for (int n = 0; n < 2; ++n) {
        const fattn_dtype dtype = n ? FATTN_F64 : FATTN_F32;
        const fattn_tensor in[] = {
            fattn_tensor_view(n ? (void *)y : x, dtype, FATTN_CPU, 0, 2, (const int64_t[]){2, 2}),
            fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, 2, (const int64_t[]){0, 2})};
        fattn_report r = {.struct_size = sizeof r};
        cr_assert_eq(fattn_gradcheck(ctx, concat_graph, NULL, in, 2, NULL, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert(r.passed && r.checked == 4);
        cr_assert_eq(fattn_gradcheck(ctx, concat_graph, NULL, &in[1], 1, NULL, &r), FATTN_OK, "%s",
                     fattn_ctx_error(ctx));
        cr_assert(r.passed && r.checked == 0);
    }
}

Test(gradcheck, f32_rounds_in_units_of_the_largest_gradient) {
    enum { N = 40, K = 600 };
    static float x[ROWS * K], w[N * K];
    const fattn_tensor in[2] = {fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){ROWS, K}),
                                fattn_tensor_view(w, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){N, K})};
    for (uint32_t i = 0; i < 2; ++i) {
        const fattn_rng rng = {.seed = 3, .stream = i};
        cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, i ? 1e4 : 1, rng), FATTN_OK);
    }
    fattn_gradcheck_options o = {.struct_size = sizeof o, .max_coords = ROWS * K};
    fattn_report r = {.struct_size = sizeof r};
    cr_assert_eq(fattn_gradcheck(ctx, linear, NULL, in, 2, &o, &r), FATTN_OK, "%s", fattn_ctx_error(ctx));
    o.tol.atol = 0x1p-16; /* a given tolerance is used unchanged */
    cr_assert_eq(fattn_gradcheck(ctx, linear, NULL, in, 2, &o, &r), FATTN_E_MISMATCH);
    cr_assert(r.failed > 0 && r.failed < ROWS * K / 10 && r.worst_input == 0, "%lld", (long long)r.failed);
}

Test(gradcheck, every_allocation_may_fail) {
    const wave right = {.w = 2, .stretch = 1};
    const fattn_gradcheck_options o = {.max_coords = 3, .order = 4};
    fattn_report r;
    long n = 0;
    for (;; ++n) {
        memory.left = n;
        const fattn_status s = check(right, o, &r);
        memory.left = -1;
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0, "allocation %ld", n);
        cr_assert_eq(memory.live, 1);
        if (s == FATTN_OK) break;
        cr_assert_eq(s, FATTN_E_NOMEM, "allocation %ld: %s", n, fattn_status_name(s));
    }
    cr_assert_gt(n, 10);
}
