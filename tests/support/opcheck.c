#include "opcheck.h"

#include "core/base/internal.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Memory filled with NaN. */
static void *poisoned(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)s;
    void *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    return p ? memset(p, 0xff, bytes) : NULL;
}

static void release(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)bytes, (void)s;
    free(p);
}

static fattn_ctx *capped(int threads, int isa) {
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .cpu_threads = threads, .arch_cap = isa, .allocator = {poisoned, release, NULL}};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

static fattn_ctx *context(int threads) { return capped(threads, 0); }

static int64_t offset_of(const fattn_tensor *t, int64_t e) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += e % t->shape[d] * t->stride[d];
        e /= t->shape[d];
    }
    return offset;
}

static double load(const fattn_tensor *t, int64_t e) { return fattni_load(t->data, t->dtype, offset_of(t, e)); }

static void store(const fattn_tensor *t, int64_t e, double x) { fattni_store(t->data, t->dtype, offset_of(t, e), x); }

/* y = weight[0] in[0] + weight[1] in[1]; one input is a copy. */
typedef struct weights {
    double w[2];
} weights;

static fattn_status sum_infer(fattn_op_call *c) {
    c->out[0].ndim = c->in[0].ndim;
    c->out[0].dtype = c->in[0].dtype;
    memcpy(c->out[0].shape, c->in[0].shape, sizeof c->out[0].shape);
    return FATTN_OK;
}

static fattn_status sum_forward(fattn_op_call *c) {
    const weights *a = c->attr;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]); ++e) {
        double y = 0;
        for (int i = 0; i < c->n_in; ++i) y += a->w[i] * load(&c->in[i], e);
        store(&c->out[0], e, y);
    }
    return FATTN_OK;
}

static fattn_status sum_backward(fattn_op_call *c) {
    const weights *a = c->attr;
    for (int i = 0; i < c->n_in; ++i)
        for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]) && c->d_in[i].data; ++e)
            store(&c->d_in[i], e, a->w[i] * load(&c->d_out[0], e) + (c->d_in_fresh[i] ? 0 : load(&c->d_in[i], e)));
    return FATTN_OK;
}

static const fattn_op_def sum_def = {.struct_size = sizeof sum_def,
                                     .attr_size = sizeof(weights),
                                     .n_out = 1,
                                     .name = "sum",
                                     .infer = sum_infer,
                                     .forward = sum_forward,
                                     .backward = sum_backward};

/* A strided view of a one-dimensional input. */
typedef struct layout {
    int64_t offset, extent; /* extent: elements of the input */
    int ndim;
    int64_t shape[FATTN_MAX_DIMS], stride[FATTN_MAX_DIMS];
} layout;

static fattn_status view_infer(fattn_op_call *c) {
    const layout *l = c->attr;
    fattn_tensor *y = &c->out[0];
    *y = c->in[0];
    y->data = (char *)y->data + l->offset * (int64_t)fattn_dtype_size((fattn_dtype)y->dtype);
    y->ndim = l->ndim;
    memcpy(y->shape, l->shape, sizeof y->shape);
    memcpy(y->stride, l->stride, sizeof y->stride);
    return FATTN_OK;
}

static const fattn_op_def view_def = {
    .struct_size = sizeof view_def, .attr_size = sizeof(layout), .n_out = 1, .name = "view", .infer = view_infer};

static double cotangent(int64_t e) { return cos(1.0 + 0.7 * (double)e) + 0.25; }

static fattn_status contract_infer(fattn_op_call *c) {
    c->out[0].dtype = c->in[0].dtype;
    return FATTN_OK;
}

static fattn_status contract_forward(fattn_op_call *c) {
    double sum = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e) sum += cotangent(e) * load(&c->in[0], e);
    store(&c->out[0], 0, sum);
    return FATTN_OK;
}

static fattn_status contract_backward(fattn_op_call *c) {
    const double d = load(&c->d_out[0], 0);
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]) && c->d_in[0].data; ++e)
        store(&c->d_in[0], e, d * cotangent(e) + (c->d_in_fresh[0] ? 0 : load(&c->d_in[0], e)));
    return FATTN_OK;
}

