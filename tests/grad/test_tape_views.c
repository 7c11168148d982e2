/* Views share memory with their base, and so do their gradients: which writes overwrite or add, and what is zeroed.
   New memory is NaN here, so that a gradient that was neither written nor zeroed is found. */
#include "suite.h"
#include "tape_ops.h"

#include <math.h>

#include "autograd_c/tape/tape_nodes.h"
#include "core/tensor/philox.h"

static leaf a, b;
TestSuite(tape_views, .init = open_tape, .fini = close_tape);

/* A variable with memory of its own. */
static fattn_var base_of_shape(int ndim, const int64_t *shape) {
    fattn_tape_destroy(tape); /* for unwritten memory */
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    leaf_init(&a, ndim, shape);
    leaf_init(&b, ndim, shape);
    return mul(tape, fattn_use(tape, &a.p), fattn_use(tape, &b.p));
}

/* Opens v's gradient as an op does, with 1 = overwrites, 0 = adds; then writes x to all elements. */
static int write(fattn_var v, double x) {
    fattn_tensor d;
    uint8_t fresh;
    cr_assert_neq(v.id, 0, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattni_grad_open(tape, v.id, &d, &fresh), FATTN_OK);
    for (int64_t e = 0; e < fattn_tensor_numel(&d); ++e) {
        if (!fresh) cr_assert_not(isnan(*element(&d, e)), "adds to unwritten memory");
        *element(&d, e) = x + (fresh ? 0 : *element(&d, e));
    }
    return fresh;
}
/* Element of the base's gradient; NaN = not written. */
static double peek(fattn_var base, int64_t e) { return *element(&tape->variables[base.id].grad, e); }
static double read(fattn_var v, int64_t e) {
    fattn_tensor d;
    cr_assert_eq(fattni_grad_read(tape, v.id, &d), FATTN_OK);
    return *element(&d, e);
}

Test(tape_views, slices_that_tile_are_all_fresh) {
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int n = 0; n < 6; ++n)
        for (int dim = 0; dim < 3; ++dim) {
            const fattn_var x = base_of_shape(3, (int64_t[]){3, 3, 6});
            const int64_t third = dim == 2 ? 2 : 1;
            fattn_var part[3];
            for (int i = 0; i < 3; ++i) part[i] = slice(tape, x, dim, i * third, (i + 1) * third);
            for (int i = 0; i < 3; ++i) {
                const int p = orders[n][i];
                if (i == 1 && dim == 2) cr_assert(isnan(peek(x, 2 * p)), "nothing was zeroed");
                cr_assert_eq(write(part[p], p + 1), 1, "dimension %d, slice %d", dim, p);
            }
            for (int64_t e = 0; e < 54; ++e) {
                const int64_t index[] = {e / 18, e / 6 % 3, e % 6 / 2};
                cr_assert_eq(read(x, e), (double)index[dim] + 1);
            }
        }
}

/* As q, k, v of [B,S,(Hq+2Hkv)*D], consumed as [B,H,S,D]; k by two ops. */
Test(tape_views, heads_of_a_packed_projection) {
    const fattn_var x = base_of_shape(3, (int64_t[]){2, 3, 8});
    const fattn_var q = slice(tape, x, 2, 0, 4), k = slice(tape, x, 2, 4, 6);
    const fattn_var v = transpose(tape, slice(tape, x, 2, 6, 8));
    cr_assert_eq(write(v, 3), 1);
    cr_assert_eq(write(k, 2), 1);
    cr_assert(isnan(peek(x, 0)));
    cr_assert_eq(write(k, 10), 0);
    cr_assert_eq(write(q, 1), 1);
    for (int64_t e = 0; e < 48; ++e) cr_assert_eq(read(x, e), e % 8 < 4 ? 1 : e % 8 < 6 ? 12 : 3);
    cr_assert_eq(write(x, 100), 0);
    cr_assert_eq(read(k, 0), 112);
}

Test(tape_views, gaps_are_zeroed_when_read) {
    const fattn_var x = base_of_shape(2, (int64_t[]){5, 11});
    cr_assert_eq(write(slice(tape, x, 1, 3, 5), 1), 1);
    cr_assert_eq(write(slice(tape, x, 1, 8, 9), 2), 1);
    cr_assert(isnan(peek(x, 0)) && isnan(peek(x, 5)) && isnan(peek(x, 10)));
    for (int64_t e = 0; e < 55; ++e) {
        const int64_t j = e % 11;
        cr_assert_eq(read(x, e), j == 8 ? 2 : j == 3 || j == 4 ? 1 : 0);
    }
}

/* 8 elements as rows of 3: the last row has 2. */
Test(tape_views, the_last_row_may_be_short) {
    const fattn_var x = base_of_shape(1, (int64_t[]){8});
    cr_assert_eq(write(every(tape, x, 0, 3), 1), 1);
    for (int64_t e = 0; e < 8; ++e) cr_assert_eq(read(x, e), e % 3 == 0, "element %d", (int)e);
    const fattn_var y = base_of_shape(1, (int64_t[]){8});
    cr_assert_eq(write(every(tape, slice(tape, y, 0, 1, 8), 0, 3), 1), 1);
    cr_assert_eq(write(every(tape, y, 0, 3), 2), 1);
    for (int64_t e = 0; e < 8; ++e) cr_assert_eq(read(y, e), e % 3 == 0 ? 2 : e % 3 == 1, "element %d", (int)e);
}

