/* Products with one row with the launch and the kernels of a GPU, on the host, against sums in double. */
#include "attention.h"

#include "autograd_c/ops/matrix/row_product.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SPARE = 8 }; /* elements behind each row of w, and behind each result */

typedef struct product_case {
    fattn_dtype dtype, c_dtype;
    int64_t N, K;
    bool row, onto, gelu, keeps; /* keeps: z is wanted beside gelu(z) */
    enum { PLAIN, LAYER, LAYER_BIAS, RMS } norm;
    double size; /* of x; 0: 1 */
} product_case;

/* n numbers from -1 to 1 as elements of dtype. */
static fattn_tensor numbers(fattn_ctx *ctx, fattn_dtype dtype, int64_t n, uint32_t stream) {
    fattn_tensor wide, t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, &n, &wide), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, 1, &n, &t), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &wide, 0, 0.5, (fattn_rng){.seed = 4, .stream = stream}), FATTN_OK);
    cr_assert_eq(fattn_tensor_copy(ctx, &t, &wide), FATTN_OK);
    fattn_tensor_free(ctx, &wide);
    return t;
}
static double at(const fattn_tensor *t, int64_t i) { return attention_get(t, &i); }
static void put(fattn_tensor *t, int64_t i, double x) { attention_set(t, &i, x); }

/* Half a step of a result of this size. */
static double rounding(fattn_dtype dtype, double x) {
    const double unit = dtype == FATTN_F32 ? 0x1p-24 : dtype == FATTN_F16 ? 0x1p-11 : 0x1p-8;
    return unit * fabs(x) + 0x1p-25;
}

/* gelu's factor: its exponential and quotient are within 2^-20, and so is the slope 1.13 times the error of z. */
static void check_element(const product_case *c, const fattn_tensor *t, int64_t n, double z, double error) {
    const double gate = 1 / (1 + exp(-1.5957691216057308 * (z + 0.044715 * z * z * z))), y = z * gate;
    const fattn_tensor *const of_z = &t[0], *const of_y = &t[1];
    if (!c->gelu || c->keeps)
        cr_assert(fabs(at(of_z, n) - z) <= error + rounding(c->c_dtype, z), "%s N %lld K %lld: z[%lld] is %g, not %g",
                  fattn_dtype_name(c->dtype), (long long)c->N, (long long)c->K, (long long)n, at(of_z, n), z);
    if (c->gelu)
        cr_assert(fabs(at(of_y, n) - y) <= 1.13 * error + 0x1p-20 * fabs(y) + rounding(c->c_dtype, y),
                  "%s N %lld K %lld: gelu[%lld] is %g, not %g", fattn_dtype_name(c->dtype), (long long)c->N,
                  (long long)c->K, (long long)n, at(of_y, n), y);
}

/* What a norm makes of x, and by how much each element may be off: roundings of F32 sums of K / 32 terms or less, five
   and eight more, and of a quotient; then its own. */
static void normalize(const product_case *c, const fattn_tensor *x, const fattn_tensor *gain, const fattn_tensor *bias,
                      double *h, double *error) {
    const double eps = 1e-5, K = (double)c->K,
                 unit = c->dtype == FATTN_F32   ? 0x1p-24
                        : c->dtype == FATTN_F16 ? 0x1p-11
                                                : 0x1p-8;
    double mean = 0, square = 0, size = 0;
    for (int64_t k = 0; k < c->K && c->norm != RMS; ++k) mean += at(x, k) / K;
    for (int64_t k = 0; k < c->K; ++k) square += (at(x, k) - mean) * (at(x, k) - mean) / K, size += fabs(at(x, k)) / K;
    const double r = 1 / sqrt(square + eps), relative = 32 * 0x1p-24;
    for (int64_t k = 0; k < c->K; ++k) {
        const double normal = (at(x, k) - mean) * r * at(gain, k), added = c->norm == LAYER_BIAS ? at(bias, k) : 0;
        h[k] = normal + added;
        error[k] = relative * (fabs(normal) + size * r * fabs(at(gain, k)) + fabs(added)) + unit * fabs(h[k]) + 0x1p-25;
    }
}