static const fattn_op_def contract_def = {.struct_size = sizeof contract_def,
                                          .n_out = 1,
                                          .name = "contract",
                                          .infer = contract_infer,
                                          .forward = contract_forward,
                                          .backward = contract_backward};

fattn_var op_contract(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &contract_def, &x, 1, NULL); }

/* The position of an input in its parameter. Gaps are 2 elements, the offset 1. */
static layout layout_of(const op_input *x, op_surrounding how) {
    layout l = {.ndim = x->ndim};
    memcpy(l.shape, x->shape, sizeof l.shape);
    int order[FATTN_MAX_DIMS], n = 0; /* from the innermost dimension out */
    if (how == OP_VIEWS || how == OP_STRIDED) {
        l.offset = 1;
        if (how == OP_VIEWS && x->ndim) order[n++] = x->ndim - 1;
        for (int d = 0; n < x->ndim; ++d) order[n++] = d;
    } else {
        for (int d = x->ndim - 1; d >= 0; --d) order[n++] = d;
    }
    int64_t stride = how == OP_STRIDED ? 3 : 1;
    for (int k = 0; k < n; ++k) {
        l.stride[order[k]] = stride;
        stride *= x->shape[order[k]];
        if (how == OP_VIEWS && k == 0) stride += 2;
    }
    l.extent = l.offset + (n ? stride : 1);
    return l;
}

static bool is_moved(op_surrounding how) { return how == OP_VIEWS || how == OP_STRIDED; }

/* Records the op on the parameters in this surrounding. */
static fattn_var surround(fattn_tape *t, const op_case *c, op_surrounding how, const fattn_var *params) {
    fattn_var in[OPCHECK_INPUTS] = {{0}};
    for (int i = 0; i < c->n; ++i) {
        if (c->in[i].absent) continue;
        const layout l = layout_of(&c->in[i], how);
        in[i] = params[i];
        if (c->in[i].classes) continue;
        if (is_moved(how))
            in[i] = fattn_op_custom(t, &view_def, &in[i], 1, &l);
        else if (how != OP_PLAIN)
            in[i] = fattn_op_custom(t, &sum_def, &in[i], 1, &(weights){{1}});
    }
    const fattn_var y = c->graph(t, in);
    if (how != OP_TWICE) return y;
    return fattn_op_custom(t, &sum_def, (fattn_var[]){y, c->graph(t, in)}, 2, &(weights){{1, 2}});
}

/* Numbers of input i, exact in F32: the same for every dtype. */
static double number(const op_input *x, int i, int64_t e) {
    const uint64_t mixed =
        ((uint64_t)e * 0x9e3779b97f4a7c15u + (uint64_t)i * 0xda942042e4dd58b5u + 0x1234567u) * 0xd1342543de82ef95u;
    const uint64_t bits = mixed ^ (mixed >> 31);
    if (x->classes) return e % 5 == 4 ? (double)x->ignore : (double)((bits >> 8) % (uint64_t)x->classes);
    double sum = 0; /* of four uniform numbers: nearly normal, within 3.5 */
    for (int k = 0; k < 4; ++k) sum += (double)(bits >> (16 * k) & 0xffff) * 0x1p-16 - 0.5;
    return (double)(float)(sum * 1.7);
}