Test(tape_views, overlaps_and_other_forms_zero_the_rest_first) {
    /* Overlapping columns. */
    fattn_var x = base_of_shape(2, (int64_t[]){4, 6});
    cr_assert_eq(write(slice(tape, x, 1, 0, 3), 1), 1);
    cr_assert_eq(write(slice(tape, x, 1, 2, 5), 10), 0);
    for (int64_t e = 0; e < 24; ++e) cr_assert_eq(read(x, e), (e % 6 < 3) + (e % 6 >= 2 && e % 6 < 5 ? 10 : 0));
    /* Columns, then rows; rows, then the whole. */
    x = base_of_shape(2, (int64_t[]){4, 6});
    cr_assert_eq(write(slice(tape, x, 1, 0, 3), 1), 1);
    cr_assert_eq(write(slice(tape, x, 0, 1, 2), 10), 0);
    for (int64_t e = 0; e < 24; ++e) cr_assert_eq(read(x, e), (e % 6 < 3) + (e / 6 == 1 ? 10 : 0));
    x = base_of_shape(2, (int64_t[]){4, 6});
    cr_assert_eq(write(slice(tape, x, 0, 1, 2), 10), 1);
    cr_assert_eq(write(x, 1), 0);
    for (int64_t e = 0; e < 24; ++e) cr_assert_eq(read(x, e), 1 + (e / 6 == 1 ? 10 : 0));
    /* A block inside: no column range. */
    x = base_of_shape(2, (int64_t[]){4, 6});
    cr_assert_eq(write(slice(tape, slice(tape, x, 0, 1, 3), 1, 2, 4), 1), 0);
    for (int64_t e = 0; e < 24; ++e) cr_assert_eq(read(x, e), e / 6 >= 1 && e / 6 < 3 && e % 6 >= 2 && e % 6 < 4);
    /* The whole, then a part. */
    x = base_of_shape(2, (int64_t[]){4, 6});
    cr_assert_eq(write(transpose(tape, x), 1), 1);
    cr_assert_eq(write(slice(tape, x, 1, 5, 6), 1), 0);
    for (int64_t e = 0; e < 24; ++e) cr_assert_eq(read(x, e), 1 + (e % 6 == 5));
}

Test(tape_views, more_runs_than_can_be_tracked) {
    const fattn_var x = base_of_shape(2, (int64_t[]){2, 30});
    for (int64_t j = 0; j < 30; j += 2) /* every second column: 15 runs */
        cr_assert_eq(write(slice(tape, x, 1, j, j + 1), 1), j < 2 * FATTNI_COVER_RUNS);
    for (int64_t e = 0; e < 60; ++e) cr_assert_eq(read(x, e), e % 2 == 0);
}