static void check(const product_case *c, int sms) {
    fattn_ctx *const ctx = attention_context(1);
    const int64_t pitch = c->K + SPARE, room = c->N + SPARE;
    fattn_tensor x = numbers(ctx, c->dtype, c->K, 0), w = numbers(ctx, c->dtype, c->N * pitch, 1);
    fattn_tensor gain = numbers(ctx, c->dtype, c->K, 6), bias = numbers(ctx, c->dtype, c->K, 7);
    fattn_tensor row = numbers(ctx, c->dtype, c->N, 2), onto = numbers(ctx, c->c_dtype, c->N, 3);
    fattn_tensor out[2] = {numbers(ctx, c->c_dtype, room, 4), numbers(ctx, c->c_dtype, room, 5)};
    fattn_tensor old[2] = {numbers(ctx, c->c_dtype, room, 4), numbers(ctx, c->c_dtype, room, 5)};
    fattni_cuda_gemm g = {.dtype = c->dtype,
                          .c_dtype = c->c_dtype,
                          .trans_b = true,
                          .batches = 1,
                          .M = 1,
                          .N = c->N,
                          .K = c->K,
                          .a = x.data,
                          .b = w.data,
                          .c = out[0].data,
                          .lda = c->K,
                          .ldb = pitch,
                          .ldc = c->N,
                          .alpha = 1,
                          .row = c->row ? row.data : NULL,
                          .from = c->onto ? onto.data : NULL,
                          .gelu = c->gelu ? out[1].data : NULL};
    if (c->gelu && !c->keeps) g.c = out[1].data;
    const fattni_row_norm norm = {
        .gain = gain.data, .bias = c->norm == LAYER_BIAS ? bias.data : NULL, .eps = 1e-5, .centred = c->norm != RMS};
    double *const h = calloc((size_t)c->K, sizeof *h), *const off = calloc((size_t)c->K, sizeof *off);
    for (int64_t k = 0; k < c->K && c->size > 0; ++k) put(&x, k, at(&x, k) * c->size);
    if (c->norm)
        normalize(c, &x, &gain, &bias, h, off);
    else
        for (int64_t k = 0; k < c->K; ++k) h[k] = at(&x, k);
    ctx->gpu.sms = sms;
    cr_assert(fattni_cuda_is_row_product(&g, c->norm ? &norm : NULL));
    cr_assert_eq(fattni_cuda_row_product(ctx, &g, c->gelu, c->norm ? &norm : NULL), FATTN_OK);
    for (int64_t n = 0; n < c->N; ++n) {
        double z = 0, size = 0, of_norm = 0;
        for (int64_t k = 0; k < c->K; ++k) {
            const double term = h[k] * at(&w, n * pitch + k);
            z += term, size += fabs(term), of_norm += off[k] * fabs(at(&w, n * pitch + k));
        }
        if (c->row) z += at(&row, n), size += fabs(at(&row, n));
        if (c->onto) z += at(&onto, n), size += fabs(at(&onto, n));
        /* Roundings of a lane's sums, of which there are two, then of sums over lanes, warps, row and onto. */
        const double roundings = (double)c->K / 64 + 1 + 1 + 5 + FATTNI_ROW_PRODUCT_WARPS + 2;
        check_element(c, out, n, z, roundings * 0x1p-24 * size + of_norm);
    }
    for (int t = 0; t < 2; ++t) /* nothing else is written */
        for (int64_t n = (t == 0 ? !c->gelu || c->keeps : c->gelu) ? c->N : 0; n < room; ++n)
            cr_assert_eq(at(&out[t], n), at(&old[t], n), "element %lld of output %d was written", (long long)n, t);
    for (int t = 0; t < 2; ++t) fattn_tensor_free(ctx, &out[t]), fattn_tensor_free(ctx, &old[t]);
    free(h), free(off);
    fattn_tensor_free(ctx, &gain), fattn_tensor_free(ctx, &bias);
    fattn_tensor_free(ctx, &x), fattn_tensor_free(ctx, &w), fattn_tensor_free(ctx, &row), fattn_tensor_free(ctx, &onto);
    fattn_ctx_destroy(ctx);
}