/* The parameter of input i: as large as its layout needs. */
static fattn_tensor parameter(fattn_ctx *ctx, const op_case *c, int i, op_surrounding how, fattn_dtype dtype) {
    const op_input *x = &c->in[i];
    const fattn_dtype own = x->classes ? FATTN_I32 : dtype;
    const bool moved = is_moved(how) && !x->classes;
    const layout l = layout_of(x, moved ? how : OP_PLAIN);
    fattn_tensor t;
    if (moved)
        cr_assert_eq(fattn_tensor_alloc(ctx, own, 1, &l.extent, &t), FATTN_OK);
    else
        cr_assert_eq(fattn_tensor_alloc(ctx, own, x->ndim, x->shape, &t), FATTN_OK);
    for (int64_t e = 0; e < fattn_tensor_numel(&t); ++e)
        store(&t, e, 99); /* gaps between the elements are not part of the input */
    fattn_tensor view = t;
    view.data = t.data ? (char *)t.data + l.offset * (int64_t)fattn_dtype_size(own) : NULL;
    view.ndim = x->ndim;
    memcpy(view.shape, l.shape, sizeof view.shape);
    memcpy(view.stride, l.stride, sizeof view.stride);
    for (int64_t e = 0; e < fattn_tensor_numel(&view); ++e) store(&view, e, number(x, i, e));
    return t;
}

static fattn_tensor kept(const fattn_tensor *t) {
    fattn_tensor copy = fattn_tensor_view(malloc((size_t)fattn_tensor_numel(t) * 8 + 8), (fattn_dtype)t->dtype,
                                          FATTN_CPU, 0, t->ndim, t->shape);
    for (int64_t e = 0; e < fattn_tensor_numel(t); ++e) store(&copy, e, load(t, e));
    return copy;
}

static op_result run_in(fattn_ctx *ctx, const op_case *c, op_surrounding how, fattn_dtype dtype) {
    fattn_tape *t;
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    fattn_param p[OPCHECK_INPUTS] = {{.flags = 0}};
    fattn_var in[OPCHECK_INPUTS] = {{0}};
    op_result r = {.y = {.data = NULL}};
    for (int i = 0; i < c->n; ++i) {
        if (c->in[i].absent) continue;
        p[i].value = parameter(ctx, c, i, how, dtype);
        if (c->in[i].classes) {
            in[i] = fattn_input(t, &p[i].value);
            continue;
        }
        cr_assert_eq(fattn_tensor_alloc(ctx, dtype, p[i].value.ndim, p[i].value.shape, &p[i].grad), FATTN_OK);
        for (int64_t e = 0; e < fattn_tensor_numel(&p[i].grad); ++e)
            store(&p[i].grad, e, 1); /* gradients are added to what is there */
        in[i] = fattn_use(t, &p[i]);
    }
    const fattn_var y = surround(t, c, how, in);
    const fattn_var s = op_contract(t, y);
    cr_assert_eq(fattn_tape_backward(t, s), FATTN_OK, "%s: %s", c->name, fattn_ctx_error(ctx));
    fattn_tensor value;
    cr_assert_eq(fattn_tape_value(t, y, &value), FATTN_OK);
    r.y = kept(&value);
    for (int i = 0; i < c->n; ++i) {
        if (c->in[i].absent) continue;
        if (!c->in[i].classes) {
            const layout l = layout_of(&c->in[i], how);
            fattn_tensor view = p[i].grad;
            if (view.data) view.data = (char *)view.data + l.offset * (int64_t)fattn_dtype_size(dtype);
            view.ndim = l.ndim;
            memcpy(view.shape, l.shape, sizeof view.shape);
            memcpy(view.stride, l.stride, sizeof view.stride);
            r.d[i] = kept(&view);
            for (int64_t e = 0; e < fattn_tensor_numel(&view); ++e) store(&r.d[i], e, load(&r.d[i], e) - 1);
        }
        fattn_tensor_free(ctx, &p[i].grad);
        fattn_tensor_free(ctx, &p[i].value);
    }
    fattn_tape_destroy(t);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
    return r;
}

op_result op_run(const op_case *c, op_surrounding how, fattn_dtype dtype, int threads) {
    return run_in(context(threads), c, how, dtype);
}

void op_release(op_result *r) {
    free(r->y.data);
    for (int i = 0; i < OPCHECK_INPUTS; ++i) free(r->d[i].data);
}

static const char *const surroundings[] = {"plain", "fresh", "twice", "views", "strided"};

static bool applies(const op_case *c, int how) { return how != OP_STRIDED || c->any_strides; }