Test(tape_views, disjoint_slices_in_one_call_need_no_copy) {
    const fattn_var x = base_of_shape(2, (int64_t[]){3, 4});
    const fattn_var left = slice(tape, x, 1, 0, 2), right = slice(tape, x, 1, 2, 4);
    const fattn_var y = mul(tape, left, right);
    cr_assert_eq(fattn_tape_keep_grad(tape, left), FATTN_OK); /* keeps the base's */
    cr_assert_eq(fattn_tape_backward(tape, sum(tape, y)), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_tensor dx, dleft, dright, l, r;
    cr_assert_eq(fattn_tape_grad(tape, x, &dx), FATTN_OK);
    cr_assert_eq(fattn_tape_grad(tape, left, &dleft), FATTN_OK);
    cr_assert_eq(fattn_tape_grad(tape, right, &dright), FATTN_OK);
    cr_assert_eq(fattn_tape_value(tape, left, &l), FATTN_OK);
    cr_assert_eq(fattn_tape_value(tape, right, &r), FATTN_OK);
    cr_assert_eq(dleft.data, dx.data);
    cr_assert_eq((double *)dright.data, (double *)dx.data + 2);
    for (int64_t e = 0; e < 6; ++e) {
        cr_assert_eq(*element(&dleft, e), *element(&r, e));
        cr_assert_eq(*element(&dright, e), *element(&l, e));
    }
    for (int i = 0; i < 12; ++i) cr_assert_eq(a.grad[i], b.value[i] * *element(&dx, i));
}

Test(tape_views, views_of_parameters_add_into_them) {
    leaf_init(&a, 2, (int64_t[]){3, 4});
    for (int i = 0; i < 12; ++i) a.grad[i] = 1000;
    const fattn_var x = fattn_use(tape, &a.p);
    const fattn_var row = slice(tape, x, 0, 1, 2), overlap = slice(tape, x, 0, 1, 2);
    cr_assert_eq(fattn_tape_backward(tape, sum(tape, mul(tape, row, overlap))), FATTN_OK);
    for (int i = 0; i < 12; ++i) cr_assert_eq(a.grad[i], 1000 + (i / 4 == 1 ? 2 * a.value[i] : 0));
    fattn_tensor g;
    cr_assert_eq(fattn_tape_grad(tape, row, &g), FATTN_OK);
    cr_assert_eq(g.data, &a.grad[4]);
}

Test(tape_views, a_view_may_be_the_scalar) {
    const fattn_var x = base_of_shape(2, (int64_t[]){3, 4});
    const fattn_var one = slice(tape, slice(tape, x, 0, 1, 2), 1, 2, 3);
    cr_assert_eq(fattn_tape_backward(tape, one), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < 12; ++i) cr_assert_eq(a.grad[i], i == 6 ? b.value[i] : 0);
}

/* The columns of a reversed slice are those of the slice. */
Test(tape_views, reversed_slices_that_tile_are_all_fresh) {
    for (int dim = 0; dim < 2; ++dim) {
        const fattn_var x = base_of_shape(2, (int64_t[]){6, 4});
        const fattn_var back = reverse(tape, x, dim);
        const fattn_var low = slice(tape, back, dim, 0, 2), rest = slice(tape, back, dim, 2, 6 - 2 * dim);
        cr_assert_eq(write(reverse(tape, low, 1 - dim), 1), 1);
        cr_assert_eq(write(reverse(tape, rest, dim), 2), 1);
        cr_assert_eq(write(low, 10), 0);
        for (int64_t e = 0; e < 24; ++e) {
            const int64_t at = dim ? 3 - e % 4 : 5 - e / 4;
            cr_assert_eq(read(x, e), at < 2 ? 11 : 2, "dimension %d, element %d", dim, (int)e);
        }
    }
}

/* A random graph of slices, steps, transposes, reversals and products over one base, from a seed. It is quadratic in
   every coordinate, so central differences are exact up to rounding. */
typedef struct dice {
    uint64_t seed;
    uint32_t rolls;
} dice;
static int64_t roll(dice *d, int64_t n) {
    const fattni_block counter = {{d->rolls++, 0, 0, 0}};
    return (int64_t)(fattni_philox(d->seed, counter).w[0] % (uint64_t)n);
}
static fattn_tensor value_of(fattn_tape *t, fattn_var v) {
    fattn_tensor x;
    cr_assert_eq(fattn_tape_value(t, v, &x), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return x;
}
static fattn_var random_view(fattn_tape *t, dice *d, fattn_var x) {
    for (int64_t n = roll(d, 4); n > 0; --n) {
        const fattn_tensor v = value_of(t, x);
        const int64_t dim = roll(d, v.ndim), size = v.shape[dim], begin = roll(d, size);
        const int64_t what = roll(d, 6);
        x = what == 0   ? transpose(t, x)
            : what == 1 ? reverse(t, x, dim)
            : what == 2 ? every(t, x, dim, 1 + roll(d, 3))
                        : slice(t, x, dim, begin, begin + 1 + roll(d, size - begin));
    }
    return x;
}
/* Slices both to their common shape: the slices may overlap, or be equal. */
static fattn_var product(fattn_tape *t, dice *d, fattn_var x, fattn_var y) {
    for (int dim = 0; dim < 3; ++dim) {
        const int64_t m = value_of(t, x).shape[dim], n = value_of(t, y).shape[dim];
        const int64_t both = m < n ? m : n, i = roll(d, m - both + 1), j = roll(d, n - both + 1);
        x = slice(t, x, dim, i, i + both);
        y = slice(t, y, dim, j, j + both);
    }
    return mul(t, x, y);
}
static fattn_var random_graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    dice d = *(dice *)user;
    const fattn_var x = mul(t, in[0], in[1]);
    fattn_var loss = sum(t, random_view(t, &d, x));
    for (int64_t n = 1 + roll(&d, 5); n > 0; --n) {
        const fattn_var left = random_view(t, &d, x), right = random_view(t, &d, x);
        const fattn_var term = sum(t, product(t, &d, left, right));
        loss = add(t, loss, term);
    }
    return loss;
}

Test(tape_views, random_graphs_pass_the_gradient_check) {
    int64_t coordinates = 0;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        double data[2][24];
        fattn_tensor in[2];
        for (uint32_t i = 0; i < 2; ++i) {
            in[i] = fattn_tensor_view(data[i], FATTN_F64, FATTN_CPU, 0, 3, (int64_t[]){2, 3, 4});
            cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, 0.5, (fattn_rng){seed, i, 0}), FATTN_OK);
        }
        dice d = {.seed = seed};
        fattn_report r = {.struct_size = sizeof r};
        const fattn_gradcheck_options o = {.struct_size = sizeof o, .step = 0.01};
        const fattn_status s = fattn_gradcheck(ctx, random_graph, &d, in, 2, &o, &r);
        cr_assert_eq(s, FATTN_OK, "seed %lu: %s", (unsigned long)seed, fattn_ctx_error(ctx));
        coordinates += r.checked;
    }
    cr_assert_eq(coordinates, 300 * 48);
}