/* Rows of w that 1, 2, 4 and 8 warps share, few and many on the GPU; lanes without a pack, and with several rounds. */
static void walk(fattn_dtype dtype) {
    static const int64_t sizes[][2] = {{1, 8},     {5, 264},  {67, 768},  {300, 96},
                                       {33, 1600}, {9, 3072}, {20, 6400}, {3, 20000}};
    static const int sms[] = {1, 132, 8};
    for (int n = 0; n < 8; ++n)
        for (int with = 0; with < 6; ++with) {
            product_case c = {.dtype = dtype,
                              .c_dtype = with == 1 ? FATTN_F32 : dtype,
                              .N = sizes[n][0],
                              .K = sizes[n][1],
                              .row = with % 2 > 0,
                              .onto = with / 2 == 1,
                              .gelu = with / 2 == 2,
                              .keeps = with == 5};
            check(&c, sms[(n + with) % 3]);
            c.norm = 1 + (n + with) % 3;
            if (c.K <= FATTNI_ROW_PRODUCT_NORM_COLUMNS) check(&c, sms[(n + with) % 3]);
        }
}
Test(emulated_row_product, f32, .timeout = 300) { walk(FATTN_F32); }
Test(emulated_row_product, f16, .timeout = 300) { walk(FATTN_F16); }
Test(emulated_row_product, bf16, .timeout = 300) { walk(FATTN_BF16); }

/* Rows whose squares are beyond the ends of F32. */
Test(emulated_row_product, norms_of_extreme_rows) {
    for (int n = 0; n < 2; ++n) {
        product_case c = {.dtype = FATTN_F32, .c_dtype = FATTN_F32, .N = 40, .K = 512, .row = true, .norm = LAYER_BIAS};
        c.size = n ? 1e30 : 1e-30;
        check(&c, 132);
        c.norm = RMS, c.dtype = c.c_dtype = FATTN_BF16;
        check(&c, 132);
    }
}

/* Products that cuBLAS computes, norms that are ops of their own. */
Test(emulated_row_product, others) {
    uint32_t memory[8] = {0};
    char *const p = (char *)memory + (16 - (uintptr_t)memory % 16) % 16;
    const fattni_row_norm norms[] = {{.gain = p}, {.gain = p, .bias = p}, {.gain = p + 4}, {.gain = p, .bias = p + 8}};
    const fattni_cuda_gemm one = {.dtype = FATTN_BF16,
                                  .c_dtype = FATTN_BF16,
                                  .trans_b = true,
                                  .batches = 1,
                                  .M = 1,
                                  .N = 8,
                                  .K = 8,
                                  .a = p,
                                  .b = p,
                                  .c = p,
                                  .ldb = 8,
                                  .alpha = 1};
    enum { OTHERS = 12 };
    fattni_cuda_gemm g[OTHERS];
    for (int n = 0; n < OTHERS; ++n) g[n] = one;
    g[0].M = 2, g[1].batches = 2, g[2].trans_b = false, g[3].trans_a = true, g[4].beta = 1, g[5].K = 12, g[6].ldb = 12;
    g[7].a = p + 8, g[8].b = p + 8, g[9].dtype = g[9].c_dtype = FATTN_F64, g[10].K = 0, g[11].N = 0;
    cr_expect(fattni_cuda_is_row_product(&one, NULL));
    for (int n = 0; n < OTHERS; ++n) cr_expect(!fattni_cuda_is_row_product(&g[n], NULL), "case %d", n);
    for (int n = 0; n < 4; ++n) cr_expect_eq(fattni_cuda_is_row_product(&one, &norms[n]), n < 2, "norm %d", n);
    fattni_cuda_gemm wide = one;
    wide.K = wide.ldb = FATTNI_ROW_PRODUCT_NORM_COLUMNS + 8;
    cr_expect(fattni_cuda_is_row_product(&wide, NULL) && !fattni_cuda_is_row_product(&wide, norms));
    wide.dtype = wide.c_dtype = FATTN_F32, wide.K = wide.ldb = 12; /* F32 packs of 4, a norm's of 8 */
    cr_expect(fattni_cuda_is_row_product(&wide, NULL) && !fattni_cuda_is_row_product(&wide, norms));
}