/* |got - want| <= roundings eps (largest |want|): in the worst case all roundings, of numbers no larger than
   the sums of this case, add up. Two more come from op_run's gradients. */
static void compare(const op_case *c, const char *what, const fattn_tensor *got, const fattn_tensor *want,
                    double factor) {
    const double eps = got->dtype == FATTN_F32 ? FLT_EPSILON : DBL_EPSILON;
    double largest = 1;
    cr_assert_eq(fattn_tensor_numel(got), fattn_tensor_numel(want), "%s: %s", c->name, what);
    for (int64_t e = 0; e < fattn_tensor_numel(want); ++e) largest = fmax(largest, fabs(load(want, e)));
    for (int64_t e = 0; e < fattn_tensor_numel(want); ++e)
        cr_assert(fabs(load(got, e) - factor * load(want, e)) <= (c->roundings + 2) * eps * factor * largest,
                  "%s: %s[%lld] is %.17g, not %.17g", c->name, what, (long long)e, load(got, e),
                  factor * load(want, e));
}

/* y and the gradients by definition. */
static op_result expected(const op_case *c, const op_result *like) {
    op_result want = {.y = kept(&like->y)};
    double *in[OPCHECK_INPUTS] = {NULL}, *d[OPCHECK_INPUTS] = {NULL};
    int32_t *ids[OPCHECK_INPUTS] = {NULL};
    for (int i = 0; i < c->n; ++i) {
        if (c->in[i].absent) continue;
        const layout l = layout_of(&c->in[i], OP_PLAIN);
        in[i] = malloc((size_t)(l.extent + 1) * sizeof(double));
        ids[i] = malloc((size_t)(l.extent + 1) * sizeof(int32_t));
        for (int64_t e = 0; e < l.extent; ++e) {
            in[i][e] = number(&c->in[i], i, e);
            ids[i][e] = (int32_t)in[i][e];
        }
        if (!like->d[i].data) continue;
        want.d[i] = kept(&like->d[i]);
        d[i] = want.d[i].data;
    }
    c->reference((const double *const *)in, (const int32_t *const *)ids, want.y.data);
    const int64_t n = fattn_tensor_numel(&want.y);
    double *dy = malloc((size_t)(n + 1) * sizeof(double));
    for (int64_t e = 0; e < n; ++e) dy[e] = cotangent(e);
    if (c->gradient) c->gradient((const double *const *)in, (const int32_t *const *)ids, dy, d);
    free(dy);
    for (int i = 0; i < c->n; ++i) free(in[i]), free(ids[i]);
    return want;
}

void opcheck_values(const op_case *c) {
    for (int how = 0; how < OP_SURROUNDINGS; ++how) {
        if (!applies(c, how)) continue;
        op_result r = op_run(c, (op_surrounding)how, FATTN_F64, 2), want = expected(c, &r);
        const double factor = how == OP_TWICE ? 3 : 1;
        char what[32];
        snprintf(what, sizeof what, "y (%s)", surroundings[how]);
        compare(c, what, &r.y, &want.y, factor);
        for (int i = 0; i < c->n && c->gradient; ++i) {
            snprintf(what, sizeof what, "d[%d] (%s)", i, surroundings[how]);
            if (want.d[i].data) compare(c, what, &r.d[i], &want.d[i], factor);
        }
        op_release(&want);
        op_release(&r);
    }
}

typedef struct surrounded {
    const op_case *c;
    op_surrounding how;
} surrounded;

static fattn_var surrounded_graph(fattn_tape *t, const fattn_var *in, int n, void *user) {
    const surrounded *s = user;
    fattn_var all[OPCHECK_INPUTS] = {{0}};
    for (int i = 0, k = 0; i < s->c->n && k < n; ++i)
        if (!s->c->in[i].absent) all[i] = in[k++];
    return surround(t, s->c, s->how, all);
}

