/* linear_norm on the device: the bits of linear_residual and layernorm but for the gradient of bias, which it sums in
   another order and before it is rounded; gradients against central differences. */
#include "pair.h"

#include <math.h>
#include <string.h>

static const float eps = 1e-5f;

/* Two of them in a residual stream; the first sum is read by the second, the second by nothing else. */
enum { LAYERS = 2, OF_LAYER = 5, PARAMS = 1 + LAYERS * OF_LAYER, HIDDEN = 24 };
enum { W, BIAS, GAIN, NORM_BIAS, UP };
enum { NORMED, SUMS, DS = SUMS + LAYERS, GRADS = DS + LAYERS, ALL = GRADS + PARAMS };
typedef struct stream {
    bool apart, keeps;
    int64_t rows, columns;
    fattn_dtype dtype, grad;
} stream;

static fattn_var layer(fattn_tape *t, const stream *s, const fattn_var *in, fattn_var x, fattn_var onto,
                       fattn_var *normed) {
    if (!s->apart) return fattn_op_linear_norm(t, x, in[W], in[BIAS], onto, in[GAIN], in[NORM_BIAS], eps, normed);
    const fattn_var sum = fattn_op_linear_residual(t, x, in[W], in[BIAS], onto);
    *normed = fattn_op_layernorm(t, sum, in[GAIN], in[NORM_BIAS], eps);
    return sum;
}

/* Parameter i; `about` is the mean of its elements. */
static fattn_tensor filled(const pair *p, const stream *s, int i, fattn_dtype dtype, double about, double deviation) {
    const int64_t C = s->columns, shapes[][3] = {{2, s->rows, C}, {C, HIDDEN}, {C}, {C}, {C}, {HIDDEN, C}};
    static const int dims[] = {3, 2, 1, 1, 1, 2};
    const int kind = i ? 1 + (i - 1) % OF_LAYER : 0;
    fattn_tensor wide, t;
    MUST(p->gpu, fattn_tensor_alloc(p->gpu, FATTN_F64, dims[kind], shapes[kind], &wide));
    MUST(p->gpu, fattn_tensor_alloc(p->gpu, dtype, dims[kind], shapes[kind], &t));
    MUST(p->gpu, fattn_tensor_normal(p->gpu, &wide, about, deviation, (fattn_rng){.seed = 6, .stream = (uint32_t)i}));
    MUST(p->gpu, fattn_tensor_copy(p->gpu, &t, &wide));
    fattn_tensor_free(p->gpu, &wide);
    return t;
}

/* Outputs and gradients in F64 on the host; those of sums only if they are kept. */
static void run(const pair *p, const stream *s, fattn_tensor out[ALL]) {
    fattn_tape *t;
    fattn_param q[PARAMS];
    fattn_var in[PARAMS], sums[LAYERS + 1], normed, loss;
    fattn_tensor y;
    memset(q, 0, sizeof q);
    memset(out, 0, ALL * sizeof *out);
    MUST(p->gpu, fattn_tape_create(p->gpu, &t));
    for (int i = 0; i < PARAMS; ++i) {
        q[i].value = filled(p, s, i, s->dtype, 0, 0.3);
        q[i].grad = filled(p, s, i, s->grad, 0.25, 0); /* gradients are added to this */
        in[i] = fattn_use(t, &q[i]);
    }
    sums[0] = normed = in[0];
    for (int l = 0; l < LAYERS; ++l) {
        const fattn_var *const own = &in[1 + OF_LAYER * l];
        const fattn_var h = fattn_op_linear_gelu(t, normed, own[UP], (fattn_var){0});
        sums[l + 1] = layer(t, s, own, h, sums[l], &normed);
        if (s->keeps) MUST(p->gpu, fattn_tape_keep_grad(t, sums[l + 1]));
    }
    loss = fattn_op_sum(t, fattn_op_mul(t, fattn_op_silu(t, normed), in[0]), NULL, 0, 0);
    MUST(p->gpu, fattn_tape_backward(t, loss));
    MUST(p->gpu, fattn_tape_value(t, normed, &y));
    out[NORMED] = to_host(p, &y);
    for (int l = 0; l < LAYERS; ++l) {
        MUST(p->gpu, fattn_tape_value(t, sums[l + 1], &y));
        out[SUMS + l] = to_host(p, &y);
        if (!s->keeps) continue;
        MUST(p->gpu, fattn_tape_grad(t, sums[l + 1], &y));
        out[DS + l] = to_host(p, &y);
    }
    for (int i = 0; i < PARAMS; ++i) out[GRADS + i] = to_host(p, &q[i].grad);
    fattn_tape_destroy(t);
    for (int i = 0; i < PARAMS; ++i) fattn_tensor_free(p->gpu, &q[i].value), fattn_tensor_free(p->gpu, &q[i].grad);
}

static bool is_bias(int i) { return i > GRADS && (i - GRADS - 1) % OF_LAYER == BIAS; }

static bool same_bits(const fattn_tensor *a, const fattn_tensor *b) {
    return memcmp(a->data, b->data, (size_t)fattn_tensor_numel(a) * sizeof(double)) == 0;
}

static double unit_of(fattn_dtype dtype) {
    return dtype == FATTN_F64 ? 0x1p-53 : dtype == FATTN_F32 ? 0x1p-24 : dtype == FATTN_F16 ? 0x1p-11 : 0x1p-8;
}

/* Both biases' gradients sum ds, one of them rounded to its dtype: half a unit of each term; F32 sums of at most 16
   rows and of 12 warps, in 16 bits also of four rows: 32 roundings of terms. Then both are rounded. */