void opcheck_gradients(const op_case *c) {
    for (int how = 0; how < OP_SURROUNDINGS; ++how) {
        if (!applies(c, how)) continue;
        fattn_ctx *ctx = context(2);
        fattn_tensor in[OPCHECK_INPUTS];
        int n = 0;
        for (int i = 0; i < c->n; ++i)
            if (!c->in[i].absent) in[n++] = parameter(ctx, c, i, (op_surrounding)how, FATTN_F64);
        surrounded s = {c, (op_surrounding)how};
        const fattn_gradcheck_options o = {.struct_size = sizeof o, .order = 4, .seed = 7};
        fattn_report report = {.struct_size = sizeof report};
        const fattn_status status = fattn_gradcheck(ctx, surrounded_graph, &s, in, n, &o, &report);
        cr_assert_eq(status, FATTN_OK, "%s (%s): %s", c->name, surroundings[how], fattn_ctx_error(ctx));
        cr_assert_gt(report.checked, 0);
        for (int i = 0; i < n; ++i) fattn_tensor_free(ctx, &in[i]);
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
        fattn_ctx_destroy(ctx);
    }
}

void opcheck_f32(const op_case *c) {
    for (int how = 0; how < OP_SURROUNDINGS; ++how) {
        if (!applies(c, how)) continue;
        op_result narrow = op_run(c, (op_surrounding)how, FATTN_F32, 2);
        op_result wide = op_run(c, (op_surrounding)how, FATTN_F64, 2);
        compare(c, "y in f32", &narrow.y, &wide.y, 1);
        for (int i = 0; i < c->n; ++i)
            if (wide.d[i].data) compare(c, "gradient in f32", &narrow.d[i], &wide.d[i], 1);
        op_release(&narrow);
        op_release(&wide);
    }
}

static void same_bits(const op_case *c, const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    if (bytes) cr_assert(memcmp(a->data, b->data, bytes) == 0, "%s: bits depend on the threads", c->name);
}

void opcheck_threads(const op_case *c) {
    for (int wide = 0; wide < 2; ++wide) {
        const fattn_dtype dtype = wide ? FATTN_F64 : FATTN_F32;
        op_result one = run_in(capped(1, 1), c, OP_FRESH, dtype);
        for (int n = 2; n <= 3; ++n) {
            op_result more = run_in(capped(n, n), c, OP_FRESH, dtype);
            same_bits(c, &one.y, &more.y);
            for (int i = 0; i < c->n; ++i) same_bits(c, &one.d[i], &more.d[i]);
            op_release(&more);
        }
        op_release(&one);
    }
}

void opcheck(const op_case *c) {
    opcheck_values(c);
    opcheck_gradients(c);
    opcheck_f32(c);
    opcheck_threads(c);
}

void opcheck_errors(const op_error *list, int count) {
    for (int k = 0; k < count; ++k) {
        const op_error *r = &list[k];
        fattn_ctx *ctx = context(2);
        fattn_tape *t;
        cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
        fattn_tensor x[OPCHECK_INPUTS];
        fattn_var in[OPCHECK_INPUTS] = {{0}};
        for (int i = 0; i < r->n; ++i) {
            if (!r->in[i].dtype) continue;
            cr_assert_eq(fattn_tensor_alloc(ctx, r->in[i].dtype, r->in[i].ndim, r->in[i].shape, &x[i]), FATTN_OK);
            for (int64_t e = 0; e < fattn_tensor_numel(&x[i]); ++e) store(&x[i], e, r->in[i].fill);
            in[i] = fattn_input(t, &x[i]);
        }
        cr_assert_eq(r->graph(t, in).id, 0, "%s: accepted", r->message);
        cr_assert_eq(fattn_tape_status(t), r->status, "%s: %s", r->message, fattn_status_name(fattn_tape_status(t)));
        cr_assert(strstr(fattn_ctx_error(ctx), r->message), "\"%s\" lacks \"%s\"", fattn_ctx_error(ctx), r->message);
        for (int i = 0; i < r->n; ++i)
            if (r->in[i].dtype) fattn_tensor_free(ctx, &x[i]);
        fattn_tape_destroy(t);
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
        fattn_ctx_destroy(ctx);
    }
}