static double check_bias(const stream *s, int l, const fattn_tensor *got, const fattn_tensor *want,
                         const fattn_tensor *ds) {
    const int64_t rows = fattn_tensor_numel(ds) / s->columns;
    const double real = s->dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24, u = s->dtype == FATTN_F32 ? 0 : unit_of(s->dtype);
    double apart = 0;
    for (int64_t i = 0; i < s->columns; ++i) {
        const double x = ((const double *)got->data)[i], y = ((const double *)want->data)[i];
        double size = 0.25;
        for (int64_t r = 0; r < rows; ++r) size += fabs(((const double *)ds->data)[r * s->columns + i]);
        const double bound = (u + 32 * real) * size + 2 * unit_of(s->grad) * fabs(y);
        cr_assert(fabs(x - y) <= bound, "%s, %lld x %lld, layer %d, bias %lld: %g, not %g, bound %g",
                  fattn_dtype_name(s->dtype), (long long)rows, (long long)s->columns, l, (long long)i, x, y, bound);
        apart = fmax(apart, fabs(x - y));
    }
    return apart;
}

/* Columns of a warp's row in each of its kernels, of none of 8, and of a block's; few rows and many. */
Test(cuda_linear_norm, has_the_bits_of_two_ops, .timeout = 300) {
    static const int64_t columns[] = {8, 120, 128, 200, 256, 384, 30, 512, 640, 768, 1000, 1024, 1032};
    static const fattn_dtype types[][2] = {{FATTN_BF16, FATTN_F32},
                                           {FATTN_BF16, FATTN_BF16},
                                           {FATTN_F16, FATTN_F32},
                                           {FATTN_F32, FATTN_F32},
                                           {FATTN_F64, FATTN_F64}};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 13 * 5 * 2; ++n) {
        stream s = {.keeps = true,
                    .rows = n % 2 ? 9 : 1100,
                    .columns = columns[n / 10],
                    .dtype = types[n / 2 % 5][0],
                    .grad = types[n / 2 % 5][1]};
        fattn_tensor one[ALL], two[ALL], unkept[ALL];
        run(&p, &s, one);
        s.keeps = false;
        run(&p, &s, unkept);
        s.keeps = s.apart = true;
        run(&p, &s, two);
        for (int i = 0; i < ALL; ++i) {
            if (i >= GRADS) cr_assert(same_bits(&one[i], &unkept[i]), "%d: output %d, not kept", n, i);
            if (!is_bias(i))
                cr_assert(same_bits(&one[i], &two[i]), "%s, %lld rows, %lld columns: output %d",
                          fattn_dtype_name(s.dtype), (long long)s.rows, (long long)s.columns, i);
        }
        for (int l = 0; l < LAYERS; ++l) {
            const int i = GRADS + 1 + OF_LAYER * l + BIAS;
            const double apart = check_bias(&s, l, &one[i], &two[i], &one[DS + l]);
            /* Else they were summed in the same way, not in the norm's kernel. */
            if (unit_of(s.dtype) >= 0x1p-11 && s.grad == FATTN_F32 && s.columns % 8 == 0 && s.columns <= 1024)
                cr_assert_gt(apart, 0, "%s, %lld columns", fattn_dtype_name(s.dtype), (long long)s.columns);
        }
        for (int i = 0; i < ALL; ++i) {
            fattn_tensor_free(p.cpu, &one[i]);
            fattn_tensor_free(p.cpu, &two[i]);
            fattn_tensor_free(p.cpu, &unkept[i]);
        }
    }
    pair_free(&p);
}

static fattn_var graph(fattn_tape *t, const fattn_var *in, int n, void *user) {
    fattn_var of[2];
    (void)n;
    of[0] = fattn_op_linear_norm(t, in[0], in[1], in[2], in[3], in[4], in[5], eps, &of[1]);
    return user ? of[1] : fattn_op_concat(t, of, 2, 0); /* ds is overwritten, or added to */
}

/* F32 in the kernel that sums three, F64 in others. */
Test(cuda_linear_norm, differences) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32};
    pair p = pair_or_skip(0);
    for (int k = 0; k < 4; ++k) {
        const int64_t shapes[6][3] = {{3, 13, 12}, {16, 12}, {16}, {3, 13, 16}, {16}, {16}};
        static const int dims[6] = {3, 2, 1, 3, 1, 1};
        fattn_tensor in[6];
        for (int i = 0; i < 6; ++i) {
            fattn_tensor wide;
            MUST(p.gpu, fattn_tensor_alloc(p.gpu, FATTN_F64, dims[i], shapes[i], &wide));
            MUST(p.gpu, fattn_tensor_alloc(p.gpu, types[k % 2], dims[i], shapes[i], &in[i]));
            MUST(p.gpu, fattn_tensor_normal(p.gpu, &wide, 0, 0.7, (fattn_rng){.seed = 8, .stream = (uint32_t)i}));
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &in[i], &wide));
            fattn_tensor_free(p.gpu, &wide);
        }
        const fattn_gradcheck_options o = {.struct_size = sizeof o, .max_coords = 24};
        fattn_report r = {.struct_size = sizeof r};
        cr_expect_eq(fattn_gradcheck(p.gpu, graph, k / 2 ? &p : NULL, in, 6, &o, &r), FATTN_OK, "%s, %d: %s",
                     fattn_dtype_name(types[k % 2]), k, fattn_ctx_error(p.gpu));
        cr_expect_gt(r.checked, 0);
        for (int i = 0; i < 6; ++i) fattn_tensor_free(p.gpu, &in[i]);
    }
    pair_free(&p);
}
